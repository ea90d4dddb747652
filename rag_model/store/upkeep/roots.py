"""Mark the blobs and records that a store needs, and find the unneeded files of trainings.

The files of all versions and the origins of current snapshots are needed. A snapshot's manifest
names its files. The memo names the origins of a file: the record that has the file as an output
also has its inputs, which are outputs of other records or lists of further blobs. A delta or a
record of the gate is needed as long as its target files (`memo.TARGET_KEY`) are files of a
snapshot.

Files are deleted in batches while writers may be running. Before each batch, its list is written to
the store, and the store is listed again. If there is a new intent, snapshot or move of a ref, the
plan is invalid, and a new one is made. `store.objects.intents` explains why this is safe.
"""

import re
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from rag_model.errors import StoreError
from rag_model.store.objects.files import StoredFile, read_ahead
from rag_model.store.objects.intents import SWEEP_VALID_SECONDS, Intent
from rag_model.store.objects.memo import MIRROR_STAGE_PREFIX, RECORD_PATH, TARGET_KEY, parse_record
from rag_model.store.store import Store
from rag_model.store.versions.catalog import Catalog
from rag_model.store.versions.checks import FULL_ID
from rag_model.store.versions.signatures import SIGNATURE_PATH
from rag_model.store.versions.trainings import (
    CHECKPOINT_PATH,
    FOLDER,
    TRAINING_STAGE,
    StoredCheckpoint,
)

_BATCH_FILES = 500  # maximum files of a batch; a writer may have to wait until the batch is deleted
_MAX_PLANS = 100  # maximum number of plans; each new writer invalidates the current plan
AnnounceBatch = Callable[[Sequence[StoredFile], Sequence[Intent]], float]  # see `_open_sweep`
_BLOB = re.compile(r"blobs/[0-9a-f]{2}/([0-9a-f]{64})")
MANIFEST_PATH = re.compile(r"(snapshots|models|evaluations)/([0-9a-f]{64})\.json")
MOVE_PATH = re.compile(r"(models/)?refs/([^/]+)/([0-9]{8})\.json")
_BLOB_ID = re.compile(rb"sha256:([0-9a-f]{64})")
_BLOB_LIST_START = b'[{"id": "sha256:'  # first bytes of a file that lists blobs
# Stages that write trained files, whose inputs (such as earlier months' vectors) are not kept.
_TRAINING_STAGES = ("train", "follow", "redact_training")
_MANIFESTS_AHEAD = 8  # manifests that are read at a time; few, as each names thousands of files


@dataclass(frozen=True, slots=True)
class StoreView:
    """The writers and files that a store had when a deletion was planned."""

    time: float  # time of the view in seconds by the store's clock
    intents: tuple[Intent, ...]
    moves: tuple[StoredFile, ...]  # files of the refs' logs
    manifests: tuple[StoredFile, ...]  # manifests of snapshots, and their signatures
    models: tuple[StoredFile, ...] = ()  # manifests of models and files of their refs' logs
    evaluations: tuple[StoredFile, ...] = ()  # manifests of evaluations

    @classmethod
    def read(cls, store: Store, time: float) -> "StoreView":
        """List the intents and then the files, so that the files of a writer that ended in between
        are seen.
        """
        intents = tuple(store.intents.list_live_intents(time))
        folders = ("refs", "snapshots", "models", "evaluations")
        return cls(time, intents, *(tuple(store.files.iter_tree(folder)) for folder in folders))

    @property
    def needed_paths(self) -> frozenset[str]:
        """The paths of the files that valid intents declare as needed."""
        return frozenset().union(*(intent.needs for intent in self.intents if intent.needs is not None))

    @property
    def has_build(self) -> bool:
        """Whether a build is running, which may reuse any file."""
        return any(intent.needs is None for intent in self.intents)

    @property
    def has_root(self) -> bool:
        """Whether the store lists any ref, manifest or running writer."""
        return bool(self.paths)

    def is_current(self, later_view: "StoreView") -> bool:
        """Return whether this view has every file and intent of a later view."""
        return self.paths >= later_view.paths

    def leave_out(self, paths: Collection[str]) -> "StoreView":
        """Return the view that the store would have without some files."""
        groups = (self.moves, self.manifests, self.models, self.evaluations)
        remaining_groups = (tuple(file for file in group if file.path not in paths) for group in groups)
        return StoreView(self.time, self.intents, *remaining_groups)

    @property
    def paths(self) -> frozenset[str]:
        """The paths of all files of the view."""
        files = frozenset(file.path for file in (*self.moves, *self.manifests, *self.models, *self.evaluations))
        return files | {f"intents/{intent.name}.json" for intent in self.intents}


