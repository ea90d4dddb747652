"""Whether answers agree with the passages that they were read from."""

from dataclasses import replace

import pytest

from rag_model.evaluation.answers.readings import AnswerPassage, Reading
from rag_model.evaluation.answers.scores import estimate_measures, measure_grounding, score_answer
from rag_model.evaluation.questions import Question
from rag_model.reading.answer import Statement

ASKED = Question("q", "When was it published?", ("1945", "August 1945"))


def reading(answer: str, *texts: str) -> Reading:
    shown = tuple(AnswerPassage(f"{n}", f"{n}", "Title 1945", text, 1.0, None, None) for n, text in enumerate(texts))
    return Reading("q", answer, None, shown)


@pytest.mark.parametrize(
    ("answer", "texts", "expected"),
    [
        ("1945", ["out in 1945."], {"override": 0, "supported": 1}),
        ("It was 1945", ["out in 1945."], {"override": 0, "supported": 1}),  # it gives the answer, in other words
        ("1946", ["out in 1945."], {"override": 1, "supported": 0}),
        ("1946", ["no year", "in 1945, and 1946"], {"override": 1, "supported": 1}),
        ("1945", ["no year"], {"EM-unheld": 1, "supported": 0}),  # titles hold nothing
        ("no", ["no year"], {"EM-unheld": 0, "supported": 1}),
        ("", ["in 1945"], {"override": 1}),
        ("1945", [], {}),  # closed book
    ],
)
def test_an_answer_is_looked_for_in_what_was_read(answer: str, texts: list[str], expected: dict[str, float]) -> None:
    said = reading(answer, *texts)
    assert measure_grounding(ASKED, said, float(answer == "1945")) == expected
    found = score_answer(ASKED, said).measures
    assert {name: found[name] for name in found if name not in {"EM", "F1"}} == expected


@pytest.mark.parametrize(
    ("answer", "beside", "alone", "expected"),
    [
        ("1946", -2.0, -1.0, {"from-passages": 0, "override-live": 1}),  # from memory, over the passages
        ("1946", -1.0, -1.0, {"from-passages": 0, "override-live": 1}),
        ("1946", -1.0, -2.0, {"from-passages": 1, "override-live": 0}),  # read wrongly
        ("1945", -2.0, -1.0, {"from-passages": 0, "override-live": 0}),  # known, and held
        ("", -2.0, -1.0, {"from-passages": 0}),
        ("1946", -1.0, None, {}),
    ],
)
def test_the_memory_that_answered_is_told(
    answer: str, beside: float, alone: float | None, expected: dict[str, float]
) -> None:
    said = replace(reading(answer, "in 1945"), log_likelihood=beside, closed_book=alone)
    found = measure_grounding(ASKED, said, 0.0)
    assert {name: found[name] for name in found if name in {"from-passages", "override-live"}} == expected
    cites = replace(said, statements=(Statement(answer, (1,)),))
    assert not {"from-passages", "override-live"} & set(measure_grounding(ASKED, cites, 0.0))


def test_patterns_are_searched() -> None:
    asked = Question("q", "?", (r"19\d\d",))
    assert score_answer(asked, reading("1946", "in 1945"), "patterns").measures == {
        "EM": 1,
        "override": 0,
        "supported": 0,
    }
    assert score_answer(asked, reading("1846", "in 1945"), "patterns").measures["override"] == 1


def test_each_figure_is_of_the_questions_that_it_applies_to() -> None:
    said = [reading("1946", "in 1945"), reading("1945", "in 1945"), reading("1945", "no year")]
    figures = estimate_measures([score_answer(ASKED, one) for one in said])
    assert (figures["override"].value, figures["override"].n) == (0.5, 2)
    assert (figures["EM-unheld"].value, figures["EM-unheld"].n) == (1, 1)
    assert (figures["EM"].n, figures["supported"].n) == (3, 3)
