"""Rows of any length, end to end: where their values lie, and what passages joined and taken come to."""

from pathlib import Path

import numpy as np
import pytest

from rag_model.corpus.ragged_file import Ragged, column_of, offsets_of, spread
from rag_model.corpus.sparse_file import SparseVectors
from rag_model.corpus.token_file import TokenFile, TokenVectors, TokenWriter
from rag_model.errors import InputError

LENGTHS = np.array([2, 0, 3, 1])


def rows_of(kind: type[Ragged]) -> Ragged:
    values = np.arange(1, 7)
    columns = [values.astype(np.float16)[:, None]] if kind is TokenVectors else [values.astype(np.int32)] * 2
    return kind(*columns, offsets_of(LENGTHS))


def test_values_lie_where_the_offsets_say() -> None:
    assert offsets_of(LENGTHS).tolist() == [0, 2, 2, 5, 6]
    assert spread(np.array([7, 3]), np.array([2, 3])).tolist() == [7, 8, 3, 4, 5]


@pytest.mark.parametrize("kind", [TokenVectors, SparseVectors])
def test_passages_are_taken_in_any_order_and_joined(kind: type[Ragged]) -> None:
    rows = rows_of(kind)
    joined = kind.joined([rows.take(np.array([3, 1])), rows.take(np.array([0]))])
    assert (len(joined), joined.offsets.tolist()) == (3, [0, 1, 1, 3])
    assert all(column.reshape(-1).tolist() == [6, 1, 2] for column in joined.columns())
    assert [column.dtype for column in joined.columns()] == [column.dtype for column in rows.columns()]
    assert (len(kind.joined([])), len(kind.none())) == (0, 0)


def test_no_passages_of_a_file_have_its_components(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "part", 8, "float16"):
        pass
    assert TokenFile(tmp_path / "part").take(np.empty(0, np.int64)).vectors.shape == (0, 8)


def test_an_arrow_file_is_told_from_others_by_its_first_bytes(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "part", 8, "float16"):
        pass
    (tmp_path / "other").write_bytes(b"no arrow")
    (tmp_path / "cut").write_bytes((tmp_path / "part").read_bytes()[:-30])
    assert (column_of(tmp_path / "part"), column_of(tmp_path / "other")) == ("tokens", "")
    with pytest.raises(InputError, match="cut is damaged: encode its part again"):
        column_of(tmp_path / "cut")
