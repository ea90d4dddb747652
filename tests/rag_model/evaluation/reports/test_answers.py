"""The report of a model's answers is one safe page that shows its metrics, curves and mistakes."""

from dataclasses import replace

import pytest

from rag_model.evaluation.answers.ablation import CLOSED_BOOK, OPEN_BOOK, AblationResult
from rag_model.evaluation.answers.collapse import measure_collapse
from rag_model.evaluation.answers.readings import AnswerPassage, Reading
from rag_model.evaluation.answers.scores import compare_answers, estimate_measures, score_answer
from rag_model.evaluation.bootstrap import estimate_mean
from rag_model.evaluation.questions import Question
from rag_model.evaluation.reports.answers import AnswerReport, render_answer_report
from rag_model.evaluation.reports.training import TrainingCurves
from tests.fixtures.strict_html import XSS, assert_harmless, parse_balanced


def create_result(name: str, k: int, answers: list[str], open_book: AblationResult | None = None) -> AblationResult:
    passages = tuple(AnswerPassage(f"{n}", f"{n}", XSS, f"{XSS} {n}", 0.5, 0.625, 0.375) for n in range(k))
    scored = tuple(
        score_answer(Question(str(n), f"{XSS} {n}?", ("Paris",)), Reading(str(n), answer, -1.5, passages, answer != ""))
        for n, answer in enumerate(answers)
    )
    return AblationResult(
        name,
        k,
        scored,
        estimate_measures(scored),
        compare_answers(scored, open_book.scored_answers) if open_book else {},
    )


@pytest.fixture
def report() -> AnswerReport:
    open_book = create_result(OPEN_BOOK, 5, ["Paris", XSS, "Paris, France", ""])
    rows = [
        open_book,
        create_result(CLOSED_BOOK, 1, ["Rome"] * 4, open_book),
        create_result(f"{OPEN_BOOK}, k = 1", 1, ["Paris"] * 4, open_book),
    ]
    return AnswerReport(
        model="cd" * 32,
        snapshot="ab" * 32,
        created_at="2026-11-21T11:00:00Z",
        kind="spans",
        results=rows,
        retrieval={"Success@5": 0.75, "nDCG@10": 0.5},
        retrieval_intervals={"Success@5": estimate_mean([1, 1, 1, 0])},
        collapse=measure_collapse([["a"], ["b"], ["c"], ["a"]], 10, unchanged=0.25),
        curves=TrainingCurves({"loss": [(0, 4.0), (100, 2.5)], XSS: []}),
        lineage={"data": XSS},
    )


def test_the_page_shows_metrics_and_conditions(report: AnswerReport) -> None:
    page = parse_balanced(render_answer_report(report))
    for piece in (
        "4 questions, model " + "cd" * 32,
        "3 distinct passages for 4 questions",
        "25% of the answers do not change",
        "Success@50.7500.250 to 1.0004",
        "nDCG@100.500",
        "closed book",
        "EMminus open bookF1minus open book",
        "+0.750 [+0.250, +1.000]",  # k = 1 minus the open book: all four right instead of one
        "EM, 1: 1",
        "loss, 100: 2.5",
    ):
        assert piece in page.text
    labels = [attributes["aria-label"] for name, attributes in page.elements if name == "svg"]
    assert labels == ["measures by passages per question", "loss by steps"]


def test_mistakes_are_shown_with_their_passages_and_weights(report: AnswerReport) -> None:
    page = parse_balanced(render_answer_report(report))
    assert "3 of 4 answers are not right" in page.text
    assert f"{XSS} 3?said: (nothing) …wanted: Paris" in page.text
    assert "said: Paris, Francewanted: Paris" in page.text
    assert f"{XSS} 0?" not in page.text  # the one that is right
    assert "0.6250.3750.500" in page.text
    assert "EM 0.00, F1 0.67, EM-unheld 0.00, supported 0.00; log p -1.50" in page.text


def test_the_number_of_mistakes_on_the_page_is_limited(report: AnswerReport) -> None:
    page = parse_balanced(render_answer_report(replace(report, max_wrong=1)))
    assert "3 of 4 answers are not right; the first 1" in page.text
    assert [name for name, _ in page.elements].count("details") == 1


def test_the_page_fetches_and_runs_nothing(report: AnswerReport) -> None:
    assert_harmless(render_answer_report(report))


def test_a_collapse_is_shown_first(report: AnswerReport) -> None:
    page = parse_balanced(
        render_answer_report(replace(report, collapse_reason="retrieval has collapsed: 50 questions"))
    )
    assert "Retrieval has collapsed: 50 questions." in page.text
    assert ("section", {"class": "verdict no"}) in page.elements


def test_a_minimal_report_is_a_page(report: AnswerReport) -> None:
    correct_result = create_result(OPEN_BOOK, 1, ["Paris"])
    minimal_report = AnswerReport("m", "s", "2026", "spans", [correct_result], {}, measure_collapse([["a"]], 1))
    page = parse_balanced(render_answer_report(minimal_report))
    assert "svg" not in {name for name, _ in page.elements}
    assert "not right" not in page.text
