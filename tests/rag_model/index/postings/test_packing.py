import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rag_model.index.postings.dictionary import GROUP, DictionaryWriter, find_terms
from rag_model.index.postings.packing import BLOCK, PADDING, SCRATCH_SIZE, decode_block, encode_block

GAPS = st.one_of(st.integers(0, 3), st.integers(0, 2**14), st.integers(0, 2**24))
SHARED = st.sampled_from([b"", b"seventy", b"eighteen", b"seventeen", b"seventeen-and-a-half"])
TERMS = st.builds(bytes.__add__, SHARED, st.binary(min_size=1, max_size=12))
WEIGHTS = st.one_of(st.just(1), st.integers(1, 4), st.integers(1, 65_535))


def unpack(packed: bytes, count: int, before: int = -1) -> tuple[int, list[int], list[int]]:
    """Return where a block ends, its rows and its weights."""
    data = np.frombuffer(packed + bytes(PADDING + -len(packed) % 8), np.uint8)
    rows, weights = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    end = decode_block(data, 0, len(packed), before, count, rows, weights)
    return int(end), rows[:count].tolist(), weights[:count].tolist()


def pack(gaps: list[int], weights: list[int]) -> bytes:
    out, held = np.zeros(20 * len(gaps) + 8, np.uint8), np.zeros((2, BLOCK), np.uint32)
    held[:, : len(gaps)] = gaps, np.array(weights) - 1
    every = (int(np.bitwise_or.reduce(values)) for values in held)
    end = encode_block(*held, len(gaps), *every, np.zeros(SCRATCH_SIZE, np.int64), out, 0)
    return out[:end].tobytes()


@given(st.lists(st.tuples(GAPS, WEIGHTS), min_size=1, max_size=BLOCK), st.integers(-1, 10))
def test_a_block_gives_its_postings_back(postings: list[tuple[int, int]], before: int) -> None:
    gaps, weights = [gap for gap, _ in postings], [weight for _, weight in postings]
    packed = pack(gaps, weights)
    rows = (before + np.cumsum(np.array(gaps) + 1)).tolist()
    assert unpack(packed, len(gaps), before) == (len(packed), rows, weights)


def test_a_rare_large_value_does_not_widen_the_others() -> None:
    assert len(pack([0] * 127 + [1 << 20], [1] * 128)) == 2 + 1 + 1 + 3  # widths 0; one exception of 21 bits


def fewest(values: list[int]) -> int:
    """Return the width with the fewest bytes, of several the lowest: all of them tried."""

    def size(width: int) -> int:
        larger = [value >> width for value in values if value >> width]
        varints = sum(1 + -(-high.bit_length() // 7) for high in larger)
        return -(-len(values) * width // 8) + (1 + varints if larger else 0)

    return min(range(33), key=size)


@given(st.lists(st.tuples(st.one_of(GAPS, st.integers(0, 2**32 - 1)), WEIGHTS), min_size=1, max_size=BLOCK))
def test_widths_are_those_with_the_fewest_bytes(postings: list[tuple[int, int]]) -> None:
    gaps, weights = [gap for gap, _ in postings], [weight for _, weight in postings]
    packed = pack(gaps, weights)
    assert (packed[0] & 127, packed[1] & 127) == (fewest(gaps), fewest([weight - 1 for weight in weights]))


@given(st.binary(max_size=80), st.integers(1, BLOCK))
def test_bytes_that_are_no_block_are_noticed_or_give_ascending_rows(data: bytes, count: int) -> None:
    end, rows, weights = unpack(data, count)
    if end >= 0:
        assert end <= len(data)
        assert rows == sorted(set(rows))
        assert rows[0] >= 0
        assert min(weights) >= 1


@given(
    st.sets(TERMS, min_size=1, max_size=80),
    st.lists(st.binary(max_size=12)),
    st.integers(0, 40),
)
def test_a_dictionary_finds_its_terms_and_no_others(terms: set[bytes], others: list[bytes], cut: int) -> None:
    writer, known, ordered = DictionaryWriter(), {}, sorted(terms)
    for number, term in enumerate(ordered, start=1):
        known[term] = (number, sum(range(200, 199 + number)), sum(range(200, 200 + number)))
    written = [b"", b""]
    cut = min(cut, len(terms))
    for numbers in (range(cut), range(cut, len(terms))):
        some = ordered[numbers.start : numbers.stop]
        ends, counts = np.cumsum([len(term) for term in some], dtype=np.int64), np.array(numbers, np.int64) + 1
        told = writer.write_terms(np.frombuffer(b"".join(some), np.uint8), ends, counts, counts + 199)
        written = [before + more for before, more in zip(written, told, strict=True)]
    data, groups = np.frombuffer(written[0], np.uint8), np.frombuffer(written[1], np.int64).reshape(-1, 2)
    assert len(groups) == -(-len(terms) // GROUP)
    asked = [*known, *others]
    found = [tuple(row) for row in find_terms(asked, data, groups, writer.terms).tolist()]
    assert found == [known.get(term, (0, 0, 0)) for term in asked]
