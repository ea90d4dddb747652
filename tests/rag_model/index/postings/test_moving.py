"""Blocks that move to a later file, beside what plain Python makes of them; and lists of any length, beside a build."""

import random
from bisect import insort
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
from tests.fixtures.bm25_index import build_words
from tests.rag_model.index.postings.test_derive import derive
from tests.rag_model.index.postings.test_packing import pack

POSTINGS = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 3), st.integers(0, 1 << 12)), st.one_of(st.integers(1, 3), st.integers(1, 65_535))
    ),
    min_size=2,
    max_size=BLOCK,
)
SIZES_OF_LISTS = (1, 2, 3, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000)
OFTEN = (1, 1, 1, 1, 1, 2, 3, 40, 300)  # so that some weights are exceptions


def word(row: int, length: int = 5, weight: int = 0) -> int:
    return row << ROW_SHIFT | length << LENGTH_SHIFT | weight


def copied(gaps: list[int], weights: list[int], now: int) -> bytes | None:
    """Return what `copy_block` makes of a block whose first row becomes another; None if it makes nothing."""
    packed = pack(gaps, weights)
    data = np.frombuffer(b"before" + packed + b"\xff" * PADDING, np.uint8)
    out = np.full(MAX_POSTING_BYTES * len(gaps) + 2, 77, np.uint8)
    end = int(copy_block(data, 6, 6 + len(packed), len(gaps), gaps[0], now, out, 2))
    assert end >= 0 or set(out.tolist()) == {77}
    return out[2:end].tobytes() if end >= 0 else None


@given(POSTINGS, st.integers(0, 1 << 13))
@example([(0, 1), (0, 1)], 0)
@example([(5, 1)] * 128, 6)
@example([(4000, 1), *[(1, 300)] * 127], 4001)
def test_a_block_is_copied_as_it_would_be_written(postings: list[tuple[int, int]], now: int) -> None:
    gaps, weights = [gap for gap, _ in postings], [weight for _, weight in postings]
    found, rewritten = copied(gaps, weights, now), pack([now, *gaps[1:]], weights)
    assert found in (None, rewritten)
    if gaps[0].bit_length() == now.bit_length() <= pack(gaps, weights)[0] & 127:
        assert found == rewritten


def test_a_block_with_more_bytes_than_its_postings_may_take_is_not_copied() -> None:
    """Damaged bytes may name an exception again and again, in varints of many bytes: there is no room for them."""
    data = np.zeros(4000, np.uint8)
    data[:2] = 2, 1
    out = np.full(4000, 77, np.uint8)
    most = MAX_POSTING_BYTES * 2 - PADDING
    assert copy_block(data, 0, most, 2, 3, 2, out, 0) == most
    assert set(out[MAX_POSTING_BYTES * 2 :].tolist()) == {77}
    assert copy_block(data, 0, most + 1, 2, 3, 2, out, 0) == -1


@given(st.lists(st.integers(0, 5), min_size=1, max_size=BLOCK), st.integers(-3, 9), st.data())
def test_rows_that_rise_by_the_same_are_noticed(gaps: list[int], shift: int, data: st.DataObject) -> None:
    rows = (np.cumsum(np.array(gaps) + 1) - 1).tolist()
    n = rows[-1] + 1
    moved = np.array([word(max(0, row + shift)) for row in range(n)], np.int64)
    shift = max(shift, -rows[0])
    moved[rows] = [word(row + shift) for row in rows]
    held = np.array(gaps, np.uint32)
    assert find_common_shift(held, len(gaps), moved) == shift
    assert find_common_shift(held, len(gaps), moved[:-1]) == NO_COMMON_SHIFT, "a row that the file has not"
    row = data.draw(st.sampled_from(rows))
    for other in (REMOVED, word(row + shift + 1)):
        if len(rows) > 1 or other == REMOVED:
            changed = moved.copy()
            changed[row] = other
            assert find_common_shift(held, len(gaps), changed) == NO_COMMON_SHIFT


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 65_535)), min_size=1, max_size=BLOCK),
    st.sets(st.integers(0, 640)),
    st.sets(st.integers(0, 900), max_size=90),
    st.integers(-1, 20),
)
def test_a_block_moves_to_its_rows_among_new_ones(
    postings: list[tuple[int, int]], gone: set[int], coming: set[int], before: int
) -> None:
    gaps, weights = [gap for gap, _ in postings], [weight for _, weight in postings]
    rows = (before + np.cumsum(np.array(gaps) + 1)).tolist()
    moved = np.array([REMOVED if row in gone else word(2 * row) for row in range(rows[-1] + 1)], np.int64)
    new = np.array(sorted(word(2 * row + 1, 9, 3) for row in coming), np.int64)
    words = np.zeros(BLOCK + len(new) + 3, np.int64)
    less = np.array(weights, np.uint32) - 1
    held, first, last = move_block(
        np.array(gaps, np.uint32), less, len(gaps), before, moved, new, 0, len(new), words, 3
    )
    stayed = [word(2 * row, weight=weight) for row, weight in zip(rows, weights, strict=True) if row not in gone]
    taken = [one for one in new.tolist() if stayed and one < stayed[-1]]
    for one in taken:
        insort(stayed, one)
    assert (words[3:held].tolist(), int(first), int(last)) == (stayed, len(taken), rows[-1])


