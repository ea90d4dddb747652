"""Intents and sweeps: who waits for whom, and for how long the dead are waited for."""

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest

from rag_model.errors import StoreError
from rag_model.store import Content, Manifest, Store
from rag_model.store.objects import intents
from rag_model.store.objects.files import StoredFile
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.upkeep.roots import StoreView, preview_sweep, sweep

HOUR = 3600.0


@pytest.fixture
def store(local_store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(intents, "_PAUSE_SECONDS", 0.001)
    return local_store


def names(store: Store) -> list[str]:
    """The intents that count now."""
    return [intent.name for intent in store.intents.list_live_intents(store.intents.write_timed("probe/now", {}))]


def condemn(store: Store, *paths: str, knows: Sequence[str] = ()) -> None:
    """Leave the mark of a sweep that died."""
    store.files.write("sweeps/dead.json", json.dumps({"format": 1, "condemned": paths, "knows": knows}).encode())


def test_an_intent_is_there_as_long_as_its_block(store: Store) -> None:
    with suppress(StoreError), store.intents.hold("build"):
        assert names(store) == ["build"]
        raise StoreError("in the middle")
    assert store.files.list_names("intents") == []


def test_the_intent_of_the_dead_counts_for_an_hour(store: Store, later: Callable[..., None]) -> None:
    store.intents.write_timed("intents/dead.json", {"format": 1, "started": None, "needs": None})
    later(store, 0.9 * HOUR)
    assert names(store) == ["dead"]
    later(store, 0.2 * HOUR)
    assert names(store) == []


def test_an_intent_that_is_written_again_keeps_its_start(
    store: Store, later: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    beaten = threading.Event()
    real = store.files.write

    def put(path: str, data: bytes) -> None:
        real(path, data)
        if threading.current_thread().name == "intent":
            beaten.set()

    monkeypatch.setattr(store.files, "write", put)
    monkeypatch.setattr(intents, "_RENEW_SECONDS", 0.001)
    with store.intents.hold("build"):
        began = store.intents.list_live_intents(0.0)[0].started
        later(store, 2 * HOUR)
        for _ in range(2):  # the first may have been written before the file became older
            beaten.clear()
            assert beaten.wait(300)
        now = store.intents.write_timed("probe/now", {})
        assert [(intent.name, intent.started) for intent in store.intents.list_live_intents(now)] == [("build", began)]


def test_a_writer_waits_while_what_it_needs_is_deleted(store: Store, later: Callable[..., None]) -> None:
    condemn(store, "blobs/ab/c")
    with store.intents.hold("other", ["blobs/de/f"]):
        pass
    entered = threading.Event()

    def write(name: str, needs: list[str] | None) -> None:
        with store.intents.hold(name, needs):
            entered.set()

    for name, needs in (("publish", ["blobs/ab/c"]), ("build", None)):
        condemn(store, "blobs/ab/c")
        entered.clear()
        thread = threading.Thread(target=write, args=(name, needs))
        thread.start()
        while f"{name}.json" not in store.files.list_names("intents"):
            assert thread.is_alive()
        assert not entered.is_set()
        condemn(store, "blobs/ab/c", knows=[name])  # a sweep that respects it holds up nobody
        thread.join()
        assert entered.is_set()


def test_a_sweep_that_died_holds_up_nobody_for_long(store: Store, later: Callable[..., None]) -> None:
    condemn(store, "blobs/ab/c")
    later(store, 121.0)
    with store.intents.hold("build"):
        assert names(store) == ["build"]


def test_a_writer_that_comes_makes_a_sweep_plan_anew(store: Store) -> None:
    """What it needs was garbage when the sweep looked first."""
    needed, other = (store.blobs.put_bytes(data).path for data in (b"needed", b"other"))
    plans: list[StoreView] = []

    def plan(view: StoreView) -> list[StoredFile]:
        plans.append(view)
        if len(plans) == 1:
            store.intents.write_timed("intents/new.json", {"format": 1, "started": None, "needs": [needed]})
        return [file for file in store.files.iter_tree("blobs") if file.path not in view.needed_paths]

    assert [file.path for file in sweep(store, plan, threads=2)] == [other]
    assert [len(view.intents) for view in plans] == [0, 1]


def test_what_is_written_again_after_the_plan_stays(store: Store, later: Callable[..., None]) -> None:
    blob = store.blobs.put_bytes(b"old")
    later(store, 13 * HOUR)

    def plan(view: StoreView) -> list[StoredFile]:
        found = [*store.files.iter_tree("blobs")]
        store.blobs.put_bytes(b"old")
        return found

    assert sweep(store, plan, threads=1) == []
    assert store.blobs.exists(blob)


def test_an_old_blob_is_written_again_and_a_young_one_is_not(store: Store, later: Callable[..., None]) -> None:
    blob = store.blobs.put_bytes(b"bytes")
    for hours, again in ((11, False), (2, True)):
        later(store, hours * HOUR)
        before = store.files.find(blob.path)
        store.blobs.put_bytes(b"bytes")
        assert (store.files.find(blob.path) != before) == again


def test_a_blob_is_written_until_no_sweep_condemns_it(store: Store, later: Callable[..., None]) -> None:
    """A sweep deletes it meanwhile, and is gone then."""
    blob = store.blobs.put_bytes(b"bytes")
    later(store, 13 * HOUR)
    condemn(store, blob.path)
    writes = []

    def put() -> None:
        writes.append(blob.path)
        store.files.write(blob.path, b"bytes")
        if len(writes) == 2:
            store.files.remove("sweeps/dead.json")
            store.files.remove(blob.path)

    store.intents.write_despite_sweeps(blob.path, put)
    assert len(writes) == 3
    assert store.blobs.exists(blob)


def test_a_build_keeps_what_it_may_reuse(store: Store, later: Callable[..., None]) -> None:
    """What a record names, however old; and what was written a day before it began. Orphans go."""
    recorded, orphan = store.blobs.put_bytes(b"recorded"), store.blobs.put_bytes(b"orphan")
    store.memo.write_record("chunk", "k", {"passages": recorded}, {})
    store.memo.write_record("plan", "k", {}, {"parts": 3})
    later(store, 30 * HOUR)
    recent = store.blobs.put_bytes(b"recent")
    later(store, 20 * HOUR)
    with store.intents.hold("build"):
        assert collect_garbage(store, 0.0)["blobs"].files == 1
        assert [store.blobs.exists(ref) for ref in (recorded, recent, orphan)] == [True, True, False]
        assert store.memo.find("plan", "k")
    store.snapshots.publish(Manifest(Content({}, (), {})))  # a store without any root is left alone
    assert collect_garbage(store, 0.0)["blobs"].files == 2


def test_a_rehearsal_changes_nothing(store: Store) -> None:
    blob = store.blobs.put_bytes(b"orphan")
    assert [file.path for file in preview_sweep(store, lambda view: [*store.files.iter_tree("blobs")])] == [blob.path]
    assert {file.path for file in store.files.iter_tree()} == {"store.json", blob.path}
