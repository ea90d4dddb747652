"""The token vectors that an index is built over: the parts' files, in row order, read passage by passage."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from rag_model.corpus.token_file import TokenFile, TokenVectors
from rag_model.errors import InputError, UsageError
from rag_model.index.files.engine import Rows, Vectors
from rag_model.partition import Partition


class TokenRows:
    """The parts' token vectors; row = the rows of earlier files + the row within its file."""

    def __init__(self, paths: Sequence[Path], dim: int | None = None) -> None:
        """Map files in the order of the snapshot's parts; `dim` is what a plan says of their vectors.

        Raises:
            InputError: a file is missing, damaged or of another dimension.
            UsageError: no file is given.
        """
        if not paths:
            raise UsageError("there are no token vectors to index: give at least one file")
        self._files = [TokenFile(path) for path in paths]
        self.dim = self._files[0].dim if dim is None else dim
        for path, file in zip(paths, self._files, strict=True):
            if file.dim != self.dim:
                raise InputError(f"{path} has {file.dim} dimensions, not {self.dim}: encode all parts with one encoder")
        self._partition = Partition(file.n for file in self._files)
        self.n = self._partition.n
        self.lengths = np.concatenate([file.lengths for file in self._files])

    @property
    def tokens(self) -> int:
        """The number of vectors."""
        return int(self.lengths.sum())

    def blocks(self) -> Iterator[TokenVectors]:
        """Yield the passages in row order, float32, some at a time."""
        for file in self._files:
            yield from file.blocks()

    def take(self, rows: Rows) -> TokenVectors:
        """Return the passages at ascending global `rows`, float32."""
        pieces = [self._files[number].take(local) for number, _, local in self._partition.split(rows)]
        return TokenVectors.joined(pieces or [self._files[0].take(np.empty(0, np.int64))])

    def sample(self, tokens: int, seed: int) -> Vectors:
        """Return (t, d) float32: the vectors of passages that are drawn by seed until they have `tokens`, or of all."""
        order = np.random.default_rng(seed).permutation(self.n)
        enough = np.searchsorted(np.cumsum(self.lengths[order]), tokens) + 1
        vectors: Vectors = self.take(np.sort(order[:enough])).vectors
        return vectors
