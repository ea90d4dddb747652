"""Citation recall and precision of hand-made answers are those of the definitions of ALCE."""

import json
from dataclasses import asdict, replace

import pytest

from rag_model.evaluation.answers.readings import Reading, produce_readings
from rag_model.evaluation.answers.scores import estimate_measures, measure_citations, score_answer
from rag_model.evaluation.questions import Question
from rag_model.reading.answer import Answer, ContextEntry, SupportingPassage, TokenUsage
from rag_model.retrieve.hits import Hit
from rag_model.toml import from_table

QUESTION = Question("q", "When was Animal Farm published, and who wrote it?")


@pytest.fixture
def read_answer(make_hits):
    """Return a function that reads an answer to three passages of the pages 7, 8 and 9, the last two as one entry."""
    hits: tuple[Hit, ...] = make_hits(
        [("7", "published in August 1945"), ("8", "by Orwell"), ("9", "born in Motihari")]
    )
    context = (
        ContextEntry(1, "Farm", "", "", 1, (0,), "published in August 1945"),
        ContextEntry(2, "Orwell", "", "", 2, (1, 2), "by Orwell born in Motihari"),
    )

    class TextReader:
        def __init__(self, text: str) -> None:
            self.text = text

        def answer_from(self, questions, passages) -> list[Answer]:
            support = tuple(SupportingPassage(hit) for hit in hits)
            return [Answer(questions[0], self.text, None, support, usage=TokenUsage(9, 3), context=context)]

    return lambda text, question=QUESTION: produce_readings(TextReader(text), [question], [hits])[0]


@pytest.mark.parametrize(
    ("text", "recall", "precision"),
    [
        ("August 1945 [1].", 1, 1),
        ("August 1945 [1][2].", 1, 0.5),  # the second adds nothing
        ("August 1945 [2].", 0, 0),
        ("August 1945, by a man born in Motihari [1][2].", 1, 1),  # each is needed
        ("August 1945 [1]. Born in Motihari.", 0.5, 1),
        ("August 1945 [1, 7].", 1, 0.5),  # there is no 7
        ("August 1945 [1]. Born in Burma [2].", 0.5, 0.5),
    ],
)
def test_citation_measures_are_those_of_alce(read_answer, text: str, recall: float, precision: float) -> None:
    measures = measure_citations(QUESTION, read_answer(text))
    assert measures == {"cited": 1, "citation-recall": recall, "citation-precision": precision}


def test_an_answer_without_citations_has_no_precision(read_answer) -> None:
    assert measure_citations(QUESTION, read_answer("August 1945.")) == {"cited": 0, "citation-recall": 0}
    assert measure_citations(QUESTION, read_answer("")) == {}
    assert measure_citations(QUESTION, replace(read_answer("x"), context=())) == {}  # passages were not numbered


def test_gold_answers_decide_if_a_statement_contains_one(read_answer) -> None:
    question = replace(QUESTION, answers=("Orwell",))
    assert measure_citations(question, read_answer("Written in Burma by Orwell [2]."))["citation-recall"] == 1
    assert measure_citations(question, read_answer("Written in August 1945 by Orwell [1]."))["citation-recall"] == 0


def test_citations_of_gold_passages_and_pages_are_measured(read_answer) -> None:
    question = replace(QUESTION, evidence=(frozenset({"7", "9"}), frozenset({"5"})))
    measures = measure_citations(question, read_answer("August 1945 [1]. Orwell [2]."))
    assert (measures["gold-citation-precision"], measures["gold-citation-recall"]) == (1, 1)
    measures = measure_citations(question, read_answer("August 1945 [1]."))
    assert (measures["gold-citation-precision"], measures["gold-citation-recall"]) == (1, 0.5)
    assert measure_citations(question, read_answer("August 1945."))["gold-citation-recall"] == 0
    passage_id = read_answer("Orwell [1][2].").passages[1].id
    measures = measure_citations(replace(QUESTION, passages=(passage_id,)), read_answer("Orwell [1][2]."))
    assert (measures["gold-citation-precision"], measures["gold-citation-recall"]) == (0.5, 1)


def test_an_answer_is_measured_without_its_citations(read_answer) -> None:
    question = replace(QUESTION, answers=("August 1945",))
    reading = read_answer("August 1945 [1]")
    assert reading.answer == "August 1945"
    scored_answer = score_answer(question, reading)
    assert scored_answer.measures["EM"] == 1
    assert estimate_measures([scored_answer, score_answer(question, read_answer("in 1944"))])["cited"].value == 0.5
    assert from_table(Reading, json.loads(json.dumps(asdict(reading))), "a reading") == reading
