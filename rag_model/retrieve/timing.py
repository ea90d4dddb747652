"""Measure a retriever stage by stage: every leg, fusion and rerank, with its rows and its time.

A timer is passed in with the queries. Without one nothing is measured, so serving pays nothing.

>>> timer = StageTimer()  # doctest: +SKIP
>>> queries = Queries(["who wrote animal farm?"], timer)  # doctest: +SKIP
>>> ranked = timer.time_batch(retriever, queries, 20)  # doctest: +SKIP
>>> [(stage.name, stage.seconds) for stage in timer.stages]  # doctest: +SKIP
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rag_model.retrieve.retriever import Queries, QuestionEncoder, RankedRows, SnapshotRetriever


@dataclass(frozen=True, slots=True)
class RetrieverStage:
    """One retriever of an expression, or one list that it computed, with the result for a batch of
    queries.
    """

    name: str  # as the expression spells it, without a depth
    ranked: RankedRows  # to the depth that was requested
    seconds: float  # its own time, without that of its legs and of the question encoders
    retriever: SnapshotRetriever | None = None  # None: an intermediate list of `RankedRows.legs`
    encoders: tuple[QuestionEncoder, ...] = ()  # question encoders that it or one of its legs used
    legs: tuple["RetrieverStage", ...] = ()  # its inputs, in order

    @property
    def files(self) -> Mapping[str, int]:
        """The files that the stage reads itself, in bytes by name."""
        return {} if self.retriever is None else self.retriever.files

    def iter_stages(self) -> Iterator["RetrieverStage"]:
        """Yield the stages of its inputs at every level, inputs first, then itself."""
        for leg in self.legs:
            yield from leg.iter_stages()
        yield self


def label_stages(stages: Sequence[RetrieverStage]) -> list[str]:
    """Return a unique label for each stage: its name, numbered from the second occurrence on (`hnsw
    (2)`).
    """
    counts: Counter[str] = Counter()
    names = []
    for stage in stages:
        counts[stage.name] += 1
        names.append(stage.name if counts[stage.name] == 1 else f"{stage.name} ({counts[stage.name]})")
    return names


class StageTimer:
    """Measures the stages of one retriever, for one batch of queries after another. Not
    thread-safe.
    """

    def __init__(self) -> None:
        """Start without stages."""
        self._open: list[list[RetrieverStage]] = [[]]  # finished stages of each running one

    @property
    def stages(self) -> tuple[RetrieverStage, ...]:
        """The stages of the latest batch, inputs first."""
        return tuple(stage for root in self._open[0] for stage in root.iter_stages())

    def time_batch(self, retriever: SnapshotRetriever, queries: Queries, k: int) -> RankedRows:
        """Measure a search by the outermost retriever.

        The stages of the previous batch are dropped.
        """
        self._open = [[]]
        return self.time_find(retriever, queries, k)

    def time_find(self, retriever: SnapshotRetriever, queries: Queries, k: int) -> RankedRows:
        """Measure a search, and record it as a stage of the retriever that is running."""
        legs: list[RetrieverStage] = []
        self._open.append(legs)
        encoding_before, encoders_before = queries.encoding_seconds, len(queries.used_encoders)
        started = time.perf_counter()
        try:
            ranked = retriever.find(queries, k)
        finally:
            self._open.pop()
        elapsed = time.perf_counter() - started - (queries.encoding_seconds - encoding_before)
        if retriever.is_stage:
            own_seconds = elapsed - sum(stage.seconds for leg in legs for stage in leg.iter_stages())
            encoders = tuple({id(encoder): encoder for encoder in queries.used_encoders[encoders_before:]}.values())
            inputs = (*legs, *_extra_stages(ranked, legs))
            stage = RetrieverStage(retriever.name, ranked, max(own_seconds, 0.0), retriever, encoders, inputs)
            self._open[-1].append(stage)
        else:
            self._open[-1].extend(legs)
        return ranked


def _extra_stages(ranked: RankedRows, legs: Sequence[RetrieverStage]) -> Iterator[RetrieverStage]:
    """Yield the lists that a retriever computed itself, such as the graph neighbours of its
    candidates.
    """
    leg_names = {leg.name for leg in legs}
    yield from (RetrieverStage(extra.name, extra, 0.0) for extra in ranked.legs if extra.name not in leg_names)
