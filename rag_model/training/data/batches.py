"""Batches: the examples of an epoch in groups, and DPR's batches, which hold each passage once."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rag_model.corpus.records import Passage
from rag_model.training.data.examples import Example


@dataclass(frozen=True, slots=True)
class DprBatch:
    """Questions, their positives and negatives, each passage once."""

    examples: tuple[Example, ...]
    passages: tuple[Passage, ...]
    gold: tuple[int, ...]  # (b,) the positive of each question, as a position in `passages`


def groups(examples: Sequence[Example], size: int, dice: random.Random) -> list[list[Example]]:
    """Return shuffled groups of `size` examples; an incomplete last one is left out, unless it is the only one."""
    order = dice.sample(range(len(examples)), len(examples))
    ends = range(size, len(order) + 1, size) if size <= len(order) else [len(order)]
    return [[examples[place] for place in order[max(0, end - size) : end]] for end in ends]


def dpr_batch(examples: Sequence[Example], hard_negatives: int, dice: random.Random | None) -> DprBatch:
    """Make a batch: the first positive of each example, and up to `hard_negatives` of its negatives.

    Negatives are drawn with `dice`; without it they are the first ones. Equal passages are included once.
    """
    positives = [example.positives[0] for example in examples]
    drawn = [
        dice.sample(example.negatives, min(hard_negatives, len(example.negatives)))
        if dice
        else example.negatives[:hard_negatives]
        for example in examples
    ]
    every = {one.hash: one for one in (*positives, *(one for some in drawn for one in some))}
    places = {key: place for place, key in enumerate(every)}
    return DprBatch(tuple(examples), tuple(every.values()), tuple(places[one.hash] for one in positives))


def passage_keys(passages: Sequence[Passage]) -> Tensor:
    """Return (m,) int64 keys of passages: equal for equal title and text."""
    return torch.tensor([int(passage.hash[:15], 16) for passage in passages], dtype=torch.int64)


def other_positives(examples: Sequence[Example], keys: Tensor, gold: Tensor) -> Tensor:
    """Return (b, m) bool: passages of the batch that hold an answer of the question but are not its row `gold`.

    They would be false negatives; with several processes the gold passage itself may occur twice.
    """
    # b times (m,) -> (b, m)
    ignored = torch.stack([torch.isin(keys, passage_keys(one.positives).to(keys.device)) for one in examples])
    return ignored.scatter(1, gold[:, None], False)  # gold: (b,) -> (b, 1)
