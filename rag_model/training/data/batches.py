"""Batches of questions and the passages that they are told apart from, each passage once."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rag_model.corpus.records import Passage
from rag_model.training.data.examples import Example


@dataclass(frozen=True, slots=True)
class DprBatch:
    """Questions and the passages that they are told apart from, each passage once."""

    examples: tuple[Example, ...]
    passages: tuple[Passage, ...]
    gold: tuple[int, ...]  # the passage of each question


def dpr_batch(examples: Sequence[Example], hard_negatives: int, dice: random.Random | None) -> DprBatch:
    """Make a batch: the first positive of each example and so many of its negatives, drawn, or else the first ones.

    An example that has fewer negatives brings what it has. Equal passages are one.
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
    """Return a (m,) int64 key of each passage: equal for equal title and text."""
    return torch.tensor([int(passage.hash[:15], 16) for passage in passages], dtype=torch.int64)


def other_positives(examples: Sequence[Example], keys: Tensor, gold: Tensor) -> Tensor:
    """Return (b, m) bool: passages of the batch that hold an answer of the question but are not its row `gold`.

    They would be false negatives; among several processes the gold passage itself may stand there twice.
    """
    ignored = torch.stack([torch.isin(keys, passage_keys(one.positives).to(keys.device)) for one in examples])
    return ignored.scatter(1, gold[:, None], False)
