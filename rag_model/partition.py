"""Rows that lie in parts, one part behind the other: which part holds a row, and where in it."""

from collections.abc import Iterable, Iterator
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


class Partition:
    """Parts of so many rows each; row = the rows of earlier parts + the row within its part."""

    def __init__(self, lengths: Iterable[int]) -> None:
        self.starts = [0, *accumulate(lengths)]  # of each part, and the end
        self.n = self.starts[-1]
        self._edges = np.array(self.starts)

    def split(self, rows: Rows) -> Iterator[tuple[int, slice, Rows]]:
        """Yield (part, where in `rows`, rows within the part) of each part that holds some, in order.

        `rows` are ascending and in [0, n). Costs a binary search a part, whatever the number of rows.
        """
        edges = np.searchsorted(rows, self._edges)
        for part in np.flatnonzero(np.diff(edges)).tolist():
            span = slice(int(edges[part]), int(edges[part + 1]))
            yield part, span, rows[span] - self.starts[part]
