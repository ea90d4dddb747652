"""The settings of a sentence-transformers folder: pooling, normalisation, length and prompts.

Both layouts are read: `pooling_mode_mean_tokens: true` (to version 5) and `pooling_mode: "mean"` (from 6). Of a sparse
encoder (`SparseEncoder`) too: `MLMTransformer` (to version 5.3) and `Transformer`, followed by `SpladePooling`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rag_model.encoders.files import longest_input, optional_object, read_json, read_object
from rag_model.errors import InputError

MODULES = "modules.json"
SPLADE = "SpladePooling"
_SUPPORTED = ("Transformer", "Pooling", "Normalize")
_SPARSE = ("Transformer", "MLMTransformer", SPLADE)
_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "cls": "cls",
    "mean": "mean",
    "lasttoken": "last",
}
_PASSAGE_PROMPTS = ("document", "passage", "corpus")  # in the order of its `encode_document`
_QUESTION_PROMPTS = ("query",)


def read_sentence_transformers(folder: Path) -> dict[str, Any]:
    """Return the fields of `EncoderSpec` that the folder sets.

    Raises:
        InputError: a file is missing or corrupt, or the model has an unsupported part.
    """
    modules = supported(folder, _SUPPORTED)
    if "Pooling" not in modules or modules.get("Transformer") != "":
        raise InputError(f"encoder {folder} has no Transformer in its top folder, or no Pooling: use one that has both")
    return {
        "pooling": _pooling(folder / modules["Pooling"] / "config.json"),
        "normalize": "Normalize" in modules,
        "max_length": _max_length(folder),
        **prompts_of(folder),
    }


def has_splade_pooling(folder: Path) -> bool:
    """Whether a folder is one of a sparse encoder, by its modules.

    Raises:
        InputError: `modules.json` is damaged.
    """
    return (folder / MODULES).is_file() and SPLADE in modules_of(folder)


def read_splade(folder: Path) -> dict[str, Any]:
    """Return the fields of `SparseSpec` that the folder of a sparse encoder sets.

    Raises:
        InputError: a file is missing or corrupt, or the model has an unsupported part.
    """
    modules = supported(folder, _SPARSE)
    if modules.get("Transformer", modules.get("MLMTransformer")) != "":
        raise InputError(f"encoder {folder} has no Transformer in its top folder: use one that has")
    told = read_object(folder / modules[SPLADE] / "config.json")
    given = {"pooling": told.get("pooling_strategy"), "activation": told.get("activation_function")}
    return {name: value for name, value in given.items() if value is not None} | {
        "max_length": _max_length(folder),
        **prompts_of(folder),
    }


def prompts_of(folder: Path) -> dict[str, str]:
    """Return the prompts of passages and questions, as fields of a spec.

    Raises:
        InputError: the file is damaged.
    """
    prompts = optional_object(folder / "config_sentence_transformers.json")
    return {
        "passage_prompt": _prompt(prompts, _PASSAGE_PROMPTS),
        "question_prompt": _prompt(prompts, _QUESTION_PROMPTS),
    }


def modules_of(folder: Path) -> dict[str, str]:
    """Return the paths of a folder's modules, by the last word of their types.

    Raises:
        InputError: `modules.json` is damaged.
    """
    listed = read_json(folder / MODULES)
    try:
        return {str(module["type"]).rpartition(".")[2]: str(module["path"]) for module in listed}
    except (TypeError, KeyError) as broken:
        raise InputError(f"encoder file {folder / MODULES} is corrupt: fetch the model again") from broken


def supported(folder: Path, known: Sequence[str]) -> dict[str, str]:
    """Return what `modules_of` does, if all modules are `known`.

    Raises:
        InputError: one is not, or `modules.json` is damaged.
    """
    modules = modules_of(folder)
    if unknown := sorted(modules.keys() - {*known}):
        raise InputError(
            f"encoder {folder} has a {unknown[0]} module, which is not supported: "
            f"use a model of {', '.join(known[:-1])} and {known[-1]}"
        )
    return modules


def _pooling(path: Path) -> str:
    config = read_object(path)
    named = config.get("pooling_mode")
    modes = [name for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
    modes += [named] if isinstance(named, str) else list(named or [])
    if len(modes) != 1 or modes[0] not in _POOLING:
        raise InputError(
            f"encoder file {path} asks for pooling {'+'.join(modes) or 'none'}, which is not supported: "
            "use a model that pools by cls, mean or last token"
        )
    if config.get("include_prompt") is False:
        raise InputError(f"encoder file {path} pools without the prompt, which is not supported: use another model")
    return _POOLING[modes[0]]


def _max_length(folder: Path) -> int:
    given = optional_object(folder / "sentence_bert_config.json").get("max_seq_length")
    return min(int(given or longest_input(folder)), longest_input(folder))


def _prompt(config: Mapping[str, Any], names: tuple[str, ...]) -> str:
    prompts = config.get("prompts") or {}
    given = [prompts.get(name) for name in (*names, config.get("default_prompt_name"))]
    return next((str(prompt) for prompt in given if prompt), "")
