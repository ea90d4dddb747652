"""Publish a snapshot and move its ref: the manifest last, then the ref, and only past the gate.

Whoever loses a race for the ref looks again: the winner is the new parent, and the gate is asked anew.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rag_model.errors import RefConflictError
from rag_model.evaluation.gate import Verdict, Vitals
from rag_model.store.manifest import Manifest
from rag_model.store.refs import RefMove
from rag_model.store.store import Store

_TRIES = 100  # races lost in a row before giving up; each costs a few small reads


@dataclass(frozen=True, slots=True)
class Published:
    """A snapshot in the store, and where its ref stands."""

    snapshot: str
    verdict: Verdict
    move: RefMove | None  # None: the gate said no, and the ref stays where it was


def vitals(manifest: Manifest) -> Vitals:
    """Return what the gate compares of a snapshot."""
    space = manifest.content.space
    return Vitals(
        passages=manifest.content.n,
        space=None if space is None else space["digest"],
        newest_revision=manifest.content.corpus.get("newest_revision") or "",
    )


def current_vitals(store: Store, ref: str) -> tuple[RefMove | None, Vitals | None]:
    """Return a ref's newest move and the vitals of what it names; (None, None) for a ref that does not exist."""
    move = store.refs.current(ref)
    return move, vitals(store.snapshots.get(move.snapshot)) if move else None


def move_ref(store: Store, snapshot: str, ref: str, judge: Callable[[Vitals | None], Verdict]) -> Published:
    """Move `ref` to a published `snapshot` if `judge`, given the parent's vitals, agrees.

    A ref that names the snapshot already is left alone, so a rerun adds nothing to its history.

    Raises:
        RefConflictError: other writers won every one of many races.
        StoreError: the store cannot exclude a second writer, or cannot be written.
    """
    for _ in range(_TRIES):
        now, parent = current_vitals(store, ref)
        verdict = judge(parent)
        if not verdict.passed:
            return Published(snapshot, verdict, None)
        if now is not None and now.snapshot == snapshot:
            return Published(snapshot, verdict, now)
        try:
            return Published(snapshot, verdict, store.refs.move(ref, snapshot, now.number if now else 0))
        except RefConflictError:
            continue
    raise RefConflictError(f"ref {ref} in {store.url} was moved by others {_TRIES} times in a row: try again")
