"""Expire: forget old moves of refs, and the snapshots and models that no move names any more.

What a ref names now is never forgotten, so a tag, a ref with one move, is kept for good, with its snapshot. Of other
moves the newest `keep` stay, and so do those from which the ref moved on less than `older_than` ago. A log loses its
oldest moves first and keeps its numbers, so what is left of it has no gaps, and a ref moves on as if nothing were gone.
Of a ref that was deleted no move stays but the last, which says so, once that is `older_than` ago.

Then manifests go that no kept move names and that were written `older_than` ago or before: those that a gate refused,
and what nobody tagged, too. Their files stay until `gc` finds that nothing else needs them. A model does not keep the
snapshot that it was trained on.

Ages are by the store's clock (`rag_model.store.upkeep.sweep`). The bound is inclusive: what is just as old goes.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from rag_model.errors import UsageError
from rag_model.store.objects.files import Found
from rag_model.store.store import MODEL, Store
from rag_model.store.upkeep.sweep import View, rehearse, sweep

_MOVE = re.compile(r"(models/)?refs/([^/]+)/(\d{8})\.json")
_MANIFEST = re.compile(r"(snapshots|models)/([0-9a-f]{64})\.json")


@dataclass(frozen=True, slots=True)
class Policy:
    """What is old enough to be forgotten."""

    keep: int = 10  # newest moves of every ref, the current one among them
    older_than: float = 90 * 86400.0  # seconds

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise UsageError(f"keep must be at least 1, not {self.keep}: what a ref names now is never forgotten")
        if self.older_than < 0:
            raise UsageError(f"an age cannot be below 0, as {self.older_than} s is")


@dataclass(frozen=True, slots=True)
class Expired:
    """What was forgotten, or would be."""

    moves: tuple[str, ...]  # `latest@3`, of a model's ref `model:reader@3`; oldest first, by ref
    snapshots: tuple[str, ...]  # full ids, sorted
    models: tuple[str, ...] = ()  # likewise


def expire(store: Store, policy: Policy | None = None, *, dry_run: bool = False) -> Expired:
    """Forget old moves of refs and what only they named; with `dry_run` say what that would be.

    Danger: what was forgotten cannot be rolled back to, and `gc` will delete its files.

    Raises:
        StoreError: a ref's log cannot be read, or a file not deleted; run again, it goes on.
    """
    plan = _Planner(store, policy or Policy())
    files = rehearse(store, plan) if dry_run else sweep(store, plan, threads=1)
    moves = [move for file in files if (move := _MOVE.fullmatch(file.path))]
    manifests = sorted(manifest.groups() for file in files if (manifest := _MANIFEST.fullmatch(file.path)))
    return Expired(
        tuple(f"{MODEL if move[1] else ''}{move[2]}@{int(move[3])}" for move in moves),
        tuple(identity for folder, identity in manifests if folder == "snapshots"),
        tuple(identity for folder, identity in manifests if folder == "models"),
    )


@dataclass(frozen=True, slots=True)
class _Planner:
    store: Store
    policy: Policy

    def __call__(self, view: View) -> list[Found]:
        """Return the moves to forget, oldest first, then the manifests: so no kept move ever names a missing one."""
        bound = view.now - self.policy.older_than
        forgotten, named = [], set(view.needs)
        for shelf, files in ((self.store.snapshots, view.moves), (self.store.models, view.models)):
            for ref, moves in _logs(files).items():
                keep = self.policy.keep if shelf.refs.at(ref, max(moves)).snapshot else 1
                gone = self._old(moves, bound, keep)
                forgotten += [moves[number] for number in sorted(gone)]
                kept = (shelf.refs.at(ref, number).snapshot for number in moves if number not in gone)
                named |= {shelf.path(identity) for identity in kept if identity}
        manifests = [file for file in (*view.manifests, *view.models) if _MANIFEST.fullmatch(file.path)]
        return forgotten + [file for file in manifests if file.path not in named and file.written <= bound]

    @staticmethod
    def _old(moves: dict[int, Found], bound: float, keep: int) -> set[int]:
        """Return the numbers to forget: from the oldest on, until one must stay."""
        numbers = sorted(moves)
        gone: set[int] = set()
        for number, following in islice(pairwise(numbers), max(0, len(numbers) - keep)):
            if moves[following].written > bound:
                break
            gone.add(number)
        return gone


def _logs(files: Sequence[Found]) -> dict[str, dict[int, Found]]:
    logs: dict[str, dict[int, Found]] = defaultdict(dict)
    for file in files:
        if move := _MOVE.fullmatch(file.path):
            logs[move[2]][int(move[3])] = file
    return logs
