"""Verify a snapshot or a model: hash all its files again, and look for gaps in the logs of refs."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from rag_model.digest import digest_chunks
from rag_model.errors import StoreError
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.ranges import read_ahead
from rag_model.store.pulling.deltas import offered, steps
from rag_model.store.store import Store
from rag_model.store.versions.shelf import Shelf

_THREADS = 4  # hashing and reading release the interpreter lock


@dataclass(frozen=True, slots=True)
class Problem:
    """One file that is missing or damaged."""

    path: str  # in the snapshot (`index/hnsw.faiss`), or in the store (`refs/latest/00000003.json`)
    blob: str | None  # its blob id, if it is a snapshot's file
    what: str


class Filed(Protocol):
    """The content of a snapshot or of a model."""

    @property
    def files(self) -> Mapping[str, BlobRef]:
        """The files by path."""
        ...


def verify(store: Store, identity: str, shelf: Shelf[Any] | None = None) -> list[Problem]:
    """Return all problems of a snapshot (a full id) and of the store's refs; [] if there are none.

    `shelf` is `store.models` if the id is a model's. Reads every file that the manifest names, in a few threads that
    hold at most four chunks of 16 MiB each.
    """
    found = _manifest_and_files(store, shelf or store.snapshots, identity, _hashed)
    found += _deltas(store, identity) if shelf in (None, store.snapshots) else []
    return [*found, *_refs(store.snapshots), *_refs(store.models)]


def lacking(store: Store, shelf: Shelf[Any], identity: str) -> list[Problem]:
    """Return what is missing of a snapshot or model (a full id): its manifest, or files of the right size.

    Reads the manifest and the sizes of files only, so it is cheap before a ref is moved; `verify` finds changed bytes.
    """
    return _manifest_and_files(store, shelf, identity, _sized)


def absent(store: Store, content: Filed) -> list[Problem]:
    """Return the files of a content, published or not, that are missing in the store or have another size."""
    return _files(store, content, _sized)


def _manifest_and_files(
    store: Store, shelf: Shelf[Any], identity: str, check: Callable[[Store, BlobRef], str | None]
) -> list[Problem]:
    try:
        manifest = shelf.get(identity)
    except StoreError as error:
        return [Problem(f"{shelf.noun}s/{identity}.json", None, str(error))]
    return _files(store, manifest.content, check)


def _files(store: Store, content: Filed, check: Callable[[Store, BlobRef], str | None]) -> list[Problem]:
    paths: dict[BlobRef, list[str]] = defaultdict(list)
    for path, ref in content.files.items():
        paths[ref].append(path)
    verdicts = read_ahead(partial(check, store), [*paths], _THREADS if check is _hashed else store.files.at_once)
    found = list(zip(paths, verdicts, strict=True))
    return [Problem(path, ref.id, what) for ref, what in found if what is not None for path in paths[ref]]


def _deltas(store: Store, identity: str) -> list[Problem]:
    """Return the damaged deltas from a snapshot's parent: pullers fetch the whole files."""
    try:
        manifest = store.snapshots.get(identity)
        before = [store.snapshots.get(parent).content for parent in manifest.parents]
    except StoreError:  # told already; or the parent has expired
        return []
    paths = {ref: path for path, ref in manifest.content.files.items()}
    made = [step for one in before for step in steps(one, manifest.content)]
    refs = store.files.ask(partial(offered, store), made)
    named = {ref: paths[step.after] for step, ref in zip(made, refs, strict=True) if ref}
    verdicts = zip(named, read_ahead(partial(_hashed, store), [*named], _THREADS), strict=True)
    return [Problem(f"the delta of {named[ref]}", ref.id, what) for ref, what in verdicts if what]


def _sized(store: Store, ref: BlobRef) -> str | None:
    """Describe what is wrong with a blob's size; None if it is right."""
    size = store.files.size(ref.path)
    if size is None:
        return "missing"
    return None if size == ref.size else f"{size} bytes instead of {ref.size}"


def _hashed(store: Store, ref: BlobRef) -> str | None:
    """Describe what is wrong with a blob; None if it is sound."""
    if wrong := _sized(store, ref):
        return wrong
    try:
        digest = digest_chunks(store.files.chunks(ref.path, ref.size))
    except StoreError as error:
        return str(error)
    return None if digest == ref.id else "its bytes do not match its name"


def _refs(shelf: Shelf[Any]) -> list[Problem]:
    problems = []
    refs, known = shelf.refs, set(shelf.list())
    for name in refs.names(deleted=True):
        numbers = refs.numbers(name)
        missing = sorted({*range(min(numbers, default=1), max(numbers, default=0) + 1)} - {*numbers})  # others expired
        problems += [Problem(refs.path(name, number), None, "missing: the log has a gap") for number in missing]
        wrong = shelf.files.ask(partial(_move, shelf, known, name), numbers)
        said = zip(numbers, wrong, strict=True)
        problems += [Problem(refs.path(name, number), None, what) for number, what in said if what]
    return problems


def _move(shelf: Shelf[Any], known: set[str], ref: str, number: int) -> str | None:
    """Describe what is wrong with a move of a ref; None if it is sound."""
    try:
        named = shelf.refs.at(ref, number).snapshot
    except StoreError as error:
        return str(error)
    if named and named not in known and shelf.files.find(shelf.path(named)) is None:
        return f"its {shelf.noun} {named} is missing"
    return None
