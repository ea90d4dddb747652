"""What a retriever does stage by stage: every leg, fusion and rerank, with its rows and its time.

A watch is handed in with the questions; without one nothing is measured, so serving pays nothing.

>>> watch = Watch()  # doctest: +SKIP
>>> found = watch.find(retriever, Questions(["who wrote animal farm?"], watch), 20)  # doctest: +SKIP
>>> [(stage.name, stage.seconds) for stage in watch.stages]  # doctest: +SKIP
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rag_model.retrieve.found import Found, SnapshotRetriever
from rag_model.retrieve.questions import QuestionEncoder, Questions


@dataclass(frozen=True, slots=True)
class Stage:
    """One retriever of an expression, or one list inside of it, and what it did for a batch of questions."""

    name: str  # as the expression has it, without a depth
    found: Found  # to the depth that it was asked for
    seconds: float  # its own: without those of its legs and of the question encoders
    retriever: SnapshotRetriever | None = None  # None: a list that a retriever made on the way and gave as `below`
    encoders: tuple[QuestionEncoder, ...] = ()  # of the questions, that it or a leg of it asked
    legs: tuple["Stage", ...] = ()  # what it was made from, in order

    @property
    def files(self) -> Mapping[str, int]:
        """The files that it reads itself, in bytes by name."""
        return {} if self.retriever is None else self.retriever.files

    def every(self) -> Iterator["Stage"]:
        """Yield all stages below it and itself, parts before the whole."""
        for leg in self.legs:
            yield from leg.every()
        yield self


def labels(stages: Sequence[Stage]) -> list[str]:
    """Return the stages' names; a name that occurs again gets its number: `hnsw`, `hnsw (2)`."""
    seen: Counter[str] = Counter()
    given = []
    for stage in stages:
        seen[stage.name] += 1
        given.append(stage.name if seen[stage.name] == 1 else f"{stage.name} ({seen[stage.name]})")
    return given


class Watch:
    """Times the stages of one retriever, for one batch of questions after another; for one thread."""

    def __init__(self) -> None:
        """Begin with no stage."""
        self._open: list[list[Stage]] = [[]]

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the latest batch, parts before the whole."""
        return tuple(stage for whole in self._open[0] for stage in whole.every())

    def ask(self, retriever: SnapshotRetriever, questions: Questions, k: int) -> Found:
        """Let a whole retriever find; what was watched before is forgotten."""
        self._open = [[]]
        return self.find(retriever, questions, k)

    def find(self, retriever: SnapshotRetriever, asked: Questions, k: int) -> Found:
        """Let a retriever find, and note it as a stage of what is running around it."""
        legs: list[Stage] = []
        self._open.append(legs)
        encoding, used, began = asked.seconds, len(asked.used), time.perf_counter()
        try:
            found = retriever.find(asked, k)
        finally:
            self._open.pop()
        spent = time.perf_counter() - began - (asked.seconds - encoding)
        if retriever.is_stage:
            own = spent - sum(stage.seconds for leg in legs for stage in leg.every())
            encoders = tuple({id(one): one for one in asked.used[used:]}.values())
            parts = (*legs, *_lists(found, legs))
            self._open[-1].append(Stage(retriever.name, found, max(own, 0.0), retriever, encoders, parts))
        else:
            self._open[-1].extend(legs)
        return found


def _lists(found: Found, legs: Sequence[Stage]) -> Iterator[Stage]:
    """Yield the lists that a retriever was made from besides its legs, such as the neighbours of what they found."""
    known = {leg.name for leg in legs}
    yield from (Stage(one.leg, one, 0.0) for one in found.below if one.leg not in known)
