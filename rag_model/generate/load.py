"""Load a generator: a Hugging Face folder, a hub name, or a folder with one GGUF file.

The family is read from the config. The form is the one saved in the folder, else the paper's for an
encoder-decoder, else a prompt, in the tokenizer's chat template if it has one (`chat_form`). Only safetensors and
GGUF are read, because pickled weights can execute code.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from jinja2 import TemplateError
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rag_model.encoders.files import CONFIG, TOKENIZER, optional_object, read_object
from rag_model.encoders.model import device_named
from rag_model.encoders.pretrained import load_pretrained
from rag_model.encoders.resolve import resolve_folder
from rag_model.encoders.spec import RECORD_FILE
from rag_model.encoders.weights import stored_tensors
from rag_model.errors import InputError, UsageError
from rag_model.extras import require
from rag_model.generate.causal import CausalGenerator
from rag_model.generate.generator import Generator
from rag_model.generate.inputs import PROMPT, Form, PaperForm, PromptForm, form_of_json
from rag_model.generate.seq2seq import Seq2SeqGenerator
from rag_model.tokenizer import check_patterns

_UNBOUNDED = 100_000  # tokens; tokenizers write 1e30 for "no limit"
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_CUE = "Answer:"  # the prompt's last word
_MARK = "\N{BLACK STAR}"  # replaces the user's message to find the text of a chat template around it


def load_generator(
    name: str | Path, form: Form | None = None, device: str | None = None, dtype: str | None = None
) -> Generator:
    """Load the generator in folder `name`, or of that hub name, in evaluation mode; train it after `.module.train()`.

    `form` replaces the folder's own. `device` (`cpu`, `cuda:1`): by default a GPU if there is one, else the CPU.
    `dtype`: by default float32, as training needs.

    Raises:
        InputError: it is not found, a file is missing, pickled or corrupt, or it is not a generator.
        UsageError: this machine has no such device, torch has no such dtype, or the form belongs to the other family.
        MissingExtraError: it is a GGUF file, and the package that reads GGUF is not installed.
    """
    folder, where = resolve_folder(name), device_named(device)
    source = _source(folder)
    config = _opened(folder, transformers.AutoConfig, source)
    _check_kind(folder, config)
    tokenizer = _tokenizer(folder, source)
    family = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    module = _module(folder, family, {**source, "dtype": _dtype(dtype)}).to(where).eval()
    chosen = form or _own_form(folder, config, tokenizer)
    if config.is_encoder_decoder:
        return _seq2seq(folder, module, tokenizer, chosen)
    return _causal(folder, module, tokenizer, chosen)


def generator_tokenizer(name: str | Path) -> Any:
    """Load the fast tokenizer of a generator, without its weights.

    Raises:
        InputError: it is not found, or a file is missing or corrupt.
        MissingExtraError: it is a GGUF file, and the package that reads GGUF is not installed.
    """
    folder = resolve_folder(name)
    return _tokenizer(folder, _source(folder))


def chat_form(tokenizer: Any, form: PromptForm | None = None, system: str = "") -> PromptForm:
    """Return `form` inside the chat template of `tokenizer`: the text before and after the user's message.

    `system` is the system message; where the template has no place for one, it begins the user's message.

    Without a form it is `PROMPT`, whose last word, `Answer:`, begins the model's reply: a small chat model then
    answers from the passage more often. SmolLM2-135M-Instruct with the gold passage, 24 questions: F1 .22 and 13.5 nats
    per answer; with the template alone .17 and 17.8 (it begins "The answer to this question is:"), with the prompt
    alone .05 and 16.4 (half of the answers are empty).

    Raises:
        UsageError: the template leaves no place for a prompt.
    """
    whole = _rendered(tokenizer, system)
    before, mark, after = whole.rpartition(_MARK)
    if not mark or _MARK in before.replace(system, "", 1):
        raise UsageError(
            f"the chat template turns one message into {whole!r}, which has no place for a prompt: give a form"
        )
    if form is None:
        asked = PromptForm(PROMPT.removesuffix(f"\n{_CUE}"), special=False)
        return replace(asked, before=before, after=after + _CUE)
    return replace(form, before=before, after=after, answer_prefix="", special=False)


def _rendered(tokenizer: Any, system: str) -> str:
    """Return the chat template around a system message and a mark for the user's."""
    asked = {"role": "user", "content": _MARK}
    if system:
        with suppress(TemplateError):  # some templates refuse a system message, and some leave it out
            whole = _applied(tokenizer, [{"role": "system", "content": system}, asked])
            if system in whole:
                return whole
        asked["content"] = f"{system}\n\n{_MARK}"
    return _applied(tokenizer, [asked])


