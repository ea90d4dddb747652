"""Delete files of a store in batches while writers may be running; used by `expire`, `gc` and `retire`.

Before a batch is deleted its list is written to the store, and the store is listed again. Anything new since the plan
(an intent, a snapshot, a move of a ref) voids the plan, and a new one is made: `store.objects.intents` says why this
is safe.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from rag_model.errors import StoreError
from rag_model.store.objects.files import Found
from rag_model.store.objects.intents import SWEEP_COUNTS, Intent
from rag_model.store.store import Store

_BATCH = 500  # files; a writer may have to wait for one batch
_PLANS = 100  # plans before giving up: each new writer voids one


@dataclass(frozen=True, slots=True)
class View:
    """The writers and files of a store that a plan is based on."""

    now: float  # seconds by the store's clock
    intents: tuple[Intent, ...]
    moves: tuple[Found, ...]  # files of the refs' logs
    manifests: tuple[Found, ...]
    models: tuple[Found, ...] = ()  # their manifests and the files of their refs' logs
    evaluations: tuple[Found, ...] = ()  # their manifests

    @classmethod
    def of(cls, store: Store, now: float) -> "View":
        """List a store, intents first: a writer that ends after that has written its snapshot and its move before."""
        intents = tuple(store.intents.live(now))
        folders = ("refs", "snapshots", "models", "evaluations")
        return cls(now, intents, *(tuple(store.files.tree(folder)) for folder in folders))

    @property
    def needs(self) -> frozenset[str]:
        """The paths that valid intents rely on."""
        return frozenset().union(*(intent.needs for intent in self.intents if intent.needs is not None))

    @property
    def building(self) -> bool:
        """Whether a build is running, which may reuse any file."""
        return any(intent.needs is None for intent in self.intents)

    def covers(self, later: "View") -> bool:
        """Whether a later view contains nothing new."""
        return self.names >= later.names

    @property
    def names(self) -> frozenset[str]:
        """The paths of all files of the view."""
        files = frozenset(file.path for file in (*self.moves, *self.manifests, *self.models, *self.evaluations))
        return files | {f"intents/{intent.name}.json" for intent in self.intents}


Plan = Callable[[View], Sequence[Found]]  # what to delete, in which order


def rehearse(store: Store, plan: Plan) -> list[Found]:
    """Return the files that a sweep would delete now, without deleting them.

    Raises:
        StoreError: the store cannot be read, or the small file that its clock is read from cannot be written.
    """
    with _sweeping(store) as condemn:
        return list(_planned(store, plan, condemn)[1])


def sweep(store: Store, plan: Plan, *, threads: int) -> list[Found]:
    """Delete the files that `plan` returns, and return them; a single thread deletes in the plan's order.

    Raises:
        StoreError: a file cannot be deleted, or new writers voided every plan; the next sweep deletes the rest.
    """
    deleted: list[Found] = []
    with _sweeping(store) as condemn:
        for _ in range(_PLANS):
            view, doomed = _planned(store, plan, condemn)
            if _all_deleted(store, view, doomed, condemn, threads, deleted):
                return deleted
    raise _never_still(store)


def _planned(store: Store, plan: Plan, condemn: "Condemn") -> tuple[View, Sequence[Found]]:
    for _ in range(_PLANS):
        view = View.of(store, condemn((), ()))
        try:
            return view, plan(view)
        except StoreError:
            if view.names == View.of(store, view.now).names:
                raise
    raise _never_still(store)  # a file that could not be read was deleted meanwhile


def _never_still(store: Store) -> StoreError:
    return StoreError(f"new writers in {store.url} voided {_PLANS} plans for a deletion: run it again")


def _all_deleted(
    store: Store, view: View, doomed: Sequence[Found], condemn: "Condemn", threads: int, deleted: list[Found]
) -> bool:
    """Delete batch by batch; return False as soon as the store contains something that the plan does not know."""
    for start in range(0, len(doomed), _BATCH):
        batch, until = doomed[start : start + _BATCH], time.monotonic() + SWEEP_COUNTS / 2
        now = condemn(batch, view.intents)
        if not view.covers(View.of(store, now)):
            return False
        with ThreadPoolExecutor(threads) as pool:
            gone = list(pool.map(partial(_delete, store, until), batch))
        deleted += [file for file, is_gone in zip(batch, gone, strict=True) if is_gone]
        if time.monotonic() > until:
            return False
    return True


def _delete(store: Store, until: float, file: Found) -> bool:
    """Delete a file, unless it was written again since it was listed, or the sweep is no longer valid for writers."""
    now = store.files.find(file.path)
    if time.monotonic() > until or now is None or now.written != file.written:
        return False
    store.files.remove(file.path)
    return True


Condemn = Callable[[Sequence[Found], Sequence[Intent]], float]


@contextmanager
def _sweeping(store: Store) -> Iterator[Condemn]:
    """Yield a function that writes the list of files to delete and of known intents; it returns the store's time."""
    path = f"sweeps/{secrets.token_hex(8)}.json"

    def condemn(files: Sequence[Found], knows: Sequence[Intent]) -> float:
        value = {"condemned": [file.path for file in files], "knows": [intent.name for intent in knows]}
        return store.intents.stamp(path, {"format": 1, **value})

    try:
        yield condemn
    finally:
        with suppress(StoreError):  # it expires by itself
            store.files.remove(path)
