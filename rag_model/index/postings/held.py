"""Lists that were asked for lately, decoded, and search in them: what a service does with a corpus of some millions.

Scores are those of `maxscore`, exactly.
"""

from threading import Lock

import numpy as np
import numpy.typing as npt

from rag_model.index.postings.decoded import DecodedLists, Ints
from rag_model.index.postings.file import PostingsFile
from rag_model.index.postings.weighting import IMPACT, Weighting
from rag_model.index.postings.windowed import search_all

MOST_ROWS = 1 << 22  # passages of an index that is searched like this
# held at once, 8 to 15 bytes each with windows and bits: 500 MB at most, less for a smaller file
MOST_POSTINGS = 1 << 25
FEW_POSTINGS = 1 << 22  # for who asks some hundred questions once: 63 MB at most


class HeldLists:
    """The decoded lists of one file; safe among threads."""

    def __init__(self, file: PostingsFile, most: int | None = None) -> None:
        """Hold nothing yet, and `most` postings later; by default `MOST_POSTINGS`."""
        self._file, self._lock = file, Lock()
        self._room = min(file.layout.postings, MOST_POSTINGS if most is None else most)
        self._lists = DecodedLists(IMPACT, 0)

    def suit(self, found: Ints) -> bool:
        """Whether lists, (t, 3) as `find` gives them, fit here together."""
        if self._file.layout.n > MOST_ROWS:
            return False
        counts = found[:, 0]
        return int(counts.sum()) <= self._room or int(counts[_distinct(found)].sum()) <= self._room

    def search(
        self,
        found: Ints,
        factors: npt.NDArray[np.float64],
        ends: Ints,
        weighting: Weighting,
        scores: Ints,
        rows: Ints,
    ) -> Ints | None:
        """Find the best rows of several questions, whose lists `suit`; see `maxscore.search`.

        Args:
            found: (t, 3) lists of all questions' terms; those without postings add nothing.
            factors: (t,) of each term.
            ends: (q,) where the terms of each question end.
            weighting: of the postings.
            scores: (q, k) int64, filled.
            rows: (q, k) int64, filled.

        Returns:
            How many were found of each question, (q,); None if a list is damaged.
        """
        with self._lock:
            lists = self._holding(found, weighting)
            if lists is None:
                return None
            arrays, known = lists.arrays, lists.numbers(found)
        sizes = np.empty(len(ends), np.int64)
        search_all(arrays, known, factors, ends, self._file.layout.n, scores, rows, sizes)
        return sizes

    def _holding(self, found: Ints, weighting: Weighting) -> DecodedLists | None:
        """Return lists among which all asked ones are, decoded now if they are new; None if one is damaged."""
        lists = self._lists
        asked = found[_distinct(found)]
        new = [one for one in asked if int(one[1]) not in lists]
        if weighting != lists.weighting or not lists.fit(sum(int(one[0]) for one in new)):
            lists, new = DecodedLists(weighting, self._room), list(asked)
            self._lists = lists  # now: the former ones are free before these fill, but for searches under way
        return lists if all(lists.add(self._file, one) for one in new) else None


def _distinct(found: Ints) -> Ints:
    """Return where each list with postings stands first."""
    firsts = np.unique(found[:, 1] * 2 + (found[:, 0] > 0), return_index=True)[1]
    chosen: Ints = firsts[found[firsts, 0] > 0]
    return chosen
