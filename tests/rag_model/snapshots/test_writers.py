"""Writers and sweeps at once: every order of their steps, as far as hypothesis goes, loses nothing.

Each actor is a thread, and each of its operations on the store waits for its turn: an order of turns is an order of
operations, and is found again.
"""

import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.digest import digest_bytes
from rag_model.errors import RefusedError, StoreError, UsageError
from rag_model.evaluation.gate import GateVerdict
from rag_model.snapshots.publish import publish
from rag_model.store import BlobRef, Content, Manifest, Store
from rag_model.store.objects import files, intents
from rag_model.store.objects.files import Files, StoredFile
from rag_model.store.upkeep import gc, roots, verify
from rag_model.store.upkeep.expire import ExpirePolicy, expire_store
from rag_model.store.versions import refs
from rag_model.store.versions.moves import rollback, tag

Actor = Callable[[Store], object]
AT_ONCE = ExpirePolicy(keep=1, older_than=0)
PATIENCE = 300.0  # seconds until a test gives up on a thread
PASSED = GateVerdict(True, ())


class Turns:
    """One operation at a time: that of the actor whose turn it is, by number."""

    def __init__(self, order: Sequence[int]) -> None:
        self.order = order
        self.changed = threading.Condition()
        self.alive: set[int] = set()
        self.waiting: set[int] = set()
        self.turn: int | None = None

    def take(self, actor: int) -> None:
        """Wait for this actor's turn."""
        with self.changed:
            self.waiting.add(actor)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.turn == actor, PATIENCE)
            self.turn = None

    def run(self, actors: Sequence[Callable[[], object]]) -> None:
        """Start all actors and give them their turns until all have ended."""
        self.alive = set(range(len(actors)))
        threads = [threading.Thread(target=self._play, args=pair, daemon=True) for pair in enumerate(actors)]
        for thread in threads:
            thread.start()
        turn = 0
        while True:
            with self.changed:
                assert self.changed.wait_for(lambda: self.alive == self.waiting, PATIENCE)
                if not self.alive:
                    break
                drawn = self.order[turn] if turn < len(self.order) else turn
                self.turn = sorted(self.alive)[drawn % len(self.alive)]
                self.waiting.discard(self.turn)
                self.changed.notify_all()
            turn += 1
        for thread in threads:
            thread.join()

    def _play(self, number: int, actor: Callable[[], object]) -> None:
        try:
            actor()
        finally:
            with self.changed:
                self.alive.discard(number)
                self.changed.notify_all()


class Stepped(Files):
    """Files of which each operation waits for a turn."""

    def __init__(self, url: str, wait: Callable[[], None]) -> None:
        super().__init__(url)
        self.wait = wait

    def iter_tree(self, folder: str = "") -> Iterator[StoredFile]:
        self.wait()
        yield from super().iter_tree(folder)


def _stepped(name: str) -> Callable[..., Any]:
    def operation(self: Stepped, *args: Any, **named: Any) -> Any:
        self.wait()
        return getattr(Files, name)(self, *args, **named)

    return operation


for _name in (
    "create",
    "delete_folder",
    "find",
    "list_names",
    "write",
    "read",
    "read_range",
    "remove",
    "get_size",
    "upload",
):
    setattr(Stepped, _name, _stepped(_name))


def ages_ago(store: Store) -> None:
    """Make all that a store in memory holds a hundred days older."""
    held = fsspec.filesystem("memory").store
    for path, file in held.items():
        if path.startswith(f"/{store.url.partition('://')[2].strip('/')}/"):
            file.created -= timedelta(days=100)


def manifest(*files: bytes) -> Manifest:
    """A snapshot of small files, in no store yet."""
    blobs = {f"index/{number}": BlobRef(digest_bytes(data), len(data)) for number, data in enumerate(files)}
    return Manifest(Content({"kind": "wiki"}, (), blobs))


def put(store: Store, *files: bytes) -> str:
    for data in files:
        store.blobs.put_bytes(data)
    return store.snapshots.publish(manifest(*files))


