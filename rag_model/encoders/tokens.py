"""Text to token ids, by the model's fast tokenizer: no padding, cut at `max_length`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rag_model.errors import InputError
from rag_model.extras import require

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TokenIds = npt.NDArray[np.int32]


def load_tokenizer(folder: Path, max_length: int) -> "Tokenizer":
    """Load the fast tokenizer of `folder`, cutting at `max_length` tokens with special tokens, not padding.

    Raises:
        InputError: the tokenizer files are missing or corrupt.
    """
    try:
        tokenizer = _from_json(folder) if (folder / "tokenizer.json").is_file() else _converted(folder)
    except Exception as broken:  # tokenizers raises bare Exception
        raise InputError(
            f"the tokenizer of encoder {folder} can not be read ({broken}): fetch the model again"
        ) from broken
    tokenizer.enable_truncation(max_length)
    tokenizer.no_padding()
    return tokenizer


def tokenize(tokenizer: "Tokenizer", inputs: Sequence[str | tuple[str, str]]) -> list[TokenIds]:
    """Return the token ids of each input, special tokens included, in order."""
    return [np.array(encoding.ids, np.int32) for encoding in tokenizer.encode_batch_fast(list(inputs))]


def _from_json(folder: Path) -> "Tokenizer":
    tokenizer: Tokenizer = require("tokenizers", "model").Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer


def _converted(folder: Path) -> "Tokenizer":
    slow = require("transformers", "model").AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    tokenizer: Tokenizer = slow.backend_tokenizer
    return tokenizer
