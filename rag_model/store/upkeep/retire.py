"""Retire snapshots: delete the manifests of those that a takedown replaced, and of their evaluations.

The rows of an evaluation hold passages of its snapshot. `gc` then deletes the files.

Safe while writers run, as `expire` is: a manifest that a writer relies on is kept, and the next run retires it.
"""

import re
from dataclasses import dataclass

from rag_model.store.objects.files import Found
from rag_model.store.store import Store
from rag_model.store.upkeep.sweep import View, sweep
from rag_model.store.versions.evaluation_manifest import EvaluationManifest
from rag_model.store.versions.evaluations import every

_MANIFEST = re.compile(r"(snapshots|evaluations)/([0-9a-f]{64})\.json")


@dataclass(frozen=True, slots=True)
class Retired:
    """What was deleted: full ids, sorted."""

    snapshots: tuple[str, ...]
    evaluations: tuple[str, ...]


def retire(store: Store) -> Retired:
    """Delete the manifests of snapshots that were replaced, and of their evaluations, and return their ids.

    This machine's copies of the evaluations' files are deleted too.

    Danger: a reader that has such a snapshot open from the store cannot read its files after `gc`.

    Raises:
        StoreError: a file cannot be deleted; run it again to continue.
    """
    for one in of_replaced(store):
        for ref in one.content.files.values():
            store.blobs.forget(ref)
    files = sweep(store, _Planner(store), threads=1)
    gone = sorted(found.groups() for file in files if (found := _MANIFEST.fullmatch(file.path)))
    return Retired(*(tuple(one for folder, one in gone if folder == kind) for kind in ("snapshots", "evaluations")))


def of_replaced(store: Store) -> list[EvaluationManifest]:
    """Return the evaluations of snapshots that were replaced.

    Raises:
        StoreError: an evaluation or a takedown is damaged.
    """
    gone = store.takedowns.replaced()
    return [one for one in every(store) if one.content.subject.snapshot in gone] if gone else []


@dataclass(frozen=True, slots=True)
class _Planner:
    store: Store

    def __call__(self, view: View) -> list[Found]:
        """Return the manifests of the snapshots that were replaced, if their replacement exists, after evaluations."""
        there = {file.path for file in view.manifests}
        evaluations = {self.store.evaluations.path(one.id) for one in of_replaced(self.store)}
        gone = [file for file in view.evaluations if file.path in evaluations]
        gone += [file for file in view.manifests if self._replaced(file.path, there)]
        return [file for file in gone if file.path not in view.needs]

    def _replaced(self, path: str, there: set[str]) -> bool:
        named = _MANIFEST.fullmatch(path)
        place = self.store.takedowns.in_place_of(named[2]) if named else None
        return place == "" or (place is not None and f"snapshots/{place}.json" in there)
