"""Retrievers beside the first: paired differences, groups, the sentence of advice, and the page."""

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
from tests.fixtures.strict_html import assert_harmless, parsed
from tests.rag_model.evaluation.retrieval.test_staged import ASKED

NAMES = ["ivfpq", "rrf(hnsw, exact)"]


@pytest.fixture(scope="module")
def measured(snapshot: Snapshot, encoder: Encoder) -> list[RetrieverMetrics]:
    judge = RetrievalJudge.for_questions(QuestionSet(ASKED))
    opened = open_retrievers(snapshot, NAMES, encoder=encoder)
    batches = QueryBatches(ASKED)
    lists = [measure_stages(one, name, batches, judge, 3) for name, one in zip(NAMES, opened, strict=True)]
    return [
        combine_metrics(one, costs) for one, costs in zip(lists, time_stages(opened, batches.texts, 3), strict=True)
    ]


def test_differences_are_those_of_the_same_questions(snapshot: Snapshot, measured: list[RetrieverMetrics]) -> None:
    judge = RetrievalJudge.for_questions(QuestionSet(ASKED))
    groups = group_questions(snapshot, QuestionSet(ASKED), judge)
    assert {name: list(places) for name, places in groups.positions.items()} == {
        "source one": [0, 2],
        "source two": [1, 3],
        LOW_OVERLAP: [0, 1, 3],
    }
    first, second = compare_retrievers(measured, judge, 3, groups)
    assert (first.expression, second.expression) == tuple(NAMES)
    assert first.overall.differences == {}
    actual, reference = measured[1].final_stage.values, measured[0].final_stage.values
    for name, one in second.overall.differences.items():
        paired = estimate_difference(actual[name], reference[name])
        assert (one.value, one.low, one.high) == pytest.approx((paired.value, paired.low, paired.high))
    lone = second.groups["source two"]
    assert lone.n == 2
    assert lone.metrics["RR@10"].value == estimate_mean([actual["RR@10"][place] for place in (1, 3)]).value
    assert [list(stage) for stage in second.stages] == [list(actual)] * 3
    told = second.to_json()
    assert told["metrics"] == {name: one.value for name, one in second.overall.metrics.items()}
    assert [stage["stage"] for stage in told["stages"]] == ["hnsw", "exact", "rrf(hnsw, exact)"]
    assert told["groups"]["source one"]["differences"].keys() == told["metrics"].keys()


def test_answers_have_sources_alone(snapshot: Snapshot) -> None:
    asked = QuestionSet(ASKED[:2])
    assert list(group_questions(snapshot, asked, RetrievalJudge("answers")).positions) == ["source one", "source two"]


def test_a_question_about_a_passage_that_is_gone_is_noted(snapshot: Snapshot) -> None:
    asked = QuestionSet((*ASKED, Question("e", "gone?", passages=("99-0",))))
    groups = group_questions(snapshot, asked, RetrievalJudge.for_questions(asked))
    assert groups.notes == ("1 of 5 questions name no passages of this snapshot; they count as missed",)


def test_the_page_shows_every_retriever_stage_and_group(snapshot: Snapshot, measured: list[RetrieverMetrics]) -> None:
    asked = QuestionSet(ASKED)
    judge = RetrievalJudge.for_questions(asked)
    standings = compare_retrievers(measured, judge, 3, group_questions(snapshot, asked, judge))
    report = RetrievalReport(
        snapshot.id,
        "2026-11-22",
        4,
        3,
        judge.judged_by,
        judge.get_headline_measure(3),
        standings,
        "<take> exact",
        ["a note"],
    )
    html = render_retrieval_report(report)
    assert_harmless(html)
    text = parsed(html).text
    for said in ("by its id", "<take> exact.", "a note.", "Stages of rrf(hnsw, exact)", "source one", LOW_OVERLAP):
        assert said in text
    drawn = [attributes for name, attributes in parsed(html).seen if name == "circle"]
    assert len(drawn) == 8  # in two charts: one of ivfpq, three of the fused one


def stage(name: str, milliseconds: float, values: list[float]) -> StageMetrics:
    return StageMetrics(name, {"Success@5": values}, milliseconds, milliseconds, milliseconds, 1, 1)


def alone(expression: str, *stages: StageMetrics) -> RetrieverMetrics:
    return RetrieverMetrics(expression, stages, 0.0, 0, 1, ())


GOOD, EQUAL, BAD = [1.0] * 90 + [0.0] * 10, [1.0] * 89 + [0.0] * 10 + [1.0], [1.0] * 50 + [0.0] * 50


def test_the_cheapest_that_is_not_below_the_best_is_wanted() -> None:
    legs = stage("words", 1.0, BAD), stage("vectors", 3.0, EQUAL)
    both = alone("rrf(words, vectors)", *legs, stage("rrf(words, vectors)", 4.5, [1.0] * 100))
    assert recommend_retriever([both], "Success@5").startswith(
        "use rrf(words, vectors) for this corpus: Success@5 1.000 at 4.5 ms per"
    )
    level = alone("rrf(words, vectors)", *legs, stage("rrf(words, vectors)", 4.5, GOOD))
    said = recommend_retriever([level], "Success@5")
    assert said.startswith("use vectors for this corpus: Success@5 0.900 at 3 ms per question is the best value")
    assert recommend_retriever([level], "Success@5").endswith("and every retriever a fifth cheaper is worse")
    assert recommend_retriever(
        [alone("a", stage("a", 1.0, GOOD)), alone("b", stage("b", 2.0, BAD))], "Success@5"
    ).endswith(
        "use a for this corpus: Success@5 0.900 at 1 ms per question is the best value, and no other retriever is "
        "a fifth cheaper"
    )
    close = alone("rrf(words, vectors)", *legs, stage("rrf(words, vectors)", 4.5, [*EQUAL[:-2], 1.0, 1.0]))
    assert "the best retriever, rrf(words, vectors), has 0.910 at 4.5 ms, but the interval" in recommend_retriever(
        [close], "Success@5"
    )


@pytest.mark.parametrize(("first", "second"), [(2.0, 2.3), (2.3, 2.0)])
def test_what_two_equal_ones_cost_by_chance_decides_nothing(first: float, second: float) -> None:
    given = [alone("a", stage("a", first, EQUAL)), alone("b", stage("b", second, GOOD))]
    assert recommend_retriever(given, "Success@5").startswith("use a for this corpus: ")


def test_one_retriever_alone_is_not_recommended() -> None:
    assert recommend_retriever([alone("hnsw", stage("hnsw", 1.0, GOOD))], "Success@5").startswith(
        "only hnsw was measured"
    )


def test_a_small_corpus_fits_a_prompt(snapshot: Snapshot) -> None:
    words = sum(len(passage.text.split()) for passage in snapshot.passages(range(snapshot.n)))
    assert count_prompt_words(snapshot) == words
    assert f"the whole corpus has about {words} words" in advise_retriever(snapshot, [], "Success@5")


def test_groups_may_be_none() -> None:
    assert QuestionGroups().positions == {}
