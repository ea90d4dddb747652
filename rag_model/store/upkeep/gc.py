"""Collect garbage: mark the files that are needed and delete the others, while writers may be running.

These files are needed:
* those that a snapshot, a model or an evaluation names: every manifest is a root, whether a ref names it or not
  (`expire` decides which manifests are kept);
* those that the current snapshots of the refs were made from (`store.upkeep.roots`), so that the next build can reuse
  them; of older snapshots only their own files are needed;
* the newest checkpoint of every training whose model is not published (`store.upkeep.unfinished`);
* those that valid intents rely on (`store.objects.intents`), and, while a build runs, those that any record of the
  memo names, since the build may be about to reuse them;
* recent ones: written less than `grace` ago, or later than 24 hours before the oldest running writer started.

The last rule keeps writers simple. A writer trusts a blob that it finds in the store only if the blob is younger than
twelve hours, and otherwise writes it again (`Blobs`). So every blob that a running writer trusted was written less than
twelve hours before its start, and is kept, even if the clocks of writer and store are twelve hours apart. Nothing is
lost between the plan and the deletion either: `rag_model.store.upkeep.sweep` checks again before every batch.

A grace of 0 is as safe for writers that hold an intent, as `reindex`, `publish`, `tag` and `rollback` do. If files are
put into a store by hand before their manifest, the grace must be longer than the time between the two.

Nothing is deleted if a possible root cannot be read: a manifest or an intent that is damaged or of a newer format, a
current snapshot that is missing, or a folder that this version does not know.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rag_model.errors import StoreError, UsageError
from rag_model.landing import TEMPORARY
from rag_model.store.objects.files import PROBED, Found
from rag_model.store.objects.intents import INTENT_COUNTS
from rag_model.store.store import Store
from rag_model.store.upkeep.roots import mark
from rag_model.store.upkeep.sweep import View, rehearse, sweep
from rag_model.store.upkeep.unfinished import unneeded
from rag_model.store.versions.signatures import SIGNED
from rag_model.store.versions.takedowns import FOLDER
from rag_model.store.versions.trainings import FOLDER as TRAININGS

MARGIN = 24 * 3600.0  # seconds; files that are younger at a running writer's start are kept; also the default grace
KINDS = ("blobs", "memo", "runs", "reports", "trainings", "leftovers")
_FOLDERS = {
    "blobs",
    "evaluations",
    "intents",
    "memo",
    "models",
    "probe",
    "refs",
    "reports",
    "runs",
    "snapshots",
    "sweeps",
    TRAININGS,
} | {FOLDER}
_REPORT = re.compile(r"reports/([0-9a-f]{64})\.html")
_RUN = re.compile(r"runs/([^/]+)/.+")
_PASSING = re.compile(rf"(?:{'|'.join(PROBED)})/.+|(?:.+/)?{re.escape(TEMPORARY)}[^/]*")


@dataclass(frozen=True, slots=True)
class Tally:
    """The number and size of files of one kind."""

    files: int
    bytes: int


def gc(store: Store, grace: float = MARGIN, *, dry_run: bool = False) -> dict[str, Tally]:
    """Delete files that are not needed and at least `grace` seconds old; return their number and size by kind.

    With `dry_run` nothing is deleted, only counted. The kinds are `KINDS`; `leftovers` are temporary files, intents of
    writers that died, and signatures of what was deleted. Safe while writers run; a pull of a snapshot that has just
    expired may fail with an error.

    Danger: blobs that no manifest names yet count as garbage once they are older than the grace.

    Raises:
        StoreError: a possible root cannot be read, and nothing was deleted; or a file cannot be deleted, and the next
        run deletes the rest.
    """
    if grace < 0:
        raise UsageError(f"a grace must be 0 or more, not {grace} s")
    planner = _Planner(store, grace)
    return _tallies(rehearse(store, planner) if dry_run else sweep(store, planner, threads=store.files.at_once))


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
        """Return the files to delete, records of the memo before the blobs that they name."""
        if unknown := {*self.store.files.names("", kind="directory")} - _FOLDERS:
            raise StoreError(
                f"{self.store.url} holds a folder {min(unknown)!r} that this version does not know, and nothing was "
                "deleted: use the bookwheel that made it, or move it elsewhere"
            )
        old = min([view.now - self.grace, *(intent.started - MARGIN for intent in view.intents)])
        marked = mark(self.store, view, old)
        blobs = (file for digest, file in marked.blobs if digest not in marked.needed)
        others = (*self._runs(old), *self._reports(view), *unneeded(self.store), *self._passing(), *_signatures(view))
        dead = (file for folder in ("intents", "sweeps") for file in self.store.files.tree(folder))
        return [
            *marked.unneeded,
            *(file for file in (*blobs, *others) if file.written <= old),
            *(file for file in dead if file.written < min(old, view.now - INTENT_COUNTS)),
        ]

    def _runs(self, old: float) -> Iterator[Found]:
        """Yield the reports of ended runs: those whose newest report is old."""
        runs: dict[str, list[Found]] = defaultdict(list)
        for file in self.store.files.tree("runs"):
            if run := _RUN.fullmatch(file.path):
                runs[run[1]].append(file)
        for files in runs.values():
            if all(file.written <= old for file in files):
                yield from files

    def _reports(self, view: View) -> Iterator[Found]:
        """Yield the report pages of snapshots that were deleted."""
        known = {file.path.partition("/")[2].removesuffix(".json") for file in view.manifests}
        for file in self.store.files.tree("reports"):
            if (page := _REPORT.fullmatch(file.path)) and page[1] not in known:
                yield file

    def _passing(self) -> Iterator[Found]:
        """Yield temporary files; on a local disk they are in the folder of the file that they were written for."""
        folders = ("",) if self.store.files.is_local else PROBED
        return (file for folder in folders for file in self.store.files.tree(folder) if _PASSING.fullmatch(file.path))


def _signatures(view: View) -> Iterator[Found]:
    """Yield the signatures of manifests and moves that were deleted, or were never written."""
    for file in (*view.moves, *view.manifests, *view.models, *view.evaluations):
        if (signed := SIGNED.fullmatch(file.path)) and f"{signed[1]}.json" not in view.names:
            yield file