def _applied(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str:
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def _source(folder: Path) -> dict[str, Any]:
    """Return the arguments with which transformers reads the weights; check that they are complete and not pickled."""
    files = sorted(folder.glob("*.gguf"))
    if files and not (folder / CONFIG).is_file():
        if len(files) > 1:
            raise InputError(f"model {folder} has {len(files)} GGUF files: move the one to read into a separate folder")
        for module in ("gguf", "accelerate"):
            require(module, "train")
        return {"gguf_file": files[0].name}
    read_object(folder / CONFIG)
    stored_tensors(folder)
    return {}


def _opened(folder: Path, kind: Any, given: dict[str, Any]) -> Any:
    advice = "give an encoder-decoder or a decoder-only model"
    return load_pretrained(kind, folder, "generator", advice, **given)


def _check_kind(folder: Path, config: Any) -> None:
    kinds = config.architectures or []
    if kinds and not config.is_encoder_decoder and not set(kinds) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        raise InputError(
            f"generator {folder} is a {kinds[0]}, not a generator: give an encoder-decoder or a decoder-only model"
        )


def _tokenizer(folder: Path, source: dict[str, Any]) -> Any:
    if (folder / TOKENIZER).is_file():
        check_patterns(folder / TOKENIZER)
    tokenizer = _opened(folder, transformers.AutoTokenizer, source)
    if not tokenizer.is_fast:
        raise InputError(f"generator {folder} has no fast tokenizer: save one with `AutoTokenizer.save_pretrained`")
    if tokenizer.eos_token_id is None:
        raise InputError(f"the tokenizer of generator {folder} names no eos_token, so no answer would end: set one")
    return tokenizer


def _module(folder: Path, family: Any, given: dict[str, Any]) -> Any:
    weights = {} if "gguf_file" in given else {"use_safetensors": True}
    module, loading = _opened(folder, family, {**given, **weights, "output_loading_info": True})
    if missing := sorted(loading["missing_keys"]):
        raise InputError(f"generator {folder} lacks {len(missing)} tensors, the first is {missing[0]}: fetch it again")
    if "gguf_file" in given:  # its values are now plain floats, which can be trained and saved
        module.hf_quantizer = None
        if hasattr(module.config, "quantization_config"):
            del module.config.quantization_config
    return module


def _dtype(name: str | None) -> torch.dtype:
    found = getattr(torch, name or "float32", None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"dtype {name!r} is unknown: use float32, bfloat16 or float16")
    return found


def _own_form(folder: Path, config: Any, tokenizer: Any) -> Form:
    if recorded := optional_object(folder / RECORD_FILE).get("form"):
        return form_of_json(recorded)
    if config.is_encoder_decoder:
        return PaperForm()
    return chat_form(tokenizer) if tokenizer.chat_template else PromptForm()


def _seq2seq(folder: Path, module: Any, tokenizer: Any, form: Form) -> Generator:
    starts = (module.config.decoder_start_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
    start = next((token for token in starts if token is not None), None)
    if start is None:
        raise InputError(f"generator {folder} names no decoder_start_token_id: set it in the model's config")
    special = tokenizer("")["input_ids"]
    first = special[0] if len(special) > 1 else None
    end = tokenizer.eos_token_id
    return Seq2SeqGenerator(module, tokenizer, form, start, first, end, _pad(tokenizer), _longest(module.config))


def _causal(folder: Path, module: Any, tokenizer: Any, form: Form) -> Generator:
    if not isinstance(form, PromptForm):
        raise UsageError(f"generator {folder} is decoder-only, which reads a prompt: give a PromptForm")
    longest = _longest(module.config)
    if form.max_answer >= longest:
        raise UsageError(f"max_answer {form.max_answer} leaves no room for a prompt in generator {folder}: use less")
    return CausalGenerator(module, tokenizer, form, tokenizer.eos_token_id, _pad(tokenizer), longest)


def _pad(tokenizer: Any) -> int:
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def _longest(config: Any) -> int:
    """Return the maximum tokens that the model reads; with relative positions, as in T5, there is no limit."""
    if hasattr(config, "relative_attention_num_buckets"):
        return _UNBOUNDED
    return min((int(limit) for name in _LENGTHS if (limit := getattr(config, name, None))), default=_UNBOUNDED)
