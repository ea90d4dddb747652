"""A retriever measured stage by stage over a small real snapshot, beside what each stage gives alone."""

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

ASKED = (
    Question("a", "who wrote animal farm?", ("Orwell",), passages=("1-0",), source="one"),
    Question("b", "what does the aardvark eat", ("ants",), passages=("2-0",), source="two"),
    Question("c", "which unit measures electric current", ("ampere",), passages=("3-0",), source="one"),
    Question("d", "which city is the capital", ("Montgomery",), passages=("4-0", "10-0"), source="two"),
)
QUESTIONS = QuestionSet(ASKED, {question.id: dict.fromkeys(question.passages, 1) for question in ASKED})
ANSWERS = RetrievalJudge("answers")
OWN = (
    Question("1", "Animal Farm is an allegorical novella by George Orwell", own_document="1"),
    Question("7", "The Japanese abacus is called soroban", own_document="7"),
    Question("x", "Aikido is a modern Japanese martial art", own_document="x"),
)


def measured(
    retriever: SnapshotRetriever, judge: RetrievalJudge = ANSWERS, timing: TimingSettings = DEFAULT_TIMING
) -> RetrieverMetrics:
    batches = QueryBatches(ASKED)
    lists = measure_stages(retriever, retriever.name, batches, judge, 3)
    (costs,) = time_stages([retriever], batches.texts, 3, timing)
    return combine_metrics(lists, costs)


def test_metrics_of_a_stage_are_those_of_its_retriever_alone(
    snapshot: Snapshot, encoder: Encoder, tmp_path: Path
) -> None:
    fused = "rrf(hnsw, ivfpq:3)"
    whole = f"rerank({fused}, {save_cross_encoder(tmp_path / 'cross')}, 5)"
    retrievers = [open_retriever(snapshot, stage, encoder=encoder) for stage in ("hnsw", "ivfpq", fused, whole)]
    outcomes = [list(retrieve(retriever, ASKED, 3)) for retriever in retrievers]
    reranker = open_retriever(snapshot, whole, encoder=encoder)
    progress: list[tuple[int, int]] = []
    for by in JUDGED_BY:
        judge = RetrievalJudge.for_questions(QUESTIONS, by)
        measures = [*judge.list_measures(3), *judge.list_rank_measures(3)]
        lists = measure_stages(reranker, whole, QueryBatches(ASKED), judge, 3, lambda *counts: progress.append(counts))
        assert list(lists.values) == ["hnsw", "ivfpq", "rrf(hnsw, ivfpq)", reranker.name]
        assert [*lists.values.values()] == [judge.compute_values(alone, measures) for alone in outcomes]
        assert list(lists.outcomes) == outcomes[-1]
    assert progress == [(4, 4)] * 3


def test_hits_of_the_question_itself_are_dropped(snapshot: Snapshot, encoder: Encoder) -> None:
    judge = RetrievalJudge("pages", {question.id: {"10": 1} for question in OWN})
    retriever = open_retriever(snapshot, "rrf(hnsw, exact)", encoder=encoder)
    seen = measure_stages(retriever, retriever.name, QueryBatches(OWN), judge, 3)
    deep = retriever.search([question.text for question in OWN], 5)
    assert [hits[0].page_id for hits in deep] == ["1", "7", "8"]
    expected = [
        [hit.page_id for hit in hits if hit.page_id != question.own_document][:3]
        for question, hits in zip(OWN, deep, strict=True)
    ]
    for outcomes in (seen.outcomes, list(retrieve(retriever, OWN, 3))):
        assert [[hit.page_id for hit in outcome.hits] for outcome in outcomes] == expected
        assert [[hit.rank for hit in outcome.hits] for outcome in outcomes] == [[1, 2, 3]] * 3
    for stage, values in seen.values.items():
        alone = list(retrieve(open_retriever(snapshot, stage, encoder=encoder), OWN, 3))
        assert values == judge.compute_values(alone, list(values))
    every_hit = list(retrieve(retriever, OWN, snapshot.n))
    assert [len(outcome.hits) for outcome in every_hit] == [snapshot.n - 1, snapshot.n - 1, snapshot.n]


