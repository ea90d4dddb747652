"""A snapshot for reading: passages by row, vectors by part, files by path, from a store or from a pulled folder.

A reader keeps the snapshot that it opened, while refs move and new snapshots are pulled.
"""

import json
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rag_model.corpus.passages import PASSAGE_SCHEMA, PassageFile
from rag_model.corpus.records import Passage
from rag_model.errors import InputError, StoreError, reason
from rag_model.npy import map_array
from rag_model.partition import Partition
from rag_model.store.objects.trees import linked_tree
from rag_model.store.pulling.prune import hold
from rag_model.store.pulling.pulled import CURRENT, MANIFEST, mapped_copy, mapped_identity, stamps_of
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Manifest, PartEntry
from rag_model.store.versions.mapped import MappedPassages
from rag_model.store.versions.paths import EMBEDDINGS, SPARSE, TOKENS, embeddings_path, passages_path
from rag_model.store.versions.signatures import Carried, Trust

_OPENINGS = 5  # tries to open the current snapshot: a pull may replace and delete it meanwhile
_OPEN_PARTS = 64  # passage files kept open, so that their footers are read once


class Snapshot:
    """One immutable version of the corpus with its vectors and indexes. Safe to share among threads."""

    def __init__(
        self,
        manifest: Manifest,
        path: Callable[[str], Path],
        source: Callable[[str], Path | IO[bytes]],
        where: str | Path,
        mapped: Callable[[str], Path | None] = lambda file: None,
        at_once: int = 1,
    ) -> None:
        """Read files through `path` (a file's local path) and `source` (what Parquet is read from).

        `mapped` returns the memory-mapped copy of a passage file, if there is one. `at_once` is how many files are
        worth reading at a time: many on an object store, where that is mostly waiting, and one on this machine.

        Use `Snapshot.open`, `from_store` or `from_folder`.
        """
        self.manifest = manifest
        self.id = manifest.id
        self.where = where  # the store's URL, or the pulled folder
        self.at_once = at_once
        self._path = path
        self._source = source
        self._mapped = mapped
        self._partition = Partition(part.rows for part in self.parts)
        self._readers: OrderedDict[str, PassageFile | MappedPassages] = OrderedDict()
        self._lock = threading.Lock()
        self._release: Callable[[], Any] = lambda: None  # releases the lock on a pulled folder

    @classmethod
    def open(cls, url: str, name: str = "latest") -> "Snapshot":
        """Open a snapshot from a store, without a pull: `name` is a ref, `ref@number`, an id or a unique prefix.

        Raises:
            StoreError: there is no such store or snapshot, or its manifest is damaged.
        """
        return cls.from_store(Store.open(url), name)

    @classmethod
    def from_store(cls, store: Store, name: str = "latest") -> "Snapshot":
        """Open a snapshot of an open store; its publisher is checked if a trust file is given."""
        return cls.of(store, store.snapshots.get(store.snapshots.trusted(name)))

    @classmethod
    def of(cls, store: Store, manifest: Manifest) -> "Snapshot":
        """Open the snapshot of a manifest, published or not, with its blobs in `store`."""
        files, blobs = manifest.content.files, store.blobs

        def source(file: str) -> Path | IO[bytes]:
            return blobs.local(files[file]) if store.files.is_local else blobs.open(files[file])

        return cls(manifest, lambda file: blobs.local(files[file]), source, store.url, at_once=store.files.at_once)

    @classmethod
    def from_folder(cls, folder: Path | str) -> "Snapshot":
        """Open the snapshot that was pulled to `folder` last; or `folder` is one snapshot's own folder in it.

        A file that was written to since it was verified is hashed before it is read. No pull deletes the snapshot
        until it is closed.

        Raises:
            StoreError: nothing was pulled there, or the manifest is damaged.
            RefusedError: a trust file is given, and the snapshot was pulled without a signature by a key of it.
        """
        root, data, lock = _held_manifest(Path(folder))
        manifest = Manifest.from_bytes(data)
        if trust := Trust.given():
            published = f"snapshots/{manifest.id}.json"
            trust.check(Carried(root), published, json.loads(data), f"snapshot {manifest.id[:12]} in {root}")
        stamps = stamps_of(root.parent)

        def path(file: str) -> Path:
            local, ref = root / file, manifest.content.files[file]
            if not local.is_file():
                raise StoreError(f"{file} was not pulled to {root}: pull again, and include it")
            if local.stat().st_size != ref.size:
                raise StoreError(f"{local} is damaged: {local.stat().st_size} bytes instead of {ref.size}; pull again")
            if not stamps.sound(local, ref.id):
                raise StoreError(f"{local} is damaged: its bytes do not match blob {ref.id}; pull again")
            return local

        def mapped(file: str) -> Path | None:
            ref = manifest.content.files[file]
            copy = mapped_copy(root.parent, ref)
            return copy if copy.is_file() and stamps.holds(copy, mapped_identity(ref)) else None

        snapshot = cls(manifest, path, path, root, mapped)
        if lock is not None:
            snapshot._release = weakref.finalize(snapshot, os.close, lock)
        return snapshot

    @property
    def n(self) -> int:
        """The number of passages."""
        return self._partition.n

    @property
    def parts(self) -> tuple[PartEntry, ...]:
        """The parts in row order."""
        return self.manifest.content.parts

    @property
    def space(self) -> Mapping[str, Any] | None:
        """The encoder space of the representation `embeddings`; None if the snapshot has no such vectors."""
        return self.manifest.content.space

    @property
    def dim(self) -> int:
        """The number of components of a vector of the representation `embeddings`; see `dim_of`."""
        return self.dim_of(EMBEDDINGS)

    def dim_of(self, representation: str) -> int:
        """Return the number of components of a vector of a representation.

        Raises:
            StoreError: the snapshot has no such vectors.
        """
        content = self.manifest.content
        if content.kind_of(representation) in (TOKENS, SPARSE):
            return int((content.space_of(representation) or {})["dim"])
        for name, index in content.indexes.items():
            if content.over(name) == representation and isinstance(index.get("d"), int):
                return int(index["d"])
        for part in self.parts:
            return int(self.embeddings(part.name, representation).shape[1])
        raise StoreError(f"snapshot {self.id[:12]} has no vectors")

    def path(self, file: str) -> Path:
        """Return a local path to read a file of the manifest from; a remote one is copied and verified first.

        Raises:
            StoreError: the snapshot has no such file, or it is missing or damaged.
        """
        return self._path(self._known(file))

    def folder(self, prefix: str) -> Path:
        """Return a local folder with the files below `prefix` under their own names, as model loaders want.

        >>> snapshot.folder("encoder/question")  # doctest: +SKIP
        """
        below = [file for file in self.manifest.content.files if file.startswith(f"{prefix}/")]
        if not below:
            raise StoreError(f"snapshot {self.id[:12]} has no files below {prefix}/")
        paths = {file.removeprefix(f"{prefix}/"): self.path(file) for file in below}
        return self.where / prefix if isinstance(self.where, Path) else linked_tree(paths)

    def row_files(self, representation: str) -> list[Path]:
        """Return local paths of the files with a representation's rows, one for each part, in row order.

        Raises:
            StoreError: the snapshot has no such representation, or a file is missing or damaged.
        """
        content = self.manifest.content
        return [self.path(content.rows_path(representation, part.name)) for part in self.parts]

    def embeddings(self, part: str, representation: str = EMBEDDINGS) -> NDArray[np.floating[Any]]:
        """Return a part's vectors, memory-mapped: (rows, dim), float16 or float32, row i = row i of the part.

        Raises:
            StoreError: the file is missing, is not a plain array, or its number of rows is not the part's.
        """
        file = embeddings_path(part, representation)
        try:
            vectors: NDArray[np.floating[Any]] = map_array(self.path(file))
        except ValueError as broken:
            raise StoreError(f"{file} of snapshot {self.id[:12]} is damaged: {broken}") from broken
        rows = next((entry.rows for entry in self.parts if entry.name == part), None)
        if vectors.ndim != 2 or vectors.shape[0] != rows:
            raise StoreError(f"{file} of snapshot {self.id[:12]} has shape {vectors.shape} for {rows} passages")
        return vectors

    def passages(self, rows: Sequence[int]) -> list[Passage]:
        """Return the passages of global rows (0 <= row < n) in the order asked; reads only their row groups.

        Raises:
            IndexError: a row lies outside the snapshot.
            StoreError: a passage file is missing or damaged.
        """
        asked = np.asarray(rows, dtype=np.int64)
        if ((asked < 0) | (asked >= self.n)).any():
            raise IndexError(f"a row of {asked.tolist()} lies outside the {self.n} passages of snapshot {self.id[:12]}")
        wanted, found = np.unique(asked), dict[int, Passage]()
        for place, span, local in self._partition.split(wanted):
            found.update(zip(wanted[span].tolist(), self._rows(self.parts[place], local.tolist()), strict=True))
        return [found[row] for row in asked.tolist()]

    def passage_file(self, part: str) -> PassageFile:
        """Open a part's passage file to stream it; the caller closes it."""
        return PassageFile(self._source(self._known(passages_path(part))))

    def batches(self, part: str, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield columns of a part's passages in row order, at most a row group at a time; `names` as in the schema.

        Raises:
            StoreError: the passage file is missing or damaged.
        """
        with self._reading(part), self.passage_file(part) as file:
            yield from file.iter_batches(names)

    def columns(self, part: str, names: Sequence[str]) -> pa.Table:
        """Return columns of all passages of a part, in row order and in memory; `names` in `PASSAGE_SCHEMA`'s order.

        Raises:
            StoreError: the passage file is missing or damaged.
        """
        schema = pa.schema([PASSAGE_SCHEMA.field(name) for name in names])
        return pa.Table.from_batches(self.batches(part, names), schema)

    def close(self) -> None:
        """Close the files that were opened."""
        with self._lock:
            while self._readers:
                self._readers.popitem()[1].close()
        self._release()

    def __enter__(self) -> "Snapshot":
        """Close on leaving."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the files that were opened."""
        self.close()

    def _rows(self, part: PartEntry, rows: list[int]) -> list[Passage]:
        with self._lock:  # a Parquet reader has one position, so threads take turns
            reader = self._readers.pop(part.name, None) or self._checked(part)
            self._readers[part.name] = reader
            if len(self._readers) > _OPEN_PARTS:
                self._readers.popitem(last=False)[1].close()
            with self._reading(part.name):
                return reader.rows(rows)

    @contextmanager
    def _reading(self, part: str) -> Iterator[None]:
        try:
            yield
        except (InputError, OSError, ValueError) as broken:
            sentence = f"cannot read the passages of {part} in {self.where} ({reason(broken)}): run `verify`"
            raise StoreError(sentence) from broken

    def _checked(self, part: PartEntry) -> PassageFile | MappedPassages:
        copy = self._mapped(self._known(passages_path(part.name)))
        reader = self.passage_file(part.name) if copy is None else MappedPassages(copy)
        if reader.n_rows != part.rows:
            raise StoreError(f"the passages of {part.name} in {self.where} are damaged: {reader.n_rows} rows")
        return reader

    def _known(self, file: str) -> str:
        if file not in self.manifest.content.files:
            raise StoreError(f"snapshot {self.id[:12]} in {self.where} has no file {file}")
        return file


def _held_manifest(folder: Path) -> tuple[Path, bytes, int | None]:
    """Return the folder of the snapshot that was pulled last, its manifest, and the lock that keeps it from pruning."""
    for _ in range(_OPENINGS):
        with suppress(OSError):
            return _hold(folder)
    try:
        return _hold(folder)
    except OSError as missing:
        raise StoreError(f"there is no pulled snapshot in {folder}: pull one there first") from missing


def _hold(folder: Path) -> tuple[Path, bytes, int | None]:
    root = (folder / CURRENT if (folder / CURRENT).exists() else folder).resolve()
    lock = hold(root / MANIFEST)
    try:
        return root, (root / MANIFEST).read_bytes(), lock
    except OSError:
        if lock is not None:
            os.close(lock)
        raise
