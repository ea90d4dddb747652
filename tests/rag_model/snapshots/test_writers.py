"""Concurrent writers and garbage collections: no order of their steps that hypothesis tries loses anything.

Each actor is a thread, and each of its operations on the store waits for its turn. So the order of the turns determines
the order of the operations, and a failure can be reproduced.
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
from tests.fixtures.store_files import are_snapshots_intact

Actor = Callable[[Store], object]
EXPIRE_NOW = ExpirePolicy(keep=1, older_than=0)
PATIENCE = 300.0  # the seconds after which a test stops waiting for a thread
PASSED_GATE = GateVerdict(True, ())


class TurnScheduler:
    """Lets one actor at a time run one operation, in the order of a list of actor numbers."""

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
                number = self.order[turn] if turn < len(self.order) else turn
                self.turn = sorted(self.alive)[number % len(self.alive)]
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


class SteppedFiles(Files):
    """Files whose operations wait for a turn."""

    def __init__(self, url: str, wait: Callable[[], None]) -> None:
        super().__init__(url)
        self.wait = wait

    def iter_tree(self, folder: str = "") -> Iterator[StoredFile]:
        self.wait()
        yield from super().iter_tree(folder)


def create_stepped_method(name: str) -> Callable[..., Any]:
    def operation(self: SteppedFiles, *args: Any, **options: Any) -> Any:
        self.wait()
        return getattr(Files, name)(self, *args, **options)

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
    setattr(SteppedFiles, _name, create_stepped_method(_name))


def age_all_files(store: Store) -> None:
    """Make all files of a store in memory a hundred days older."""
    memory_files = fsspec.filesystem("memory").store
    for path, file in memory_files.items():
        if path.startswith(f"/{store.url.partition('://')[2].strip('/')}/"):
            file.created -= timedelta(days=100)


def create_manifest(*files: bytes) -> Manifest:
    """Return the manifest of small files, without storing them."""
    blobs = {f"index/{number}": BlobRef(digest_bytes(data), len(data)) for number, data in enumerate(files)}
    return Manifest(Content({"kind": "wiki"}, (), blobs))


def put_snapshot(store: Store, *files: bytes) -> str:
    for data in files:
        store.blobs.put_bytes(data)
    return store.snapshots.publish(create_manifest(*files))


REFUSED_MANIFEST = create_manifest(b"refused")  # published without a ref


@contextmanager
def create_library() -> Iterator[Store]:
    """Yield an old store: `latest` has moved, a gate has refused a snapshot, and a build has died."""
    store = Store.open(f"memory://{secrets.token_hex(4)}", create=True)
    tag(store, put_snapshot(store, b"encoder", b"first"), "latest")
    tag(store, put_snapshot(store, b"encoder", b"second"), "latest")
    put_snapshot(store, b"refused")
    store.memo.write_record("chunk", "k", {"passages": store.blobs.put_bytes(b"passages")}, {})
    store.blobs.put_bytes(b"orphan")
    age_all_files(store)
    try:
        yield store
    finally:
        fsspec.filesystem("memory").rm(store.url, recursive=True)


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each actor in one thread, without pauses between polls, because turns replace them."""
    for module in (files, refs, sys.modules[expire_store.__module__], gc, roots, verify):
        for name in {"MAX_REQUESTS", "_MANIFESTS_AHEAD", "_THREADS"} & vars(module).keys():
            monkeypatch.setattr(module, name, 1)
    monkeypatch.setattr(intents, "_PAUSE_SECONDS", 0)


def build(store: Store) -> None:
    """Continue the dead build with its record and with an orphaned blob."""
    with store.intents.hold("build"):
        if store.memo.find("chunk", "k") is None:
            store.memo.write_record("chunk", "k", {"passages": store.blobs.put_bytes(b"passages")}, {})
        store.blobs.put_bytes(b"orphan")
        publish(store, create_manifest(b"passages", b"orphan"), "latest", lambda parent: PASSED_GATE)


def publish_old_files(store: Store) -> None:
    publish(store, REFUSED_MANIFEST, "latest", lambda parent: PASSED_GATE)


def roll_back(store: Store) -> None:
    rollback(store, "latest")


def tag_refused_snapshot(store: Store) -> None:
    tag(store, REFUSED_MANIFEST.id, "good")


def expire_and_collect(store: Store) -> None:
    expire_store(store, EXPIRE_NOW)
    gc.collect_garbage(store, 0.0)


def collect(store: Store) -> None:
    gc.collect_garbage(store, 0.0)


@pytest.mark.parametrize(
    "actors",
    [
        (build, collect),
        (build, expire_and_collect),
        (build, collect, expire_and_collect),
        (publish_old_files, expire_and_collect),
        (roll_back, expire_and_collect),
        (tag_refused_snapshot, expire_and_collect),
        (tag_refused_snapshot, roll_back, expire_and_collect, build),
    ],
    ids=lambda actors: "+".join(actor.__name__ for actor in actors),
)
@given(bursts=st.lists(st.tuples(st.integers(0, 11), st.integers(1, 40)), max_size=20))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@pytest.mark.usefixtures("no_pauses")
def test_any_order_loses_nothing(actors: Sequence[Actor], bursts: list[tuple[int, int]]) -> None:
    with create_library() as store:
        refused: dict[str, Exception] = {}

        def run(actor: Actor, turns: TurnScheduler, number: int) -> None:
            own_store = Store(SteppedFiles(store.url, partial(turns.take, number)))
            try:
                actor(own_store)
            except (StoreError, RefusedError, UsageError) as error:
                refused[actor.__name__] = error

        turns = TurnScheduler([actor for actor, steps in bursts for _ in range(steps)])
        turns.run([partial(run, actor, turns, number) for number, actor in enumerate(actors)])
        assert not {"build", "collect", "expire_and_collect"} & refused.keys(), refused
        assert are_snapshots_intact(store)
        assert store.files.list_names("intents") == store.files.list_names("sweeps") == []
        ref_snapshots = [move.snapshot for name in store.refs.list_names() for move in store.refs.read_history(name)]
        if build in actors and roll_back not in actors:  # otherwise a rollback may make it expire
            assert create_manifest(b"passages", b"orphan").id in ref_snapshots
        if publish_old_files in actors and publish_old_files.__name__ not in refused:
            assert REFUSED_MANIFEST.id in ref_snapshots
