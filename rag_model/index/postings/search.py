"""Search an index of words: a question's terms, their weights, and the best passages by them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_model.errors import UsageError
from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.postings import maxscore
from rag_model.index.postings.analyzer import Analyzer
from rag_model.index.postings.dictionary import find
from rag_model.index.postings.file import PostingsFile
from rag_model.index.postings.held import HeldLists
from rag_model.index.postings.parameters import K1, B, check_parameters

Ints = npt.NDArray[np.int64]
_KNOWN = 100_000  # terms whose place is remembered
MOST_TERMS = 10_000  # of one question


@dataclass(frozen=True, slots=True)
class _Asked:
    """The terms of some questions, end to end."""

    lists: Ints  # (t, 3) postings, begin and end of each term's list; 0 postings of one that no passage holds
    factors: npt.NDArray[np.float64]  # (t,) idf times how often the question has the term, in units
    ends: Ints  # (q,) where each question's terms end

    def part(self, first: int, last: int) -> "_Asked":
        """Return the questions [first, last)."""
        begin, end = int(self.ends[first - 1]) if first else 0, int(self.ends[last - 1])
        return _Asked(self.lists[begin:end], self.factors[begin:end], self.ends[first:last] - begin)


class Bm25Index:
    """A `TextIndex` that ranks by BM25.

    score(q, d) = Σ_t c(t, q) · ln(1 + (N - df + .5) / (df + .5)) · tf / (tf + k1 (1 - b + b · dl / avgdl))

    over the terms t of the question, c(t, q) times in it: Robertson and Zaragoza 2009 without their constant factor
    k1 + 1, with the idf of Lucene, which is never negative. N, df and avgdl are those of the whole corpus.
    """

    def __init__(self, path: Path, analyzer: Analyzer, defaults: Mapping[str, float], *, mmap: bool = True) -> None:
        """Open a file.

        Args:
            path: of the index.
            analyzer: the one that it was built with.
            defaults: `k1` and `b`, where a search gives none.
            mmap: map the file, instead of loading it.

        Raises:
            InputError: it is missing or damaged.
        """
        self.file, self._analyzer = PostingsFile(path, mapped=mmap), analyzer
        self.defaults = {"k1": K1, "b": B, **defaults}
        self._held = HeldLists(self.file)
        self._known: dict[bytes, list[int]] = {}  # terms that were asked for
        self.n = self.file.layout.n

    def search(self, questions: Sequence[str], k: int, **parameters: Any) -> tuple[Vectors, Rows]:
        """Return the k best rows of each question, best first: (q, k) float32 scores, (q, k) int64 rows.

        A passage is found if it holds a term of the question; where fewer than k are found, the rest is row -1 with
        score -inf. Equal scores are ordered by row.

        Args:
            questions: texts.
            k: 1 <= k <= n.
            parameters: `k1` >= 0 and 0 <= `b` <= 1; and `skip`: False reads every posting, with the same result.

        Raises:
            InputError: the file is damaged.
            UsageError: `k` or a parameter is wrong, or a question has too many terms.
        """
        if not 1 <= k <= self.n:
            raise UsageError(f"k is {k}, but the index holds {self.n} passages: ask for 1 to {self.n}")
        skip = parameters.pop("skip", True)
        check_parameters(parameters)
        chosen = self.defaults | parameters
        fixed = chosen["k1"] * (1 - chosen["b"])
        slope = chosen["k1"] * chosen["b"] / self.file.mean_length
        scores, rows = np.full((len(questions), k), -np.inf, np.float32), np.full((len(questions), k), -1, np.int64)
        if questions:
            asked = self._asked(questions)
            units, found = np.zeros((len(questions), k), np.int64), np.zeros((len(questions), k), np.int64)
            sizes = self._best(asked, (fixed, slope), bool(skip), units, found)
            held = np.arange(k) < sizes[:, None]  # (q, k)
            scores[held], rows[held] = units[held] / maxscore.UNIT, found[held]
        return scores, rows

    def missing(self, text: str) -> list[str]:
        """Return the terms of a text that no passage holds."""
        terms = list(dict.fromkeys(self._analyzer.terms(text)))
        found = self._found(terms)[:, 0] if terms else ()
        return [term.decode() for term, count in zip(terms, found, strict=True) if count < 1]

    def _best(self, asked: "_Asked", setting: tuple[float, float], skip: bool, scores: Ints, rows: Ints) -> Ints:
        """Fill the best scores, in units, and rows of each question; return how many there are."""
        if skip and self._held.suit(asked.lists):
            sizes = self._held.search(asked.lists, asked.factors, asked.ends, setting, scores, rows)
            if sizes is None:
                raise self.file.damaged()
            return sizes
        if len(asked.ends) > 1:  # fewer at once may fit
            half = len(asked.ends) // 2
            parts = ((asked.part(0, half), slice(half)), (asked.part(half, len(asked.ends)), slice(half, None)))
            return np.concatenate([self._best(one, setting, skip, scores[at], rows[at]) for one, at in parts])
        known, file = asked.lists[:, 0] > 0, self.file
        lists, factors = asked.lists[known], asked.factors[known]
        if not len(lists):
            return np.zeros(1, np.int64)
        count: int = maxscore.search(
            file.lists,
            file.words,
            file.layout.lists,
            file.lengths,
            lists,
            factors,
            *setting,
            scores.shape[1],
            skip,
            scores[0],
            rows[0],
        )
        if count == maxscore.DAMAGED:
            raise file.damaged()
        return np.array([count])

    def _asked(self, questions: Sequence[str]) -> "_Asked":
        counts = [Counter(self._analyzer.terms(question)) for question in questions]
        for number, own in enumerate(counts, start=1):
            if len(own) > MOST_TERMS:
                raise UsageError(f"question {number} has {len(own):,} different words: ask with up to {MOST_TERMS:,}")
        ends = np.cumsum([len(own) for own in counts])
        lists = self._found([term for own in counts for term in own])
        if lists.min(initial=0) < 0:
            raise self.file.damaged()
        times = np.fromiter((count for own in counts for count in own.values()), np.float64, len(lists))
        idf = np.log1p((self.n - lists[:, 0] + 0.5) / (lists[:, 0] + 0.5))
        return _Asked(lists, idf * times * maxscore.UNIT, ends)

    def _found(self, terms: list[bytes]) -> Ints:
        """Return postings, begin and end of each term's list, (t, 3); 0 postings of a term that no passage holds."""
        known = self._known
        new = [term for term in terms if term not in known]
        if len(known) + len(new) > _KNOWN:
            known, new = {}, terms
            self._known = known  # searches under way keep the former one
        if new:
            file = self.file
            known |= zip(new, find(new, file.dictionary, file.groups, file.layout.terms).tolist(), strict=True)
        return np.array([known[term] for term in terms], np.int64).reshape(-1, 3)
