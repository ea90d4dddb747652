"""The index file of encoded token vectors, and MaxSim over all or some of its passages.

    the codec's arrays | offsets (n + 1,) i64 | ids (t,) u16 or u32 | codes (t, width) u8

The tokens of all passages are concatenated in row order. The file is mapped, so only scored
passages are read.

MaxSim: S(q, d) = sum over the query's tokens of the largest inner product with a token of the
passage (Khattab and Zaharia 2020, ColBERT, section 3.3). Passages are concatenated, so no padding
is compared. A passage without tokens scores -inf.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from rag_model.corpus.ragged_file import Offsets, TokenVectors, compute_offsets, expand_positions
from rag_model.errors import InputError, UsageError
from rag_model.index.exact_search import select_top_k
from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.files.tensors import Array, read_tensors
from rag_model.index.recipe import check_depth, check_search_parameters
from rag_model.index.tokens.codec import Codec, create_codec

_TILE_VALUES = 1 << 19  # number of similarities in a tile of 2 MB
_MIN_TILE_TOKENS = 1 << 9  # minimum tokens of a tile, if the queries have many tokens
_BLOCK_TOKENS = 1 << 16  # number of tokens that are decoded at a time: 32 MB at 128 dimensions
_QUERIES_PER_BLOCK = 32  # number of queries that share the decoding of a block


def maxsim(queries: Vectors, vectors: Vectors, offsets: Offsets) -> Vectors:
    """Return the (q, m) float32 scores of queries and passages.

    Args:
        queries: (q, l, d) float32; all tokens count, also [MASK].
        vectors: (t, d) float32, the concatenated tokens of the passages.
        offsets: (m + 1,) start of each passage in `vectors`, and the end of the last one.
    """
    q, query_length, d = queries.shape
    query_tokens, lengths = queries.reshape(q * query_length, d), np.diff(offsets)
    nonempty_passages = np.flatnonzero(lengths)
    scores = np.full((q, len(lengths)), -np.inf, np.float32)
    # The similarities of a tile stay in the cache until their maxima are taken.
    tile_tokens = max(_MIN_TILE_TOKENS, _TILE_VALUES // max(1, len(query_tokens)))
    for tile in iter_token_blocks(lengths[nonempty_passages], tile_tokens):
        passages = nonempty_passages[tile]
        start, end = offsets[passages[0]], offsets[passages[-1] + 1]
        similarities = query_tokens @ vectors[start:end].T  # (q l, d) @ (d, t) -> (q l, t)
        # Reducing along rows takes a fifth of the time of reducing along columns.
        # (q l, t) -> (q l, m)
        max_similarities = np.maximum.reduceat(similarities, offsets[passages] - start, axis=1)
        # (q, l, m) -> (q, m)
        scores[:, passages] = max_similarities.reshape(q, query_length, len(passages)).sum(axis=1)
    return scores


def iter_token_blocks(lengths: npt.NDArray[np.int64], max_tokens: int) -> Iterator[slice]:
    """Yield ranges of passages with at most `max_tokens` tokens each, or of one longer passage."""
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        tokens_before = int(ends[first - 1]) if first else 0
        end = max(first + 1, int(np.searchsorted(ends, tokens_before + max_tokens, side="right")))
        yield slice(first, end)
        first = end


class TokenIndexFile:
    """A `TokenIndex` over one file."""

    def __init__(self, path: Path, codec: Codec, offsets: Array, ids: Array, codes: Array) -> None:
        """Wrap the arrays that `open` has mapped."""
        self._path, self.codec = path, codec
        self._offsets, self._ids, self._codes = offsets, ids, codes
        self.n, self.dim = len(offsets) - 1, int(codec.centroids.shape[1])

    @classmethod
    def open(cls, path: Path, *, mmap: bool = True) -> Self:
        """Open an index file, memory-mapped or loaded.

        Raises:
            InputError: the file is missing, truncated, damaged, or not a token-vector index.
        """
        arrays, metadata = read_tensors(path, mmap=mmap)
        codec = create_codec(arrays, metadata, path)
        try:
            offsets, ids, codes = (arrays[name] for name in ("offsets", "ids", "codes"))
            is_consistent = offsets.ndim == ids.ndim == 1 and codes.shape == (len(ids), codec.width)
            is_consistent = is_consistent and offsets.dtype == np.int64 and codes.dtype == np.uint8
            is_consistent = is_consistent and ids.dtype in (np.uint16, np.uint32)
            is_consistent = is_consistent and offsets[0] == 0 and offsets[-1] == len(ids)
            # The offsets are compared directly, because their differences may overflow.
            is_consistent = is_consistent and bool((offsets[1:] >= offsets[:-1]).all())
        except (KeyError, IndexError) as error:
            raise InputError(f"{path} is not a token-vector index: build it again") from error
        if not is_consistent:
            raise InputError(f"{path} is damaged: its offsets and codes do not fit each other; build it again")
        return cls(path, codec, offsets, ids, codes)

    def search(self, queries: Vectors, k: int, **parameters: Any) -> tuple[Vectors, Rows]:
        """Return the k best rows of each of (q, l, d) queries, by MaxSim over all passages.

        Raises:
            InputError: the file is damaged.
            UsageError: the queries or `k` do not fit the index, or a search parameter is given.
        """
        check_search_parameters(parameters, ())
        self._check_queries(queries)
        check_depth(k, self.n)
        scores, hit_rows = np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
        for first_query in range(0, len(queries), _QUERIES_PER_BLOCK):
            block_slice = slice(first_query, first_query + _QUERIES_PER_BLOCK)
            scores[block_slice], hit_rows[block_slice] = self._search_block(queries[block_slice], k)
        return scores, hit_rows

    def score(self, query: Vectors, rows: Rows) -> Vectors:
        """Return the (m,) float32 scores of an (l, d) query with the passages at (m,) rows, in any
        order.

        Raises:
            InputError: the file is damaged.
            UsageError: the query has another dimension.
        """
        self._check_queries(query[None])
        order = np.argsort(rows, kind="stable")  # codes are read in the order of the file
        scores = np.empty(len(rows), np.float32)
        for block_slice in self._iter_blocks(rows[order]):
            tokens = self.decode(rows[order][block_slice])
            # (1, m) -> (m,)
            scores[order[block_slice]] = maxsim(query[None], tokens.vectors, tokens.offsets)[0]
        return scores

    def decode(self, rows: Rows) -> TokenVectors:
        """Return the decoded vectors of the passages at `rows`, in this order.

        Raises:
            InputError: the file is damaged.
        """
        first_tokens = self._offsets[rows]
        lengths = self._offsets[rows + 1] - first_tokens
        positions = expand_positions(first_tokens, lengths)
        ids = self._ids[positions]
        if len(ids) and int(ids.max()) >= len(self.codec.centroids):
            raise InputError(f"{self._path} is damaged: centroid ids are out of range; build it again")
        return TokenVectors(self.codec.decode(ids, self._codes[positions]), compute_offsets(lengths))

    def _search_block(self, queries: Vectors, k: int) -> tuple[Vectors, Rows]:
        scores, best_rows = np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
        for block_slice in self._iter_blocks(np.arange(self.n)):
            block_rows = np.arange(block_slice.start, block_slice.stop)
            tokens = self.decode(block_rows)
            block_scores = maxsim(queries, tokens.vectors, tokens.offsets)  # (q, m)
            candidates = (
                np.hstack([scores, block_scores]),
                np.hstack([best_rows, np.broadcast_to(block_rows, block_scores.shape)]),
            )
            scores, best_rows = select_top_k(*candidates, k)  # (q, j + m) -> (q, k)
        return scores, best_rows

    def _iter_blocks(self, rows: Rows) -> Iterator[slice]:
        """Yield ranges of `rows` with about a block of tokens each."""
        return iter_token_blocks(self._offsets[rows + 1] - self._offsets[rows], _BLOCK_TOKENS)

    def _check_queries(self, queries: Vectors) -> None:
        if queries.ndim != 3 or queries.shape[2] != self.dim:
            raise UsageError(
                f"questions of shape {queries.shape} do not fit token vectors of {self.dim} "
                f"dimensions: give (q, l, {self.dim})"
            )
        if not np.isfinite(queries).all():
            raise UsageError("a question's token vectors contain NaN or infinity: encode it again")
