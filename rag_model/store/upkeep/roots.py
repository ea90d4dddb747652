"""Mark the blobs and records that a store needs: those of its versions, and the origins of current snapshots.

A snapshot names its own files. The memo tells what they were made from: the record that has a file among its outputs
also names its inputs, and those are outputs of other records, or lists of blobs, which name more blobs. A delta is
needed as long as a snapshot has the file that it makes (`store.pulling.deltas`).
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rag_model.errors import StoreError
from rag_model.store.objects.files import Found
from rag_model.store.objects.memo import RECORD, parsed
from rag_model.store.objects.ranges import read_ahead
from rag_model.store.pulling.deltas import AFTER
from rag_model.store.pulling.deltas import STAGE as DELTAS
from rag_model.store.store import Store
from rag_model.store.upkeep.sweep import View
from rag_model.store.versions.evaluation_manifest import EvaluationManifest
from rag_model.store.versions.manifest import Manifest
from rag_model.store.versions.model_manifest import ModelManifest
from rag_model.store.versions.shelf import Shelf

_BLOB = re.compile(r"blobs/[0-9a-f]{2}/([0-9a-f]{64})")
_MANIFEST = re.compile(r"(?:snapshots|models|evaluations)/([0-9a-f]{64})\.json")
_MOVE = re.compile(r"(?:models/)?refs/([^/]+)/([0-9]{8})\.json")
_NAMED = re.compile(rb"sha256:([0-9a-f]{64})")
_LIST = b'[{"id": "sha256:'  # the first bytes of a list of blobs
_TRAINED = "train"  # outputs of this stage are kept without their inputs, such as vectors of an earlier month
_MANIFESTS = 8  # read at once: one names thousands of files


@dataclass(frozen=True, slots=True)
class Marked:
    """The blobs and records of a store, and which of them it needs. Digests are 64 hex digits."""

    needed: frozenset[str]  # digests of blobs
    blobs: tuple[tuple[str, Found], ...]  # all, by digest
    unneeded: tuple[Found, ...]  # records that nothing needs


def mark(store: Store, view: View, old: float) -> Marked:
    """Mark what the versions and the writers of a view need, and records written after the time `old`.

    Raises:
        StoreError: a manifest or the move of a ref cannot be read, or what a ref names now is missing.
    """
    blobs = tuple((found[1], file) for file in store.files.tree("blobs") if (found := _BLOB.fullmatch(file.path)))
    records = _records(store)
    snapshots = _named_files(store.snapshots, view.manifests, view.moves)
    models = _named_files(store.models, view.models, view.models)
    evaluations = _named_files(store.evaluations, view.evaluations, ())
    relied = {found[1] for path in view.needs if (found := _BLOB.fullmatch(path))}
    needed, current = snapshots.all | models.all | evaluations.all | relied, snapshots.current
    needed |= _origins(store, current, records, dict(blobs))
    needed |= set().union(*(record.outputs for record in records if record.makes in snapshots.all))
    passed = [] if view.building else [record for record in records if record.newest.written <= old]
    needed |= set().union(*(record.names for record in records if view.building or record.newest.written > old))
    unneeded = [record for record in passed if not record.serves(needed)]
    return Marked(frozenset(needed), blobs, tuple(file for record in unneeded for file in record.files))


@dataclass(frozen=True, slots=True)
class _Record:
    """All generations of a record; only the newest counts."""

    stage: str
    files: tuple[Found, ...]  # newest first
    outputs: frozenset[str]
    names: frozenset[str]  # the digests of its inputs and outputs
    makes: str = ""  # of a delta: the digest of the file that is made with it

    @property
    def newest(self) -> Found:
        return self.files[0]

    def serves(self, needed: set[str]) -> bool:
        """Whether it can be reused: all its outputs are needed; or, if it has none, one of the blobs that it names."""
        return self.outputs <= needed if self.outputs else bool(self.names & needed)


def _records(store: Store) -> list[_Record]:
    generations: dict[tuple[str, str], dict[int, Found]] = defaultdict(dict)
    for file in store.files.tree("memo"):
        if found := RECORD.fullmatch(file.path):
            generations[found[1], found[2]][int(found[3] or 1)] = file
    return list(store.files.ask(lambda item: _record(store, *item), [*generations.items()]))


def _record(store: Store, place: tuple[str, str], generations: Mapping[int, Found]) -> _Record:
    files = tuple(generations[number] for number in sorted(generations, reverse=True))
    data = store.files.read(files[0].path) or b""
    record = parsed(*place, data)
    outputs = frozenset(_digest(ref.id) for ref in record.outputs.values()) if record else frozenset()
    made = record.facts.get(AFTER) if record and record.stage == DELTAS else None
    makes = _digest(made) if isinstance(made, str) else ""
    return _Record(place[0], files, outputs, frozenset(_named(data)), makes)


@dataclass(frozen=True, slots=True)
class _Files:
    """The digests of the blobs of a shelf's versions."""

    all: set[str]
    current: set[str]  # of the versions that refs name now


