"""Compare the articles and passages of two snapshots: joined by passage id and hash, never by row.

Only the ids, titles and hashes of passages are read, and only from parts whose file differs between the snapshots.
Parts with the same page range are compared in memory, pair by pair. Where ranges differ (the dump was split otherwise,
or its last part grew) the passages of an article may be in any of the remaining parts: they are distributed by page
into buckets on disk, some parts at once, and the buckets are compared in memory. So memory is bounded by a few
parts or one bucket.
"""

import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rag_model.corpus.passages import PASSAGE_SCHEMA
from rag_model.errors import StoreError
from rag_model.store.objects.ranges import read_ahead
from rag_model.store.versions.manifest import PartEntry
from rag_model.store.versions.paths import passages_path
from rag_model.store.versions.snapshot import Snapshot

Change = Literal["added", "changed", "removed"]
BUCKET = 1 << 18  # approximate rows of a bucket: about 30 MB, and 100 MB if all of them changed
_AHEAD = 8  # pairs of parts that are read at once, at most
_DEALT = 4  # files of dealt rows per bucket: a file a part, each with all buckets, made time grow with the square
_COLUMNS = ("id", "page_id", "title", "hash")
_SCHEMA = pa.schema([PASSAGE_SCHEMA.field(name) for name in _COLUMNS])


@dataclass(frozen=True, slots=True)
class ArticleChange:
    """An article that changed, with the number of its passages by kind of change."""

    page_id: str
    title: str  # the later one
    change: Change
    passages: Mapping[Change, int]  # unchanged passages are not counted


def article_changes(before: Snapshot, after: Snapshot, *, bucket: int = BUCKET) -> Iterator[ArticleChange]:
    """Yield every article with a passage that was added, changed or removed, in the same order each time.

    A passage is changed where its id stayed and its hash (of title and text) did not. `bucket` is about the number of
    rows to hold at once where page ranges differ.

    Raises:
        StoreError: a passage file is missing or damaged, or the temporary folder is full.
    """
    pairs, rest_before, rest_after = _matched(before, after)
    ahead = min(_AHEAD, max(before.at_once, after.at_once))
    for own, other in read_ahead(lambda pair: _columns(before, after, *pair), pairs, ahead):
        yield from _compare(own, other)
    if not rest_before and not rest_after:
        return
    count = 1 + sum(part.rows for part in [*rest_before, *rest_after]) // bucket
    with tempfile.TemporaryDirectory(prefix="bookwheel-diff-") as folder:
        most = max(1, bucket // _DEALT)
        dealt_before = _deal(before, rest_before, count, most, Path(folder) / "before")
        dealt_after = _deal(after, rest_after, count, most, Path(folder) / "after")
        for number in range(count):
            yield from _compare(_gather(dealt_before, number), _gather(dealt_after, number))


def _columns(before: Snapshot, after: Snapshot, own: PartEntry, other: PartEntry) -> tuple[pa.Table, pa.Table]:
    return before.columns(own.name, _COLUMNS), after.columns(other.name, _COLUMNS)


def _matched(
    before: Snapshot, after: Snapshot
) -> tuple[list[tuple[PartEntry, PartEntry]], list[PartEntry], list[PartEntry]]:
    """Return the pairs of parts with equal page ranges, and the other parts of each side; equal files are left out."""
    own, other = _unshared(before, after), _unshared(after, before)
    if not (_disjoint(before.parts) and _disjoint(after.parts)):  # then a page range does not identify a part
        return [], own, other
    ranges = {_range(part): part for part in other}
    pairs = [(part, ranges.pop(_range(part))) for part in own if _range(part) in ranges]
    paired = {part.name for part, _ in pairs}
    return pairs, [part for part in own if part.name not in paired], list(ranges.values())


def _unshared(snapshot: Snapshot, other: Snapshot) -> list[PartEntry]:
    files = snapshot.manifest.content.files
    shared = set(other.manifest.content.files.values())
    return [part for part in snapshot.parts if files.get(passages_path(part.name)) not in shared]


def _disjoint(parts: Sequence[PartEntry]) -> bool:
    return all(left[1] < right[0] for left, right in pairwise(sorted(map(_range, parts))))


def _range(part: PartEntry) -> tuple[int, int]:
    return part.first_page, part.last_page


def _deal(snapshot: Snapshot, parts: Sequence[PartEntry], count: int, most: int, folder: Path) -> list[Path]:
    """Write the parts' rows to files of `count` batches, of parts with about `most` rows each; batch i is bucket i."""
    folder.mkdir()
    files: list[Path] = []
    ahead = min(_AHEAD, snapshot.at_once)
    for tables in _together(read_ahead(lambda part: snapshot.columns(part.name, _COLUMNS), parts, ahead), most):
        files.append(folder / f"{len(files)}.arrow")
        try:
            _write(pa.concat_tables(tables), count, files[-1])
        except OSError as refused:
            raise StoreError(f"cannot write {files[-1]} ({refused}): free space there, or set TMPDIR") from refused
    return files


def _together(tables: Iterator[pa.Table], most: int) -> Iterator[list[pa.Table]]:
    """Yield the tables in order, as many at once as have at least `most` rows together."""
    held: list[pa.Table] = []
    rows = 0
    for table in tables:
        held.append(table)
        rows += len(table)
        if rows >= most:
            yield held
            held, rows = [], 0
    if held:
        yield held


def _write(table: pa.Table, count: int, file: Path) -> None:
    pages = table["page_id"].combine_chunks().dictionary_encode()
    bucket_of = np.array([crc32(page.encode()) % count for page in pages.dictionary.to_pylist()], dtype=np.int64)
    buckets = bucket_of[pages.indices.to_numpy()]
    ordered = table.take(np.argsort(buckets, kind="stable"))
    bounds = np.searchsorted(np.sort(buckets), np.arange(count + 1)).tolist()
    with pa.ipc.new_file(file, _SCHEMA) as writer:
        for start, end in pairwise(bounds):
            columns = [column.combine_chunks() for column in ordered.slice(start, end - start).columns]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=_SCHEMA))


