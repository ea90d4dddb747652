from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.errors import InputError, UsageError
from rag_model.index.build import run_stages
from rag_model.index.files.vectors import (
    RemoteRowFiles,
    RemoteVectorFiles,
    VectorFiles,
    build_row_outline,
    sample_vectors,
)
from rag_model.index.recipe import IndexRecipe, resolve
from tests.fixtures.work_counters import count_pages_in_memory, drop_from_memory

Make = Callable[..., Any]  # fixtures of conftest.py


def remote_files(paths: list[Path], requests: list[tuple[int, int]] | None = None) -> RemoteRowFiles[Path]:
    """Return files of an object store, which may be read by ranges but not copied."""

    def read_range(path: Path, start: int, end: int) -> bytes:
        if requests is not None:
            requests.append((start, end))
        return path.read_bytes()[start:end]

    def fetch(path: Path) -> Path:
        raise AssertionError(f"{path} is copied")

    return RemoteRowFiles(paths, fetch, read_range, lambda path: path.open("rb"))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_vector_files_are_one_matrix(data: st.DataObject, write_parts: Make) -> None:
    n = data.draw(st.integers(1, 50))
    matrix = np.arange(n * 3, dtype=data.draw(st.sampled_from([np.float16, np.float32]))).reshape(n, 3)
    paths = write_parts(matrix, sorted(data.draw(st.lists(st.integers(0, n), max_size=4))))
    files = VectorFiles(paths)
    assert (files.n, files.dim) == (n, 3)
    np.testing.assert_array_equal(files.read_all(), matrix)
    rows = np.unique(np.array(data.draw(st.lists(st.integers(0, n - 1))), dtype=np.int64))
    np.testing.assert_array_equal(files.read_rows(rows), matrix[rows])
    np.testing.assert_array_equal(RemoteVectorFiles(remote_files(paths)).read_rows(rows), matrix[rows])
    blocks = list(files.blocks(data.draw(st.integers(1, 60))))
    np.testing.assert_array_equal(np.vstack([block for _, block in blocks]), matrix)
    assert all(np.array_equal(block, matrix[first : first + len(block)]) for first, block in blocks)


def test_scattered_rows_are_read_without_the_pages_around_them(write_parts: Make) -> None:
    matrix = np.random.default_rng(0).standard_normal((12_000, 256)).astype(np.float16)  # two parts of 3 MB
    paths, rows = write_parts(matrix, [6_000]), np.array([*range(0, 12_000, 400), 11_997, 11_999])
    for path in paths:
        drop_from_memory(path)
    files = VectorFiles(paths)
    header_pages = sum(map(count_pages_in_memory, paths))
    np.testing.assert_array_equal(files.read_rows(rows), matrix[rows])
    assert sum(map(count_pages_in_memory, paths)) <= header_pages + 2 * len(rows)


def test_sample_is_seeded_and_without_repetition(write_parts: Make) -> None:
    paths = write_parts(np.arange(1000, dtype=np.float32)[:, None], [400])
    sample = sample_vectors(paths, 1000, 1, 100, 1)
    assert len(set(sample.ravel().tolist())) == 100
    assert np.all(np.diff(sample[:, 0]) > 0)
    np.testing.assert_array_equal(sample_vectors(paths, 1000, 1, 100, 1), sample)
    np.testing.assert_array_equal(sample_vectors(remote_files(paths), 1000, 1, 100, 1), sample)
    assert not np.array_equal(sample_vectors(paths, 1000, 1, 100, 2), sample)
    assert len(sample_vectors(paths, 1000, 1, 5000, 1)) == 1000


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_headers_are_read_unless_the_outline_states_them(write_parts: Make, dtype: type[np.floating[Any]]) -> None:
    matrix = np.random.default_rng(4).standard_normal((1000, 8)).astype(dtype)
    paths, rows = write_parts(matrix, [300]), np.array([0, 7, 999])
    shapes = [(length, path.stat().st_size) for length, path in zip([300, 700], paths, strict=True)]
    first, second = (build_row_outline(path) for path in paths)
    for outlines, n_headers in (((first, second), 0), ((), 2), ([None, second], 1), ([{"rows": 3}, second], 1)):
        requests = list[int]()

        def read_ranges(ranges: Sequence[tuple[Path, Any, int]], starts: list[int] = requests) -> list[Any]:
            starts += [start for _, file_starts, _ in ranges for start in file_starts.tolist()]
            return [
                np.fromfile(path, np.uint8)[file_starts[:, None] + np.arange(length)]
                for path, file_starts, length in ranges
            ]

        remote = replace(remote_files(paths), read_ranges=read_ranges, sizes=shapes, outlines=outlines)
        files = RemoteVectorFiles(remote, 8)
        np.testing.assert_array_equal(files.read_rows(rows), matrix[rows])
        assert requests.count(0) == n_headers
        files.read_rows(rows)
        assert requests.count(0) == n_headers, "a header is read once"


