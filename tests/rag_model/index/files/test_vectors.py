from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.errors import InputError, UsageError
from rag_model.index.build import run_stages
from rag_model.index.files.vectors import RemoteVectorFiles, VectorFiles
from rag_model.index.recipe import IndexRecipe, resolve

Make = Callable[..., Any]  # fixtures of conftest.py


def read_range(name: str, start: int, end: int) -> bytes:
    """Read a range of a file, as from an object store."""
    return Path(name).read_bytes()[start:end]


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
    lengths = [len(np.load(path, allow_pickle=False)) for path in paths]
    remote_files = RemoteVectorFiles([str(path) for path in paths], lengths, 3, read_range)
    np.testing.assert_array_equal(remote_files.read_rows(rows), matrix[rows])
    blocks = list(files.blocks(data.draw(st.integers(1, 60))))
    np.testing.assert_array_equal(np.vstack([block for _, block in blocks]), matrix)
    assert all(np.array_equal(block, matrix[first : first + len(block)]) for first, block in blocks)


def test_sample_is_seeded_and_without_repetition(write_parts: Make) -> None:
    files = VectorFiles(write_parts(np.arange(1000, dtype=np.float32)[:, None], [400]))
    sample = files.sample(100, seed=1)[:, 0]
    assert len(set(sample.tolist())) == 100
    assert np.all(np.diff(sample) > 0)
    np.testing.assert_array_equal(files.sample(100, seed=1)[:, 0], sample)
    assert not np.array_equal(files.sample(100, seed=2)[:, 0], sample)
    assert len(files.sample(5000, seed=1)) == 1000


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
    good = write_parts(np.ones((10, 4), np.float32))[0]
    for name, array in {"ints": np.ones((3, 4), int), "flat": np.ones(4, np.float32)}.items():
        np.save(tmp_path / name, array)
        with pytest.raises(InputError, match="float16 or float32"):
            VectorFiles([tmp_path / f"{name}.npy"])
    np.save(tmp_path / "wide", np.ones((3, 5), np.float32))
    with pytest.raises(InputError, match="has 5 dimensions and"):
        VectorFiles([good, tmp_path / "wide.npy"])
    np.save(tmp_path / "objects", np.array([{}, {}]), allow_pickle=True)
    with pytest.raises(InputError, match=r"not a complete \.npy file"):
        VectorFiles([tmp_path / "objects.npy"])
    good.write_bytes(good.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"not a complete \.npy file"):
        VectorFiles([good])


def test_plan_of_other_vectors_is_refused(make_vectors: Make, write_parts: Make, tmp_path: Path) -> None:
    parts = write_parts(make_vectors(600))
    for factory in ("HNSW8", "IVF8,Flat"):
        with pytest.raises(InputError, match="600 x 32, not the plan's 500 x 32"):
            run_stages(resolve(IndexRecipe(factory), 500, 32), parts, tmp_path / "out", tmp_path)


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
    files = RemoteVectorFiles([str(path) for path in paths], [10, 10], 4, read_range)
    assert files.read_rows(np.array([3])).tolist() == [[1, 1, 1, 1]]
    with pytest.raises(InputError, match=message):
        files.read_rows(np.array([3, 19]))
