"""What each stage of a retriever takes, for questions that are asked one by one, as people do.

A batch would share the work of several questions among the cores. Retrievers take turns, question by question, so that
whatever else the machine does slows down all of them; a time is the median over the questions.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from rag_model.errors import UsageError
from rag_model.retrieve.found import SnapshotRetriever
from rag_model.retrieve.questions import Questions
from rag_model.retrieve.watch import Stage, Watch, labels

_Key = TypeVar("_Key")


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
    encoders: Mapping[int, float]  # milliseconds a question, by an encoder's identity
    stages: Mapping[str, float]  # milliseconds a question, of each stage alone, by label
    passages: float  # milliseconds a question of what follows: inner products that weigh passages, and their texts

    def encoding(self, stage: Stage) -> float:
        """Return the milliseconds a question of the encoders that a stage needs."""
        return sum(self.encoders.get(id(one), 0.0) for one in stage.encoders)


def time_stages(
    retrievers: Sequence[SnapshotRetriever], texts: Sequence[str], k: int, timing: Timing = TIMING
) -> list[Costs]:
    """Ask retrievers of one snapshot some of the questions to depth `k`, and return what their stages take.

    An encoder that several of them ask has one time for all.
    """
    encoders: dict[int, list[float]] = {}
    stages: list[dict[str, list[float]]] = [{} for _ in retrievers]
    passages: list[list[float]] = [[] for _ in retrievers]
    asked, end = 0, time.perf_counter() + timing.seconds * len(retrievers)
    for place in np.linspace(0, len(texts) - 1, min(len(texts), timing.questions)).astype(int):
        for retriever, own, rest in zip(retrievers, stages, passages, strict=True):
            rest.append(_ask(retriever, texts[place], k, encoders, own))
        asked += 1
        if time.perf_counter() > end:
            break
    shared = _medians(encoders)
    pairs = zip(stages, passages, strict=True)
    return [Costs(asked, shared, _medians(own), 1000 * float(np.median(rest))) for own, rest in pairs]


def _ask(
    retriever: SnapshotRetriever,
    text: str,
    k: int,
    encoders: dict[int, list[float]],
    stages: dict[str, list[float]],
) -> float:
    """Note what encoders and stages take; return the seconds of all else up to the hits, so that nothing is lost."""
    watch = Watch()
    questions, began = Questions([text], watch), time.perf_counter()
    retriever.hits(watch.ask(retriever, questions, k))
    whole = time.perf_counter() - began
    for encoder in {id(one): one for one in questions.used}.values():
        encoders.setdefault(id(encoder), []).append(questions.spent(encoder))
    for label, stage in zip(labels(watch.stages), watch.stages, strict=True):
        stages.setdefault(label, []).append(stage.seconds)
    return max(0.0, whole - questions.seconds - sum(stage.seconds for stage in watch.stages))


def _medians(seconds: Mapping[_Key, Sequence[float]]) -> dict[_Key, float]:
    return {name: 1000 * float(np.median(some)) for name, some in seconds.items()}
