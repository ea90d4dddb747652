"""The index file of token vectors in codes, and MaxSim over some or all of its passages.

    the codec's arrays | offsets (n + 1,) i64 | ids (t,) u16 or u32 | codes (t, width) u8

The tokens of all passages lie end to end in row order. The file is mapped, so a search reads the passages it scores.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np

from rag_model.corpus.ragged_file import offsets_of, spread
from rag_model.corpus.token_file import TokenVectors
from rag_model.errors import InputError, UsageError
from rag_model.index.exact.scan import best_of
from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.files.tensors import Array, read_tensors
from rag_model.index.recipe import check_search
from rag_model.index.tokens.codec import Codec, codec_of
from rag_model.index.tokens.maxsim import maxsim

_BLOCK = 1 << 16  # tokens that are decoded at a time: 32 MB at 128 dimensions
_TOGETHER = 8  # questions that share a decoded block


class TokenIndexFile:
    """A `TokenIndex` over one file."""

    def __init__(self, path: Path, codec: Codec, offsets: Array, ids: Array, codes: Array) -> None:
        """Hold what `open` has mapped."""
        self._path, self.codec = path, codec
        self._offsets, self._ids, self._codes = offsets, ids, codes
        self.n, self.dim = len(offsets) - 1, int(codec.centroids.shape[1])
        self.tokens = int(offsets[-1])

    @classmethod
    def open(cls, path: Path, *, mmap: bool = True) -> Self:
        """Map an index file, or load it.

        Raises:
            InputError: it is missing, truncated, damaged, or holds something else.
        """
        arrays, told = read_tensors(path, mmap=mmap)
        codec = codec_of(arrays, told, path)
        try:
            offsets, ids, codes = (arrays[name] for name in ("offsets", "ids", "codes"))
            fits = offsets.ndim == ids.ndim == 1 and codes.shape == (len(ids), codec.width)
            fits = fits and offsets.dtype == np.int64 and codes.dtype == np.uint8
            fits = fits and ids.dtype in (np.uint16, np.uint32)
            fits = fits and offsets[0] == 0 and offsets[-1] == len(ids)
            fits = fits and bool((offsets[1:] >= offsets[:-1]).all())  # a difference may overflow
        except (KeyError, IndexError) as broken:
            raise InputError(f"{path} is no index of token vectors: build it again") from broken
        if not fits:
            raise InputError(f"{path} is damaged: its offsets and codes do not fit each other; build it again")
        return cls(path, codec, offsets, ids, codes)

    def search(self, questions: Vectors, k: int, **parameters: Any) -> tuple[Vectors, Rows]:
        """Return the k best rows of each question, (q, l, d), by MaxSim over all passages.

        Raises:
            InputError: the file is damaged.
            UsageError: the questions or `k` do not fit the index, or a search parameter is given.
        """
        check_search(parameters, ())
        self._check(questions)
        if not 1 <= k <= self.n:
            raise UsageError(f"k is {k} but the index holds {self.n} passages: ask for 1 to {self.n}")
        scores, rows = np.empty((len(questions), k), np.float32), np.empty((len(questions), k), np.int64)
        for first in range(0, len(questions), _TOGETHER):
            some = slice(first, first + _TOGETHER)
            scores[some], rows[some] = self._best(questions[some], k)
        return scores, rows

    def score(self, question: Vectors, rows: Rows) -> Vectors:
        """Return the (m,) float32 MaxSim of a question, (l, d), with the passages at `rows`, (m,) in any order.

        Raises:
            InputError: the file is damaged.
            UsageError: the question is of another dimension.
        """
        self._check(question[None])
        order = np.argsort(rows, kind="stable")  # codes are read in the order of the file
        out = np.empty(len(rows), np.float32)
        for part in self._parts(rows[order]):
            tokens = self.decoded(rows[order][part])
            out[order[part]] = maxsim(question[None], tokens.vectors, tokens.offsets)[0]  # (1, m) -> (m,)
        return out

    def decoded(self, rows: Rows) -> TokenVectors:
        """Return the rebuilt vectors of the passages at `rows`, in their order.

        Raises:
            InputError: the file is damaged.
        """
        starts = self._offsets[rows]
        lengths = self._offsets[rows + 1] - starts
        places = spread(starts, lengths)
        ids = self._ids[places]
        if len(ids) and int(ids.max()) >= len(self.codec.centroids):
            raise InputError(f"{self._path} is damaged: it names centroids that it lacks; build it again")
        return TokenVectors(self.codec.decode(ids, self._codes[places]), offsets_of(lengths))

    def _best(self, questions: Vectors, k: int) -> tuple[Vectors, Rows]:
        scores, rows = np.empty((len(questions), 0), np.float32), np.empty((len(questions), 0), np.int64)
        for part in self._parts(np.arange(self.n)):
            own = np.arange(part.start, part.stop)
            tokens = self.decoded(own)
            found = maxsim(questions, tokens.vectors, tokens.offsets)  # (q, m)
            both = np.hstack([scores, found]), np.hstack([rows, np.broadcast_to(own, found.shape)])
            scores, rows = best_of(*both, k)  # (q, j + m) -> (q, k)
        return scores, rows

    def _parts(self, rows: Rows) -> Iterator[slice]:
        """Yield ranges of `rows` with about a block of tokens each, at least one row."""
        ends = np.cumsum(self._offsets[rows + 1] - self._offsets[rows])
        first = 0
        while first < len(rows):
            before = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(ends, before + _BLOCK, side="right")))
            yield slice(first, last)
            first = last

    def _check(self, questions: Vectors) -> None:
        if questions.ndim != 3 or questions.shape[2] != self.dim:
            raise UsageError(
                f"questions of shape {questions.shape} do not fit token vectors of {self.dim} dimensions: give (q, l, "
                f"{self.dim})"
            )
        if not np.isfinite(questions).all():
            raise UsageError("a question's token vectors hold a NaN or an infinity: encode it again")
