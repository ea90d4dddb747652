"""Readers that give no answer where they are not sure, over a writer and a RAG model whose likelihoods are known."""

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
from tests.fixtures.citing_writer import Quoting


def hit(text: str, score: float = 0.5) -> Hit:
    return Hit(1, score, 0, Passage("1-0", "1", 1, "T", "", text, 0, 1, Passage.hash_of("T", text)), "", "")


HITS = [[hit("by George Orwell", 0.9)], [hit("no idea", 0.2)], []]
ASKED = ["who?", "what?", "where?"]


def test_an_answer_below_the_threshold_is_withheld() -> None:
    reader = AbstainingReader(ConcatReader(None, Quoting()), Threshold("retrieval", 0.5))
    messages: list[tuple[int, str]] = []
    answers = reader.answer_from(
        ASKED, HITS, AnswerCallbacks(on_text=lambda place, text: messages.append((place, text)))
    )
    assert [(answer.text, answer.abstained) for answer in answers] == [("Orwell [1].", False), ("", True), ("", True)]
    assert messages == [(0, "Orwell [1].")]  # what is withheld is not shown for a moment either
    assert [answer.confidence and answer.confidence.score for answer in answers] == [0.9, 0.2, -math.inf]
    shown = answer_json(answers[1])
    assert (shown["answer"], shown["abstained"]) == ("", True)
    assert shown["confidence"] == {"signal": "retrieval", "score": 0.2, "least": 0.5}
    assert json.dumps(answer_json(answers[2]), allow_nan=False)
    assert reader.decides["abstain_below"] == {"signal": "retrieval", "least": 0.5}


def test_the_memory_that_answered_is_told() -> None:
    concat = ConcatReader(None, Quoting())
    answers = add_closed_book(concat, concat.answer_from(ASKED, HITS))
    assert [(answer.log_likelihood, answer.closed_book) for answer in answers] == [
        (-0.5, -4.0),
        (-0.5, -4.0),
        (-4.0, -4.0),
    ]
    assert [get_score(answer, "passages") for answer in answers] == [3.5, 3.5, 0]
    assert answer_json(answers[0])["closed_book_log_likelihood"] == -4.0
    sure = AbstainingReader(concat, Threshold("passages", 1.0)).answer_from(ASKED, HITS)
    assert [one.abstained for one in sure] == [False, False, True]


def test_a_model_without_likelihoods_is_refused() -> None:
    silent = Answer("?", "x", None, (SupportingPassage(HITS[0][0]),))
    with pytest.raises(UsageError, match="does not give the likelihood"):
        Threshold("likelihood", 0.0).apply(silent)
    with pytest.raises(UsageError, match="threshold for `retrieval`"):
        Threshold("passages", 0.0).apply(silent)


def test_a_threshold_is_a_number_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "threshold.json"
    Threshold("retrieval", 0.25).write(path, risk=0.1)
    assert Threshold.parse(str(path)) == Threshold("retrieval", 0.25)
    assert Threshold.parse("-2.5") == Threshold("likelihood", -2.5)
    assert json.loads(path.read_text())["risk"] == 0.1


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"signal": "luck", "least": 1}', '{"signal": "retrieval"}', "\xff"])
def test_what_is_no_threshold_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "threshold.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match="contains no threshold"):
        Threshold.parse(str(path))
    with pytest.raises(InputError, match="contains no threshold"):
        Threshold.parse(str(tmp_path / "nowhere.json"))
    with pytest.raises(UsageError, match="finite"):
        Threshold.parse("nan")
