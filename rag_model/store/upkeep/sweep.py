"""Delete files of a store in batches while writers may be running.

Before each batch, its list is written to the store, and the store is listed again. A new intent,
snapshot or move of a ref since the plan invalidates it, and a new plan is made.
`store.objects.intents` explains why this is safe.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from rag_model.errors import StoreError
from rag_model.store.objects.files import StoredFile
from rag_model.store.objects.intents import SWEEP_VALID_SECONDS, Intent
from rag_model.store.store import Store

_BATCH_FILES = 500  # a writer may have to wait for one batch
_MAX_PLANS = 100  # each new writer invalidates a plan
Condemn = Callable[[Sequence[StoredFile], Sequence[Intent]], float]


@dataclass(frozen=True, slots=True)
class StoreView:
    """The writers and files of a store that a plan is based on."""

    time: float  # seconds by the store's clock
    intents: tuple[Intent, ...]
    moves: tuple[StoredFile, ...]  # files of the refs' logs
    manifests: tuple[StoredFile, ...]
    models: tuple[StoredFile, ...] = ()  # their manifests and the files of their refs' logs
    evaluations: tuple[StoredFile, ...] = ()  # their manifests

    @classmethod
    def read(cls, store: Store, time: float) -> "StoreView":
        """List a store, intents first: a writer without an intent has written its files already."""
        intents = tuple(store.intents.list_live(time))
        folders = ("refs", "snapshots", "models", "evaluations")
        return cls(time, intents, *(tuple(store.files.iter_tree(folder)) for folder in folders))

    @property
    def needed_paths(self) -> frozenset[str]:
        """The paths that valid intents need."""
        return frozenset().union(*(intent.needs for intent in self.intents if intent.needs is not None))

    @property
    def has_build(self) -> bool:
        """Whether a build is running, which may reuse any file."""
        return any(intent.needs is None for intent in self.intents)

    @property
    def has_root(self) -> bool:
        """Whether the store lists any ref, manifest or running writer."""
        return bool(self.paths)

    def is_current(self, later: "StoreView") -> bool:
        """Return whether a later view contains no new file or intent."""
        return self.paths >= later.paths

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
    with _open_sweep(store) as condemn:
        return list(_make_plan(store, plan, condemn)[1])


def sweep(store: Store, plan: DeletionPlan, *, threads: int) -> list[StoredFile]:
    """Delete and return the files that `plan` returns; a single thread keeps their order.

    Raises:
        StoreError: a file cannot be deleted, or new writers invalidated every plan; the next sweep
            deletes the rest.
    """
    deleted: list[StoredFile] = []
    with _open_sweep(store) as condemn:
        for _ in range(_MAX_PLANS):
            view, files = _make_plan(store, plan, condemn)
            if _delete_batches(store, view, files, condemn, threads, deleted):
                return deleted
    raise _gave_up_error(store)


def _make_plan(store: Store, plan: DeletionPlan, condemn: "Condemn") -> tuple[StoreView, Sequence[StoredFile]]:
    for _ in range(_MAX_PLANS):
        view = StoreView.read(store, condemn((), ()))
        try:
            return view, plan(view)
        except StoreError:
            if view.paths == StoreView.read(store, view.time).paths:
                raise
    raise _gave_up_error(store)  # an unreadable file was deleted in the meantime


def _gave_up_error(store: Store) -> StoreError:
    return StoreError(f"new writers in {store.url} invalidated {_MAX_PLANS} plans for a deletion: run it again")


def _delete_batches(
    store: Store,
    view: StoreView,
    files: Sequence[StoredFile],
    condemn: "Condemn",
    threads: int,
    deleted: list[StoredFile],
) -> bool:
    """Delete the files in batches; return False as soon as the plan is out of date."""
    for start in range(0, len(files), _BATCH_FILES):
        batch, deadline = (
            files[start : start + _BATCH_FILES],
            time.monotonic() + SWEEP_VALID_SECONDS / 2,
        )
        store_time = condemn(batch, view.intents)
        if not view.is_current(StoreView.read(store, store_time)):
            return False
        with ThreadPoolExecutor(threads) as pool:
            deleted_flags = list(pool.map(partial(_delete_unchanged, store, deadline), batch))
        deleted += [file for file, is_gone in zip(batch, deleted_flags, strict=True) if is_gone]
        if time.monotonic() > deadline:
            return False
    return True


def _delete_unchanged(store: Store, deadline: float, file: StoredFile) -> bool:
    """Delete a file, unless it was written since the listing or the sweep has expired."""
    current = store.files.find(file.path)
    if time.monotonic() > deadline or current is None or current.modified != file.modified:
        return False
    store.files.remove(file.path)
    return True


@contextmanager
def _open_sweep(store: Store) -> Iterator[Condemn]:
    """Yield a function that writes the doomed files and known intents, and returns the time."""
    path = f"sweeps/{secrets.token_hex(8)}.json"

    def condemn(files: Sequence[StoredFile], known_intents: Sequence[Intent]) -> float:
        value = {
            "condemned": [file.path for file in files],
            "knows": [intent.name for intent in known_intents],
        }
        return store.intents.write_timed(path, {"format": 1, **value})

    try:
        yield condemn
    finally:
        with suppress(StoreError):  # the sweep's file expires by itself
            store.files.remove(path)
