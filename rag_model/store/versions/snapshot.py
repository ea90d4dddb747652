"""Open a snapshot for reading, from a store or from a pulled folder, and lease it.

A `Snapshot` returns passages by row, vectors by part and files by path. The snapshot remains
readable while refs move and new snapshots are pulled.
"""

import asyncio
import json
import os
import secrets
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rag_model.arrays import RowPartition, map_npy
from rag_model.corpus.passages import FULL_SCHEMA, PAGE_HEADER_BYTES, DecodedCache, PassageFile
from rag_model.corpus.ranged_passages import RangedPassages, has_cuts
from rag_model.corpus.records import CATEGORY_SEPARATOR, Passage
from rag_model.errors import InputError, StoreError, UsageError, format_error
from rag_model.store.objects.cache import build_link_tree
from rag_model.store.objects.intents import LEASE_PREFIX
from rag_model.store.pulling.folder import (
    CURRENT,
    MANIFEST,
    lock_manifest,
    mapped_copy_identity,
    mapped_copy_path,
    open_folder_stamps,
)
from rag_model.store.store import Store
from rag_model.store.versions.manifest import (
    EMBEDDINGS,
    SPARSE,
    TOKENS,
    Manifest,
    PartEntry,
    embeddings_path,
    passages_path,
)
from rag_model.store.versions.mapped import MappedPassages
from rag_model.store.versions.ranges import SnapshotRanges
from rag_model.store.versions.signatures import PulledSignatures, TrustedKeys

PassageReader = PassageFile | MappedPassages | RangedPassages
# number of tries, because a pull may replace and delete the snapshot that is being opened
_MAX_OPEN_ATTEMPTS = 5
# bytes that Arrow reads at the end of a file; a footer has about 1.2 bytes per row
_FOOTER_BYTES = 64 << 10
_MAX_MASKS = 8  # maximum number of cached results of `match_rows`, with one byte per passage each
# maximum bytes of cached decoded row groups: about 40 groups of 1,024 passages
_GROUP_CACHE_BYTES = 32 << 20
_PASSAGE_CACHE_BYTES = 16 << 20  # maximum bytes of cached passages that were read by ranges
_PASSAGE_OBJECT_BYTES = 1200  # bytes of a passage in memory, without its text
# maximum number of passage files that are kept open, so that their footers are read once
_MAX_OPEN_PARTS = 64