REFUSED = manifest(b"refused")  # published, and no ref names it


@contextmanager
def library() -> Iterator[Store]:
    """A store where `latest` has moved on, a gate has refused a snapshot and a build has died, all of it long ago."""
    store = Store.open(f"memory://{secrets.token_hex(4)}", create=True)
    tag(store, put(store, b"encoder", b"first"), "latest")
    tag(store, put(store, b"encoder", b"second"), "latest")
    put(store, b"refused")
    store.memo.write_record("chunk", "k", {"passages": store.blobs.put_bytes(b"passages")}, {})
    store.blobs.put_bytes(b"orphan")
    ages_ago(store)
    try:
        yield store
    finally:
        fsspec.filesystem("memory").rm(store.url, recursive=True)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread an actor, and no pause between two looks: turns take its place."""
    for module in (files, refs, sys.modules[expire_store.__module__], gc, roots, verify):
        for name in {"MAX_REQUESTS", "_MANIFESTS", "_THREADS"} & vars(module).keys():
            monkeypatch.setattr(module, name, 1)
    monkeypatch.setattr(intents, "_PAUSE_SECONDS", 0)


def build(store: Store) -> None:
    """Go on with the build that died: by its record, and with a blob that nothing names."""
    with store.intents.hold("build"):
        if store.memo.find("chunk", "k") is None:
            store.memo.write_record("chunk", "k", {"passages": store.blobs.put_bytes(b"passages")}, {})
        store.blobs.put_bytes(b"orphan")
        publish(store, manifest(b"passages", b"orphan"), "latest", lambda parent: PASSED)


def publish_old_files(store: Store) -> None:
    publish(store, REFUSED, "latest", lambda parent: PASSED)


def roll_back(store: Store) -> None:
    rollback(store, "latest")


def tag_what_was_refused(store: Store) -> None:
    tag(store, REFUSED.id, "good")


def forget(store: Store) -> None:
    expire_store(store, AT_ONCE)
    gc.collect_garbage(store, 0.0)


def collect(store: Store) -> None:
    gc.collect_garbage(store, 0.0)


def whole(store: Store) -> bool:
    """Whether every snapshot in the store, and what every ref names, is there with all its files."""
    return not any(verify.verify_version(store, snapshot) for snapshot in store.snapshots.list_ids())


@pytest.mark.parametrize(
    "actors",
    [
        (build, collect),
        (build, forget),
        (build, collect, forget),
        (publish_old_files, forget),
        (roll_back, forget),
        (tag_what_was_refused, forget),
        (tag_what_was_refused, roll_back, forget, build),
    ],
    ids=lambda actors: "+".join(actor.__name__ for actor in actors),
)
@given(bursts=st.lists(st.tuples(st.integers(0, 11), st.integers(1, 40)), max_size=20))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_in_any_order_nothing_is_lost(actors: Sequence[Actor], bursts: list[tuple[int, int]], patience: None) -> None:
    with library() as store:
        refused: dict[str, Exception] = {}

        def run(actor: Actor, turns: Turns, number: int) -> None:
            own = Store(Stepped(store.url, partial(turns.take, number)))
            try:
                actor(own)
            except (StoreError, RefusedError, UsageError) as error:
                refused[actor.__name__] = error

        turns = Turns([actor for actor, steps in bursts for _ in range(steps)])
        turns.run([partial(run, actor, turns, number) for number, actor in enumerate(actors)])
        assert not {"build", "collect", "forget"} & refused.keys(), refused
        assert whole(store)
        assert store.files.list_names("intents") == store.files.list_names("sweeps") == []
        moved = [move.snapshot for name in store.refs.list_names() for move in store.refs.read_history(name)]
        if build in actors and roll_back not in actors:  # else it may have been rolled back, and then forgotten
            assert manifest(b"passages", b"orphan").id in moved
        if publish_old_files in actors and publish_old_files.__name__ not in refused:
            assert REFUSED.id in moved
