"""Measure whether a trained file still fits a changed corpus: error and recall of new vectors.

Cells, centroids and codes are trained once on a sample and kept while a corpus grows, so that the
pieces of unchanged parts stay valid. They are trained again if the vectors of the changed parts
have more than `drift` times the error of the training vectors, or if one cell has become too large.
Lists with a lower recall for new vectors are adapted to the current vectors, which takes a
twentieth of the time.

Vectors outside the training sample always have a slightly larger error, and the vectors of one
article on a new topic a much larger one. So the error is measured over all rows of the changed
parts, as it affects the index, and the recall over the new rows alone, as it affects their readers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rag_model.index.files.engine import Metric, Rows, Vectors
from rag_model.index.files.vectors import VectorFiles
from rag_model.index.quality.results import FitResult
from rag_model.index.recipe import VectorPlan

VERSION = 3  # increased when the measurement of the same vectors changes
SAMPLE_VECTORS = 4_096  # new vectors, and old vectors: a mean is then exact to one percent


@dataclass(frozen=True, slots=True)
class FitSample:
    """Sampled vectors, (m <= `SAMPLE_VECTORS`, d) float32 each."""

    new_vectors: Vectors  # not in the parent
    old_vectors: Vectors  # in the parent
    changed_vectors: Vectors  # of the changed parts, new and old together


class TrainableKind(Protocol):
    """The methods of an index kind that `measure_fit` needs."""

    def losses(self, plan: VectorPlan, trained: Path, vectors: Vectors) -> dict[str, float]:
        """Return the error of vectors, (m, d) float32, under the trained values, by name."""
        ...

    def recalls(self, plan: VectorPlan, trained: Path, new: Vectors, old: Vectors) -> tuple[float, float] | None:
        """Return the recall of new and of old vectors; None: not measured."""
        ...


def measure_fit(
    kind: TrainableKind, plan: VectorPlan, trained: Path, losses: Mapping[str, float], fit_sample: FitSample
) -> FitResult:
    """Measure how a trained file fits new vectors.

    Args:
        kind: the kind of the index.
        plan: the plan of the index.
        trained: the trained file.
        losses: the losses of the training vectors, from `train`.
        fit_sample: samples of the current corpus; without new vectors the file fits.

    Raises:
        InputError: the trained file is damaged or of another plan.
    """
    if not len(fit_sample.new_vectors):
        return FitResult(0, {})
    current_losses = kind.losses(plan, trained, fit_sample.changed_vectors)
    pairs = {name: (loss, losses[name]) for name, loss in current_losses.items() if name in losses}
    return FitResult(
        len(fit_sample.new_vectors), pairs, kind.recalls(plan, trained, fit_sample.new_vectors, fit_sample.old_vectors)
    )


def sample_changes(changed: Sequence[tuple[Path, Sequence[Path]]], same: Sequence[Path], seed: int) -> FitSample:
    """Draw samples of new and old vectors by seed.

    Args:
        changed: at least one `.npy` file, each with the parent's files of the same range; a row
            that one of these holds is old.
        same: unchanged files.
        seed: the seed of the samples.

    Raises:
        InputError: a file is damaged, or a row holds a NaN or an infinity.
    """
    new_vectors, old_vectors = list[Vectors](), list[Vectors]()
    for path, previous_paths in changed:
        is_old = find_common_rows(path, previous_paths)
        new_vectors.append(_read_sample(path, np.flatnonzero(~is_old), seed))
        old_vectors.append(_read_sample(path, np.flatnonzero(is_old), seed))
    old_vectors += [VectorFiles([path]).sample(SAMPLE_VECTORS, seed) for path in same]
    changed_vectors = VectorFiles([path for path, _ in changed]).sample(SAMPLE_VECTORS, seed)
    return FitSample(_concatenate_sample(new_vectors, seed), _concatenate_sample(old_vectors, seed), changed_vectors)


def find_common_rows(path: Path, others: Sequence[Path]) -> npt.NDArray[np.bool_]:
    """Return whether each row of a `.npy` file is in one of the others."""
    hashes = {row for other in others for row in _hash_rows(other)}
    return np.array([row in hashes for row in _hash_rows(path)], np.bool_)


def _hash_rows(path: Path) -> Iterator[int]:
    """Yield a hash of each row's bytes."""
    return (hash(row.tobytes()) for row in np.load(path, mmap_mode="r", allow_pickle=False))


def _read_sample(path: Path, rows: Rows, seed: int) -> Vectors:
    return VectorFiles([path]).read_rows(rows[_draw_numbers(len(rows), seed)])


def _concatenate_sample(vectors: Sequence[Vectors], seed: int) -> Vectors:
    all_vectors = np.concatenate(vectors)
    return np.ascontiguousarray(all_vectors[_draw_numbers(len(all_vectors), seed)])


def _draw_numbers(count: int, seed: int) -> Rows:
    """Return at most `SAMPLE_VECTORS` of the numbers 0 … count-1, ascending."""
    return np.sort(np.random.default_rng(seed).choice(count, min(SAMPLE_VECTORS, count), replace=False, shuffle=False))


def relative_error(true: Vectors, decoded: Vectors) -> float:
    """Return the mean of |x - y|^2 / |x|^2 over nonzero rows x of `true` and y of `decoded`."""
    norms = np.square(true, dtype=np.float64).sum(axis=1)  # (m, d) -> (m,)
    errors = np.square(true - decoded, dtype=np.float64).sum(axis=1)
    return float((errors[norms > 0] / norms[norms > 0]).mean()) if norms.any() else 0.0


def centroid_distance(vectors: Vectors, centroids: Vectors, metric: Metric) -> float:
    """Return the mean distance of vectors to their centroids, row by row.

    For L2 it is `relative_error`. For inner product it is 1 - cosine, because centroids are then
    directions, independent of the vectors' norms.
    """
    if metric == "l2":
        return relative_error(vectors, centroids)
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(centroids, axis=1)
    products = np.einsum("ij,ij->i", vectors, centroids)  # (m, d), (m, d) -> (m,)
    return float((1 - products[lengths > 0] / lengths[lengths > 0]).mean()) if lengths.any() else 0.0
