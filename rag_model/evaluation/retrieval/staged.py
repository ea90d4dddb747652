"""Measure quality, time and bytes of each stage of a retriever, such as a fusion or a reranker.

Queries are timed one by one, because the cores would work on several queries of a batch at once.
The retrievers take turns, so that other load on the machine slows down all of them. A time is the
median over the queries.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from rag_model.errors import UsageError
from rag_model.evaluation.questions import Question
from rag_model.evaluation.retrieval.judging import (
    QUERY_BATCH,
    RetrievalJudge,
    RetrievalResult,
    build_answer_matcher,
    choose_search_depth,
    deepen_search,
    drop_own_document,
)
from rag_model.retrieve.models import list_model_files
from rag_model.retrieve.retriever import (
    Queries,
    RankedRows,
    RetrieverStage,
    SnapshotRetriever,
    StageTimer,
    check_queries,
    label_stages,
)

_Key = TypeVar("_Key")
# The arguments are the number of finished questions and the number of all questions.
ProgressCallback = Callable[[int, int], None]
ENCODER = "question encoder"  # name of the encoder's stage in reports
PASSAGES = "reading of passages"  # name of the stage that reads texts and computes inner products


@dataclass(frozen=True, slots=True)
class TimingSettings:
    """Limits of the time measurement."""

    # number of timed questions, evenly spread; with 50, the median is exact to a few percent
    questions: int = 50
    # Limit per retriever. A slow retriever runs fewer queries in this time, but at least one.
    seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.questions < 1 or self.seconds < 0:
            raise UsageError(f"invalid limits {self}: give questions >= 1 and seconds >= 0")


DEFAULT_TIMING = TimingSettings()


@dataclass(frozen=True, slots=True)
class StageTimings:
    """The median milliseconds per query of a retriever's stages."""

    n_queries: int  # number of timed queries
    encoders: Mapping[int, float]  # milliseconds by `id(encoder)`
    stages: Mapping[str, float]  # milliseconds by stage label, without those of child retrievers
    passages: float  # milliseconds to compute inner products and read the texts of the hits

    def get_encoding_milliseconds(self, stage: RetrieverStage) -> float:
        """Return the milliseconds per query of the encoders that a stage needs."""
        return sum(self.encoders.get(id(encoder), 0.0) for encoder in stage.encoders)


def time_stages(
    retrievers: Sequence[SnapshotRetriever], texts: Sequence[str], k: int, timing: TimingSettings = DEFAULT_TIMING
) -> list[StageTimings]:
    """Time the stages of retrievers of one snapshot on a sample of the questions, at depth `k`.

    If several retrievers share an encoder, its time is the median over the queries of all of them.
    """
    seconds_by_encoder: dict[int, list[float]] = {}
    seconds_by_stage: list[dict[str, list[float]]] = [{} for _ in retrievers]
    passage_seconds: list[list[float]] = [[] for _ in retrievers]
    n_timed, end_time = 0, time.perf_counter() + timing.seconds * len(retrievers)
    for position in np.linspace(0, len(texts) - 1, min(len(texts), timing.questions)).astype(int):
        for retriever, stage_seconds, other_seconds in zip(retrievers, seconds_by_stage, passage_seconds, strict=True):
            other_seconds.append(_time_query(retriever, texts[position], k, seconds_by_encoder, stage_seconds))
        n_timed += 1
        if time.perf_counter() > end_time:
            break
    median_by_encoder = _get_median_ms(seconds_by_encoder)
    seconds_by_retriever = zip(seconds_by_stage, passage_seconds, strict=True)
    return [
        StageTimings(n_timed, median_by_encoder, _get_median_ms(seconds), 1000 * float(np.median(other_seconds)))
        for seconds, other_seconds in seconds_by_retriever
    ]


def _time_query(
    retriever: SnapshotRetriever,
    text: str,
    k: int,
    seconds_by_encoder: dict[int, list[float]],
    seconds_by_stage: dict[str, list[float]],
) -> float:
    """Append the seconds of each encoder and stage to the lists; return all other seconds."""
    timer = StageTimer()
    queries, start_time = Queries([text], timer), time.perf_counter()
    retriever.build_hits(timer.time_batch(retriever, queries, k))
    total_seconds = time.perf_counter() - start_time
    for encoder in {id(encoder): encoder for encoder in queries.used_encoders}.values():
        seconds_by_encoder.setdefault(id(encoder), []).append(queries.get_encoding_seconds(encoder))
    for label, stage in zip(label_stages(timer.stages), timer.stages, strict=True):
        seconds_by_stage.setdefault(label, []).append(stage.seconds)
    return max(0.0, total_seconds - queries.encoding_seconds - sum(stage.seconds for stage in timer.stages))


