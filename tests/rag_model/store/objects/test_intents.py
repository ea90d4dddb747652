"""Intents of writers and sweeps of `gc`: which waits for which, and when those of dead processes expire."""

import json
import threading
from collections.abc import Sequence
from contextlib import suppress

import pytest

from rag_model.errors import StoreError
from rag_model.store import Store
from rag_model.store.objects import intents
from rag_model.store.objects.files import StoredFile
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.upkeep.roots import StoreView, preview_sweep, sweep
from tests.fixtures.store_files import age_files, publish_empty

HOUR = 3600.0


@pytest.fixture
def store(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(intents, "_PAUSE_SECONDS", 0.001)
    return store


def list_intent_names(store: Store) -> list[str]:
    """Return the names of the live intents."""
    return [intent.name for intent in store.intents.list_live_intents(store.intents.write_timed("probe/now", {}))]


def write_dead_sweep(store: Store, *paths: str, known_intents: Sequence[str] = ()) -> None:
    """Write the file of a sweep whose process died."""
    value = {"format": 1, "condemned": paths, "knows": known_intents}
    store.files.write("sweeps/dead.json", json.dumps(value).encode())


def test_intent_exists_until_its_block_ends(store: Store) -> None:
    with suppress(StoreError), store.intents.hold("build"):
        assert list_intent_names(store) == ["build"]
        raise StoreError("in the middle")
    assert store.files.list_names("intents") == []


def test_intent_of_a_dead_process_expires_after_an_hour(store: Store) -> None:
    store.intents.write_timed("intents/dead.json", {"format": 1, "started": None, "needs": None})
    age_files(store, 0.9 * HOUR)
    assert list_intent_names(store) == ["dead"]
    age_files(store, 0.2 * HOUR)
    assert list_intent_names(store) == []


def test_renewed_intent_keeps_its_start_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    renewed = threading.Event()
    write_file = store.files.write

    def write_and_signal(path: str, data: bytes) -> None:
        write_file(path, data)
        if threading.current_thread().name == "intent":
            renewed.set()

    monkeypatch.setattr(store.files, "write", write_and_signal)
    monkeypatch.setattr(intents, "_RENEW_SECONDS", 0.001)
    with store.intents.hold("build"):
        start_time = store.intents.list_live_intents(0.0)[0].started
        age_files(store, 2 * HOUR)
        for _ in range(2):  # the first renewal may be older than the call of age_files
            renewed.clear()
            assert renewed.wait(300)
        current_time = store.intents.write_timed("probe/now", {})
        (intent,) = store.intents.list_live_intents(current_time)
        assert (intent.name, intent.started) == ("build", start_time)


def test_writer_waits_while_its_files_are_deleted(store: Store) -> None:
    write_dead_sweep(store, "blobs/ab/c")
    with store.intents.hold("other", ["blobs/de/f"]):
        pass
    entered = threading.Event()

    def write(name: str, needs: list[str] | None) -> None:
        with store.intents.hold(name, needs):
            entered.set()

    for name, needs in (("publish", ["blobs/ab/c"]), ("build", None)):
        write_dead_sweep(store, "blobs/ab/c")
        entered.clear()
        thread = threading.Thread(target=write, args=(name, needs))
        thread.start()
        while f"{name}.json" not in store.files.list_names("intents"):
            assert thread.is_alive()
        assert not entered.is_set()
        write_dead_sweep(store, "blobs/ab/c", known_intents=[name])  # this sweep respects the intent
        thread.join()
        assert entered.is_set()


def test_dead_sweep_delays_writers_for_two_minutes(store: Store) -> None:
    write_dead_sweep(store, "blobs/ab/c")
    age_files(store, 121.0)
    with store.intents.hold("build"):
        assert list_intent_names(store) == ["build"]


def test_new_writer_makes_the_sweep_plan_again(store: Store) -> None:
    """The writer's file was garbage in the sweep's first plan."""
    needed, unneeded = (store.blobs.put_bytes(data).path for data in (b"needed", b"other"))
    plans: list[StoreView] = []

    def plan(view: StoreView) -> list[StoredFile]:
        plans.append(view)
        if len(plans) == 1:
            store.intents.write_timed("intents/new.json", {"format": 1, "started": None, "needs": [needed]})
        return [file for file in store.files.iter_tree("blobs") if file.path not in view.needed_paths]

    assert [file.path for file in sweep(store, plan, threads=2)] == [unneeded]
    assert [len(view.intents) for view in plans] == [0, 1]


def test_file_written_after_the_plan_is_kept(store: Store) -> None:
    blob = store.blobs.put_bytes(b"old")
    age_files(store, 13 * HOUR)

    def plan(view: StoreView) -> list[StoredFile]:
        blobs = [*store.files.iter_tree("blobs")]
        store.blobs.put_bytes(b"old")
        return blobs

    assert sweep(store, plan, threads=1) == []
    assert store.blobs.exists(blob)


def test_only_old_blobs_are_written_again(store: Store) -> None:
    blob = store.blobs.put_bytes(b"bytes")
    for hours, is_rewritten in ((11, False), (2, True)):
        age_files(store, hours * HOUR)
        stored_file = store.files.find(blob.path)
        store.blobs.put_bytes(b"bytes")
        assert (store.files.find(blob.path) != stored_file) == is_rewritten


def test_blob_is_written_until_no_sweep_deletes_it(store: Store) -> None:
    """A sweep deletes the blob after the second write, and ends."""
    blob = store.blobs.put_bytes(b"bytes")
    age_files(store, 13 * HOUR)
    write_dead_sweep(store, blob.path)
    writes = []

    def write_blob() -> None:
        writes.append(blob.path)
        store.files.write(blob.path, b"bytes")
        if len(writes) == 2:
            store.files.remove("sweeps/dead.json")
            store.files.remove(blob.path)

    store.intents.write_despite_sweeps(blob.path, write_blob)
    assert len(writes) == 3
    assert store.blobs.exists(blob)


def test_files_that_a_running_build_may_reuse_are_kept(store: Store) -> None:
    """Files that a record names are kept, and those written up to a day before the build started."""
    recorded, orphan = store.blobs.put_bytes(b"recorded"), store.blobs.put_bytes(b"orphan")
    store.memo.write_record("chunk", "k", {"passages": recorded}, {})
    store.memo.write_record("plan", "k", {}, {"parts": 3})
    age_files(store, 30 * HOUR)
    recent = store.blobs.put_bytes(b"recent")
    age_files(store, 20 * HOUR)
    with store.intents.hold("build"):
        assert collect_garbage(store, 0.0)["blobs"].files == 1
        assert [store.blobs.exists(ref) for ref in (recorded, recent, orphan)] == [True, True, False]
        assert store.memo.find("plan", "k")
    publish_empty(store)  # gc deletes nothing in a store without roots
    assert collect_garbage(store, 0.0)["blobs"].files == 2


def test_preview_changes_nothing(store: Store) -> None:
    blob = store.blobs.put_bytes(b"orphan")
    assert [file.path for file in preview_sweep(store, lambda view: [*store.files.iter_tree("blobs")])] == [blob.path]
    assert {file.path for file in store.files.iter_tree()} == {"store.json", blob.path}
