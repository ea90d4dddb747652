"""Measures of whether answers agree with the passages that were read."""

from dataclasses import replace

import pytest

from rag_model.evaluation.answers.readings import AnswerPassage, Reading
from rag_model.evaluation.answers.scores import estimate_measures, measure_grounding, score_answer
from rag_model.evaluation.questions import Question
from rag_model.reading.answer import Statement

QUESTION = Question("q", "When was it published?", ("1945", "August 1945"))


def create_reading(answer: str, *texts: str) -> Reading:
    passages = tuple(AnswerPassage(f"{n}", f"{n}", "Title 1945", text, 1.0, None, None) for n, text in enumerate(texts))
    return Reading("q", answer, None, passages)


@pytest.mark.parametrize(
    ("answer", "texts", "expected"),
    [
        ("1945", ["out in 1945."], {"override": 0, "supported": 1}),
        ("It was 1945", ["out in 1945."], {"override": 0, "supported": 1}),  # contains the gold answer
        ("1946", ["out in 1945."], {"override": 1, "supported": 0}),
        ("1946", ["no year", "in 1945, and 1946"], {"override": 1, "supported": 1}),
        ("1945", ["no year"], {"EM-unheld": 1, "supported": 0}),  # titles do not count
        ("no", ["no year"], {"EM-unheld": 0, "supported": 1}),
        ("", ["in 1945"], {"override": 1}),
        ("1945", [], {}),  # closed book
    ],
)
def test_grounding_measures_compare_an_answer_with_its_passages(
    answer: str, texts: list[str], expected: dict[str, float]
) -> None:
    answer_reading = create_reading(answer, *texts)
    assert measure_grounding(QUESTION, answer_reading, float(answer == "1945")) == expected
    measures = score_answer(QUESTION, answer_reading).measures
    assert {name: measures[name] for name in measures if name not in {"EM", "F1"}} == expected


@pytest.mark.parametrize(
    ("answer", "with_passages", "closed_book", "expected"),
    [
        ("1946", -2.0, -1.0, {"from-passages": 0, "override-live": 1}),  # from memory, against the passages
        ("1946", -1.0, -1.0, {"from-passages": 0, "override-live": 1}),
        ("1946", -1.0, -2.0, {"from-passages": 1, "override-live": 0}),  # from the passages, misread
        ("1945", -2.0, -1.0, {"from-passages": 0, "override-live": 0}),  # from memory, and the passages support it
        ("", -2.0, -1.0, {"from-passages": 0}),
        ("1946", -1.0, None, {}),
    ],
)
def test_likelihoods_show_which_memory_answered(
    answer: str, with_passages: float, closed_book: float | None, expected: dict[str, float]
) -> None:
    answer_reading = replace(create_reading(answer, "in 1945"), log_likelihood=with_passages, closed_book=closed_book)
    measures = measure_grounding(QUESTION, answer_reading, 0.0)
    assert {name: measures[name] for name in measures if name in {"from-passages", "override-live"}} == expected
    with_statements = replace(answer_reading, statements=(Statement(answer, (1,)),))
    assert not {"from-passages", "override-live"} & set(measure_grounding(QUESTION, with_statements, 0.0))


def test_patterns_are_searched() -> None:
    question = Question("q", "?", (r"19\d\d",))
    assert score_answer(question, create_reading("1946", "in 1945"), "patterns").measures == {
        "EM": 1,
        "override": 0,
        "supported": 0,
    }
    assert score_answer(question, create_reading("1846", "in 1945"), "patterns").measures["override"] == 1


def test_each_measure_covers_only_questions_that_it_applies_to() -> None:
    readings = [create_reading("1946", "in 1945"), create_reading("1945", "in 1945"), create_reading("1945", "no year")]
    metrics = estimate_measures([score_answer(QUESTION, answer_reading) for answer_reading in readings])
    assert (metrics["override"].value, metrics["override"].n) == (0.5, 2)
    assert (metrics["EM-unheld"].value, metrics["EM-unheld"].n) == (1, 1)
    assert (metrics["EM"].n, metrics["supported"].n) == (3, 3)
