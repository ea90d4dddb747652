"""Search posting lists of a remote file, and read only the blocks that can change the result.

The lists of the most frequent terms have most of the bytes, but contribute least to a score. In a
query that also has rarer terms, the lists of frequent terms are *optional*, and the lists of the
rarer terms are *required*.

1. The first round of requests reads the required lists and the headers of the optional lists.
2. The scores in the required lists are summed. The k-th best sum is a lower bound of the k-th best
   score. The headers give an upper bound of the scores in each optional block.
3. The candidates are the passages whose sum, with the upper bounds of the optional blocks that may
   contain them, reaches the lower bound. The second round reads these blocks.

If a passage that only has optional terms could be among the best, the second round reads all lists
instead. The hits and scores are always the same as from `maxscore`.

An optional list that later queries use again is downloaded step by step, up to a megabyte with each
query. A query that needs no request does not wait for this download. The complete list is decoded
and cached, which is faster than selecting blocks for each query.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rag_model.index.postings import maxscore
from rag_model.index.postings.file import PostingsFile
from rag_model.index.postings.lists import HEADER_BYTES, MAX_HEADER_WEIGHT
from rag_model.index.postings.maxscore import Weighting
from rag_model.index.postings.packing import BLOCK

_MIN_OPTIONAL_BYTES = 64 << 10  # a list with fewer bytes to download is required
# The sum of the optional lists' factors is at most this share of the required lists' sum. A share
# of 0.2 reads fewer bytes in the first round, but more in the second: over two million passages, an
# estimated 1.25 instead of 1.08 MB for both.
_MAX_OPTIONAL_SHARE = 0.1
# maximum bytes of optional lists that a query downloads for later queries
_MAX_COMPLETED_BYTES = 1 << 20
# header of a block; see `lists`
_HEADER = np.dtype([("last_row", "<u4"), ("bytes", "<u2"), ("weight", "u1"), ("length", "<u2")])
Ints = npt.NDArray[np.int64]
Ranges = list[tuple[int, int]]  # (begin, end) offsets in the section of the lists


class SelectiveSearch:
    """The search of one query.

    Call its methods in order; before the next call, load the ranges that a method returned.
    """

    def __init__(
        self, file: PostingsFile, lists: Ints, factors: npt.NDArray[np.float64], k: int, completed_ends: dict[int, int]
    ) -> None:
        """Choose the optional lists.

        Args:
            file: the inverted index, of which only byte ranges are read.
            lists: (t, 3) number of postings, start and end of each term's list.
            factors: (t,) factor of each term, in score units.
            k: number of hits.
            completed_ends: for optional lists of earlier queries, start of the list -> end of the
                downloaded part; shared by the searches of an index, and updated.
        """
        has_postings = lists[:, 0] > 0
        self._file, self._lists, self._factors, self._k = file, lists[has_postings], factors[has_postings], k
        self.is_optional = self._choose_optional()  # (t,)
        self._completed_ends = completed_ends
        # rows, and their scores without the optional lists
        self._candidates: tuple[Ints, Ints] | None = None

    def list_first_ranges(self) -> Ranges:
        """Return the byte ranges of the required lists and of the headers of the optional lists,
        and further ranges of optional lists for later queries.
        """
        optional_lists = self._lists[self.is_optional]
        first_ranges: Ranges = list(map(tuple, self._lists[~self.is_optional, 1:].tolist()))
        headers_ends = optional_lists[:, 1] + HEADER_BYTES * -(-optional_lists[:, 0] // BLOCK)
        first_ranges += zip(optional_lists[:, 1].tolist(), headers_ends.tolist(), strict=True)
        further_ranges = self._list_further_ranges(optional_lists, headers_ends)
        if any(self._file.count_missing_bytes(*bounds) for bounds in first_ranges):
            return first_ranges + further_ranges
        # A query that needs no request is answered even while the store cannot be reached.
        self._file.load_lists_later(further_ranges)
        return first_ranges

    def _list_further_ranges(self, optional_lists: Ints, headers_ends: Ints) -> Ranges:
        """Return ranges of optional lists that later queries will use, up to a megabyte."""
        later_ranges: Ranges = []
        remaining_bytes = _MAX_COMPLETED_BYTES
        for (_, list_begin, list_end), headers_end in zip(optional_lists.tolist(), headers_ends.tolist(), strict=True):
            completed_end = self._completed_ends.get(list_begin, list_end)
            # the list is new, or was complete and then removed from the cache
            if completed_end == list_end:
                self._completed_ends[list_begin] = headers_end
                continue
            next_end = min(list_end, completed_end + remaining_bytes)
            remaining_bytes -= next_end - completed_end
            self._completed_ends[list_begin] = next_end
            later_ranges.append((completed_end, next_end))
        return later_ranges

    def find_candidates(self, weighting: Weighting) -> Ranges:
        """Find the candidates, and return the optional blocks that may contain them.

        Return all lists if a passage that only has optional terms may be among the best.

        Raises:
            InputError: the file is damaged.
        """
        file, is_required = self._file, ~self.is_optional
        headers = [self._read_headers(list_entry) for list_entry in self._lists[self.is_optional]]
        block_bounds = [
            _bound_blocks(header, factor, weighting)
            for header, factor in zip(headers, self._factors[self.is_optional], strict=True)
        ]
        optional_bound = sum(int(list_bounds.max()) for list_bounds in block_bounds)
        rows, known_sums = np.empty((2, int(self._lists[is_required, 0].sum())), np.int64)
        n_rows, threshold = maxscore.sum_lists(
            file.lists,
            file.layout.lists_bytes,
            file.lengths,
            self._lists[is_required],
            self._factors[is_required],
            weighting,
            self._k,
            optional_bound,
            rows,
            known_sums,
        )
        if n_rows == maxscore.DAMAGED:
            raise file.create_damage_error()
        if threshold <= optional_bound:
            return list(map(tuple, self._lists[:, 1:].tolist()))
        rows, known_sums = rows[:n_rows], known_sums[:n_rows]
        score_bounds = known_sums.copy()
        for header, bounds in zip(headers, block_bounds, strict=True):
            score_bounds += np.append(bounds, 0)[np.searchsorted(header["last_row"], rows)]
        self._candidates = rows[score_bounds >= threshold], known_sums[score_bounds >= threshold]
        return self._list_blocks(headers)

    def rank(self, weighting: Weighting, scores: Ints, rows: Ints) -> int | None:
        """Fill in the best rows and their scores, in score units; return the number of hits.

        Return None if `find_candidates` returned all lists, which are then searched with
        `maxscore`.

        Raises:
            InputError: the file is damaged.
        """
        if self._candidates is None:
            return None
        file, is_optional = self._file, self.is_optional
        n_hits: int = maxscore.rank_rows(
            file.lists,
            file.layout.lists_bytes,
            file.lengths,
            self._lists[is_optional],
            self._factors[is_optional],
            weighting,
            *self._candidates,
            scores,
            rows,
        )
        if n_hits == maxscore.DAMAGED:
            raise file.create_damage_error()
        return n_hits

    def _choose_optional(self) -> npt.NDArray[np.bool_]:
        """Return a (t,) mask of the optional lists, which have the smallest factors."""
        is_optional = np.zeros(len(self._lists), bool)
        optional_sum, factor_sum = 0.0, float(self._factors.sum())
        for i in np.argsort(self._factors, kind="stable").tolist():
            has_headers = self._lists[i, 0] > BLOCK
            if not has_headers or self._file.count_missing_bytes(*self._lists[i, 1:]) < _MIN_OPTIONAL_BYTES:
                continue
            optional_sum += float(self._factors[i])
            if optional_sum > _MAX_OPTIONAL_SHARE * (factor_sum - optional_sum):
                break
            is_optional[i] = True
        if self._lists[~is_optional, 0].sum() < self._k:
            is_optional[:] = False
        return is_optional

    def _read_headers(self, list_entry: Ints) -> npt.NDArray[np.void]:
        """Return the headers of the blocks of a list.

        Raises:
            InputError: the file is damaged.
        """
        n_postings, list_begin, end = list_entry.tolist()
        headers_bytes = HEADER_BYTES * -(-n_postings // BLOCK)
        if not 0 <= list_begin <= end - headers_bytes or end > self._file.layout.lists_bytes:
            raise self._file.create_damage_error()
        return self._file.lists[list_begin : list_begin + headers_bytes].view(_HEADER)

    def _list_blocks(self, headers: Sequence[npt.NDArray[np.void]]) -> Ranges:
        """Return the blocks of the optional lists that may contain candidates."""
        assert self._candidates is not None
        ranges: Ranges = []
        for header, (_, begin, _) in zip(headers, self._lists[self.is_optional], strict=True):
            candidate_blocks = np.unique(np.searchsorted(header["last_row"], self._candidates[0]))
            candidate_blocks = candidate_blocks[candidate_blocks < len(header)]
            block_ends = begin + header.nbytes + np.cumsum(header["bytes"], dtype=np.int64)
            block_begins = block_ends[candidate_blocks] - header["bytes"][candidate_blocks]
            ranges += zip(block_begins.tolist(), block_ends[candidate_blocks].tolist(), strict=True)
        return ranges


def _bound_blocks(header: npt.NDArray[np.void], factor: float, weighting: Weighting) -> Ints:
    """Return an upper bound of the scores of each block's postings; see `maxscore`."""
    weights, lengths = header["weight"].astype(np.float64), header["length"].astype(np.float64)
    contributions = weights / (weighting.saturation * weights + weighting.fixed + weighting.slope * lengths)
    contributions[weights >= MAX_HEADER_WEIGHT] = weighting.limit
    # As in `maxscore`, a posting contributes at least one unit. One more unit covers rounding.
    bounds: Ints = np.maximum(1, factor * contributions.astype(np.float32)).astype(np.int64) + 1
    return bounds
