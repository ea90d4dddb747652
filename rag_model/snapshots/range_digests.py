"""Digest the blocks of a snapshot's large files, so that reads of their ranges can be verified.

One task per file reads the file once, and its result is recorded, so a rebuild reads only new
files. See `store.versions.ranges` for the format.
"""

import base64
import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rag_model.corpus.passages import PassageFile
from rag_model.corpus.ranged_passages import list_cuts
from rag_model.digest import canonical_json
from rag_model.index.files.vectors import build_row_outline
from rag_model.index.kind import RangedKind, get_kind_of_entry
from rag_model.ranges import DIGEST_BYTES, digest_blocks, digest_ranges
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.recorded_tasks import OnProgress, RecordedTask, TaskRunner, run_tasks
from rag_model.store.store import Store
from rag_model.store.versions.manifest import EMBEDDINGS, RANGE_DIGESTS, RANGE_TABLE, Content, file_kind
from rag_model.store.versions.ranges import (
    BOUNDS_VERSION,
    DIGEST_PAGE_BYTES,
    VERSION,
    WHOLE_BYTES,
    get_layout,
)

# Bytes of a block of passages or vectors; few, because a search reads single vectors and parts of
# row groups.
_ROW_BLOCK_BYTES = 4 << 10
_MIN_ROW_FILE_BYTES = 128 << 10  # a smaller file is read as a whole, with one request
_DIGESTED_BYTES_PER_SECOND = 5e8
_PASSAGES_ENTRY = '{"kind":"passages"}'  # value of `DigestTask.entry` for a file of passages


@dataclass(frozen=True, slots=True)
class DigestTask(RecordedTask):
    """Computes the digests of a file's blocks, and the file's outline."""

    file: BlobRef
    block: int  # bytes of a block
    # manifest entry of an index as canonical JSON, `_PASSAGES_ENTRY`, or empty for vectors
    entry: str = ""

    stage: ClassVar[str] = "ranges"
    CODE: ClassVar[int] = 5

    def inputs(self) -> dict[str, Any]:
        """Return the file, the block size and the kind of index."""
        kind = json.loads(self.entry).get("kind") if self.entry else None
        return {"file": self.file.id, "block": self.block, "kind": kind, "code": self.CODE}

    @property
    def target(self) -> BlobRef:
        """The file; `gc` keeps the file's digests as long as a snapshot has the file."""
        return self.file

    def compute(self, store: Store) -> Any:
        """Return the digests in Base64, and the outline."""
        path = store.blobs.get_local_path(self.file)
        outline = self._build_outline(path)
        layout = get_layout({"block": self.block, "outline": outline}, self.file.size)
        block_bounds = layout.get_starts(np.arange(layout.count + 1))
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as file_map,
            memoryview(file_map) as file_view,
        ):
            digests = digest_ranges(file_view, block_bounds.tolist())
        return {"digests": base64.b64encode(digests).decode(), "outline": outline}

    def _build_outline(self, path: Path) -> Any:
        if self.entry == _PASSAGES_ENTRY:
            with PassageFile(path) as file:
                outline, columns = file.build_outline(), file.schema.names
            cuts = list_cuts(path, columns, outline["ranges"]) if outline else []
            return outline | {"columns": columns, "cuts": cuts} if outline and cuts else outline
        if not self.entry:
            return build_row_outline(path)
        kind = get_kind_of_entry(json.loads(self.entry))
        return kind.build_outline(path) if isinstance(kind, RangedKind) else None

    def estimate_seconds(self) -> float:
        """Return the seconds to read and hash the file."""
        return self.file.size / _DIGESTED_BYTES_PER_SECOND


def list_range_tasks(content: Content, min_bytes: int = WHOLE_BYTES + 1) -> dict[str, DigestTask]:
    """Return, by path, a task for each file that has at least `min_bytes` and is read by ranges.

    If there are such files, smaller files of passages and vectors, such as those of the last part,
    also get tasks. Without digests of its blocks, a search would have to read a file as a whole.
    """
    tasks, min_row_bytes = {}, min(min_bytes, _MIN_ROW_FILE_BYTES)
    for path, blob in sorted(content.files.items()):
        if blob.size >= min_row_bytes and file_kind(path) == "passages":
            tasks[path] = DigestTask(blob, _ROW_BLOCK_BYTES, _PASSAGES_ENTRY)
        elif blob.size >= min_row_bytes and file_kind(path) == EMBEDDINGS:
            tasks[path] = DigestTask(blob, _ROW_BLOCK_BYTES)
    for name, entry in sorted(content.indexes.items()):
        path = content.index_file(name)
        file, kind = content.files.get(path), get_kind_of_entry(entry)
        if file is not None and file.size >= min_bytes and isinstance(kind, RangedKind):
            tasks[path] = DigestTask(file, kind.block_bytes, canonical_json(dict(entry)).decode())
    return tasks if any(task.file.size >= min_bytes for task in tasks.values()) else {}


def add_range_digests(
    store: Store,
    content: Content,
    tasks: Mapping[str, DigestTask],
    runner: TaskRunner,
    on_progress: OnProgress = lambda _, __: None,
) -> Content:
    """Return the content with digests of the blocks of its large files.

    Raises:
        BookwheelError: a file is missing or damaged, or the store cannot be written.
    """
    files = {path: blob for path, blob in content.files.items() if path not in (RANGE_DIGESTS, RANGE_TABLE)}
    if tasks:
        digests, file_entries = bytearray(), dict[str, Any]()
        results = run_tasks(store, list(tasks.values()), runner, on_progress)
        for (path, task), result in zip(tasks.items(), results, strict=True):
            has_outline = result["outline"] is not None
            if task.entry not in ("", _PASSAGES_ENTRY) and not has_outline:
                continue
            outline_field = {"outline": result["outline"]} if has_outline else {}
            file_entries[path] = {"block": task.block, "first": len(digests) // DIGEST_BYTES} | outline_field
            digests += base64.b64decode(result["digests"])
        page_digests = base64.b64encode(digest_blocks(bytes(digests), DIGEST_PAGE_BYTES)).decode()
        has_bounds = any("bounds" in file_entry.get("outline", {}) for file_entry in file_entries.values())
        table_version = BOUNDS_VERSION if has_bounds else VERSION
        range_table = {"version": table_version, "files": file_entries, "pages": page_digests}
        files[RANGE_DIGESTS] = store.blobs.put_bytes(bytes(digests))
        files[RANGE_TABLE] = store.blobs.put_bytes(canonical_json(range_table))
    return replace(content, files=files)
