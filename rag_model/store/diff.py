"""Compare two snapshots: articles, passages, settings, and the bytes that a pull would fetch."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rag_model.corpus.passages import PASSAGE_SCHEMA
from rag_model.errors import StoreError
from rag_model.process import temporary_folder
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.files import read_ahead
from rag_model.store.pulling.deltas import find_delta, list_delta_steps
from rag_model.store.pulling.overlap import RowOverlap, list_embedded_files
from rag_model.store.store import Store
from rag_model.store.versions.manifest import (
    BUILD_ONLY_KINDS,
    EMBEDDINGS,
    Content,
    PartEntry,
    file_kind,
    passages_path,
)
from rag_model.store.versions.snapshot import Snapshot

Change = Literal["added", "changed", "removed"]
# Approximate number of rows in a bucket, which has the passages of all pages whose ids have equal
# hashes. It takes about 30 MB of memory, or 100 MB if all rows changed.
BUCKET_ROWS = 1 << 18
_PARTS_AHEAD = 8  # maximum number of pairs of parts that are read at a time
# Number of temporary files as a multiple of the number of buckets. Each file has a batch for each
# bucket, so one file per part would take quadratic time.
_FILES_PER_BUCKET = 4
_COLUMNS = ("id", "page_id", "title", "hash")
_SCHEMA = pa.schema([PASSAGE_SCHEMA.field(name) for name in _COLUMNS])
_FILES_AHEAD = 8  # maximum number of files that are compared at a time
CHANGES: tuple[Change, ...] = ("added", "changed", "removed")


@dataclass(frozen=True, slots=True)
class ArticleChange:
    """An article that changed, and how many of its passages were added, changed and removed."""

    page_id: str
    title: str  # title in the later snapshot if it has the article, else in the earlier one
    change: Change
    # number of passages by kind of change; unchanged passages are not counted
    passages: Mapping[Change, int]


def iter_article_changes(before: Snapshot, after: Snapshot, *, max_rows: int = BUCKET_ROWS) -> Iterator[ArticleChange]:
    """Yield every article with an added, changed or removed passage, in a deterministic order.

    A changed passage has the same id and another hash (of title and text). If the parts of the two
    snapshots have different page ranges, about `max_rows` rows are in memory at a time.

    Raises:
        StoreError: a passage file is missing or damaged, or the temporary folder is full.
    """
    part_pairs, unpaired_before, unpaired_after = _pair_parts(before, after)
    n_ahead = min(_PARTS_AHEAD, max(before.concurrency, after.concurrency))
    for table_before, table_after in read_ahead(lambda pair: _read_columns(before, after, *pair), part_pairs, n_ahead):
        yield from _diff_tables(table_before, table_after)
    if not unpaired_before and not unpaired_after:
        return
    n_buckets = 1 + sum(part.rows for part in [*unpaired_before, *unpaired_after]) // max_rows
    with temporary_folder("diff") as folder:
        file_rows = max(1, max_rows // _FILES_PER_BUCKET)
        files_before = _write_bucket_files(before, unpaired_before, n_buckets, file_rows, folder / "before")
        files_after = _write_bucket_files(after, unpaired_after, n_buckets, file_rows, folder / "after")
        for bucket_number in range(n_buckets):
            yield from _diff_tables(_read_bucket(files_before, bucket_number), _read_bucket(files_after, bucket_number))


def _read_columns(
    before: Snapshot, after: Snapshot, part_before: PartEntry, part_after: PartEntry
) -> tuple[pa.Table, pa.Table]:
    return before.columns(part_before.name, _COLUMNS), after.columns(part_after.name, _COLUMNS)


def _pair_parts(
    before: Snapshot, after: Snapshot
) -> tuple[list[tuple[PartEntry, PartEntry]], list[PartEntry], list[PartEntry]]:
    """Return the pairs of parts with equal page ranges, and each snapshot's parts without a pair.

    Parts whose passage file the other snapshot also has are left out.
    """
    parts_before = _list_changed_parts(before, after)
    parts_after = _list_changed_parts(after, before)
    # A page range identifies a part only if the ranges do not overlap.
    if not (_are_disjoint(before.parts) and _are_disjoint(after.parts)):
        return [], parts_before, parts_after
    parts_by_range = {_get_page_range(part): part for part in parts_after}
    part_pairs = [
        (part, parts_by_range.pop(_get_page_range(part)))
        for part in parts_before
        if _get_page_range(part) in parts_by_range
    ]
    paired_names = {part.name for part, _ in part_pairs}
    return part_pairs, [part for part in parts_before if part.name not in paired_names], list(parts_by_range.values())


def _list_changed_parts(snapshot: Snapshot, other: Snapshot) -> list[PartEntry]:
    files = snapshot.manifest.content.files
    shared_files = set(other.manifest.content.files.values())
    return [part for part in snapshot.parts if files.get(passages_path(part.name)) not in shared_files]


def _are_disjoint(parts: Sequence[PartEntry]) -> bool:
    return all(left[1] < right[0] for left, right in pairwise(sorted(map(_get_page_range, parts))))


def _get_page_range(part: PartEntry) -> tuple[int, int]:
    return part.first_page, part.last_page


def _write_bucket_files(
    snapshot: Snapshot, parts: Sequence[PartEntry], n_buckets: int, file_rows: int, folder: Path
) -> list[Path]:
    """Write the rows of all parts to files of `n_buckets` batches each; batch i belongs to bucket
    i.
    """
    folder.mkdir()
    files: list[Path] = []
    n_ahead = min(_PARTS_AHEAD, snapshot.concurrency)
    for tables in _iter_table_groups(
        read_ahead(lambda part: snapshot.columns(part.name, _COLUMNS), parts, n_ahead), file_rows
    ):
        files.append(folder / f"{len(files)}.arrow")
        try:
            _write_buckets(pa.concat_tables(tables), n_buckets, files[-1])
        except OSError as error:
            raise StoreError(f"cannot write {files[-1]} ({error}): free space there, or set TMPDIR") from error
    return files


def _iter_table_groups(tables: Iterator[pa.Table], group_rows: int) -> Iterator[list[pa.Table]]:
    """Yield the tables in order, in groups of at least `group_rows` rows."""
    table_group: list[pa.Table] = []
    n_rows = 0
    for table in tables:
        table_group.append(table)
        n_rows += len(table)
        if n_rows >= group_rows:
            yield table_group
            table_group, n_rows = [], 0
    if table_group:
        yield table_group


def _write_buckets(table: pa.Table, n_buckets: int, file: Path) -> None:
    page_ids = table["page_id"].combine_chunks().dictionary_encode()
    page_buckets = np.array(
        [crc32(page.encode()) % n_buckets for page in page_ids.dictionary.to_pylist()], dtype=np.int64
    )
    row_buckets = page_buckets[page_ids.indices.to_numpy()]
    sorted_rows = table.take(np.argsort(row_buckets, kind="stable"))
    bucket_bounds = np.searchsorted(np.sort(row_buckets), np.arange(n_buckets + 1)).tolist()
    with pa.ipc.new_file(file, _SCHEMA) as writer:
        for start_row, end_row in pairwise(bucket_bounds):
            columns = [column.combine_chunks() for column in sorted_rows.slice(start_row, end_row - start_row).columns]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=_SCHEMA))


def _read_bucket(files: Sequence[Path], bucket_number: int) -> pa.Table:
    batches = []
    for file in files:
        with pa.memory_map(str(file)) as mapped_file:
            batches.append(pa.ipc.open_file(mapped_file).get_batch(bucket_number))
    return pa.Table.from_batches(batches, _SCHEMA)


def _diff_tables(before: pa.Table, after: pa.Table) -> Iterator[ArticleChange]:
    """Yield the changed articles of two tables, which contain all passages of their articles."""
    rows_before, rows_after = _list_unmatched_rows(before, after), _list_unmatched_rows(after, before)
    changed_ids = {row[0] for row in rows_before} & {row[0] for row in rows_after}
    title_by_page: dict[str, str] = {}
    change_counts_by_page = defaultdict[str, Counter[Change]](Counter)
    for passage_id, page_id, title in rows_before:
        title_by_page[page_id] = title
        change_counts_by_page[page_id]["removed"] += passage_id not in changed_ids
    for passage_id, page_id, title in rows_after:
        title_by_page[page_id] = title
        change_counts_by_page[page_id]["changed" if passage_id in changed_ids else "added"] += 1
    page_ids = pa.array(change_counts_by_page, pa.string())
    page_was_present = pc.is_in(page_ids, value_set=before["page_id"]).to_pylist()
    page_is_present = pc.is_in(page_ids, value_set=after["page_id"]).to_pylist()
    for (page_id, change_counts), was_in_earlier, is_in_later in zip(
        change_counts_by_page.items(), page_was_present, page_is_present, strict=True
    ):
        change: Change = "added" if not was_in_earlier else "changed" if is_in_later else "removed"
        yield ArticleChange(page_id, title_by_page[page_id], change, dict(+change_counts))


def _list_unmatched_rows(table: pa.Table, other: pa.Table) -> list[tuple[str, str, str]]:
    """Return id, page and title of the rows of `table` whose id and hash are not in `other`."""
    is_unmatched = pc.invert(pc.is_in(_join_hashes_and_ids(table), value_set=_join_hashes_and_ids(other)))
    rows = table.filter(is_unmatched)
    return list(zip(*(rows[name].to_pylist() for name in ("id", "page_id", "title")), strict=True))


def _join_hashes_and_ids(table: pa.Table) -> pa.ChunkedArray:
    return pc.binary_join_element_wise(table["hash"], table["id"], " ")  # a hash contains no space


@dataclass(frozen=True, slots=True)
class PullSize:
    """The bytes that a pull fetches and reuses for one kind of file; equal files count once."""

    fetched_bytes: int
    reused_bytes: int


@dataclass(frozen=True, slots=True)
class SnapshotDiff:
    """The differences between two snapshots, usually an earlier and a later one."""

    before: str  # full id of a snapshot
    after: str  # full id of a snapshot
    articles: Mapping[Change, int]  # number of articles by kind of change
    passages: Mapping[Change, int]  # number of passages by kind of change
    examples: Mapping[Change, tuple[ArticleChange, ...]]  # first articles with each kind of change
    # (value before, value after) of each setting that differs, by its dotted name, such as
    # recipe.chunk.words; a value is None if the setting is missing
    settings: Mapping[str, tuple[Any, Any]]
    pull: Mapping[str, PullSize]  # sizes by kind of file: passages, embeddings, encoder, index/hnsw

    def to_json(self) -> dict[str, Any]:
        """Return the diff as JSON values."""
        settings = {name: {"before": values[0], "after": values[1]} for name, values in self.settings.items()}
        return {**asdict(self), "settings": settings}


def diff_snapshots(before: Snapshot, after: Snapshot, limit: int = 10) -> SnapshotDiff:
    """Compare two snapshots, with up to `limit` example articles for each kind of change.

    The comparison needs memory for one part and 8 bytes per passage; it reads no texts, vectors or
    indexes.

    Raises:
        StoreError: a passage file is missing or damaged.
    """
    articles, passages = Counter(dict.fromkeys(CHANGES, 0)), Counter(dict.fromkeys(CHANGES, 0))
    examples_by_change: dict[Change, list[ArticleChange]] = {change: [] for change in CHANGES}
    for article in iter_article_changes(before, after):
        articles[article.change] += 1
        passages.update(article.passages)
        if len(examples_by_change[article.change]) < limit:
            examples_by_change[article.change].append(article)
    content_before, content_after = before.manifest.content, after.manifest.content
    return SnapshotDiff(
        before=before.id,
        after=after.id,
        articles=dict(articles),
        passages=dict(passages),
        examples={change: tuple(changes) for change, changes in examples_by_change.items()},
        settings=dict(iter_differences(_collect_settings(content_before), _collect_settings(content_after))),
        pull=_estimate_pull(before, after),
    )


def _collect_settings(content: Content) -> dict[str, Any]:
    fields = content.to_json()
    sections = {name: fields[name] for name in ("corpus", "recipe", "indexes")}
    space_by_representation = {name: dict(entry.get("space") or {}) for name, entry in content.representations.items()}
    return {
        **sections,
        "space": space_by_representation.pop(EMBEDDINGS, None),
        "spaces": space_by_representation,
        "retriever": content.default_retriever,
    }


def iter_differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield the dotted path of every setting that differs, and its value before and after.

    A section of settings that only one snapshot has is yielded as a single value.
    """
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in sorted({*before, *after}):
            yield from iter_differences(before.get(name), after.get(name), f"{path}.{name}" if path else name)
    elif before != after:
        yield path, (before, after)


