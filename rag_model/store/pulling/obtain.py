"""Have a version's blobs in a folder: those that are there verified, the others fetched, or put together of both.

After an earlier snapshot, vectors of passages that it has too are not fetched again (`store.pulling.overlap`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock

from rag_model.digest import digest_file
from rag_model.errors import StoreError
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.pulling.kinds import kind_of
from rag_model.store.pulling.overlap import Overlap
from rag_model.store.pulling.pulled import blob_copy, mapped_copy, mapped_identity, stamps_of
from rag_model.store.pulling.tables import Vectors, convertible
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Manifest
from rag_model.store.versions.mapped import write_mapped
from rag_model.store.versions.snapshot import Snapshot

_THREADS = 4  # blobs at once; each holds at most 64 MiB of what is on its way


class Watch:
    """Counts bytes for all threads; when one fails, the others stop where they are: what they have is kept."""

    def __init__(self, total: int, tell: Callable[[int, int], None]) -> None:
        """Tell bytes done, of `total`."""
        self._done, self._total, self._tell, self._lock = 0, total, tell, Lock()
        self._failure: BaseException | None = None

    def __call__(self, size: int) -> None:
        """Count some more bytes.

        Raises:
            BaseException: what another thread failed by.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure  # whoever is asked first tells the cause
            self._done += size
            self._tell(min(self._done, self._total), self._total)

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Stop the others where the block fails."""
        try:
            yield
        except BaseException as failure:
            self._failure = self._failure or failure
            raise


@dataclass(frozen=True, slots=True)
class Puller:
    """Brings blobs to a folder that is being pulled to."""

    store: Store
    dest: Path
    watch: Watch

    def obtain(self, blobs: Iterable[BlobRef], one: Callable[[BlobRef], int] | None = None) -> int:
        """Have every blob here, the largest first, since they take longest; return the bytes that were fetched."""
        with ThreadPoolExecutor(_THREADS) as pool, self.watch.stopping():
            return sum(pool.map(one or self.whole, sorted(blobs, key=lambda ref: -ref.size)))

    def whole(self, ref: BlobRef) -> int:
        """Have one blob here."""
        return self._have(ref, self._fetch)

    def mapped(self, ref: BlobRef) -> int:
        """Have a passage file here, and the memory-mapped copy of it."""
        fetched = self.whole(ref)
        with self.watch.stopping():
            _derive(ref, self.dest)
        return fetched

    def patched(self, ref: BlobRef, path: str, overlap: Overlap, known: Mapping[str, Vectors]) -> int:
        """Have a blob here, by fetching what of it is neither here nor among an earlier snapshot's vectors."""

        def assemble(ref: BlobRef, copy: Path) -> int:
            patch = overlap.patch(path)
            vectors = known.get(patch.table.over) if patch else None
            if patch and vectors and convertible(vectors.width, patch.table.width):
                chunks = partial(patch.chunks, vectors)
                if self.store.blobs.assemble(ref, copy, chunks, self.watch):
                    return patch.fetched_bytes
            return self._fetch(ref, copy)

        return self._have(ref, assemble)

    def _fetch(self, ref: BlobRef, copy: Path) -> int:
        self.store.blobs.fetch(ref, copy, self.watch)
        return ref.size

    def _have(self, ref: BlobRef, get: Callable[[BlobRef, Path], int]) -> int:
        """Have a sound copy of a blob; return the bytes that had to be fetched."""
        with self.watch.stopping():
            copy, fetched = blob_copy(self.dest, ref), 0
            if copy.is_file() and copy.stat().st_size == ref.size and digest_file(copy) == ref.id:
                self.watch(ref.size)
            else:
                fetched = get(ref, copy)
            stamps_of(self.dest).put(copy, ref.id)
        return fetched


def obtain_snapshot(puller: Puller, manifest: Manifest, files: dict[str, BlobRef], *, mapped: bool) -> int:
    """Have some files of a snapshot here, by path; return the bytes that were fetched.

    After an earlier snapshot, passages come first: they tell which vectors are here. `mapped` derives the memory-mapped
    copies of them.

    Raises:
        StoreError: a blob is missing or damaged.
        OSError: the folder cannot be written.
    """
    paths = {ref: path for path, ref in files.items()}
    passages = {ref for ref, path in paths.items() if kind_of(path) == "passages"}

    def obtain(ref: BlobRef) -> int:
        return puller.mapped(ref) if mapped and ref in passages else puller.whole(ref)

    with _pulled_before(puller.dest) as before:
        overlap = before and Overlap.of(before, _arriving(manifest, puller.dest))
        found = {over: Vectors.of(before, over) for over in overlap.over} if before and overlap else {}
        known = {over: vectors for over, vectors in found.items() if vectors}
        if not (overlap and known):
            return puller.obtain(paths, obtain)
        fetched = puller.obtain(passages, obtain)
        others = paths.keys() - passages
        return fetched + puller.obtain(others, lambda ref: puller.patched(ref, paths[ref], overlap, known))


@contextmanager
def _pulled_before(dest: Path) -> Iterator[Snapshot | None]:
    """Hold the snapshot that was pulled last, if there is one."""
    with ExitStack() as stack:
        before = None
        with suppress(StoreError):
            before = stack.enter_context(Snapshot.from_folder(dest))
        yield before


def _arriving(manifest: Manifest, dest: Path) -> Snapshot:
    """Open a snapshot whose files are only just being pulled; those that are not there yet cannot be read."""

    def path(file: str) -> Path:
        return blob_copy(dest, manifest.content.files[file])

    return Snapshot(manifest, path, path, dest)


def _derive(ref: BlobRef, dest: Path) -> None:
    copy, identity = mapped_copy(dest, ref), mapped_identity(ref)
    if not (copy.is_file() and stamps_of(dest).holds(copy, identity)):
        write_mapped(blob_copy(dest, ref), copy)
        stamps_of(dest).put(copy, identity)
