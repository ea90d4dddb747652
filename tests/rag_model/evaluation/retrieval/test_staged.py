"""Metrics and times of the stages of a retriever on a small real snapshot."""

import time
from pathlib import Path

import pytest

from rag_model.encoders.encoder import Encoder
from rag_model.errors import UsageError
from rag_model.evaluation.measures.measure import JUDGED_BY
from rag_model.evaluation.questions import Question, QuestionSet
from rag_model.evaluation.retrieval.judging import RetrievalJudge, retrieve
from rag_model.evaluation.retrieval.staged import (
    DEFAULT_TIMING,
    QueryBatches,
    RetrieverMetrics,
    TimingSettings,
    combine_metrics,
    measure_stages,
    time_stages,
)
from rag_model.retrieve.factory import open_retriever, open_retrievers
from rag_model.retrieve.retriever import SnapshotRetriever
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.tiny import save_cross_encoder

QUESTIONS = (
    Question("a", "who wrote animal farm?", ("Orwell",), passages=("1-0",), source="one"),
    Question("b", "what does the aardvark eat", ("ants",), passages=("2-0",), source="two"),
    Question("c", "which unit measures electric current", ("ampere",), passages=("3-0",), source="one"),
    Question("d", "which city is the capital", ("Montgomery",), passages=("4-0", "10-0"), source="two"),
)
JUDGED_QUESTIONS = QuestionSet(QUESTIONS, {question.id: dict.fromkeys(question.passages, 1) for question in QUESTIONS})
ANSWERS = RetrievalJudge("answers")
SOURCED_QUESTIONS = (
    Question("1", "Animal Farm is an allegorical novella by George Orwell", own_document="1"),
    Question("7", "The Japanese abacus is called soroban", own_document="7"),
    Question("x", "Aikido is a modern Japanese martial art", own_document="x"),
)


def measure(
    retriever: SnapshotRetriever, judge: RetrievalJudge = ANSWERS, timing: TimingSettings = DEFAULT_TIMING
) -> RetrieverMetrics:
    batches = QueryBatches(QUESTIONS)
    lists = measure_stages(retriever, retriever.name, batches, judge, 3)
    (costs,) = time_stages([retriever], batches.texts, 3, timing)
    return combine_metrics(lists, costs)


def test_metrics_of_a_stage_are_those_of_the_stage_as_a_retriever(
    snapshot: Snapshot, encoder: Encoder, tmp_path: Path
) -> None:
    fused = "rrf(hnsw, ivfpq:3)"
    expression = f"rerank({fused}, {save_cross_encoder(tmp_path / 'cross')}, 5)"
    retrievers = [open_retriever(snapshot, stage, encoder=encoder) for stage in ("hnsw", "ivfpq", fused, expression)]
    outcomes = [list(retrieve(retriever, QUESTIONS, 3)) for retriever in retrievers]
    reranker = open_retriever(snapshot, expression, encoder=encoder)
    progress: list[tuple[int, int]] = []
    for by in JUDGED_BY:
        judge = RetrievalJudge.for_questions(JUDGED_QUESTIONS, by)
        measures = [*judge.list_measures(3), *judge.list_rank_measures(3)]
        lists = measure_stages(
            reranker, expression, QueryBatches(QUESTIONS), judge, 3, lambda *counts: progress.append(counts)
        )
        assert list(lists.values) == ["hnsw", "ivfpq", "rrf(hnsw, ivfpq:3)", reranker.name]
        assert [*lists.values.values()] == [judge.compute_values(alone, measures) for alone in outcomes]
        assert list(lists.results) == outcomes[-1]
    assert progress == [(4, 4)] * 3


def test_the_source_document_of_a_question_is_excluded(snapshot: Snapshot, encoder: Encoder) -> None:
    judge = RetrievalJudge("pages", {question.id: {"10": 1} for question in SOURCED_QUESTIONS})
    retriever = open_retriever(snapshot, "rrf(hnsw, exact)", encoder=encoder)
    stages = measure_stages(retriever, retriever.name, QueryBatches(SOURCED_QUESTIONS), judge, 3)
    deep = retriever.search([question.text for question in SOURCED_QUESTIONS], 5)
    assert [hits[0].page_id for hits in deep] == ["1", "7", "8"]
    expected = [
        [hit.page_id for hit in hits if hit.page_id != question.own_document][:3]
        for question, hits in zip(SOURCED_QUESTIONS, deep, strict=True)
    ]
    for outcomes in (stages.results, list(retrieve(retriever, SOURCED_QUESTIONS, 3))):
        assert [[hit.page_id for hit in outcome.hits] for outcome in outcomes] == expected
        assert [[hit.rank for hit in outcome.hits] for outcome in outcomes] == [[1, 2, 3]] * 3
    for stage, values in stages.values.items():
        outcomes_of_stage = list(retrieve(open_retriever(snapshot, stage, encoder=encoder), SOURCED_QUESTIONS, 3))
        assert values == judge.compute_values(outcomes_of_stage, list(values))
    every_hit = list(retrieve(retriever, SOURCED_QUESTIONS, snapshot.n))
    assert [len(outcome.hits) for outcome in every_hit] == [snapshot.n - 1, snapshot.n - 1, snapshot.n]