def _named_files(shelf: Shelf[Any], manifests: Iterable[Found], moves: Iterable[Found]) -> _Files:
    named, found, there = _named_now(shelf, moves), _Files(set(), set()), set[str]()
    for manifest in _manifests(shelf, manifests):
        digests = _digests(manifest)
        there.add(manifest.id)
        found.all.update(digests)
        if manifest.id in named:
            found.current.update(digests)
    for identity, ref in named.items():
        if identity not in there:
            raise _missing(shelf, identity, ref)
    return found


def _manifests(shelf: Shelf[Any], files: Iterable[Found]) -> Iterator[Any]:
    paths = [file.path for file in files if _MANIFEST.fullmatch(file.path)]
    return filter(None, read_ahead(lambda path: _manifest(shelf, path), paths, _MANIFESTS))


def _manifest(shelf: Shelf[Any], path: str) -> Any:
    """Return a listed manifest; None if it has just expired."""
    try:
        return shelf.get(path.rpartition("/")[2].removesuffix(".json"))
    except StoreError:
        if shelf.files.find(path) is not None:
            raise
        return None


def _named_now(shelf: Shelf[Any], moves: Iterable[Found]) -> dict[str, str]:
    """Return the ids that refs name now, each with one of its refs."""
    current = [*_current(moves)]
    found = shelf.files.ask(lambda its: shelf.refs.at(*its).snapshot, current)
    return {named: ref for named, (ref, _) in zip(found, current, strict=True) if named}  # "": the ref was deleted


def _current(moves: Iterable[Found]) -> Iterable[tuple[str, int]]:
    newest: dict[str, int] = {}
    for file in moves:
        if move := _MOVE.fullmatch(file.path):
            newest[move[1]] = max(newest.get(move[1], 0), int(move[2]))
    return newest.items()


def _missing(shelf: Shelf[Any], named: str, ref: str) -> StoreError:
    return StoreError(
        f"ref {ref} in {shelf.files.url} names {shelf.noun} {named[:12]}, which is missing: restore it from a copy "
        f"of the store, or move the ref with `rollback {ref}` or `tag`; nothing was deleted"
    )


def _origins(store: Store, files: Iterable[str], records: Iterable[_Record], blobs: Mapping[str, Found]) -> set[str]:
    """Return the files and all blobs that they were made from; trained outputs are kept without their inputs."""
    makers: dict[str, list[_Record]] = defaultdict(list)
    for record in records:
        for output in record.outputs if record.stage != _TRAINED else ():
            makers[output].append(record)
    found: set[str] = set()
    ahead = list(files)
    while ahead:
        digest = ahead.pop()
        if digest in found:
            continue
        found.add(digest)
        for record in makers[digest]:
            ahead += record.names
        if not makers[digest] and digest in blobs:
            ahead += _listed(store, blobs[digest])
    return found


def _listed(store: Store, file: Found) -> list[str]:
    """Return the blobs in a list of blobs; [] for a file of another kind."""
    if store.files.read_range(file.path, 0, min(file.size, len(_LIST))) != _LIST:
        return []
    return _named(store.files.read(file.path) or b"")


def _named(data: bytes) -> list[str]:
    return [digest.decode() for digest in _NAMED.findall(data)]


def _digests(manifest: Manifest | ModelManifest | EvaluationManifest) -> set[str]:
    return {_digest(ref.id) for ref in manifest.content.files.values()}


def _digest(identity: str) -> str:
    return identity.partition(":")[2]
