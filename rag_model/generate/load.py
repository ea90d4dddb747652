"""Load a generator from a Hugging Face folder, a hub name, or a folder with one GGUF file.

The file config.json determines whether the model is an encoder-decoder or decoder-only. The prompt
template is read from the folder. If there is none, an encoder-decoder gets `PaperTemplate`, and a
decoder-only model `InstructionTemplate`, inside the tokenizer's chat template if there is one
(`apply_chat_template`). Only safetensors and GGUF are read, because pickled weights can execute
code.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rag_model.chat_template import TemplateRefusalError, render_chat_template
from rag_model.encoders.architecture import check_gguf_file
from rag_model.encoders.files import CONFIG, TOKENIZER, read_json_object, read_optional_json, resolve_folder
from rag_model.encoders.model import choose_inference_dtype, parse_dtype, resolve_device
from rag_model.encoders.pretrained import load_pretrained, refuse_missing_tensors
from rag_model.encoders.spec import RECORD_FILE
from rag_model.encoders.weights import read_tensor_headers
from rag_model.errors import InputError, UsageError
from rag_model.extras import require
from rag_model.generate.generator import Generator
from rag_model.generate.prompts import (
    DEFAULT_INSTRUCTION,
    InstructionTemplate,
    PaperTemplate,
    PromptTemplate,
    template_from_json,
)
from rag_model.generate.transformer import CausalGenerator, Seq2SeqGenerator
from rag_model.tokenizer import load_with_guard

_NO_LIMIT = 100_000  # maximum input tokens of a model that has no limit itself
# Keys of config.json for the maximum input tokens.
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_ANSWER_CUE = "Answer:"  # last line of the default instruction
# Placeholder for the user message, to determine the text around it in the chat template.
_MESSAGE_MARK = "\N{BLACK STAR}"


def load_generator(
    name: str | Path, template: PromptTemplate | None = None, device: str | None = None, dtype: str | None = None
) -> Generator:
    """Load a generator from a folder or by its hub name, in evaluation mode; call `.module.train()`
    before training it.

    `template` replaces the template of the folder. `device` is a name such as `cpu` or `cuda:1`, by
    default a GPU if there is one, else the CPU. `dtype` is by default the result of
    `choose_inference_dtype`; training needs `float32`.

    Raises:
        InputError: the model is not found, a file is missing, pickled or corrupt, or it is not a
            generator.
        UsageError: this machine has no such device, torch has no such dtype, or a decoder-only
            model is given a template other than `InstructionTemplate`.
        MissingExtraError: the folder holds a GGUF file, and the package `gguf` is not installed.
    """
    transformers = require("transformers", "model")
    folder, resolved_device = resolve_folder(name), resolve_device(device)
    resolved_dtype = parse_dtype(dtype or choose_inference_dtype(resolved_device))
    weight_arguments = _find_weight_arguments(folder)
    config = _load_by_class(folder, transformers.AutoConfig, weight_arguments)
    _check_is_generator(folder, config)
    tokenizer = _load_tokenizer(folder, weight_arguments)
    auto_class = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    module = _load_module(folder, auto_class, {**weight_arguments, "dtype": resolved_dtype}).to(resolved_device).eval()
    chosen_template = template or _read_folder_template(folder, config, tokenizer)
    if config.is_encoder_decoder:
        return _build_seq2seq_generator(folder, module, tokenizer, chosen_template)
    return _build_causal_generator(folder, module, tokenizer, chosen_template)


def load_generator_tokenizer(name: str | Path) -> Any:
    """Load the fast tokenizer of a generator, without its weights.

    Raises:
        InputError: the model is not found, or a file is missing or corrupt.
        MissingExtraError: the folder holds a GGUF file, and the package `gguf` is not installed.
    """
    folder = resolve_folder(name)
    return _load_tokenizer(folder, _find_weight_arguments(folder))


def apply_chat_template(
    tokenizer: Any, template: InstructionTemplate | None = None, system: str = ""
) -> InstructionTemplate:
    """Return a template with the text of the tokenizer's chat template in `before` and `after`.

    `system` is the system message; if the chat template does not support one, it is put at the
    beginning of the user message.

    The default template is `DEFAULT_INSTRUCTION`, whose last word, `Answer:`, begins the model's
    reply, so that a small chat model answers from the passage more often. On 24 questions with the
    gold passage, SmolLM2-135M-Instruct reaches F1 .22 and a loss of 13.5 nats per answer. With only
    the chat template it reaches .17 and 17.8 (answers begin "The answer to this question is:"), and
    with only the instruction .05 and 16.4 (half of the answers are empty).

    Raises:
        UsageError: the chat template does not contain the user message, or refuses it.
        InputError: the chat template cannot be rendered within the limits of time and size.
    """
    prompt = _render_around_message_mark(tokenizer, system)
    prefix, message_mark, suffix = prompt.rpartition(_MESSAGE_MARK)
    if not message_mark or _MESSAGE_MARK in prefix.replace(system, "", 1):
        raise UsageError(
            f"the chat template turns one message into {prompt!r}, which does not contain the message: give a template"
        )
    if template is None:
        instruction = InstructionTemplate(DEFAULT_INSTRUCTION.removesuffix(f"\n{_ANSWER_CUE}"), special=False)
        return replace(instruction, before=prefix, after=suffix + _ANSWER_CUE)
    return replace(template, before=prefix, after=suffix, answer_prefix="", special=False)


def _render_around_message_mark(tokenizer: Any, system: str) -> str:
    """Render the chat template with a system message and a placeholder for the user message."""
    user_message = {"role": "user", "content": _MESSAGE_MARK}
    if system:
        # Some chat templates raise an error for a system message, and some omit it.
        with suppress(TemplateRefusalError):
            prompt = _render_messages(tokenizer, [{"role": "system", "content": system}, user_message])
            if system in prompt:
                return prompt
        user_message["content"] = f"{system}\n\n{_MESSAGE_MARK}"
    return _render_messages(tokenizer, [user_message])


def _render_messages(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str:
    return render_chat_template(tokenizer.get_chat_template(), messages, tokenizer.special_tokens_map)


def _find_weight_arguments(folder: Path) -> dict[str, Any]:
    """Check that the weights are complete and not pickled; return the arguments with which
    transformers finds them.
    """
    files = sorted(folder.glob("*.gguf"))
    if files and not (folder / CONFIG).is_file():
        if len(files) > 1:
            raise InputError(f"model {folder} has {len(files)} GGUF files: move the one to read into a separate folder")
        for package in ("gguf", "accelerate"):
            require(package, "train")
        check_gguf_file(files[0])
        return {"gguf_file": files[0].name}
    read_json_object(folder / CONFIG)
    read_tensor_headers(folder)
    return {}


def _load_by_class(folder: Path, auto_class: Any, arguments: dict[str, Any]) -> Any:
    class_advice = "give an encoder-decoder or a decoder-only model"
    return load_pretrained(auto_class, folder, "generator", class_advice, **arguments)


def _check_is_generator(folder: Path, config: Any) -> None:
    architectures = config.architectures or []
    class_names = require("transformers.models.auto.modeling_auto", "model").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if architectures and not config.is_encoder_decoder and not set(architectures) & set(class_names.values()):
        raise InputError(
            f"model {folder} is a {architectures[0]}, which cannot generate: give an encoder-decoder "
            "or a decoder-only model"
        )


def _load_tokenizer(folder: Path, weight_arguments: dict[str, Any]) -> Any:
    load_by_class = partial(_load_by_class, folder, require("transformers", "model").AutoTokenizer, weight_arguments)
    tokenizer = load_with_guard(folder / TOKENIZER, load_by_class)
    if not tokenizer.is_fast:
        raise InputError(f"generator {folder} has no fast tokenizer: save one with `AutoTokenizer.save_pretrained`")
    if tokenizer.eos_token_id is None:
        raise InputError(f"the tokenizer of generator {folder} has no eos_token, so answers would never end: set one")
    return tokenizer


def _load_module(folder: Path, auto_class: Any, arguments: dict[str, Any]) -> Any:
    format_argument = {} if "gguf_file" in arguments else {"use_safetensors": True}
    module, loading_info = _load_by_class(
        folder, auto_class, {**arguments, **format_argument, "output_loading_info": True}
    )
    refuse_missing_tensors("generator", folder, sorted(loading_info["missing_keys"]))
    # transformers has converted the weights to floats, which can be trained and saved
    if "gguf_file" in arguments:
        module.hf_quantizer = None
        if hasattr(module.config, "quantization_config"):
            del module.config.quantization_config
    return module


def _read_folder_template(folder: Path, config: Any, tokenizer: Any) -> PromptTemplate:
    if recorded_template := read_optional_json(folder / RECORD_FILE).get("form"):
        return template_from_json(recorded_template)
    if config.is_encoder_decoder:
        return PaperTemplate()
    return apply_chat_template(tokenizer) if tokenizer.chat_template else InstructionTemplate()


def _build_seq2seq_generator(folder: Path, module: Any, tokenizer: Any, template: PromptTemplate) -> Generator:
    start_token_ids = (module.config.decoder_start_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
    start_token = next((token_id for token_id in start_token_ids if token_id is not None), None)
    if start_token is None:
        raise InputError(f"generator {folder} has no decoder_start_token_id: set it in the model's config")
    empty_text_ids = tokenizer("")["input_ids"]
    first_token = empty_text_ids[0] if len(empty_text_ids) > 1 else None
    return Seq2SeqGenerator(
        module,
        tokenizer,
        tokenizer.eos_token_id,
        _read_end_tokens(module, tokenizer),
        template,
        start_token,
        first_token,
        _choose_pad_token(tokenizer),
        _read_max_tokens(module.config),
    )


def _build_causal_generator(folder: Path, module: Any, tokenizer: Any, template: PromptTemplate) -> Generator:
    if not isinstance(template, InstructionTemplate):
        raise UsageError(f"generator {folder} is decoder-only: give an InstructionTemplate")
    max_tokens = _read_max_tokens(module.config)
    if template.max_answer >= max_tokens:
        raise UsageError(
            f"max_answer {template.max_answer} leaves no room for a prompt in generator {folder}: use a smaller value"
        )
    return CausalGenerator(
        module,
        tokenizer,
        tokenizer.eos_token_id,
        _read_end_tokens(module, tokenizer),
        template,
        _choose_pad_token(tokenizer),
        max_tokens,
    )


def _read_end_tokens(module: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokenizer's end token, and those at which transformers' `generate` stops, such as
    the token after each message of a chat.
    """
    token_ids = module.generation_config.eos_token_id
    token_ids = token_ids if isinstance(token_ids, list) else [token_ids]
    return frozenset({tokenizer.eos_token_id, *(token_id for token_id in token_ids if token_id is not None)})


def _choose_pad_token(tokenizer: Any) -> int:
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def _read_max_tokens(config: Any) -> int:
    """Return the maximum tokens of an input; models with relative positions, such as T5, need no
    limit.
    """
    if hasattr(config, "relative_attention_num_buckets"):
        return _NO_LIMIT
    return min((int(length) for name in _LENGTH_KEYS if (length := getattr(config, name, None))), default=_NO_LIMIT)
