"""Deltas, which a puller that has the previous snapshot fetches instead of whole new files.

A delta turns a base file, from the previous snapshot, into the target file. The compressed graph of
an index needs no base, so a puller that has only an older snapshot can use it too.

| target | content of the delta |
| --- | --- |
| a passage file | new rows, and the base's row numbers of the other rows (`corpus.passage_delta`) |
| a faiss index | new links, or new codes in unchanged lists (`row_delta`), without its vectors |
| an index that ends in vectors | the bytes before the vectors, compressed (no base) |
| an inverted index of weighted terms | terms of new rows, the base's row numbers of other rows |
| another index, except BM25 | bytes that the base does not have (`delta_files`) |

A build writes deltas and records them in the memo: stage `delta`, with the digests of the files and
the versions that influence the bytes. Deltas are not in a snapshot's content, so they change no id
and no search result. A puller compares the digest of the file that it builds with the digest in the
manifest. If they differ, or if a delta is missing, it fetches the whole file.

A delta is kept as long as a snapshot has the target (`store.upkeep.roots`), and contains only data
of the target. So a takedown, which replaces the files that contain a page, also removes their
deltas.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rag_model.arrays import RowLists, Rows, mask_unordered
from rag_model.corpus import passage_delta
from rag_model.corpus.ragged_file import SparseVectors
from rag_model.errors import BookwheelError, InputError
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.memo import TARGET_KEY, Memo, Record, StageResult
from rag_model.store.pulling import delta_files, row_delta
from rag_model.store.pulling.overlap import find_vector_tables
from rag_model.store.store import Store
from rag_model.store.versions.manifest import SPARSE, TEXT, Content, passages_path

STAGE = "delta"  # stage of the memo
_OUTPUT = "delta"  # name of the output in a record
# maximum size of a delta relative to the bytes that it replaces; a larger delta saves too little
_MAX_FRACTION = 0.5
_MIN_HEAD_BYTES = 4096  # if fewer bytes precede an index's vectors, they contain no graph
# Finds stretches that may be equal in the base file and the target file; returns None if it cannot.
# The last argument is a function that returns the base's row of each target row.
FindStretches = Callable[[Path, Path, Callable[[], Rows]], Iterable[delta_files.Stretch] | None]
# Returns the base's row of each target row (ascending; -1 if new), and the terms of new rows.
FindNewTerms = Callable[[], tuple[Rows, SparseVectors]]
_ROW_LISTS_SUFFIX = ".faiss"  # suffix of files that may have lists of row numbers
_POSTINGS_SUFFIX = ".postings"  # suffix of inverted indexes


@dataclass(frozen=True, slots=True)
class DeltaStep:
    """A delta between two files: its base, its target, and the kind of its content."""

    target: BlobRef  # the new file
    # the previous file; if None, the delta is the packed bytes before the target's vectors
    base: BlobRef | None = None
    head_bytes: int = 0  # number of bytes before the vectors, for an index that ends in vectors
    is_passages: bool = False  # whether the files are passage files
    has_row_lists: bool = False  # whether the files have lists of row numbers
    base_head_bytes: int = 0  # the number of bytes before the vectors of the base
    # representation of an inverted index of weighted terms; `text` for all other files
    representation: str = TEXT
    # The list of parts (`snapshots.parent_index`) with which a build finds the base's rows.
    parts: BlobRef | None = None

    def inputs(self) -> dict[str, Any]:
        """Return the memo inputs: everything that determines the delta's bytes."""
        if self.base is None:
            return {"after": self.target.id, "head": self.head_bytes, "code": delta_files.PACK_VERSION}
        files = {"before": self.base.id, "after": self.target.id}
        if self.has_row_lists:
            return {**files, "head": self.head_bytes, "rows": row_delta.VERSION}
        if self.representation != TEXT:
            return {**files, "terms": delta_files.TERMS_VERSION}
        if not self.is_passages:
            return {**files, "splice": delta_files.SPLICE_VERSION}
        return {**files, "code": passage_delta.VERSION, "libraries": {"pyarrow": pa.__version__}}


