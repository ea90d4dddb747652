"""Whether a trained file still fits a corpus: the error of new vectors under it, and their recall.

Cells, centroids and codes are trained on a sample once and kept while a corpus grows, so that the pieces of unchanged
parts stay valid. They are trained again if the vectors of the changed parts have more than `drift` times the error of
the training vectors, or if one cell has become too large. Lists with a lower recall for new vectors are adapted to the
current vectors, which takes a twentieth of the time. Vectors outside the training sample always have a slightly larger
error, and the vectors of one article on a new topic a much larger one. So the error is measured over all rows of the
changed parts, as it affects the index, and the recall over the new rows alone, as it affects their readers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.files.vectors import VectorFiles
from rag_model.index.recipe import VectorPlan

VERSION = 3  # increased when the measurement of the same vectors changes
SAMPLE = 4_096  # vectors, of the new and of the old ones: gives a mean to a percent
_FEWEST = 32  # new vectors, below which their mean is too uncertain
_SLACK = 0.02  # added to `drift`: codes have this much less error on their own training vectors
_LESS_FOUND = 0.1  # recall that new vectors may lose against old ones: three times the random error
_EVEN = 1.5  # always allowed size of a cell, as a multiple of the mean: cells are split down to it


@dataclass(frozen=True, slots=True)
class TrainingFit:
    """How a trained file fitted its training vectors."""

    losses: Mapping[str, float]  # mean |x - approximation|^2 / |x|^2: of `cells` or `lists`, and of `codes`
    imbalance: float = 0.0  # the largest cell over the mean, at training; 0: there are no cells
    imbalance_now: float = 0.0  # the same in the last build

    def used(self, imbalance: float) -> Self:
        """Return the record after a build whose largest cell is `imbalance` times the mean."""
        return type(self)(self.losses, self.imbalance or imbalance, imbalance)

    def reason(self, drift: float) -> str | None:
        """Return why it does not fit, whatever the new vectors; None if it may fit."""
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

    new: Vectors  # vectors that the parent did not have
    old: Vectors  # vectors that the parent had
    now: Vectors  # of the changed parts, new and old mixed


@dataclass(frozen=True, slots=True)
class Fit:
    """How an inherited trained file fits the new vectors."""

    rows: int  # number of new vectors measured
    losses: Mapping[str, tuple[float, float]]  # of the changed parts, and of the training vectors
    recall: tuple[float, float] | None = None  # recall of new and of old vectors in lists; None: not measured

    def reason(self, drift: float) -> str | None:
        """Return why it does not fit; None if it fits."""
        if self.rows < _FEWEST:
            return None
        for name, (now, before) in self.losses.items():
            if now > drift * before + _SLACK:
                return (
                    f"{name} lose {now:.3f} with {self.rows:,} new vectors, and {before:.3f} of their training vectors"
                )
        return None

    def missed(self) -> str | None:
        """Return how much lower the recall of new vectors is; None if it is as good as that of old ones."""
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
    """The methods that `measure` needs from an index kind."""

    def losses(self, plan: VectorPlan, trained: Path, vectors: Vectors) -> dict[str, float]:
        """Return how far vectors, (m, d) float32, lie from the trained values, by name."""
        ...

    def recalls(self, plan: VectorPlan, trained: Path, new: Vectors, old: Vectors) -> tuple[float, float] | None:
        """Return the recall of new vectors and of old ones; None: it cannot be measured."""
        ...


def measure(kind: Learner, plan: VectorPlan, trained: Path, losses: Mapping[str, float], sampled: Sampled) -> Fit:
    """Measure how a trained file fits new vectors.

    Args:
        kind: the kind of the index.
        plan: the plan of the index.
        trained: the file.
        losses: the losses of the training vectors, from `train`.
        sampled: of the current corpus; without new vectors the file fits.

    Raises:
        InputError: the file is damaged or of another plan.
    """
    if not len(sampled.new):
        return Fit(0, {})
    now = kind.losses(plan, trained, sampled.now)
    pairs = {name: (loss, losses[name]) for name, loss in now.items() if name in losses}
    return Fit(len(sampled.new), pairs, kind.recalls(plan, trained, sampled.new, sampled.old))


def sample(changed: Sequence[tuple[Path, Sequence[Path]]], same: Sequence[Path], seed: int) -> Sampled:
    """Draw samples of new and old vectors by seed.

    Args:
        changed: `.npy` files, at least one, each with the files that covered its range before: a row that is in these
        is old.
        same: unchanged files.
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
    """Yield a hash of the bytes of each row."""
    return (hash(row.tobytes()) for row in np.load(path, mmap_mode="r", allow_pickle=False))


def _drawn(path: Path, rows: Rows, seed: int) -> Vectors:
    return VectorFiles([path]).take(rows[_choice(len(rows), seed)])


def _fewer(vectors: Sequence[Vectors], seed: int) -> Vectors:
    found = np.concatenate(vectors)
    return np.ascontiguousarray(found[_choice(len(found), seed)])


def _choice(count: int, seed: int) -> Rows:
    """Return at most `SAMPLE` of the numbers 0 … count-1, ascending."""
    return np.sort(np.random.default_rng(seed).choice(count, min(SAMPLE, count), replace=False, shuffle=False))