DeletionPlan = Callable[[StoreView], Sequence[StoredFile]]  # returns the files to delete, in order


def preview_sweep(store: Store, plan: DeletionPlan) -> list[StoredFile]:
    """Return the files that a sweep would delete now, without deleting them.

    Raises:
        StoreError: the store cannot be read, or the small file for reading its clock cannot be
            written.
    """
    with _open_sweep(store) as announce_batch:
        return list(_make_plan(store, plan, announce_batch)[1])


def sweep(store: Store, plan: DeletionPlan, *, threads: int) -> list[StoredFile]:
    """Delete the files that `plan` returns, and return the deleted files. With one thread, they are
    deleted in order.

    Raises:
        StoreError: a file cannot be deleted, or new writers invalidated every plan; the next sweep
            deletes the rest.
    """
    deleted_files: list[StoredFile] = []
    with _open_sweep(store) as announce_batch:
        for _ in range(_MAX_PLANS):
            view, files = _make_plan(store, plan, announce_batch)
            if _delete_batches(store, view, files, announce_batch, threads, deleted_files):
                return deleted_files
    raise _build_too_many_plans_error(store)


def _make_plan(
    store: Store, plan: DeletionPlan, announce_batch: AnnounceBatch
) -> tuple[StoreView, Sequence[StoredFile]]:
    for _ in range(_MAX_PLANS):
        view = StoreView.read(store, announce_batch((), ()))
        try:
            return view, plan(view)
        except StoreError:
            if view.paths == StoreView.read(store, view.time).paths:
                raise
    raise _build_too_many_plans_error(store)  # a listed file was deleted during every attempt


def _build_too_many_plans_error(store: Store) -> StoreError:
    return StoreError(f"new writers in {store.url} invalidated {_MAX_PLANS} plans for a deletion: run it again")


def _delete_batches(
    store: Store,
    view: StoreView,
    files: Sequence[StoredFile],
    announce_batch: AnnounceBatch,
    threads: int,
    deleted_files: list[StoredFile],
) -> bool:
    """Delete the files in batches; return False as soon as the plan is out of date."""
    for i in range(0, len(files), _BATCH_FILES):
        batch = files[i : i + _BATCH_FILES]
        deadline = time.monotonic() + SWEEP_VALID_SECONDS / 2
        store_time = announce_batch(batch, view.intents)
        if not view.is_current(StoreView.read(store, store_time)):
            return False
        with ThreadPoolExecutor(threads) as pool:
            deleted_flags = list(pool.map(partial(_delete_unchanged, store, deadline), batch))
        deleted_files += [file for file, is_gone in zip(batch, deleted_flags, strict=True) if is_gone]
        if time.monotonic() > deadline:
            return False
    return True


def _delete_unchanged(store: Store, deadline: float, file: StoredFile) -> bool:
    """Delete a file, unless it was written after the listing, or the sweep has expired."""
    current_file = store.files.find(file.path)
    if time.monotonic() > deadline or current_file is None or current_file.modified != file.modified:
        return False
    store.files.remove(file.path)
    return True


@contextmanager
def _open_sweep(store: Store) -> Iterator[AnnounceBatch]:
    """Yield a function that records the files to delete and the known intents, and returns the time
    by the store's clock.
    """
    path = f"sweeps/{secrets.token_hex(8)}.json"

    def announce_batch(files: Sequence[StoredFile], known_intents: Sequence[Intent]) -> float:
        sweep_record = {
            "condemned": [file.path for file in files],
            "knows": [intent.name for intent in known_intents],
        }
        return store.intents.write_timed(path, {"format": 1, **sweep_record})

    try:
        yield announce_batch
    finally:
        with suppress(StoreError):  # if the file stays, the sweep expires
            store.files.remove(path)


