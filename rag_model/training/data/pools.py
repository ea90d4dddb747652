"""Pools: passages with which a frozen generator answers right, and with which it answers wrong.

The offline half of Zhou and Chen 2025, "OpenRAG: Optimizing RAG End-to-End via In-Context Retrieval Learning" (arXiv
2503.08398), section 3.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import overload

import numpy as np

from rag_model.corpus.records import Passage
from rag_model.errors import InputError, RefusedError
from rag_model.evaluation.bootstrap import Estimate, mean_interval
from rag_model.training.data.examples import Example
from rag_model.training.data.judging import Verdict

_CHANCE = 0.5  # of a score to order a right and a wrong passage
_FEW = 5  # questions: of fewer an interval says nothing


@dataclass(frozen=True, slots=True)
class Pooled(Example):
    """A question with both pools: `positives` and `negatives`, the likeliest answer first."""

    surest_negative: float = 0.0  # log p of the gold answer with the negative that makes it likeliest, of all
    least_positive: float = 0.0  # the same with the positive that makes it least likely


@dataclass(frozen=True, slots=True)
class Pools(Sequence[Example]):
    """The questions that can be learned from, in order, and what became of the others."""

    examples: tuple[Pooled, ...]
    all_right: int  # questions that every passage answers
    all_wrong: int  # questions that none answers
    agreement: Estimate  # of label and score, by question; see `agreement`

    @overload
    def __getitem__(self, place: int) -> Pooled: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Pooled]: ...
    def __getitem__(self, place: int | slice) -> Pooled | Sequence[Pooled]:
        """Return an example, or some."""
        return self.examples[place]

    def __len__(self) -> int:
        """Return the number of questions that can be learned from."""
        return len(self.examples)


def pool(example: Example, found: Sequence[Passage], told: Sequence[Verdict], kept: int) -> Pooled | None:
    """Return an example with its pools, `kept` passages of each at most; None: one of them is empty."""
    order = sorted(range(len(found)), key=lambda place: -told[place].log_p)
    right, wrong = ([place for place in order if told[place].right is label] for label in (True, False))
    if not right or not wrong:
        return None
    given = {one.name: getattr(example, one.name) for one in fields(Example)}
    pools = {
        name: tuple(found[place] for place in some[:kept])
        for name, some in (("positives", right), ("negatives", wrong))
    }
    return Pooled(**{**given, **pools}, surest_negative=told[wrong[0]].log_p, least_positive=told[right[-1]].log_p)


def agreement(told: Sequence[Verdict]) -> float:
    """Return the share of pairs of a right and a wrong passage in which the right one has the better score.

    Equal scores count half: the area under the curve, .5 by chance. Both labels must occur.
    """
    right, wrong = (np.array([one.log_p for one in told if one.right is label]) for label in (True, False))
    above = (right[:, None] > wrong).mean() + (right[:, None] == wrong).mean() / 2
    return float(above)


def pools_of(judged: Iterable[tuple[Example, Sequence[Passage], Sequence[Verdict]]], kept: int) -> Pools:
    """Return the pools of examples, in order, from their passages and the verdicts of these; asks for one at a time.

    Raises:
        InputError: no question has both pools.
    """
    pooled, areas, right, wrong = list[Pooled](), list[float](), 0, 0
    for example, found, told in judged:
        own = pool(example, found, told, kept)
        if own is not None:
            pooled.append(own)
            areas.append(agreement(told))
        elif told and told[0].right:
            right += 1
        else:
            wrong += 1
    if not pooled:
        raise InputError(
            f"none of {right + wrong:,} questions has a passage with which the generator answers right and one with "
            f"which it answers wrong ({right:,} are all right, {wrong:,} all wrong): take another generator, more "
            "passages a question, or other examples"
        )
    return Pools(tuple(pooled), right, wrong, mean_interval(areas))


def check_agreement(pools: Pools) -> None:
    """Check that the score says what the label says: online the score alone is asked for.

    Raises:
        RefusedError: it does not, as far as these questions show.
    """
    found = pools.agreement
    if found.n < _FEW or not found.low > _CHANCE:
        raise RefusedError(
            "as far as this shows, the generator's score does not tell right passages from wrong ones (area under the "
            f"curve {found}, over {found.n:,} questions; chance is {_CHANCE}): take another generator or more "
            "examples, or give the choices of a closed set"
        )
