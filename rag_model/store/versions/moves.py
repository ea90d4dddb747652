"""Move refs manually: `tag` moves a ref to a snapshot, `rollback` moves it back, `untag` deletes
it.

A move is an entry of a ref's log. A deletion is a move that names no snapshot: the log is kept, and
of several concurrent writers exactly one succeeds, as for all moves. Models have their own refs:
`model:reader` is a ref of models, here and wherever a snapshot can be named.

All three functions append to the ref's log and delete nothing from it. `tag` and `rollback` move a
ref only to a snapshot whose files all exist, and an intent protects these files meanwhile. If
another writer moves the ref first, the error names that writer's snapshot, because users may want
that snapshot.
"""

import re
import secrets
from typing import Any

from rag_model.errors import RefConflictError, RefusedError, StoreError, UsageError
from rag_model.store.store import Store
from rag_model.store.upkeep.retire import find_taken_down_pages
from rag_model.store.upkeep.verify import find_missing
from rag_model.store.versions.catalog import Catalog
from rag_model.store.versions.refs import RefMove
from rag_model.store.versions.signatures import TrustedKeys, has_signing_key

_ROLLBACK = re.compile(r"rollback to @([0-9]{1,8})")


def tag(store: Store, snapshot: str, ref: str, note: str = "") -> RefMove:
    """Move `ref` to a snapshot (id, unique prefix, ref or `ref@number`); return the current move.

    If the environment has a key, the snapshot and the move are signed. So an owner without a trust
    file can sign an existing snapshot by tagging it. A ref that already names the snapshot is moved
    only if the environment has a key and no trusted key signed its current move. The move of
    another writer is never signed, because that writer wrote its note and history. The prefix
    `model:` before `snapshot`, or before `snapshot` and `ref`, selects models.

    Raises:
        StoreError: there is no such snapshot.
        RefusedError: a file of the snapshot is missing or has the wrong size; the snapshot contains
            a page that was taken down; or a trust file is given, and no key in it signed the
            snapshot or the move that names it. The ref did not move.
        RefConflictError: another writer moved the ref in the meantime; its move is kept.
    """
    catalog, name = store.find_catalog(snapshot)
    ref_catalog, ref = store.find_catalog(ref)
    if store.evaluations in (catalog, ref_catalog):
        raise UsageError(
            f"evaluations have no refs, and live as long as their snapshot: tag the snapshot instead of {snapshot}"
        )
    if ref_catalog is store.models and catalog is store.snapshots:
        raise UsageError(f"{snapshot} is a snapshot, but ref model:{ref} names models: leave out `model:`")
    return _move_or_sign(store, catalog, ref, name, catalog.refs.find_current(ref), note)


def advance(store: Store, snapshot: str, ref: str, expected_move: RefMove | None, note: str = "") -> RefMove:
    """Move `ref` to a snapshot (a full id) as `tag` does, if its current move is `expected_move`.

    `expected_move` is None for a new ref. The prefix `model:` before `snapshot` selects models. Use
    this function if the decision to move depends on the current snapshot of the ref: a move that
    another writer makes meanwhile is kept.

    Raises:
        StoreError: there is no such snapshot.
        RefusedError: for the same reasons as `tag`; the ref did not move.
        RefConflictError: another writer moved the ref in the meantime; its move is kept.
    """
    catalog, name = store.find_catalog(snapshot)
    return _move_or_sign(store, catalog, ref, name, expected_move, note)


def check_current_move(store: Store, ref: str, expected_move: RefMove | None) -> None:
    """Check that the current move of `ref` is `expected_move`, or that there is no ref if it is None.

    Raises:
        RefConflictError: another writer moved the ref in the meantime.
    """
    catalog, name = store.find_catalog(ref)
    current_move = catalog.refs.find_current(name)
    # After a takedown, the same move may name another snapshot.
    if (current_move.number if current_move else 0) != (expected_move.number if expected_move else 0):
        raise _build_conflict_error(store, catalog, name, current_move)


def rollback(store: Store, ref: str, to_number: int | None = None) -> RefMove:
    """Move `ref` to the snapshot that its move `to_number` names; return the new move.

    By default, `ref` moves to its previous snapshot. Moves that were rolled back are skipped, so
    that repeated rollbacks always go further back. With a trust file, moves that no key of the file
    signed are also skipped.

    Raises:
        StoreError: the ref has no history, or no such move.
        UsageError: the ref already names that snapshot, or never named another one.
        RefusedError: for the same reasons as `tag`; the ref did not move.
        RefConflictError: another writer moved the ref in the meantime; its move is kept.
    """
    catalog, ref = store.find_catalog(ref)
    current_move = catalog.refs.find_current(ref)
    if current_move is None:
        raise StoreError(f"ref {ref} has no history in {store.url}: there is nothing to roll back")
    target = _find_previous(catalog, ref, current_move) if to_number is None else catalog.refs.get_move(ref, to_number)
    if not target.snapshot:
        raise UsageError(
            f"{ref}@{target.number} names no {catalog.noun} to go back to: `log --ref {ref}` lists other moves"
        )
    if target.snapshot == current_move.snapshot:
        raise UsageError(
            f"ref {ref} already names {catalog.noun} {current_move.snapshot[:12]}, which {ref}@{target.number} named"
        )
    return _move_back(store, catalog, ref, target, current_move)


