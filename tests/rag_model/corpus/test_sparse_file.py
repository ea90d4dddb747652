"""Weighted terms in a file: read back row by row, and refused where they are damaged."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.corpus import ragged_file
from rag_model.corpus.ragged_file import offsets_of
from rag_model.corpus.sparse_file import SparseFile, SparseVectors, SparseWriter
from rag_model.corpus.token_file import TokenWriter
from rag_model.errors import InputError
from tests.fixtures.impacts import zipfian

DIM = 40


def written(rows: SparseVectors, path: Path) -> Path:
    with SparseWriter(path, DIM, 64) as writer:
        writer.write(rows)
    return path


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 60), st.integers(0, 4), st.lists(st.integers(0, 59), max_size=9), st.integers(1, 20))
def test_rows_are_read_back(tmp_path: Path, count: int, seed: int, wanted: list[int], batch: int) -> None:
    rows = zipfian(count, DIM, 12, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged_file, "ROWS", batch)
        file = SparseFile(written(rows, tmp_path / f"{count}-{seed}-{batch}"))
    assert (file.n, file.dim, file.scale, file.postings) == (count, DIM, 64, len(rows.terms))
    places = np.array(sorted({row for row in wanted if row < count}), np.int64)
    for found, own in ((SparseVectors.joined(list(file.blocks())), rows), (file.take(places), rows.take(places))):
        assert (found.offsets == own.offsets).all()
        assert (found.terms == own.terms).all()
        assert (found.weights == own.weights).all()


def made(terms: list[int], weights: list[int], lengths: list[int]) -> SparseVectors:
    return SparseVectors(np.array(terms, np.int32), np.array(weights, np.uint8), offsets_of(np.array(lengths)))


@pytest.mark.parametrize(
    "rows",
    [
        made([3, 2], [1, 1], [2]),
        made([2, 2], [1, 1], [2]),
        made([2, DIM], [1, 1], [2]),
        made([-1, 2], [1, 1], [2]),
        made([1, 2], [0, 1], [2]),
        made([5, 1, 1], [1, 1, 1], [0, 1, 2]),
    ],
)
def test_terms_out_of_order_or_range_are_refused(rows: SparseVectors, tmp_path: Path) -> None:
    path = written(rows, tmp_path / "part")
    with pytest.raises(InputError, match="is no complete file of weighted terms: encode its part again"):
        SparseFile(path)


def test_rows_may_begin_anew_after_one_that_is_empty(tmp_path: Path) -> None:
    rows = made([5, 6, 1, 9], [1, 2, 3, 4], [0, 2, 0, 0, 1, 1, 0])
    assert SparseFile(written(rows, tmp_path / "part")).postings == 4


def test_other_files_are_refused(tmp_path: Path) -> None:
    whole = written(zipfian(50, DIM, 12), tmp_path / "part")
    (tmp_path / "cut").write_bytes(whole.read_bytes()[:-40])
    with TokenWriter(tmp_path / "tokens", 4, "float16"):
        pass
    for name in ("cut", "tokens", "missing"):
        with pytest.raises(InputError, match=f"{name} is no complete file of weighted terms"):
            SparseFile(tmp_path / name)