@dataclass(frozen=True, slots=True)
class NeededBlobs:
    """The needed blobs (64 hex digits), all blobs, and the unneeded records of a store."""

    needed_digests: frozenset[str]
    all_blobs: tuple[tuple[str, StoredFile], ...]  # (digest, file) of all blobs
    unneeded_records: tuple[StoredFile, ...]  # records of the memo


def mark_needed_blobs(store: Store, view: StoreView, cutoff: float) -> NeededBlobs:
    """Mark the files that versions, writers and memo records not older than `cutoff` need.

    Raises:
        StoreError: a manifest or the move of a ref cannot be read, or the current version of a ref
            is missing.
    """
    blobs = tuple((match[1], file) for file in store.files.iter_tree("blobs") if (match := _BLOB.fullmatch(file.path)))
    records = _list_records(store)
    snapshot_files = _read_catalog_files(store.snapshots, view.manifests, view.moves)
    model_files = _read_catalog_files(store.models, view.models, view.models)
    evaluation_files = _read_catalog_files(store.evaluations, view.evaluations, ())
    intent_digests = {match[1] for path in view.needed_paths if (match := _BLOB.fullmatch(path))}
    needed_digests = snapshot_files.digests | model_files.digests | evaluation_files.digests | intent_digests
    needed_digests |= _find_origin_digests(store, snapshot_files.current_digests, records, dict(blobs))
    needed_digests |= set().union(
        *(record.outputs for record in records if record.targets and record.targets <= snapshot_files.digests)
    )
    needed_digests |= _find_mirror_digests(store, records, snapshot_files.dumps, dict(blobs))
    old_records = [] if view.has_build else [record for record in records if record.newest.modified < cutoff]
    needed_digests |= set().union(
        *(record.digests for record in records if view.has_build or record.newest.modified >= cutoff)
    )
    unneeded_records = [record for record in old_records if not record.is_needed(needed_digests)]
    return NeededBlobs(
        frozenset(needed_digests), blobs, tuple(file for record in unneeded_records for file in record.files)
    )


@dataclass(frozen=True, slots=True)
class _MemoRecord:
    """All generations of one record of the memo; only the newest generation is valid."""

    stage: str
    files: tuple[StoredFile, ...]  # newest first
    outputs: frozenset[str]  # digests of its outputs
    digests: frozenset[str]  # digests of its inputs and outputs
    targets: frozenset[str] = frozenset()  # digests of the files for which its outputs are kept
    mirror_of: str = ""  # address of the wiki, if the record lists a wiki's pages
    key: str = ""

    @property
    def newest(self) -> StoredFile:
        return self.files[0]

    def is_needed(self, needed_digests: set[str]) -> bool:
        """Return whether all outputs of the record are needed or, if it has no outputs, whether a
        blob that it names is needed.
        """
        return self.outputs <= needed_digests if self.outputs else bool(self.digests & needed_digests)


def _list_records(store: Store) -> list[_MemoRecord]:
    generations_by_name: dict[tuple[str, str], dict[int, StoredFile]] = defaultdict(dict)
    for file in store.files.iter_tree("memo"):
        if match := RECORD_PATH.fullmatch(file.path):
            generations_by_name[match[1], match[2]][int(match[3] or 1)] = file
    return list(store.files.map_concurrently(lambda item: _read_record(store, *item), [*generations_by_name.items()]))


def _read_record(store: Store, stage_and_key: tuple[str, str], generations: Mapping[int, StoredFile]) -> _MemoRecord:
    files = tuple(generations[generation] for generation in sorted(generations, reverse=True))
    record_bytes = store.files.read(files[0].path) or b""
    record = parse_record(*stage_and_key, record_bytes)
    outputs = frozenset(ref.hex_digest for ref in record.outputs.values()) if record else frozenset()
    target = record.stats.get(TARGET_KEY) if record else None
    target_ids = [target] if isinstance(target, str) else target or ()
    targets = frozenset(blob_id.partition(":")[2] for blob_id in target_ids)
    mirrored_dump = str(record.stats.get("dump", "")) if record and record.stage.startswith(MIRROR_STAGE_PREFIX) else ""
    stage, key = stage_and_key
    return _MemoRecord(stage, files, outputs, frozenset(_find_digests(record_bytes)), targets, mirrored_dump, key)


