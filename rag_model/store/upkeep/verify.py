"""Verify a version: hash all its files and check the logs of refs. Probe a store."""

import secrets
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from rag_model.digest import digest_chunks
from rag_model.errors import StoreError
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.files import encode_json, read_ahead
from rag_model.store.pulling.deltas import find_delta, list_delta_steps
from rag_model.store.store import Store
from rag_model.store.versions.catalog import Catalog
from rag_model.store.versions.checks import VersionContent

_THREADS = 4  # threads that verify files in parallel: hashing and reading release the GIL
BlobCheck = Callable[[Store, BlobRef], str | None]  # returns what is wrong with a blob, or None


@dataclass(frozen=True, slots=True)
class StoreProblem:
    """A file that is missing or damaged."""

    # path in the snapshot (`index/hnsw.faiss`) or in the store (`refs/latest/00000003.json`)
    path: str
    blob: str | None  # blob id of a version's file; None for other files of the store
    what: str  # what is wrong with the file


def verify_version(store: Store, identity: str, catalog: Catalog[Any] | None = None) -> list[StoreProblem]:
    """Return all problems of a version (a full id), and of the refs of snapshots and models.

    `catalog` is the catalog of the version, by default that of the snapshots. Every file of the
    version is read, in four threads with at most four chunks of 16 MiB each.
    """
    problems = _check_version(store, catalog or store.snapshots, identity, _check_hash)
    problems += _verify_deltas(store, identity) if catalog in (None, store.snapshots) else []
    return [*problems, *_verify_refs(store.snapshots), *_verify_refs(store.models)]


def find_missing(store: Store, catalog: Catalog[Any], identity: str) -> list[StoreProblem]:
    """Return the files of a version (a full id), including its manifest, that are missing or have
    another size.

    Reads only the manifest and the sizes of files, so it is fast enough before a ref is moved;
    `verify_version` also finds changed bytes.
    """
    return _check_version(store, catalog, identity, _check_size)


def find_missing_files(store: Store, content: VersionContent) -> list[StoreProblem]:
    """Return the files of a version's content, published or not, that are missing or have another
    size.
    """
    return _check_files(store, content, _check_size)


@contextmanager
def protect_files(store: Store, version: str, manifest_path: str, content: VersionContent) -> Iterator[None]:
    """Hold an intent for all files of a version that is being published, and check that all exist.

    Raises:
        StoreError: files are missing; the message names `version`.
    """
    with store.intents.hold(
        f"publish-{secrets.token_hex(8)}", {manifest_path, *(blob_ref.path for blob_ref in content.files.values())}
    ):
        if problems := find_missing_files(store, content):
            raise StoreError(
                f"{version} cannot be published in {store.url}: {len(problems)} of its files were "
                f"deleted meanwhile (first {problems[0].path}): run the same command again to "
                "create them"
            )
        yield


def _check_version(store: Store, catalog: Catalog[Any], identity: str, check: BlobCheck) -> list[StoreProblem]:
    try:
        manifest = catalog.get(identity)
    except StoreError as error:
        return [StoreProblem(f"{catalog.noun}s/{identity}.json", None, str(error))]
    return _check_files(store, manifest.content, check)


def _check_files(store: Store, content: VersionContent, check: BlobCheck) -> list[StoreProblem]:
    problem_by_blob = _find_blob_problems(store, dict.fromkeys(content.files.values()), check)
    return [
        StoreProblem(path, ref.id, problem_by_blob[ref])
        for path, ref in content.files.items()
        if ref in problem_by_blob
    ]


def _find_blob_problems(store: Store, blobs: Collection[BlobRef], check: BlobCheck) -> dict[BlobRef, str]:
    n_ahead = _THREADS if check is _check_hash else store.files.concurrency
    problems = zip(blobs, read_ahead(partial(check, store), [*blobs], n_ahead), strict=True)
    return {ref: problem for ref, problem in problems if problem is not None}


