"""Readers that abstain below a confidence threshold, with a writer whose likelihoods are known."""

import json
import math
from pathlib import Path

import pytest

from rag_model.corpus.records import Passage
from rag_model.errors import InputError, UsageError
from rag_model.reading.answer import Answer, SupportingPassage, answer_json
from rag_model.reading.concat import ConcatReader
from rag_model.reading.confidence import AbstainingReader, Threshold, add_closed_book, get_score
from rag_model.reading.reader import AnswerCallbacks
from rag_model.retrieve.hits import Hit
from tests.fixtures.citing_writer import CitingWriter


def hit(text: str, score: float = 0.5) -> Hit:
    return Hit(1, score, 0, Passage("1-0", "1", 1, "T", "", text, 0, 1, Passage.hash_of("T", text)), "", "")


HITS = [[hit("by George Orwell", 0.9)], [hit("no idea", 0.2)], []]
QUESTIONS = ["who?", "what?", "where?"]


def test_answer_below_the_threshold_is_withheld() -> None:
    reader = AbstainingReader(ConcatReader(None, CitingWriter()), Threshold("retrieval", 0.5))
    messages: list[tuple[int, str]] = []
    callbacks = AnswerCallbacks(on_text=lambda row, text: messages.append((row, text)))
    answers = reader.answer_from(QUESTIONS, HITS, callbacks)
    assert [(answer.text, answer.abstained) for answer in answers] == [("Orwell [1].", False), ("", True), ("", True)]
    assert messages == [(0, "Orwell [1].")]  # a withheld answer is not streamed
    assert [answer.confidence and answer.confidence.score for answer in answers] == [0.9, 0.2, -math.inf]
    json_object = answer_json(answers[1])
    assert (json_object["answer"], json_object["abstained"]) == ("", True)
    assert json_object["confidence"] == {"signal": "retrieval", "score": 0.2, "least": 0.5}
    assert json.dumps(answer_json(answers[2]), allow_nan=False)
    assert reader.decides["abstain_below"] == {"signal": "retrieval", "least": 0.5}


def test_closed_book_likelihoods_show_the_effect_of_passages() -> None:
    concat = ConcatReader(None, CitingWriter())
    answers = add_closed_book(concat, concat.answer_from(QUESTIONS, HITS))
    assert [answer.log_likelihood for answer in answers] == [-0.5, -0.5, -4.0]
    assert [answer.closed_book for answer in answers] == [-4.0] * 3
    assert [get_score(answer, "passages") for answer in answers] == [3.5, 3.5, 0]
    assert answer_json(answers[0])["closed_book_log_likelihood"] == -4.0
    abstaining = AbstainingReader(concat, Threshold("passages", 1.0)).answer_from(QUESTIONS, HITS)
    assert [answer.abstained for answer in abstaining] == [False, False, True]


def test_answer_without_likelihood_is_refused() -> None:
    answer = Answer("?", "x", None, (SupportingPassage(HITS[0][0]),))
    with pytest.raises(UsageError, match="does not give the likelihood"):
        Threshold("likelihood", 0.0).apply(answer)
    with pytest.raises(UsageError, match="threshold for `retrieval`"):
        Threshold("passages", 0.0).apply(answer)


def test_threshold_is_a_number_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "threshold.json"
    Threshold("retrieval", 0.25).write(path, risk=0.1)
    assert Threshold.parse(str(path)) == Threshold("retrieval", 0.25)
    assert Threshold.parse("-2.5") == Threshold("likelihood", -2.5)
    assert json.loads(path.read_text())["risk"] == 0.1


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"signal": "luck", "least": 1}', '{"signal": "retrieval"}', "\xff"])
def test_invalid_threshold_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "threshold.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match="contains no threshold"):
        Threshold.parse(str(path))
    with pytest.raises(InputError, match="contains no threshold"):
        Threshold.parse(str(tmp_path / "nowhere.json"))
    with pytest.raises(UsageError, match="finite"):
        Threshold.parse("nan")