@dataclass(frozen=True, slots=True)
class _CatalogFiles:
    """The digests of the files of a catalog's versions, and the dumps that the versions were built
    from.
    """

    digests: set[str]  # digests of all versions' files
    current_digests: set[str]  # digests of the files of current versions
    dumps: set[str]  # paths and URLs of the dumps that the versions were built from


def _read_catalog_files(
    catalog: Catalog[Any], manifests: Iterable[StoredFile], moves: Iterable[StoredFile]
) -> _CatalogFiles:
    ref_by_current_id, files = _read_ref_by_current_id(catalog, moves), _CatalogFiles(set(), set(), set())
    manifest_ids = set[str]()
    for manifest in _iter_manifests(catalog, manifests):
        digests = {ref.hex_digest for ref in manifest.content.files.values()}
        manifest_ids.add(manifest.id)
        files.digests.update(digests)
        files.dumps.add(str(getattr(manifest, "provenance", {}).get("dump") or ""))
        if manifest.id in ref_by_current_id:
            files.current_digests.update(digests)
    for identity, ref in ref_by_current_id.items():
        if identity not in manifest_ids:
            raise _build_missing_error(catalog, identity, ref)
    return files


def list_manifest_ids(files: Iterable[StoredFile], folder: str) -> tuple[str, ...]:
    """Return the sorted ids of the manifests among files that are in `folder`, such as
    snapshots.
    """
    matches = [match for file in files if (match := MANIFEST_PATH.fullmatch(file.path))]
    return tuple(sorted(match[2] for match in matches if match[1] == folder))


def _iter_manifests(catalog: Catalog[Any], files: Iterable[StoredFile]) -> Iterator[Any]:
    identities = [match[2] for file in files if (match := MANIFEST_PATH.fullmatch(file.path))]
    return filter(None, read_ahead(catalog.find, identities, _MANIFESTS_AHEAD))


def _read_ref_by_current_id(catalog: Catalog[Any], moves: Iterable[StoredFile]) -> dict[str, str]:
    """Return, for the id of each version that is current for a ref, the name of one such ref."""
    newest_moves = [(ref, max(files)) for ref, files in group_moves_by_ref(moves).items()]
    return {current_id: ref for (ref, _), current_id in read_ids_at_moves(catalog, newest_moves).items() if current_id}


def group_moves_by_ref(files: Iterable[StoredFile]) -> dict[str, dict[int, StoredFile]]:
    """Return the files of refs' moves by ref and move number."""
    log_by_ref: dict[str, dict[int, StoredFile]] = defaultdict(dict)
    for file in files:
        if move_match := MOVE_PATH.fullmatch(file.path):
            log_by_ref[move_match[2]][int(move_match[3])] = file
    return log_by_ref


