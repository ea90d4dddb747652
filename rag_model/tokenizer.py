"""Load an untrusted `tokenizer.json` after testing its patterns in a child process.

A regular expression can take quadratic time or worse: one query then blocks a thread for minutes,
or Rust panics, which is not an `Exception` in Python. Only tokenizers that define their own
patterns are tested, once per process.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_model.digest import digest_file
from rag_model.errors import InputError, format_error
from rag_model.extras import require
from rag_model.process import ChildDiedError, run_in_child, serve_call
from rag_model.untrusted_text import parse_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PANIC_CLASS = "PanicException"  # pyo3's class, which cannot be imported
_TRIAL_SECONDS = 10.0  # for all texts; a harmless tokenizer takes 0.1 s
_TRIAL_MEMORY = 1 << 30  # bytes
_TRIAL_LENGTH = 2_000  # characters; the longest query that a service accepts
_RUNS = ("a", "A", "1", " ", "\n", ".", "'", "_", "é", "漢", "a ", "a1", "'s", "a'")
_MAX_RUNS = 64


def load_tokenizer_file(file: Path) -> "Tokenizer":
    """Load a tokenizer.

    Raises:
        InputError: The file is missing or damaged, or one of its patterns is too slow on plain
            texts.
        MissingExtraError: `tokenizers` is not installed.
    """
    library = require("tokenizers", "model")
    try:
        tokenizer: Tokenizer = library.Tokenizer.from_file(str(file))
    except BaseException as error:  # tokenizers raises only Exception and panics
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC_CLASS:
            raise
        raise _read_error(file, error) from error
    check_patterns(file)
    return tokenizer


def check_patterns(file: Path) -> None:
    """Run the tokenizer in a child process on long runs of characters, if it has its own patterns.

    Raises:
        InputError: The file is missing or damaged, or the child died or took too long.
    """
    try:
        if _find_patterns(parse_json(file.read_bytes())):
            _try_patterns(file, digest_file(file))
    except (OSError, ValueError) as error:
        raise _read_error(file, error) from error


@cache
def _try_patterns(file: Path, digest: str) -> None:
    try:
        run_in_child(__name__, str(file), seconds=_TRIAL_SECONDS, memory=_TRIAL_MEMORY)
    except InputError as error:
        raise _read_error(file, error) from error
    except ChildDiedError as error:
        raise InputError(
            f"the tokenizer {file} {error} on texts of {_TRIAL_LENGTH:,} characters: one of its "
            "patterns is too slow, so use another model"
        ) from error


def _read_error(file: Path, error: BaseException) -> InputError:
    return InputError(f"the tokenizer {file} cannot be read ({format_error(error)[:300]}): fetch the model again")


def _find_patterns(value: Any) -> list[str]:
    """Return the regular expressions in a tokenizer's JSON."""
    patterns, pending = [], [value]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            patterns += [pattern for pattern in [node.get("Regex")] if isinstance(pattern, str)]
            pending += node.values()
        elif isinstance(node, list) and node and isinstance(node[0], dict):  # not a vocabulary
            pending += node
    return patterns


def _iter_trial_texts(patterns: list[str]) -> Iterator[str]:
    """Yield long runs of common characters and of the characters in the patterns."""
    runs = dict.fromkeys([*_RUNS, *re.sub(r"\\.|\W", "", "".join(patterns))])
    for run in list(runs)[:_MAX_RUNS]:
        yield (run * _TRIAL_LENGTH)[:_TRIAL_LENGTH]
        yield (run * _TRIAL_LENGTH)[: _TRIAL_LENGTH - 1] + "!"


def _encode_trial_texts(file: str) -> None:
    tokenizer = require("tokenizers", "model").Tokenizer.from_file(file)
    for text in _iter_trial_texts(_find_patterns(parse_json(Path(file).read_bytes()))):
        tokenizer.encode(text)


if __name__ == "__main__":
    serve_call(_encode_trial_texts)
