"""Retire snapshots: delete the manifests of those that a takedown replaced; `gc` then deletes their files.

Safe while writers run, as `expire` is: a manifest that a writer relies on is kept, and the next run retires it.
"""

import re
from dataclasses import dataclass

from rag_model.store.objects.files import Found
from rag_model.store.store import Store
from rag_model.store.upkeep.sweep import View, sweep

_MANIFEST = re.compile(r"snapshots/([0-9a-f]{64})\.json")


def retire(store: Store) -> list[str]:
    """Delete the manifests of snapshots that were replaced, and return their ids.

    Danger: a reader that has such a snapshot open from the store cannot read its files after `gc`.

    Raises:
        StoreError: a file cannot be deleted; run it again to continue.
    """
    removed = (_MANIFEST.fullmatch(file.path) for file in sweep(store, _Planner(store), threads=1))
    return sorted(found[1] for found in removed if found)


@dataclass(frozen=True, slots=True)
class _Planner:
    store: Store

    def __call__(self, view: View) -> list[Found]:
        """Return the manifests of the snapshots that were replaced, if their replacement exists."""
        there = {file.path for file in view.manifests}
        return [file for file in view.manifests if file.path not in view.needs and self._replaced(file.path, there)]

    def _replaced(self, path: str, there: set[str]) -> bool:
        named = _MANIFEST.fullmatch(path)
        place = self.store.takedowns.in_place_of(named[1]) if named else None
        return place == "" or (place is not None and f"snapshots/{place}.json" in there)
