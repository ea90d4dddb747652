"""Ablations with a reader whose answers are known."""

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
from tests.fixtures.last_word_reader import LastWordReader

CITIES = ["Paris", "Rome", "Oslo", "Bonn", "Kyiv"]


def read_condition(condition: EvalCondition) -> list[Reading]:
    return produce_readings(LastWordReader(), condition.questions, condition.hits)


@pytest.fixture
def outcomes(make_hits: Callable[[Sequence[tuple[str, str]]], tuple[Hit, ...]]) -> list[RetrievalResult]:
    """Five questions: three have the answer in their first passage, the fourth in its second, the fifth in none."""

    def list_texts(n: int, city: str) -> list[tuple[str, str]]:
        right, wrong = f"the capital {n} is {city}", f"the capital {n} is far"
        texts = {3: [wrong, right], 4: [wrong, wrong]}.get(n, [right, wrong])
        return [(f"{n}{position}", text) for position, text in enumerate([*texts, wrong, wrong])]

    return [
        match_hits(Question(str(n), f"capital {n}?", (city,)), make_hits(list_texts(n, city)))
        for n, city in enumerate(CITIES)
    ]


def test_conditions_show_where_answers_are_lost(outcomes: list[RetrievalResult]) -> None:
    open_book = measure_condition(build_open_book(outcomes, 2), read_condition)
    rows = {
        condition.name: measure_condition(condition, read_condition, open_book_result=open_book)
        for condition in iter_conditions(outcomes, 2, AblationSettings(sweep=(1, 2, 3, 9)))
    }
    assert open_book.metrics["EM"].value == pytest.approx(3 / 5)
    assert rows[CLOSED_BOOK].metrics["EM"].value == pytest.approx(1 / 5)  # without passages, the reader answers Rome
    assert rows[CLOSED_BOOK].differences["EM"].value == pytest.approx(-2 / 5)
    # The fifth question has no gold passage, so the difference is that of four questions.
    assert (rows[GOLD_PASSAGE].metrics["EM"].value, rows[GOLD_PASSAGE].metrics["EM"].n) == (1, 4)
    assert rows[GOLD_PASSAGE].differences["EM"].value == pytest.approx(1 / 4)
    assert rows[SHUFFLED_PASSAGES].metrics["EM"].value == 0
    # With k = 2 it is the open book itself, and 9 passages were not retrieved.
    names = [CLOSED_BOOK, GOLD_PASSAGE, SHUFFLED_PASSAGES, f"{OPEN_BOOK}, k = 1", f"{OPEN_BOOK}, k = 3"]
    assert list(rows) == names
    assert open_book.differences == {}


def test_shuffled_passages_change_the_answers_of_a_reader(outcomes: list[RetrievalResult]) -> None:
    by_name = {condition.name: condition for condition in iter_conditions(outcomes, 2, AblationSettings())}
    answers = [
        [reading.answer for reading in read_condition(condition)]
        for condition in (build_open_book(outcomes, 2), by_name[SHUFFLED_PASSAGES])
    ]
    assert measure_unchanged(*answers) <= 1 / 5  # a wrong answer may be "far" again


def test_shuffled_passages_belong_to_another_question_and_repeat(outcomes: list[RetrievalResult]) -> None:
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


def test_evidence_selects_the_gold_passage(outcomes: list[RetrievalResult]) -> None:
    outcome = RetrievalResult(
        Question("q", "?", ("Paris",), (frozenset({"02"}),)), outcomes[0].hits, outcomes[0].has_answer
    )
    (gold_condition,) = [
        condition for condition in iter_conditions([outcome], 2, AblationSettings()) if condition.name == GOLD_PASSAGE
    ]
    assert gold_condition.hits[0][0].passage.page_id == "02"  # "00" has the answer, but is not evidence


def test_conditions_without_enough_passages_are_left_out(outcomes: list[RetrievalResult]) -> None:
    # The fifth question has no gold passage, and here no other question to swap passages with.
    (condition,) = iter_conditions(outcomes[4:], 2, AblationSettings(sweep=()))
    assert condition.name == CLOSED_BOOK
    assert build_open_book(outcomes, 50).k == 4  # a question has four hits


def test_closed_book_has_no_passages(outcomes: list[RetrievalResult]) -> None:
    closed_book = next(iter_conditions(outcomes, 2, AblationSettings()))
    assert (closed_book.name, closed_book.k, closed_book.hits) == (CLOSED_BOOK, 0, ((),) * 5)


def test_a_result_is_written_as_json(outcomes: list[RetrievalResult]) -> None:
    open_book = measure_condition(build_open_book(outcomes, 2), read_condition)
    record = open_book.to_json()
    assert (record["condition"], record["k"], record["n"]) == (OPEN_BOOK, 2, 5)
    assert record["metrics"]["EM"]["value"] == open_book.metrics["EM"].value


def test_search_depth_covers_k_gold_and_sweep() -> None:
    assert AblationSettings().search_depth(5) == 100
    assert AblationSettings(sweep=(), gold_depth=3).search_depth(5) == 5
    with pytest.raises(UsageError, match="at least 1"):
        AblationSettings(sweep=(0,))