def read_ids_at_moves(catalog: Catalog[Any], moves: Sequence[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """Return, by (ref, number), the id of the version that each move names; "" for a deletion."""
    identities = catalog.files.map_concurrently(lambda move: catalog.refs.get_move(*move).snapshot, moves)
    return dict(zip(moves, identities, strict=True))


def _build_missing_error(catalog: Catalog[Any], identity: str, ref: str) -> StoreError:
    return StoreError(
        f"ref {ref} in {catalog.files.url} names {catalog.noun} {identity[:12]}, which is missing: "
        f"restore it from a copy of the store, or move the ref with `rollback {ref}` or `tag`; "
        "nothing was deleted"
    )


def _find_origin_digests(
    store: Store,
    start_digests: Iterable[str],
    records: Iterable[_MemoRecord],
    blobs: Mapping[str, StoredFile],
) -> set[str]:
    """Return the digests of files and of all their origins; inputs of trained files are left
    out.
    """
    records_by_output: dict[str, list[_MemoRecord]] = defaultdict(list)
    for record in records:
        for output in record.outputs if record.stage not in _TRAINING_STAGES else ():
            records_by_output[output].append(record)
    digests: set[str] = set()
    pending_digests = list(start_digests)
    while pending_digests:
        digest = pending_digests.pop()
        if digest in digests:
            continue
        digests.add(digest)
        for record in records_by_output[digest]:
            pending_digests += record.digests
        if not records_by_output[digest] and digest in blobs:
            pending_digests += _read_blob_list(store, blobs[digest])
    return digests


def _find_mirror_digests(
    store: Store,
    records: Iterable[_MemoRecord],
    dumps: Collection[str],
    blobs: Mapping[str, StoredFile],
) -> set[str]:
    """Return the digests of the newest state of each wiki from which a snapshot was built."""
    newest_by_stage: dict[str, _MemoRecord] = {}
    for record in records:
        if record.mirror_of and record.mirror_of in dumps and record.outputs:
            newest_record = newest_by_stage.get(record.stage, record)
            newest_by_stage[record.stage] = max(record, newest_record, key=lambda state: state.key)
    list_digests = {digest for record in newest_by_stage.values() for digest in record.outputs}
    return list_digests.union(*(_read_blob_list(store, blobs[digest]) for digest in list_digests if digest in blobs))


def _read_blob_list(store: Store, file: StoredFile) -> list[str]:
    """Return the digests in a file that lists blobs; empty if the file is no such list."""
    if store.files.read_range(file.path, 0, min(file.size, len(_BLOB_LIST_START))) != _BLOB_LIST_START:
        return []
    return _find_digests(store.files.read(file.path) or b"")


def _find_digests(record_bytes: bytes) -> list[str]:
    return [digest.decode() for digest in _BLOB_ID.findall(record_bytes)]


def iter_unneeded_files(store: Store, view: StoreView, expired_paths: Collection[str] = ()) -> Iterator[StoredFile]:
    """Yield the unneeded files of trainings: if the model is published, all files of its training.

    Otherwise all except the newest record, its signatures and its files. If the newest record
    cannot be read, every file is kept. The records in `expired_paths` count as deleted.
    """
    for training_key, all_files in _group_by_training(store).items():
        files = [file for file in all_files if file.path not in expired_paths]
        if _is_training_published(store, view, training_key):
            yield from files
            continue
        try:
            # If a training is abandoned, all its records expire.
            newest_checkpoint = store.trainings.find_newest(training_key) if len(files) == len(all_files) else None
        except StoreError:
            continue
        needed_paths = _list_needed_paths(store, training_key, newest_checkpoint)
        yield from (
            file for file in files if file.path not in needed_paths and not _is_signature_of(file, needed_paths)
        )


def find_abandoned_trainings(
    store: Store, view: StoreView, cutoff: float
) -> tuple[Sequence[StoredFile], Sequence[str]]:
    """Return the records of abandoned trainings, and the snapshots of the other trainings.

    A training is abandoned if all its files were written at `cutoff` or before. While a build or a
    training runs, no training counts as abandoned, because it may be continued.
    """
    records, kept_keys = list[StoredFile](), list[str]()
    for training_key, files in _group_by_training(store).items():
        if not view.has_build and all(file.modified <= cutoff for file in files):
            records += [file for file in files if CHECKPOINT_PATH.fullmatch(file.path)]
        else:
            kept_keys.append(training_key)
    snapshots = [
        checkpoint.progress.snapshot
        for training_key, checkpoint in store.trainings.iter_newest()
        if training_key in kept_keys
    ]
    return records, snapshots


def _group_by_training(store: Store) -> dict[str, list[StoredFile]]:
    files_by_training: dict[str, list[StoredFile]] = defaultdict(list)
    for file in store.files.iter_tree(FOLDER):
        if FULL_ID.fullmatch(training_key := file.path.split("/")[1]):
            files_by_training[training_key].append(file)
    return files_by_training


def _is_training_published(store: Store, view: StoreView, training_key: str) -> bool:
    """Return whether a training's model is in the store, so that it is not trained again."""
    record = store.memo.find(TRAINING_STAGE, training_key)
    model = record.stats.get("model") if record else None
    return isinstance(model, str) and f"models/{model}.json" in view.paths


def _list_needed_paths(store: Store, training_key: str, checkpoint: StoredCheckpoint | None) -> set[str]:
    if checkpoint is None:
        return set()
    return {
        store.trainings.record_path(training_key, checkpoint.number),
        *(f"{FOLDER}/{training_key}/{ref.path}" for ref in checkpoint.files.values()),
    }


def _is_signature_of(file: StoredFile, needed_paths: set[str]) -> bool:
    match = SIGNATURE_PATH.fullmatch(file.path)
    return match is not None and f"{match[1]}.json" in needed_paths
