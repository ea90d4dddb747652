"""Files that end in one vector for each passage, in row order, so that two snapshots can be compared row by row.

```
embeddings/part-00042.npy    a header, then the vectors of the part
index/hnsw.faiss             a graph, then the vectors of all parts again, as float32 or (`SQfp16`) float16
index/exact.faiss            a header, then the same
```
The offsets of the rows follow from the manifest alone: they are the last bytes of the file. The entry of such an
index gives the bytes of a row as `row_bytes`; in entries of format 1 they follow from the factory.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rag_model.errors import StoreError
from rag_model.partition import Partition, Rows
from rag_model.store.versions.manifest import Content, PartEntry
from rag_model.store.versions.paths import EMBEDDINGS, embeddings_path
from rag_model.store.versions.snapshot import Snapshot

_NPY_HEAD = 128  # bytes of a `.npy` header of two dimensions, which numpy pads
_ENDS_IN_VECTORS = re.compile(r"Flat|HNSW\d+(?:[_,](?:Flat|(SQfp16)))?")  # faiss factories
_LONGEST = 1 << 20  # components of a vector


@dataclass(frozen=True, slots=True)
class Table:
    """The offsets of the rows in such a file."""

    over: str  # the representation that the vectors belong to
    head: int  # bytes before the first row
    width: int  # bytes of a row
    parts: tuple[PartEntry, ...]  # the parts of the vectors' passages, in row order

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(part.rows for part in self.parts)


def convertible(before: int, after: int) -> bool:
    """Whether rows of `before` bytes can give rows of `after`: unchanged, or converted between float16 and float32."""
    return after in {before, 2 * before} or before == 2 * after


def tables_of(content: Content) -> dict[str, Table]:
    """Return the files of a snapshot that end in vectors, by path: first the embeddings, in row order."""
    found = {}
    for over in dict.fromkeys([EMBEDDINGS, *content.representations]):
        for part in content.parts:
            path = embeddings_path(part.name, over)
            if path in content.files and part.rows:
                width, rest = divmod(content.files[path].size - _NPY_HEAD, part.rows)
                if width > 0 and not rest:
                    found[path] = Table(over, _NPY_HEAD, width, (part,))
    for name, entry in content.indexes.items():
        path = content.index_file(name)
        if path in content.files and (width := _stored(entry)):
            head = content.files[path].size - content.n * width
            if head > 0:
                found[path] = Table(content.over(name), head, width, content.parts)
    return found


def _stored(entry: Mapping[str, Any]) -> int:
    """Return the bytes of each vector at the end of an index's file; 0 for an index that does not end in vectors."""
    if "kind" in entry:
        width = entry.get("row_bytes", 0)
        return width if type(width) is int and 0 < width <= 4 * _LONGEST else 0
    storage, d = _ENDS_IN_VECTORS.fullmatch(str(entry.get("factory"))), entry.get("d")
    if storage is None or type(d) is not int or not 0 < d < _LONGEST:
        return 0
    return (2 if storage[1] else 4) * d


class Vectors:
    """The vectors of a pulled snapshot by row: from its embeddings, else from an index that ends in vectors."""

    def __init__(self, arrays: list[NDArray[np.uint8]]) -> None:
        """Read rows from arrays of (m, width) bytes, in the order of the arrays."""
        self._arrays = arrays
        self._partition = Partition(map(len, arrays))
        self.width = arrays[0].shape[1]

    @classmethod
    def of(cls, snapshot: Snapshot, over: str = EMBEDDINGS) -> Self | None:
        """Map the vectors of a representation of a pulled snapshot; None if some of them are missing or damaged."""
        content = snapshot.manifest.content
        tables = {path: table for path, table in tables_of(content).items() if table.over == over}
        embeddings = [embeddings_path(part.name, over) for part in content.parts if part.rows]
        for paths in (embeddings, *([content.index_file(name)] for name in content.indexes)):
            with suppress(StoreError, OSError):
                if paths and set(paths) <= set(tables) and len({tables[path].width for path in paths}) == 1:
                    return cls([_mapped(snapshot, path, tables[path]) for path in paths])
        return None

    def take(self, rows: Rows, width: int) -> bytes:
        """Return rows as bytes for a table whose rows have `width` bytes, converted to the other float if necessary."""
        taken = np.empty((len(rows), self.width), np.uint8)
        order = np.argsort(rows, kind="stable")
        for place, span, local in self._partition.split(rows[order]):
            taken[order[span]] = self._arrays[place][local]
        if width == self.width:
            return taken.tobytes()
        before, after = ("<f2", "<f4") if width > self.width else ("<f4", "<f2")
        return taken.view(before).astype(after).tobytes()


def _mapped(snapshot: Snapshot, path: str, table: Table) -> NDArray[np.uint8]:
    return np.memmap(snapshot.path(path), np.uint8, "r", table.head, (table.rows, table.width))
