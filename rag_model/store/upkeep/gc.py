"""Collect garbage: mark the needed files and delete the others, while writers may be running.

These files are needed:

* files that a snapshot, a model or an evaluation names: every manifest is a root, whether a ref
  names it or not (`expire` decides which manifests are kept);
* the inputs of the refs' current snapshots (`store.upkeep.roots`), so that the next build can reuse
  them; of older snapshots only their own files are needed;
* the pages, in their newest state, of a wiki that a snapshot was built from through its API;
* the newest checkpoint of every training whose model is not published;
* files that valid intents need (`store.objects.intents`) and, while a build runs, files that any
  record of the memo names, since the build may be about to reuse them;
* recent files: written less than `grace` ago, or later than 24 hours before the oldest running
  writer started. A reader with a lease does not count as a writer, so a service that reads the
  store for months keeps only the files of its snapshot.

The last rule keeps writers simple. A writer trusts an existing blob only if it is younger than
twelve hours, and otherwise writes it again (`Blobs`). So every blob that a running writer trusted
was written less than twelve hours before its start, and is kept, even if the clocks of writer and
store are twelve hours apart. Files that become needed after the plan are kept too, because
`rag_model.store.upkeep.roots` checks again before every batch.

Even with a grace of 0, writers that hold an intent are safe, such as `reindex`, `publish`, `tag`
and `rollback`. If files are copied into a store manually before their manifest, the grace must be
longer than the time between the two.

Files that were written since the listing began are kept, even with a grace of 0 and a store whose
clock counts whole seconds. Nothing is deleted if a store with blobs lists no root at all, for
example because a proxy replied in its place. Nothing is deleted if a possible root cannot be read:
a manifest or an intent that is damaged or of a newer format, a current snapshot that is missing, or
a folder that this version does not know.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from rag_model.atomic_write import TEMPORARY_PREFIX
from rag_model.errors import StoreError, UsageError
from rag_model.store.objects.files import PROBE_FOLDERS, StoredFile
from rag_model.store.objects.intents import INTENT_VALID_SECONDS
from rag_model.store.store import Store
from rag_model.store.upkeep.expire import ExpirePolicy, list_expired_files
from rag_model.store.upkeep.roots import StoreView, iter_unneeded_files, mark_needed_blobs, preview_sweep, sweep
from rag_model.store.versions.signatures import SIGNATURE_PATH
from rag_model.store.versions.takedowns import FOLDER as TAKEDOWNS
from rag_model.store.versions.trainings import FOLDER as TRAININGS

# Seconds: a file that was younger than this when a running writer started is kept. This is also the
# default grace period.
SAFETY_MARGIN = 24 * 3600.0
# kinds of deleted files: the folder of a file, or `leftovers` for all other files
GARBAGE_KINDS = ("blobs", "memo", "runs", "reports", "trainings", "leftovers")
# all folders of a store that this version of bookwheel knows
_FOLDERS = {
    "blobs", "evaluations", "intents", "memo", "models", "probe", "refs", "reports", "runs",
    "snapshots", "sweeps", TAKEDOWNS, TRAININGS,
}  # fmt: skip
_REPORT_PATH = re.compile(r"reports/([0-9a-f]{64})\.html")
_RUN_PATH = re.compile(r"runs/([^/]+)/.+")
_TEMPORARY_FILE = re.compile(rf"(?:{'|'.join(PROBE_FOLDERS)})/.+|(?:.+/)?{re.escape(TEMPORARY_PREFIX)}[^/]*")


@dataclass(frozen=True, slots=True)
class FileTally:
    """The number and total size of files of one kind."""

    files: int
    bytes: int


def collect_garbage(store: Store, grace: float = SAFETY_MARGIN, *, dry_run: bool = False) -> dict[str, FileTally]:
    """Delete unneeded files older than `grace` seconds; return their numbers and sizes by kind.

    With `dry_run` the files are only counted. The kinds are `GARBAGE_KINDS`; `leftovers` are
    temporary files, intents of killed writers, and signatures of deleted files. Safe while writers
    run; a pull of a snapshot that has just expired may fail with an error.

    Warning: blobs that no manifest names yet count as garbage if they are older than `grace`.

    Raises:
        StoreError: a possible root cannot be read, and nothing was deleted; or a file cannot be
            deleted, and the next run deletes the rest.
    """
    if grace < 0:
        raise UsageError(f"the grace period must be 0 or more, not {grace} s")
    plan = partial(_list_garbage, store, grace)
    return _count_by_kind(
        preview_sweep(store, plan) if dry_run else sweep(store, plan, threads=store.files.concurrency)
    )


def preview_garbage(store: Store, grace: float, policy: ExpirePolicy) -> dict[str, FileTally]:
    """Count the files that `collect_garbage` would delete after an `expire_store` with this policy.

    Raises:
        StoreError: a possible root cannot be read.
    """

    def plan(view: StoreView) -> list[StoredFile]:
        expired_paths = frozenset(file.path for file in list_expired_files(store, policy, view))
        return _list_garbage(store, grace, view.leave_out(expired_paths), expired_paths)

    return _count_by_kind(preview_sweep(store, plan))


def _count_by_kind(files: Iterable[StoredFile]) -> dict[str, FileTally]:
    tallies_by_kind = dict.fromkeys(GARBAGE_KINDS, FileTally(0, 0))
    for file in files:
        top_folder = file.path.partition("/")[0]
        kind = top_folder if top_folder in GARBAGE_KINDS and not _TEMPORARY_FILE.fullmatch(file.path) else "leftovers"
        tallies_by_kind[kind] = FileTally(tallies_by_kind[kind].files + 1, tallies_by_kind[kind].bytes + file.size)
    return tallies_by_kind


def _list_garbage(store: Store, grace: float, view: StoreView, expired_paths: Collection[str] = ()) -> list[StoredFile]:
    """Return the files to delete; records of the memo come before the blobs that they name."""
    if unknown_folders := {*store.files.list_names("", kind="directory")} - _FOLDERS:
        raise StoreError(
            f"{store.url} has a folder {min(unknown_folders)!r} that this version does "
            "not know, so nothing was deleted: use the bookwheel version that created it, or "
            "move it elsewhere"
        )
    writer_starts = [intent.started for intent in view.intents if not intent.is_lease]
    cutoff = min([view.time - grace, *(start - SAFETY_MARGIN for start in writer_starts)])
    marked_files = mark_needed_blobs(store, view, cutoff)
    if marked_files.all_blobs and not view.has_root:
        raise StoreError(
            f"{store.url} lists {len(marked_files.all_blobs):,} blobs but no ref, "
            "snapshot, model or evaluation. The listing may be wrong, so nothing was deleted: "
            "check the store, or delete the whole store if it is not needed"
        )
    unneeded_blobs = (file for digest, file in marked_files.all_blobs if digest not in marked_files.needed_digests)
    other_files = (
        *_iter_ended_run_files(store, cutoff),
        *_iter_orphan_reports(store, view),
        *iter_unneeded_files(store, view, expired_paths),
        *_iter_temporary_files(store),
        *_iter_orphan_signatures(view),
    )
    writer_files = (file for folder in ("intents", "sweeps") for file in store.files.iter_tree(folder))
    return [
        *marked_files.unneeded_records,
        *(file for file in (*unneeded_blobs, *other_files) if file.modified < cutoff),
        *(file for file in writer_files if file.modified < min(cutoff, view.time - INTENT_VALID_SECONDS)),
    ]


def _iter_ended_run_files(store: Store, cutoff: float) -> Iterator[StoredFile]:
    """Yield the reports of runs whose newest report is old."""
    files_by_run: dict[str, list[StoredFile]] = defaultdict(list)
    for file in store.files.iter_tree("runs"):
        if run_match := _RUN_PATH.fullmatch(file.path):
            files_by_run[run_match[1]].append(file)
    for files in files_by_run.values():
        if all(file.modified < cutoff for file in files):
            yield from files


def _iter_orphan_reports(store: Store, view: StoreView) -> Iterator[StoredFile]:
    """Yield the report pages of deleted snapshots, evaluations and models."""
    manifests = (*view.manifests, *view.evaluations, *view.models)
    version_ids = {file.path.rpartition("/")[2].removesuffix(".json") for file in manifests}
    for file in store.files.iter_tree("reports"):
        if (match := _REPORT_PATH.fullmatch(file.path)) and match[1] not in version_ids:
            yield file


def _iter_temporary_files(store: Store) -> Iterator[StoredFile]:
    """Yield temporary files; on a local disk they are next to their final files."""
    folders = ("",) if store.files.is_local else PROBE_FOLDERS
    return (
        file for folder in folders for file in store.files.iter_tree(folder) if _TEMPORARY_FILE.fullmatch(file.path)
    )


def _iter_orphan_signatures(view: StoreView) -> Iterator[StoredFile]:
    """Yield the signatures of manifests and moves that were deleted or never written."""
    for file in (*view.moves, *view.manifests, *view.models, *view.evaluations):
        if (match := SIGNATURE_PATH.fullmatch(file.path)) and f"{match[1]}.json" not in view.paths:
            yield file
