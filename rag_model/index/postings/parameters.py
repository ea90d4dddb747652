"""The parameters of searches in postings: defaults and bounds."""

from collections.abc import Mapping
from typing import Any

from rag_model.errors import UsageError

K1, B = 0.9, 0.4  # tuned for passages of Wikipedia: Karpukhin et al. 2020, section 5; Pyserini's defaults
MOST_TERMS = 10_000  # of one question
_MOST = {"k1": 1_000.0, "b": 1.0}


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Check the parameters of a search: `k1` saturates term frequencies, `b` corrects for the length of passages.

    Raises:
        UsageError: one is unknown or out of range.
    """
    for name, value in parameters.items():
        if name not in _MOST:
            raise UsageError(f"{name} is not a search parameter of BM25: it takes {' and '.join(_MOST)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST[name]:
            raise UsageError(f"{name} of BM25 is {value!r}: give a number from 0 to {_MOST[name]:g}")


def check_terms(parameters: Mapping[str, Any]) -> None:
    """Check the parameters of a search: `terms`, how many of a question's terms are looked up.

    Raises:
        UsageError: one is unknown or out of range.
    """
    for name, value in parameters.items():
        if name != "terms":
            raise UsageError(f"{name} is not a search parameter of this index: it takes terms")
        if type(value) is not int or not 1 <= value <= MOST_TERMS:
            raise UsageError(f"terms is {value!r}: give a whole number from 1 to {MOST_TERMS:,}")