@pytest.mark.parametrize(("gaps", "less"), [([0, 9], [0, 0]), ([0, 1], [0, 65_536]), ([0, 2**32 - 1], [0, 0])])
def test_rows_that_are_not_there_and_weights_beyond_any_are_damage(gaps: list[int], less: list[int]) -> None:
    moved, new = np.array([word(row) for row in range(10)], np.int64), np.zeros(1, np.int64)
    numbers = np.array([gaps, less], np.uint32)
    assert move_block(*numbers, 2, -1, moved, new, 0, 0, np.zeros(300, np.int64), 0)[2] == -1


@pytest.mark.parametrize("words", [[word(1, 5, 1), word(1, 5, 1)], [word(3, 5, 1), word(2, 5, 1)], [word(1, 5, 0)]])
def test_words_that_do_not_ascend_or_have_no_weight_are_not_written(words: list[int]) -> None:
    writer, sizes, out = np.zeros(WRITER_SIZE, np.int64), np.zeros(SCRATCH_SIZE, np.int64), np.zeros(99, np.uint8)
    gaps, less = np.zeros(BLOCK, np.uint32), np.zeros(BLOCK, np.uint32)
    begin_list(writer, 0, -1)
    assert not write_block(np.array(words, np.int64), 0, len(words), writer, gaps, less, sizes, out)
    assert not out.any()


def corpus(rng: random.Random) -> list[Passage]:
    """Return passages in which a word is in 1, 2 … 1,000 of them: somewhere, one behind the other, or far apart."""
    held: list[Counter[str]] = [Counter() for _ in range(1200)]
    for size in SIZES_OF_LISTS:
        first = rng.choice([0, rng.randrange(1201 - size), 1200 - size])
        for name, rows in ("a", rng.sample(range(1200), size)), ("b", range(first, first + size)):
            for row in rows:
                held[row][f"{name}{size}"] += rng.choice(OFTEN)
    return [
        build_passage(f"r{row} seventeenandahalf{row % 7}", " ".join(own.elements())) for row, own in enumerate(held)
    ]


@given(
    seed=st.integers(0, 2**32),
    share=st.sampled_from([0.001, 0.01, 0.1, 0.4]),
    ends=st.sampled_from(["kept", "cut", "new"]),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lists_of_any_length_give_the_bytes_of_a_build(tmp_path: Path, seed: int, share: float, ends: str) -> None:
    """Passages go, come and change, everywhere and at both ends; most short lists only rise, by a few rows or many."""
    rng = random.Random(seed)
    before, after = corpus(rng), list[Passage]()
    for one in before:
        chance = rng.random() / share
        if chance < 0.4:
            after.append(build_passage(one.title, f"{one.text} {rng.choice(['a2', 'b128', 'z'])}"))
        elif not 0.4 <= chance < 0.7:
            after.append(one)
        if chance < 0.1 or 0.7 <= chance < 1:
            after.append(build_passage("new", rng.choice(["a1 b1000 a128", "b127 b127", "never", "", before[7].text])))
        if chance < 0.01:
            after += [build_passage("new", f"many {number}") for number in range(rng.choice([1, 9, 40]))]
    if ends == "cut":
        del after[:2], after[-2:]
    elif ends == "new":
        after = [build_passage("first", "a1 a1000"), *after, build_passage("last", "a1000 b1000 a64")]
    old = build_words(before, tmp_path / "old").file.path
    assert derive(old, before, after, tmp_path / "derived", most=len(after))
    assert (tmp_path / "derived").read_bytes() == build_words(after, tmp_path / "after").file.path.read_bytes()
