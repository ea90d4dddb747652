"""Move refs by hand: `tag` moves a ref to a snapshot, `rollback` moves it back, `untag` deletes it.

A ref is deleted by a move that names nothing, so that its log stays, and races are decided as for other moves.
Models have refs of their own: `model:reader` means one of them, here and everywhere else that a snapshot may be named.

All three append to the ref's log and delete nothing from it. `tag` and `rollback` move only to a snapshot whose files
all exist; an intent keeps them from being deleted meanwhile. A writer that loses a race gets an error that names the
new snapshot, and decides again: that snapshot may be the wanted one.
"""

import re
import secrets
from typing import Any

from rag_model.errors import RefConflictError, RefusedError, StoreError, UsageError
from rag_model.store.store import Store
from rag_model.store.upkeep.verify import lacking
from rag_model.store.versions.holding import taken_down
from rag_model.store.versions.refs import RefMove
from rag_model.store.versions.shelf import Shelf
from rag_model.store.versions.signatures import Trust, signs

_ROLLBACK = re.compile(r"rollback to @([0-9]{1,8})")


def tag(store: Store, snapshot: str, ref: str, note: str = "") -> RefMove:
    """Move `ref` to a snapshot (an id, a unique prefix, a ref or `ref@number`) and return the ref's current move.

    A ref that names the snapshot already is not moved, unless the environment has a key and no trusted one signed the
    ref's move: that of a stranger is never signed, since its note and its history are theirs. If the environment has a
    key, the snapshot and the move are signed: so, without a trust file, an owner signs what exists. `model:` before the
    snapshot, or before both, means models.

    Raises:
        StoreError: there is no such snapshot.
        RefusedError: a file of the snapshot is missing or of the wrong size, it contains a page that was taken
        down, or a trust file is given and no key of it signed the snapshot, or the move by which it is named; the ref
        did not move.
        RefConflictError: another writer moved the ref meanwhile; its move is kept.
    """
    shelf, name = store.shelf(snapshot)
    named, ref = store.shelf(ref)
    if store.evaluations in (shelf, named):
        raise UsageError(
            f"evaluations have no refs, and live as long as their snapshot: tag the snapshot instead of {snapshot}"
        )
    if named is store.models and shelf is store.snapshots:
        raise UsageError(f"{snapshot} is a snapshot, but ref model:{ref} names models: leave out `model:`")
    now = shelf.refs.current(ref)
    identity = shelf.trusted(name)
    if now is not None and now.snapshot == identity and (not signs() or shelf.refs.vouched(ref, now.number)):
        shelf.sign(identity)
        shelf.refs.sign(ref, now.number)
        return now
    return _move(store, shelf, ref, identity, now, note)


def advance(store: Store, snapshot: str, ref: str, now: RefMove | None, note: str = "") -> RefMove:
    """Move `ref` from the move `now` (None: it is new) to a snapshot, a full id, and return the ref's current move.

    Use it where the decision rests on what the ref named: another writer's move in between is kept.

    Raises:
        StoreError: there is no such snapshot.
        RefusedError: as `tag`; the ref did not move.
        RefConflictError: another writer moved the ref meanwhile; its move is kept.
    """
    identity = store.snapshots.trusted(snapshot)
    if now is not None and now.snapshot == identity:
        return now
    return _move(store, store.snapshots, ref, identity, now, note)