def _get_median_ms(seconds: Mapping[_Key, Sequence[float]]) -> dict[_Key, float]:
    return {key: 1000 * float(np.median(timings)) for key, timings in seconds.items()}


class QueryBatches:
    """Questions in batches; retrievers with the same encoder reuse the vectors of the questions."""

    def __init__(self, questions: Sequence[Question]) -> None:
        """Split the questions into batches.

        Raises:
            UsageError: A question is empty or not a string.
        """
        check_queries([question.text for question in questions])
        self.n, self.timer = len(questions), StageTimer()
        batches = [questions[i : i + QUERY_BATCH] for i in range(0, len(questions), QUERY_BATCH)]
        self.batches = [(batch, Queries([question.text for question in batch], self.timer)) for batch in batches]

    @property
    def texts(self) -> list[str]:
        """The texts of the questions."""
        return [question.text for batch, _ in self.batches for question in batch]


@dataclass(frozen=True, slots=True)
class StageRankings:
    """The quality of each stage of a retriever."""

    expression: str
    retriever: SnapshotRetriever
    # one value per question, by stage label and by measure
    values: Mapping[str, Mapping[str, Sequence[float]]]
    stages: tuple[RetrieverStage, ...]  # stages that ran for the last batch, the final stage last
    results: tuple[RetrievalResult, ...]  # results of the final stage


@dataclass(frozen=True, slots=True)
class StageMetrics:
    """The quality and costs of one stage of a retriever; times are per query."""

    name: str  # part of the retriever expression, without its own depth
    values: Mapping[str, Sequence[float]]  # values by measure, one per question
    milliseconds: float  # time of this stage without its child retrievers
    search_milliseconds: float  # time of this stage and its child retrievers
    total_milliseconds: float  # time of this stage, its child retrievers and the encoder
    bytes: int  # size of the files that this stage reads and its child retrievers do not read
    total_bytes: int  # size of all files of this stage, its child retrievers and the encoder


@dataclass(frozen=True, slots=True)
class RetrieverMetrics:
    """The quality and costs of one retriever."""

    expression: str
    stages: tuple[StageMetrics, ...]  # the final stage is last
    encoder_milliseconds: float  # time to encode a query; 0 without an encoder
    encoder_bytes: int
    n_timed_queries: int  # number of queries that were timed one by one
    results: tuple[RetrievalResult, ...]  # results of the final stage, for run files

    @property
    def final_stage(self) -> StageMetrics:
        """The last stage; its results are the results of the retriever."""
        return self.stages[-1]


def measure_stages(
    retriever: SnapshotRetriever,
    expression: str,
    query_batches: QueryBatches,
    judge: RetrievalJudge,
    k: int,
    on_progress: ProgressCallback = lambda done, total: None,
) -> StageRankings:
    """Retrieve `k` hits for every question, and measure the quality of the hits of each stage.

    Raises:
        InputError: An answer pattern is not a regular expression.
        UsageError: `k` is out of range.
    """
    retriever.check_depth(k)
    measures = [*judge.list_measures(k), *judge.list_rank_measures(k)]
    values: dict[str, dict[str, list[float]]] = {}
    results: list[RetrievalResult] = []
    for batch, queries in query_batches.batches:
        depth: int | None = choose_search_depth(batch, k, retriever.most)
        while depth is not None:
            candidates = query_batches.timer.time_batch(retriever, queries, depth)
            *_, final_results = stage_results = _build_stage_results(
                retriever, candidates.truncate(depth), query_batches.timer.stages, batch, depth, k, judge
            )
            depth = deepen_search(depth, retriever.most, _count_missing(candidates, final_results, depth, k))
        for label, question_results in zip(label_stages(query_batches.timer.stages), stage_results, strict=True):
            values_by_measure = values.setdefault(label, {name: [] for name in measures})
            for name, measure_values in judge.compute_values(question_results, measures).items():
                values_by_measure[name].extend(measure_values)
        results += final_results
        on_progress(len(results), query_batches.n)
    return StageRankings(expression, retriever, values, query_batches.timer.stages, tuple(results))


