"""Batches of examples: with in-batch negatives as in DPR, or with a list of passages per question.

A `DprBatch` contains each passage once. A `ListBatch` has a list of passages for each question: a
positive and its negatives, which are ranked or scored by a teacher.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from rag_model.corpus.records import Passage
from rag_model.errors import InputError
from rag_model.retrieve.models import PairScorer
from rag_model.training.data.examples import Example, deduplicate_passages
from rag_model.training.data.pair_scores import check_teacher_scores

IncompletePolicy = Literal["drop", "refuse"]  # what to do with an incomplete example
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DprBatch:
    """Questions with their positives and negatives; equal passages occur only once."""

    examples: tuple[Example, ...]
    passages: tuple[Passage, ...]
    gold: tuple[int, ...]  # (b,) position of each question's positive in `passages`


def group_examples(examples: Sequence[Example], size: int, rng: random.Random) -> list[list[Example]]:
    """Return shuffled groups of `size` examples.

    An incomplete last group is dropped unless it is the only one.
    """
    shuffled_examples = rng.sample(examples, len(examples))
    ends = range(size, len(examples) + 1, size) if size <= len(examples) else [len(examples)]
    return [shuffled_examples[max(0, end - size) : end] for end in ends]


def shuffle_batches(items: Sequence[T], size: int, seed: int, epoch: int) -> list[tuple[T, ...]]:
    """Return shuffled batches of `size` items; the last batch may be smaller.

    The order depends only on the seed and the epoch.
    """
    permutation = random.Random(f"{seed} {epoch}").sample(items, len(items))
    return [tuple(batch) for batch in split_batches(permutation, size)]


def split_batches(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Return consecutive batches of `size` items; the last batch may be smaller."""
    return [items[i : i + size] for i in range(0, len(items), size)]


def build_dpr_batch(examples: Sequence[Example], n_hard_negatives: int, rng: random.Random | None) -> DprBatch:
    """Build a batch from the first positive and up to `n_hard_negatives` negatives of each example.

    Negatives are drawn with `rng`, or the first negatives are taken if `rng` is None. Equal
    passages occur only once.
    """
    positives = [example.positives[0] for example in examples]
    negatives = [
        rng.sample(example.negatives, min(n_hard_negatives, len(example.negatives)))
        if rng
        else example.negatives[:n_hard_negatives]
        for example in examples
    ]
    passages, position_by_hash = deduplicate_passages([positives, *negatives])
    return DprBatch(tuple(examples), tuple(passages), tuple(position_by_hash[passage.hash] for passage in positives))


def hash_passages(passages: Sequence[Passage]) -> Tensor:
    """Return (m,) int64 keys of m passages; equal titles and texts have equal keys."""
    return torch.tensor([int(passage.hash[:15], 16) for passage in passages], dtype=torch.int64)


def mask_other_positives(examples: Sequence[Example], keys: Tensor, gold: Tensor) -> Tensor:
    """Return a (b, m) bool mask of the passages that must not be negatives of a question.

    `keys` are the (m,) keys of the passages from `hash_passages`, and `gold` has the (b,) position
    of each question's first positive among them. The masked passages are the other positives of the
    question, and the document that is the question itself. With several processes, the gold passage
    may occur twice; its copy is then masked, too.
    """
    excluded_passages = [
        (*example.positives, *([example.own_document] if example.own_document else [])) for example in examples
    ]
    # b times (m,) -> (b, m)
    is_excluded = torch.stack(
        [torch.isin(keys, hash_passages(passages).to(keys.device)) for passages in excluded_passages]
    )
    return is_excluded.scatter(1, gold[:, None], False)  # gold: (b,) -> (b, 1)


