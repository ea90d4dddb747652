"""What a retriever finds (rows and scores), and how passages are added to make hits.

A composed retriever works on rows and scores; passages are read once, for those that are given in the end.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat

import numpy as np
import numpy.typing as npt

from rag_model.corpus.records import Passage
from rag_model.errors import UsageError
from rag_model.index.files.engine import Rows
from rag_model.retrieve.attribution import Source
from rag_model.retrieve.questions import Questions, check_questions
from rag_model.retrieve.retriever import Hit, LegHit
from rag_model.store.versions.snapshot import Snapshot

Scores = npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Found:
    """What one leg found for q questions: up to k rows each, best first."""

    leg: str  # as the expression names it
    rows: Rows  # (q, k) int64 global rows, no row twice per question; -1 after the last
    scores: Scores  # (q, k), larger is better; values at row -1 are meaningless
    products: Scores | None = None  # (q, k) inner products of questions' and passages' vectors; None: not computed
    below: tuple["Found", ...] = ()  # what it was made from, in the expression's order; empty for an index
    passages: Mapping[int, Passage] = field(default_factory=dict)  # by row: those that were read on the way

    def cut(self, k: int) -> "Found":
        """Return the first `k` of each question."""
        if self.rows.shape[1] <= k:
            return self
        products = None if self.products is None else self.products[:, :k]
        return replace(self, rows=self.rows[:, :k], scores=self.scores[:, :k], products=products)

    def steps(self) -> Iterator["Found"]:
        """Yield what it was made from, at every level, parts before the whole; for a single index, itself."""
        if not self.below:
            yield self
        for one in self.below:
            yield from one.steps()
            if one.below:
                yield one


class SnapshotRetriever(ABC):
    """A `Retriever` over one snapshot. A kind of retriever is a subclass with `find`."""

    exact_products = False  # whether `find` gives `Found.products`
    is_stage = True  # whether it does something that is worth a measurement of its own
    for_more = "or for more of it"  # what to do where `most` passages are too few, as a sentence's end

    def __init__(self, snapshot: Snapshot, name: str) -> None:
        """Hold the snapshot; `name` is how an expression calls it, without a depth."""
        self.snapshot, self.name = snapshot, name
        self._source = Source.of(snapshot.manifest.content.corpus)

    @abstractmethod
    def find(self, asked: Questions, k: int) -> Found:
        """Return up to `k` rows for each of one or more questions, 1 <= k <= `most`. Safe among threads."""

    @property
    def most(self) -> int:
        """How many passages a question can be given."""
        return self.snapshot.n

    @property
    def files(self) -> Mapping[str, int]:
        """The files that it reads itself, its legs' left out: bytes by name."""
        return {}

    def search(self, questions: Sequence[str], k: int) -> list[list[Hit]]:
        """Return the best `k` passages of each question, best first, in the order of the questions.

        A list is shorter than `k` only where fewer passages were found, as by an approximate index.

        Raises:
            UsageError: a question is empty or no text, or `k` is below 1, above the number of passages, or above what
                the retriever's own depths give.
        """
        self.check_depth(k)
        check_questions(questions)
        return self.ask(Questions(questions), k)

    def ask(self, asked: Questions, k: int) -> list[list[Hit]]:
        """Return what `search` does, for questions that were checked.

        Raises:
            UsageError: `k` is out of range.
        """
        self.check_depth(k)
        return self.hits(self.find(asked, k)) if len(asked) else []

    def hits(self, found: Found) -> list[list[Hit]]:
        """Return what was found with its passages, read once each and in row order."""
        passages = self.passages(found.rows, found.passages)
        credit = {row: (self._source.url(one), self._source.line(one)) for row, one in passages.items()}
        places = [_places(step) for step in found.steps()] if found.below else None
        products = None if found.products is None else found.products.tolist()
        hits: list[list[Hit]] = []
        for number, (rows, scores) in enumerate(zip(found.rows.tolist(), found.scores.tolist(), strict=True)):
            known = repeat(None) if products is None else products[number]
            ranked = [one for one in zip(rows, scores, known, strict=False) if one[0] >= 0]
            hits.append(
                [
                    Hit(
                        rank,
                        score,
                        row,
                        passages[row],
                        *credit[row],
                        product,
                        (LegHit(found.leg, rank, score),) if places is None else _legs(places, number, row),
                    )
                    for rank, (row, score, product) in enumerate(ranked, start=1)
                ]
            )
        return hits

    def passages(self, rows: Rows, known: Mapping[int, Passage]) -> dict[int, Passage]:
        """Return the passages of all rows by row, -1 left out; those that are `known` are not read again."""
        wanted = [row for row in np.unique(rows[rows >= 0]).tolist() if row not in known]
        return {**known, **dict(zip(wanted, self.snapshot.passages(wanted), strict=True))}

    def check_depth(self, k: int) -> None:
        """Check that `k` passages a question can be given.

        Raises:
            UsageError: they cannot.
        """
        if k < 1:
            raise UsageError(f"k is {k}: ask for at least 1 passage")
        if k > self.snapshot.n:
            raise UsageError(f"k is {k} but the snapshot holds {self.snapshot.n} passages: ask for fewer")
        if k > self.most:
            raise UsageError(f"k is {k} but {self.name} gives {self.most} passages: ask for fewer, {self.for_more}")


_Places = tuple[str, list[dict[int, tuple[int, float]]]]  # a leg, and of each question its rank and score by row


def _places(found: Found) -> _Places:
    every = zip(found.rows.tolist(), found.scores.tolist(), strict=True)
    return found.leg, [
        {row: (rank, score) for rank, (row, score) in enumerate(zip(*line, strict=True), start=1) if row >= 0}
        for line in every
    ]


def _legs(places: Sequence[_Places], number: int, row: int) -> tuple[LegHit, ...]:
    found = ((leg, lines[number].get(row)) for leg, lines in places)
    return tuple(LegHit(leg, *place) for leg, place in found if place is not None)
