"""Lists of a positive and its negatives, and the scores that a teacher gives them."""

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
import pytest

from rag_model.errors import InputError
from rag_model.index.files.engine import Vectors
from rag_model.training.data.batches import add_teacher_scores, build_list_batch, keep_complete_examples
from rag_model.training.data.examples import Example, build_passage, digest_examples


class Lengths:
    """A teacher that likes long texts."""

    def scores(self, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> Vectors:
        return np.array([len(text) for text in texts], np.float32)


def example(name: str, negatives: int) -> Example:
    found = tuple(build_passage("", f"no {'x' * (3 * number)}") for number in range(negatives))
    return Example(name, f"{name}?", (), (build_passage("", f"yes {name}"), build_passage("", "another")), found)


def test_a_list_is_the_first_positive_and_some_negatives() -> None:
    batch = build_list_batch([example("a", 3), example("b", 1)], 2, None)
    assert [[one.text for one in some] for some in batch.lists] == [["yes a", "no ", "no xxx"], ["yes b", "no "]]
    assert (batch.lengths, batch.scores) == ([3, 2], ((), ()))
    assert batch.list_pairs()[0] == ["a?", "a?", "a?", "b?", "b?"]
    drawn = {build_list_batch([example("a", 20)], 2, random.Random(seed)).lists for seed in range(5)}
    assert len(drawn) == 5


def test_scores_follow_their_passages() -> None:
    taught = add_teacher_scores([example("a", 9), Example("bare", "who?"), example("b", 2)], Lengths(), 4)
    assert [len(one.scores) for one in taught] == [5, 0, 3]
    for seed in range(5):
        batch = build_list_batch([taught[0], taught[2]], 3, random.Random(seed))
        for passages, scores in zip(batch.lists, batch.scores, strict=True):
            assert scores == tuple(float(len(passage.text)) for passage in passages)
    cut = [dataclasses.replace(one, scores=()) for one in taught]
    assert digest_examples(taught) == digest_examples(cut), "another machine's rounding is no other training"


def test_a_broken_teacher_is_refused() -> None:
    class Broken(Lengths):
        def scores(self, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> Vectors:
            return np.full(len(texts), np.nan, np.float32)

    with pytest.raises(InputError, match="a score of the teacher is not finite"):
        add_teacher_scores([example("a", 2)], Broken(), 4)


def test_an_example_without_a_list_is_dropped_or_refused() -> None:
    whole, bare, alone = example("a", 2), Example("bare", "who?"), example("alone", 0)
    assert keep_complete_examples([whole, bare, alone], "drop") == [whole]
    with pytest.raises(InputError, match="example bare has no positive passage: find one by mining"):
        keep_complete_examples([whole, bare], "refuse")
    with pytest.raises(InputError, match="example alone has no negative passage"):
        keep_complete_examples([whole, alone], "refuse")
    with pytest.raises(InputError, match="no example has a positive and a negative passage"):
        keep_complete_examples([bare, alone], "drop")
