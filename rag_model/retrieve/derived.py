"""Index files that a puller makes itself, of an earlier snapshot's file and the passages, in place of fetching them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from rag_model.errors import BookwheelError
from rag_model.index.deriving import DerivingKind
from rag_model.index.files.engine import Rows
from rag_model.index.registry import kind_named
from rag_model.partition import Partition
from rag_model.store.versions.snapshot import Snapshot


def derive(before: Snapshot, after: Snapshot, path: str, kept: Callable[[], Rows], out: Path) -> bool:
    """Write an index file of a snapshot, if its kind can make it of an earlier snapshot's file.

    Args:
        before: the snapshot that was pulled last.
        after: the one that is being pulled; its passages are there.
        path: of the file, in `after`.
        kept: gives the earlier row of each passage, (n,); -1: it was not there.
        out: what is written.

    Returns:
        Whether it was written. What is missing or damaged is no error: the file can be fetched.
    """
    old, new = before.manifest.content, after.manifest.content
    name = next((name for name in new.indexes if new.index_file(name) == path), None)
    if name is None or name not in old.indexes or "kind" not in new.indexes[name]:
        return False
    entries = old.indexes[name], new.indexes[name]
    try:
        kind = kind_named(entries[1]["kind"])
        if not isinstance(kind, DerivingKind) or entries[0].get("kind") != kind.name:
            return False
        return kind.derive(*entries, before.path(old.index_file(name)), kept(), _texts(after), out) is not None
    except BookwheelError:
        return False


def _texts(snapshot: Snapshot) -> Callable[[Rows], Iterator[pa.RecordBatch]]:
    """Return what yields title and text of the passages of ascending rows."""

    def texts(rows: Rows) -> Iterator[pa.RecordBatch]:
        for place, _, local in Partition(part.rows for part in snapshot.parts).split(rows):
            with snapshot.passage_file(snapshot.parts[place].name) as file:
                yield from file.iter_chosen(local.tolist(), ["title", "text"])

    return texts
