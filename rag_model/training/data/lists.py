"""Lists: a question's positive passage and some of its negatives, to be ordered or to be scored by a teacher."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from rag_model.corpus.records import Passage
from rag_model.errors import InputError
from rag_model.retrieve.rerank import PairScorer
from rag_model.training.data.examples import Example

Missing = Literal["drop", "refuse"]


@dataclass(frozen=True, slots=True)
class ListBatch:
    """Questions, each with a list of passages: its first positive, then negatives."""

    examples: tuple[Example, ...]
    lists: tuple[tuple[Passage, ...], ...]  # b lists of 2 or more, which may differ in length
    scores: tuple[tuple[float, ...], ...]  # a teacher's, of the same lengths; b empty ones without a teacher

    @property
    def lengths(self) -> list[int]:
        """Return the (b,) lengths of the lists."""
        return [len(one) for one in self.lists]

    def pairs(self) -> tuple[list[str], list[Passage]]:
        """Return the questions and the passages of all pairs, list by list."""
        both = zip(self.examples, self.lists, strict=True)
        return [one.question for one, some in both for _ in some], [one for some in self.lists for one in some]


def list_batch(examples: Sequence[Example], negatives: int, dice: random.Random | None) -> ListBatch:
    """Make a batch: the first positive of each example, and up to `negatives` of its negatives.

    Negatives are drawn with `dice`; without it they are the first ones.
    """
    lists, scores = list[tuple[Passage, ...]](), list[tuple[float, ...]]()
    for example in examples:
        count = min(negatives, len(example.negatives))
        drawn = dice.sample(range(len(example.negatives)), count) if dice else range(count)
        lists.append((example.positives[0], *(example.negatives[place] for place in drawn)))
        places = (0, *(place + 1 for place in drawn)) if example.scores else ()
        scores.append(tuple(example.scores[place] for place in places))
    return ListBatch(tuple(examples), tuple(lists), tuple(scores))


def with_lists(examples: Sequence[Example], missing: Missing, *, negatives: bool = True) -> list[Example]:
    """Return the examples that have a positive and, unless `negatives` is false, a negative.

    Raises:
        InputError: one has not, and `missing` refuses that; or none has.
    """
    found = [one for one in examples if one.positives and (one.negatives or not negatives)]
    if missing == "refuse" and len(found) < len(examples):
        first = next(one for one in examples if not (one.positives and (one.negatives or not negatives)))
        lacking = "negative" if first.positives else "positive"
        raise InputError(f"example {first.id} has no {lacking} passage: find one by mining, or drop it")
    if not found:
        wanted = "a positive and a negative passage" if negatives else "a positive passage"
        raise InputError(f"no example has {wanted}: mine passages, or give another file")
    return found


def with_scores(examples: Sequence[Example], teacher: PairScorer, negatives: int) -> list[Example]:
    """Return the examples, in order, with a teacher's scores of the first positive and the first `negatives` negatives.

    Further negatives are left out. An example without a positive or a negative is unchanged.

    Raises:
        InputError: a score is not finite.
    """
    cut = [replace(one, negatives=one.negatives[:negatives]) for one in examples]
    asked = [one for one in cut if one.positives and one.negatives]
    batch = list_batch(asked, negatives, None)
    questions, passages = batch.pairs()
    told = teacher.scores(questions, [one.title for one in passages], [one.text for one in passages])
    check_finite(told)
    ends = np.cumsum([0, *batch.lengths])
    scores = {one.id: tuple(told[ends[row] : ends[row + 1]].tolist()) for row, one in enumerate(asked)}
    return [replace(one, scores=scores[one.id]) if one.id in scores else one for one in cut]


def check_finite(scores: npt.NDArray[np.float32]) -> None:
    """Check a teacher's scores.

    Raises:
        InputError: one is not finite.
    """
    if not np.isfinite(scores).all():
        raise InputError("the teacher gave a score that is not finite: its model is broken, fetch it again")