class Snapshot:
    """One immutable version of the corpus with its vectors and indexes. Thread-safe."""

    def __init__(
        self,
        manifest: Manifest,
        path: Callable[[str], Path],
        source: Callable[[str], Path | IO[bytes]],
        location: str | Path,
        mapped_copy: Callable[[str], Path | None] = lambda file: None,
        concurrency: int = 1,
        store: Store | None = None,
        ranges: SnapshotRanges | None = None,
    ) -> None:
        """Create a snapshot that reads files through the functions `path`, which returns a local
        path, and `source`, which returns a path or a file object.

        `mapped_copy` returns the path of a passage file's memory-mapped copy, if there is one.
        `concurrency` is the number of files to read at a time: many from an object store, where
        most time is latency, and one from a local disk. `store` is the store of the files, or None
        if they were pulled. `ranges` reads verified ranges of files in the store; without it, files
        are copied first. Callers use `Snapshot.open`, `from_store` or `from_folder` instead.
        """
        self.manifest = manifest
        self.id = manifest.id
        self.location = location  # the store's URL, or the pulled folder
        self.concurrency = concurrency
        self.ranges = ranges
        self._store = store
        self._path = path
        self._source = source
        self._mapped_copy = mapped_copy
        self._partition = RowPartition(part.rows for part in self.parts)
        self._readers: OrderedDict[str, PassageReader] = OrderedDict()
        # decoded row groups are cached, because decoding a group takes longer than a search
        self._group_cache = DecodedCache(_GROUP_CACHE_BYTES)
        self._passage_cache = DecodedCache(_PASSAGE_CACHE_BYTES)
        self._lock = threading.Lock()
        self._masks: dict[tuple[str, tuple[str, ...]], NDArray[np.bool_]] = {}
        self._release: Callable[[], Any] = lambda: None  # releases the lock on a pulled folder

    @classmethod
    def open(
        cls, url: str, name: str = "latest", *, by_ranges: bool = False, cache_bytes: int | None = None
    ) -> "Snapshot":
        """Open a snapshot of a store by ref, `ref@number`, id or unique prefix, without a pull.

        `by_ranges` and `cache_bytes` have the same meaning as in `from_manifest`.

        Raises:
            StoreError: there is no such store or snapshot, or its manifest is damaged.
        """
        store = Store.open(url)
        manifest = store.snapshots.get(store.snapshots.resolve_trusted(name))
        return cls.from_manifest(store, manifest, by_ranges=by_ranges, cache_bytes=cache_bytes)

    @classmethod
    def from_store(cls, store: Store, name: str = "latest") -> "Snapshot":
        """Open a snapshot of an open store; its signature is checked if a trust file is given."""
        return cls.from_manifest(store, store.snapshots.get(store.snapshots.resolve_trusted(name)))

    @classmethod
    def from_manifest(
        cls, store: Store, manifest: Manifest, *, by_ranges: bool = False, cache_bytes: int | None = None
    ) -> "Snapshot":
        """Open the snapshot of a manifest, published or not, whose blobs are in `store`.

        Args:
            store: store of the files.
            manifest: manifest of the snapshot.
            by_ranges: read verified ranges of passages, vectors and indexes in an object store, if
                the snapshot has digests of them. Ranges are fast for few queries; for many, it is
                faster to copy the files first.
            cache_bytes: maximum size of the cache of ranges; by default that of the blobs' cache.

        Raises:
            StoreError: the digests of ranges are missing or damaged.
        """
        files, blob_store = manifest.content.files, store.blobs
        use_ranges = by_ranges and not store.files.is_local
        ranges = SnapshotRanges.open(store, manifest, cache_bytes) if use_ranges else None

        def source(file: str) -> Path | IO[bytes]:
            if ranges is not None and ranges.covers(file):
                return ranges.open_file(file)
            return blob_store.get_local_path(files[file]) if store.files.is_local else blob_store.open(files[file])

        return cls(
            manifest,
            lambda file: blob_store.get_local_path(files[file]),
            source,
            store.url,
            concurrency=store.files.concurrency,
            store=store,
            ranges=ranges,
        )

    @classmethod
    def from_folder(cls, folder: Path | str) -> "Snapshot":
        """Open the snapshot that was last pulled to `folder`, or the one in `folder` itself.

        A file that was changed after its verification is hashed before it is read. No pull deletes
        the snapshot until it is closed.

        Raises:
            StoreError: there is no pulled snapshot, or the manifest is damaged.
            RefusedError: a trust file is given, and no key in it signed the pulled snapshot.
        """
        root, manifest_bytes, lock_descriptor = _open_pulled(Path(folder))
        try:
            manifest = Manifest.from_bytes(manifest_bytes)
            if trusted_keys := TrustedKeys.from_environment():
                trusted_keys.check(
                    PulledSignatures(root),
                    f"snapshots/{manifest.id}.json",
                    json.loads(manifest_bytes),
                    f"snapshot {manifest.id[:12]} in {root}",
                )
            stamps = open_folder_stamps(root.parent)
        except BaseException:
            if lock_descriptor is not None:
                os.close(lock_descriptor)
            raise

        def path(file: str) -> Path:
            local_path, ref = root / file, manifest.content.files[file]
            if not local_path.is_file():
                raise StoreError(f"{file} was not pulled to {root}: pull again, and include it")
            if local_path.stat().st_size != ref.size:
                raise StoreError(
                    f"{local_path} is damaged: {local_path.stat().st_size} bytes instead of {ref.size}; pull again"
                )
            if not stamps.is_sound(local_path, ref.id):
                raise StoreError(f"{local_path} is damaged: its bytes do not match blob {ref.id}; pull again")
            return local_path

        def find_mapped_copy(file: str) -> Path | None:
            ref = manifest.content.files[file]
            copy = mapped_copy_path(root.parent, ref)
            return copy if copy.is_file() and stamps.has_valid_stamp(copy, mapped_copy_identity(ref)) else None

        snapshot = cls(manifest, path, path, root, find_mapped_copy)
        if lock_descriptor is not None:
            snapshot._release = weakref.finalize(snapshot, os.close, lock_descriptor)
        return snapshot

    @property
    def is_remote(self) -> bool:
        """Whether files are copied from an object store before they are read."""
        return self._store is not None and not self._store.files.is_local

    @property
    def store(self) -> Store:
        """The store of the snapshot.

        Raises:
            UsageError: the snapshot was pulled to a folder.
        """
        if self._store is None:
            raise UsageError(f"snapshot {self.id[:12]} in {self.location} was pulled: name its store instead")
        return self._store

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
        """The encoder space of the representation `embeddings`; None without such vectors."""
        return self.manifest.content.space

    @property
    def dim(self) -> int:
        """The dimension of the representation `embeddings`; see `dim_of`."""
        return self.dim_of(EMBEDDINGS)

    def dim_of(self, representation: str) -> int:
        """Return the dimension of a representation's vectors.

        Raises:
            StoreError: the snapshot has no such vectors.
        """
        content = self.manifest.content
        if content.kind_of(representation) in (TOKENS, SPARSE):
            return int((content.space_of(representation) or {})["dim"])
        for name, index_entry in content.indexes.items():
            if content.representation_of(name) == representation and isinstance(index_entry.get("d"), int):
                return int(index_entry["d"])
        if not self.parts:
            raise StoreError(f"snapshot {self.id[:12]} has no vectors")
        return int(self.embeddings(self.parts[0].name, representation).shape[1])

    def path(self, file: str) -> Path:
        """Return a local path of a file; a remote file is copied and verified first.

        Raises:
            StoreError: the snapshot has no such file, or the file is missing or damaged.
        """
        return self._path(self._check_file(file))

    def folder(self, prefix: str) -> Path:
        """Return a local folder with the files below `prefix` under their own names.

        >>> snapshot.folder("encoder/question")  # doctest: +SKIP
        """
        files = [file for file in self.manifest.content.files if file.startswith(f"{prefix}/")]
        if not files:
            raise StoreError(f"snapshot {self.id[:12]} has no files below {prefix}/")
        paths = {file.removeprefix(f"{prefix}/"): self.path(file) for file in files}
        return self.location / prefix if isinstance(self.location, Path) else build_link_tree(paths)

    def row_files(self, representation: str) -> list[Path]:
        """Return the local paths of a representation's row files, one for each part, in row order.

        Raises:
            StoreError: the snapshot has no such representation, or a file is missing or damaged.
        """
        content = self.manifest.content
        return [self.path(content.rows_path(representation, part.name)) for part in self.parts]

    def embeddings(self, part: str, representation: str = EMBEDDINGS) -> NDArray[np.floating[Any]]:
        """Map a part's vectors: (rows, dim), float16 or float32, aligned with the part's passages.

        Raises:
            StoreError: the file is missing, is not a plain array, or has another number of rows.
        """
        file = embeddings_path(part, representation)
        try:
            vectors: NDArray[np.floating[Any]] = map_npy(self.path(file))
        except ValueError as error:
            raise StoreError(f"{file} of snapshot {self.id[:12]} is damaged: {error}") from error
        n_rows = next((entry.rows for entry in self.parts if entry.name == part), None)
        if vectors.ndim != 2 or vectors.shape[0] != n_rows:
            raise StoreError(f"{file} of snapshot {self.id[:12]} has shape {vectors.shape} for {n_rows} passages")
        return vectors

    def open_file(self, file: str) -> IO[bytes]:
        """Open a file of the store for reads at any offset; the bytes are not verified.

        Raises:
            StoreError: the file is missing, or its size is wrong.
        """
        return self.store.blobs.open(self.manifest.content.files[self._check_file(file)])

    def read_range(self, file: str, start: int, end: int) -> bytes:
        """Return the unverified bytes [start, end) of a file of the store, or those up to its end.

        Raises:
            StoreError: the file is missing or cut short.
        """
        file_ref = self.manifest.content.files[self._check_file(file)]
        return self.store.blobs.read_range(file_ref, start, min(end, file_ref.size))

    def passages(self, rows: Sequence[int]) -> list[Passage]:
        """Return the passages of global rows (0 <= row < n), in the given order.

        Raises:
            IndexError: a row is outside the snapshot.
            StoreError: a passage file is missing or damaged.
        """
        requested_rows = np.asarray(rows, dtype=np.int64)
        if ((requested_rows < 0) | (requested_rows >= self.n)).any():
            raise IndexError(
                f"a row of {requested_rows.tolist()} is outside the {self.n} passages of snapshot {self.id[:12]}"
            )
        unique_rows, passages = np.unique(requested_rows), dict[int, Passage]()
        if self.ranges is not None:
            passages = self._find_cached_passages(unique_rows.tolist())
            unique_rows = unique_rows[[row not in passages for row in unique_rows.tolist()]]
            self._prefetch_passages(self.ranges, unique_rows)
        for part_number, row_slice, local_rows in self._partition.split(unique_rows):
            new_passages = self._read_rows(self.parts[part_number], local_rows.tolist())
            passages.update(zip(unique_rows[row_slice].tolist(), new_passages, strict=True))
        if self.ranges is not None:
            self._cache_passages({row: passages[row] for row in unique_rows.tolist()})
        return [passages[row] for row in requested_rows.tolist()]

    def passage_file(self, part: str) -> PassageFile:
        """Open a part's passage file; the caller closes it."""
        return PassageFile(self._source(self._check_file(passages_path(part))))

    def batches(self, part: str, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the columns `names` of a part's passages in row order, a row group at a time.

        Raises:
            StoreError: the passage file is missing or damaged.
        """
        with self._translate_errors(part), self.passage_file(part) as file:
            yield from file.iter_batches(names)

    def columns(self, part: str, names: Sequence[str]) -> pa.Table:
        """Read the columns `names` (in `FULL_SCHEMA`'s order) of all passages of a part.

        Raises:
            StoreError: the passage file is missing or damaged.
        """
        schema = pa.schema([FULL_SCHEMA.field(name) for name in names])
        return pa.Table.from_batches(self.batches(part, names), schema)

    def match_rows(self, field: str, values: tuple[str, ...]) -> NDArray[np.bool_]:
        """Return an (n,) mask of the rows that have one of these values in the column `field`.

        A title matches if it begins with a value; categories match if one of them equals a value.
        The last `_MAX_MASKS` results are cached, so that the column is not read again for equal
        values.

        Raises:
            StoreError: a passage file is missing or damaged.
        """
        mask_key = field, values
        cached_mask = self._masks.get(mask_key)
        if cached_mask is None:
            tables = (self.columns(part.name, [field]) for part in self.parts)
            part_masks = [_match_column(table[field], field, values) for table in tables]
            cached_mask = np.concatenate(part_masks) if part_masks else np.zeros(0, np.bool_)
            with self._lock:
                while len(self._masks) >= _MAX_MASKS:
                    del self._masks[next(iter(self._masks))]
                self._masks[mask_key] = cached_mask
        return cached_mask

    def close(self) -> None:
        """Close the files that were opened."""
        with self._lock:
            while self._readers:
                self._readers.popitem()[1].close()
            if self.ranges is not None:
                self.ranges.close()
        self._release()

    def __enter__(self) -> "Snapshot":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _find_cached_passages(self, row_numbers: Sequence[int]) -> dict[int, Passage]:
        """Return the cached passages among these rows; they are cached because decoding a part of a
        row group takes longer than a search.
        """
        with self._lock:
            cached_passages = ((row, self._passage_cache.find(row)) for row in row_numbers)
            return {row: passage for row, passage in cached_passages if passage is not None}

    def _cache_passages(self, passages: Mapping[int, Passage]) -> None:
        with self._lock:
            for row, passage in passages.items():
                self._passage_cache.add(row, passage, _PASSAGE_OBJECT_BYTES + sys.getsizeof(passage.text))

    def _prefetch_passages(self, ranges: SnapshotRanges, row_numbers: NDArray[np.int64]) -> None:
        """Load the ranges from which these rows are read, in one round of requests if possible.

        If the outline of a file has cuts, the ranges are parts of row groups. If the outline has
        only the row groups, the ranges are whole row groups and the footer. If the outline has
        neither, the footer is loaded first, because it locates the row groups, and a second round
        loads the row groups.
        """
        parts = [
            (self.parts[part_number], local_rows.tolist())
            for part_number, _, local_rows in self._partition.split(row_numbers)
            # Files that `ranges` does not cover are read without digests.
            if ranges.covers(passages_path(self.parts[part_number].name))
        ]
        byte_ranges, unlocated_parts = [], list[tuple[PartEntry, list[int]]]()
        for part, local_rows in parts:
            path, file_bytes = passages_path(part.name), self.manifest.content.files[passages_path(part.name)].size
            if has_cuts(ranges.get_outline(path)):
                with self._lock, self._translate_errors(part.name):
                    reader = self._take_reader(part)
                    if isinstance(reader, RangedPassages):
                        byte_ranges += [(path, *byte_range) for byte_range in reader.list_ranges(local_rows)]
                continue
            footer_start = max(0, file_bytes - max(_FOOTER_BYTES, 2 * part.rows))
            try:
                group_rows, group_ranges = ranges.get_outline(path)["rows"], ranges.get_outline(path)["ranges"]
                byte_ranges += [
                    (path, *group_ranges[group]) for group in sorted({row // group_rows for row in local_rows})
                ]
                # the footer begins after the last group
                footer_start = min(footer_start, max(0, group_ranges[-1][1] - PAGE_HEADER_BYTES))
            except (LookupError, TypeError, ValueError, ArithmeticError):
                # A damaged outline does no harm, because the footer locates the row groups too.
                unlocated_parts.append((part, local_rows))
            if part.name not in self._readers:
                byte_ranges.append((path, footer_start, file_bytes))
        ranges.prefetch(byte_ranges)
        byte_ranges = []
        for part, local_rows in unlocated_parts:
            with self._lock:
                reader = self._take_reader(part)
                if isinstance(reader, PassageFile):
                    path = passages_path(part.name)
                    byte_ranges += [(path, *byte_range) for byte_range in reader.list_ranges(local_rows)]
        if byte_ranges:
            ranges.prefetch(byte_ranges)

    def _take_reader(self, part: PartEntry) -> PassageReader:
        """Return the open reader of a part, and mark it as the last used one; the caller holds the
        lock.
        """
        reader = self._readers.pop(part.name, None) or self._open_reader(part)
        self._readers[part.name] = reader
        if len(self._readers) > _MAX_OPEN_PARTS:
            self._readers.popitem(last=False)[1].close()
        return reader

    def _read_rows(self, part: PartEntry, row_numbers: list[int]) -> list[Passage]:
        with self._lock:  # a Parquet reader has only one position, so one thread at a time may read
            reader = self._take_reader(part)
            with self._translate_errors(part.name):
                return reader.read_rows(row_numbers)

    @contextmanager
    def _translate_errors(self, part: str) -> Iterator[None]:
        try:
            yield
        except (InputError, OSError, ValueError) as error:
            message = f"cannot read the passages of {part} in {self.location} ({format_error(error)}): run `verify`"
            raise StoreError(message) from error

    def _open_reader(self, part: PartEntry) -> PassageReader:
        path = self._check_file(passages_path(part.name))
        copy_path = self._mapped_copy(path)
        outline: Any = None if self.ranges is None else self.ranges.get_outline(path)
        reader: PassageReader
        if copy_path is not None:
            reader = MappedPassages(copy_path)
        elif self.ranges is not None and has_cuts(outline):
            reader = RangedPassages(self.ranges.file(path), outline, part.rows, self._group_cache)
        else:
            reader = PassageFile(self._source(path), group_cache=self._group_cache)
        if reader.n_rows != part.rows:
            raise StoreError(f"the passages of {part.name} in {self.location} are damaged: {reader.n_rows} rows")
        return reader

    def _check_file(self, file: str) -> str:
        if file not in self.manifest.content.files:
            raise StoreError(f"snapshot {self.id[:12]} in {self.location} has no file {file}")
        return file


def resolve_pulled_folder(folder: Path) -> Path:
    """Return the folder of the snapshot that was last pulled to `folder`, or `folder` itself."""
    return (folder / CURRENT if (folder / CURRENT).exists() else folder).resolve()


def _open_pulled(folder: Path) -> tuple[Path, bytes, int | None]:
    """Return the folder of the last pulled snapshot, its manifest, and the lock that prevents its
    deletion.
    """
    for _ in range(_MAX_OPEN_ATTEMPTS):
        with suppress(OSError):
            return _open_and_lock(folder)
    try:
        return _open_and_lock(folder)
    except OSError as error:
        raise StoreError(f"there is no pulled snapshot in {folder}: pull one there first") from error


def _open_and_lock(folder: Path) -> tuple[Path, bytes, int | None]:
    root = resolve_pulled_folder(folder)
    lock_descriptor = lock_manifest(root / MANIFEST)
    try:
        return root, (root / MANIFEST).read_bytes(), lock_descriptor
    except OSError:
        if lock_descriptor is not None:
            os.close(lock_descriptor)
        raise


class SnapshotLease:
    """A lease on one snapshot at a time; `expire` and `gc` do not delete the files of a leased
    snapshot.

    The lease is an intent that names the manifest and every file of the snapshot; a thread renews
    it. So a reader can use the snapshot even if no ref names it any more. The snapshot can be
    deleted as soon as the reader holds another snapshot or ends.
    """

    def __init__(self, store: Store) -> None:
        """Create a lease that holds no snapshot yet."""
        # Closing the stack removes the intent.
        self._store, self._held_intent = store, ExitStack()
        # The finalizer releases the lease even if the process ends without `close`.
        self._finalizer = weakref.finalize(self, _release_lease, self._held_intent)

    def hold(self, snapshot: str) -> None:
        """Hold the snapshot with this full id, then release the previous one.

        Raises:
            StoreError: there is no such snapshot, or the store cannot be written; the previous
                snapshot is still held.
        """
        manifest = self._store.snapshots.get(snapshot)
        needed_paths = {
            self._store.snapshots.manifest_path(snapshot),
            *(file_ref.path for file_ref in manifest.content.files.values()),
        }
        held_intent = ExitStack()
        held_intent.enter_context(self._store.intents.hold(f"{LEASE_PREFIX}{secrets.token_hex(8)}", needed_paths))
        try:
            # The snapshot may have been deleted before the intent existed.
            self._store.snapshots.get(snapshot)
        except BaseException:
            held_intent.close()
            raise
        previous_intent, self._held_intent = self._held_intent, held_intent
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _release_lease, held_intent)
        previous_intent.close()

    def close(self) -> None:
        """Release the snapshot."""
        self._finalizer()


def _match_column(column: pa.ChunkedArray, field: str, values: Sequence[str]) -> NDArray[np.bool_]:
    """Return an (n,) mask of the rows that have one of the values; see `Snapshot.match_rows`."""
    if field == "title":
        matches = [pc.starts_with(column, value) for value in values]
    elif field == "categories":
        separator = CATEGORY_SEPARATOR
        delimited_column = pc.binary_join_element_wise("", column, "", separator)
        matches = [pc.match_substring(delimited_column, f"{separator}{value}{separator}") for value in values]
    else:
        matches = [pc.is_in(column, pa.array(values, pa.string()))]
    is_match: NDArray[np.bool_] = np.logical_or.reduce([match.to_numpy() for match in matches])
    return is_match


def _release_lease(held_intent: ExitStack) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        held_intent.close()
    # This thread runs an event loop, which may send the store's requests, so it must not wait.
    else:
        threading.Thread(target=held_intent.close, name="lease").start()
