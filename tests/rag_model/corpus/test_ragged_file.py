"""Files of rows of different lengths can be read by row, in batches and by range, and damage is detected."""

import io
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.corpus import ragged_file
from rag_model.corpus.ragged_file import (
    BATCH_ROWS,
    RaggedBatch,
    SparseFile,
    SparseVectors,
    SparseWriter,
    TokenFile,
    TokenVectors,
    TokenWriter,
    compute_offsets,
    expand_positions,
    is_token_file,
    read_column_name,
)
from rag_model.errors import InputError
from tests.fixtures.impact_index import draw_passages

LENGTHS = np.array([2, 0, 3, 1])


def build_rows(kind: type[RaggedBatch]) -> RaggedBatch:
    values = np.arange(1, 7)
    columns = [values.astype(np.float16)[:, None]] if kind is TokenVectors else [values.astype(np.int32)] * 2
    return kind(*columns, compute_offsets(LENGTHS))


def test_offsets_locate_the_values() -> None:
    assert compute_offsets(LENGTHS).tolist() == [0, 2, 2, 5, 6]
    assert expand_positions(np.array([7, 3]), np.array([2, 3])).tolist() == [7, 8, 3, 4, 5]


@pytest.mark.parametrize("kind", [TokenVectors, SparseVectors])
def test_passages_are_selected_and_concatenated(kind: type[RaggedBatch]) -> None:
    rows = build_rows(kind)
    passages = kind.concatenate([rows.take(np.array([3, 1])), rows.take(np.array([0]))])
    assert (len(passages), passages.offsets.tolist()) == (3, [0, 1, 1, 3])
    assert all(column.reshape(-1).tolist() == [6, 1, 2] for column in passages.columns())
    assert [column.dtype for column in passages.columns()] == [column.dtype for column in rows.columns()]
    assert (len(kind.concatenate([])), len(kind.empty())) == (0, 0)


def test_empty_selection_has_the_dimension_of_the_file(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "part", 8, "float16"):
        pass
    assert TokenFile(tmp_path / "part").take(np.empty(0, np.int64)).vectors.shape == (0, 8)


def test_column_name_is_read_from_arrow_files_only(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "part", 8, "float16"):
        pass
    (tmp_path / "other").write_bytes(b"no arrow")
    (tmp_path / "cut").write_bytes((tmp_path / "part").read_bytes()[:-30])
    assert (read_column_name(tmp_path / "part"), read_column_name(tmp_path / "other")) == ("tokens", "")
    with pytest.raises(InputError, match="cut is damaged: encode its part again"):
        read_column_name(tmp_path / "cut")


DIM = 40