def _estimate_pull(before: Snapshot, after: Snapshot) -> dict[str, PullSize]:
    files, files_before = after.manifest.content.files, set(before.manifest.content.files.values())
    # if a blob has several paths, the first path is used
    path_by_blob = {ref: path for path, ref in sorted(files.items(), reverse=True)}
    overlap = RowOverlap.between(before, after)
    store = Store.open(after.location) if isinstance(after.location, str) else None
    steps = list_delta_steps(before.manifest.content, after.manifest.content)
    embedded_files = list_embedded_files(after.manifest.content)
    fetched_bytes_by_kind, reused_bytes_by_kind = Counter[str](), Counter[str]()

    def estimate_fetched_bytes(ref: BlobRef) -> int:
        path = path_by_blob[ref]
        if ref in files_before:
            return 0
        patch = overlap.find_patch(path) if overlap else None
        table = embedded_files.get(path)
        fetched_bytes = table.head_bytes if table else patch.fetched_bytes if patch else ref.size
        for delta_step in steps.get(path, ()):
            # A delta of the bytes before the vectors is used only if some vectors are copied.
            is_usable_delta = patch or table or not delta_step.head_bytes
            if store and is_usable_delta and (delta := find_delta(store, delta_step)):
                return fetched_bytes - (delta_step.head_bytes or ref.size) + delta.size
        return fetched_bytes

    n_ahead = min(_FILES_AHEAD, max(before.concurrency, after.concurrency))
    for (ref, path), fetched_bytes in zip(
        path_by_blob.items(),
        read_ahead(estimate_fetched_bytes, [*path_by_blob], n_ahead),
        strict=True,
    ):
        fetched_bytes_by_kind[file_kind(path)] += fetched_bytes
        reused_bytes_by_kind[file_kind(path)] += ref.size - fetched_bytes
    return {
        kind: PullSize(fetched_bytes_by_kind[kind], reused_bytes_by_kind[kind])
        for kind in sorted(fetched_bytes_by_kind.keys() - BUILD_ONLY_KINDS)
    }
