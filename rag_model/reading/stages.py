"""What the stages of an answer take, by one clock: a mark ends one stage and begins the next.

So the stages add up to the whole time between the first moment and the last mark, and nothing in between is lost.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rag_model.reading.answer import Answer

SEARCH = "search"  # from the question to its passages, encoding and reading of texts included
ASSEMBLY = "assembly"  # passages and question become what the model reads: prompts, or tokens of each passage
GENERATION = "generation"  # the model reads them, and writes; a label is chosen by it too
EXTRACTION = "extraction"  # a span is found, in place of both
CONFIDENCE = "confidence"  # whether the answer is given: likelihoods that a threshold asks for
STAGES = (SEARCH, ASSEMBLY, GENERATION, EXTRACTION, CONFIDENCE)


class Marks:
    """A clock that is marked at the end of each stage; a stage may come again, and its times are added.

    >>> times = iter([0.0, 1.0, 1.5, 4.5])
    >>> marks = Marks(lambda: next(times))
    >>> for stage in (SEARCH, ASSEMBLY, GENERATION):
    ...     marks.end(stage)
    >>> marks.seconds
    {'search': 1.0, 'assembly': 0.5, 'generation': 3.0}
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Begin the first stage; `clock` returns seconds."""
        self._clock, self._last = clock, clock()
        self.seconds: dict[str, float] = {}  # by stage, in the order of their first end

    def end(self, stage: str) -> None:
        """End the stage that runs, and begin the next one."""
        now = self._clock()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now


def timed(answers: Sequence[Answer], marks: Marks) -> list[Answer]:
    """Return answers of one batch with an equal share each of its stages' seconds, beside those that they have."""
    return [replace(one, seconds=_in_order(one.seconds, marks.seconds, len(answers))) for one in answers]


def _in_order(known: Mapping[str, float], more: Mapping[str, float], n: int) -> dict[str, float]:
    both = {**known, **{stage: seconds / n for stage, seconds in more.items()}}
    return {stage: both[stage] for stage in STAGES if stage in both}