def list_delta_steps(base: Content, target: Content) -> dict[str, list[DeltaStep]]:
    """Return, for each path, the deltas that can be built from one snapshot to another, in
    ascending order of size.
    """
    steps_by_path = {}
    base_files, tables, base_tables = {*base.files.values()}, find_vector_tables(target), find_vector_tables(base)
    passage_paths = {passages_path(part.name) for part in target.parts}
    # BM25 indexes need no deltas, because pullers derive them.
    representation_by_path = {target.index_file(name): target.representation_of(name) for name in target.indexes}
    index_paths = sorted(path for path, representation in representation_by_path.items() if representation != TEXT)
    for path in (*sorted(passage_paths), *index_paths):
        base_file, target_file = base.files.get(path), target.files.get(path)
        if target_file is not None and target_file not in base_files:
            head_bytes = [table.head_bytes if table else 0 for table in (tables.get(path), base_tables.get(path))]
            representation = representation_by_path.get(path, TEXT)
            if path in passage_paths:
                steps_by_path[path] = [DeltaStep(target_file, base_file, is_passages=True)] if base_file else []
            elif path.endswith(_POSTINGS_SUFFIX) and target.kind_of(representation) == SPARSE:
                is_comparable = base_file and target.shares_space(base, representation)
                steps_by_path[path] = (
                    [DeltaStep(target_file, base_file, representation=representation)] if is_comparable else []
                )
            else:
                steps_by_path[path] = [*_iter_index_steps(path, target_file, base_file, *head_bytes)]
    return steps_by_path


def _iter_index_steps(
    path: str, target: BlobRef, base: BlobRef | None, head_bytes: int, base_head_bytes: int
) -> Iterator[DeltaStep]:
    """Yield the deltas of an index with `head_bytes` bytes before its vectors, or 0 if it has no
    vectors.
    """
    if 0 < head_bytes < _MIN_HEAD_BYTES:
        return
    if base and path.endswith(_ROW_LISTS_SUFFIX) and bool(base_head_bytes) == bool(head_bytes):
        yield DeltaStep(target, base, head_bytes, has_row_lists=True, base_head_bytes=base_head_bytes)
    elif base and not head_bytes:
        yield DeltaStep(target, base)
    if head_bytes:
        yield DeltaStep(target, head_bytes=head_bytes)


def build_delta(
    store: Store,
    step: DeltaStep,
    find_base_rows: Callable[[], Rows] = lambda: np.zeros(0, np.int64),
    find_lists: Callable[[Path], RowLists | None] = lambda path: None,
    find_stretches: FindStretches = lambda base, target, find_base_rows: None,
    find_new_terms: FindNewTerms = lambda: (np.zeros(0, np.int64), SparseVectors.empty()),
) -> Record:
    """Return the memo record of a delta; build the delta if there is none.

    The record has no output if the delta is too large to be worthwhile.

    Args:
        store: the store of both snapshots.
        step: the base, the target, and the kind of delta.
        find_base_rows: returns the base's row of each row of the target, (n,); -1 for new rows.
        find_lists: returns the lists of row numbers in an index file; None if it has none.
        find_stretches: returns the stretches that may be equal in two files; None if unknown.
        find_new_terms: for a step with weighted terms, returns the base's row of each row of the
            target, (n,), ascending (-1 for new rows), and the weighted terms of the new rows.

    Raises:
        ResultNotRecordedError: there is no record, and the store's memo must not produce one.
        StoreError: a file is missing or damaged, or the store cannot be written.
        OSError: the disk is full.
    """

    def produce(folder: Path) -> StageResult:
        out, is_written = folder / "delta", True
        if step.representation != TEXT:
            delta_files.write_new_terms(*find_new_terms(), out)
            return select_worthwhile(out)
        target = store.blobs.get_local_path(step.target)
        if step.base is None:
            delta_files.pack_file(target, step.head_bytes, out, level=delta_files.HEAD_LEVEL)
        else:
            base = store.blobs.get_local_path(step.base)
            if step.is_passages:
                is_written = passage_delta.write_delta(base, target, out)
            elif step.has_row_lists:
                is_written = _write_row_delta(step, base, target, find_lists, find_base_rows, out)
            else:
                stretches = find_stretches(base, target, lambda: mask_unordered(find_base_rows()))
                delta_files.write_splice(base, target, out, stretches)
        return select_worthwhile(out if is_written else None)

    def select_worthwhile(out: Path | None) -> StageResult:
        replaced_size = step.head_bytes or step.target.size
        is_worthwhile = out and out.stat().st_size <= _MAX_FRACTION * replaced_size
        return StageResult({_OUTPUT: out} if out and is_worthwhile else {}, {TARGET_KEY: step.target.id})

    return store.memo.get_or_create(STAGE, step.inputs(), produce)[0]


