"""Search an index of words: a question's terms, their weights, and the best passages by them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rag_model.errors import UsageError
from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.postings.analyzer import Analyzer
from rag_model.index.postings.parameters import K1, MOST_TERMS, B, check_parameters
from rag_model.index.postings.ranking import Asked, PostingsIndex
from rag_model.index.postings.weighting import bm25

_UNIT = float(1 << 32)  # of scores


class Bm25Index(PostingsIndex):
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
            InputError: it is missing or damaged, or holds the weighted terms of an encoder.
        """
        super().__init__(path, mmap=mmap)
        if self.file.layout.scale:
            raise self.file.of_another_kind("weighted terms, and not of words")
        self._analyzer = analyzer
        self.defaults = {"k1": K1, "b": B, **defaults}

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
        self.check_depth(k)
        skip = bool(parameters.pop("skip", True))
        check_parameters(parameters)
        chosen = self.defaults | parameters
        weighting = bm25(chosen["k1"], chosen["b"], self.file.mean_length)
        return self.ranked(self._asked(questions), k, weighting, _UNIT, skip=skip)

    def every(self, questions: Sequence[str], k: int, **parameters: Any) -> Rows:
        """Return the rows that `search` finds, having read every posting of the questions' terms, (q, k) int64."""
        return self.search(questions, k, skip=False, **parameters)[1]

    def missing(self, text: str) -> list[str]:
        """Return the terms of a text that no passage holds."""
        terms = list(dict.fromkeys(self._analyzer.terms(text)))
        return [term.decode() for term, count in zip(terms, self.lists(terms)[:, 0], strict=True) if count < 1]

    def _asked(self, questions: Sequence[str]) -> Asked:
        counts = [Counter(self._analyzer.terms(question)) for question in questions]
        for number, own in enumerate(counts, start=1):
            if len(own) > MOST_TERMS:
                raise UsageError(f"question {number} has {len(own):,} different words: ask with up to {MOST_TERMS:,}")
        ends = np.cumsum([len(own) for own in counts], dtype=np.int64)
        lists = self.lists([term for own in counts for term in own])
        times = np.fromiter((count for own in counts for count in own.values()), np.float64, len(lists))
        idf = np.log1p((self.n - lists[:, 0] + 0.5) / (lists[:, 0] + 0.5))
        return Asked(lists, idf * times * _UNIT, ends)
