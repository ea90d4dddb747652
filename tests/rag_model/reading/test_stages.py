"""What the stages of an answer take: one clock, so that nothing between two of them is lost."""

from itertools import count

import pytest

from rag_model.reading.answer import Answer
from rag_model.reading.reader import ASSEMBLY, CONFIDENCE, GENERATION, SEARCH, AnswerTimer, add_stage_seconds


def ticking() -> AnswerTimer:
    """Return timer of a clock on which each look takes a second."""
    ticks = count(0.0)
    return AnswerTimer(lambda: next(ticks))


def test_stages_add_up_to_the_whole() -> None:
    timer = ticking()
    for stage in (ASSEMBLY, GENERATION, ASSEMBLY, GENERATION, GENERATION):
        timer.end_stage(stage)
    assert timer.seconds == {ASSEMBLY: 2.0, GENERATION: 3.0}
    assert sum(timer.seconds.values()) == 5.0


def test_answers_of_a_batch_share_its_time_and_keep_what_they_have() -> None:
    inner, outer = ticking(), ticking()
    inner.end_stage(GENERATION)
    for stage in (CONFIDENCE, SEARCH):
        outer.end_stage(stage)
    answers = add_stage_seconds(add_stage_seconds([Answer(one, "", None, ()) for one in "ab"], inner), outer)
    assert [list(answer.seconds.items()) for answer in answers] == [
        [(SEARCH, 0.5), (GENERATION, 0.5), (CONFIDENCE, 0.5)]
    ] * 2
    assert sum(sum(answer.seconds.values()) for answer in answers) == pytest.approx(3.0)
    assert add_stage_seconds([], inner) == []
