"""Garbage: what nothing needs, found by marking what is needed and sweeping the rest, beside running writers.

Needed is
* what a snapshot or a model names: every manifest is a root, whether a ref names it or not (`expire` decides which
  stay);
* what the current snapshots of the refs were made from (`store.upkeep.roots`): so the next build finds what it may
  reuse. Of older snapshots their own files stay and no more;
* what live intents rely on (`store.objects.intents`), and, while a build runs, whatever a record of the memo names,
  since the build may be about to reuse it;
* what is young: written less than `grace` ago, or since 24 hours before the oldest live writer started.

The last of these keeps writers simple. A writer trusts a blob that it finds in the store only where that is younger
than twelve hours, and else writes it again (`Blobs`). So whatever a live writer trusted was written less than twelve
hours before its start, and stays, even where the clocks of the writer and of the store are twelve hours apart. Nor is
anything lost between looking and deleting: `rag_model.store.upkeep.sweep` looks again before every batch.

A grace of 0 is as safe for writers that hold an intent, as `reindex`, `publish`, `tag` and `rollback` do. Files that
are put into a store by hand, for a manifest that comes later, need a grace that is longer than that takes.

Nothing at all is deleted where something cannot be read that might be a root: a manifest or an intent that is damaged
or of a newer format, a current snapshot that is missing, or a folder that this version does not know.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rag_model.errors import StoreError, UsageError
from rag_model.landing import TEMPORARY
from rag_model.store.objects.files import Found
from rag_model.store.objects.intents import INTENT_COUNTS
from rag_model.store.store import Store
from rag_model.store.upkeep.roots import mark
from rag_model.store.upkeep.sweep import View, rehearse, sweep
from rag_model.store.versions.takedowns import FOLDER

MARGIN = 24 * 3600.0  # seconds before a live writer's start since which everything stays; the usual grace, too
KINDS = ("blobs", "memo", "runs", "reports", "leftovers")
_FOLDERS = {"blobs", "intents", "memo", "models", "probe", "refs", "reports", "runs", "snapshots", "sweeps"} | {FOLDER}
_REPORT = re.compile(r"reports/([0-9a-f]{64})\.html")
_RUN = re.compile(r"runs/([^/]+)/.+")
_PASSING = re.compile(rf"probe/.+|(?:.+/)?{re.escape(TEMPORARY)}[^/]*")
_THREADS = 8


@dataclass(frozen=True, slots=True)
class Tally:
    """How much of one kind."""

    files: int
    bytes: int


def gc(store: Store, grace: float = MARGIN, *, dry_run: bool = False) -> dict[str, Tally]:
    """Delete what nothing needs and what was written `grace` seconds ago or before; return how much, by kind.

    With `dry_run` nothing is deleted, and what would be is counted. The kinds are `KINDS`; `leftovers` are temporary
    files of writers that died, and their intents. Safe beside writers; a pull of a snapshot that was expired a moment
    ago may fail, and says so.

    Danger: blobs that no manifest names yet are taken for garbage once they are older than the grace.

    Raises:
        StoreError: something that may be a root cannot be read, and nothing was deleted; or a file cannot be deleted,
        and the rest is found by the next run.
    """
    if grace < 0:
        raise UsageError(f"a grace cannot be below 0, as {grace} s is")
    planner = _Planner(store, grace)
    return _tallies(rehearse(store, planner) if dry_run else sweep(store, planner, threads=_THREADS))


def _tallies(files: Iterable[Found]) -> dict[str, Tally]:
    tallies = dict.fromkeys(KINDS, Tally(0, 0))
    for file in files:
        top = file.path.partition("/")[0]
        kind = top if top in KINDS and not _PASSING.fullmatch(file.path) else "leftovers"
        tallies[kind] = Tally(tallies[kind].files + 1, tallies[kind].bytes + file.size)
    return tallies


@dataclass(frozen=True, slots=True)
class _Planner:
    store: Store
    grace: float

    def __call__(self, view: View) -> list[Found]:
        """Return what to delete, records of the memo before the blobs that they name."""
        if unknown := {*self.store.files.names("", kind="directory")} - _FOLDERS:
            raise StoreError(
                f"{self.store.url} holds a folder {min(unknown)!r} that this version does not know, and nothing was "
                "deleted: use the bookwheel that made it, or move it elsewhere"
            )
        old = min([view.now - self.grace, *(intent.started - MARGIN for intent in view.intents)])
        marked = mark(self.store, view, old)
        blobs = (file for digest, file in marked.blobs if digest not in marked.needed)
        others = (*self._runs(old), *self._reports(view), *self._passing())
        dead = (file for folder in ("intents", "sweeps") for file in self.store.files.tree(folder))
        return [
            *marked.unneeded,
            *(file for file in (*blobs, *others) if file.written <= old),
            *(file for file in dead if file.written < min(old, view.now - INTENT_COUNTS)),
        ]

    def _runs(self, old: float) -> Iterator[Found]:
        """Yield the reports of runs that ended, if the newest of a run is old."""
        runs: dict[str, list[Found]] = defaultdict(list)
        for file in self.store.files.tree("runs"):
            if run := _RUN.fullmatch(file.path):
                runs[run[1]].append(file)
        for files in runs.values():
            if all(file.written <= old for file in files):
                yield from files

    def _reports(self, view: View) -> Iterator[Found]:
        """Yield the pages about snapshots that are gone."""
        known = {file.path.partition("/")[2].removesuffix(".json") for file in view.manifests}
        for file in self.store.files.tree("reports"):
            if (page := _REPORT.fullmatch(file.path)) and page[1] not in known:
                yield file

    def _passing(self) -> Iterator[Found]:
        """Yield temporary files: on a disk they lie beside what they were to become."""
        folder = "" if self.store.files.is_local else "probe"
        return (file for file in self.store.files.tree(folder) if _PASSING.fullmatch(file.path))
