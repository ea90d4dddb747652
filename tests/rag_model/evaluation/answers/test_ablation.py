"""Ablations with a reader whose every answer is known."""

from collections.abc import Callable, Sequence

import pytest

from rag_model.errors import UsageError
from rag_model.evaluation.answers.ablation import (
    CLOSED,
    GOLD,
    OPEN,
    SHUFFLED,
    Ablations,
    Condition,
    conditions,
    measure,
    open_book,
)
from rag_model.evaluation.answers.collapse import unchanged_share
from rag_model.evaluation.answers.readings import Reading, read
from rag_model.evaluation.questions.files import Question
from rag_model.evaluation.retrieval.retrieved import Retrieved, match_hits
from rag_model.retrieve.retriever import Hit
from tests.fixtures.last_word import LastWord

CITIES = ["Paris", "Rome", "Oslo", "Bonn", "Kyiv"]


def answered(condition: Condition) -> list[Reading]:
    return read(LastWord(), condition.questions, condition.hits)


@pytest.fixture
def outcomes(make_hits: Callable[[Sequence[tuple[str, str]]], tuple[Hit, ...]]) -> list[Retrieved]:
    """Five questions: three have the answer in their first passage, the fourth in its second, the fifth in none."""

    def found(n: int, city: str) -> list[tuple[str, str]]:
        right, wrong = f"the capital {n} is {city}", f"the capital {n} is far"
        places = {3: [wrong, right], 4: [wrong, wrong]}.get(n, [right, wrong])
        return [(f"{n}{place}", text) for place, text in enumerate([*places, wrong, wrong])]

    return [
        match_hits(Question(str(n), f"capital {n}?", (city,)), make_hits(found(n, city)))
        for n, city in enumerate(CITIES)
    ]


def test_the_loss_is_told_apart(outcomes: list[Retrieved]) -> None:
    book = measure(open_book(outcomes, 2), answered)
    rows = {
        one.name: measure(one, answered, book=book) for one in conditions(outcomes, 2, Ablations(sweep=(1, 2, 3, 9)))
    }
    assert book.figures["EM"].value == pytest.approx(3 / 5)
    assert rows[CLOSED].figures["EM"].value == pytest.approx(1 / 5)  # it believes in Rome
    assert rows[CLOSED].against["EM"].value == pytest.approx(-2 / 5)
    assert (rows[GOLD].figures["EM"].value, rows[GOLD].figures["EM"].n) == (1, 4)  # the fifth has none
    assert rows[GOLD].against["EM"].value == pytest.approx(1 / 4)  # over the four questions of both
    assert rows[SHUFFLED].figures["EM"].value == 0
    assert list(rows) == [CLOSED, GOLD, SHUFFLED, f"{OPEN}, k = 1", f"{OPEN}, k = 3"]  # 2 is the book, 9 too deep
    assert book.against == {}


def test_a_reader_shows_that_it_reads_when_passages_are_shuffled(outcomes: list[Retrieved]) -> None:
    by_name = {one.name: one for one in conditions(outcomes, 2, Ablations())}
    said = [[reading.answer for reading in answered(one)] for one in (open_book(outcomes, 2), by_name[SHUFFLED])]
    assert unchanged_share(*said) <= 1 / 5  # "far" may meet "far"


def test_shuffled_passages_are_always_another_questions_and_repeat(outcomes: list[Retrieved]) -> None:
    for seed in range(20):
        (shuffled,) = [one for one in conditions(outcomes, 2, Ablations(seed=seed)) if one.name == SHUFFLED]
        assert all(
            hits[0].passage.id != outcome.hits[0].passage.id
            for hits, outcome in zip(shuffled.hits, outcomes, strict=True)
        )
        assert sorted(hits[0].passage.id for hits in shuffled.hits) == sorted(
            one.hits[0].passage.id for one in outcomes
        )
        assert shuffled in list(conditions(outcomes, 2, Ablations(seed=seed)))


def test_the_evidence_names_the_gold_passage_where_there_is_one(outcomes: list[Retrieved]) -> None:
    told = Retrieved(Question("q", "?", ("Paris",), (frozenset({"02"}),)), outcomes[0].hits, outcomes[0].has_answer)
    (gold,) = [one for one in conditions([told], 2, Ablations()) if one.name == GOLD]
    assert gold.hits[0][0].passage.page_id == "02"  # and not "00", which holds the answer


def test_what_there_is_too_little_of_is_left_out(outcomes: list[Retrieved]) -> None:
    assert [one.name for one in conditions(outcomes[4:], 2, Ablations(sweep=()))] == [
        CLOSED
    ]  # no gold, none to swap with
    assert open_book(outcomes, 50).k == 4  # the corpus has no more


def test_closed_book_is_no_passage(outcomes: list[Retrieved]) -> None:
    closed = next(conditions(outcomes, 2, Ablations()))
    assert (closed.name, closed.k, closed.hits) == (CLOSED, 0, ((),) * 5)


def test_a_row_is_kept_as_json(outcomes: list[Retrieved]) -> None:
    book = measure(open_book(outcomes, 2), answered)
    kept = book.to_json()
    assert (kept["condition"], kept["k"], kept["n"]) == (OPEN, 2, 5)
    assert kept["metrics"]["EM"]["value"] == book.figures["EM"].value


def test_depths() -> None:
    assert Ablations().depth(5) == 100
    assert Ablations(sweep=(), gold_depth=3).depth(5) == 5
    with pytest.raises(UsageError, match="at least 1"):
        Ablations(sweep=(0,))
