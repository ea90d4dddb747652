"""What the stages of an answer take: one clock, so that nothing between two of them is lost."""

from itertools import count

import pytest

from rag_model.reading.answer import Answer
from rag_model.reading.stages import ASSEMBLY, CONFIDENCE, GENERATION, SEARCH, Marks, timed


def ticking() -> Marks:
    """Return marks of a clock on which each look takes a second."""
    ticks = count(0.0)
    return Marks(lambda: next(ticks))


def test_stages_add_up_to_the_whole() -> None:
    marks = ticking()
    for stage in (ASSEMBLY, GENERATION, ASSEMBLY, GENERATION, GENERATION):
        marks.end(stage)
    assert marks.seconds == {ASSEMBLY: 2.0, GENERATION: 3.0}
    assert sum(marks.seconds.values()) == 5.0


def test_answers_of_a_batch_share_its_time_and_keep_what_they_have() -> None:
    inner, outer = ticking(), ticking()
    inner.end(GENERATION)
    for stage in (CONFIDENCE, SEARCH):
        outer.end(stage)
    answers = timed(timed([Answer(one, "", None, ()) for one in "ab"], inner), outer)
    assert [list(one.seconds.items()) for one in answers] == [[(SEARCH, 0.5), (GENERATION, 0.5), (CONFIDENCE, 0.5)]] * 2
    assert sum(sum(one.seconds.values()) for one in answers) == pytest.approx(3.0)
    assert timed([], inner) == []
