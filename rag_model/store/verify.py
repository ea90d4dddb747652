"""Verify a snapshot: re-hash every byte that it names, and look for gaps in the refs' logs."""

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rag_model.digest import digest_chunks
from rag_model.errors import StoreError
from rag_model.store.blobs import BlobRef
from rag_model.store.manifest import Content
from rag_model.store.store import Store

_THREADS = 4  # hashing and reading release the interpreter lock


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as it was written."""

    path: str  # of the snapshot's file (`index/hnsw.faiss`), or of the store's (`refs/latest/00000003.json`)
    blob: str | None  # its blob id, where the path is a snapshot's file
    what: str


def verify(store: Store, snapshot: str) -> list[Problem]:
    """Return all that is wrong with a snapshot (a full id) and with the store's refs; [] when all is well.

    Reads every byte of the snapshot; each of a few threads holds at most four chunks of 16 MiB.
    """
    return [*_manifest_and_files(store, snapshot, _hashed), *_refs(store)]


def lacking(store: Store, snapshot: str) -> list[Problem]:
    """Return what a snapshot (a full id) lacks: its manifest, or files of the right size; [] when all are there.

    Reads the manifest and no other byte, so it is cheap before a ref is moved; `verify` finds flipped bits too.
    """
    return _manifest_and_files(store, snapshot, _sized)


def absent(store: Store, content: Content) -> list[Problem]:
    """Return the files of a content, published or not, that the store lacks or has in another size."""
    return _files(store, content, _sized)


def _manifest_and_files(store: Store, snapshot: str, check: Callable[[Store, BlobRef], str | None]) -> list[Problem]:
    try:
        manifest = store.snapshots.get(snapshot)
    except StoreError as error:
        return [Problem(f"snapshots/{snapshot}.json", None, str(error))]
    return _files(store, manifest.content, check)


def _files(store: Store, content: Content, check: Callable[[Store, BlobRef], str | None]) -> list[Problem]:
    paths: dict[BlobRef, list[str]] = defaultdict(list)
    for path, ref in content.files.items():
        paths[ref].append(path)
    with ThreadPoolExecutor(_THREADS) as pool:
        verdicts = pool.map(lambda ref: check(store, ref), paths)
        found = list(zip(paths, verdicts, strict=True))
    return [Problem(path, ref.id, what) for ref, what in found if what is not None for path in paths[ref]]


def _sized(store: Store, ref: BlobRef) -> str | None:
    """Say what is wrong with a blob's size; None: nothing."""
    size = store.files.size(ref.path)
    if size is None:
        return "missing"
    return None if size == ref.size else f"{size} bytes instead of {ref.size}"


def _hashed(store: Store, ref: BlobRef) -> str | None:
    """Say what is wrong with a blob; None: nothing."""
    if wrong := _sized(store, ref):
        return wrong
    try:
        digest = digest_chunks(store.files.chunks(ref.path, ref.size))
    except StoreError as error:
        return str(error)
    return None if digest == ref.id else "its bytes do not match its name"


def _refs(store: Store) -> list[Problem]:
    problems = []
    known = set(store.snapshots.list())
    for name in store.refs.names():
        numbers = store.refs.numbers(name)
        missing = sorted({*range(min(numbers, default=1), max(numbers, default=0) + 1)} - {*numbers})  # older: expired
        problems += [Problem(_path(name, number), None, "missing: the log has a gap") for number in missing]
        for number in numbers:
            try:
                move = store.refs.at(name, number)
            except StoreError as error:
                problems.append(Problem(_path(name, number), None, str(error)))
                continue
            if move.snapshot not in known and store.files.find(f"snapshots/{move.snapshot}.json") is None:
                problems.append(Problem(_path(name, number), None, f"its snapshot {move.snapshot} is missing"))
    return problems


def _path(name: str, number: int) -> str:
    return f"refs/{name}/{number:08d}.json"