class RangeReader(io.FileIO):
    """A file like one of an object store, which counts the bytes that are read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.bytes_read = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size) or b""
        self.bytes_read += len(data)
        return data


def write_sparse_file(rows: SparseVectors, path: Path) -> Path:
    with SparseWriter(path, DIM, 64) as writer:
        writer.write(rows)
    return path


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 60), st.integers(0, 4), st.lists(st.integers(0, 59), max_size=9), st.integers(1, 20))
def test_sparse_rows_are_read_back(tmp_path: Path, count: int, seed: int, choices: list[int], batch: int) -> None:
    rows = draw_passages(count, DIM, 12, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged_file, "BATCH_ROWS", batch)
        path = write_sparse_file(rows, tmp_path / f"{count}-{seed}-{batch}")
    row_numbers = np.array(sorted({row for row in choices if row < count}), np.int64)
    with RangeReader(path) as source:
        for file in (SparseFile(path), SparseFile(source)):
            assert (file.n, file.dim, file.scale, file.n_postings) == (count, DIM, 64, len(rows.terms))
            for batch_read, expected in (
                (SparseVectors.concatenate(list(file.iter_batches())), rows),
                (file.take(row_numbers), rows.take(row_numbers)),
            ):
                assert (batch_read.offsets == expected.offsets).all()
                assert (batch_read.terms == expected.terms).all()
                assert (batch_read.weights == expected.weights).all()


def build_sparse_vectors(terms: list[int], weights: list[int], lengths: list[int]) -> SparseVectors:
    return SparseVectors(np.array(terms, np.int32), np.array(weights, np.uint8), compute_offsets(np.array(lengths)))


@pytest.mark.parametrize(
    "rows",
    [
        build_sparse_vectors([3, 2], [1, 1], [2]),
        build_sparse_vectors([2, 2], [1, 1], [2]),
        build_sparse_vectors([2, DIM], [1, 1], [2]),
        build_sparse_vectors([-1, 2], [1, 1], [2]),
        build_sparse_vectors([1, 2], [0, 1], [2]),
        build_sparse_vectors([5, 1, 1], [1, 1, 1], [0, 1, 2]),
    ],
)
def test_terms_out_of_order_or_range_are_refused(rows: SparseVectors, tmp_path: Path) -> None:
    path = write_sparse_file(rows, tmp_path / "part")
    with pytest.raises(InputError, match="is not a complete file of weighted terms: encode its part again"):
        SparseFile(path)


def test_row_after_an_empty_one_may_start_with_a_smaller_term(tmp_path: Path) -> None:
    rows = build_sparse_vectors([5, 6, 1, 9], [1, 2, 3, 4], [0, 2, 0, 0, 1, 1, 0])
    assert SparseFile(write_sparse_file(rows, tmp_path / "part")).n_postings == 4


def test_other_files_are_not_sparse_files(tmp_path: Path) -> None:
    path = write_sparse_file(draw_passages(50, DIM, 12), tmp_path / "part")
    (tmp_path / "cut").write_bytes(path.read_bytes()[:-40])
    with TokenWriter(tmp_path / "tokens", 4, "float16"):
        pass
    for name in ("cut", "tokens", "missing"):
        with pytest.raises(InputError, match=f"{name} is not a complete file of weighted terms"):
            SparseFile(tmp_path / name)


def build_token_vectors(rows: int, seed: int = 0) -> TokenVectors:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 9, rows)
    return TokenVectors(rng.normal(size=(lengths.sum(), 8)).astype(np.float16), compute_offsets(lengths))


@pytest.fixture
def token_path(tmp_path: Path) -> Path:
    """Write a file of several record batches."""
    path = tmp_path / "part.arrow"
    with TokenWriter(path, 8, "float16") as writer:
        writer.write(build_token_vectors(2 * BATCH_ROWS + 5))
    return path


def test_token_rows_are_read_in_batches_and_by_row(token_path: Path) -> None:
    expected, file = build_token_vectors(2 * BATCH_ROWS + 5), TokenFile(token_path)
    assert (file.n, file.tokens, file.dim, file.dtype) == (2 * BATCH_ROWS + 5, len(expected.vectors), 8, np.float16)
    all_rows = TokenVectors.concatenate(list(file.iter_batches()))
    assert (all_rows.vectors == expected.vectors).all()
    assert (all_rows.offsets == expected.offsets).all()
    rows = np.array([0, BATCH_ROWS - 1, BATCH_ROWS, 2 * BATCH_ROWS + 4])
    selected = file.take(rows)
    assert (selected.vectors == expected.take(rows).vectors).all()
    assert file.take(np.empty(0, np.int64)).offsets.tolist() == [0]
    assert is_token_file(token_path)


def test_rows_of_a_remote_file_are_read_by_range(tmp_path: Path) -> None:
    """Batches may be incomplete, and only a small part of a large file is read."""
    narrow, path = build_token_vectors(9 * BATCH_ROWS, seed=2), tmp_path / "part"
    wide = TokenVectors(np.tile(narrow.vectors, 16), narrow.offsets)
    with TokenWriter(path, 128, "float16") as writer:
        for first, last in ((0, 700), (700, 5000), (5000, 9 * BATCH_ROWS)):
            writer.write(wide.take(np.arange(first, last)))
    with RangeReader(path) as source:
        file, local = TokenFile(source), TokenFile(path)
        assert (file.n, file.tokens, file.dim, file.dtype) == (local.n, local.tokens, local.dim, local.dtype)
        assert (file.lengths == local.lengths).all()
        rows = np.array([0, 1, 699, 700, 5000, 9 * BATCH_ROWS - 1])
        selected = file.take(rows)
        assert source.bytes_read < path.stat().st_size / 20
        assert (selected.vectors == wide.take(rows).vectors).all()
        assert (selected.offsets == wide.take(rows).offsets).all()
        assert (TokenVectors.concatenate(list(file.iter_batches())).vectors == wide.vectors).all()


@pytest.mark.parametrize("seed", range(8))
def test_damaged_remote_file_is_refused_or_gives_rows(seed: int, token_path: Path) -> None:
    data, rng = bytearray(token_path.read_bytes()), np.random.default_rng(seed)
    offsets = [*rng.integers(0, len(data), 40 * (seed % 2)), *rng.integers(len(data) - 600, len(data), 3)]
    for offset in offsets:
        data[offset] = int(rng.integers(0, 256))
    token_path.write_bytes(data)
    with RangeReader(token_path) as source, suppress(InputError):
        TokenFile(source).take(np.array([0, 5, BATCH_ROWS + 3]))


def test_part_without_passages_is_a_file_without_rows(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "none", 8, "float16"):
        pass
    with RangeReader(tmp_path / "none") as source:
        for file in (TokenFile(tmp_path / "none"), TokenFile(source)):
            assert (file.n, list(file.iter_batches())) == (0, [])


def test_damaged_token_file_is_refused(token_path: Path, tmp_path: Path) -> None:
    data = token_path.read_bytes()
    np.save(tmp_path / "other.npy", np.ones((2, 2)))
    for broken in (b"", data[:-100], data[: len(data) // 2], (tmp_path / "other.npy").read_bytes()):
        (tmp_path / "broken").write_bytes(broken)
        with pytest.raises(InputError, match="not a complete file of token vectors"):
            TokenFile(tmp_path / "broken")
    with pytest.raises(InputError):
        TokenFile(tmp_path / "missing")
    with TokenWriter(tmp_path / "nan", 8, "float32") as writer:
        writer.write(TokenVectors(np.full((2, 8), np.nan, np.float32), np.array([0, 1, 2])))
    with pytest.raises(InputError, match="NaN"):
        list(TokenFile(tmp_path / "nan").iter_batches())