def rollback(store: Store, ref: str, to: int | None = None) -> RefMove:
    """Move `ref` to the snapshot that its move `to` names, and return the move, a new one.

    The default is the snapshot before the current one. Moves that were rolled back are skipped, so that repeated
    rollbacks always go further back. With a trust file, moves that no key of it signed are skipped too.

    Raises:
        StoreError: the ref has no history, or no such move.
        UsageError: the ref names that snapshot already, or never named another one.
        RefusedError: a file of the snapshot is missing or of the wrong size, it contains a page that was taken
        down, or a trust file is given and no key of it signed the snapshot or its move; the ref did not move.
        RefConflictError: another writer moved the ref meanwhile; its move is kept.
    """
    shelf, ref = store.shelf(ref)
    now = shelf.refs.current(ref)
    if now is None:
        raise StoreError(f"ref {ref} has no history in {store.url}: there is nothing to roll back")
    target = _before(shelf, ref, now) if to is None else shelf.refs.at(ref, to)
    if not target.snapshot:
        raise UsageError(f"{ref}@{target.number} names nothing to go back to: `log --ref {ref}` lists what others name")
    if target.snapshot == now.snapshot:
        raise UsageError(f"ref {ref} names {shelf.noun} {now.snapshot[:12]}, that of {ref}@{target.number}, already")
    identity = shelf.trusted(f"{ref}@{target.number}")
    return _move(store, shelf, ref, identity, now, f"rollback to @{target.number}")


def untag(store: Store, ref: str, *, dry_run: bool = False) -> RefMove:
    """Delete `ref`, and return the move that deletes it; with `dry_run` return its current move.

    The snapshots that it named stay in its log, until `expire` deletes those moves.

    Raises:
        StoreError: there is no such ref.
        RefConflictError: another writer moved the ref meanwhile; its move is kept.
    """
    shelf, name = store.shelf(ref)
    now = shelf.refs.current(name)
    if now is None:
        known = ", ".join(shelf.refs.names()) or "none"
        raise StoreError(f"there is no ref {name!r} in {store.url} to delete (refs: {known})")
    return now if dry_run else shelf.refs.delete(name, now.number)


def _before(shelf: Shelf[Any], ref: str, now: RefMove) -> RefMove:
    """Return the newest move to another snapshot before `now`, or before the move that `now` rolled back to."""
    kept = {move.number: move for move in shelf.refs.history(ref)}  # older ones may have expired
    stands, trust = now.number, Trust.given()

    if trust:  # the note of an unsigned move is not followed either
        kept = {number: move for number, move in kept.items() if shelf.refs.signer(trust, ref, number)}
    while stands in kept and (back := _ROLLBACK.fullmatch(kept[stands].note)) and int(back[1]) < stands:
        stands = int(back[1])
    for number in sorted(kept, reverse=True):
        if number < stands and kept[number].snapshot not in {now.snapshot, ""}:
            return kept[number]
    signed = "" if trust is None else f" by a move that a key of {trust.source} signed"
    raise UsageError(
        f"ref {ref} named no other {shelf.noun} before {now.snapshot[:12]}{signed}: `log --ref {ref}` lists its moves, "
        "and `rollback --to NUMBER` takes any of them"
    )


def _move(store: Store, shelf: Shelf[Any], ref: str, identity: str, now: RefMove | None, note: str) -> RefMove:
    with store.intents.held(f"move-{secrets.token_hex(8)}", [shelf.path(identity)]):
        return _checked_move(store, shelf, ref, identity, now, note)


def _checked_move(store: Store, shelf: Shelf[Any], ref: str, identity: str, now: RefMove | None, note: str) -> RefMove:
    if problems := lacking(store, shelf, identity):
        raise RefusedError(
            f"ref {ref} stays where it is: {shelf.noun} {identity[:12]} in {store.url} is not whole "
            f"({problems[0].path}: {problems[0].what}); `verify` lists all that is wrong with it"
        )
    if shelf is store.snapshots and (found := taken_down(store, store.snapshots.get(identity).content)):
        raise RefusedError(
            f"ref {ref} stays where it is: page {found[0].page} ({found[0].title!r}) in snapshot {identity[:12]} in "
            f"{store.url} was taken down: run `takedown --yes` to its end, and use the snapshot that replaces it"
        )
    shelf.sign(identity)
    try:
        return shelf.refs.move(ref, identity, now.number if now else 0, note)
    except RefConflictError as lost:
        winner = shelf.refs.current(ref)
        if winner is None:
            raise
        raise RefConflictError(
            f"another writer moved ref {ref} in {store.url} to {shelf.noun} {winner.snapshot[:12]} "
            f"({ref}@{winner.number}) first, and that move is kept: run this again if it is still wanted"
        ) from lost
