"""A RAG model as a folder: transformers' own layout where it can hold everything, else a plain one; safetensors only.

```
config.json, model.safetensors           what `RagTokenForGeneration.from_pretrained` opens, as facebook/rag-token-nq:
question_encoder_tokenizer/              a DPR question encoder and an encoder-decoder, in one file of weights
generator_tokenizer/
bookwheel.json                           settings and form
---
question/  generator/                    all other models: each a folder that `from_pretrained` opens
passage/                                 if the passage encoder was trained as well; answering does not read it
bookwheel.json
```
transformers' layout stores neither pooling nor prompts nor a temperature. A BERT with CLS pooling equals
DPR's question encoder without its projection, so it is written as one.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rag_model.encoders.files import CONFIG, optional_object, read_object
from rag_model.encoders.space import Space
from rag_model.encoders.spec import RECORD_FILE
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.encoders.weights import WEIGHTS, stored_tensors, weight_files
from rag_model.errors import InputError, UsageError
from rag_model.generate.generator import Generator
from rag_model.generate.inputs import Form, PaperForm, form_of_json, form_to_json
from rag_model.generate.load import load_generator
from rag_model.generate.rag import Rag, RagSettings
from rag_model.store.versions.model_parts import PASSAGE

QUESTION: Literal["question"] = "question"
GENERATOR: Literal["generator"] = "generator"
_TOKENIZERS = {QUESTION: "question_encoder_tokenizer", GENERATOR: "generator_tokenizer"}
_CLASSES = {"sequence": "RagSequenceForGeneration", "token": "RagTokenForGeneration"}
_PREFIXES = {QUESTION: ("rag.question_encoder.", "question_encoder."), GENERATOR: ("rag.generator.", "generator.")}


class Kept(Generator, Protocol):
    """A generator that can be saved: every one that `load_generator` returns."""

    @property
    def module(self) -> Any:
        """Return transformers' model."""
        ...

    @property
    def form(self) -> Form:
        """Return how contexts are written."""
        ...

    @property
    def tokenizer(self) -> Any:
        """Return transformers' tokenizer."""
        ...


def save_rag(rag: Rag, folder: Path, asks: Space | None = None) -> None:
    """Write a RAG model to `folder`; `asks`: the space of the passages that its question encoder was trained against.

    If its passage encoder was trained as well, the question encoder belongs to that encoder's space, and `asks` is not
    used.

    Raises:
        UsageError: its question encoder is not a `TrainableEncoder`, or its form is unknown.
    """
    question, generator = rag.question, _kept(rag.generator)
    if not isinstance(question, TrainableEncoder):
        raise UsageError(f"a question encoder of type {type(question).__name__} can't be saved: use TrainableEncoder")
    folder.mkdir(parents=True, exist_ok=True)
    if rag.passage is not None:
        asks = rag.passage.save_passages(folder / PASSAGE)
    if (asking := _as_dpr(rag, question, generator)) is None:
        question.save(folder / QUESTION, asks)
        generator.module.save_pretrained(str(folder / GENERATOR))
        generator.tokenizer.save_pretrained(str(folder / GENERATOR))
    else:
        _save_whole(rag, asking, generator, folder)
        question.save_reading(folder / _TOKENIZERS[QUESTION], asks)
    record = {"settings": asdict(rag.settings), "form": form_to_json(generator.form)}
    (folder / RECORD_FILE).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_rag(folder: Path, device: str | None = None, dtype: str | None = None) -> Rag:
    """Load a folder that `save_rag` wrote, or one like facebook/rag-token-nq or facebook/rag-sequence-nq.

    `device` and `dtype` as in `load_generator`. The question encoder is float32, the precision it was trained in,
    because its vectors are compared with passage vectors. The model is in evaluation mode.

    Raises:
        InputError: a file is missing, pickled or corrupt, or it is not a RAG model.
    """
    record = optional_object(folder / RECORD_FILE)
    if not (folder / CONFIG).is_file():
        if not record:
            raise InputError(f"{folder} holds no RAG model: give a folder with {RECORD_FILE} or {CONFIG}")
        question = TrainableEncoder.load(folder / QUESTION, QUESTION, device=device)
        form, settings = _recorded(record, folder)
        return Rag(question, load_generator(folder / GENERATOR, form, device, dtype), settings).eval()
    config = read_object(folder / CONFIG)
    if config.get("model_type") != "rag":
        raise InputError(
            f"{folder} holds a {config.get('model_type')} model: give the folder of a RAG model, or read a "
            "generator alone with --reader concat"
        )
    with tempfile.TemporaryDirectory(prefix="bookwheel-rag-") as name:
        for part in (QUESTION, GENERATOR):
            _split(folder, config, part, Path(name) / part)
        question = TrainableEncoder.load(Path(name) / QUESTION, QUESTION, device=device)
        form, settings = _recorded(record, folder) if record else (_paper_form(config), _paper_settings(config))
        generator = load_generator(Path(name) / GENERATOR, form, device, dtype)
    question.folder = folder / _TOKENIZERS[QUESTION]  # its tokenizer, and the record of its passage space
    return Rag(question, generator, settings).eval()


