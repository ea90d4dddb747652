"""The measures of a set: which fit which kind of answer, of how many questions, and how two sets compare."""

import json
from dataclasses import asdict

import pytest

from rag_model.errors import InputError, UsageError
from rag_model.evaluation.answers.readings import AnswerPassage, Reading
from rag_model.evaluation.answers.scores import (
    ScoredAnswer,
    check_gold_answers,
    compare_answers,
    deciding_measure,
    estimate_measures,
    list_measures,
    score_answer,
)
from rag_model.evaluation.measures.measure import ANSWER_KINDS, AnswerKind
from rag_model.evaluation.questions import Question
from rag_model.toml import from_table


def reading(identity: str, answer: str, *pages: str) -> Reading:
    shown = tuple(AnswerPassage(f"{page}-0", page, f"Title {page}", "text", 1.5, 0.5, 0.25) for page in pages)
    return Reading(identity, answer, -1.25, shown)


def scored(answers: dict[str, str], golds: dict[str, tuple[str, ...]], kind: str = "spans") -> list[ScoredAnswer]:
    return [score_answer(Question(name, "Q", golds[name]), reading(name, said), kind) for name, said in answers.items()]


GOLDS = {"a": ("Paris",), "b": ("the Nile", "Nile river"), "c": ("Bach",), "d": ()}


def test_spans_are_measured_by_exact_match_and_f1() -> None:
    figures = estimate_measures(scored({"a": "paris", "b": "river", "c": "Mozart", "d": "x"}, GOLDS))
    assert figures["EM"].value == 0.25
    assert figures["F1"].value == pytest.approx((1 + 2 / 3 + 0 + 0) / 4)
    assert set(figures) == {"EM", "F1"}
    assert all(figure.low <= figure.value <= figure.high and figure.n == 4 for figure in figures.values())


def test_two_way_accuracy_is_of_the_decided_claims() -> None:
    golds = {"a": ("SUPPORTS",), "b": ("REFUTES",), "c": ("NOT ENOUGH INFO",)}
    figures = estimate_measures(
        scored({"a": "supports", "b": "supports", "c": "not enough info"}, golds, "labels"), "labels"
    )
    assert (figures["Acc-3way"].value, figures["Acc-3way"].n) == (pytest.approx(2 / 3), 3)
    assert (figures["Acc-2way"].value, figures["Acc-2way"].n) == (0.5, 2)
    assert figures["AC"].value == 0  # letter by letter


def test_texts_have_the_bleu_of_the_set() -> None:
    from sacrebleu.metrics import BLEU  # noqa: PLC0415 - takes a fourth of a second

    golds = {"a": ("the cat sat on the mat",), "b": ("a dog slept in the sun", "the dog slept")}
    said = {"a": "the cat sat on a mat", "b": "the dog slept in the sun"}
    figures = estimate_measures(scored(said, golds, "texts"), "texts")
    streams = [["the cat sat on the mat", "a dog slept in the sun"], [None, "the dog slept"]]
    for order in (1, 4):
        expected = BLEU(max_ngram_order=order).corpus_score(list(said.values()), streams).score / 100
        assert figures[f"BLEU-{order}"].value == pytest.approx(expected)
    assert set(figures) == {"ROUGE-L", "F1", "BLEU-1", "BLEU-4", "distinct-3", "gold-distinct-3"}


@pytest.mark.parametrize("kind", ANSWER_KINDS)
def test_the_names_of_a_kinds_measures_are_known_before_any_answer(kind: AnswerKind) -> None:
    gold = "SUPPORTS" if kind == "labels" else "the cat sat there"
    told = Question("a", "the cat", (gold,), (frozenset({"1"}),))
    figures = estimate_measures([score_answer(told, reading("a", gold, "1"), kind)], kind)
    assert deciding_measure(kind) in figures
    assert set(figures) <= set(list_measures(kind, evidence=True))
    assert not [name for name in list_measures(kind, evidence=False) if name.startswith(("KILT", "R-"))]


def test_an_answer_from_the_wrong_pages_earns_nothing_of_kilts() -> None:
    asked = Question("a", "Q", ("Paris",), (frozenset({"1", "2"}),))
    right = score_answer(asked, reading("a", "Paris", "1", "1", "2", "9")).measures
    wrong = score_answer(asked, reading("a", "Paris", "1", "9", "2")).measures
    unheld = {"EM": 1, "F1": 1, "EM-unheld": 1, "supported": 0}
    assert right == {**unheld, "R-precision": 1, "recall@5": 1, "KILT-EM": 1, "KILT-F1": 1}
    assert wrong == {**unheld, "R-precision": 0.5, "recall@5": 1, "KILT-EM": 0, "KILT-F1": 0}


def test_sets_are_compared_question_by_question() -> None:
    before = scored({"a": "Rome", "b": "Nile river", "c": "Bach"}, GOLDS)
    after = scored({"c": "Bach", "a": "Paris", "d": "x"}, GOLDS)
    difference = compare_answers(after, before)["EM"]
    assert (difference.value, difference.n) == (0.5, 2)
    assert compare_answers(after, []) == {}


@pytest.mark.parametrize("kind", ANSWER_KINDS)
def test_every_kind_has_a_measure_of_right(kind: str) -> None:
    golds = {"a": ("SUPPORTS",)}
    assert deciding_measure(kind) in estimate_measures(scored({"a": "SUPPORTS"}, golds, kind), kind)
    check_gold_answers([Question("a", "Q", ("SUPPORTS",))], kind)


def test_golds_that_can_not_be_compared_with_are_told_before_the_work() -> None:
    with pytest.raises(UsageError, match="no question has a gold answer"):
        check_gold_answers([Question("a", "Q")], "spans")
    with pytest.raises(UsageError, match="measure its answers as spans"):
        check_gold_answers([Question("a", "Q", ("Paris",))], "labels")
    with pytest.raises(InputError, match="not a regular expression"):
        check_gold_answers([Question("a", "Q", ("(",))], "patterns")
    with pytest.raises(UsageError, match="no answers to measure"):
        estimate_measures([])


@pytest.mark.parametrize("likelihood", [-1.25, None])  # None: not known, or of a probability of 0
def test_a_reading_is_kept_as_json(likelihood: float | None) -> None:
    said = Reading("q", "Zürich \u2028 𝔘", likelihood, reading("q", "", "1").passages, ended=likelihood is None)
    kept = json.dumps(asdict(said), allow_nan=False)
    assert from_table(Reading, json.loads(kept), "a reading") == said
