"""Delete files of a store in batches, beside writers: what `expire` and `gc` share.

Before a batch is deleted it is written down, and the store is looked at again. What came since the plan (an intent, a
snapshot, a move of a ref) makes the plan void, and a new one is made: `store.objects.intents` says why this is safe.
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

_BATCH = 500  # files; what a writer may have to wait for
_PLANS = 100  # made before giving up: each is made void by a writer that came meanwhile


@dataclass(frozen=True, slots=True)
class View:
    """Whom and what a plan knows of."""

    now: float  # seconds by the store's clock
    intents: tuple[Intent, ...]
    moves: tuple[Found, ...]  # files of the refs' logs
    manifests: tuple[Found, ...]
    models: tuple[Found, ...] = ()  # their manifests and the files of their refs' logs

    @classmethod
    def of(cls, store: Store, now: float) -> "View":
        """Look at a store: at its intents first, since whoever ends after that has left its snapshot and its move."""
        intents = tuple(store.intents.live(now))
        moves, manifests, models = (tuple(store.files.tree(folder)) for folder in ("refs", "snapshots", "models"))
        return cls(now, intents, moves, manifests, models)

    @property
    def needs(self) -> frozenset[str]:
        """The paths that live intents rely on."""
        return frozenset().union(*(intent.needs for intent in self.intents if intent.needs is not None))

    @property
    def building(self) -> bool:
        """Whether a build is running, which may reuse whatever it finds."""
        return any(intent.needs is None for intent in self.intents)

    def covers(self, later: "View") -> bool:
        """Whether nothing came since."""
        return self.names >= later.names

    @property
    def names(self) -> frozenset[str]:
        """The paths of all of it."""
        files = frozenset(file.path for file in (*self.moves, *self.manifests, *self.models))
        return files | {f"intents/{intent.name}.json" for intent in self.intents}


Plan = Callable[[View], Sequence[Found]]  # what to delete, in which order


def rehearse(store: Store, plan: Plan) -> list[Found]:
    """Return what a sweep would delete now, and delete nothing.

    Raises:
        StoreError: the store cannot be read, or its clock cannot be asked, which takes a small file.
    """
    with _sweeping(store) as condemn:
        return list(_planned(store, plan, condemn)[1])


def sweep(store: Store, plan: Plan, *, threads: int) -> list[Found]:
    """Delete what `plan` says, and return it; one thread deletes in the plan's order.

    Raises:
        StoreError: a file cannot be deleted, or writers came without end; what is left is found by the next sweep.
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
    raise _never_still(store)  # what could not be read had gone meanwhile


def _never_still(store: Store) -> StoreError:
    return StoreError(f"writers came to {store.url} {_PLANS} times while it was looked at: run it again")


def _all_deleted(
    store: Store, view: View, doomed: Sequence[Found], condemn: "Condemn", threads: int, deleted: list[Found]
) -> bool:
    """Delete batch by batch; False as soon as the view is no longer that of the plan."""
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
    """Delete a file, unless it was written again since it was listed, or writers may have stopped waiting for it."""
    now = store.files.find(file.path)
    if time.monotonic() > until or now is None or now.written != file.written:
        return False
    store.files.remove(file.path)
    return True


Condemn = Callable[[Sequence[Found], Sequence[Intent]], float]


@contextmanager
def _sweeping(store: Store) -> Iterator[Condemn]:
    """Give a function that writes down what is about to be deleted, knowing of whom; it returns the store's time."""
    path = f"sweeps/{secrets.token_hex(8)}.json"

    def condemn(files: Sequence[Found], knows: Sequence[Intent]) -> float:
        value = {"condemned": [file.path for file in files], "knows": [intent.name for intent in knows]}
        return store.intents.stamp(path, {"format": 1, **value})

    try:
        yield condemn
    finally:
        with suppress(StoreError):  # it lapses by itself
            store.files.remove(path)