def _verify_deltas(store: Store, identity: str) -> list[StoreProblem]:
    """Return the damaged deltas from a snapshot's parents; instead of a damaged delta, pullers
    fetch the whole file.
    """
    try:
        manifest = store.snapshots.get(identity)
        parent_contents = [store.snapshots.get(parent).content for parent in manifest.parents]
    except StoreError:  # the manifest's damage was already reported, or the parent has expired
        return []
    all_steps = (list_delta_steps(parent_content, manifest.content).items() for parent_content in parent_contents)
    steps = [(path, step) for items in all_steps for path, steps_of_path in items for step in steps_of_path]
    deltas = store.files.map_concurrently(lambda item: find_delta(store, item[1]), steps)
    delta_path_by_blob = {ref: path for (path, _), ref in zip(steps, deltas, strict=True) if ref}
    problem_by_blob = _find_blob_problems(store, delta_path_by_blob, _check_hash)
    return [
        StoreProblem(f"the delta of {delta_path_by_blob[ref]}", ref.id, problem)
        for ref, problem in problem_by_blob.items()
    ]


def _check_size(store: Store, ref: BlobRef) -> str | None:
    """Return a sentence about a blob's wrong size; None if the size is right."""
    stored_bytes = store.files.get_size(ref.path)
    if stored_bytes is None:
        return "missing"
    return None if stored_bytes == ref.size else f"{stored_bytes} bytes instead of {ref.size}"


def _check_hash(store: Store, ref: BlobRef) -> str | None:
    """Return a sentence about a blob's damage; None if the blob is intact."""
    if size_problem := _check_size(store, ref):
        return size_problem
    try:
        digest = digest_chunks(store.files.iter_chunks(ref.path, ref.size))
    except StoreError as error:
        return str(error)
    return None if digest == ref.id else "its bytes do not match its name"


def _verify_refs(catalog: Catalog[Any]) -> list[StoreProblem]:
    problems = []
    refs, known_ids = catalog.refs, set(catalog.list_ids())
    for name in refs.list_names(include_deleted=True):
        numbers = refs.list_numbers(name)
        missing_numbers = sorted(
            {*range(min(numbers, default=1), max(numbers, default=0) + 1)} - {*numbers}
        )  # moves before the first number have expired
        problems += [
            StoreProblem(refs.move_path(name, number), None, "missing: the log has a gap") for number in missing_numbers
        ]
        move_problems = catalog.files.map_concurrently(partial(_verify_move, catalog, known_ids, name), numbers)
        results = zip(numbers, move_problems, strict=True)
        problems += [
            StoreProblem(refs.move_path(name, number), None, problem) for number, problem in results if problem
        ]
    return problems


def _verify_move(catalog: Catalog[Any], known_ids: set[str], ref: str, number: int) -> str | None:
    """Return a sentence about the damage of a ref's move; None if the move is intact."""
    try:
        identity = catalog.refs.get_move(ref, number).snapshot
    except StoreError as error:
        return str(error)
    if identity and identity not in known_ids and catalog.files.find(catalog.manifest_path(identity)) is None:
        return f"its {catalog.noun} {identity} is missing"
    return None


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of `probe_store`."""

    creates_exclusively: bool  # whether the second of two writers that create a file fails
    clock_skew: float  # seconds by which the store's clock is ahead of this machine's clock
    seconds: float  # seconds to write, list, read and remove a small file


def probe_store(store: Store) -> ProbeResult:
    """Write, list, read and remove a small file, and let several writers race to create one.

    The probe leaves no file. `gc` and intents use only the store's clock, so a difference between
    the clocks does no harm.

    Raises:
        StoreError: the store cannot be read or written, or returns other bytes than were written.
    """
    path, probe_value = f"probe/doctor-{secrets.token_hex(8)}.json", {"nonce": secrets.token_hex(8)}
    start_seconds, time_before = time.perf_counter(), time.time()
    try:
        written_at = store.intents.write_timed(path, probe_value)
        time_after = time.time()
        if store.files.read(path) != encode_json(probe_value):
            raise StoreError(
                f"{store.files.url_of(path)} does not hold the bytes that were just written: use another store"
            )
    finally:
        with suppress(StoreError):  # this error would hide an earlier one
            store.files.remove(path)
    seconds = time.perf_counter() - start_seconds
    # The store's clock was read between two readings of this machine's clock, so the clocks differ
    # only if the store's time is not between these two.
    clock_skew = min(written_at - time_before, 0.0) if written_at < time_after else written_at - time_after
    return ProbeResult(store.files.supports_exclusive_creation(), round(clock_skew, 1), round(seconds, 3))
