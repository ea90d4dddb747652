"""Which parts of a snapshot hold pages of a range: thousands of parts, each asked for by thousands of others."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from rag_model.store.versions.manifest import PartEntry


class PageRanges:
    """The parts of a snapshot by their pages. Parts in the order of their pages are found in logarithmic time."""

    def __init__(self, parts: Sequence[PartEntry]) -> None:
        """Index parts, which may be in any order, and may overlap."""
        self._parts = parts
        # a part and all before it end at the latest at `_lasts`; it and all after it begin at the earliest at `_firsts`
        self._lasts = list(accumulate((part.last_page for part in parts), max))
        self._firsts = list(accumulate((part.first_page for part in reversed(parts)), min))[::-1]

    def within(self, first_page: int, last_page: int) -> Iterator[tuple[int, PartEntry]]:
        """Yield number and entry of the parts that may hold pages [first_page, last_page], in their order."""
        low, high = bisect_left(self._lasts, first_page), bisect_right(self._firsts, last_page)
        for number in range(low, high):
            part = self._parts[number]
            if part.first_page <= last_page and first_page <= part.last_page:
                yield number, part
