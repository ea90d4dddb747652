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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rag_model.index.files.engine import Metric, Vectors
from rag_model.index.files.vectors import VectorFiles, draw_rows, find_equal_rows, map_vectors, open_vectors
from rag_model.index.quality.results import FitResult
from rag_model.index.recipe import VectorPlan

VERSION = 4  # increased when the measurement of the same vectors changes
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
        same: unchanged files, of which only the sampled rows are read.
        seed: the seed of the samples.

    Raises:
        InputError: a file is damaged, or a row holds a NaN or an infinity.
    """
    files = VectorFiles([path for path, _ in changed])
    is_old = np.concatenate([find_common_rows(path, previous_paths) for path, previous_paths in changed])
    new_rows, old_rows = np.flatnonzero(~is_old), np.flatnonzero(is_old)
    new_vectors = files.read_rows(new_rows[draw_rows(len(new_rows), SAMPLE_VECTORS, seed)])
    changed_vectors = files.read_rows(draw_rows(files.n, SAMPLE_VECTORS, seed))
    same_files = open_vectors(same, dim=files.dim) if same else None
    # Old rows are numbered through the changed files, and then through the unchanged ones.
    drawn = draw_rows(len(old_rows) + (same_files.n if same_files else 0), SAMPLE_VECTORS, seed)
    drawn_changed, drawn_same = np.split(drawn, [np.searchsorted(drawn, len(old_rows))])
    old_vectors = [files.read_rows(old_rows[drawn_changed])]
    old_vectors += [same_files.read_rows(drawn_same - len(old_rows))] if same_files else []
    return FitSample(new_vectors, np.concatenate(old_vectors), changed_vectors)


def find_common_rows(path: Path, others: Sequence[Path]) -> npt.NDArray[np.bool_]:
    """Return whether each row of a `.npy` file is in one of the others."""
    is_common = np.zeros(len(map_vectors(path)), np.bool_)
    for other in others:
        is_common |= find_equal_rows(path, other) >= 0
    return is_common


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
