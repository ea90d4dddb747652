"""Whether what was learnt of a corpus still fits it: how far new vectors lie from it, and what is found of them.

Cells, centroids and codes are learnt from a sample once and kept while a corpus grows, so that all that did not change
in it keeps its pieces. They are learnt anew where the vectors of the parts that changed lie farther from them than
those that they were learnt from did (`drift` times as far), or where one cell has grown over the others. Lists that
find fewer of the new vectors are moved to where vectors lie now, which takes a twentieth of the time. Vectors that were
not learnt from always lie a little farther, and those of one new article by far if nothing like it was there: so the
loss is judged over all rows of those parts, which is what the index will lose, and what is found over the new rows
alone, which is what their readers will miss.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.files.vectors import VectorFiles
from rag_model.index.recipe import VectorPlan

VERSION = 3  # raised when the same vectors would be measured otherwise
SAMPLE = 4_096  # vectors, of new ones and of old ones: a mean over so many is known to a percent
_FEWEST = 32  # new vectors, below which their mean is chance
_SLACK = 0.02  # of a vector, beside `drift`: so much less codes lose of the very vectors that they were learnt from
_LESS_FOUND = 0.1  # of recall that new vectors may lose against old ones: three times what chance takes
_EVEN = 1.5  # times the mean that a cell may hold in any case: to that they were split


@dataclass(frozen=True, slots=True)
class Trained:
    """How a trained file fitted the vectors that it was learnt from."""

    losses: Mapping[str, float]  # |x - what stands for it|^2 / |x|^2, mean: of `cells` or `lists`, and of `codes`
    imbalance: float = 0.0  # the largest cell over the mean one, when it was learnt; 0: there are no cells
    imbalance_now: float = 0.0  # the same in the build that used it last

    def used(self, imbalance: float) -> Self:
        """Return it as a build leaves it whose largest cell is so many times the mean one."""
        return type(self)(self.losses, self.imbalance or imbalance, imbalance)

    def reason(self, drift: float) -> str | None:
        """Say why it fits no longer whatever comes; None where it may."""
        if self.imbalance_now <= drift * max(self.imbalance, _EVEN):
            return None
        return f"the largest cell has grown to {self.imbalance_now:.2f} times the mean"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Self:
        """Read back what `to_json` wrote."""
        return cls(dict(facts["losses"]), facts["imbalance"], facts["imbalance_now"])


@dataclass(frozen=True, slots=True)
class Sampled:
    """At most `SAMPLE` vectors of each kind, (m, d) float32."""

    new: Vectors  # those that were not there before
    old: Vectors  # those that were
    now: Vectors  # of the parts that changed, new and old as they come


@dataclass(frozen=True, slots=True)
class Fit:
    """How an inherited trained file fits the vectors that came since."""

    rows: int  # new vectors that were looked at
    losses: Mapping[str, tuple[float, float]]  # of the parts that changed, and of the vectors that it was learnt from
    recall: tuple[float, float] | None = None  # of new vectors and of old ones by lists; None: not measured

    def reason(self, drift: float) -> str | None:
        """Say why it does not fit; None where it does."""
        if self.rows < _FEWEST:
            return None
        for name, (now, before) in self.losses.items():
            if now > drift * before + _SLACK:
                return (
                    f"{name} lose {now:.3f} where {self.rows:,} vectors are new, {before:.3f} of what they learnt from"
                )
        return None

    def missed(self) -> str | None:
        """Say what lists miss of the new vectors; None where they find them as they find the others."""
        new, old = self.recall or (1.0, 1.0)
        if self.rows < _FEWEST or new >= old - _LESS_FOUND:
            return None
        return f"they found {new:.2f} of the neighbours of {self.rows:,} new vectors and {old:.2f} of old ones'"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        losses = {name: list(pair) for name, pair in self.losses.items()}
        recall = self.recall and list(self.recall)
        return {"rows": self.rows, "losses": losses, "recall": recall}

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Self:
        """Read back what `to_json` wrote."""
        losses, recall = facts["losses"], facts["recall"]
        pairs = {name: (now, before) for name, (now, before) in losses.items()}
        return cls(facts["rows"], pairs, (recall[0], recall[1]) if recall else None)


class Learner(Protocol):
    """What is asked of the kind of a trained file."""

    def losses(self, plan: VectorPlan, trained: Path, vectors: Vectors) -> dict[str, float]:
        """Return how far vectors, (m, d) float32, lie from what was learnt, by what it is."""
        ...

    def recalls(self, plan: VectorPlan, trained: Path, new: Vectors, old: Vectors) -> tuple[float, float] | None:
        """Return what is found of the neighbours of new vectors and of old ones; None: it cannot be told."""
        ...


def measure(kind: Learner, plan: VectorPlan, trained: Path, losses: Mapping[str, float], sampled: Sampled) -> Fit:
    """Ask a trained file about vectors that it has not seen.

    Args:
        kind: of the index.
        plan: of the index.
        trained: the file.
        losses: what `train` said of the vectors that it was learnt from.
        sampled: of the corpus as it is today; no new vectors fit anything.

    Raises:
        InputError: the file is damaged or of another plan.
    """
    if not len(sampled.new):
        return Fit(0, {})
    now = kind.losses(plan, trained, sampled.now)
    pairs = {name: (loss, losses[name]) for name, loss in now.items() if name in losses}
    return Fit(len(sampled.new), pairs, kind.recalls(plan, trained, sampled.new, sampled.old))


def sample(changed: Sequence[tuple[Path, Sequence[Path]]], same: Sequence[Path], seed: int) -> Sampled:
    """Draw new vectors and old ones by seed.

    Args:
        changed: `.npy` files, at least one, each with those that held its range before: a row that is in these is old.
        same: files that are as they were.
        seed: of the draw.

    Raises:
        InputError: a file is damaged, or a row holds a NaN or an infinity.
    """
    new, old = list[Vectors](), list[Vectors]()
    for path, earlier in changed:
        known = {row for before in earlier for row in _rows(before)}
        there = np.array([row in known for row in _rows(path)], np.bool_)
        new.append(_drawn(path, np.flatnonzero(~there), seed))
        old.append(_drawn(path, np.flatnonzero(there), seed))
    old += [VectorFiles([path]).sample(SAMPLE, seed) for path in same]
    now = VectorFiles([path for path, _ in changed]).sample(SAMPLE, seed)
    return Sampled(_fewer(new, seed), _fewer(old, seed), now)


def _rows(path: Path) -> Iterator[int]:
    """Yield a number for the bytes of each row."""
    return (hash(row.tobytes()) for row in np.load(path, mmap_mode="r", allow_pickle=False))


def _drawn(path: Path, rows: Rows, seed: int) -> Vectors:
    return VectorFiles([path]).take(rows[_choice(len(rows), seed)])


def _fewer(vectors: Sequence[Vectors], seed: int) -> Vectors:
    found = np.concatenate(vectors)
    return np.ascontiguousarray(found[_choice(len(found), seed)])


def _choice(count: int, seed: int) -> Rows:
    """Return at most `SAMPLE` of so many places, ascending."""
    return np.sort(np.random.default_rng(seed).choice(count, min(SAMPLE, count), replace=False, shuffle=False))
