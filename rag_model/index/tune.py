"""Find how hard an index must be searched: the smallest `efSearch` or `nprobe` that finds enough of exact search.

Recall rises with the setting, so settings are doubled until one finds enough, and the last step is bisected. Only
recall decides, never a clock: the same file and the same questions give the same setting on every machine.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from rag_model.errors import UsageError
from rag_model.index.health import Trial
from rag_model.index.recall import recall_at
from rag_model.index.search import IndexFile

MOST_CANDIDATES = 2_048  # efSearch: a graph that still misses is damaged, and not searched too little
MOST_LISTS = 1_024  # nprobe: finding so many lists costs as much as reading them
NEAR = 0.005  # of the best that can be reached: where that is not enough, more work buys nothing

Recall = Callable[[int], float]  # of a setting, the mean over the questions


@dataclass(frozen=True, slots=True)
class Tuned:
    """How an index is best searched for a recall target."""

    search: Mapping[str, int]  # efSearch or nprobe; empty for an index that takes neither
    recall: float  # what it finds of the questions' true neighbours, mean
    note: str = ""  # one sentence where the target is out of reach, else empty


def tune(index: IndexFile, trial: Trial, target: float) -> Tuned:
    """Return the smallest setting whose mean recall@k is at least `target`, and the next smaller one's is not.

    Where no setting reaches it, the smallest within .005 of the best that was seen. A graph searched for k neighbours
    keeps at least k candidates, so its settings begin there.

    Args:
        index: any that can be searched; its own default setting plays no part.
        trial: questions with their true neighbours; a few hundred tell recalls .01 apart.
        target: 0 < target < 1.

    Raises:
        UsageError: the target is no such share, or the questions do not fit the index.
    """
    if not 0 < target < 1:
        raise UsageError(f"a recall target lies between 0 and 1, such as 0.95, and is not {target}")

    def found(search: Mapping[str, int]) -> float:
        rows = index.search(trial.vectors, trial.k, **search)[1]
        return float(recall_at(rows, trial.rows, trial.scores, trial.k).mean())

    name, least, most = _range(index, trial.k)
    if not name:
        return Tuned({}, found({}))
    recall = cache(lambda value: found({name: value}))
    value = _smallest(recall, least, most, target)
    if value is not None:
        return Tuned({name: value}, recall(value))
    best = max(recall(value) for value in _doubled(least, most))
    value = _smallest(recall, least, most, best - NEAR) or most
    return Tuned({name: value}, recall(value), _out_of_reach(trial.k, target, f"{name}={value}", recall(value), best))


def _range(index: IndexFile, k: int) -> tuple[str, int, int]:
    """Return the parameter of an index, and its least and its largest value; no name where it takes none."""
    if index.kind == "hnsw":
        return "efSearch", k, max(k, min(MOST_CANDIDATES, index.n))
    if index.kind == "ivf":
        return "nprobe", 1, min(MOST_LISTS, index.lists)
    return "", 0, 0


def _doubled(least: int, most: int) -> list[int]:
    values = [least]
    while values[-1] < most:
        values.append(min(2 * values[-1], most))
    return values


def _smallest(recall: Recall, least: int, most: int, target: float) -> int | None:
    """Return the value at which a rising recall crosses `target`; None where the largest does not reach it."""
    low = least - 1
    for high in _doubled(least, most):
        if recall(high) >= target:
            break
        low = high
    else:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if recall(middle) >= target else (middle, high)
    return high


def _out_of_reach(k: int, target: float, setting: str, recall: float, best: float) -> str:
    return (
        f"recall@{k} of {target:g} is out of reach: the best is {best:.3f}, and {setting} finds {recall:.3f}; "
        "longer codes, a second look at the vectors (Refine) or more links would find more"
    )
