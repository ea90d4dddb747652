"""Q-BLEU-1 beside a restatement of its equation, and what it minds that BLEU does not."""

import pytest

from rag_model.evaluation.answers.readings import Reading
from rag_model.evaluation.answers.scores import estimate_measures, score_answer
from rag_model.evaluation.measures.answers import QBleuWeights, q_bleu
from rag_model.evaluation.questions import Question

GOLD = "Which city is the capital of France and lies on the Seine?"


def harmonic(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def test_it_is_the_equation() -> None:
    """Kinds are sorted by hand: entities, question words, content, function words."""
    said = "Which river is in the capital of Peru?"
    entities = harmonic(0 / 1, 0 / 2)  # peru; france, seine
    question = harmonic(1 / 2, 1 / 2)  # which river; which city
    content = harmonic(1 / 1, 1 / 2)  # capital; capital, lies
    function = harmonic(3 / 4, 3 / 6)  # is in the of; is the of and on the
    bleu = 5 / 8 * 2.718281828459045 ** (1 - 12 / 8)  # which is the capital of
    expected = 0.7 * (0.6 * entities + 0.2 * question + 0.1 * content + 0.1 * function) + 0.3 * bleu
    assert q_bleu(said, [GOLD]) == pytest.approx(expected)


def test_a_lost_name_costs_more_than_a_lost_function_word() -> None:
    nameless = q_bleu("Which city is the capital of and lies on the?", [GOLD])
    terse = q_bleu("Which city is capital France lies on Seine?", [GOLD])
    assert terse > nameless
    assert q_bleu(GOLD, ["x", GOLD]) == pytest.approx(1)
    assert q_bleu("", [GOLD]) == q_bleu(GOLD, []) == 0
    assert q_bleu(GOLD, [GOLD], QBleuWeights(delta=0.0)) == pytest.approx(1)  # BLEU-1 alone


def test_clues_are_measured_by_it() -> None:
    asked = Question("h", "Hemingway", ("The Sun Also Rises is a novel by this author of A Farewell to Arms",))
    said = Reading("h", "This author wrote The Sun Also Rises", None, ())
    figures = estimate_measures([score_answer(asked, said, "clues")], "clues")
    assert figures["Q-BLEU-1"].value == pytest.approx(q_bleu(said.answer, asked.answers))
    assert {"BLEU-1", "distinct-3", "gold-distinct-3"} <= set(figures)
