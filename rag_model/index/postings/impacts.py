"""Search an index of impacts: the weighted terms of an encoder, a question's and the passages'."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rag_model.corpus.sparse_file import MOST_TERMS as VOCABULARY
from rag_model.corpus.sparse_file import QUESTION_UNITS
from rag_model.errors import UsageError
from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.postings.parameters import MOST_TERMS, check_terms
from rag_model.index.postings.part import numbered
from rag_model.index.postings.ranking import Asked, Ints, PostingsIndex
from rag_model.index.postings.weighting import IMPACT

_MOST_WEIGHT = 1e6  # of a question's term: sums stay whole numbers of 63 bits


class ImpactIndex(PostingsIndex):
    """A `SparseIndex`: score(q, d) = Σ_t w(t, q) · w(t, d) over the terms that a question and a passage share.

    Weights are whole numbers, the passages' in bytes and the questions' in units of 1/4096, so a score is a whole
    number too: what is skipped changes nothing.
    """

    def __init__(self, path: Path, defaults: Mapping[str, int], *, mmap: bool = True) -> None:
        """Open a file; `defaults` are the parameters of a search that gives none.

        Raises:
            InputError: it is missing, damaged, or holds the frequencies of words.
        """
        super().__init__(path, mmap=mmap)
        if not self.file.layout.scale:
            raise self.file.of_another_kind("words, and not of weighted terms")
        self.defaults = dict(defaults)

    def search(self, questions: Vectors, k: int, **parameters: Any) -> tuple[Vectors, Rows]:
        """Return the k best rows of each question, best first: (q, k) float32 scores, (q, k) int64 rows.

        A passage is found if it shares a term with the question; where fewer than k are found, the rest is row -1 with
        score -inf. Equal scores are ordered by row.

        Args:
            questions: (q, l, 2) float32: terms and their weights, as a `SparseEncoder` gives them; weight 0: no term.
            k: 1 <= k <= n.
            parameters: `terms`: only the heaviest of a question are looked up; and `skip`: False reads every posting,
                with the same result.

        Raises:
            InputError: the file is damaged.
            UsageError: `k` or a parameter is wrong, or a question is none.
        """
        self.check_depth(k)
        skip = bool(parameters.pop("skip", True))
        check_terms(parameters)
        asked = self._asked(questions, parameters.get("terms"))
        return self.ranked(asked, k, IMPACT, QUESTION_UNITS * self.file.layout.scale, skip=skip)

    def heaviest(self, questions: Vectors, most: int | None = None) -> tuple[Ints, Ints]:
        """Return the terms that are looked up and their weights in units, both (q, l) int64; 0 units: no term.

        Raises:
            UsageError: a question is none.
        """
        terms, units = as_units(questions)
        most = most or self.defaults.get("terms")
        if most is None:
            return terms, units
        order = np.lexsort((terms, -units))[:, :most]
        return np.take_along_axis(terms, order, 1), np.take_along_axis(units, order, 1)

    def _asked(self, questions: Vectors, most: int | None) -> Asked:
        terms, units = self.heaviest(questions, most)
        held = units > 0  # (q, l)
        counts = held.sum(axis=1, dtype=np.int64)
        if counts.max(initial=0) > MOST_TERMS:
            raise UsageError(
                f"question {counts.argmax() + 1} has {counts.max():,} terms: ask with up to {MOST_TERMS:,}"
            )
        return Asked(self.lists(numbered(terms[held])), units[held].astype(np.float64), np.cumsum(counts))


def as_units(questions: Vectors) -> tuple[Ints, Ints]:
    """Return the terms of questions and their weights in units, both (q, l) int64; 0 units: no term.

    Raises:
        UsageError: a term is no number of a vocabulary, or a weight is negative, not finite or too large.
    """
    if questions.ndim != 3 or questions.shape[2] != 2:
        raise UsageError(f"questions of shape {questions.shape} are no weighted terms: encode them by a sparse encoder")
    terms, weights = questions[..., 0].astype(np.float64), questions[..., 1].astype(np.float64)
    good = (terms >= 0) & (terms < VOCABULARY) & (terms == np.floor(terms)) & (weights >= 0) & (weights < _MOST_WEIGHT)
    if not good.all():
        raise UsageError(
            f"question {int((~good).any(axis=1).argmax()) + 1} has a term or a weight out of range: encode it again"
        )
    units = np.where(weights > 0, np.maximum(1, np.rint(weights * QUESTION_UNITS)), 0)
    return terms.astype(np.int64), units.astype(np.int64)
