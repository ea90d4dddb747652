"""The measures of each kind of answer, their number of questions, and the comparison of two sets of answers."""

import json
from dataclasses import asdict

import pytest

from rag_model.errors import InputError, UsageError
from rag_model.evaluation.answers.readings import AnswerPassage, Reading
from rag_model.evaluation.answers.scores import (
    ScoredAnswer,
    check_gold_answers,
    compare_answers,
    estimate_measures,
    get_deciding_measure,
    list_measures,
    score_answer,
)
from rag_model.evaluation.measures.measure import ANSWER_KINDS, AnswerKind
from rag_model.evaluation.questions import Question
from rag_model.toml import from_table


def create_reading(identity: str, answer: str, *pages: str) -> Reading:
    passages = tuple(AnswerPassage(f"{page}-0", page, f"Title {page}", "text", 1.5, 0.5, 0.25) for page in pages)
    return Reading(identity, answer, -1.25, passages)


def score_answers(
    answers: dict[str, str], golds: dict[str, tuple[str, ...]], kind: str = "spans"
) -> list[ScoredAnswer]:
    return [
        score_answer(Question(name, "Q", golds[name]), create_reading(name, answer), kind)
        for name, answer in answers.items()
    ]


GOLDS = {"a": ("Paris",), "b": ("the Nile", "Nile river"), "c": ("Bach",), "d": ()}


def test_spans_are_measured_by_exact_match_and_f1() -> None:
    metrics = estimate_measures(score_answers({"a": "paris", "b": "river", "c": "Mozart", "d": "x"}, GOLDS))
    assert metrics["EM"].value == 0.25
    assert metrics["F1"].value == pytest.approx((1 + 2 / 3 + 0 + 0) / 4)
    assert set(metrics) == {"EM", "F1"}
    assert all(metric.low <= metric.value <= metric.high and metric.n == 4 for metric in metrics.values())


def test_two_way_accuracy_is_of_the_decided_claims() -> None:
    golds = {"a": ("SUPPORTS",), "b": ("REFUTES",), "c": ("NOT ENOUGH INFO",)}
    metrics = estimate_measures(
        score_answers({"a": "supports", "b": "supports", "c": "not enough info"}, golds, "labels"), "labels"
    )
    assert (metrics["Acc-3way"].value, metrics["Acc-3way"].n) == (pytest.approx(2 / 3), 3)
    assert (metrics["Acc-2way"].value, metrics["Acc-2way"].n) == (0.5, 2)
    assert metrics["AC"].value == 0  # exact match of every letter


def test_texts_have_the_bleu_of_the_set() -> None:
    from sacrebleu.metrics import BLEU  # noqa: PLC0415 - takes a fourth of a second

    golds = {"a": ("the cat sat on the mat",), "b": ("a dog slept in the sun", "the dog slept")}
    answers = {"a": "the cat sat on a mat", "b": "the dog slept in the sun"}
    metrics = estimate_measures(score_answers(answers, golds, "texts"), "texts")
    streams = [["the cat sat on the mat", "a dog slept in the sun"], [None, "the dog slept"]]
    for order in (1, 4):
        expected = BLEU(max_ngram_order=order).corpus_score(list(answers.values()), streams).score / 100
        assert metrics[f"BLEU-{order}"].value == pytest.approx(expected)
    assert set(metrics) == {"ROUGE-L", "F1", "BLEU-1", "BLEU-4", "distinct-3", "gold-distinct-3"}


@pytest.mark.parametrize("kind", ANSWER_KINDS)
def test_the_measures_of_a_kind_are_listed_before_any_answer(kind: AnswerKind) -> None:
    gold = "SUPPORTS" if kind == "labels" else "the cat sat there"
    question = Question("a", "the cat", (gold,), (frozenset({"1"}),))
    metrics = estimate_measures([score_answer(question, create_reading("a", gold, "1"), kind)], kind)
    assert get_deciding_measure(kind) in metrics
    assert set(metrics) <= set(list_measures(kind, evidence=True))
    assert not [name for name in list_measures(kind, evidence=False) if name.startswith(("KILT", "R-"))]


def test_an_answer_without_its_evidence_has_no_kilt_score() -> None:
    question = Question("a", "Q", ("Paris",), (frozenset({"1", "2"}),))
    right = score_answer(question, create_reading("a", "Paris", "1", "1", "2", "9")).measures
    wrong = score_answer(question, create_reading("a", "Paris", "1", "9", "2")).measures
    unheld = {"EM": 1, "F1": 1, "EM-unheld": 1, "supported": 0}
    assert right == {**unheld, "R-precision": 1, "recall@5": 1, "KILT-EM": 1, "KILT-F1": 1}
    assert wrong == {**unheld, "R-precision": 0.5, "recall@5": 1, "KILT-EM": 0, "KILT-F1": 0}


def test_answers_are_compared_by_question() -> None:
    old_answers = score_answers({"a": "Rome", "b": "Nile river", "c": "Bach"}, GOLDS)
    new_answers = score_answers({"c": "Bach", "a": "Paris", "d": "x"}, GOLDS)
    difference = compare_answers(new_answers, old_answers)["EM"]
    assert (difference.value, difference.n) == (0.5, 2)
    assert compare_answers(new_answers, []) == {}


@pytest.mark.parametrize("kind", ANSWER_KINDS)
def test_every_kind_has_a_deciding_measure(kind: str) -> None:
    golds = {"a": ("SUPPORTS",)}
    assert get_deciding_measure(kind) in estimate_measures(score_answers({"a": "SUPPORTS"}, golds, kind), kind)
    check_gold_answers([Question("a", "Q", ("SUPPORTS",))], kind)


def test_gold_answers_of_another_kind_are_refused() -> None:
    with pytest.raises(UsageError, match="no question has a gold answer"):
        check_gold_answers([Question("a", "Q")], "spans")
    with pytest.raises(UsageError, match="measure its answers as spans"):
        check_gold_answers([Question("a", "Q", ("Paris",))], "labels")
    with pytest.raises(InputError, match="not a regular expression"):
        check_gold_answers([Question("a", "Q", ("(",))], "patterns")
    with pytest.raises(UsageError, match="no answers to measure"):
        estimate_measures([])


@pytest.mark.parametrize("likelihood", [-1.25, None])  # None if it is unknown or minus infinity
def test_a_reading_is_read_back_from_json(likelihood: float | None) -> None:
    original = Reading(
        "q", "Zürich \u2028 𝔘", likelihood, create_reading("q", "", "1").passages, ended=likelihood is None
    )
    text = json.dumps(asdict(original), allow_nan=False)
    assert from_table(Reading, json.loads(text), "a reading") == original
