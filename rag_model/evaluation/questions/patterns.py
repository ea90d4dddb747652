"""Answers that are regular expressions, as CuratedTREC's are (Chen et al. 2017, DrQA), with a time limit for each."""

from collections.abc import Iterable
from functools import cache
from typing import Any

from rag_model.errors import InputError
from rag_model.extras import require

_LONGEST = 10_000  # characters; CuratedTREC's longest has a few hundred
_PATIENCE = 5.0  # seconds for one pattern on one answer; normal patterns take microseconds


def pattern_match(prediction: str, patterns: Iterable[str]) -> float:
    """Return 1.0 if any regular expression matches from the prediction's start, else 0.0.

    DrQA's rule for CuratedTREC: case is ignored, `^` and `$` match at every line, and the match need not reach the end.

    Raises:
        InputError: a pattern is malformed, or takes seconds on one answer, by excessive backtracking.
        MissingExtraError: `regex` is not installed (`re` has no timeout).
    """
    return float(any(_holds(pattern, "match", prediction) for pattern in patterns))


def pattern_in(text: str, patterns: Iterable[str]) -> bool:
    """Return whether any regular expression matches anywhere in `text`: DPR's match for CuratedTREC's passages.

    Raises:
        InputError, MissingExtraError: as `pattern_match` does.
    """
    return any(_holds(pattern, "search", text) for pattern in patterns)


def _holds(pattern: str, how: str, text: str) -> bool:
    compiled = compile_pattern(pattern)
    try:
        return getattr(compiled, how)(text, timeout=_PATIENCE) is not None
    except TimeoutError:
        raise InputError(
            f"the answer pattern {pattern[:80]!r} takes more than {_PATIENCE:g} s on {text[:80]!r}: "
            "write it without nested repetitions"
        ) from None


@cache
def compile_pattern(pattern: str) -> Any:
    """Return the compiled regular expression, whose matches can be given a time limit.

    Raises:
        InputError: it is malformed, or longer than 10,000 characters.
        MissingExtraError: `regex` is not installed.
    """
    regex = require("regex", "train")
    if len(pattern) > _LONGEST:
        raise InputError(f"an answer pattern has {len(pattern):,} characters, which is too long: {pattern[:80]!r}…")
    try:
        return regex.compile(pattern, regex.IGNORECASE | regex.MULTILINE)
    except (regex.error, RecursionError, OverflowError, MemoryError) as broken:
        raise InputError(
            f"the answer {pattern[:80]!r} is not a regular expression ({broken}): correct it, "
            "or measure the answers as plain text"
        ) from broken
