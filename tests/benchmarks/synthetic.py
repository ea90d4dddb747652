"""Synthetic vectors like an encoder's: overlapping clusters of low inner dimension, bent into more dimensions.

    z = centre + 1.5 e,    x = tanh(1.2 z W1) W2 + 0.05 e'

with 24 inner dimensions, 1,000 centres and normal W1, W2, e, e'; then scaled to norm 1, or to log-normal norms. Unlike
plain Gaussians, whose neighbours are all equally far, they have a low inner dimension, as graph search needs.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]
WIKIPEDIA, BERT = 21_015_324, 768  # DPR's passages, and their dimensions
_INNER, _BENT, _CENTRES, _SPREAD = 24, 64, 1_000, 1.5
_BLOCK = 65_536
_QUESTIONS = 10**9  # seeds from here on are the questions'


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A distribution of vectors."""

    dim: int
    norms: float = 0.0  # sigma of the logarithm of the passages' norms; 0: all are 1. Questions have norm 1
    seed: int = 0

    def parts(self, folder: Path, n: int, count: int) -> list[Path]:
        """Write `n` vectors as `count` files of (rows, dim) float32; return the paths in row order."""
        paths = []
        for number, (first, last) in enumerate(pairwise(np.linspace(0, n, count + 1).astype(int).tolist())):
            paths.append(folder / f"part-{number:05d}.npy")
            array = np.lib.format.open_memmap(paths[-1], "w+", np.float32, (last - first, self.dim))
            for begin in range(0, last - first, _BLOCK):
                rows = min(_BLOCK, last - first - begin)
                array[begin : begin + rows] = self._sample(rows, [self.seed, number, begin], self.norms)
            array.flush()
        return paths

    def questions(self, count: int) -> Vectors:
        """Return (count, dim) float32 of norm 1: other draws from the same distribution."""
        return self._sample(count, [self.seed, _QUESTIONS], 0.0)

    def _sample(self, rows: int, seed: list[int], norms: float) -> Vectors:
        shape, rng = np.random.default_rng(self.seed), np.random.default_rng(seed)
        centres = shape.normal(size=(_CENTRES, _INNER)).astype(np.float32)
        bend = shape.normal(size=(_INNER, _BENT)).astype(np.float32) / np.float32(_INNER**0.5)
        widen = shape.normal(size=(_BENT, self.dim)).astype(np.float32) / np.float32(_BENT**0.5)
        inner = centres[rng.integers(0, _CENTRES, rows)]
        inner += np.float32(_SPREAD) * rng.standard_normal((rows, _INNER), np.float32)
        vectors = np.tanh(np.float32(1.2) * inner @ bend) @ widen
        vectors += np.float32(0.05) * rng.standard_normal((rows, self.dim), np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        if norms:
            vectors *= np.exp(norms * rng.standard_normal((rows, 1), np.float32))
        scaled: Vectors = vectors
        return scaled


def append_norm_component(parts: list[Path], folder: Path) -> list[Path]:
    """Write parts with one more dimension, x' = [x, sqrt(max |x|^2 - |x|^2)]; inner products with [q, 0] stay.

    Source: Bachrach et al. Speeding up the Xbox recommender system using a Euclidean transformation for inner-product
    spaces. RecSys 2014.
    """
    folder.mkdir()
    squares = [np.square(np.load(part)).sum(axis=1) for part in parts]
    max_square = max(float(part.max()) for part in squares)
    for part, square in zip(parts, squares, strict=True):
        padding = np.sqrt(max_square - square).astype(np.float32)
        np.save(folder / part.name, np.hstack([np.load(part), padding[:, None]]), allow_pickle=False)
    return [folder / part.name for part in parts]


def write_parts(folder: Path, vectors: Vectors, count: int) -> list[Path]:
    """Write vectors as `count` part files; return the paths in row order."""
    paths = []
    for number, (first, last) in enumerate(pairwise(np.linspace(0, len(vectors), count + 1).astype(int).tolist())):
        paths.append(folder / f"part-{number:05d}.npy")
        np.save(paths[-1], vectors[first:last], allow_pickle=False)
    return paths
