"""Save a RAG model to a folder and load it, with safetensors only; find a model by its name.

```
config.json, model.safetensors  transformers' layout, as in facebook/rag-token-nq: a DPR question
question_encoder_tokenizer/     encoder and an encoder-decoder in one weight file, which
generator_tokenizer/            `RagTokenForGeneration.from_pretrained` opens
bookwheel.json                  settings and prompt template
---
question/  generator/           all other models: two folders that `from_pretrained` opens
passage/                        the passage encoder if it was trained too (unused for answers)
bookwheel.json                  settings and prompt template
```
transformers' layout stores neither pooling nor prompts nor a temperature. A BERT with CLS pooling
computes the same as DPR's question encoder without a projection, so it is saved as one.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rag_model.encoders.encoder import read_passage_space
from rag_model.encoders.files import CONFIG, find_hub_name, read_json_object, read_optional_json, resolve_folder
from rag_model.encoders.space import Space, check_same_space
from rag_model.encoders.spec import RECORD_FILE
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.encoders.weights import WEIGHTS, list_weight_files, read_tensor_headers
from rag_model.errors import InputError, UsageError
from rag_model.extras import require
from rag_model.generate.load import load_generator
from rag_model.generate.prompts import PaperTemplate, PromptTemplate, template_from_json, template_to_json
from rag_model.generate.rag import Rag, RagSettings
from rag_model.generate.transformer import TransformersGenerator
from rag_model.process import temporary_folder
from rag_model.store.store import MODEL_PREFIX, Store
from rag_model.store.versions.model_manifest import GENERATOR, PASSAGE, detect_model_parts

if TYPE_CHECKING:
    from transformers import DPRQuestionEncoder

QUESTION: Literal["question"] = "question"
_TOKENIZER_FOLDERS = {QUESTION: "question_encoder_tokenizer", GENERATOR: "generator_tokenizer"}
_RAG_CLASSES = {"sequence": "RagSequenceForGeneration", "token": "RagTokenForGeneration"}
# prefixes of tensor names in the weight files of transformers' RAG classes
_PREFIXES = {QUESTION: ("rag.question_encoder.", "question_encoder."), GENERATOR: ("rag.generator.", "generator.")}


def save_rag(rag: Rag, folder: Path, target_space: Space | None = None) -> None:
    """Write a RAG model to `folder`.

    `target_space` is the space of the passage vectors with which the question encoder was trained.
    If the passage encoder was trained too, the space of that encoder is recorded instead.

    Raises:
        UsageError: the model's question encoder is not a `TrainableEncoder`.
    """
    encoder, generator = rag.question, cast(TransformersGenerator, rag.generator)
    if not isinstance(encoder, TrainableEncoder):
        raise UsageError(f"a question encoder of type {type(encoder).__name__} cannot be saved: use TrainableEncoder")
    folder.mkdir(parents=True, exist_ok=True)
    if rag.passage is not None:
        target_space = rag.passage.save_passage_encoder(folder / PASSAGE)
    if (dpr_encoder := _convert_to_dpr(rag, encoder, generator)) is None:
        encoder.save(folder / QUESTION, target_space)
        generator.module.save_pretrained(str(folder / GENERATOR))
        generator.tokenizer.save_pretrained(str(folder / GENERATOR))
    else:
        _save_transformers_layout(rag, dpr_encoder, generator, folder)
        encoder.save_tokenizer_and_spec(folder / _TOKENIZER_FOLDERS[QUESTION], target_space)
    record = {"settings": asdict(rag.settings), "form": template_to_json(generator.prompt_template)}
    (folder / RECORD_FILE).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_rag(folder: Path, device: str | None = None, dtype: str | None = None) -> Rag:
    """Load a folder that `save_rag` wrote, or a model such as facebook/rag-token-nq.

    For `device` and `dtype`, see `load_generator`. The question encoder is always float32, as in
    training, because its vectors are compared with passage vectors. The model is in evaluation
    mode.

    Raises:
        InputError: a file is missing, pickled or corrupt, or it is not a RAG model.
    """
    record = read_optional_json(folder / RECORD_FILE)
    if not (folder / CONFIG).is_file():
        if not record:
            raise InputError(f"{folder} contains no RAG model: give a folder with {RECORD_FILE} or {CONFIG}")
        question = TrainableEncoder.load(folder / QUESTION, QUESTION, device=device)
        prompt_template, settings = _parse_record(record, folder)
        return Rag(question, load_generator(folder / GENERATOR, prompt_template, device, dtype), settings).eval()
    config = read_json_object(folder / CONFIG)
    if config.get("model_type") != "rag":
        raise InputError(
            f"{folder} contains a {config.get('model_type')} model: give the folder of a RAG "
            "model, or read a generator alone with --reader concat"
        )
    with temporary_folder("rag") as parts_folder:
        for model_part in (QUESTION, GENERATOR):
            _extract_sub_model(folder, config, model_part, parts_folder / model_part)
        question = TrainableEncoder.load(parts_folder / QUESTION, QUESTION, device=device)
        prompt_template, settings = (
            _parse_record(record, folder) if record else (_read_paper_template(config), _read_paper_settings(config))
        )
        generator = load_generator(parts_folder / GENERATOR, prompt_template, device, dtype)
    # The encoder was loaded from `parts_folder`, which is deleted now. This folder has its
    # tokenizer and the record of the passage space.
    question.folder = folder / _TOKENIZER_FOLDERS[QUESTION]
    return Rag(question, generator, settings).eval()


def is_rag_folder(folder: Path) -> bool:
    """Return whether a folder contains a RAG model instead of only a generator."""
    has_settings = "settings" in read_optional_json(folder / RECORD_FILE)
    return has_settings or read_optional_json(folder / CONFIG).get("model_type") == "rag"


def read_rag_settings(folder: Path) -> RagSettings:
    """Read the settings of a RAG model without loading its weights.

    Raises:
        InputError: a file is missing or corrupt, or it is not a RAG model.
    """
    if record := read_optional_json(folder / RECORD_FILE):
        return _parse_record(record, folder)[1]
    return _read_paper_settings(read_json_object(folder / CONFIG))


def _convert_to_dpr(
    rag: Rag, question: TrainableEncoder, generator: TransformersGenerator
) -> "DPRQuestionEncoder | None":
    """Return the question encoder as an object of DPR's class; None if transformers' layout cannot
    store all settings.
    """
    spec = question.spec
    fits_dpr = (
        spec.pooling == "cls"
        and not (spec.normalize or spec.truncate_dim or spec.question_prompt)
        and rag.settings.temperature == 1
    )
    if (
        rag.passage is not None
        or not fits_dpr
        or not isinstance(generator.prompt_template, PaperTemplate)
        or not generator.module.config.is_encoder_decoder
    ):
        return None
    transformers = require("transformers", "model")
    if isinstance(question.whole, transformers.DPRQuestionEncoder):
        return cast("DPRQuestionEncoder", question.whole)
    if not isinstance(question.whole, transformers.BertModel):
        return None
    config = question.whole.config.to_dict()
    config = {name: setting for name, setting in config.items() if name not in {"model_type", "architectures"}}
    dpr_encoder = transformers.DPRQuestionEncoder(transformers.DPRConfig(**config, projection_dim=0))
    tensors = {name: tensor for name, tensor in question.whole.state_dict().items() if not name.startswith("pooler.")}
    dpr_encoder.question_encoder.bert_model.load_state_dict(tensors)
    return cast("DPRQuestionEncoder", dpr_encoder)


def _save_transformers_layout(
    rag: Rag, dpr_encoder: "DPRQuestionEncoder", generator: TransformersGenerator, folder: Path
) -> None:
    module, prompt_template, settings = generator.module, generator.prompt_template, rag.settings
    transformers = require("transformers", "model")
    config = transformers.RagConfig.from_question_encoder_generator_configs(
        dpr_encoder.config,
        module.config,
        n_docs=settings.k,
        label_smoothing=settings.label_smoothing,
        exclude_bos_score=settings.exclude_bos,
        title_sep=prompt_template.title_sep,  # type: ignore[attr-defined]
        doc_sep=prompt_template.doc_sep,  # type: ignore[attr-defined]
        max_combined_length=prompt_template.max_length,
        retrieval_vector_size=rag.question.dim,
    )
    config.generator.prefix = prompt_template.prefix or None  # type: ignore[attr-defined]
    rag_class = getattr(transformers, _RAG_CLASSES[settings.kind])
    rag_model = rag_class(config=config, question_encoder=dpr_encoder, generator=module)
    rag_model.save_pretrained(str(folder))
    generator.tokenizer.save_pretrained(str(folder / _TOKENIZER_FOLDERS[GENERATOR]))


def _extract_sub_model(folder: Path, config: Mapping[str, Any], part: str, dest: Path) -> None:
    """Write the question encoder or the generator of a RAG folder to a separate folder."""
    sub_config = config.get("question_encoder" if part == QUESTION else "generator")
    tokenizer = folder / _TOKENIZER_FOLDERS[part]
    if not isinstance(sub_config, Mapping) or not tokenizer.is_dir():
        raise InputError(f"{folder} is not a complete RAG model: it lacks {part} in its config, or {tokenizer.name}/")
    shutil.copytree(tokenizer, dest)
    if part == QUESTION and sub_config.get("model_type") == "dpr":
        sub_config = {**sub_config, "architectures": ["DPRQuestionEncoder"]}
    (dest / CONFIG).write_text(json.dumps(sub_config), encoding="utf-8")
    save_file(_read_part_tensors(folder, _PREFIXES[part]), str(dest / WEIGHTS), {"format": "pt"})


def _read_part_tensors(folder: Path, prefixes: tuple[str, ...]) -> dict[str, torch.Tensor]:
    read_tensor_headers(folder)  # checks that no file is truncated or pickled
    tensors: dict[str, torch.Tensor] = {}
    try:
        for path in (path for path in list_weight_files(folder) if path.suffix == ".safetensors"):
            with safe_open(str(path), "pt") as weights_file:
                for name in weights_file.keys():  # noqa: SIM118 - it is not a mapping
                    if prefix := next((prefix for prefix in prefixes if name.startswith(prefix)), ""):
                        tensors[name.removeprefix(prefix)] = weights_file.get_tensor(name)
    except SafetensorError as error:
        raise InputError(f"weights of {folder} are corrupt ({error}): fetch them again") from error
    return tensors


def _parse_record(record: Mapping[str, Any], folder: Path) -> tuple[PromptTemplate, RagSettings]:
    try:
        return template_from_json(record["form"]), RagSettings(**record["settings"])
    except (KeyError, TypeError, ValueError, InputError) as error:
        raise InputError(f"{folder / RECORD_FILE} is corrupt ({error}): fetch it again") from error


def _read_paper_template(config: Mapping[str, Any]) -> PaperTemplate:
    default_template = PaperTemplate()
    return PaperTemplate(
        prefix=config["generator"].get("prefix") or "",
        title_sep=config.get("title_sep", default_template.title_sep),
        doc_sep=config.get("doc_sep", default_template.doc_sep),
        max_length=config.get("max_combined_length", default_template.max_length),
    )


def _read_paper_settings(config: Mapping[str, Any]) -> RagSettings:
    is_token_model = "RagTokenForGeneration" in (config.get("architectures") or [])
    return RagSettings(
        kind="token" if is_token_model else "sequence",
        k=config.get("n_docs", 5),
        label_smoothing=config.get("label_smoothing", 0.0),
        exclude_bos=config.get("exclude_bos_score", False),
    )


def resolve_rag_id(store: Store, model: str) -> str:
    """Return the id of a RAG model: its id in the store, the absolute path of a folder, or
    `NAME@COMMIT` for a hub name.

    Raises:
        InputError: `model` is the path of a folder that does not exist, or the hub does not have
            it.
        StoreError: the store has no such model.
        UsageError: the model has no generator.
    """
    if model and Path(model).is_dir():
        return str(Path(model).resolve())
    if "/" in model:  # a name with a slash is a hub name, because names in a store have no slash
        return find_hub_name(resolve_folder(model))
    model_id = store.models.resolve_trusted(model.removeprefix(MODEL_PREFIX))
    content = store.models.get(model_id).content
    if GENERATOR not in detect_model_parts(content.files):
        raise UsageError(f"model {model} is a {content.kind}, which cannot generate answers: give a RAG model")
    return model_id


def get_rag_folder(store: Store | None, model_id: str) -> Path:
    """Return the folder of the model with an id that `resolve_rag_id` returned; see
    `get_model_folder`.

    Raises:
        InputError: the hub does not have the model.
        StoreError: a file of the model is missing or damaged.
    """
    return resolve_folder(model_id) if store is None or "/" in model_id else store.get_model_folder(model_id)


def load_rag_by_id(store: Store | None, model_id: str, passage_encoder: str | None = None) -> Rag:
    """Load the model with an id that `resolve_rag_id` returned; a folder needs no store.

    `passage_encoder` names the passage encoder with which the question encoder was trained. Models
    that were trained with other programs do not record it, and it cannot be derived from the
    weights. If the model records its passage encoder, that must have the same vector space.

    Raises:
        StoreError: a file of the model is missing or damaged.
        InputError: the model is incomplete or corrupt.
        RefusedError: the passage space that the model records is not the space of
            `passage_encoder`.
    """
    rag = load_rag(get_rag_folder(store, model_id))
    if passage_encoder is not None:
        question_encoder: Any = rag.question
        question_encoder.target_space = read_passage_space(passage_encoder)
        check_same_space(question_encoder.space(), question_encoder.target_space)
    return rag
