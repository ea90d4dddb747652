"""Deltas: files with which a puller of the previous snapshot fetches a fraction of a new file.

A delta turns a base file, from the previous snapshot, into the target file.

| target | content of the delta |
| --- | --- |
| a passage file | new rows, and the base's row numbers of other rows (`corpus.passage_delta`) |
| an index that ends in vectors | the bytes before the vectors, compressed: the graph (no base) |
| another index, except BM25 | bytes that the base does not have: new codes in unchanged lists |

A build writes deltas and records them in the memo: stage `delta`, with the digests of the files and
the versions that influence the bytes. They are not in a snapshot's content, so they change no id
and no search result. A puller compares the file that it builds with the digest in the manifest; if
it differs, or if a delta is missing, the puller fetches the whole file.

A delta is kept as long as a snapshot has the target (`store.upkeep.roots`), and contains only data
of the target. So a takedown, which replaces the files with a page, also removes their deltas.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rag_model.corpus import passage_delta
from rag_model.corpus.passages import PassageFile
from rag_model.digest import digest_file
from rag_model.errors import BookwheelError
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.memo import TARGET_KEY, Memo, Record, StageResult
from rag_model.store.pulling import delta_files
from rag_model.store.pulling.overlap import find_vector_tables
from rag_model.store.store import Store
from rag_model.store.versions.manifest import TEXT, Content, passages_path
from rag_model.store.versions.snapshot import Snapshot

STAGE = "delta"
_OUTPUT = "delta"
_MAX_FRACTION = 0.5  # of the bytes that the delta replaces; a larger delta is not worth the work
_MIN_HEAD_BYTES = 4096  # a shorter head before an index's vectors is not a graph


@dataclass(frozen=True, slots=True)
class DeltaStep:
    """The base and the target of a delta."""

    target: BlobRef  # the new file
    base: BlobRef | None = None  # the previous file; None for an index that ends in vectors
    head_bytes: int = 0  # number of bytes before the vectors, for an index that ends in vectors
    is_passages: bool = False  # whether the files are passage files

    def inputs(self) -> dict[str, Any]:
        """Return the memo inputs: everything that determines the delta's bytes."""
        if self.base is None:
            return {
                "after": self.target.id,
                "head": self.head_bytes,
                "code": delta_files.PACK_VERSION,
            }
        if not self.is_passages:
            return {
                "before": self.base.id,
                "after": self.target.id,
                "splice": delta_files.SPLICE_VERSION,
            }
        versions = {"code": passage_delta.VERSION, "libraries": {"pyarrow": pa.__version__}}
        return {"before": self.base.id, "after": self.target.id, **versions}


def iter_delta_steps(base: Content, target: Content) -> Iterator[DeltaStep]:
    """Yield the deltas that can be built between two snapshots: one for each changed file."""
    passages = {passages_path(part.name) for part in target.parts}
    indexes = {
        target.index_file(name): target.representation_of(name) != TEXT for name in target.indexes
    }  # pullers derive BM25 indexes
    base_files, tables = {*base.files.values()}, find_vector_tables(target)
    for path in (*passages, *(path for path, has_delta in indexes.items() if has_delta)):
        base_file, target_file = base.files.get(path), target.files.get(path)
        if (
            path in tables
            and target_file
            and target_file not in base_files
            and tables[path].head_bytes >= _MIN_HEAD_BYTES
        ):
            yield DeltaStep(target_file, head_bytes=tables[path].head_bytes)
        elif path not in tables and base_file and target_file and target_file not in base_files:
            yield DeltaStep(target_file, base_file, is_passages=path in passages)


def build_delta(store: Store, step: DeltaStep) -> Record:
    """Return the memo record of a delta, built first if there is none.

    The record has no output if the delta is too large to be worthwhile.

    Raises:
        NotRecordedError: there is no record, and the store's memo may not produce one.
        StoreError: a file is missing or damaged, or the store cannot be written.
        OSError: the disk is full.
    """

    def produce(folder: Path) -> StageResult:
        out = folder / "delta"
        target = store.blobs.get_local_path(step.target)
        if step.base is None:
            delta_files.write_packed(target, step.head_bytes, out)
            is_worthwhile = out.stat().st_size <= _MAX_FRACTION * step.head_bytes
        else:
            base = store.blobs.get_local_path(step.base)
            write = passage_delta.write_delta if step.is_passages else delta_files.write_splice
            write(base, target, out)
            is_worthwhile = out.stat().st_size <= _MAX_FRACTION * step.target.size
            is_worthwhile = is_worthwhile and (not step.is_passages or _reproduces(base, out, target, folder / "again"))
        return StageResult({_OUTPUT: out} if is_worthwhile else {}, {TARGET_KEY: step.target.id})

    return store.memo.get_or_create(STAGE, step.inputs(), produce)[0]


def _reproduces(base: Path, delta: Path, target: Path, rebuilt: Path) -> bool:
    """Return whether a delta reproduces the target; another pyarrow may have written it."""
    with PassageFile(target) as file:
        rows = file.n_rows
    passage_delta.apply_delta(base, delta, rows, rebuilt)
    return digest_file(rebuilt) == digest_file(target)


def find_delta(store: Store, step: DeltaStep) -> BlobRef | None:
    """Return the delta of a step; None without a worthwhile delta for the installed versions.

    Raises:
        StoreError: the store cannot be read.
    """
    record = store.memo.find(STAGE, Memo.compute_key(step.inputs()))
    delta = record.outputs.get(_OUTPUT) if record else None
    return delta if delta and delta.size <= _MAX_FRACTION * (step.head_bytes or step.target.size) else None


def rebuild_file(store: Store, previous: Snapshot, content: Content, path: str, out: Path) -> int | None:
    """Rebuild a passage file or an index from the previous snapshot's file and a delta.

    Returns:
        The bytes fetched; None if the file was not written, for any reason but a full disk. Then
        fetch the whole file.

    Raises:
        OSError: `out` cannot be written.
    """
    rows = {passages_path(part.name): part.rows for part in content.parts}
    base_file, target_file = previous.manifest.content.files.get(path), content.files[path]
    if base_file in (None, target_file) or path in find_vector_tables(content):
        return None
    try:
        delta = find_delta(store, DeltaStep(target_file, base_file, is_passages=path in rows))
        if delta is None:
            return None
        copy = out.with_name("delta")
        store.blobs.fetch(delta, copy)
        if path in rows:
            passage_delta.apply_delta(previous.path(path), copy, rows[path], out)
        else:
            delta_files.apply_splice(previous.path(path), copy, target_file.size, out)
    except BookwheelError:  # an error of the store itself is raised when the file is fetched
        return None
    return delta.size


def unpack_head(store: Store, step: DeltaStep, out: Path) -> int | None:
    """Write the bytes of an index before its vectors, if the store has them packed.

    Returns:
        The bytes fetched; None if the file was not written, as in `rebuild_file`.

    Raises:
        OSError: `out` cannot be written.
    """
    try:
        delta = find_delta(store, step) if step.head_bytes >= _MIN_HEAD_BYTES else None
        if delta is None:
            return None
        copy = out.with_name("packed")
        store.blobs.fetch(delta, copy)
        delta_files.unpack_file(copy, step.head_bytes, out)
    except BookwheelError:
        return None
    return delta.size
