"""Vector files of users: which are accepted, how others are refused, and that no row is lost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model import parquet_pages
from rag_model.errors import BookwheelError, InputError, UsageError
from rag_model.index.files.intake import VectorInput, inspect_vectors, split_into_parts

Array = npt.NDArray[Any]
ROWS = np.random.default_rng(0).standard_normal((50, 4))
KINDS = {"fixed": lambda kind: pa.list_(kind, 4), "variable": pa.list_, "large": pa.large_list}


def save_array(path: Path, array: Array) -> Path:
    np.save(path, array)
    return path


def write_parquet(path: Path, rows: Any, kind: pa.DataType, **columns: Any) -> Path:
    pq.write_table(pa.table({"vector": pa.array(rows, kind), **columns}), path, row_group_size=16)
    return path


def split(intake: VectorInput, part_bytes: int = 16 * 8, invalid: Any = "refuse") -> tuple[list[Array], Any]:
    parts: list[Array] = []
    kept_rows = split_into_parts(intake, lambda part: parts.append(part.copy()), invalid, part_bytes)
    return parts, kept_rows


@pytest.mark.parametrize(("dtype", "part_dtype"), [("f2", "f2"), ("f4", "f4"), ("f8", "f4"), (">f4", "f4")])
def test_npy_of_any_float_dtype_is_read(dtype: str, part_dtype: str, tmp_path: Path) -> None:
    parts, _ = split(inspect_vectors([save_array(tmp_path / "v.npy", ROWS.astype(dtype))]))
    assert all(part.dtype == part_dtype for part in parts)
    np.testing.assert_array_equal(np.concatenate(parts), ROWS.astype(dtype).astype(part_dtype))


def test_npy_in_fortran_order_is_read(tmp_path: Path) -> None:
    parts, _ = split(inspect_vectors([save_array(tmp_path / "v.npy", np.asfortranarray(ROWS.astype("f4")))]))
    np.testing.assert_array_equal(np.concatenate(parts), ROWS.astype("f4"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("floats", ["f2", "f4", "f8"])
def test_lists_of_a_parquet_file_are_read(kind: str, floats: str, tmp_path: Path) -> None:
    rows = ROWS.astype(floats)
    path = write_parquet(
        tmp_path / "v.parquet", list(rows), KINDS[kind](pa.from_numpy_dtype(rows.dtype)), id=pa.array(range(50))
    )
    intake = inspect_vectors([path])
    assert (intake.n, intake.d) == (50, 4)
    parts, _ = split(intake)
    np.testing.assert_array_equal(np.concatenate(parts), rows.astype(intake.dtype))


def test_folders_are_sorted_and_files_keep_their_order(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        save_array(tmp_path / f"part-{number}.npy", ROWS[number * 10 : number * 10 + 10].astype("f2"))
    save_array(tmp_path / "part-3.npy", np.empty((0, 4), "f2"))
    (tmp_path / "notes.txt").write_text("not a vector")
    assert [file.path.name for file in inspect_vectors([tmp_path]).files] == ["part-0.npy", "part-1.npy", "part-2.npy"]
    last, first = tmp_path / "part-2.npy", tmp_path / "part-0.npy"
    parts, _ = split(inspect_vectors([last, first]))
    np.testing.assert_array_equal(np.concatenate(parts), np.concatenate([np.load(last), np.load(first)]))


@given(
    rows=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any),
    invalid=st.sets(st.integers(0, 199)),
    size=st.integers(1, 60),
)
def test_parts_are_bounded_and_hold_every_finite_row(
    rows: list[int], invalid: set[int], size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, n = tmp_path_factory.mktemp("cut"), sum(rows)
    vectors = np.arange(4 * n, dtype=np.float32).reshape(n, 4)
    invalid_rows = sorted(row for row in invalid if row < n)
    vectors[invalid_rows, 1] = np.nan
    ends = np.cumsum(rows)[:-1]
    paths = [save_array(folder / f"{number}.npy", part) for number, part in enumerate(np.split(vectors, ends))]
    if len(invalid_rows) == n:
        with pytest.raises(InputError, match="nothing to index"):
            split(inspect_vectors(paths), 16 * size, "drop")
        return
    parts, kept_rows = split(inspect_vectors(paths), 16 * size, "drop")
    assert max(map(len, parts)) <= size
    np.testing.assert_array_equal(kept_rows, np.setdiff1d(np.arange(n), invalid_rows))
    np.testing.assert_array_equal(np.concatenate(parts), vectors[kept_rows])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_error_names_the_invalid_row(value: float, tmp_path: Path) -> None:
    rows = ROWS.copy()
    rows[7, 2] = value
    paths = [save_array(tmp_path / "a.npy", ROWS), save_array(tmp_path / "b.npy", rows)]
    with pytest.raises(InputError, match=r"^row 7 of .*b\.npy holds a NaN or an infinity: .* --invalid drop$"):
        split(inspect_vectors(paths))
    _, kept_rows = split(inspect_vectors(paths), invalid="drop")
    assert set(range(100)) - set(kept_rows.tolist()) == {57}


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_finite_rows_with_an_infinite_sum_are_accepted(dtype: type[np.floating], tmp_path: Path) -> None:
    rows = ROWS.astype(dtype)
    rows[7] = np.finfo(dtype).max
    parts, _ = split(inspect_vectors([save_array(tmp_path / "a.npy", rows)]))
    np.testing.assert_array_equal(np.concatenate(parts), rows)


def test_error_names_a_row_of_another_length(tmp_path: Path) -> None:
    rows = [[1.0, 2.0]] * 20 + [[1.0]]
    with pytest.raises(InputError, match=r"row 20 of .* has 1 dimensions where others have 2"):
        split(inspect_vectors([write_parquet(tmp_path / "short.parquet", rows, pa.list_(pa.float32()))]))
    with pytest.raises(InputError, match=r"row 20 of .* is missing"):
        split(inspect_vectors([write_parquet(tmp_path / "none.parquet", [*rows[:20], None], pa.list_(pa.float32()))]))
    path = write_parquet(tmp_path / "fixed.parquet", [*rows[:20], None], pa.list_(pa.float32(), 2))
    with pytest.raises(InputError, match=r"fixed\.parquet cannot be read from row \d+ on"):  # Arrow's own error
        split(inspect_vectors([path]))


def _write_truncated(path: Path) -> Path:
    data = save_array(path, ROWS).read_bytes()
    path.write_bytes(data[:-5])
    return path


def _write_half_a_file(path: Path) -> Path:
    data = write_parquet(path, list(ROWS), pa.list_(pa.float64())).read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return path


def _create_folder(path: Path) -> Path:
    path.mkdir()
    return path


def _write_text(path: Path) -> Path:
    path.write_text("0.1 0.2")
    return path


INVALID_INPUTS: dict[str, tuple[Callable[[Path], Path], type[BookwheelError], str]] = {
    "v.npy": (lambda path: path, InputError, "there is no file"),
    "one.npy": (lambda path: save_array(path, ROWS[0]), InputError, r"of shape \(4,\): vectors are \(rows, d\)"),
    "three.npy": (lambda path: save_array(path, ROWS[None]), InputError, r"of shape \(1, 50, 4\)"),
    "flat.npy": (lambda path: save_array(path, ROWS[:, :0]), InputError, r"of shape \(50, 0\)"),
    "whole.npy": (lambda path: save_array(path, ROWS.astype("i4")), InputError, "holds int32"),
    "things.npy": (lambda path: save_array(path, ROWS.astype(object)), InputError, "contains object"),
    "none.npy": (lambda path: save_array(path, ROWS[:0]), InputError, "holds no vectors"),
    "cut.npy": (_write_truncated, InputError, "is truncated: 1,723 bytes of 1,728"),
    "text.npy": (_write_text, InputError, "is not a complete .npy file"),
    "text.txt": (_write_text, InputError, "is neither .npy nor .parquet"),
    "text.parquet": (_write_text, InputError, "is not a complete Parquet file"),
    "cut.parquet": (_write_half_a_file, InputError, "is not a complete Parquet file"),
    "words.parquet": (
        lambda path: write_parquet(path, ["a"], pa.string()),
        InputError,
        "no column with a list of floats",
    ),
    "none.parquet": (lambda path: write_parquet(path, [], pa.list_(pa.float32())), InputError, "holds no vectors"),
    "short.parquet": (lambda path: write_parquet(path, [[]], pa.list_(pa.float32())), InputError, "row 0 .* is empty"),
    "two.parquet": (
        lambda path: write_parquet(path, [[1.0]], pa.list_(pa.float32()), other=pa.array([[1.0]])),
        UsageError,
        r"several columns of vectors \(vector, other\): give a file with one, or for `bookwheel index`",
    ),
    "folder": (_create_folder, InputError, "holds no .npy and no .parquet"),
}


@pytest.mark.parametrize("name", INVALID_INPUTS)
def test_invalid_input_is_refused(name: str, tmp_path: Path) -> None:
    make_input, error_type, message = INVALID_INPUTS[name]
    with pytest.raises(error_type, match=message) as error:
        inspect_vectors([make_input(tmp_path / name)])
    assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_column_is_chosen_by_name(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "v.parquet", [[1.0]], pa.list_(pa.float32()), other=pa.array([[2.0, 3.0]]))
    assert inspect_vectors([path], "other").d == 2
    with pytest.raises(InputError, match="no column 'third' of float lists: it has vector, other"):
        inspect_vectors([path], "third")


def test_mixed_dimensions_and_mixed_folders_are_refused(tmp_path: Path) -> None:
    path, narrow_path = save_array(tmp_path / "1.npy", ROWS), save_array(tmp_path / "2.npy", ROWS[:, :2])
    with pytest.raises(InputError, match=r"2\.npy has 2 dimensions and .*1\.npy has 4"):
        inspect_vectors([path, narrow_path])
    write_parquet(tmp_path / "3.parquet", list(ROWS), pa.list_(pa.float64()))
    with pytest.raises(InputError, match="holds both"):
        inspect_vectors([tmp_path])
    with pytest.raises(UsageError, match="there are no vectors"):
        inspect_vectors([])


def test_decompression_bomb_is_refused(tmp_path: Path) -> None:
    zeros = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(1 << 26)), 1 << 14)
    pq.write_table(pa.table({"v": zeros}), tmp_path / "zeros.parquet", compression="zstd")
    assert (tmp_path / "zeros.parquet").stat().st_size < 200_000
    with pytest.raises(InputError, match=r"zeros\.parquet decodes to more than \d+ MiB, far more than its size"):
        inspect_vectors([tmp_path / "zeros.parquet"])


def test_each_row_group_is_checked_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_pages, "BASE_DECODED_BYTES", 1 << 20)
    zeros = pa.table({"v": pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(1 << 18)), 1 << 10)})
    with pq.ParquetWriter(tmp_path / "zeros.parquet", zeros.schema, compression="zstd") as writer:
        writer.write_table(zeros.slice(0, 2))
        writer.write_table(zeros)
    (source,) = inspect_vectors([tmp_path / "zeros.parquet"]).files
    assert [block.shape for block in source.blocks(8, 0, 2)] == [(2, 1 << 10)]
    with pytest.raises(InputError, match=r"zeros\.parquet decodes to more than \d+ MiB, far more than its size"):
        next(source.blocks(8, 1, 3))


def test_memory_does_not_grow_with_the_row_groups_of_a_file(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(1 << 22, dtype=np.float32)  # 16 MiB
    table = pa.table({"v": pa.FixedSizeListArray.from_arrays(pa.array(values), 256)})
    pq.write_table(table, tmp_path / "group.parquet", row_group_size=len(table), use_dictionary=False)
    del table, values
    bytes_before, peak = pa.total_allocated_bytes(), 0
    for _ in inspect_vectors([tmp_path / "group.parquet"]).files[0].blocks(64):
        peak = max(peak, pa.total_allocated_bytes() - bytes_before)
    assert 0 < peak < 8 << 20


def test_ids_are_texts_and_a_damaged_column_of_ids_is_named(tmp_path: Path) -> None:
    ids = [f"id{row}".encode() for row in range(50)]
    path = write_parquet(tmp_path / "v.parquet", list(ROWS), pa.list_(pa.float64()), id=pa.array(ids))
    (source,) = inspect_vectors([path]).files
    assert list(source.iter_ids(40, 42) or ()) == ["id40", "id41"]
    column = pq.read_metadata(path).row_group(0).column(1)
    data, start = bytearray(path.read_bytes()), column.dictionary_page_offset
    data[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"the column id of .*v\.parquet cannot be read \(.*\): write it again"):
        next(source.iter_ids(0, 1) or iter(()))
