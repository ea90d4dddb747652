"""A delta rebuilds a passage file from an earlier file and the new rows."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.corpus.passage_delta import apply_delta, write_delta
from rag_model.corpus.passages import PASSAGE_SCHEMA, UNDATED_SCHEMA, PassageFile, PassageWriter
from rag_model.corpus.records import Passage
from rag_model.errors import InputError

ROWS = 2500  # three row groups
BASE = [
    Passage(f"{row}:0", str(row), row, f"Title {row}", "", f"text {row}", 0, 2, f"hash {row}", row if row % 3 else None)
    for row in range(ROWS)
]
EDITED = replace(BASE[7], text="edited", hash="other hash")
REVISED = replace(BASE[900], rev_id=1)  # only the revision changed
TARGET = [*BASE[:7], EDITED, *BASE[8:900], REVISED, *BASE[903:], replace(BASE[0], id="new:0", page_id="new")]


def write_rows(path: Path, rows: Sequence[Passage], *, dated: bool = True) -> Path:
    with PassageWriter(path, PASSAGE_SCHEMA if dated else UNDATED_SCHEMA) as writer:
        for row in rows:
            writer.write(row)
    return path


def read_rows(path: Path) -> list[Passage]:
    with PassageFile(path) as file:
        return list(file.iter_passages())


@pytest.mark.parametrize("dated", [True, False])
def test_delta_has_only_new_rows_and_gives_an_equal_file(dated: bool, tmp_path: Path) -> None:
    base = write_rows(tmp_path / "base", BASE, dated=dated)
    target = write_rows(tmp_path / "target", TARGET, dated=dated)
    write_delta(base, target, tmp_path / "delta")
    apply_delta(base, tmp_path / "delta", len(TARGET), tmp_path / "rebuilt")
    assert (tmp_path / "rebuilt").read_bytes() == target.read_bytes()
    assert [passage.id for passage in read_rows(tmp_path / "delta")] == [EDITED.id, REVISED.id, "new:0"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(base_rows=st.lists(st.integers(0, 9), max_size=9), target_rows=st.lists(st.integers(0, 12), max_size=9))
def test_delta_rebuilds_any_file_from_any_other(base_rows: list[int], target_rows: list[int], tmp_path: Path) -> None:
    """Rows may be in another order or be repeated."""
    base = write_rows(tmp_path / "base", [BASE[row] for row in base_rows])
    target = write_rows(tmp_path / "target", [BASE[row] for row in target_rows])
    write_delta(base, target, tmp_path / "delta")
    apply_delta(base, tmp_path / "delta", len(target_rows), tmp_path / "rebuilt")
    assert (tmp_path / "rebuilt").read_bytes() == target.read_bytes()


def write_custom_delta(path: Path, runs: object, rows: Sequence[Passage]) -> Path:
    """Write a delta with the given runs."""
    write_rows(path, rows)
    table = pq.read_table(path)
    with pq.ParquetWriter(path, table.schema, store_schema=False) as file:
        file.write_table(table)
        file.add_key_value_metadata({"runs": json.dumps(runs)})
    return path


@pytest.mark.parametrize(
    "runs",
    [
        [[0, 9], [-1, 1]],  # too few rows
        [[0, 9], [-1, 2]],  # more new rows than the delta has
        [[2495, 6], [-1, 1], [0, 3]],  # a row beyond the end of the base file
        [[0, 10], [-1, 1], [0, 0]],
        [[0, 12], [-1, 1], [5, -3]],
        [[-2, 9], [-1, 1]],
        [*[[0, 1]] * 10, [-1, 1]],  # one row repeated, which could be very long
        [[5, 6], [-1, 1], [0, 4]],
        [[0, 5], [4, 5], [-1, 1]],
        [[0, True], [0, 8], [-1, 1]],
        [[0, 9.0], [-1, 1]],
        [[0], [-1, 1]],
        {"0": 9},
        None,
    ],
)
def test_invalid_delta_is_refused(runs: object, tmp_path: Path) -> None:
    base, delta = write_rows(tmp_path / "base", BASE), write_custom_delta(tmp_path / "delta", runs, [EDITED])
    with pytest.raises(InputError, match="not a delta"):
        apply_delta(base, delta, 11, tmp_path / "rebuilt")
    assert not (tmp_path / "rebuilt").exists()


def test_delta_of_files_with_other_columns_is_refused(tmp_path: Path) -> None:
    base, target = write_rows(tmp_path / "base", BASE[:9], dated=False), write_rows(tmp_path / "target", BASE[:9])
    write_delta(base, target, tmp_path / "delta")
    assert len(read_rows(tmp_path / "delta")) == 9
    with pytest.raises(InputError, match="other columns"):
        apply_delta(base, tmp_path / "delta", 9, tmp_path / "rebuilt")