def _build_stage_results(
    retriever: SnapshotRetriever,
    candidates: RankedRows,
    stages: Sequence[RetrieverStage],
    batch: Sequence[Question],
    depth: int,
    k: int,
    judge: RetrievalJudge,
) -> list[list[RetrievalResult]]:
    """Return the first `k` hits of each stage for each question, out of `depth` candidates.

    Each passage is read once, and searched for the answers of each question at most once.
    """
    rankings = [stage.ranked_rows.truncate(depth) for stage in stages]
    passage_by_row = {row: passage for ranking in rankings for row, passage in ranking.passages.items()}
    passages = retriever.read_passages(np.concatenate([ranking.rows.ravel() for ranking in rankings]), passage_by_row)
    stage_hits = [
        retriever.build_hits(replace(ranking, legs=(), products=None, passages=passages)) for ranking in rankings[:-1]
    ]
    stage_hits.append(retriever.build_hits(replace(candidates, passages=passages)))  # with children
    results_by_stage: list[list[RetrievalResult]] = [[] for _ in stage_hits]
    for position, question in enumerate(batch):
        contains_answer, match_by_row = build_answer_matcher(question, patterns=judge.patterns), dict[int, bool]()
        for stage_results, hits in zip(results_by_stage, stage_hits, strict=True):
            question_hits = drop_own_document(question, hits[position])[:k]
            for hit in question_hits:
                if hit.row not in match_by_row:
                    match_by_row[hit.row] = contains_answer(hit.passage.text)
            stage_results.append(
                RetrievalResult(question, tuple(question_hits), tuple(match_by_row[hit.row] for hit in question_hits))
            )
    return results_by_stage


def _count_missing(candidates: RankedRows, results: Sequence[RetrievalResult], depth: int, k: int) -> int:
    """Return how many of its `k` hits the question with the fewest hits lacks.

    Questions with fewer than `depth` candidates are ignored: a deeper search finds no more hits.
    """
    n_candidates = (candidates.rows >= 0).sum(axis=1)
    return max((k - len(result.hits) for result, n in zip(results, n_candidates, strict=True) if n >= depth), default=0)


def combine_metrics(rankings: StageRankings, costs: StageTimings) -> RetrieverMetrics:
    """Combine the quality and the times of a retriever's stages.

    A stage that did not run for all questions is left out.
    """
    label_by_id = dict(zip(map(id, rankings.stages), label_stages(rankings.stages), strict=True))

    def combine(stage: RetrieverStage) -> StageMetrics:
        stages = list(stage.iter_stages())
        child_paths = {path for substage in stages[:-1] for path in substage.files}
        size_by_path = {path: size for substage in stages for path, size in substage.files.items()}
        milliseconds = [costs.stages.get(label_by_id[id(substage)], 0.0) for substage in stages]
        return StageMetrics(
            name=label_by_id[id(stage)],
            values=rankings.values[label_by_id[id(stage)]],
            milliseconds=milliseconds[-1],
            search_milliseconds=sum(milliseconds),
            total_milliseconds=sum(milliseconds) + costs.get_encoding_milliseconds(stage),
            bytes=sum(n_bytes for path, n_bytes in size_by_path.items() if path not in child_paths),
            total_bytes=sum(size_by_path.values()) + _count_encoder_bytes(stage),
        )

    *_, final_stage = rankings.stages
    complete_stages = [
        s for s in rankings.stages if _count_values(rankings.values[label_by_id[id(s)]]) == len(rankings.results)
    ]
    return RetrieverMetrics(
        rankings.expression,
        tuple(map(combine, complete_stages)),
        costs.get_encoding_milliseconds(final_stage),
        _count_encoder_bytes(final_stage),
        costs.n_queries,
        rankings.results,
    )


def _count_encoder_bytes(stage: RetrieverStage) -> int:
    return sum(sum(list_model_files(encoder).values()) for encoder in stage.encoders)


def _count_values(values_by_name: Mapping[str, Sequence[float]]) -> int:
    return min(map(len, values_by_name.values()))
