"""Search an index of words: a question's terms, their weights, and the best passages by them."""

from collections import Counter
from collections.abc import Mapping, Sequence
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

_KNOWN = 100_000  # terms whose place is remembered
MOST_TERMS = 10_000  # of one question


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
        units, found = np.empty(k, np.int64), np.empty(k, np.int64)
        for number, question in enumerate(questions):
            lists, weights = self._terms(question, number)
            if not len(lists):
                continue
            idf = np.log1p((self.n - lists[:, 0] + 0.5) / (lists[:, 0] + 0.5))
            count = self._best(lists, idf * weights * maxscore.UNIT, fixed, slope, bool(skip), units, found)
            scores[number, :count], rows[number, :count] = units[:count] / maxscore.UNIT, found[:count]
        return scores, rows

    def missing(self, text: str) -> list[str]:
        """Return the terms of a text that no passage holds."""
        terms = list(dict.fromkeys(self._analyzer.terms(text)))
        found = self._found(terms)[:, 0] if terms else ()
        return [term.decode() for term, count in zip(terms, found, strict=True) if count < 1]

    def _best(
        self,
        lists: npt.NDArray[np.int64],
        factors: npt.NDArray[np.float64],
        fixed: float,
        slope: float,
        skip: bool,
        units: npt.NDArray[np.int64],
        rows: Rows,
    ) -> int:
        file = self.file
        if skip and self._held.suit(lists):
            count = self._held.search(lists, factors, fixed, slope, units, rows)
        else:
            count = maxscore.search(
                file.lists,
                file.words,
                file.layout.lists,
                file.lengths,
                lists,
                factors,
                fixed,
                slope,
                len(rows),
                skip,
                units,
                rows,
            )
        if count == maxscore.DAMAGED:
            raise file.damaged()
        return count

    def _terms(self, question: str, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return the (t, 3) lists of a question's known terms, and how often it has each, (t,)."""
        counts = Counter(self._analyzer.terms(question))
        if not counts:
            return np.empty((0, 3), np.int64), np.empty(0)
        if len(counts) > MOST_TERMS:
            raise UsageError(
                f"question {number + 1} has {len(counts):,} different words: ask with up to {MOST_TERMS:,}"
            )
        found = self._found(list(counts))
        if found.min() < 0:
            raise self.file.damaged()
        asked = np.fromiter(counts.values(), np.float64, len(counts))
        known = found[:, 0] > 0
        return (found, asked) if known.all() else (found[known], asked[known])

    def _found(self, terms: list[bytes]) -> npt.NDArray[np.int64]:
        """Return postings, begin and end of each term's list, (t, 3); 0 postings of a term that no passage holds."""
        known = self._known
        new = [term for term in terms if term not in known]
        if len(known) + len(new) > _KNOWN:
            known, new = {}, terms
            self._known = known  # searches under way keep the former one
        if new:
            file = self.file
            known |= zip(new, find(new, file.dictionary, file.groups, file.layout.terms).tolist(), strict=True)
        return np.array([known[term] for term in terms], np.int64)
