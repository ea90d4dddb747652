"""Search posting lists of a remote file, of which only the blocks that can matter are read.

The lists of the most frequent terms have most of the bytes and add the least to a score. They are
*optional* if the other terms decide the result. A search reads the other lists and the headers of
the optional lists in one round of requests, and adds up the other lists. Their k-th best score is a
lower bound of the k-th best score of all. So the candidates are the passages that reach it with the
bounds of the optional lists' blocks that may contain them, and these blocks are read in a second
round.

If a passage without any of the other terms could be among the best, all lists are read in the
second round. The result is always that of `maxscore`.

A list that later queries have too is completed by and by, up to a megabyte with each query that needs
a request anyway. Once it is there, it is decoded and cached, which is faster than choosing blocks again.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rag_model.index.postings import maxscore
from rag_model.index.postings.file import PostingsFile
from rag_model.index.postings.lists import HEADER_BYTES, MAX_HEADER_WEIGHT
from rag_model.index.postings.maxscore import Weighting
from rag_model.index.postings.packing import BLOCK

_MIN_OPTIONAL_BYTES = 64 << 10  # bytes of a list that are not loaded; a list with fewer is read whole
# The factors of optional lists are at most this share of the others'. With 0.2 fewer bytes are read
# first, but more blocks later: by calculation, 1.25 instead of 1.08 MB over two million passages.
_MAX_OPTIONAL_SHARE = 0.1
_MAX_COMPLETED_BYTES = 1 << 20  # bytes of optional lists that a query reads for later ones
_HEADER = np.dtype([("last_row", "<u4"), ("bytes", "<u2"), ("weight", "u1"), ("length", "<u2")])
Ints = npt.NDArray[np.int64]
Ranges = list[tuple[int, int]]  # begins and ends in the section of the lists


class SelectiveSearch:
    """The search of one query, in the order of the methods; the caller loads ranges between them."""

    def __init__(
        self, file: PostingsFile, lists: Ints, factors: npt.NDArray[np.float64], k: int, completed_ends: dict[int, int]
    ) -> None:
        """Choose the optional lists.

        Args:
            file: of the index, which is read by ranges.
            lists: (t, 3) postings, begin and end of the list of each term.
            factors: (t,) of each term, in units.
            k: number of hits.
            completed_ends: for each optional list of earlier queries, by its begin, the end of what
                is completed; updated.
        """
        has_postings = lists[:, 0] > 0
        self._file, self._lists, self._factors, self._k = file, lists[has_postings], factors[has_postings], k
        self.is_optional = self._choose_optional()  # (t,)
        self._completed_ends = completed_ends
        self._candidates: tuple[Ints, Ints] | None = None  # rows, and their scores without the optional lists

    def list_first_ranges(self) -> Ranges:
        """Return the lists that are not optional, and of the others the headers and what is completed now."""
        optional_lists = self._lists[self.is_optional]
        ranges: Ranges = list(map(tuple, self._lists[~self.is_optional, 1:].tolist()))
        headers_ends = optional_lists[:, 1] + HEADER_BYTES * -(-optional_lists[:, 0] // BLOCK)
        ranges += zip(optional_lists[:, 1].tolist(), headers_ends.tolist(), strict=True)
        if not any(self._file.count_missing_bytes(*bounds) for bounds in ranges):
            return ranges  # a query that needs no request is answered even while the store cannot be reached
        remaining_bytes = _MAX_COMPLETED_BYTES
        for (_, begin, end), headers_end in zip(optional_lists.tolist(), headers_ends.tolist(), strict=True):
            completed_end = self._completed_ends.get(begin, end)
            if completed_end == end:  # new, or removed from the cache
                self._completed_ends[begin] = headers_end
                continue
            next_end = min(end, completed_end + remaining_bytes)
            remaining_bytes -= next_end - completed_end
            self._completed_ends[begin] = next_end
            ranges.append((completed_end, next_end))
        return ranges

    def find_candidates(self, weighting: Weighting) -> Ranges:
        """Find the candidates; return the blocks that may have them, or all lists if others may be among the best.

        Raises:
            InputError: the file is damaged.
        """
        file, is_required = self._file, ~self.is_optional
        headers = [self._read_headers(entry) for entry in self._lists[self.is_optional]]
        block_bounds = [
            _bound_blocks(header, factor, weighting)
            for header, factor in zip(headers, self._factors[self.is_optional], strict=True)
        ]
        optional_bound = sum(int(bounds.max()) for bounds in block_bounds)
        rows, sums = np.empty((2, int(self._lists[is_required, 0].sum())), np.int64)
        count, threshold = maxscore.sum_lists(
            file.lists,
            file.layout.lists,
            file.lengths,
            self._lists[is_required],
            self._factors[is_required],
            weighting,
            self._k,
            optional_bound,
            rows,
            sums,
        )
        if count == maxscore.DAMAGED:
            raise file.damaged_error()
        if threshold <= optional_bound:
            return list(map(tuple, self._lists[:, 1:].tolist()))
        rows, sums = rows[:count], sums[:count]
        reach = sums.copy()
        for header, bounds in zip(headers, block_bounds, strict=True):
            reach += np.append(bounds, 0)[np.searchsorted(header["last_row"], rows)]
        self._candidates = rows[reach >= threshold], sums[reach >= threshold]
        return self._list_blocks(headers)

    def rank(self, weighting: Weighting, scores: Ints, rows: Ints) -> int | None:
        """Fill in the best scores, in units, and rows; return their number. None: all lists have to be searched.

        Raises:
            InputError: the file is damaged.
        """
        if self._candidates is None:
            return None
        file, optional = self._file, self.is_optional
        count: int = maxscore.rank_rows(
            file.lists,
            file.layout.lists,
            file.lengths,
            self._lists[optional],
            self._factors[optional],
            weighting,
            *self._candidates,
            scores,
            rows,
        )
        if count == maxscore.DAMAGED:
            raise file.damaged_error()
        return count

    def _choose_optional(self) -> npt.NDArray[np.bool_]:
        is_optional = np.zeros(len(self._lists), bool)
        optional_sum, total = 0.0, float(self._factors.sum())
        for i in np.argsort(self._factors, kind="stable").tolist():
            has_headers = self._lists[i, 0] > BLOCK
            if not has_headers or self._file.count_missing_bytes(*self._lists[i, 1:]) < _MIN_OPTIONAL_BYTES:
                continue
            optional_sum += float(self._factors[i])
            if optional_sum > _MAX_OPTIONAL_SHARE * (total - optional_sum):
                break
            is_optional[i] = True
        if self._lists[~is_optional, 0].sum() < self._k:
            is_optional[:] = False
        return is_optional

    def _read_headers(self, entry: Ints) -> npt.NDArray[np.void]:
        """Return the headers of the blocks of a list.

        Raises:
            InputError: the file is damaged.
        """
        postings, begin, end = entry.tolist()
        size = HEADER_BYTES * -(-postings // BLOCK)
        if not 0 <= begin <= end - size or end > self._file.layout.lists:
            raise self._file.damaged_error()
        return self._file.lists[begin : begin + size].view(_HEADER)

    def _list_blocks(self, headers: Sequence[npt.NDArray[np.void]]) -> Ranges:
        """Return the blocks of the optional lists that may have candidates."""
        assert self._candidates is not None
        ranges: Ranges = []
        for header, (_, begin, _) in zip(headers, self._lists[self.is_optional], strict=True):
            blocks = np.unique(np.searchsorted(header["last_row"], self._candidates[0]))
            blocks = blocks[blocks < len(header)]
            ends = begin + header.nbytes + np.cumsum(header["bytes"], dtype=np.int64)
            begins = ends[blocks] - header["bytes"][blocks]
            ranges += zip(begins.tolist(), ends[blocks].tolist(), strict=True)
        return ranges


def _bound_blocks(header: npt.NDArray[np.void], factor: float, weighting: Weighting) -> Ints:
    """Return an upper bound of the scores of each block's postings; see `maxscore`."""
    weights, lengths = header["weight"].astype(np.float64), header["length"].astype(np.float64)
    contributions = weights / (weighting.saturation * weights + weighting.fixed + weighting.slope * lengths)
    contributions[weights >= MAX_HEADER_WEIGHT] = weighting.limit
    # As in `maxscore`, a posting adds at least one unit, and one is for rounding.
    bounds: Ints = np.maximum(1, factor * contributions.astype(np.float32)).astype(np.int64) + 1
    return bounds
