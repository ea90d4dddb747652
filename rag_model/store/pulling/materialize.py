"""Materialize the files of a pull in a folder: verify existing copies, and write the others.

Each file has an ordered list of strategies (`_SnapshotUpdate.list_strategies`), from the one that
fetches the fewest bytes to a download of the whole file. If a strategy is not applicable, or its
result has the wrong digest, the next strategy is tried.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import NamedTuple

import numpy as np

from rag_model.arrays import Rows
from rag_model.atomic_write import TEMPORARY_PREFIX
from rag_model.digest import digest_file
from rag_model.errors import RefusedError, StoreError
from rag_model.store.objects.blobs import BlobRef, ChunkSource
from rag_model.store.pulling.deltas import find_delta, list_delta_steps, rebuild_file
from rag_model.store.pulling.folder import (
    blob_copy_path,
    mapped_copy_identity,
    mapped_copy_path,
    open_folder_stamps,
)
from rag_model.store.pulling.overlap import PulledVectors, RowOverlap, RowPatch, is_convertible, list_embedded_files
from rag_model.store.store import Store
from rag_model.store.versions.manifest import TEXT, Manifest, file_kind, passages_path
from rag_model.store.versions.mapped import write_mapped_copy
from rag_model.store.versions.snapshot import Snapshot

# A function that writes an index file from local files (`retrieve.indexes`), or returns False if
# that is not possible. Its arguments are the previous snapshot, the new snapshot, the path of the
# file in them, a function that returns the previous row of each passage, the delta with the
# weighted terms of new rows (or None), and the file to write.
DeriveIndex = Callable[[Snapshot, Snapshot, str, Callable[[], Rows], Path | None, Path], bool]
_BLOCK_BYTES = 1 << 20  # bytes that are read at a time
_THREADS = 4  # maximum number of files that are written at a time, each with 64 MiB in memory


def derive_nothing(
    previous: Snapshot,
    target: Snapshot,
    path: str,
    previous_rows: Callable[[], Rows],
    new_terms: Path | None,
    out: Path,
) -> bool:
    """Derive no index file, so that all index files are fetched."""
    return False


class PullProgress:
    """Counts the bytes that all threads have fetched; if one thread fails, all others stop.

    Partial files are kept. If `on_progress` raises an exception, all threads stop.
    """

    def __init__(self, total_bytes: int, on_progress: Callable[[int, int], None]) -> None:
        """Store `on_progress`, which is called with the number of bytes done and `total_bytes`."""
        self._done_bytes, self._total_bytes, self._on_progress, self._lock = 0, total_bytes, on_progress, Lock()
        self._failure: BaseException | None = None

    def __call__(self, size: int) -> None:
        """Count `size` more bytes.

        Raises:
            BaseException: the error of another thread that failed, or of `on_progress`.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure  # stops this thread too
            self._done_bytes += size
            with self.stop_on_failure():
                self._on_progress(min(self._done_bytes, self._total_bytes), self._total_bytes)

    def check(self) -> None:
        """Report the progress without new bytes; this is called while the store sends nothing."""
        self(0)

    @contextmanager
    def stop_on_failure(self) -> Iterator[None]:
        """Stop the other threads if the block fails."""
        try:
            yield
        except BaseException as failure:
            self._failure = self._failure or failure
            raise


class FetchResult(NamedTuple):
    """The result of a strategy, which may have fetched bytes even if it wrote no file."""

    is_written: bool
    fetched_bytes: int = 0


_NOT_APPLICABLE = FetchResult(is_written=False)
Strategy = Callable[[BlobRef, Path], FetchResult]  # writes a blob to a path


