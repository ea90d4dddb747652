"""Load a `tokenizer.json`, which may come from elsewhere: its patterns are tried on texts in a child process first.

A pattern can need a time that grows with the square of a text, or worse: then one question stops a thread for minutes,
or Rust panics, which in Python is no `Exception`. Only tokenizers with patterns of their own are tried, once a process.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_model.child import DiedError, answer, call
from rag_model.digest import digest_file
from rag_model.errors import InputError, reason
from rag_model.extras import require
from rag_model.json_text import parse_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PANIC = "PanicException"  # pyo3's class, which cannot be imported
_SECONDS = 10.0  # for all texts; a harmless tokenizer takes a tenth of one
_MEMORY = 1 << 30  # bytes
_LONG = 2_000  # characters: the longest question of a service
_RUNS = ("a", "A", "1", " ", "\n", ".", "'", "_", "é", "漢", "a ", "a1", "'s", "a'")
_MOST_RUNS = 64


def load_tokenizer_file(file: Path) -> "Tokenizer":
    """Load a tokenizer.

    Raises:
        InputError: the file is missing or damaged, or one of its patterns blows up on plain texts.
        MissingExtraError: `tokenizers` is not installed.
    """
    library = require("tokenizers", "model")
    try:
        tokenizer: Tokenizer = library.Tokenizer.from_file(str(file))
    except BaseException as broken:  # tokenizers raises only Exception and panics
        if not isinstance(broken, Exception) and type(broken).__name__ != _PANIC:
            raise
        raise _unreadable(file, broken) from broken
    check_patterns(file)
    return tokenizer


def check_patterns(file: Path) -> None:
    """Try the tokenizer in a child process on long runs of characters, if it has patterns of its own.

    Raises:
        InputError: the file is missing or damaged, or the child died or took too long.
    """
    try:
        if _patterns(parse_json(file.read_bytes())):
            _tried(file, digest_file(file))
    except (OSError, ValueError) as broken:
        raise _unreadable(file, broken) from broken


@cache
def _tried(file: Path, digest: str) -> None:
    try:
        call(__name__, str(file), seconds=_SECONDS, memory=_MEMORY)
    except InputError as broken:
        raise _unreadable(file, broken) from broken
    except DiedError as died:
        raise InputError(
            f"the tokenizer {file} {died} on texts of {_LONG:,} characters: one of its patterns blows up, so give "
            "another model"
        ) from died


def _unreadable(file: Path, error: BaseException) -> InputError:
    return InputError(f"the tokenizer {file} cannot be read ({reason(error)[:300]}): fetch the model again")


def _patterns(value: Any) -> list[str]:
    """Return the regular expressions in a tokenizer's JSON."""
    found, left = [], [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            found += [pattern for pattern in [one.get("Regex")] if isinstance(pattern, str)]
            left += one.values()
        elif isinstance(one, list) and one and isinstance(one[0], dict):  # not a vocabulary
            left += one
    return found


def _texts(patterns: list[str]) -> Iterator[str]:
    """Yield long runs of common characters, and of those that the patterns name."""
    named = dict.fromkeys([*_RUNS, *re.sub(r"\\.|\W", "", "".join(patterns))])
    for run in list(named)[:_MOST_RUNS]:
        yield (run * _LONG)[:_LONG]
        yield (run * _LONG)[: _LONG - 1] + "!"


def _encode(file: str) -> None:
    tokenizer = require("tokenizers", "model").Tokenizer.from_file(file)
    for text in _texts(_patterns(parse_json(Path(file).read_bytes()))):
        tokenizer.encode(text)


if __name__ == "__main__":
    answer(_encode)
