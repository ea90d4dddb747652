"""Reading the JSON files of an encoder folder."""

from pathlib import Path
from typing import Any

from rag_model.errors import InputError
from rag_model.json_text import parse_json

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
_DEFAULT_MAX_LENGTH = 512  # tokens, if no file names a limit
_BEHIND_PADDING = frozenset(("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer"))
_UNBOUNDED = 100_000  # tokens; tokenizers write 1e30 for "no limit"


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object of an encoder folder.

    Raises:
        InputError: the file is missing, not JSON, or not an object.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise InputError(f"model file {path} is corrupt (not a JSON object): fetch the model again")
    return value


def read_json(path: Path) -> Any:
    """Read a JSON file of an encoder folder.

    Raises:
        InputError: the file is missing or not JSON.
    """
    try:
        return parse_json(path.read_bytes())
    except FileNotFoundError as missing:
        raise InputError(
            f"model {path.parent} has no {path.name}: give the folder of a Hugging Face model"
        ) from missing
    except (ValueError, OSError) as broken:
        raise InputError(f"model file {path} is corrupt ({broken}): fetch the model again") from broken


def optional_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; return an empty one if there is no such file."""
    return read_object(path) if path.is_file() else {}


def longest_input(folder: Path) -> int:
    """Return how many tokens the model of `folder` can read: the smallest limit that its files name, else 512."""
    limits = [
        position_limit(folder),
        optional_object(folder / "tokenizer_config.json").get("model_max_length"),
    ]
    return min((int(limit) for limit in limits if limit and limit < _UNBOUNDED), default=_DEFAULT_MAX_LENGTH)


def position_limit(folder: Path) -> int | None:
    """Return how many tokens the positions of the model of `folder` are enough for; None: its config names no limit.

    RoBERTa's begin behind the padding's (Liu et al. 2019), so that 514 positions are those of 512 tokens.
    """
    config = optional_object(folder / CONFIG)
    limit = config.get("max_position_embeddings")
    if not limit or config.get("model_type") not in _BEHIND_PADDING:
        return limit or None
    padding = config.get("pad_token_id")
    return max(1, int(limit) - (padding if isinstance(padding, int) else 1) - 1)


def vector_length(folder: Path) -> int:
    """Return the length of the vectors of the model in `folder`.

    Raises:
        InputError: its config names none.
    """
    config = read_object(folder / CONFIG)
    for key in ("projection_dim", "hidden_size", "dim", "d_model", "n_embd"):
        if isinstance(length := config.get(key), int) and length > 0:
            return length
    raise InputError(f"encoder file {folder / CONFIG} names no hidden_size: give the folder of a bi-encoder")
