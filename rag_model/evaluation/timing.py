"""What each stage of a retriever takes, for questions that are asked one by one, as people do.

A batch would share the work of several questions among the cores. Retrievers take turns, question by question, so that
whatever else the machine does slows down all of them; a time is the median over the questions.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rag_model.errors import UsageError
from rag_model.retrieve.found import SnapshotRetriever
from rag_model.retrieve.indexes import encoders_of
from rag_model.retrieve.questions import Questions
from rag_model.retrieve.watch import Stage, Watch, labels


@dataclass(frozen=True, slots=True)
class Timing:
    """How many questions are asked one by one."""

    questions: int = 50  # spread evenly over the set: gives a median to a few percent
    seconds: float = 10.0  # of a retriever; slow ones are asked fewer questions, at least one

    def __post_init__(self) -> None:
        if self.questions < 1 or self.seconds < 0:
            raise UsageError(f"the timing is {self}: give at least 1 question and no negative time")


TIMING = Timing()


@dataclass(frozen=True, slots=True)
class Costs:
    """What a retriever's stages take."""

    questions: int  # that were asked
    encoder: float  # milliseconds a question; 0 without an encoder
    stages: Mapping[str, float]  # milliseconds a question, of each stage alone, by label


@dataclass(slots=True)
class _Tally:
    encoders: tuple[str, ...] = ()  # representations whose encoders are asked
    encoding: list[float] = field(default_factory=list)  # seconds, one a question
    stages: dict[str, list[float]] = field(default_factory=dict)


def time_stages(
    retrievers: Sequence[SnapshotRetriever], texts: Sequence[str], k: int, timing: Timing = TIMING
) -> list[Costs]:
    """Ask retrievers of one snapshot some of the questions to depth `k`, and return what their stages take.

    Retrievers that encode questions by the same encoders get one time for it.
    """
    tallies, asked = [_Tally() for _ in retrievers], 0
    end = time.perf_counter() + timing.seconds * len(retrievers)
    for place in np.linspace(0, len(texts) - 1, min(len(texts), timing.questions)).astype(int):
        for retriever, tally in zip(retrievers, tallies, strict=True):
            _ask(retriever, texts[place], k, tally)
        asked += 1
        if time.perf_counter() > end:
            break
    shared: dict[tuple[str, ...], list[float]] = {}
    for tally in tallies:
        shared.setdefault(tally.encoders, []).extend(tally.encoding)
    return [Costs(asked, _median(shared[tally.encoders]), _medians(tally)) for tally in tallies]


def _ask(retriever: SnapshotRetriever, text: str, k: int, tally: _Tally) -> None:
    watch = Watch()
    questions = Questions([text], watch)
    watch.ask(retriever, questions, k)
    tally.encoders = encoders_of(retriever.snapshot, leaves(watch.stages))
    tally.encoding.append(questions.seconds)
    for label, stage in zip(labels(watch.stages), watch.stages, strict=True):
        tally.stages.setdefault(label, []).append(stage.seconds)


def leaves(stages: Sequence[Stage]) -> list[str]:
    """Return the names of the stages that encode questions and have no legs."""
    return [stage.name for stage in stages if stage.encoded and not stage.legs]


def _median(seconds: Sequence[float]) -> float:
    return 1000 * float(np.median(seconds))


def _medians(tally: _Tally) -> dict[str, float]:
    return {label: _median(seconds) for label, seconds in tally.stages.items()}
