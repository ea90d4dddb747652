"""The cost of answers, and the sentence that states whether retrieval is worth it."""

import pytest

from rag_model.evaluation.answers.ablation import (
    BM25,
    CLOSED_BOOK,
    OPEN_BOOK,
    AblationResult,
    describe_retrieval_benefit,
)
from rag_model.evaluation.answers.readings import Reading
from rag_model.evaluation.answers.scores import compare_answers, estimate_measures, score_answer
from rag_model.evaluation.questions import Question
from rag_model.reading.answer import TokenUsage

N = 40


def create_result(
    name: str, n_right: int, seconds: float = 0.25, tokens: int = 100, open_book: AblationResult | None = None
) -> AblationResult:
    """Return a condition of 40 questions whose first `n_right` answers are right."""
    scored = tuple(
        score_answer(
            Question(str(n), f"{n}?", ("yes",)),
            Reading(str(n), "yes" if n < n_right else "no", None, (), usage=TokenUsage(tokens, 2), seconds=seconds),
        )
        for n in range(N)
    )
    return AblationResult(
        name,
        5,
        scored,
        estimate_measures(scored),
        compare_answers(scored, open_book.scored_answers) if open_book else {},
    )


@pytest.mark.parametrize(
    ("n_closed_book", "verdict"),
    [
        (5, "retrieval is worth its cost here: EM is 0.375 higher than closed book [+"),
        (
            18,
            "40 questions do not show that retrieval is worth its cost here: EM is 0.050 higher than closed book [",
        ),
        (30, "retrieval is not worth its cost here: EM is 0.250 lower than closed book [-"),
        (
            20,
            "40 questions do not show that retrieval is worth its cost here: EM is 0.000 higher than closed book [",
        ),
    ],
)
def test_the_interval_decides_whether_retrieval_is_worth_its_cost(n_closed_book: int, verdict: str) -> None:
    open_book = create_result(OPEN_BOOK, 20)
    sentence = describe_retrieval_benefit(
        [open_book, create_result(CLOSED_BOOK, n_closed_book, 0.05, 10, open_book)],
        "EM",
        {"question encoder": 2.0, "exact": 1.0},
    )
    assert sentence.startswith(verdict)
    assert sentence.endswith("for 3 ms of search, 200 ms of reading and 90 tokens more per question")


def test_bm25_is_compared_too() -> None:
    open_book = create_result(OPEN_BOOK, 20)
    rows = [open_book, create_result(CLOSED_BOOK, 5, open_book=open_book), create_result(BM25, 22, open_book=open_book)]
    assert "] and 0.050 lower than with BM25 [-" in describe_retrieval_benefit(rows, "EM", {})
    assert describe_retrieval_benefit(rows[:1], "EM", {}) == ""
