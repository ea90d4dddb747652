"""Deltas beside the files of a store: with them a puller that has the snapshot before fetches a fraction of a file.

| of | holds |
| --- | --- |
| a passage file | its new rows, and where the others stand in the file before (`corpus.passage_delta`) |
| an index that ends in vectors | what comes before these, compressed (`store.pulling.packed`): the graph |

A build makes them and records them in the memo: stage `delta`, by the files' digests and the versions that decide the
bytes. They belong to no snapshot's content, so they change no id and nothing that is served. What a puller makes with
one is compared with the digest in the manifest; if anything differs, or is missing, the file is fetched as it is.

A delta lives as long as a snapshot has the later file (`store.upkeep.roots`), and holds nothing that this file has not:
so a takedown, which replaces files that hold a page, ends their deltas with them.
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
from rag_model.store.objects.memo import Memo, Produced, Record
from rag_model.store.pulling import packed
from rag_model.store.pulling.tables import tables_of
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content
from rag_model.store.versions.paths import passages_path
from rag_model.store.versions.snapshot import Snapshot

STAGE = "delta"
AFTER = "after"  # the fact of a record that names the later file
_DELTA = "delta"
_WORTH = 0.5  # of the bytes that it spares: what is saved must be worth the work
_HEAD = 4096  # bytes; what is shorter before an index's vectors is no graph


@dataclass(frozen=True, slots=True)
class Step:
    """What a delta is from, and to."""

    after: BlobRef  # the later file
    before: BlobRef | None = None  # the earlier one of passages
    head: int = 0  # of an index that ends in vectors: the bytes before these

    def inputs(self) -> dict[str, Any]:
        """Return all that decides a delta's bytes."""
        if self.before is None:
            return {"after": self.after.id, "head": self.head, "code": packed.VERSION}
        versions = {"code": passage_delta.VERSION, "libraries": {"pyarrow": pa.__version__}}
        return {"before": self.before.id, "after": self.after.id, **versions}


def steps(before: Content, after: Content) -> Iterator[Step]:
    """Yield what deltas can be made of: files that changed."""
    known = {*before.files.values()}
    for part in after.parts:
        path = passages_path(part.name)
        old, new = before.files.get(path), after.files.get(path)
        if old and new and new not in known:
            yield Step(new, old)
    for path, table in tables_of(after).items():
        if path.startswith("index/") and table.head >= _HEAD and after.files[path] not in known:
            yield Step(after.files[path], head=table.head)


def made(store: Store, step: Step) -> Record:
    """Return the record of a delta, made first if there is none; without an output where it is not worth its work.

    Raises:
        NotRecordedError: there is no record, and the store's memo only reads.
        StoreError: a file is missing or damaged, or the store cannot be written.
        OSError: there is no room for temporary files.
    """

    def produce(folder: Path) -> Produced:
        out = folder / "delta"
        after = store.blobs.local(step.after)
        if step.before is None:
            packed.pack(after, step.head, out)
            worth = out.stat().st_size <= _WORTH * step.head
        else:
            before = store.blobs.local(step.before)
            passage_delta.write_delta(before, after, out)
            worth = out.stat().st_size <= _WORTH * step.after.size and _makes(before, out, after, folder / "again")
        return Produced({_DELTA: out} if worth else {}, {AFTER: step.after.id})

    return store.memo.once(STAGE, step.inputs(), produce)[0]


def _makes(before: Path, delta: Path, after: Path, again: Path) -> bool:
    """Whether a delta gives the later file here: not if another version of the library wrote that."""
    with PassageFile(after) as file:
        rows = file.n_rows
    passage_delta.apply_delta(before, delta, rows, again)
    return digest_file(again) == digest_file(after)


def offered(store: Store, step: Step) -> BlobRef | None:
    """Return the delta of a step; None if there is none for this version of the library.

    Raises:
        StoreError: the store cannot be read.
    """
    record = store.memo.get(STAGE, Memo.key(step.inputs()))
    found = record.outputs.get(_DELTA) if record else None
    return found if found and found.size <= _WORTH * (step.head or step.after.size) else None


def renewed(store: Store, before: Snapshot, after: Content, path: str, out: Path) -> int | None:
    """Write a passage file of a snapshot, made of the one that an earlier pull left here and a delta.

    Returns:
        The bytes fetched; None if it was not written, for any reason but a full disk: then fetch the file.

    Raises:
        OSError: `out` cannot be written.
    """
    rows = {passages_path(part.name): part.rows for part in after.parts}
    earlier, later = before.manifest.content.files.get(path), after.files[path]
    if earlier in (None, later) or path not in rows:
        return None
    try:
        delta = offered(store, Step(later, earlier))
        if delta is None:
            return None
        copy = out.with_name("delta")
        store.blobs.fetch(delta, copy)
        passage_delta.apply_delta(before.path(path), copy, rows[path], out)
    except BookwheelError:  # what is wrong with the store itself is told when the file is fetched
        return None
    return delta.size


def unpacked(store: Store, step: Step, out: Path) -> int | None:
    """Write the bytes of an index that come before its vectors, if they are in the store packed.

    Returns:
        The bytes fetched; None if it was not written, as in `renewed`.

    Raises:
        OSError: `out` cannot be written.
    """
    try:
        delta = offered(store, step) if step.head >= _HEAD else None
        if delta is None:
            return None
        copy = out.with_name("packed")
        store.blobs.fetch(delta, copy)
        packed.unpack(copy, step.head, out)
    except BookwheelError:
        return None
    return delta.size
