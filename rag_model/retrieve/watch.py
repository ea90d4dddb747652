"""What a retriever does stage by stage: every leg, fusion and rerank, with its rows and its time.

A watch is handed in with the questions; without one nothing is measured, so serving pays nothing.

>>> watch = Watch()  # doctest: +SKIP
>>> found = watch.find(retriever, Questions(["who wrote animal farm?"], watch), 20)  # doctest: +SKIP
>>> [(stage.name, stage.seconds) for stage in watch.stages]  # doctest: +SKIP
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rag_model.retrieve.found import Found, SnapshotRetriever
from rag_model.retrieve.questions import Questions


@dataclass(frozen=True, slots=True)
class Stage:
    """One retriever of an expression, and what it did for a batch of questions."""

    retriever: SnapshotRetriever
    found: Found  # to the depth that it was asked for
    seconds: float  # its own: without those of its legs and of the question encoder
    encoded: bool  # whether it, or a leg of it, needs the questions' vectors
    legs: tuple["Stage", ...] = ()  # what it asked, in order

    @property
    def name(self) -> str:
        """How the expression calls it, without a depth."""
        return self.retriever.name

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
        encoding, uses, began = asked.seconds, asked.uses, time.perf_counter()
        try:
            found = retriever.find(asked, k)
        finally:
            self._open.pop()
        spent = time.perf_counter() - began - (asked.seconds - encoding)
        if retriever.is_stage:
            own = spent - sum(stage.seconds for leg in legs for stage in leg.every())
            self._open[-1].append(Stage(retriever, found, max(own, 0.0), asked.uses > uses, tuple(legs)))
        else:
            self._open[-1].extend(legs)
        return found
