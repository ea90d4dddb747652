"""Expire: delete old moves of refs, the manifests that no move names any more, and evaluations of what is gone.

The current move of a ref is never deleted, so a tag (a ref with one move) keeps its snapshot for good. Of the other
moves the newest `keep` are kept, and those that were current less than `older_than` ago. The oldest moves of a log are
deleted first and numbers never change, so a log has no gaps, and a ref can be moved as before. Of a deleted ref only
the last move, which records the deletion, is kept once it is `older_than` old.

Then manifests are deleted that no kept move names and that are at least `older_than` old. This includes snapshots that
a gate refused and snapshots without a tag. Their files stay until `gc` finds that nothing else needs them. A model
does not keep the snapshot that it was trained on.

An evaluation lives as long as its snapshot, and as its model if that is one of the store: it is deleted with the first
of them that goes, however young it is. A tag on the snapshot keeps both.

A training that was not finished is abandoned when its newest checkpoint is `older_than` old and no build or training
runs; until then its snapshot is kept. Its record is deleted, and its files stay until `gc`.

Ages are by the store's clock (`rag_model.store.upkeep.sweep`). The bound is inclusive.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

from rag_model.errors import UsageError
from rag_model.store.objects.files import Found
from rag_model.store.store import MODEL, Store
from rag_model.store.upkeep.sweep import View, rehearse, sweep
from rag_model.store.upkeep.unfinished import abandoned
from rag_model.store.versions.evaluations import every, subjects
from rag_model.store.versions.shelf import Shelf
from rag_model.store.versions.trainings import RECORD

_MOVE = re.compile(r"(models/)?refs/([^/]+)/(\d{8})\.json")
_MANIFEST = re.compile(r"(snapshots|models|evaluations)/([0-9a-f]{64})\.json")


@dataclass(frozen=True, slots=True)
class Policy:
    """Which moves and manifests are old enough to be deleted."""

    keep: int = 10  # newest moves of every ref, the current one among them
    older_than: float = 90 * 86400.0  # seconds

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise UsageError(f"keep must be at least 1, not {self.keep}: the current move of a ref is always kept")
        if self.older_than < 0:
            raise UsageError(f"an age must be 0 or more, not {self.older_than} s")


@dataclass(frozen=True, slots=True)
class Expired:
    """What was deleted, or would be."""

    moves: tuple[str, ...]  # `latest@3`, or `model:reader@3` for a ref of models; oldest first, by ref
    snapshots: tuple[str, ...]  # full ids, sorted
    models: tuple[str, ...] = ()  # likewise
    evaluations: tuple[str, ...] = ()  # likewise
    trainings: tuple[str, ...] = ()  # keys of abandoned ones, sorted


def expire(store: Store, policy: Policy | None = None, *, dry_run: bool = False) -> Expired:
    """Delete old moves of refs and the manifests that only they named; with `dry_run` only return them.

    Danger: a ref cannot be rolled back to a deleted move, and `gc` will delete the files of deleted manifests.

    Raises:
        StoreError: a ref's log cannot be read, or a file cannot be deleted; run it again to continue.
    """
    plan = _Planner(store, policy or Policy())
    files = rehearse(store, plan) if dry_run else sweep(store, plan, threads=1)
    moves = [move for file in files if (move := _MOVE.fullmatch(file.path))]
    manifests = sorted(manifest.groups() for file in files if (manifest := _MANIFEST.fullmatch(file.path)))
    snapshots, models, evaluations = (
        tuple(identity for folder, identity in manifests if folder == kind)
        for kind in ("snapshots", "models", "evaluations")
    )
    trainings = {found[1] for file in files if (found := RECORD.fullmatch(file.path))}
    named = tuple(f"{MODEL if move[1] else ''}{move[2]}@{int(move[3])}" for move in moves)
    return Expired(named, snapshots, models, evaluations, tuple(sorted(trainings)))


@dataclass(frozen=True, slots=True)
class _Planner:
    store: Store
    policy: Policy

    def __call__(self, view: View) -> list[Found]:
        """Return the moves to delete, oldest first, then the manifests, so that nothing names a missing manifest."""
        bound = view.now - self.policy.older_than
        ended, kept_by_trainings = abandoned(self.store, view, bound)
        forgotten, named = [], {*view.needs, *map(self.store.snapshots.path, kept_by_trainings)}
        for shelf, files in ((self.store.snapshots, view.moves), (self.store.models, view.models)):
            logs = _logs(files)
            newest = {ref: (ref, max(moves)) for ref, moves in logs.items()}
            names = _names(shelf, [*newest.values()])
            keep = {ref: self.policy.keep if names[its] else 1 for ref, its in newest.items()}
            gone = {ref: self._old(moves, bound, keep[ref]) for ref, moves in logs.items()}
            forgotten += [moves[number] for ref, moves in logs.items() for number in sorted(gone[ref])]
            kept = [(ref, number) for ref, moves in logs.items() for number in moves if number not in gone[ref]]
            names |= _names(shelf, [its for its in kept if its not in names])
            named |= {shelf.path(identity) for identity in names.values() if identity}
        manifests = [file for file in (*view.manifests, *view.models) if _MANIFEST.fullmatch(file.path)]
        unnamed = [file for file in manifests if file.path not in named and file.written <= bound]
        left = {file.path for file in manifests} - {file.path for file in unnamed}
        return [*forgotten, *self._orphans(view, left), *unnamed, *ended]

    def _orphans(self, view: View, kept: set[str]) -> list[Found]:
        """Return the manifests of evaluations whose snapshot or model is not kept."""
        left = {one.id for one in every(self.store) if kept.issuperset(subjects(self.store, one.content.subject))}
        found = [(file, named) for file in view.evaluations if (named := _MANIFEST.fullmatch(file.path))]
        return [file for file, named in found if named[2] not in left and file.path not in view.needs]

    @staticmethod
    def _old(moves: dict[int, Found], bound: float, keep: int) -> set[int]:
        """Return the numbers of the moves to delete: from the oldest, up to the first that must be kept."""
        numbers = sorted(moves)
        gone: set[int] = set()
        for number, following in islice(pairwise(numbers), max(0, len(numbers) - keep)):
            if moves[following].written > bound:
                break
            gone.add(number)
        return gone


def _names(shelf: Shelf[Any], moves: Sequence[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """Return what each move names; "" for nothing."""
    found = shelf.files.ask(lambda move: shelf.refs.at(*move).snapshot, moves)
    return dict(zip(moves, found, strict=True))


def _logs(files: Sequence[Found]) -> dict[str, dict[int, Found]]:
    logs: dict[str, dict[int, Found]] = defaultdict(dict)
    for file in files:
        if move := _MOVE.fullmatch(file.path):
            logs[move[2]][int(move[3])] = file
    return logs
