"""Text to token ids by the model's fast tokenizer: cut at `max_length`, not padded.

If there is a `tokenizer.json`, only it is used, so the digest covers the rules that are used.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rag_model.encoders.files import TOKENIZER, position_limit
from rag_model.encoders.space import tokenizer_files
from rag_model.encoders.spec import TextInput
from rag_model.errors import BookwheelError, InputError
from rag_model.extras import require
from rag_model.tokenizer import load_tokenizer_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_AT_ONCE = 256  # inputs; the tokenizer's result takes 20 times the memory of the ids
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "vocab.json", "merges.txt")
TokenIds = npt.NDArray[np.int32]


def load_tokenizer(folder: Path, max_length: int) -> "Tokenizer":
    """Load the tokenizer of `folder`, cutting inputs at `max_length` tokens, special ones included.

    Where the model has fewer positions, as a record may not know, inputs are cut at these.

    Raises:
        InputError: its files are missing or corrupt.
    """
    files = tokenizer_files(folder)
    try:
        tokenizer = load_tokenizer_file(files[0]) if files[0].name == TOKENIZER else _converted(folder)
    except BookwheelError:
        raise
    except Exception as broken:  # tokenizers raises only Exception
        raise InputError(
            f"the tokenizer of encoder {folder} cannot be read ({broken}): fetch the model again"
        ) from broken
    tokenizer.enable_truncation(min(max_length, position_limit(folder) or max_length))
    tokenizer.no_padding()
    return tokenizer


def tokenize(tokenizer: "Tokenizer", inputs: Sequence[TextInput]) -> list[TokenIds]:
    """Return the token ids of each input, special ones included, in order.

    Raises:
        InputError: the tokenizer has no tokens for an input.
    """
    pieces = (inputs[start : start + _AT_ONCE] for start in range(0, len(inputs), _AT_ONCE))
    try:
        return [
            np.array(encoding.ids, np.int32)
            for piece in pieces
            for encoding in tokenizer.encode_batch_fast(list(piece))
        ]
    except Exception as failed:  # tokenizers raises only Exception
        raise InputError(f"the model's tokenizer cannot split a text ({failed}): fetch the model again") from failed


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files of a tokenizer, its rules and settings, from one model's folder to another's."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*tokenizer_files(source), *(source / name for name in _SETTINGS)]:
        if path.is_file() and path.resolve() != (folder / path.name).resolve():
            shutil.copyfile(path, folder / path.name)


def limit_tokenizer(threads: int) -> None:
    """Limit tokenizers to one thread if `threads` is 1; otherwise its pool uses all cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false" if threads == 1 else "true"


def _converted(folder: Path) -> "Tokenizer":
    auto = require("transformers", "model").AutoTokenizer
    tokenizer: Tokenizer = auto.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False
    ).backend_tokenizer
    return tokenizer