def _gather(files: Sequence[Path], number: int) -> pa.Table:
    """Read bucket `number` of all files into one table."""
    batches = []
    for file in files:
        with pa.memory_map(str(file)) as source:
            batches.append(pa.ipc.open_file(source).get_batch(number))
    return pa.Table.from_batches(batches, _SCHEMA)


def _compare(before: pa.Table, after: pa.Table) -> Iterator[ArticleChange]:
    """Yield the changed articles of two tables that together hold every passage of their articles."""
    old, new = _less(before, after), _less(after, before)
    kept = {row[0] for row in old} & {row[0] for row in new}
    titles: dict[str, str] = {}
    tallies = defaultdict[str, Counter[Change]](Counter)
    for identity, page, title in old:
        titles[page] = title
        tallies[page]["removed"] += identity not in kept
    for identity, page, title in new:
        titles[page] = title
        tallies[page]["changed" if identity in kept else "added"] += 1
    pages = pa.array(tallies, pa.string())
    were = pc.is_in(pages, value_set=before["page_id"]).to_pylist()
    are = pc.is_in(pages, value_set=after["page_id"]).to_pylist()
    for (page, tally), was, stays in zip(tallies.items(), were, are, strict=True):
        change: Change = "added" if not was else "changed" if stays else "removed"
        yield ArticleChange(page, titles[page], change, dict(+tally))


def _less(table: pa.Table, other: pa.Table) -> list[tuple[str, str, str]]:
    """Return id, page and title of the rows whose pair of id and hash is in no row of `other`."""
    missing = pc.invert(pc.is_in(_keys(table), value_set=_keys(other)))
    left = table.filter(missing)
    return list(zip(*(left[name].to_pylist() for name in ("id", "page_id", "title")), strict=True))


def _keys(table: pa.Table) -> pa.ChunkedArray:
    return pc.binary_join_element_wise(table["hash"], table["id"], " ")  # a hash contains no space
