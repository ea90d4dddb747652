"""Comparisons of retrievers with the first one: paired differences, groups, the recommendation and the page."""

import pytest

from rag_model.encoders.encoder import Encoder
from rag_model.evaluation.bootstrap import estimate_difference, estimate_mean
from rag_model.evaluation.questions import Question, QuestionSet
from rag_model.evaluation.reports.retrieval import RetrievalReport, render_retrieval_report
from rag_model.evaluation.retrieval.comparison import (
    LOW_OVERLAP,
    QuestionGroups,
    advise_retriever,
    compare_retrievers,
    count_prompt_words,
    group_questions,
    recommend_retriever,
)
from rag_model.evaluation.retrieval.judging import RetrievalJudge
from rag_model.evaluation.retrieval.staged import (
    QueryBatches,
    RetrieverMetrics,
    StageMetrics,
    combine_metrics,
    measure_stages,
    time_stages,
)
from rag_model.retrieve.factory import open_retrievers
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.strict_html import assert_harmless, parse_balanced
from tests.rag_model.evaluation.retrieval.test_staged import QUESTIONS

NAMES = ["ivfpq", "rrf(hnsw, exact)"]


@pytest.fixture(scope="module")
def metrics(snapshot: Snapshot, encoder: Encoder) -> list[RetrieverMetrics]:
    judge = RetrievalJudge.for_questions(QuestionSet(QUESTIONS))
    retrievers = open_retrievers(snapshot, NAMES, encoder=encoder)
    batches = QueryBatches(QUESTIONS)
    lists = [
        measure_stages(retriever, name, batches, judge, 3) for name, retriever in zip(NAMES, retrievers, strict=True)
    ]
    return [
        combine_metrics(stages, costs)
        for stages, costs in zip(lists, time_stages(retrievers, batches.texts, 3), strict=True)
    ]


def test_differences_are_paired_by_question(snapshot: Snapshot, metrics: list[RetrieverMetrics]) -> None:
    judge = RetrievalJudge.for_questions(QuestionSet(QUESTIONS))
    groups = group_questions(snapshot, QuestionSet(QUESTIONS), judge)
    assert {name: list(positions) for name, positions in groups.positions.items()} == {
        "source one": [0, 2],
        "source two": [1, 3],
        LOW_OVERLAP: [0, 1, 3],
    }
    first, second = compare_retrievers(metrics, judge, 3, groups)
    assert (first.expression, second.expression) == tuple(NAMES)
    assert first.overall.differences == {}
    actual, reference = metrics[1].final_stage.values, metrics[0].final_stage.values
    for name, estimate in second.overall.differences.items():
        paired = estimate_difference(actual[name], reference[name])
        assert (estimate.value, estimate.low, estimate.high) == pytest.approx((paired.value, paired.low, paired.high))
    group = second.groups["source two"]
    assert group.n == 2
    assert group.metrics["RR@10"].value == estimate_mean([actual["RR@10"][position] for position in (1, 3)]).value
    assert [list(stage) for stage in second.stages] == [list(actual)] * 3
    report = second.to_json()
    assert report["metrics"] == {name: estimate.value for name, estimate in second.overall.metrics.items()}
    assert [stage["stage"] for stage in report["stages"]] == ["hnsw", "exact", "rrf(hnsw, exact)"]
    assert report["groups"]["source one"]["differences"].keys() == report["metrics"].keys()


def test_questions_judged_by_answers_are_grouped_by_source(snapshot: Snapshot) -> None:
    question_set = QuestionSet(QUESTIONS[:2])
    assert list(group_questions(snapshot, question_set, RetrievalJudge("answers")).positions) == [
        "source one",
        "source two",
    ]


def test_a_question_without_its_passages_is_noted(snapshot: Snapshot) -> None:
    question_set = QuestionSet((*QUESTIONS, Question("e", "gone?", passages=("99-0",))))
    groups = group_questions(snapshot, question_set, RetrievalJudge.for_questions(question_set))
    assert groups.notes == ("1 of 5 questions name no passages of this snapshot; they count as missed",)


