import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rag_model.index.postings.dictionary import GROUP_TERMS, DictionaryWriter, find_terms
from rag_model.index.postings.packing import BLOCK, PADDING, SCRATCH_SIZE, decode_block, encode_block

GAPS = st.one_of(st.integers(0, 3), st.integers(0, 2**14), st.integers(0, 2**24))
SHARED = st.sampled_from([b"", b"seventy", b"eighteen", b"seventeen", b"seventeen-and-a-half"])
TERMS = st.builds(bytes.__add__, SHARED, st.binary(min_size=1, max_size=12))
WEIGHTS = st.one_of(st.just(1), st.integers(1, 4), st.integers(1, 65_535))


def unpack(packed: bytes, count: int, row_before: int = -1) -> tuple[int, list[int], list[int]]:
    """Return where a block ends, its rows and its weights."""
    data = np.frombuffer(packed + bytes(PADDING + -len(packed) % 8), np.uint8)
    rows, weights = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    end = decode_block(data, 0, len(packed), row_before, count, rows, weights)
    return int(end), rows[:count].tolist(), weights[:count].tolist()


def pack(gaps: list[int], weights: list[int]) -> bytes:
    out, numbers = np.zeros(20 * len(gaps) + 8, np.uint8), np.zeros((2, BLOCK), np.uint32)
    numbers[:, : len(gaps)] = gaps, np.array(weights) - 1
    all_bits = (int(np.bitwise_or.reduce(values)) for values in numbers)
    end = encode_block(*numbers, len(gaps), *all_bits, np.zeros(SCRATCH_SIZE, np.int64), out, 0)
    return out[:end].tobytes()


@given(st.lists(st.tuples(GAPS, WEIGHTS), min_size=1, max_size=BLOCK), st.integers(-1, 10))
def test_block_round_trips(postings: list[tuple[int, int]], row_before: int) -> None:
    gaps, weights = [gap for gap, _ in postings], [weight for _, weight in postings]
    packed = pack(gaps, weights)
    rows = (row_before + np.cumsum(np.array(gaps) + 1)).tolist()
    assert unpack(packed, len(gaps), row_before) == (len(packed), rows, weights)


def test_a_rare_large_value_does_not_widen_the_others() -> None:
    assert len(pack([0] * 127 + [1 << 20], [1] * 128)) == 2 + 1 + 1 + 3  # widths 0; one exception of 21 bits


def find_best_width(values: list[int]) -> int:
    """Return the smallest width with the fewest bytes, by trying all."""

    def size(width: int) -> int:
        larger = [value >> width for value in values if value >> width]
        varints = sum(1 + -(-high.bit_length() // 7) for high in larger)
        return -(-len(values) * width // 8) + (1 + varints if larger else 0)

    return min(range(33), key=size)


@given(st.lists(st.tuples(st.one_of(GAPS, st.integers(0, 2**32 - 1)), WEIGHTS), min_size=1, max_size=BLOCK))
def test_widths_are_those_with_the_fewest_bytes(postings: list[tuple[int, int]]) -> None:
    gaps, weights = [gap for gap, _ in postings], [weight for _, weight in postings]
    packed = pack(gaps, weights)
    best_widths = (find_best_width(gaps), find_best_width([weight - 1 for weight in weights]))
    assert (packed[0] & 127, packed[1] & 127) == best_widths


@given(st.binary(max_size=80), st.integers(1, BLOCK))
def test_invalid_block_is_refused_or_gives_ascending_rows(data: bytes, count: int) -> None:
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
def test_a_dictionary_finds_its_terms_and_no_others(terms: set[bytes], other_terms: list[bytes], split: int) -> None:
    writer, entries, ordered = DictionaryWriter(), {}, sorted(terms)
    for number, term in enumerate(ordered, start=1):
        entries[term] = (number, sum(range(200, 199 + number)), sum(range(200, 200 + number)))
    buffers = [b"", b""]
    split = min(split, len(terms))
    for numbers in (range(split), range(split, len(terms))):
        batch = ordered[numbers.start : numbers.stop]
        ends, counts = np.cumsum([len(term) for term in batch], dtype=np.int64), np.array(numbers, np.int64) + 1
        output = writer.write_terms(np.frombuffer(b"".join(batch), np.uint8), ends, counts, counts + 199)
        buffers = [buffer + addition for buffer, addition in zip(buffers, output, strict=True)]
    data, groups = np.frombuffer(buffers[0], np.uint8), np.frombuffer(buffers[1], np.int64).reshape(-1, 2)
    assert len(groups) == -(-len(terms) // GROUP_TERMS)
    queries = [*entries, *other_terms]
    results = [tuple(row) for row in find_terms(queries, data, groups, writer.n_terms).tolist()]
    assert results == [entries.get(term, (0, 0, 0)) for term in queries]
