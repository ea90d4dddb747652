"""Materialise a version's blobs in a folder: verify those that are there, download the others, or patch.

Vectors of passages that an earlier pulled snapshot has too are not fetched again (`store.pulling.overlap`). Files that
a kind of index can make of what is here (`Derive`) are made, and passage files of earlier ones and deltas
(`store.pulling.deltas`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

from rag_model.digest import digest_file
from rag_model.errors import StoreError
from rag_model.landing import TEMPORARY
from rag_model.partition import Rows
from rag_model.store.objects.blobs import BlobRef, Chunks
from rag_model.store.pulling.deltas import Step, renewed, unpacked
from rag_model.store.pulling.kinds import kind_of
from rag_model.store.pulling.overlap import Overlap
from rag_model.store.pulling.pulled import blob_copy, mapped_copy, mapped_identity, stamps_of
from rag_model.store.pulling.tables import Vectors, convertible
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest
from rag_model.store.versions.mapped import write_mapped
from rag_model.store.versions.snapshot import Snapshot

Derive = Callable[[Snapshot, Snapshot, str, Callable[[], Rows], Path], bool]  # see `retrieve.derived`
_COPIED = 1 << 20  # bytes at once
_THREADS = 4  # blobs at once; each holds at most 64 MiB in transit


def nothing(before: Snapshot, after: Snapshot, path: str, kept: Callable[[], Rows], out: Path) -> bool:
    """Make no file: all are fetched."""
    return False


class Watch:
    """Count bytes for all threads; when one fails, the others stop too, and their partial files are kept."""

    def __init__(self, total: int, tell: Callable[[int, int], None]) -> None:
        """Call `tell` with the bytes done and `total`."""
        self._done, self._total, self._tell, self._lock = 0, total, tell, Lock()
        self._failure: BaseException | None = None

    def __call__(self, size: int) -> None:
        """Count some more bytes.

        Raises:
            BaseException: the error that another thread failed with.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure  # the first thread that counts raises the cause
            self._done += size
            self._tell(min(self._done, self._total), self._total)

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Stop the other threads if the block fails."""
        try:
            yield
        except BaseException as failure:
            self._failure = self._failure or failure
            raise


@dataclass(frozen=True, slots=True)
class Puller:
    """Materialise blobs in a folder that is being pulled to."""

    store: Store
    dest: Path
    watch: Watch

    def obtain(self, blobs: Iterable[BlobRef], one: Callable[[BlobRef], int] | None = None) -> int:
        """Materialise all blobs, larger ones first, since they take longest; return the number of bytes fetched."""
        with ThreadPoolExecutor(_THREADS) as pool, self.watch.stopping():
            return sum(pool.map(one or self.whole, sorted(blobs, key=lambda ref: -ref.size)))

    def whole(self, ref: BlobRef) -> int:
        """Materialise one blob by fetching all of it; return the number of bytes fetched."""
        return self._materialise(ref, self._fetch)

    def renewed(self, ref: BlobRef, path: str, before: Snapshot, content: Content) -> int:
        """Materialise a passage file, of an earlier one and a delta if there are both; return the bytes fetched."""
        return self.derived(ref, partial(renewed, self.store, before, content, path), self.whole)

    def mapped(self, ref: BlobRef) -> None:
        """Write the memory-mapped copy of a passage file that is here."""
        with self.watch.stopping():
            _derive(ref, self.dest)

    def patched(self, ref: BlobRef, path: str, overlap: Overlap, known: Mapping[str, Vectors]) -> int:
        """Materialise a blob by a patch: take vectors of an earlier snapshot from this disk, and fetch the rest."""

        def assemble(ref: BlobRef, copy: Path) -> int:
            patch = overlap.patch(path)
            vectors = known.get(patch.table.over) if patch else None
            if patch and vectors and convertible(vectors.width, patch.table.width):
                with self._packed(ref, patch.table.head) as (fetched, head):
                    chunks = partial(_after, head, partial(patch.chunks, vectors))
                    if self.store.blobs.assemble(ref, copy, chunks, self.watch):
                        return patch.fetched_bytes + fetched
            return self._fetch(ref, copy)

        return self._materialise(ref, assemble)

    @contextmanager
    def _packed(self, ref: BlobRef, size: int) -> Iterator[tuple[int, Path | None]]:
        """Yield how many bytes more are fetched than without a packed beginning, and its file; None: there is none."""
        with TemporaryDirectory(dir=self.dest, prefix=TEMPORARY) as folder:
            head = Path(folder) / "head"
            fetched = None
            with suppress(OSError):
                fetched = unpacked(self.store, Step(ref, head=size), head)
            yield (0, None) if fetched is None else (fetched - size, head)

    def derived(self, ref: BlobRef, make: Callable[[Path], int | None], other: Callable[[BlobRef], int]) -> int:
        """Materialise a blob that `make` writes, returning the bytes that it fetched for that.

        If it returns None, writes other bytes, or finds no room for them, use `other`, which needs less of it.
        """

        def assemble(ref: BlobRef, copy: Path) -> int:
            fetched = None
            with suppress(OSError, StoreError), TemporaryDirectory(dir=self.dest, prefix=TEMPORARY) as folder:
                made = Path(folder) / "made"
                fetched = None if copy.exists() else make(made)
                fits = fetched is not None and made.stat().st_size == ref.size
                if fits and self.store.blobs.assemble(ref, copy, partial(_bytes_of, made), self.watch):
                    return fetched or 0
            return other(ref) + (fetched or 0)

        return self._materialise(ref, assemble)

    def _fetch(self, ref: BlobRef, copy: Path) -> int:
        self.store.blobs.fetch(ref, copy, self.watch)
        return ref.size

    def _materialise(self, ref: BlobRef, get: Callable[[BlobRef, Path], int]) -> int:
        """Verify the copy of a blob, or make one with `get`; return the number of bytes fetched."""
        with self.watch.stopping():
            copy, fetched = blob_copy(self.dest, ref), 0
            if copy.is_file() and copy.stat().st_size == ref.size and digest_file(copy) == ref.id:
                self.watch(ref.size)
            else:
                fetched = get(ref, copy)
            stamps_of(self.dest).put(copy, ref.id)
        return fetched


def obtain_snapshot(
    puller: Puller, manifest: Manifest, files: dict[str, BlobRef], *, mapped: bool, derive: Derive = nothing
) -> int:
    """Materialise some files of a snapshot, given by path; return the number of bytes fetched.

    If an earlier snapshot was pulled, passages come first: they tell which vectors are on this disk. `mapped` also
    writes the memory-mapped copies of the passage files. `derive` may make index files of what is on this disk.

    Raises:
        StoreError: a blob is missing or damaged.
        OSError: the folder cannot be written.
    """
    paths = {ref: path for path, ref in files.items()}
    passages = {ref for ref, path in paths.items() if kind_of(path) == "passages"}

    with _pulled_before(puller.dest) as before:

        def obtain(ref: BlobRef) -> int:
            if ref not in passages:
                return puller.whole(ref)
            content = manifest.content
            fetched = puller.renewed(ref, paths[ref], before, content) if before else puller.whole(ref)
            if mapped:
                puller.mapped(ref)
            return fetched

        if before is None or before.id == manifest.id:
            return puller.obtain(paths, obtain)
        fetched, arriving = puller.obtain(passages, obtain), _arriving(manifest, puller.dest)
        overlap = Overlap.of(before, arriving) or Overlap(before, arriving, ())
        found = {over: Vectors.of(before, over) for over in overlap.over}
        known = {over: vectors for over, vectors in found.items() if vectors}

        def patched(ref: BlobRef) -> int:
            return puller.patched(ref, paths[ref], overlap, known)

        def made(ref: BlobRef) -> int:
            def make(out: Path) -> int | None:
                if derive(before, arriving, paths[ref], overlap.kept, out):
                    return 0
                return renewed(puller.store, before, manifest.content, paths[ref], out)

            return puller.derived(ref, make, patched)

        indexes = {manifest.content.index_file(name) for name in manifest.content.indexes}
        return fetched + puller.obtain(
            paths.keys() - passages, lambda ref: made(ref) if paths[ref] in indexes else patched(ref)
        )


@contextmanager
def _pulled_before(dest: Path) -> Iterator[Snapshot | None]:
    """Open the snapshot that was pulled last, if there is one, and keep it from being pruned."""
    with ExitStack() as stack:
        before = None
        with suppress(StoreError):
            before = stack.enter_context(Snapshot.from_folder(dest))
        yield before


def _arriving(manifest: Manifest, dest: Path) -> Snapshot:
    """Open a snapshot while its files are being pulled; files that are still missing cannot be read."""

    def path(file: str) -> Path:
        return blob_copy(dest, manifest.content.files[file])

    return Snapshot(manifest, path, path, dest)


def _after(head: Path | None, chunks: Chunks, read: Callable[[int, int], bytes], start: int) -> Iterator[bytes]:
    """Yield what `chunks` yields, which gets the first bytes of the file from `head`, if that is there."""
    held = head.stat().st_size if head else 0

    def found(first: int, end: int) -> bytes:
        if not head or end > held:
            return read(first, end)
        with head.open("rb") as file:
            file.seek(first)
            return file.read(end - first)

    return chunks(found, start)


def _bytes_of(path: Path, read: Callable[[int, int], bytes], start: int) -> Iterator[bytes]:
    """Yield the bytes of a file on this disk from `start` on."""
    with path.open("rb") as file:
        file.seek(start)
        while some := file.read(_COPIED):
            yield some


def _derive(ref: BlobRef, dest: Path) -> None:
    copy, identity = mapped_copy(dest, ref), mapped_identity(ref)
    if not (copy.is_file() and stamps_of(dest).holds(copy, identity)):
        write_mapped(blob_copy(dest, ref), copy)
        stamps_of(dest).put(copy, identity)