@dataclass(frozen=True, slots=True)
class ListBatch:
    """Questions, each with a list of passages: the first positive, then negatives."""

    examples: tuple[Example, ...]
    lists: tuple[tuple[Passage, ...], ...]  # b lists of 2 or more passages; lengths may differ
    # scores of these passages by a teacher; empty without a teacher
    scores: tuple[tuple[float, ...], ...]

    @property
    def lengths(self) -> list[int]:
        """The (b,) lengths of the lists."""
        return [len(passages) for passages in self.lists]

    def teacher_scores(self, device: torch.device) -> Tensor:
        """Return the (b, l) teacher scores on a device; scores of shorter lists end with -inf."""
        lists = [torch.tensor(scores) for scores in self.scores]
        return nn.utils.rnn.pad_sequence(lists, batch_first=True, padding_value=-torch.inf).to(device)

    def list_pairs(self) -> tuple[list[str], list[Passage]]:
        """Return the questions and the passages of all pairs, one list after the other."""
        examples_and_lists = zip(self.examples, self.lists, strict=True)
        return [example.question for example, passages in examples_and_lists for _ in passages], [
            passage for passages in self.lists for passage in passages
        ]


def build_list_batch(examples: Sequence[Example], n_negatives: int, rng: random.Random | None) -> ListBatch:
    """Build a batch of lists: the first positive, then up to `n_negatives` negatives of an example.

    Negatives are drawn with `rng`, or the first negatives are taken if `rng` is None.
    """
    passage_lists, score_lists = list[tuple[Passage, ...]](), list[tuple[float, ...]]()
    for example in examples:
        n_drawn = min(n_negatives, len(example.negatives))
        positions = rng.sample(range(len(example.negatives)), n_drawn) if rng else range(n_drawn)
        passage_lists.append((example.positives[0], *(example.negatives[i] for i in positions)))
        # The first score is that of the positive.
        score_lists.append(tuple(example.scores[i] for i in (0, *(i + 1 for i in positions))) if example.scores else ())
    return ListBatch(tuple(examples), tuple(passage_lists), tuple(score_lists))


def keep_complete_examples(
    examples: Sequence[Example], policy: IncompletePolicy, *, needs_negatives: bool = True
) -> list[Example]:
    """Return the examples that have a positive and, if `needs_negatives`, a negative.

    Raises:
        InputError: `policy` is "refuse" and an example is incomplete; or no example is complete.
    """
    is_complete = [bool(example.positives and (example.negatives or not needs_negatives)) for example in examples]
    complete_examples = list(compress(examples, is_complete))
    if policy == "refuse" and not all(is_complete):
        first_incomplete = examples[is_complete.index(False)]
        missing_kind = "negative" if first_incomplete.positives else "positive"
        raise InputError(f"example {first_incomplete.id} has no {missing_kind} passage: find one by mining, or drop it")
    if not complete_examples:
        requirement = "a positive and a negative passage" if needs_negatives else "a positive passage"
        raise InputError(f"no example has {requirement}: mine passages, or give another file")
    return complete_examples


def add_teacher_scores(examples: Sequence[Example], teacher: PairScorer, n_negatives: int) -> list[Example]:
    """Score the first positive and the first `n_negatives` negatives of each example by a teacher.

    All other negatives are removed. An example without a positive or a negative gets no scores.

    Raises:
        InputError: a score is not finite.
    """
    short_examples = [replace(example, negatives=example.negatives[:n_negatives]) for example in examples]
    scorable_examples = [example for example in short_examples if example.positives and example.negatives]
    batch = build_list_batch(scorable_examples, n_negatives, None)
    questions, passages = batch.list_pairs()
    teacher_scores = teacher.scores(
        questions, [passage.title for passage in passages], [passage.text for passage in passages]
    )
    check_teacher_scores(teacher_scores)
    score_offsets = np.cumsum([0, *batch.lengths])
    scores_by_example = {
        example.id: tuple(teacher_scores[score_offsets[row] : score_offsets[row + 1]].tolist())
        for row, example in enumerate(scorable_examples)
    }
    return [
        replace(example, scores=scores_by_example[example.id]) if example.id in scores_by_example else example
        for example in short_examples
    ]
