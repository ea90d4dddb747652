"""Deltas of passage files: the rows that an earlier file has not, and where the other ones stand in it.

A month changes a row in nearly every row group, and a row group is compressed as a whole: so nearly all of a file
would be fetched for a few new rows. Who has the earlier file writes the later one again with these few. Equal rows,
written by the same Parquet library, give equal bytes; the digest of the result tells.

A delta is a Parquet file of the new rows, in row order. Its metadata notes the whole file's rows in runs,
`[[first, count], …]`: rows of the earlier file, ascending, or the next new ones where `first` is -1. It holds
nothing of the earlier file that the later one has not.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rag_model.corpus.passages import PASSAGE_SCHEMA, ROW_GROUP, UNDATED_SCHEMA, PassageFile, passage_parquet
from rag_model.errors import InputError
from rag_model.json_text import parse_json
from rag_model.landing import landing
from rag_model.partition import Rows

VERSION = 1  # raise it with any change of what a delta holds: puller and builder find it by this number
_RUNS = "runs"
_NEW = -1
Run = tuple[int, int]  # the first row in the earlier file, or -1; number of rows


def write_delta(before: Path, after: Path, out: Path) -> None:
    """Write what makes the passage file `after` of the passage file `before`; holds the rows of both.

    Raises:
        InputError: one of the two is damaged.
        OSError: `out` cannot be written.
    """
    earlier, later = _read(before), _read(after)
    kept = _kept(earlier, later)
    _write(later.filter(pa.array(kept < 0)), out, {_RUNS: json.dumps(list(_runs(kept)))})


def apply_delta(before: Path, delta: Path, rows: int, out: Path) -> None:
    """Write the passage file of `rows` rows that a delta makes of `before`; holds its rows.

    Raises:
        InputError: a file is damaged, or the delta belongs to another one.
        OSError: `out` cannot be written.
    """
    with PassageFile(delta) as file:
        noted = file.notes.get(_RUNS.encode(), b"")
    earlier, new = _read(before), _read(delta)
    if earlier.schema != new.schema:
        raise InputError(f"{delta} has other columns than {before}: fetch the whole file")
    runs = _checked(noted, earlier.num_rows, new.num_rows, rows)
    if runs is None:
        raise InputError(f"{delta} is not a delta of {before}: fetch the whole file")
    _write(pa.concat_tables([new.slice(0, 0), *_pieces(runs, earlier, new)]), out, {})


def kept_rows(delta: PassageFile, before: int, rows: int) -> Rows:
    """Return the earlier row of each of the `rows` rows that a delta makes of `before`, (rows,); -1: it is new.

    The new ones are the delta's rows, in order; the others rise.

    Raises:
        InputError: the delta is damaged, or of other files.
    """
    runs = _checked(delta.notes.get(_RUNS.encode(), b""), before, delta.n_rows, rows)
    if runs is None:
        raise InputError(f"a delta is not one of {before} passages to {rows}: read the whole file")
    firsts, counts = np.array(runs, np.int64).reshape(-1, 2).T
    begins = np.cumsum(counts) - counts
    found: Rows = np.arange(rows) + np.repeat(np.where(firsts == _NEW, -2 * rows, firsts - begins), counts)
    found[found < 0] = _NEW
    return found


def _read(passages: Path) -> pa.Table:
    with PassageFile(passages) as file:
        schema = PASSAGE_SCHEMA if file.dated else UNDATED_SCHEMA
        try:
            return pa.Table.from_batches(file.iter_batches(schema.names), schema)
        except pa.ArrowInvalid as other:
            raise InputError(f"{passages} has columns of other types than passages: fetch the whole file") from other


def _write(rows: pa.Table, out: Path, notes: dict[str, str]) -> None:
    """Write rows in groups as `PassageWriter` does, which gets them one by one."""
    with landing(out) as temporary, passage_parquet(temporary, rows.schema) as file:
        for first in range(0, rows.num_rows, ROW_GROUP):
            file.write_table(rows.slice(first, ROW_GROUP).combine_chunks(), row_group_size=ROW_GROUP)
        if notes:
            file.add_key_value_metadata(notes)


def _kept(earlier: pa.Table, later: pa.Table) -> Rows:
    """Return the earlier row that each later one equals in all columns, (n,), rising where not -1: there is none."""
    kept = np.full(later.num_rows, _NEW, np.int64)
    if earlier.schema != later.schema or not earlier.num_rows:
        return kept
    found = pc.index_in(later["id"], value_set=earlier["id"]).fill_null(_NEW).to_numpy().astype(np.int64)
    places = np.flatnonzero(found >= 0)
    same = _equal(earlier.take(pa.array(found[places])), later.take(pa.array(places)))
    places = places[same]
    highest = np.maximum.accumulate(found[places]) if len(places) else found[places]
    places = places[(found[places] == highest) & np.diff(highest, prepend=-1).astype(bool)]  # each once, in order
    kept[places] = found[places]
    return kept


def _equal(one: pa.Table, other: pa.Table) -> Any:
    """Return whether two tables of equal length agree in all columns, row by row: (m,) bool."""
    agree = np.ones(one.num_rows, np.bool_)
    for left, right in zip(one.columns, other.columns, strict=True):
        both_null = pc.and_(pc.is_null(left), pc.is_null(right))
        agree &= pc.or_(pc.equal(left, right).fill_null(False), both_null).to_numpy()
    return agree


def _runs(kept: Rows) -> Iterator[Run]:
    """Yield the runs of (n,) earlier rows, -1 for new ones."""
    new = kept < 0
    breaks = np.where(new[1:], ~new[:-1], new[:-1] | (np.diff(kept) != 1))  # (n,) -> (n - 1,)
    for first, end in pairwise([0, *(np.flatnonzero(breaks) + 1).tolist(), len(kept)]):
        if end > first:
            yield int(kept[first]), end - first


def _checked(noted: bytes, earlier: int, new: int, rows: int) -> Sequence[Run] | None:
    """Return the noted runs; None if they are none, or name other rows than there are."""
    try:
        runs = [(first, count) for first, count in parse_json(noted)]
        if not all(type(number) is int for run in runs for number in run):
            return None
    except (ValueError, TypeError):
        return None
    kept = [(first, first + count) for first, count in runs if first != _NEW]
    rising = all(left[1] <= right[0] for left, right in pairwise([(0, 0), *kept, (earlier, earlier)]))
    inside = rising and all(first < end for first, end in kept)  # each row once at most: as large as the earlier file
    fresh = [count for first, count in runs if first == _NEW]
    whole = sum(count for _, count in runs) == rows and sum(fresh) == new
    return runs if inside and whole and min(fresh, default=1) > 0 else None


def _pieces(runs: Iterable[Run], earlier: pa.Table, new: pa.Table) -> Iterator[pa.Table]:
    taken = 0
    for first, count in runs:
        if first == _NEW:
            yield new.slice(taken, count)
            taken += count
        else:
            yield earlier.slice(first, count)
