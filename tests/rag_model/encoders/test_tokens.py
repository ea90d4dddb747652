from itertools import zip_longest

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rag_model.encoders.tokens import LENGTH_MULTIPLE, batch_by_length, batch_without_padding, pad_length

LENGTHS = st.lists(st.integers(1, 300), max_size=80)


@given(LENGTHS, st.integers(1, 2000))
def test_batches_contain_every_row_once(lengths: list[int], budget: int) -> None:
    batches = list(batch_by_length(lengths, budget))
    assert sorted(int(row) for batch in batches for row in batch) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 2000))
def test_no_batch_exceeds_the_budget_unless_it_is_one_input(lengths: list[int], budget: int) -> None:
    for batch in batch_by_length(lengths, budget):
        longest = max(lengths[row] for row in batch)
        assert len(batch) == 1 or len(batch) * pad_length(longest) <= budget


@given(LENGTHS)
def test_longest_come_first_and_equal_lengths_keep_their_order(lengths: list[int]) -> None:
    order = np.concatenate([*batch_by_length(lengths, 256), np.empty(0, np.int64)]).astype(int).tolist()
    assert order == sorted(range(len(lengths)), key=lambda row: -lengths[row])


@given(LENGTHS, st.integers(300, 2000), st.integers(1, 300))
def test_steady_batches_have_one_padded_length(lengths: list[int], budget: int, min_tokens: int) -> None:
    batches = list(batch_by_length(lengths, budget, min_tokens))
    assert sorted(int(row) for batch in batches for row in np.unique(batch)) == list(range(len(lengths)))
    for batch in batches:
        (width,) = {pad_length(lengths[row]) for row in batch}
        assert min_tokens <= len(batch) * width < max(budget, min_tokens + width) + 1


@given(LENGTHS, st.integers(300, 2000), st.integers(1, 300))
def test_steady_batches_of_mixed_lengths_cost_no_more_tokens(lengths: list[int], budget: int, min_tokens: int) -> None:
    mixed = list(batch_by_length(lengths, budget, min_tokens, mix_lengths=True))
    assert sorted(int(row) for batch in mixed for row in np.unique(batch)) == list(range(len(lengths)))
    sizes = [[len(batch) * pad_length(max(lengths[row] for row in batch)) for batch in batches]
             for batches in (mixed, batch_by_length(lengths, budget, min_tokens))]  # fmt: skip
    assert sum(sizes[0]) <= sum(sizes[1])
    assert all(size >= min_tokens for size in sizes[0])


def test_a_few_inputs_of_many_lengths_share_a_steady_batch() -> None:
    lengths = [16 * number for number in range(1, 9)]
    assert [len(batch) for batch in batch_by_length(lengths, 4096, 1024, mix_lengths=True)] == [8]
    assert len([*batch_by_length(lengths, 4096, 1024)]) == 8


@given(st.integers(1, 10_000))
def test_padding_is_the_smallest_sufficient_multiple(length: int) -> None:
    assert pad_length(length) % LENGTH_MULTIPLE == 0
    assert length <= pad_length(length) < length + LENGTH_MULTIPLE


@given(LENGTHS, st.integers(1, 2000))
def test_batches_without_padding_contain_every_row_once(lengths: list[int], budget: int) -> None:
    batches = [batch.tolist() for batch in batch_without_padding(lengths, budget)]
    order = [row for batch in batches for row in batch]
    assert order == sorted(range(len(lengths)), key=lambda row: -lengths[row])
    for batch, following in zip_longest(batches, batches[1:]):
        n_tokens = sum(lengths[row] for row in batch)
        assert n_tokens <= budget or len(batch) == 1
        assert following is None or n_tokens + lengths[following[0]] > budget
