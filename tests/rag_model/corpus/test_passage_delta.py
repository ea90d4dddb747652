"""A passage file, written again of an earlier one and the rows that are new."""

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
LAST = [
    Passage(f"{row}:0", str(row), row, f"Title {row}", "", f"text {row}", 0, 2, f"hash {row}", row if row % 3 else None)
    for row in range(ROWS)
]
EDITED = replace(LAST[7], text="edited", hash="hash of it")
REVISED = replace(LAST[900], rev_id=1)  # the text stayed
NOW = [*LAST[:7], EDITED, *LAST[8:900], REVISED, *LAST[903:], replace(LAST[0], id="new:0", page_id="new")]


def write(path: Path, rows: Sequence[Passage], *, dated: bool = True) -> Path:
    with PassageWriter(path, PASSAGE_SCHEMA if dated else UNDATED_SCHEMA) as writer:
        for row in rows:
            writer.write(row)
    return path


def rows_of(path: Path) -> list[Passage]:
    with PassageFile(path) as file:
        return list(file.iter_passages())


@pytest.mark.parametrize("dated", [True, False])
def test_the_file_is_the_same_to_the_byte_and_the_delta_has_its_new_rows_alone(dated: bool, tmp_path: Path) -> None:
    before, after = (write(tmp_path / name, rows, dated=dated) for name, rows in (("last", LAST), ("now", NOW)))
    write_delta(before, after, tmp_path / "delta")
    apply_delta(before, tmp_path / "delta", len(NOW), tmp_path / "made")
    assert (tmp_path / "made").read_bytes() == after.read_bytes()
    assert [passage.id for passage in rows_of(tmp_path / "delta")] == [EDITED.id, REVISED.id, "new:0"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=st.lists(st.integers(0, 9), max_size=9), after=st.lists(st.integers(0, 12), max_size=9))
def test_any_file_is_made_of_any_other(before: list[int], after: list[int], tmp_path: Path) -> None:
    """Rows may be in another order, or stand there twice."""
    earlier, later = (write(tmp_path / n, [LAST[row] for row in r]) for n, r in (("last", before), ("now", after)))
    write_delta(earlier, later, tmp_path / "delta")
    apply_delta(earlier, tmp_path / "delta", len(after), tmp_path / "made")
    assert (tmp_path / "made").read_bytes() == later.read_bytes()


def noted(path: Path, runs: object, rows: Sequence[Passage]) -> Path:
    """Write a delta that says what it likes."""
    write(path, rows)
    table = pq.read_table(path)
    with pq.ParquetWriter(path, table.schema, store_schema=False) as file:
        file.write_table(table)
        file.add_key_value_metadata({"runs": json.dumps(runs)})
    return path


@pytest.mark.parametrize(
    "runs",
    [
        [[0, 9], [-1, 1]],  # too few rows
        [[0, 9], [-1, 2]],  # more new rows than there are
        [[2495, 6], [-1, 1], [0, 3]],  # a row that the earlier file has not
        [[0, 10], [-1, 1], [0, 0]],
        [[0, 12], [-1, 1], [5, -3]],
        [[-2, 9], [-1, 1]],
        [*[[0, 1]] * 10, [-1, 1]],  # a row again and again: the longest may be
        [[5, 6], [-1, 1], [0, 4]],
        [[0, 5], [4, 5], [-1, 1]],
        [[0, True], [0, 8], [-1, 1]],
        [[0, 9.0], [-1, 1]],
        [[0], [-1, 1]],
        {"0": 9},
        None,
    ],
)
def test_a_delta_that_makes_no_sense_is_refused(runs: object, tmp_path: Path) -> None:
    before, delta = write(tmp_path / "last", LAST), noted(tmp_path / "delta", runs, [EDITED])
    with pytest.raises(InputError, match="not a delta"):
        apply_delta(before, delta, 11, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_delta_of_files_with_other_columns_is_refused(tmp_path: Path) -> None:
    before, after = write(tmp_path / "last", LAST[:9], dated=False), write(tmp_path / "now", LAST[:9])
    write_delta(before, after, tmp_path / "delta")
    assert len(rows_of(tmp_path / "delta")) == 9
    with pytest.raises(InputError, match="other columns"):
        apply_delta(before, tmp_path / "delta", 9, tmp_path / "made")
