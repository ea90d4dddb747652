"""Answers are recorded by their inputs, so that no later run generates them again, even after a killed run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rag_model.errors import StoreError
from rag_model.evaluation.answers.ablation import EvalCondition
from rag_model.evaluation.answers.examination import AnswerCache
from rag_model.evaluation.answers.readings import Reading, produce_readings
from rag_model.evaluation.questions import Question
from rag_model.reading.answer import Answer, AnswerProblem
from rag_model.reading.writers.writer import describe_missing_answer
from rag_model.retrieve.hits import Hit
from rag_model.store.store import Store
from tests.fixtures.last_word_reader import LastWordReader

N = 70  # questions: three batches
INPUTS = {"snapshot": "ab" * 32, "model": "cd" * 32, "decoding": {"beams": 1}}


@pytest.fixture
def condition(make_hits) -> EvalCondition:
    questions = tuple(Question(str(n), f"question {n}?", ("x",)) for n in range(N))
    return EvalCondition(
        "open book", 2, questions, tuple(make_hits([(f"{n}", f"said {n}"), ("a", "b")]) for n in range(N))
    )


def test_recorded_answers_are_not_generated_again(store: Store, condition: EvalCondition) -> None:
    first_reader, progress = LastWordReader(), []
    readings = AnswerCache(store, first_reader, INPUTS)(condition, lambda done, total: progress.append((done, total)))
    assert readings == produce_readings(LastWordReader(), condition.questions, condition.hits)
    assert progress == [(32, N), (64, N), (N, N)]

    class FailingReader(LastWordReader):
        def answer_from(self, *_: object) -> list[Answer]:
            raise AssertionError("the model is not asked")

    assert AnswerCache(store, FailingReader(), INPUTS)(condition) == readings


class DyingReader(LastWordReader):
    """Answers one batch, and then ends the run."""

    def answer_from(self, questions: Sequence[str], hits: Sequence[Sequence[Hit]]) -> list[Answer]:
        if self.n_questions:
            raise KeyboardInterrupt
        return super().answer_from(questions, hits)


def test_a_run_continues_after_its_last_recorded_batch(store: Store, condition: EvalCondition) -> None:
    dying_reader, reader = DyingReader(), LastWordReader()
    with pytest.raises(KeyboardInterrupt):
        AnswerCache(store, dying_reader, INPUTS)(condition)
    AnswerCache(store, reader, INPUTS)(condition)
    assert reader.n_questions == N - 32


class SmallContextReader(LastWordReader):
    """Reports truncated prompts for the questions whose numbers end with a given digit, or for all questions."""

    def __init__(self, last_digit: str = "") -> None:
        super().__init__()
        self.last_digit = last_digit

    def answer_from(self, questions: Sequence[str], hits: Sequence[Sequence[Hit]]) -> list[Answer]:
        problem = AnswerProblem("prompt_truncated", "give the server a larger context")
        return [
            replace(answer, problem=problem) if answer.question.endswith(f"{self.last_digit}?") else answer
            for answer in super().answer_from(questions, hits)
        ]


def test_answers_with_a_problem_are_generated_again(store: Store, condition: EvalCondition) -> None:
    complete_readings = produce_readings(LastWordReader(), condition.questions, condition.hits)
    for reader, n_questions in [
        (SmallContextReader(), N),
        (SmallContextReader("0"), N),
        (SmallContextReader("0"), N // 10),
        (LastWordReader(), N // 10),
        (LastWordReader(), 0),
    ]:
        readings = AnswerCache(store, reader, INPUTS)(condition)
        assert reader.n_questions == n_questions
        assert [reading.answer for reading in readings] == [reading.answer for reading in complete_readings]
    assert readings == complete_readings


def test_reasoning_that_used_up_all_tokens_is_reused(store: Store, condition: EvalCondition) -> None:
    class ReasoningReader(LastWordReader):
        def answer_from(self, questions: Sequence[str], hits: Sequence[Sequence[Hit]]) -> list[Answer]:
            problem = describe_missing_answer(50, ended=False)
            return [replace(answer, ended=False, problem=problem) for answer in super().answer_from(questions, hits)]

    first_reader, second_reader = ReasoningReader(), ReasoningReader()
    readings = AnswerCache(store, first_reader, INPUTS)(condition)
    assert AnswerCache(store, second_reader, INPUTS)(condition) == readings
    assert (first_reader.n_questions, second_reader.n_questions) == (N, 0)


def change_question(condition: EvalCondition) -> EvalCondition:
    return replace(condition, questions=(replace(condition.questions[0], text="other?"), *condition.questions[1:]))


def change_passage(condition: EvalCondition) -> EvalCondition:
    hit = condition.hits[0][0]
    other_hit = replace(hit, passage=replace(hit.passage, text="other", hash="0" * 32))
    return replace(condition, hits=((other_hit, *condition.hits[0][1:]), *condition.hits[1:]))


@pytest.mark.parametrize("change", [change_question, change_passage])
def test_only_batches_with_changed_inputs_are_answered_again(store: Store, condition: EvalCondition, change) -> None:
    AnswerCache(store, LastWordReader(), INPUTS)(condition)
    reader = LastWordReader()
    AnswerCache(store, reader, INPUTS)(change(condition))
    assert reader.n_questions == 32  # the batch of the changed question
    other_reader = LastWordReader()
    AnswerCache(store, other_reader, {**INPUTS, "decoding": {"beams": 4}})(condition)
    assert other_reader.n_questions == N


def test_other_golds_need_no_new_answers(store: Store, condition: EvalCondition) -> None:
    AnswerCache(store, LastWordReader(), INPUTS)(condition)
    reader = LastWordReader()
    golds = tuple(replace(question, answers=("y",)) for question in condition.questions)
    AnswerCache(store, reader, INPUTS)(replace(condition, name="other", questions=golds))
    assert reader.n_questions == 0


def test_a_damaged_record_is_named(store: Store, condition: EvalCondition, tmp_path: Path) -> None:
    AnswerCache(store, LastWordReader(), INPUTS)(condition)
    for path in (tmp_path / "store" / "blobs").rglob("*"):
        if path.is_file():
            path.chmod(0o644)
            path.write_bytes(b"x" * (path.stat().st_size - 1) + b"\n")
    with pytest.raises(StoreError, match=r"memo/answer|match|damaged"):
        AnswerCache(store, LastWordReader(), INPUTS)(condition)


def test_no_questions_give_no_answers(store: Store) -> None:
    assert AnswerCache(store, LastWordReader(), INPUTS)(EvalCondition("open book", 0, (), ())) == []


def test_readings_keep_all_characters(store: Store, make_hits) -> None:
    text = "a\u2028b \x85 𝔘 \u0301 \x00\x1d"
    condition = EvalCondition("open book", 1, (Question("q\u2028", "?"),), (make_hits([("1", text)]),))
    (reading,) = AnswerCache(store, LastWordReader(), INPUTS)(condition)
    assert isinstance(reading, Reading)
    assert reading.passages[0].text == text
    assert reading.question == "q\u2028"
