"""Real processes at once on one store: publishers, sweepers, readers, and clocks that disagree."""

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

PUBLISHERS, SWEEPERS = 32, 2
AT_ONCE = ExpirePolicy(keep=1, older_than=0)
DAY = 86400.0
processes = multiprocessing.get_context("fork")


def build(store: Store, name: str, number: int = 0) -> str:
    """Publish a snapshot of a file that all have and of one of its own."""
    with store.intents.hold(f"build-{name}-{number}"):
        blobs = {"index/all": store.blobs.put_bytes(b"all"), "index/own": store.blobs.put_bytes(f"{number}".encode())}
        manifest = Manifest(Content({"kind": name}, (), blobs))
        return publish(store, manifest, "latest", lambda parent: GateVerdict(True, ())).snapshot


def test_32_publishers_beside_sweepers_lose_nothing(store: Store) -> None:
    start, told = processes.Barrier(PUBLISHERS + SWEEPERS), processes.SimpleQueue()
    over = processes.Event()

    def body(number: int) -> None:
        own = Store.open(store.url)
        start.wait()
        if number < PUBLISHERS:
            told.put(build(own, "race", number))
        while number >= PUBLISHERS and not over.is_set():
            collect_garbage(own, 0.0)
        os._exit(0)  # without the exit handlers of whatever other tests left in the process that forked

    running = [processes.Process(target=body, args=(number,)) for number in range(PUBLISHERS + SWEEPERS)]
    for process in running:
        process.start()
    made = [told.get() for _ in range(PUBLISHERS)]
    over.set()
    for process in running:
        process.join()
    assert [process.exitcode for process in running] == [0] * len(running)
    history = store.refs.read_history("latest")
    assert sorted(move.snapshot for move in history) == sorted(made) == store.snapshots.list_ids()
    assert [move.number for move in history] == list(range(1, PUBLISHERS + 1))
    assert not any(verify_version(store, snapshot) for snapshot in made)
    assert store.files.list_names("intents") == store.files.list_names("sweeps") == []


def test_a_reader_keeps_what_it_opened(store: Store) -> None:
    """Through a rollback, whatever the grace; and what it holds open, even after its snapshot expired."""
    old, new = build(store, "old", 1), build(store, "new", 2)
    with Snapshot.from_store(store) as reader, reader.path("index/own").open("rb") as held:
        rollback(store, "latest")
        collect_garbage(store, 0.0)
        assert (reader.id, reader.path("index/own").read_bytes()) == (new, b"2")
        expire_store(store, AT_ONCE)
        assert collect_garbage(store, 0.0)["blobs"].files == 1
        assert held.read() == b"2"
    assert store.snapshots.list_ids() == [old]


@pytest.mark.parametrize("hours", [-6, 6])
def test_clocks_that_disagree_lose_nothing(store: Store, hours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer whose clock is hours off trusts too much or too little: what it relied on stays all the same."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + hours * 3600.0)
    left = store.blobs.put_bytes(b"left by a build that died")
    for file in [*store.files.iter_tree("blobs")]:
        os.utime(store.files.local_path(file.path), (file.modified - 0.7 * DAY,) * 2)
    with store.intents.hold("build"):
        assert store.blobs.put_bytes(b"left by a build that died") == left
        build(store, "other")
        expire_store(store, AT_ONCE)
        collect_garbage(store, 0.0)
        made = publish(
            store, Manifest(Content({}, (), {"index/a": left})), "latest", lambda parent: GateVerdict(True, ())
        )
    assert verify_version(store, made.snapshot) == []
    collect_garbage(store, 0.0)
    assert verify_version(store, made.snapshot) == []