def undo(store: Store, ref: str, move: RefMove, previous_move: RefMove | None) -> RefMove:
    """Move `ref` back to `previous_move` if its current move is `move`; return the new move.

    Delete the ref if `previous_move` is None.

    Raises:
        StoreError: the snapshot of `previous_move` expired.
        RefusedError: for the same reasons as `tag`; the ref did not move.
        RefConflictError: another writer moved the ref in the meantime; its move is kept.
    """
    catalog, name = store.find_catalog(ref)
    if previous_move is None:
        return catalog.refs.delete(name, move.number)
    return _move_back(store, catalog, name, previous_move, move)


def untag(store: Store, ref: str, *, dry_run: bool = False) -> RefMove:
    """Delete `ref` and return the move that deletes it; with `dry_run` return its current move.

    The ref's earlier moves stay in the log until `expire` deletes them.

    Raises:
        StoreError: there is no such ref.
        RefConflictError: another writer moved the ref in the meantime; its move is kept.
    """
    catalog, name = store.find_catalog(ref)
    current_move = catalog.refs.find_current(name)
    if current_move is None:
        known_refs = ", ".join(catalog.refs.list_names()) or "none"
        raise StoreError(f"there is no ref {name!r} in {store.url} to delete (refs: {known_refs})")
    return current_move if dry_run else catalog.refs.delete(name, current_move.number)


def _find_previous(catalog: Catalog[Any], ref: str, current_move: RefMove) -> RefMove:
    """Return the newest earlier move to another snapshot; skip the moves that were rolled back."""
    # Older moves may have expired, so their numbers may be missing.
    move_by_number = {move.number: move for move in catalog.refs.read_history(ref)}
    number_before, trusted_keys = current_move.number, TrustedKeys.from_environment()

    if trusted_keys:  # unsigned moves, and their notes about rollbacks, are ignored
        move_by_number = {
            move_number: move
            for move_number, move in move_by_number.items()
            if catalog.refs.find_signer(trusted_keys, ref, move_number)
        }
    while True:
        move, move_before = (move_by_number.get(number) for number in (number_before, number_before - 1))
        match = _ROLLBACK.fullmatch(move.note) if move else None
        if match and int(match[1]) < number_before:
            number_before = int(match[1])
        elif move_before and move_before.snapshot == current_move.snapshot:
            # Takedowns, and tags that sign, move a ref to the same snapshot again; the note of the
            # move before tells whether it was a rollback.
            number_before -= 1
        else:
            break
    for move_number in sorted(move_by_number, reverse=True):
        if move_number < number_before and move_by_number[move_number].snapshot not in {current_move.snapshot, ""}:
            return move_by_number[move_number]
    signature_condition = "" if trusted_keys is None else f" by a move that a key of {trusted_keys.source} signed"
    raise UsageError(
        f"ref {ref} named no other {catalog.noun} before "
        f"{current_move.snapshot[:12]}{signature_condition}: `log "
        f"--ref {ref}` lists its moves, and `rollback --to NUMBER` takes any of them"
    )


def _move_back(store: Store, catalog: Catalog[Any], ref: str, target: RefMove, current_move: RefMove) -> RefMove:
    identity = catalog.resolve_trusted(f"{ref}@{target.number}")
    return _move(store, catalog, ref, identity, current_move, f"rollback to @{target.number}")


def _move_or_sign(
    store: Store,
    catalog: Catalog[Any],
    ref: str,
    name: str,
    expected_move: RefMove | None,
    note: str,
) -> RefMove:
    """Move `ref` to the version `name`, unless `expected_move` names it and needs no signature."""
    identity = catalog.resolve_trusted(name)
    if (
        expected_move is not None
        and expected_move.snapshot == identity
        and (not has_signing_key() or catalog.refs.has_trusted_signature(ref, expected_move.number))
    ):
        catalog.sign(identity)
        catalog.refs.sign(ref, expected_move.number)
        return expected_move
    return _move(store, catalog, ref, identity, expected_move, note)


def _move(
    store: Store,
    catalog: Catalog[Any],
    ref: str,
    identity: str,
    expected_move: RefMove | None,
    note: str,
) -> RefMove:
    with store.intents.hold(f"move-{secrets.token_hex(8)}", [catalog.manifest_path(identity)]):
        if missing_files := find_missing(store, catalog, identity):
            raise RefusedError(
                f"ref {ref} was not moved: {catalog.noun} {identity[:12]} in {store.url} is "
                f"incomplete ({missing_files[0].path}: {missing_files[0].what}); `verify` lists "
                "all problems"
            )
        if catalog is store.snapshots and (
            found_pages := find_taken_down_pages(store, store.snapshots.get(identity).content)
        ):
            raise RefusedError(
                f"ref {ref} was not moved: page {found_pages[0].page} ({found_pages[0].title!r}) "
                f"in snapshot {identity[:12]} in {store.url} was taken down: run `takedown --yes` "
                "to its end, and use the snapshot that replaces it"
            )
        catalog.sign(identity)
        try:
            return catalog.refs.move(ref, identity, expected_move.number if expected_move else 0, note)
        except RefConflictError as error:
            raise _build_conflict_error(store, catalog, ref, catalog.refs.find_current(ref)) from error


def _build_conflict_error(
    store: Store, catalog: Catalog[Any], ref: str, current_move: RefMove | None
) -> RefConflictError:
    if current_move is None:
        action = f"deleted ref {ref} in {store.url}"
    else:
        identity, number = current_move.snapshot[:12], current_move.number
        action = f"moved ref {ref} in {store.url} to {catalog.noun} {identity} ({ref}@{number})"
    return RefConflictError(
        f"another writer {action} first, and that move is kept: run this again if it is still wanted"
    )