@dataclass(frozen=True, slots=True)
class Puller:
    """Materializes blobs in a folder of pulled versions."""

    store: Store
    dest: Path
    progress: PullProgress

    def materialize_all(self, blobs: Iterable[BlobRef], materialize: Callable[[BlobRef], int] | None = None) -> int:
        """Materialize blobs in threads, the largest first; return the number of bytes fetched.

        `materialize` materializes one blob; by default the whole blob is fetched.
        """
        with ThreadPoolExecutor(_THREADS) as pool, self.progress.stop_on_failure():
            largest_first = sorted(blobs, key=lambda ref: -ref.size)
            return sum(
                pool.map(
                    materialize or partial(self.materialize, strategies=[self.fetch_whole]),
                    largest_first,
                )
            )

    def materialize(self, ref: BlobRef, strategies: Iterable[Strategy]) -> int:
        """Verify the copy of a blob, or write it by the first strategy that succeeds.

        Returns the number of bytes fetched. The last strategy must write the blob or raise.
        """
        fetched_bytes = 0
        with self.progress.stop_on_failure():
            copy = blob_copy_path(self.dest, ref)
            if copy.is_file() and copy.stat().st_size == ref.size and digest_file(copy) == ref.id:
                self.progress(ref.size)
            else:
                for strategy in strategies:
                    fetch_result = strategy(ref, copy)
                    fetched_bytes += fetch_result.fetched_bytes
                    if fetch_result.is_written:
                        break
            open_folder_stamps(self.dest).record(copy, ref.id)
        return fetched_bytes

    def fetch_whole(self, ref: BlobRef, copy: Path) -> FetchResult:
        """Fetch the whole blob, as the last strategy."""
        self.store.blobs.fetch(ref, copy, self.progress)
        return FetchResult(is_written=True, fetched_bytes=ref.size)


def materialize_snapshot(
    puller: Puller,
    manifest: Manifest,
    files: dict[str, BlobRef],
    *,
    with_mapped_copies: bool,
    derive_index: DeriveIndex = derive_nothing,
) -> int:
    """Materialize the given files of a snapshot; return the number of bytes fetched.

    If another snapshot was pulled last, the passages are materialized first, because they determine
    which vectors are on the local disk. The indexes are last, because their vectors are copied from
    the embeddings. With `with_mapped_copies`, memory-mapped copies of the passages are written too.

    Raises:
        StoreError: a blob is missing or damaged.
        OSError: the folder cannot be written.
    """
    path_by_blob = {ref: path for path, ref in files.items()}
    passage_blobs = {ref for ref, path in path_by_blob.items() if file_kind(path) == "passages"}
    with _open_previous_snapshot(puller.dest) as previous:
        batches: list[Iterable[BlobRef]] = [path_by_blob]
        update = None
        if previous is not None and previous.id != manifest.id:
            update = _SnapshotUpdate(puller, manifest, path_by_blob, previous, derive_index)
            index_paths = {*map(manifest.content.index_file, manifest.content.indexes)}
            index_blobs = {ref for ref, path in path_by_blob.items() if path in index_paths}
            batches = [passage_blobs, path_by_blob.keys() - passage_blobs - index_blobs, index_blobs]

        def materialize(ref: BlobRef) -> int:
            fetched_bytes = puller.materialize(ref, update.list_strategies(ref) if update else [puller.fetch_whole])
            if with_mapped_copies and ref in passage_blobs:
                with puller.progress.stop_on_failure():
                    _write_mapped_copy(ref, puller.dest)
            return fetched_bytes

        return sum(puller.materialize_all(blobs, materialize) for blobs in batches)