def test_time_and_bytes_add_up(snapshot: Snapshot, encoder: Encoder) -> None:
    seen = measured(open_retriever(snapshot, "rrf(hnsw, exact, ivfpq)", encoder=encoder), timing=TimingSettings(3))
    files = snapshot.manifest.content.files
    *legs, whole = seen.stages
    assert seen.timed == 3
    own = sum(stage.milliseconds for stage in seen.stages)
    assert whole.search_milliseconds == pytest.approx(own)
    assert whole.total_milliseconds == pytest.approx(own + seen.encoder_milliseconds)
    for stage in legs:
        assert stage.total_milliseconds == pytest.approx(stage.milliseconds + seen.encoder_milliseconds)
    vectors = sum(files[f"embeddings/part-0000{n}.npy"].size for n in (0, 1))
    sizes = [files["index/hnsw.faiss"].size, vectors, files["index/ivfpq.faiss"].size]
    assert [stage.bytes for stage in legs] == sizes
    assert whole.bytes == 0
    encoders = sum(path.stat().st_size for path in encoder.folder.rglob("*") if path.is_file())
    assert (seen.encoder_bytes, whole.total_bytes) == (encoders, sum(sizes) + encoders)


def test_retrievers_that_share_an_encoder_share_its_time(snapshot: Snapshot, encoder: Encoder) -> None:
    opened = open_retrievers(snapshot, ["hnsw", "rrf(exact, ivfpq)"], encoder=encoder)
    first, second = time_stages(opened, [question.text for question in ASKED], 3)
    assert first.encoders == second.encoders
    assert first.encoders[id(encoder)] > 0
    assert (list(first.stages), list(second.stages)) == (["hnsw"], ["exact", "ivfpq", "rrf(exact, ivfpq)"])


def test_questions_are_encoded_once_for_all_retrievers(snapshot: Snapshot, encoder: Encoder) -> None:
    batches = QueryBatches(ASKED)
    for retriever in open_retrievers(snapshot, ["hnsw", "exact"], encoder=encoder):
        measure_stages(retriever, retriever.name, batches, ANSWERS, 3)
        (_, questions), *_ = batches.batches
        known = questions.find_vectors(encoder)
        assert known is questions.vectors(encoder)
    assert len(questions.used_encoders) == 4


def test_no_time_between_two_stages_is_lost(
    snapshot: Snapshot, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which each look takes a second, and 1,000 ms are one."""
    looks: list[float] = []
    monkeypatch.setattr(time, "perf_counter", lambda: looks.append(float(len(looks))) or looks[-1])  # type: ignore[func-returns-value]
    retriever = open_retriever(snapshot, "rrf(hnsw, ivfpq)", encoder=encoder, products=True)
    looks.clear()
    (costs,) = time_stages([retriever], ["who?"], 3)
    _, began, *_, ended, _ = looks  # the first and the last look are at the time that is left
    parts = [*costs.encoders.values(), *costs.stages.values(), costs.passages]
    assert sum(parts) == pytest.approx(1000 * (ended - began))
    assert costs.passages > 0


def test_one_question_is_timed_however_little_time_there_is(snapshot: Snapshot, encoder: Encoder) -> None:
    retriever = open_retriever(snapshot, "hnsw", encoder=encoder)
    assert measured(retriever, timing=TimingSettings(50, 0.0)).timed == 1
    assert measured(retriever).timed == 4


@pytest.mark.parametrize(("k", "text"), [(0, "who?"), (13, "who?"), (3, " ")])
def test_what_no_search_takes_is_refused(k: int, text: str, snapshot: Snapshot, encoder: Encoder) -> None:
    retriever = open_retriever(snapshot, "hnsw", encoder=encoder)
    with pytest.raises(UsageError):
        measure_stages(retriever, "hnsw", QueryBatches([Question("q", text)]), ANSWERS, k)


def test_a_timing_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="give questions >= 1"):
        TimingSettings(0)
