"""Blocks moved to a later file equal a computation in plain Python, and whole lists equal those of a build."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rag_model.corpus.records import Passage
from rag_model.index.postings.carry import (
    LENGTH_SHIFT,
    NO_COMMON_SHIFT,
    REMOVED,
    ROW_SHIFT,
    copy_block,
    find_common_shift,
    move_block,
    write_block,
)
from rag_model.index.postings.lists import MAX_POSTING_BYTES, WRITER_SIZE, begin_list
from rag_model.index.postings.packing import BLOCK, PADDING, SCRATCH_SIZE
from rag_model.training.data.examples import build_passage
from tests.fixtures.bm25_index import build_bm25
from tests.rag_model.index.postings.test_derive import assert_equals_build, derive
from tests.rag_model.index.postings.test_packing import pack

POSTINGS = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 3), st.integers(0, 1 << 12)), st.one_of(st.integers(1, 3), st.integers(1, 65_535))
    ),
    min_size=2,
    max_size=BLOCK,
)
SIZES_OF_LISTS = (1, 2, 3, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000)
FREQUENCIES = (1, 1, 1, 1, 1, 2, 3, 40, 300)  # so that some weights are exceptions


def build_word(row: int, length: int = 5, weight: int = 0) -> int:
    return row << ROW_SHIFT | length << LENGTH_SHIFT | weight


def copy(gaps: list[int], weights: list[int], new_row: int) -> bytes | None:
    """Return the copy of a block with another first row, None if `copy_block` does not copy it."""
    packed = pack(gaps, weights)
    data = np.frombuffer(b"before" + packed + b"\xff" * PADDING, np.uint8)
    out = np.full(MAX_POSTING_BYTES * len(gaps) + 2, 77, np.uint8)
    end = int(copy_block(data, 6, 6 + len(packed), len(gaps), gaps[0], new_row, out, 2))
    assert end >= 0 or set(out.tolist()) == {77}
    return out[2:end].tobytes() if end >= 0 else None


@given(POSTINGS, st.integers(0, 1 << 13))
@example([(0, 1), (0, 1)], 0)
@example([(5, 1)] * 128, 6)
@example([(4000, 1), *[(1, 300)] * 127], 4001)
def test_copied_block_equals_a_written_block(postings: list[tuple[int, int]], new_row: int) -> None:
    gaps, weights = [gap for gap, _ in postings], [weight for _, weight in postings]
    copied_block, rewritten_block = copy(gaps, weights, new_row), pack([new_row, *gaps[1:]], weights)
    assert copied_block in (None, rewritten_block)
    if gaps[0].bit_length() == new_row.bit_length() <= pack(gaps, weights)[0] & 127:
        assert copied_block == rewritten_block


def test_a_block_with_more_bytes_than_its_postings_may_take_is_not_copied() -> None:
    """Damaged bytes may repeat an exception in long varints, for which the output has no room."""
    data = np.zeros(4000, np.uint8)
    data[:2] = 2, 1
    out = np.full(4000, 77, np.uint8)
    max_size = MAX_POSTING_BYTES * 2 - PADDING
    assert copy_block(data, 0, max_size, 2, 3, 2, out, 0) == max_size
    assert set(out[MAX_POSTING_BYTES * 2 :].tolist()) == {77}
    assert copy_block(data, 0, max_size + 1, 2, 3, 2, out, 0) == -1


@given(st.lists(st.integers(0, 5), min_size=1, max_size=BLOCK), st.integers(-3, 9), st.data())
def test_common_shift_of_rows_is_found(gaps: list[int], shift: int, data: st.DataObject) -> None:
    rows = (np.cumsum(np.array(gaps) + 1) - 1).tolist()
    n = rows[-1] + 1
    row_words = np.array([build_word(max(0, row + shift)) for row in range(n)], np.int64)
    shift = max(shift, -rows[0])
    row_words[rows] = [build_word(row + shift) for row in rows]
    gap_array = np.array(gaps, np.uint32)
    assert find_common_shift(gap_array, len(gaps), row_words) == shift
    assert find_common_shift(gap_array, len(gaps), row_words[:-1]) == NO_COMMON_SHIFT, "a row beyond the file"
    row = data.draw(st.sampled_from(rows))
    for other_word in (REMOVED, build_word(row + shift + 1)):
        if len(rows) > 1 or other_word == REMOVED:
            changed_words = row_words.copy()
            changed_words[row] = other_word
            assert find_common_shift(gap_array, len(gaps), changed_words) == NO_COMMON_SHIFT


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 65_535)), min_size=1, max_size=BLOCK),
    st.sets(st.integers(0, 640)),
    st.sets(st.integers(0, 900), max_size=90),
    st.integers(-1, 20),
)
def test_moved_block_is_merged_with_new_postings(
    postings: list[tuple[int, int]], removed: set[int], added: set[int], row_before: int
) -> None:
    gaps, weights = [gap for gap, _ in postings], [weight for _, weight in postings]
    rows = (row_before + np.cumsum(np.array(gaps) + 1)).tolist()
    row_words = np.array([REMOVED if row in removed else build_word(2 * row) for row in range(rows[-1] + 1)], np.int64)
    new_words = np.array(sorted(build_word(2 * row + 1, 9, 3) for row in added), np.int64)
    words = np.zeros(BLOCK + len(new_words) + 3, np.int64)
    numbers = np.array([gaps, np.array(weights) - 1], np.uint32)
    end, next_new, last_row = move_block(
        *numbers, len(gaps), row_before, row_words, new_words, 0, len(new_words), words, 3
    )
    weight_by_row = dict(zip(rows, weights, strict=True))
    expected = [build_word(2 * row, weight=weight) for row, weight in weight_by_row.items() if row not in removed]
    merged_words = [new_word for new_word in new_words.tolist() if expected and new_word < expected[-1]]
    expected = sorted(expected + merged_words)
    assert (words[3:end].tolist(), int(next_new), int(last_row)) == (expected, len(merged_words), rows[-1])


@pytest.mark.parametrize("numbers", [[(0, 9), (0, 0)], [(0, 1), (0, 65_536)], [(0, 2**32 - 1), (0, 0)]])
def test_invalid_rows_and_weights_are_damage(numbers: list[tuple[int, int]]) -> None:
    """The numbers are the gaps, and the weights minus 1."""
    row_words, new_words = np.array([build_word(row) for row in range(10)], np.int64), np.zeros(1, np.int64)
    words = np.zeros(300, np.int64)
    assert move_block(*np.array(numbers, np.uint32), 2, -1, row_words, new_words, 0, 0, words, 0)[2] == -1


@pytest.mark.parametrize("postings", [[(1, 5, 1), (1, 5, 1)], [(3, 5, 1), (2, 5, 1)], [(1, 5, 0)]])
def test_words_that_do_not_ascend_or_have_no_weight_are_not_written(postings: list[tuple[int, int, int]]) -> None:
    words = np.array([build_word(*posting) for posting in postings], np.int64)
    writer, sizes, out = np.zeros(WRITER_SIZE, np.int64), np.zeros(SCRATCH_SIZE, np.int64), np.zeros(99, np.uint8)
    gaps, weights_less_one = np.zeros(BLOCK, np.uint32), np.zeros(BLOCK, np.uint32)
    begin_list(writer, 0, -1)
    assert not write_block(words, 0, len(words), writer, gaps, weights_less_one, sizes, out)
    assert not out.any()


def build_corpus(rng: random.Random) -> list[Passage]:
    """Return passages with words that occur in 1, 2 … 1,000 of them, scattered or in consecutive rows."""
    word_counts: list[Counter[str]] = [Counter() for _ in range(1200)]
    for size in SIZES_OF_LISTS:
        first = rng.choice([0, rng.randrange(1201 - size), 1200 - size])
        for prefix, rows in ("a", rng.sample(range(1200), size)), ("b", range(first, first + size)):
            for row in rows:
                word_counts[row][f"{prefix}{size}"] += rng.choice(FREQUENCIES)
    return [
        build_passage(f"r{row} seventeenandahalf{row % 7}", " ".join(words.elements()))
        for row, words in enumerate(word_counts)
    ]


@given(
    seed=st.integers(0, 2**32),
    share=st.sampled_from([0.001, 0.01, 0.1, 0.4]),
    ends=st.sampled_from(["kept", "cut", "new"]),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lists_of_any_length_give_the_bytes_of_a_build(tmp_path: Path, seed: int, share: float, ends: str) -> None:
    """Passages are removed, added and changed, also at both ends; most short lists shift by few or many rows."""
    rng = random.Random(seed)
    corpus, new_corpus = build_corpus(rng), list[Passage]()
    for passage in corpus:
        chance = rng.random() / share
        if chance < 0.4:
            new_corpus.append(build_passage(passage.title, f"{passage.text} {rng.choice(['a2', 'b128', 'z'])}"))
        elif not 0.4 <= chance < 0.7:
            new_corpus.append(passage)
        if chance < 0.1 or 0.7 <= chance < 1:
            texts = ["a1 b1000 a128", "b127 b127", "never", "", corpus[7].text]
            new_corpus.append(build_passage("new", rng.choice(texts)))
        if chance < 0.01:
            new_corpus += [build_passage("new", f"many {number}") for number in range(rng.choice([1, 9, 40]))]
    if ends == "cut":
        del new_corpus[:2], new_corpus[-2:]
    elif ends == "new":
        new_corpus = [build_passage("first", "a1 a1000"), *new_corpus, build_passage("last", "a1000 b1000 a64")]
    old_path = build_bm25(corpus, tmp_path / "old").file.path
    assert derive(old_path, corpus, new_corpus, tmp_path / "derived", max_new=len(new_corpus))
    assert_equals_build(new_corpus, tmp_path)
