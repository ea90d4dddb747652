"""Lists of one positive and its negatives, with the scores of a teacher."""

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
import pytest

from rag_model.errors import InputError
from rag_model.index.files.engine import Vectors
from rag_model.training.data.batches import add_teacher_scores, build_list_batch, keep_complete_examples
from rag_model.training.data.examples import Example, build_passage, digest_examples


class LengthTeacher:
    """Scores a passage by the length of its text."""

    def scores(self, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> Vectors:
        return np.array([len(text) for text in texts], np.float32)


def build_example(name: str, count: int) -> Example:
    negatives = tuple(build_passage("", f"no {'x' * (3 * number)}") for number in range(count))
    return Example(name, f"{name}?", (), (build_passage("", f"yes {name}"), build_passage("", "another")), negatives)


def test_list_is_the_first_positive_and_some_negatives() -> None:
    batch = build_list_batch([build_example("a", 3), build_example("b", 1)], 2, None)
    texts = [[passage.text for passage in passages] for passages in batch.lists]
    assert texts == [["yes a", "no ", "no xxx"], ["yes b", "no "]]
    assert (batch.lengths, batch.scores) == ([3, 2], ((), ()))
    assert batch.list_pairs()[0] == ["a?", "a?", "a?", "b?", "b?"]
    distinct_lists = {build_list_batch([build_example("a", 20)], 2, random.Random(seed)).lists for seed in range(5)}
    assert len(distinct_lists) == 5


def test_scores_stay_with_their_passages() -> None:
    examples = [build_example("a", 9), Example("bare", "who?"), build_example("b", 2)]
    scored = add_teacher_scores(examples, LengthTeacher(), 4)
    assert [len(example.scores) for example in scored] == [5, 0, 3]
    for seed in range(5):
        batch = build_list_batch([scored[0], scored[2]], 3, random.Random(seed))
        for passages, scores in zip(batch.lists, batch.scores, strict=True):
            assert scores == tuple(float(len(passage.text)) for passage in passages)
    unscored = [dataclasses.replace(example, scores=()) for example in scored]
    assert digest_examples(scored) == digest_examples(unscored), "scores are rounded differently on another machine"


def test_teacher_with_scores_that_are_not_finite_is_refused() -> None:
    class NanTeacher(LengthTeacher):
        def scores(self, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> Vectors:
            return np.full(len(texts), np.nan, np.float32)

    with pytest.raises(InputError, match="a score of the teacher is not finite"):
        add_teacher_scores([build_example("a", 2)], NanTeacher(), 4)


def test_example_without_positive_or_negative_is_dropped_or_refused() -> None:
    complete, bare, no_negatives = build_example("a", 2), Example("bare", "who?"), build_example("alone", 0)
    assert keep_complete_examples([complete, bare, no_negatives], "drop") == [complete]
    with pytest.raises(InputError, match="example bare has no positive passage: find one by mining"):
        keep_complete_examples([complete, bare], "refuse")
    with pytest.raises(InputError, match="example alone has no negative passage"):
        keep_complete_examples([complete, no_negatives], "refuse")
    with pytest.raises(InputError, match="no example has a positive and a negative passage"):
        keep_complete_examples([bare, no_negatives], "drop")
