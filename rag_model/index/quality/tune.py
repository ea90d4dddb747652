"""Tune an index: find the smallest `efSearch` or `nprobe` that reaches a recall target.

Recall rises with the setting, so settings are doubled until one reaches the target, and the last step is bisected. Only
recall decides, not time: the same file and the same queries give the same setting on every machine.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

from rag_model.errors import UsageError
from rag_model.index.quality.health import Trial, setting_name
from rag_model.index.search import IndexFile

MOST_CANDIDATES = 2_048  # efSearch: a graph that misses its target even then is damaged
MOST_LISTS = 1_024  # nprobe: finding this many lists costs as much as reading them
LOOKS = (1, 2, 4, 8, 16, 32)  # refine: this many times k candidates are ranked again
NEAR = 0.005  # tolerance below the best possible recall, if that misses the target
_LOOK = 8  # codes that are read in the time of one vector of the refinement

Recall = Callable[[int], float]  # of a setting, the mean over the queries


@dataclass(frozen=True, slots=True)
class Tuned:
    """The search setting for a recall target."""

    search: Mapping[str, int]  # efSearch, or nprobe and refine; empty for an index without parameters
    recall: float  # its mean recall
    note: str = ""  # one sentence if the target cannot be reached, else empty


@dataclass(frozen=True, slots=True)
class _Dial:
    """The settings to try: one parameter from `least` to `most`, and factors of the refinement; 0: there is none."""

    name: str
    least: int
    most: int
    looks: tuple[int, ...] = (0,)

    def search(self, look: int, value: int) -> dict[str, int]:
        return {self.name: value} | ({"refine": look} if look else {})


def tune(index: IndexFile, trial: Trial, target: float) -> Tuned:
    """Return the smallest setting whose mean recall@k is at least `target`, and the next smaller one's is not.

    If no setting reaches it, return the smallest within .005 of the best one. A graph searched for k neighbours keeps
    at least k candidates, so its settings begin at k. With a refinement, `nprobe` is found for each of several factors,
    and the cheapest of these settings is taken.

    Args:
        index: its own default setting is not used.
        trial: queries with their true neighbours; a few hundred distinguish recalls .01 apart.
        target: 0 < target < 1.

    Raises:
        UsageError: the target is out of range, or the queries do not fit the index.
    """
    if not 0 < target < 1:
        raise UsageError(f"the recall target is {target}: give one between 0 and 1, such as 0.95")

    def found(search: Mapping[str, int]) -> float:
        rows = index.search(trial.vectors, trial.k, **search)[1]
        return float(trial.recalls(rows).mean())

    if index.kind == "exact":
        return Tuned({}, found({}))
    dial = _dial(index, trial.k)
    recall = cache(lambda look, value: found(dial.search(look, value)))
    settings = _enough(recall, dial, target)
    if settings:
        best = min(settings, key=partial(_price, index, trial.k))
        return Tuned(dial.search(*best), recall(*best))
    ceiling = max(recall(look, value) for look in dial.looks for value in _doubled(dial.least, dial.most))
    best = min(_enough(recall, dial, ceiling - NEAR), key=partial(_price, index, trial.k))
    search = dial.search(*best)
    return Tuned(search, recall(*best), _out_of_reach(index, trial.k, target, search, recall(*best), ceiling))


def _dial(index: IndexFile, k: int) -> _Dial:
    if index.kind == "hnsw":
        return _Dial("efSearch", k, max(k, min(MOST_CANDIDATES, index.n)))
    looks = tuple(look for look in LOOKS if look == 1 or look * k < 2 * index.n) if "refine" in index.defaults else (0,)
    return _Dial("nprobe", 1, min(MOST_LISTS, index.lists), looks)


def _enough(recall: Callable[[int, int], float], dial: _Dial, target: float) -> list[tuple[int, int]]:
    """Return (refinement factor, smallest value that reaches `target`) for each factor with such a value."""
    smallest = [(look, _smallest(partial(recall, look), dial.least, dial.most, target)) for look in dial.looks]
    return [(look, value) for look, value in smallest if value is not None]


def _price(index: IndexFile, k: int, setting: tuple[int, int]) -> float:
    """Return about how many codes a query reads; a vector of the refinement counts as 8 codes."""
    look, value = setting
    return value * index.n / max(1, index.lists) + _LOOK * look * k


def _doubled(least: int, most: int) -> list[int]:
    values = [least]
    while values[-1] < most:
        values.append(min(2 * values[-1], most))
    return values


def _smallest(recall: Recall, least: int, most: int, target: float) -> int | None:
    """Return the smallest value whose recall reaches `target`; None if the largest does not reach it."""
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


def _out_of_reach(
    index: IndexFile, k: int, target: float, search: Mapping[str, int], recall: float, ceiling: float
) -> str:
    more = "more links" if index.kind == "hnsw" else "longer codes"
    more += "" if index.kind == "hnsw" or "refine" in index.defaults else " or a refinement, Refine(SQfp16),"
    return (
        f"recall@{k} of {target:g} cannot be reached, the best is {ceiling:.3f}, so {setting_name(search)} is set, "
        f"which finds {recall:.3f}: {more} would find more"
    )