def test_the_page_shows_every_retriever_stage_and_group(snapshot: Snapshot, metrics: list[RetrieverMetrics]) -> None:
    question_set = QuestionSet(QUESTIONS)
    judge = RetrievalJudge.for_questions(question_set)
    comparisons = compare_retrievers(metrics, judge, 3, group_questions(snapshot, question_set, judge))
    report = RetrievalReport(
        snapshot.id,
        "2026-11-22",
        4,
        3,
        judge.judged_by,
        judge.get_headline_measure(3),
        comparisons,
        "<take> exact",
        ["a note"],
    )
    html = render_retrieval_report(report)
    assert_harmless(html)
    text = parse_balanced(html).text
    for piece in ("by its id", "<take> exact.", "a note.", "Stages of rrf(hnsw, exact)", "source one", LOW_OVERLAP):
        assert piece in text
    circles = [attributes for name, attributes in parse_balanced(html).elements if name == "circle"]
    assert len(circles) == 8  # each of two charts has one point of ivfpq and three of the fusion


def build_stage(name: str, milliseconds: float, values: list[float]) -> StageMetrics:
    return StageMetrics(name, {"Success@5": values}, milliseconds, milliseconds, milliseconds, 1, 1)


def build_metrics(expression: str, *stages: StageMetrics) -> RetrieverMetrics:
    return RetrieverMetrics(expression, stages, 0.0, 0, 1, ())


GOOD, EQUAL, BAD = [1.0] * 90 + [0.0] * 10, [1.0] * 89 + [0.0] * 10 + [1.0], [1.0] * 50 + [0.0] * 50


def test_the_cheapest_of_equally_good_retrievers_is_recommended() -> None:
    legs = build_stage("words", 1.0, BAD), build_stage("vectors", 3.0, EQUAL)
    fused = build_metrics("rrf(words, vectors)", *legs, build_stage("rrf(words, vectors)", 4.5, [1.0] * 100))
    assert recommend_retriever([fused], "Success@5").startswith(
        "use rrf(words, vectors) for this corpus: Success@5 1.000 at 4.5 ms per"
    )
    equal_fused = build_metrics("rrf(words, vectors)", *legs, build_stage("rrf(words, vectors)", 4.5, GOOD))
    sentence = recommend_retriever([equal_fused], "Success@5")
    assert sentence.startswith("use vectors for this corpus: Success@5 0.900 at 3 ms per question is the best value")
    assert recommend_retriever([equal_fused], "Success@5").endswith("and every retriever a fifth cheaper is worse")
    assert recommend_retriever(
        [build_metrics("a", build_stage("a", 1.0, GOOD)), build_metrics("b", build_stage("b", 2.0, BAD))],
        "Success@5",
    ).endswith(
        "use a for this corpus: Success@5 0.900 at 1 ms per question is the best value, and no other retriever is "
        "a fifth cheaper"
    )
    close_fused = build_metrics(
        "rrf(words, vectors)", *legs, build_stage("rrf(words, vectors)", 4.5, [*EQUAL[:-2], 1.0, 1.0])
    )
    assert "the best retriever, rrf(words, vectors), has 0.910 at 4.5 ms, but the interval" in recommend_retriever(
        [close_fused], "Success@5"
    )


@pytest.mark.parametrize(("first", "second"), [(2.0, 2.3), (2.3, 2.0)])
def test_small_differences_in_time_do_not_decide(first: float, second: float) -> None:
    metrics = [build_metrics("a", build_stage("a", first, EQUAL)), build_metrics("b", build_stage("b", second, GOOD))]
    assert recommend_retriever(metrics, "Success@5").startswith("use a for this corpus: ")


def test_a_single_retriever_is_not_recommended() -> None:
    assert recommend_retriever([build_metrics("hnsw", build_stage("hnsw", 1.0, GOOD))], "Success@5").startswith(
        "only hnsw was measured"
    )


def test_a_small_corpus_fits_a_prompt(snapshot: Snapshot) -> None:
    words = sum(len(passage.text.split()) for passage in snapshot.passages(range(snapshot.n)))
    assert count_prompt_words(snapshot) == words
    assert f"the whole corpus has about {words} words" in advise_retriever(snapshot, [], "Success@5")


def test_there_may_be_no_groups() -> None:
    assert QuestionGroups().positions == {}