def test_time_and_bytes_add_up(snapshot: Snapshot, encoder: Encoder) -> None:
    metrics = measure(open_retriever(snapshot, "rrf(hnsw, exact, ivfpq)", encoder=encoder), timing=TimingSettings(3))
    files = snapshot.manifest.content.files
    *legs, fused = metrics.stages
    assert metrics.n_timed_queries == 3
    stage_milliseconds = sum(stage.milliseconds for stage in metrics.stages)
    assert fused.search_milliseconds == pytest.approx(stage_milliseconds)
    assert fused.total_milliseconds == pytest.approx(stage_milliseconds + metrics.encoder_milliseconds)
    for stage in legs:
        assert stage.total_milliseconds == pytest.approx(stage.milliseconds + metrics.encoder_milliseconds)
    vectors = sum(files[f"embeddings/part-0000{n}.npy"].size for n in (0, 1))
    sizes = [files["index/hnsw.faiss"].size, vectors, files["index/ivfpq.faiss"].size]
    assert [stage.bytes for stage in legs] == sizes
    assert fused.bytes == 0
    encoders = sum(path.stat().st_size for path in encoder.folder.rglob("*") if path.is_file())
    assert (metrics.encoder_bytes, fused.total_bytes) == (encoders, sum(sizes) + encoders)


def test_retrievers_that_share_an_encoder_share_its_time(snapshot: Snapshot, encoder: Encoder) -> None:
    retrievers = open_retrievers(snapshot, ["hnsw", "rrf(exact, ivfpq)"], encoder=encoder)
    first, second = time_stages(retrievers, [question.text for question in QUESTIONS], 3)
    assert first.encoders == second.encoders
    assert first.encoders[id(encoder)] > 0
    assert (list(first.stages), list(second.stages)) == (["hnsw"], ["exact", "ivfpq", "rrf(exact, ivfpq)"])


def test_questions_are_encoded_once_for_all_retrievers(snapshot: Snapshot, encoder: Encoder) -> None:
    batches = QueryBatches(QUESTIONS)
    for retriever in open_retrievers(snapshot, ["hnsw", "exact"], encoder=encoder):
        measure_stages(retriever, retriever.name, batches, ANSWERS, 3)
        (_, questions), *_ = batches.batches
        vectors = questions.find_vectors(encoder)
        assert vectors is questions.vectors(encoder)
    assert len(questions.used_encoders) == 4


def test_the_times_of_stages_add_up(snapshot: Snapshot, encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the clock takes one second."""
    clock_readings: list[float] = []
    monkeypatch.setattr(
        time, "perf_counter", lambda: clock_readings.append(float(len(clock_readings))) or clock_readings[-1]
    )  # type: ignore[func-returns-value]
    retriever = open_retriever(snapshot, "rrf(hnsw, ivfpq)", encoder=encoder, products=True)
    clock_readings.clear()
    (costs,) = time_stages([retriever], ["who?"], 3)
    _, start, *_, end, _ = clock_readings  # the first and the last reading check the remaining time
    parts = [*costs.encoders.values(), *costs.stages.values(), costs.passages]
    assert sum(parts) == pytest.approx(1000 * (end - start))
    assert costs.passages > 0


def test_at_least_one_question_is_timed(snapshot: Snapshot, encoder: Encoder) -> None:
    retriever = open_retriever(snapshot, "hnsw", encoder=encoder)
    assert measure(retriever, timing=TimingSettings(50, 0.0)).n_timed_queries == 1
    assert measure(retriever).n_timed_queries == 4


@pytest.mark.parametrize(("k", "text"), [(0, "who?"), (13, "who?"), (3, " ")])
def test_invalid_searches_are_refused(k: int, text: str, snapshot: Snapshot, encoder: Encoder) -> None:
    retriever = open_retriever(snapshot, "hnsw", encoder=encoder)
    with pytest.raises(UsageError):
        measure_stages(retriever, "hnsw", QueryBatches([Question("q", text)]), ANSWERS, k)


def test_a_timing_without_questions_is_refused() -> None:
    with pytest.raises(UsageError, match="give questions >= 1"):
        TimingSettings(0)
