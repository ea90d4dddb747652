"""Ablations with a reader whose every answer is known."""

from collections.abc import Callable, Sequence

import pytest

from rag_model.errors import UsageError
from rag_model.evaluation.answers.ablation import (
    CLOSED_BOOK,
    GOLD_PASSAGE,
    OPEN_BOOK,
    SHUFFLED_PASSAGES,
    AblationSettings,
    EvalCondition,
    build_open_book,
    iter_conditions,
    measure_condition,
)
from rag_model.evaluation.answers.collapse import measure_unchanged
from rag_model.evaluation.answers.readings import Reading, produce_readings
from rag_model.evaluation.questions import Question
from rag_model.evaluation.retrieval.judging import RetrievalResult, match_hits
from rag_model.retrieve.hits import Hit
from tests.fixtures.last_word_reader import LastWord

CITIES = ["Paris", "Rome", "Oslo", "Bonn", "Kyiv"]


def answered(condition: EvalCondition) -> list[Reading]:
    return produce_readings(LastWord(), condition.questions, condition.hits)


@pytest.fixture
def outcomes(make_hits: Callable[[Sequence[tuple[str, str]]], tuple[Hit, ...]]) -> list[RetrievalResult]:
    """Five questions: three have the answer in their first passage, the fourth in its second, the fifth in none."""

    def found(n: int, city: str) -> list[tuple[str, str]]:
        right, wrong = f"the capital {n} is {city}", f"the capital {n} is far"
        places = {3: [wrong, right], 4: [wrong, wrong]}.get(n, [right, wrong])
        return [(f"{n}{place}", text) for place, text in enumerate([*places, wrong, wrong])]

    return [
        match_hits(Question(str(n), f"capital {n}?", (city,)), make_hits(found(n, city)))
        for n, city in enumerate(CITIES)
    ]


def test_the_loss_is_told_apart(outcomes: list[RetrievalResult]) -> None:
    book = measure_condition(build_open_book(outcomes, 2), answered)
    rows = {
        condition.name: measure_condition(condition, answered, open_book_result=book)
        for condition in iter_conditions(outcomes, 2, AblationSettings(sweep=(1, 2, 3, 9)))
    }
    assert book.metrics["EM"].value == pytest.approx(3 / 5)
    assert rows[CLOSED_BOOK].metrics["EM"].value == pytest.approx(1 / 5)  # it believes in Rome
    assert rows[CLOSED_BOOK].differences["EM"].value == pytest.approx(-2 / 5)
    assert (rows[GOLD_PASSAGE].metrics["EM"].value, rows[GOLD_PASSAGE].metrics["EM"].n) == (1, 4)  # the fifth has none
    assert rows[GOLD_PASSAGE].differences["EM"].value == pytest.approx(1 / 4)  # over the four questions of both
    assert rows[SHUFFLED_PASSAGES].metrics["EM"].value == 0
    assert list(rows) == [
        CLOSED_BOOK,
        GOLD_PASSAGE,
        SHUFFLED_PASSAGES,
        f"{OPEN_BOOK}, k = 1",
        f"{OPEN_BOOK}, k = 3",
    ]  # 2 is the book, 9 too deep
    assert book.differences == {}


def test_a_reader_shows_that_it_reads_when_passages_are_shuffled(outcomes: list[RetrievalResult]) -> None:
    by_name = {condition.name: condition for condition in iter_conditions(outcomes, 2, AblationSettings())}
    said = [
        [reading.answer for reading in answered(one)]
        for one in (build_open_book(outcomes, 2), by_name[SHUFFLED_PASSAGES])
    ]
    assert measure_unchanged(*said) <= 1 / 5  # "far" may meet "far"


def test_shuffled_passages_are_always_another_questions_and_repeat(outcomes: list[RetrievalResult]) -> None:
    for seed in range(20):
        (shuffled,) = [
            condition
            for condition in iter_conditions(outcomes, 2, AblationSettings(seed=seed))
            if condition.name == SHUFFLED_PASSAGES
        ]
        assert all(
            hits[0].passage.id != outcome.hits[0].passage.id
            for hits, outcome in zip(shuffled.hits, outcomes, strict=True)
        )
        assert sorted(hits[0].passage.id for hits in shuffled.hits) == sorted(
            outcome.hits[0].passage.id for outcome in outcomes
        )
        assert shuffled in list(iter_conditions(outcomes, 2, AblationSettings(seed=seed)))


def test_the_evidence_names_the_gold_passage_where_there_is_one(outcomes: list[RetrievalResult]) -> None:
    told = RetrievalResult(
        Question("q", "?", ("Paris",), (frozenset({"02"}),)), outcomes[0].hits, outcomes[0].has_answer
    )
    (gold,) = [
        condition for condition in iter_conditions([told], 2, AblationSettings()) if condition.name == GOLD_PASSAGE
    ]
    assert gold.hits[0][0].passage.page_id == "02"  # and not "00", which holds the answer


def test_what_there_is_too_little_of_is_left_out(outcomes: list[RetrievalResult]) -> None:
    assert [condition.name for condition in iter_conditions(outcomes[4:], 2, AblationSettings(sweep=()))] == [
        CLOSED_BOOK
    ]  # no gold, none to swap with
    assert build_open_book(outcomes, 50).k == 4  # the corpus has no more


def test_closed_book_is_no_passage(outcomes: list[RetrievalResult]) -> None:
    closed = next(iter_conditions(outcomes, 2, AblationSettings()))
    assert (closed.name, closed.k, closed.hits) == (CLOSED_BOOK, 0, ((),) * 5)


def test_a_row_is_kept_as_json(outcomes: list[RetrievalResult]) -> None:
    book = measure_condition(build_open_book(outcomes, 2), answered)
    kept = book.to_json()
    assert (kept["condition"], kept["k"], kept["n"]) == (OPEN_BOOK, 2, 5)
    assert kept["metrics"]["EM"]["value"] == book.metrics["EM"].value


def test_depths() -> None:
    assert AblationSettings().search_depth(5) == 100
    assert AblationSettings(sweep=(), gold_depth=3).search_depth(5) == 5
    with pytest.raises(UsageError, match="at least 1"):
        AblationSettings(sweep=(0,))