class _SnapshotUpdate:
    """Writes the files of a snapshot by reusing files of the snapshot that was pulled before it."""

    def __init__(
        self,
        puller: Puller,
        manifest: Manifest,
        path_by_blob: Mapping[BlobRef, str],
        previous: Snapshot,
        derive_index: DeriveIndex,
    ) -> None:
        self._puller, self._path_by_blob, self._previous, self._derive_file = (
            puller,
            path_by_blob,
            previous,
            derive_index,
        )
        self._content = manifest.content
        self._index_paths = {self._content.index_file(name) for name in self._content.indexes}
        self._rows_by_path = {passages_path(part.name): part.rows for part in self._content.parts}
        self._steps_by_path = list_delta_steps(previous.manifest.content, self._content)
        self._embedded_tables = list_embedded_files(self._content)
        self._target = _open_incomplete_snapshot(manifest, puller.dest)
        self._overlap = RowOverlap.between(previous, self._target) or RowOverlap(previous, self._target, ())
        self._previous_vectors = {name: PulledVectors.open(previous, name) for name in self._overlap.representations}

    def list_strategies(self, ref: BlobRef) -> Sequence[Strategy]:
        """Return the strategies for a file, in the order in which they are tried."""
        path = self._path_by_blob[ref]
        if file_kind(path) == "passages":
            return [self._rebuild_from_delta, self._puller.fetch_whole]
        if path in self._index_paths:
            return [
                self._derive_index,
                self._rebuild_from_delta,
                self._copy_embeddings,
                self._copy_previous_vectors,
                self._puller.fetch_whole,
            ]
        return [self._copy_previous_vectors, self._puller.fetch_whole]

    def _derive_index(self, ref: BlobRef, copy: Path) -> FetchResult:
        """Derive an index from local files, such as a BM25 index from the passages.

        An index of weighted terms also needs the terms of new rows, which are fetched.
        """

        def derive(out: Path) -> int | None:
            path, previous_rows = self._path_by_blob[ref], self._overlap.find_previous_rows
            new_terms, fetched_bytes = self._fetch_new_terms(path, out.with_name("terms"))
            is_derived = self._derive_file(self._previous, self._target, path, previous_rows, new_terms, out)
            return fetched_bytes if is_derived else None

        return self._write_and_check(ref, copy, derive)

    def _fetch_new_terms(self, path: str, out: Path) -> tuple[Path | None, int]:
        """Fetch the weighted terms of an index's new rows; return their file, if there are any."""
        store = self._puller.store
        for step in self._steps_by_path.get(path, ()):
            if (
                step.representation != TEXT
                and self._derive_file is not derive_nothing
                and (delta := find_delta(store, step))
            ):
                store.blobs.fetch(delta, out)
                return out, delta.size
        return None, 0

    def _rebuild_from_delta(self, ref: BlobRef, copy: Path) -> FetchResult:
        """Rebuild a passage file or an index from the previous snapshot's file and a delta."""
        if any(step.head_bytes for step in self._steps_by_path.get(self._path_by_blob[ref], ())):
            return _NOT_APPLICABLE
        return self._write_and_check(ref, copy, partial(self._apply_delta, ref))

    def _apply_delta(self, ref: BlobRef, out: Path) -> int | None:
        path = self._path_by_blob[ref]
        get_base, steps = partial(self._previous.path, path), self._steps_by_path.get(path, ())
        return rebuild_file(self._puller.store, get_base, steps, self._rows_by_path.get(path, 0), out)

    def _copy_embeddings(self, ref: BlobRef, copy: Path) -> FetchResult:
        """Copy an index's vectors from the new embeddings, which are materialized before it."""
        table = self._embedded_tables.get(self._path_by_blob[ref])
        vectors = PulledVectors.open(self._target, table.representation) if table else None
        patch = RowPatch(table, np.arange(table.rows)) if table else None
        return self._patch_vectors(ref, copy, patch, vectors)

    def _copy_previous_vectors(self, ref: BlobRef, copy: Path) -> FetchResult:
        patch = self._overlap.find_patch(self._path_by_blob[ref])
        vectors = self._previous_vectors.get(patch.table.representation) if patch else None
        return self._patch_vectors(ref, copy, patch, vectors)

    def _patch_vectors(
        self, ref: BlobRef, copy: Path, patch: RowPatch | None, vectors: PulledVectors | None
    ) -> FetchResult:
        """Copy vectors from local files, and fetch the other bytes by range."""
        if not patch or not vectors or not is_convertible(vectors.row_bytes, patch.table.row_bytes):
            return _NOT_APPLICABLE
        with self._rebuild_head(ref, patch.table.head_bytes) as (extra_bytes, head_path):
            iter_chunks = partial(_iter_with_head, head_path, partial(patch.iter_chunks, vectors))
            if self._puller.store.blobs.assemble(ref, copy, iter_chunks, self._puller.progress):
                return FetchResult(is_written=True, fetched_bytes=patch.fetched_bytes + extra_bytes)
        return _NOT_APPLICABLE

    def _write_and_check(self, ref: BlobRef, copy: Path, write: Callable[[Path], int | None]) -> FetchResult:
        """Write a temporary file, and rename it to `copy` if it has the right digest.

        `write` returns the number of bytes fetched, or None if it is not applicable. A full disk
        also counts as not applicable, because later strategies need less space.
        """
        fetched_bytes = None
        with (
            suppress(OSError, StoreError),
            TemporaryDirectory(dir=self._puller.dest, prefix=TEMPORARY_PREFIX) as temporary_folder,
        ):
            temporary = Path(temporary_folder) / "file"
            fetched_bytes = None if copy.exists() else write(temporary)
            if fetched_bytes is not None and temporary.stat().st_size == ref.size:
                iter_chunks = partial(_iter_file, temporary)
                if self._puller.store.blobs.assemble(ref, copy, iter_chunks, self._puller.progress):
                    return FetchResult(is_written=True, fetched_bytes=fetched_bytes)
        return FetchResult(is_written=False, fetched_bytes=fetched_bytes or 0)

    @contextmanager
    def _rebuild_head(self, ref: BlobRef, head_bytes: int) -> Iterator[tuple[int, Path | None]]:
        """Yield (extra_bytes, file), where `file` has the first `head_bytes` bytes of a blob.

        `extra_bytes` is the size of the fetched delta minus `head_bytes`. If the store has no delta
        of these bytes, (0, None) is yielded.
        """
        with TemporaryDirectory(dir=self._puller.dest, prefix=TEMPORARY_PREFIX) as temporary_folder:
            head_path = Path(temporary_folder) / "head"
            fetched_bytes = None
            with suppress(OSError):
                fetched_bytes = self._apply_delta(ref, head_path)
            yield (0, None) if fetched_bytes is None else (fetched_bytes - head_bytes, head_path)


