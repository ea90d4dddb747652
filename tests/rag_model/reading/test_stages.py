"""Seconds of the stages of an answer, measured without gaps."""

from itertools import count

import pytest

from rag_model.reading.answer import Answer
from rag_model.reading.reader import ASSEMBLY, CONFIDENCE, GENERATION, SEARCH, AnswerTimer, add_stage_seconds


def build_timer() -> AnswerTimer:
    """Return a timer whose clock advances one second at each reading."""
    ticks = count(0.0)
    return AnswerTimer(lambda: next(ticks))


def test_stages_add_up_to_the_total() -> None:
    timer = build_timer()
    for stage in (ASSEMBLY, GENERATION, ASSEMBLY, GENERATION, GENERATION):
        timer.end_stage(stage)
    assert timer.seconds == {ASSEMBLY: 2.0, GENERATION: 3.0}
    assert sum(timer.seconds.values()) == 5.0


def test_answers_of_a_batch_share_its_seconds() -> None:
    inner, outer = build_timer(), build_timer()
    inner.end_stage(GENERATION)
    for stage in (CONFIDENCE, SEARCH):
        outer.end_stage(stage)
    answers = add_stage_seconds(add_stage_seconds([Answer(text, "", None, ()) for text in "ab"], inner), outer)
    assert [list(answer.seconds.items()) for answer in answers] == [
        [(SEARCH, 0.5), (GENERATION, 0.5), (CONFIDENCE, 0.5)]
    ] * 2
    assert sum(sum(answer.seconds.values()) for answer in answers) == pytest.approx(3.0)
    assert add_stage_seconds([], inner) == []
