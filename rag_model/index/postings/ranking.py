"""The best passages by the postings of a question's terms: what BM25 and impacts share."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rag_model.errors import UsageError
from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.postings import maxscore
from rag_model.index.postings.dictionary import find
from rag_model.index.postings.file import PostingsFile
from rag_model.index.postings.held import FEW_POSTINGS, HeldLists
from rag_model.index.postings.weighting import Weighting

Ints = npt.NDArray[np.int64]
_KNOWN = 100_000  # terms whose place is remembered


@dataclass(frozen=True, slots=True)
class Asked:
    """The terms of some questions, end to end."""

    lists: Ints  # (t, 3) postings, begin and end of each term's list; 0 postings of one that no passage holds
    factors: npt.NDArray[np.float64]  # (t,) in units, above 0: how much a posting of the term counts
    ends: Ints  # (q,) where each question's terms end

    def part(self, first: int, last: int) -> "Asked":
        """Return the questions [first, last)."""
        begin, end = int(self.ends[first - 1]) if first else 0, int(self.ends[last - 1])
        return Asked(self.lists[begin:end], self.factors[begin:end], self.ends[first:last] - begin)


class PostingsIndex:
    """A file of postings, searched exactly; a subclass says what a question's terms are and what a posting counts."""

    def __init__(self, path: Path, *, mmap: bool = True) -> None:
        """Open a file, mapped or loaded.

        Raises:
            InputError: it is missing or damaged.
        """
        self.file = PostingsFile(path, mapped=mmap)
        self._held = HeldLists(self.file)
        self._known: dict[bytes, list[int]] = {}  # terms that were asked for
        self.n = self.file.layout.n

    def ranked(
        self, asked: Asked, k: int, weighting: Weighting, unit: float, *, skip: bool = True
    ) -> tuple[Vectors, Rows]:
        """Return the k best rows of each question, best first: (q, k) float32 scores, (q, k) int64 rows.

        A passage is found if it holds a term of the question; where fewer than k are found, the rest is row -1 with
        score -inf. Equal scores are ordered by row.

        Args:
            asked: the questions' terms.
            k: 1 <= k <= n.
            weighting: of the postings.
            unit: a score of 1 in the units of the factors.
            skip: False reads every posting, with the same result.

        Raises:
            InputError: the file is damaged.
        """
        shape = len(asked.ends), k
        scores, rows = np.full(shape, -np.inf, np.float32), np.full(shape, -1, np.int64)
        if len(asked.ends):
            units, found = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
            sizes = self._best(asked, weighting, skip, units, found)
            held = np.arange(k) < sizes[:, None]  # (q, k)
            scores[held], rows[held] = units[held] / unit, found[held]
        return scores, rows

    def hold_few(self) -> None:
        """Hold few decoded lists from now on: for who asks some hundred questions once. What is found is the same."""
        self._held = HeldLists(self.file, FEW_POSTINGS)

    def check_depth(self, k: int) -> None:
        """Check that `k` rows a question can be asked for.

        Raises:
            UsageError: they cannot.
        """
        if not 1 <= k <= self.n:
            raise UsageError(f"k is {k}, but the index holds {self.n} passages: ask for 1 to {self.n}")

    def lists(self, terms: list[bytes]) -> Ints:
        """Return postings, begin and end of each term's list, (t, 3); 0 postings of a term that no passage holds.

        Raises:
            InputError: the file is damaged.
        """
        known = self._known
        new = [term for term in terms if term not in known]
        if len(known) + len(new) > _KNOWN:
            known, new = {}, terms
            self._known = known  # searches under way keep the former one
        if new:
            file = self.file
            known |= zip(new, find(new, file.dictionary, file.groups, file.layout.terms).tolist(), strict=True)
        found = np.array([known[term] for term in terms], np.int64).reshape(-1, 3)
        if found.min(initial=0) < 0 or found[:, 0].max(initial=0) > self.n:
            raise self.file.damaged()
        return found

    def _best(self, asked: Asked, weighting: Weighting, skip: bool, scores: Ints, rows: Ints) -> Ints:
        """Fill the best scores, in units, and rows of each question; return how many there are."""
        if skip and self._held.suit(asked.lists):
            sizes = self._held.search(asked.lists, asked.factors, asked.ends, weighting, scores, rows)
            if sizes is None:
                raise self.file.damaged()
            return sizes
        if len(asked.ends) > 1:  # fewer at once may fit
            half = len(asked.ends) // 2
            parts = ((asked.part(0, half), slice(half)), (asked.part(half, len(asked.ends)), slice(half, None)))
            return np.concatenate([self._best(one, weighting, skip, scores[at], rows[at]) for one, at in parts])
        known, file = asked.lists[:, 0] > 0, self.file
        lists, factors = asked.lists[known], asked.factors[known]
        if not len(lists):
            return np.zeros(1, np.int64)
        count: int = maxscore.search(
            file.lists,
            file.layout.lists,
            file.lengths,
            lists,
            factors,
            weighting,
            scores.shape[1],
            skip,
            scores[0],
            rows[0],
        )
        if count == maxscore.DAMAGED:
            raise file.damaged()
        return np.array([count])