def rag_settings(folder: Path) -> RagSettings:
    """Return the settings of a RAG model without loading its weights.

    Raises:
        InputError: a file is missing or corrupt, or it is not a RAG model.
    """
    if record := optional_object(folder / RECORD_FILE):
        return _recorded(record, folder)[1]
    return _paper_settings(read_object(folder / CONFIG))


def _kept(generator: Any) -> Kept:
    kept: Kept = generator
    return kept


def _as_dpr(rag: Rag, question: TrainableEncoder, generator: Kept) -> "transformers.DPRQuestionEncoder | None":
    """Return the question encoder in transformers' layout; None where that layout cannot hold all settings."""
    spec = question.spec
    plain = spec.pooling == "cls" and not spec.normalize and not spec.question_prompt and rag.settings.temperature == 1
    if (
        rag.passage is not None
        or not plain
        or not isinstance(generator.form, PaperForm)
        or not generator.module.config.is_encoder_decoder
    ):
        return None
    if isinstance(question.whole, transformers.DPRQuestionEncoder):
        return question.whole
    if not isinstance(question.whole, transformers.BertModel):
        return None
    values = question.whole.config.to_dict()
    values = {name: value for name, value in values.items() if name not in {"model_type", "architectures"}}
    asking = transformers.DPRQuestionEncoder(transformers.DPRConfig(**values, projection_dim=0))
    state = {name: value for name, value in question.whole.state_dict().items() if not name.startswith("pooler.")}
    asking.question_encoder.bert_model.load_state_dict(state)
    return asking


def _save_whole(rag: Rag, asking: "transformers.DPRQuestionEncoder", generator: Kept, folder: Path) -> None:
    module, form, settings = generator.module, generator.form, rag.settings
    config = transformers.RagConfig.from_question_encoder_generator_configs(
        asking.config,
        module.config,
        n_docs=settings.k,
        label_smoothing=settings.label_smoothing,
        exclude_bos_score=settings.exclude_bos,
        title_sep=form.title_sep,  # type: ignore[attr-defined]
        doc_sep=form.doc_sep,  # type: ignore[attr-defined]
        max_combined_length=form.max_length,
        retrieval_vector_size=rag.question.dim,
    )
    config.generator.prefix = form.prefix or None  # type: ignore[attr-defined]
    kind = getattr(transformers, _CLASSES[settings.kind])
    whole = kind(config=config, question_encoder=asking, generator=module)
    whole.save_pretrained(str(folder))
    generator.tokenizer.save_pretrained(str(folder / _TOKENIZERS[GENERATOR]))


def _split(folder: Path, config: Mapping[str, Any], part: str, dest: Path) -> None:
    """Write the question encoder or the generator of a RAG folder as a separate folder."""
    half = config.get("question_encoder" if part == QUESTION else "generator")
    tokenizer = folder / _TOKENIZERS[part]
    if not isinstance(half, Mapping) or not tokenizer.is_dir():
        raise InputError(f"{folder} is not a complete RAG model: it lacks {part} in its config, or {tokenizer.name}/")
    shutil.copytree(tokenizer, dest)
    if part == QUESTION and half.get("model_type") == "dpr":
        half = {**half, "architectures": ["DPRQuestionEncoder"]}
    (dest / CONFIG).write_text(json.dumps(half), encoding="utf-8")
    save_file(_half_of(folder, _PREFIXES[part]), str(dest / WEIGHTS), {"format": "pt"})


def _half_of(folder: Path, prefixes: tuple[str, ...]) -> dict[str, torch.Tensor]:
    stored_tensors(folder)  # raises an error that names a truncated or pickled file
    found: dict[str, torch.Tensor] = {}
    try:
        for path in (path for path in weight_files(folder) if path.suffix == ".safetensors"):
            with safe_open(str(path), "pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is not a mapping
                    if prefix := next((prefix for prefix in prefixes if name.startswith(prefix)), ""):
                        found[name.removeprefix(prefix)] = file.get_tensor(name)
    except SafetensorError as broken:
        raise InputError(f"weights of {folder} are corrupt ({broken}): fetch the model again") from broken
    return found


def _recorded(record: Mapping[str, Any], folder: Path) -> tuple[Form, RagSettings]:
    try:
        return form_of_json(record["form"]), RagSettings(**record["settings"])
    except (KeyError, TypeError, ValueError, InputError) as broken:
        raise InputError(f"{folder / RECORD_FILE} is corrupt ({broken}): fetch the model again") from broken


def _paper_form(config: Mapping[str, Any]) -> PaperForm:
    default = PaperForm()
    return PaperForm(
        prefix=config["generator"].get("prefix") or "",
        title_sep=config.get("title_sep", default.title_sep),
        doc_sep=config.get("doc_sep", default.doc_sep),
        max_length=config.get("max_combined_length", default.max_length),
    )


def _paper_settings(config: Mapping[str, Any]) -> RagSettings:
    token = "RagTokenForGeneration" in (config.get("architectures") or [])
    return RagSettings(
        kind="token" if token else "sequence",
        k=config.get("n_docs", 5),
        label_smoothing=config.get("label_smoothing", 0.0),
        exclude_bos=config.get("exclude_bos_score", False),
    )