def test_rows_near_each_other_are_read_by_one_request(write_parts: Make) -> None:
    matrix = np.random.default_rng(3).standard_normal((4000, 512), np.float32)  # rows of 2 KB
    paths, requests = write_parts(matrix), list[tuple[int, int]]()
    files = RemoteVectorFiles(remote_files(paths, requests))
    requests.clear()
    rows = np.array([0, 1, 30, 62, 200, 3990, 3999])
    np.testing.assert_array_equal(files.read_rows(rows), matrix[rows])
    assert [(end - start) // 2048 for start, end in requests] == [63, 1, 10]
    requests.clear()
    np.testing.assert_array_equal(files.read_rows(np.arange(4000)), matrix)
    assert max(end - start for start, end in requests) <= 4 << 20


@pytest.mark.parametrize("factory", ["HNSW8", "IVF8,Flat", "Flat"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_error_names_a_row_that_is_not_finite(
    value: float, factory: str, make_vectors: Make, write_parts: Make, build_index: Make
) -> None:
    vectors = make_vectors(1200)
    vectors[905, 3] = value
    parts = write_parts(vectors, [800])
    with pytest.raises(InputError, match=r"row 105 of .*part-00001\.npy holds a NaN or an infinity"):
        build_index(parts, IndexRecipe(factory))


def test_invalid_vector_files_are_refused(tmp_path: Path, write_parts: Make) -> None:
    with pytest.raises(UsageError, match="at least one"):
        VectorFiles([])
    with pytest.raises(InputError, match="encode its part first"):
        VectorFiles([tmp_path / "missing.npy"])
    part = write_parts(np.ones((10, 4), np.float32))[0]
    for name, array in {"ints": np.ones((3, 4), int), "flat": np.ones(4, np.float32)}.items():
        np.save(tmp_path / name, array)
        with pytest.raises(InputError, match="float16 or float32"):
            VectorFiles([tmp_path / f"{name}.npy"])
    np.save(tmp_path / "wide", np.ones((3, 5), np.float32))
    with pytest.raises(InputError, match="has 5 dimensions and"):
        VectorFiles([part, tmp_path / "wide.npy"])
    np.save(tmp_path / "objects", np.array([{}, {}]), allow_pickle=True)
    with pytest.raises(InputError, match=r"not a complete \.npy file"):
        VectorFiles([tmp_path / "objects.npy"])
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"not a complete \.npy file"):
        VectorFiles([part])


def test_plan_of_other_vectors_is_refused(make_vectors: Make, write_parts: Make, tmp_path: Path) -> None:
    parts = write_parts(make_vectors(600))
    for factory in ("HNSW8", "IVF8,Flat"):
        with pytest.raises(InputError, match="600 x 32, not the plan's 500 x 32"):
            run_stages(resolve(IndexRecipe(factory), 500, 32), parts, tmp_path / "out", tmp_path)
    with pytest.raises(InputError, match="600 x 32, not the plan's 500 x 32"):
        sample_vectors(remote_files(parts), 500, 32, 10, 1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-2], "not a complete .npy file"),
        (lambda data: b"not an array", "not a complete .npy file"),
        (lambda data: data[:-4] + np.float32(np.nan).tobytes(), r"row 9 of .*part-00001.npy holds a NaN"),
    ],
)
def test_a_damaged_remote_file_is_refused(write_parts: Make, damage: Callable[[bytes], bytes], message: str) -> None:
    paths = write_parts(np.ones((20, 4), np.float32), [10])
    paths[1].write_bytes(damage(paths[1].read_bytes()))
    with pytest.raises(InputError, match=message):
        RemoteVectorFiles(remote_files(paths)).read_rows(np.array([3, 19]))
