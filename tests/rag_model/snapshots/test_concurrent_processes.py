"""Concurrent processes on one store: publishers, garbage collectors, readers, and a process with a wrong clock."""

import multiprocessing
import os
import time

import pytest

from rag_model.evaluation.gate import GateVerdict
from rag_model.snapshots.publish import publish
from rag_model.store import Content, Manifest, Snapshot, Store
from rag_model.store.upkeep.expire import ExpirePolicy, expire_store
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.moves import rollback
from tests.fixtures.store_files import age_files, are_snapshots_intact

PUBLISHERS, COLLECTORS = 16, 2
EXPIRE_NOW = ExpirePolicy(keep=1, older_than=0)
DAY = 86400.0
processes = multiprocessing.get_context("fork")


def build(store: Store, name: str, number: int = 0) -> str:
    """Publish a snapshot of a file that all snapshots have and of one that only this one has."""
    with store.intents.hold(f"build-{name}-{number}"):
        blobs = {"index/all": store.blobs.put_bytes(b"all"), "index/own": store.blobs.put_bytes(f"{number}".encode())}
        manifest = Manifest(Content({"kind": name}, (), blobs))
        return publish(store, manifest, "latest", lambda parent: GateVerdict(True, ())).snapshot


def test_publishers_and_garbage_collectors_lose_nothing(store: Store) -> None:
    start, snapshot_ids = processes.Barrier(PUBLISHERS + COLLECTORS), processes.SimpleQueue()
    all_published = processes.Event()

    def run_process(number: int) -> None:
        own_store = Store.open(store.url)
        start.wait()
        if number < PUBLISHERS:
            snapshot_ids.put(build(own_store, "race", number))
        while number >= PUBLISHERS and not all_published.is_set():
            collect_garbage(own_store, 0.0)
        os._exit(0)  # skips the exit handlers that other tests left in the parent process

    workers = [processes.Process(target=run_process, args=(number,)) for number in range(PUBLISHERS + COLLECTORS)]
    for process in workers:
        process.start()
    published = [snapshot_ids.get() for _ in range(PUBLISHERS)]
    all_published.set()
    for process in workers:
        process.join()
    assert [process.exitcode for process in workers] == [0] * len(workers)
    history = store.refs.read_history("latest")
    assert sorted(move.snapshot for move in history) == sorted(published) == store.snapshots.list_ids()
    assert [move.number for move in history] == list(range(1, PUBLISHERS + 1))
    assert are_snapshots_intact(store)
    assert store.files.list_names("intents") == store.files.list_names("sweeps") == []


def test_reader_keeps_the_files_of_its_snapshot(store: Store) -> None:
    """Its files survive a rollback; a file that it has open stays readable even after the snapshot expired."""
    old_id, new_id = build(store, "old", 1), build(store, "new", 2)
    with Snapshot.from_store(store) as reader, reader.path("index/own").open("rb") as open_file:
        rollback(store, "latest")
        collect_garbage(store, 0.0)
        assert (reader.id, reader.path("index/own").read_bytes()) == (new_id, b"2")
        expire_store(store, EXPIRE_NOW)
        assert collect_garbage(store, 0.0)["blobs"].files == 1
        assert open_file.read() == b"2"
    assert store.snapshots.list_ids() == [old_id]


@pytest.mark.parametrize("hours", [-6, 6])
def test_wrong_clock_loses_nothing(store: Store, hours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer whose clock is hours off keeps the blobs that it reuses."""
    real_time = time.time
    monkeypatch.setattr(time, "time", lambda: real_time() + hours * 3600.0)
    orphan = store.blobs.put_bytes(b"left by a build that died")
    age_files(store, 0.7 * DAY, "blobs")
    with store.intents.hold("build"):
        assert store.blobs.put_bytes(b"left by a build that died") == orphan
        build(store, "other")
        expire_store(store, EXPIRE_NOW)
        collect_garbage(store, 0.0)
        result = publish(
            store, Manifest(Content({}, (), {"index/a": orphan})), "latest", lambda parent: GateVerdict(True, ())
        )
    assert verify_version(store, result.snapshot) == []
    collect_garbage(store, 0.0)
    assert verify_version(store, result.snapshot) == []
