"""Deltas of passage files: the new rows, and the positions of the unchanged rows in a base file.

Nearly every row group contains a change of the last month, and row groups are compressed as a
whole, so a pull without deltas would fetch nearly the whole file for a few new rows. A client that
has the base file writes the target file itself from the delta. The same Parquet library writes
equal rows as equal bytes, and the digest verifies the result.

A delta is a Parquet file of the new rows, in row order. The metadata of the delta describes the
rows of the target file as runs, `[[first, count], …]`: a run is `count` consecutive rows of the
base file from `first`, or the next `count` new rows if `first` is -1; base rows are in ascending
order. A second list of runs maps rows to base rows with the same text, because most passages of a
new revision of an article keep their text and vector although their rows differ. A delta contains
only rows of the target file.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rag_model.arrays import Rows, find_runs, mask_unordered
from rag_model.atomic_write import atomic_write
from rag_model.corpus.passages import ROW_GROUP, PassageFile, open_passage_writer
from rag_model.errors import InputError
from rag_model.untrusted_text import parse_json

# Increase it when the format changes; builders and clients look deltas up by this number.
VERSION = 1
_RUNS_KEY, _TEXT_RUNS_KEY = "runs", "text_runs"
_NEW_ROW = -1
_TEXTS = ("title", "text")  # the columns that a passage's hash covers
Run = tuple[int, int]  # first row in the base file, or -1; number of rows


def write_delta(base: Path, target: Path, out: Path) -> bool:
    """Write the delta from the passage file `base` to the passage file `target`.

    Only the texts of new rows are read, because the hash of a passage covers its title and text.
    The other columns of both files are in memory.

    Returns:
        Whether the delta can be used: False if this Parquet library writes the rows of `target` as
        different bytes.

    Raises:
        InputError: One of the two files is damaged.
        OSError: `out` cannot be written.
    """
    with PassageFile(base) as base_file, PassageFile(target) as target_file:
        schema, rows = target_file.schema, _read_rows(target_file, _select_fields(target_file, with_texts=False))
        base_row_of, text_row_of = np.full((2, target_file.n_rows), _NEW_ROW, np.int64)
        if base_file.schema == target_file.schema and base_file.n_rows:
            base_row_of, text_row_of = _match_rows(_read_rows(base_file, rows.schema), rows)
        new_rows = np.flatnonzero(base_row_of < 0)
        texts = pa.Table.from_batches(
            target_file.iter_selected(new_rows.tolist(), _TEXTS), _select_fields(target_file, with_texts=True)
        )
        column_tables = rows.take(pa.array(new_rows)), texts
        columns = {name: table[name] for table in column_tables for name in table.column_names}
        row_maps = {_RUNS_KEY: base_row_of, _TEXT_RUNS_KEY: text_row_of}
        new_table = pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)
        _write_rows(new_table, out, {key: json.dumps(_list_runs(row_map)) for key, row_map in row_maps.items()})
        with PassageFile(out) as delta:
            return delta.created_by == target_file.created_by


def apply_delta(base: Path, delta: Path, n_rows: int, out: Path) -> None:
    """Apply a delta to `base`: write the target file, which has `n_rows` rows.

    All rows are in memory.

    Raises:
        InputError: A file is damaged, or the delta belongs to another base file.
        OSError: `out` cannot be written.
    """
    with PassageFile(delta) as file:
        runs_json = file.metadata.get(_RUNS_KEY.encode(), b"")
    base_rows, new_rows = _read_passages(base), _read_passages(delta)
    if base_rows.schema != new_rows.schema:
        raise InputError(f"{delta} has other columns than {base}: fetch the whole file")
    runs = _parse_runs(runs_json, base_rows.num_rows, n_rows, new_rows.num_rows)
    if runs is None:
        raise InputError(f"{delta} is not a delta of {base}: fetch the whole file")
    _write_rows(pa.concat_tables([new_rows.slice(0, 0), *_iter_run_tables(runs, base_rows, new_rows)]), out, {})


def compute_base_rows(delta: PassageFile, n_base_rows: int, n_rows: int, *, by_text: bool = False) -> Rows:
    """Return the base row of each target row, (n_rows,) int64; -1 for new rows.

    New rows are the rows of the delta, in order; base rows are ascending. If `by_text` is set, a
    new row is also mapped to a base row that has its text.

    Raises:
        InputError: The delta is damaged or belongs to other files.
    """
    runs_json = delta.metadata.get(_RUNS_KEY.encode(), b"")
    text_runs_json = delta.metadata.get(_TEXT_RUNS_KEY.encode()) if by_text else None
    runs = (
        _parse_runs(runs_json, n_base_rows, n_rows, delta.n_rows)
        if text_runs_json is None
        else _parse_runs(text_runs_json, n_base_rows, n_rows)
    )
    if runs is None:
        raise InputError(f"the delta does not lead from {n_base_rows} passages to {n_rows}: read the whole file")
    first_rows, run_lengths = np.array(runs, np.int64).reshape(-1, 2).T
    run_starts = np.cumsum(run_lengths) - run_lengths
    # New rows start from -2 * n_rows, so that they stay negative when the row number is added.
    base_row_of: Rows = np.arange(n_rows) + np.repeat(
        np.where(first_rows == _NEW_ROW, -2 * n_rows, first_rows - run_starts), run_lengths
    )
    base_row_of[base_row_of < 0] = _NEW_ROW
    return base_row_of


def _read_passages(passages: Path) -> pa.Table:
    with PassageFile(passages) as file:
        return _read_rows(file, file.schema)


def _read_rows(file: PassageFile, schema: pa.Schema) -> pa.Table:
    try:
        return pa.Table.from_batches(file.iter_batches(schema.names), schema)
    except pa.ArrowInvalid as error:
        raise InputError(f"{file.name} has columns of other types than passages: fetch the whole file") from error


def _select_fields(file: PassageFile, *, with_texts: bool) -> pa.Schema:
    return pa.schema([field for field in file.schema if (field.name in _TEXTS) == with_texts])


def _write_rows(table: pa.Table, out: Path, metadata: dict[str, str]) -> None:
    """Write rows in the same row groups as `PassageWriter`."""
    with atomic_write(out) as temporary, open_passage_writer(temporary, table.schema) as file:
        for first_row in range(0, table.num_rows, ROW_GROUP):
            file.write_table(table.slice(first_row, ROW_GROUP).combine_chunks(), row_group_size=ROW_GROUP)
        if metadata:
            file.add_key_value_metadata(metadata)


def _match_rows(base_rows: pa.Table, target_rows: pa.Table) -> tuple[Rows, Rows]:
    """Return (n,) base rows that equal the target rows, and (n,) base rows with the same text.

    The base rows are in ascending order; -1 means that a target row has no match.
    """
    candidate_rows = (
        pc.index_in(target_rows["id"], value_set=base_rows["id"]).fill_null(_NEW_ROW).to_numpy().astype(np.int64)
    )
    is_candidate = candidate_rows >= 0
    row_pairs = [
        rows.take(pa.array(positions))
        for rows, positions in ((base_rows, candidate_rows[is_candidate]), (target_rows, np.flatnonzero(is_candidate)))
    ]
    is_equal, has_equal_text = np.zeros((2, len(candidate_rows)), np.bool_)
    is_equal[is_candidate] = _compare_rows(*row_pairs)
    has_equal_text[is_candidate] = _compare_rows(*(rows.select(["hash"]) for rows in row_pairs))
    base_row_of, text_row_of = (
        mask_unordered(np.where(is_usable, candidate_rows, _NEW_ROW)) for is_usable in (is_equal, has_equal_text)
    )
    return base_row_of, text_row_of


def _compare_rows(left_rows: pa.Table, right_rows: pa.Table) -> Any:
    """Return for each row whether two tables of equal length agree in all columns: (m,) bool."""
    is_equal = np.ones(left_rows.num_rows, np.bool_)
    for left_column, right_column in zip(left_rows.columns, right_rows.columns, strict=True):
        both_null = pc.and_(pc.is_null(left_column), pc.is_null(right_column))
        is_equal &= pc.or_(pc.equal(left_column, right_column).fill_null(False), both_null).to_numpy()
    return is_equal


def _list_runs(base_row_of: Rows) -> list[Run]:
    """Return the runs of (n,) base rows, where -1 is a new row."""
    run_starts, run_lengths = find_runs(base_row_of)
    return list(zip(base_row_of[run_starts].tolist(), run_lengths.tolist(), strict=True))


def _parse_runs(runs_json: bytes, n_base_rows: int, n_rows: int, n_new_rows: int | None = None) -> Sequence[Run] | None:
    """Parse and check the runs of a delta; None if they are invalid or do not fit the files."""
    try:
        runs = [(row, n) for row, n in parse_json(runs_json)]
        if not all(type(row_or_count) is int for run in runs for row_or_count in run):
            return None
    except (ValueError, TypeError):
        return None
    reused_ranges = [(row, row + n) for row, n in runs if row != _NEW_ROW]
    is_ascending = all(
        first_range[1] <= second_range[0]
        for first_range, second_range in pairwise([(0, 0), *reused_ranges, (n_base_rows, n_base_rows)])
    )
    # Each base row is used at most once.
    is_disjoint = is_ascending and all(first_row < end_row for first_row, end_row in reused_ranges)
    new_counts = [n for row, n in runs if row == _NEW_ROW]
    has_all_rows = sum(n for _, n in runs) == n_rows and n_new_rows in (None, sum(new_counts))
    return runs if is_disjoint and has_all_rows and min(new_counts, default=1) > 0 else None


def _iter_run_tables(runs: Iterable[Run], base_rows: pa.Table, new_rows: pa.Table) -> Iterator[pa.Table]:
    n_new_used = 0
    for first_row, n_run_rows in runs:
        if first_row == _NEW_ROW:
            yield new_rows.slice(n_new_used, n_run_rows)
            n_new_used += n_run_rows
        else:
            yield base_rows.slice(first_row, n_run_rows)
