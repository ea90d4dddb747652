"""Rows in consecutive parts: find the part of a row, and the row within that part."""

from collections.abc import Iterable, Iterator
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


class Partition:
    """Consecutive parts of given lengths; row = the rows of earlier parts + the row within its part."""

    def __init__(self, lengths: Iterable[int]) -> None:
        self.starts = [0, *accumulate(lengths)]  # first row of each part, and the end
        self.n = self.starts[-1]
        self._edges = np.array(self.starts)

    def split(self, rows: Rows) -> Iterator[tuple[int, slice, Rows]]:
        """Yield (part, slice of `rows`, rows within the part) for each part that contains some, in order.

        `rows` are ascending and in [0, n). Takes one binary search for each part, for any number of rows.
        """
        edges = np.searchsorted(rows, self._edges)
        for part in np.flatnonzero(np.diff(edges)).tolist():
            span = slice(int(edges[part]), int(edges[part + 1]))
            yield part, span, rows[span] - self.starts[part]