def _open_previous_snapshot(dest: Path) -> AbstractContextManager[Snapshot | None]:
    """Open the snapshot that was pulled last, and keep it from being pruned.

    The context is None if no snapshot was pulled, or if it is damaged or not trusted.
    """
    try:
        return Snapshot.from_folder(dest)
    except (StoreError, RefusedError):
        return nullcontext()


def _open_incomplete_snapshot(manifest: Manifest, dest: Path) -> Snapshot:
    """Open a snapshot that is being pulled; only files that were already pulled can be read."""

    def path(file: str) -> Path:
        return blob_copy_path(dest, manifest.content.files[file])

    return Snapshot(manifest, path, path, dest)


def _iter_with_head(
    head: Path | None, iter_chunks: ChunkSource, read: Callable[[int, int], bytes], start_byte: int
) -> Iterator[bytes]:
    """Yield the bytes of `iter_chunks`; ranges in the first bytes of the blob are read from the
    file `head`, other ranges by `read`.
    """
    head_bytes = head.stat().st_size if head else 0

    def read_range(first: int, end: int) -> bytes:
        if not head or end > head_bytes:
            return read(first, end)
        with head.open("rb") as file:
            file.seek(first)
            return file.read(end - first)

    return iter_chunks(read_range, start_byte)


def _iter_file(path: Path, read: Callable[[int, int], bytes], start_byte: int) -> Iterator[bytes]:
    """Yield the bytes of a local file from `start_byte` on."""
    with path.open("rb") as file:
        file.seek(start_byte)
        while block := file.read(_BLOCK_BYTES):
            yield block


def _write_mapped_copy(ref: BlobRef, dest: Path) -> None:
    """Write the memory-mapped copy of a passage file, unless there is a valid one."""
    copy_path, identity = mapped_copy_path(dest, ref), mapped_copy_identity(ref)
    if not (copy_path.is_file() and open_folder_stamps(dest).has_valid_stamp(copy_path, identity)):
        write_mapped_copy(blob_copy_path(dest, ref), copy_path)
        open_folder_stamps(dest).record(copy_path, identity)