def _write_row_delta(
    step: DeltaStep,
    base: Path,
    target: Path,
    find_lists: Callable[[Path], RowLists | None],
    find_base_rows: Callable[[], Rows],
    out: Path,
) -> bool:
    """Write a row delta; return False if the files cannot be compared, for example because the
    index was trained again.
    """
    base_lists, target_lists = find_lists(base), find_lists(target)
    if (base_lists is None) != (target_lists is None):
        return False
    base_rows = mask_unordered(find_base_rows()) if target_lists else np.zeros(0, np.int64)
    base_end = step.base_head_bytes or base.stat().st_size
    target_end = step.head_bytes or target.stat().st_size
    try:
        row_delta.write_row_delta(
            row_delta.FileWithLists(base, base_lists or RowLists.empty(), base_end),
            row_delta.FileWithLists(target, target_lists or RowLists.empty(), target_end),
            base_rows,
            out,
        )
    except InputError:
        return False
    return True


def find_delta(store: Store, step: DeltaStep) -> BlobRef | None:
    """Return the delta of a step; None if no build with the same versions of the code and libraries
    built it, or if it is too large.

    Raises:
        StoreError: the store cannot be read.
    """
    record = store.memo.find(STAGE, Memo.compute_key(step.inputs()))
    delta = record.outputs.get(_OUTPUT) if record else None
    return delta if delta and delta.size <= _MAX_FRACTION * (step.head_bytes or step.target.size) else None


def rebuild_file(
    store: Store, get_base_path: Callable[[], Path], steps: Iterable[DeltaStep], n_rows: int, out: Path
) -> int | None:
    """Rebuild a file, or the bytes before its vectors, from the base and the first usable delta.

    Args:
        store: the store of both snapshots.
        get_base_path: returns the path of the previous snapshot's file.
        steps: the deltas of the file, the smallest first; deltas of weighted terms are skipped,
            because only their index kind can derive the file.
        n_rows: the number of rows of a passage file.
        out: the file to write.

    Returns:
        The number of bytes fetched; None if no delta could be applied, so that the caller has to
        fetch the whole file.

    Raises:
        OSError: `out` cannot be written.
    """
    for step in (step for step in steps if step.representation == TEXT):
        # an error of the store is raised again when the caller fetches the whole file
        with suppress(BookwheelError):
            is_applicable = step.base is None or get_base_path().is_file()
            if is_applicable and (delta := find_delta(store, step)):
                delta_path, file_bytes = out.with_name("delta"), step.head_bytes or step.target.size
                store.blobs.fetch(delta, delta_path)
                if step.base is None:
                    delta_files.unpack_file(delta_path, file_bytes, out)
                elif step.is_passages:
                    passage_delta.apply_delta(get_base_path(), delta_path, n_rows, out)
                elif step.has_row_lists:
                    row_delta.apply_row_delta(get_base_path(), delta_path, file_bytes, out)
                else:
                    delta_files.apply_splice(get_base_path(), delta_path, file_bytes, out)
                return delta.size
    return None
