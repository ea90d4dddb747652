"""Publish a snapshot and move its ref: files first, then the manifest, then the ref, only if the gate passes.

A publisher that loses a race for the ref tries again: the winner is the new parent, and the gate judges again. An
intent that names every file keeps these files from deletion until the ref has moved. A page that was taken down is
never published: takedowns are read before the manifest is written and again after it. A takedown writes its record and
*then* looks for snapshots, so at least one of the two sees the other.
"""

import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from rag_model.errors import RefConflictError, StoreError
from rag_model.evaluation.gate import Verdict, Vitals
from rag_model.store.store import Store
from rag_model.store.upkeep.verify import absent
from rag_model.store.versions.holding import held, wiki_of
from rag_model.store.versions.manifest import Manifest
from rag_model.store.versions.refs import RefMove

_TRIES = 100  # races lost in a row before giving up; each costs a few small reads


@dataclass(frozen=True, slots=True)
class Published:
    """A snapshot in the store, and the position of its ref."""

    snapshot: str
    verdict: Verdict
    move: RefMove | None  # None: the gate refused, and the ref did not move


def vitals(manifest: Manifest) -> Vitals:
    """Return the values of a snapshot that the gate compares."""
    space = manifest.content.space
    return Vitals(
        passages=manifest.content.n,
        space=None if space is None else space["digest"],
        newest_revision=manifest.content.corpus.get("newest_revision") or "",
    )


def publish(
    store: Store, manifest: Manifest, ref: str, judge: Callable[[Vitals | None], Verdict], base: str | None = None
) -> Published:
    """Write a manifest, then move `ref` to it if `judge`, given the vitals of the ref's current snapshot, agrees.

    With `base` it is given those of the current snapshot of that ref, which does not move.

    A ref that already names the snapshot is not moved, so a rerun does not change its history.

    Raises:
        RefConflictError: other writers won many races in a row.
        StoreError: a file of the snapshot is missing, a page in it was taken down, or the store cannot exclude a second
        writer, or cannot be written.
    """
    with _held(store, manifest):
        return _publish(store, manifest, ref, judge, base or ref)


def put_in_place(store: Store, snapshot: str, manifest: Manifest) -> list[RefMove]:
    """Write a manifest that replaces a snapshot, and move the refs of that snapshot; return the moves.

    It is published unseen, so it is signed only if what it replaces was (`Shelf.vouched`).

    Raises:
        StoreError: as `publish`.
    """
    with _held(store, manifest):
        _put(store, manifest, sign=store.snapshots.vouched(snapshot))
        return settle(store, snapshot, manifest.id)


def settle(store: Store, snapshot: str, place: str) -> list[RefMove]:
    """Record the replacement of a snapshot, move its refs, and return the moves.

    `place` is the id of an existing snapshot, or "" for none: refs are then deleted. It resumes if an earlier run has
    done it or a part of it. A move is signed only if the ref's move before, the snapshot and the place were.

    Raises:
        StoreError: the store cannot be written.
    """
    store.takedowns.replace(snapshot, place)
    stands = store.takedowns.in_place_of(snapshot)
    moves: list[RefMove] = []
    ours = all(map(store.snapshots.vouched, (snapshot, stands))) if stands else False
    while stands and (named := store.refs.naming(snapshot)):
        for ref, number in named:
            with suppress(RefConflictError):  # the loop tries again
                note, sign = f"takedown in {snapshot[:12]}", ours and store.refs.vouched(ref, number)
                moves.append(store.refs.move(ref, stands, number, note, sign=sign))
    return moves


@contextmanager
def _held(store: Store, manifest: Manifest) -> Iterator[None]:
    """Hold an intent for all files of a snapshot, and check that all exist."""
    needs = {f"snapshots/{manifest.id}.json", *(blob.path for blob in manifest.content.files.values())}
    with store.intents.held(f"publish-{secrets.token_hex(8)}", needs):
        if problems := absent(store, manifest.content):
            raise StoreError(
                f"snapshot {manifest.id[:12]} cannot be published in {store.url}: {len(problems)} of its files were "
                f"deleted meanwhile (first {problems[0].path}): run the same command again to make them"
            )
        yield


def _put(store: Store, manifest: Manifest, *, sign: bool = True) -> str:
    """Write a manifest, unless it holds a page that was taken down; a takedown in the meantime removes it again."""
    wiki, path = wiki_of(manifest.content), f"snapshots/{manifest.id}.json"
    known = store.takedowns.pages(wiki)
    _refuse(store, manifest, known)
    fresh = store.files.find(path) is None
    store.snapshots.put(manifest, sign=sign)
    try:
        _refuse(store, manifest, store.takedowns.pages(wiki) - known)
    except StoreError:
        if fresh:
            store.files.remove(path)
        raise
    return manifest.id


def _refuse(store: Store, manifest: Manifest, pages: Collection[str]) -> None:
    if found := held(store, manifest.content, pages):
        raise StoreError(
            f"snapshot {manifest.id[:12]} cannot be published in {store.url}: page {found[0].page} in it "
            f"({found[0].title!r}) was taken down meanwhile: run the same command again to leave it out"
        )


def _publish(
    store: Store, manifest: Manifest, ref: str, judge: Callable[[Vitals | None], Verdict], base: str
) -> Published:
    before = store.refs.current(base)
    parents = (before.snapshot,) if before and before.snapshot != manifest.id else ()
    snapshot = _put(store, replace(manifest, parents=parents))
    for _ in range(_TRIES):
        now, below = store.refs.current(ref), store.refs.current(base)
        try:
            parent = vitals(store.snapshots.get(below.snapshot)) if below else None
        except StoreError:
            if store.refs.current(base) == below:
                raise
            continue  # the ref has moved, and its earlier snapshot has expired
        verdict = judge(parent)
        if not verdict.passed:
            return Published(snapshot, verdict, None)
        if now is not None and now.snapshot == snapshot:
            return Published(snapshot, verdict, now)
        try:
            return Published(snapshot, verdict, store.refs.move(ref, snapshot, now.number if now else 0))
        except RefConflictError:
            continue
    raise RefConflictError(f"ref {ref} in {store.url} was moved by other writers {_TRIES} times in a row: try again")
