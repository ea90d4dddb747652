"""A service that answers from the store by ranges: before its pull ends, and without a pull."""

import asyncio
import gc
import math
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rag_model import ranges
from rag_model.errors import StoreError
from rag_model.serving.answering.batcher import ShuttingDownError
from rag_model.serving.answering.execution import SearchResult
from rag_model.serving.following.follower import FollowedRef, PulledFolder
from rag_model.serving.following.pins import SnapshotOpeningError
from rag_model.serving.following.snapshot_slot import FollowerStoppedError
from rag_model.serving.service import Service
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Manifest
from rag_model.store.versions.moves import tag
from tests.benchmarks.far_store import Far
from tests.fixtures.ranged_snapshot import WORDS, far_copy, list_questions, publish_ranged
from tests.fixtures.s3_proxy import FaultyServer
from tests.fixtures.serving import PATIENCE, QUICK, Serving, serving, until

FROM_STORE = replace(QUICK, from_store=True, retrievers=("bm25", "ivf", "rrf(bm25, exact)"))


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("published")
    store = Store.open(str(folder / "store"), create=True)
    publish_ranged(store, folder)
    return store


@pytest.fixture
def far(local: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("BOOKWHEEL_CACHE", str(tmp_path / "cache"))
    with far_copy(local) as store:
        yield store


def ask_both(served: Serving, question: str) -> list[dict[str, Any]]:
    """Ask by words and by vectors."""
    requests = [{"questions": [question], "k": 5, "retriever": name} for name in ("bm25", "ivf")]
    return [served.client.post("/search", json=request).raise_for_status().json() for request in requests]


def is_ranged(served: Serving) -> bool:
    current = served.service.slot.current
    return current is not None and current.is_ranged


def test_answers_before_the_pull_ends_and_then_from_the_pulled_files(
    far: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, may_pull = Far.cat_file, threading.Event()

    def hold_whole_files(self: Far, path: str, start: int | None = None, end: int | None = None) -> bytes:
        if not start and end is not None and end > 90_000:  # only a pull reads as much at once
            may_pull.wait(300)
        return read(self, path, start, end)

    monkeypatch.setattr(Far, "cat_file", hold_whole_files)
    with serving(far.url, tmp_path / "pulled", FROM_STORE) as served:
        assert is_ranged(served)
        current = served.service.slot.current
        assert current is not None
        (note,) = current.notes
        assert note.startswith("rrf(bm25, exact) cannot be searched by ranges: served once the snapshot is pulled")
        from_store = [ask_both(served, question) for question in list_questions()]
        early = served.client.post("/search", json={"questions": ["bada"], "retriever": "exact"})
        assert early.status_code == 503
        assert "not pulled yet: search bm25" in early.json()["detail"]
        may_pull.set()
        until(lambda: not is_ranged(served))
        assert [ask_both(served, question) for question in list_questions()] == from_store
        assert served.client.post("/search", json={"questions": ["bada"], "retriever": "exact"}).status_code == 200
        assert (tmp_path / "pulled" / "current").exists()


def test_a_replaced_snapshot_leaves_the_memory_without_a_garbage_collection(
    far: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = far.snapshots.get(far.snapshots.resolve("latest")).content
    second = far.snapshots.publish(Manifest(replace(content, retriever="ivf")))
    words = " ".join(WORDS)
    gc.disable()  # its files stay mapped, and on the disk after a takedown, as long as a cycle holds it
    try:
        with serving(far.url, tmp_path / "pulled", replace(FROM_STORE, pull=False)) as served:
            with monkeypatch.context() as patched:
                patched.setattr(Far, "cat_file", _fail)
                for url, request, status in [
                    ("/search", {"questions": [words], "retriever": "bm25"}, 503),
                    ("/search", {"questions": [words], "retriever": "rotated"}, 400),  # this index is not served
                    ("/retrieve?retriever=bm25", {"queries": [words]}, 503),
                ]:
                    assert served.client.post(url, json=request).status_code == status
            replaced = weakref.ref(served.service.slot.current)
            tag(far, second, "latest")
            until(lambda: replaced() is None)
    finally:
        gc.enable()


def test_takedowns_and_moves_of_the_ref_interrupt_a_pull(
    far: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = far.snapshots.resolve("latest")
    content = far.snapshots.get(first).content
    second, third = (far.snapshots.publish(Manifest(replace(content, retriever=name))) for name in ("ivf", "rotated"))
    read, held_blob = Far.cat_file, Path(content.files["embeddings/part-0.npy"].path).name
    gates = [threading.Event()]  # a pull cannot read this file before the last gate is open
    pulls: list[str] = []  # that have reached their gate

    def wait_for_gate(self: Far, path: str, start: int | None = None, end: int | None = None) -> bytes:
        if path.endswith(held_blob) and end is not None and end - (start or 0) > 90_000:
            pulls.append(path)
            gates[min(len(pulls), len(gates)) - 1].wait(300)
        return read(self, path, start, end)

    def move(snapshot: str) -> None:
        until(lambda: len(pulls) >= len(gates))
        gates.append(threading.Event())  # the earlier pulls stay held
        tag(far, snapshot, "latest")

    monkeypatch.setattr(Far, "cat_file", wait_for_gate)
    request = {"queries": ["bada"], "topk": 5}
    settings = replace(FROM_STORE, poll_seconds=0.005)
    with serving(far.url, tmp_path / "pulled", settings) as served, ExitStack() as stack:
        assert served.search("bada")["snapshot"] == first
        move(second)
        served.until_served(second)
        url = f"/retrieve?snapshot={second}"
        until(lambda: served.client.post(url, json=request).status_code == 200)
        passages = Path(content.files["passages/part-0.parquet"].path).name
        cached_path = tmp_path / "cache" / "ranges" / f"{second}-{passages}.ranges"
        cached_file = stack.enter_context(cached_path.open("rb"))
        far.takedowns.record_replacement(second, third)
        move(third)
        served.until_served(third)
        assert is_ranged(served)
        assert not os.fstat(cached_file.fileno()).st_nlink, "it contains text that was taken down"
        gone = served.client.post(url, json=request)
        assert gone.status_code == 410
        assert "was taken down" in gone.json()["detail"]
        assert not any(gate.is_set() for gate in gates)
        for gate in gates:
            gate.set()
        until(lambda: not is_ranged(served))
        assert served.search("bada")["snapshot"] == third
        assert not (tmp_path / "pulled" / second).exists()


def test_a_response_of_s3_that_stops_delays_neither_the_next_version_nor_the_end_of_the_service(
    local: Store,
    tmp_path: Path,
    faulty_server: FaultyServer,
    s3_bucket: Callable[[str], AbstractContextManager[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BOOKWHEEL_CACHE", str(tmp_path / "cache"))
    content = local.snapshots.get(local.snapshots.resolve("latest")).content
    held_path = content.files["embeddings/part-0.npy"].path
    with s3_bucket(faulty_server.url) as url:
        store = Store.open(url, create=True)
        for file in local.files.iter_tree():
            store.files.write(file.path, local.files.read(file.path) or b"")
        second = store.snapshots.publish(Manifest(replace(content, retriever="ivf")))
        faulty_server.fault = lambda request: "hold" if request.method == "GET" and request.touches(held_path) else None
        with serving(url, tmp_path / "pulled", replace(FROM_STORE, retrievers=("bm25",))) as served:
            until(lambda: faulty_server.held == 1)
            tag(store, second, "latest")
            served.until_served(second)
            until(lambda: faulty_server.held == 2)  # of the next pull
            assert is_ranged(served)
        until(lambda: faulty_server.abandoned == 2)
    assert not (tmp_path / "pulled" / "current").exists()


def test_a_store_that_does_not_delete_the_lease_does_not_delay_the_end_of_the_service(
    far: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete, is_held, may_delete = Far.rm_file, threading.Event(), threading.Event()

    def hold(self: Far, path: str) -> None:
        is_held.set()
        may_delete.wait()
        delete(self, path)

    monkeypatch.setattr("rag_model.serving.following.follower._RELEASE_SECONDS", 0.1)
    monkeypatch.setattr(Far, "rm_file", hold)
    with serving(far.url, tmp_path / "pulled", replace(FROM_STORE, pull=False)):
        until(lambda: far.files.list_names("intents"))
    assert is_held.is_set()
    may_delete.set()
    until(lambda: not far.files.list_names("intents"))


def test_a_store_that_stops_within_its_first_response_delays_neither_a_check_nor_the_end_of_the_service(
    tmp_path: Path, faulty_server: FaultyServer, s3_bucket: Callable[[str], AbstractContextManager[str]]
) -> None:
    must_stop = threading.Event()

    def check_stop() -> None:
        if must_stop.is_set():
            raise FollowerStoppedError

    with s3_bucket(faulty_server.url) as url:
        Store.open(url, create=True)
        faulty_server.fault = lambda request: "hold" if request.method == "GET" else None
        with serving(url, tmp_path / "pulled", ready=False), ThreadPoolExecutor(1) as pool:
            checking = pool.submit(FollowedRef(url, "latest", tmp_path / "pulled").check, check_stop)
            until(lambda: faulty_server.held == 2)
            must_stop.set()
            with pytest.raises(FollowerStoppedError):
                checking.result()
        until(lambda: faulty_server.abandoned == 2)


def test_moves_that_the_store_fails_to_list_and_then_holds_do_not_delay_the_end_of_the_service(
    far: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_folder, listings, is_held, may_list = Far.ls, list[str](), threading.Event(), threading.Event()

    def hold(self: Far, path: str, detail: bool = True, **other: Any) -> list[Any]:
        if path.endswith("refs/latest"):
            listings.append(path)
            if len(listings) == 1:
                raise OSError
            is_held.set()
            may_list.wait()
        return list_folder(self, path, detail, **other)

    monkeypatch.setattr(Far, "ls", hold)
    with serving(far.url, tmp_path / "pulled", ready=False):
        assert is_held.wait(PATIENCE)
    may_list.set()


def test_without_a_pull_a_folder_that_was_pulled_before_is_followed_by_ranges(
    far: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = far.snapshots.resolve("latest")
    second = far.snapshots.publish(Manifest(replace(far.snapshots.get(first).content, retriever="ivf")))
    with serving(far.url, tmp_path / "pulled", FROM_STORE) as served:
        until(lambda: not is_ranged(served))
    open_store, is_down = Store.open, threading.Event()
    is_down.set()

    def open_if_up(*arguments: Any, **options: Any) -> Store:
        if is_down.is_set():
            raise StoreError("the network is down")
        return open_store(*arguments, **options)

    monkeypatch.setattr(Store, "open", open_if_up)
    with serving(far.url, tmp_path / "pulled", replace(FROM_STORE, pull=False)) as served:
        assert not is_ranged(served)  # the folder answers during an outage
        is_down.clear()
        tag(far, second, "latest")
        served.until_served(second)
        assert is_ranged(served)
        assert not (tmp_path / "pulled" / second).exists()


def test_takedowns_delete_the_cached_ranges_of_all_versions_that_were_served(far: Store, tmp_path: Path) -> None:
    content = far.snapshots.get(far.snapshots.resolve("latest")).content
    versions = [far.snapshots.publish(Manifest(replace(content, retriever=name))) for name in ("ivf", "rotated")]
    first, second, third = far.snapshots.resolve("latest"), *versions
    settings, cache_folder = replace(FROM_STORE, pull=False), tmp_path / "cache" / "ranges"

    def list_cached() -> dict[str, bool]:
        """Return whether there are cached bytes, for each snapshot."""
        cached_bytes = Counter[str]()
        for path in cache_folder.glob("*-*"):
            cached_bytes[path.name.partition("-")[0]] += path.stat().st_blocks
        return {snapshot: bool(size) for snapshot, size in cached_bytes.items()}

    with serving(far.url, tmp_path / "pulled", settings) as served:
        served.search("bada")
        assert list_cached() == {first: True}
    earlier_files = cache_folder / "0a1b.ranges", cache_folder / first / "0a1b.ranges"
    earlier_files[1].parent.mkdir()
    (cache_folder / "link").symlink_to(tmp_path)
    for file in earlier_files:
        file.write_bytes(bytes(8192))
    tag(far, second, "latest")
    with serving(far.url, tmp_path / "pulled", settings) as served:
        served.search("bada")
        tag(far, third, "latest")
        served.until_served(third)
        served.search("bada")
        assert list_cached() == {first: True, second: True, third: True}
        assert all(file.exists() for file in earlier_files)
        far.takedowns.record_replacement(first, third)
        far.takedowns.record_replacement(second, third)
        until(lambda: list_cached() == {third: True} and not any(file.exists() for file in earlier_files))
        far.takedowns.record_replacement(third, "")
        until(lambda: served.service.slot.current is None)
        until(lambda: list_cached() == {})
        gone = served.client.post("/search", json={"questions": ["bada"]})
        assert (gone.status_code, gone.json()["detail"]) == (
            503,
            "the snapshot was taken down, and no other one is open: publish one, and ask again",
        )


def test_a_takedown_of_another_snapshot_only_delays_one_that_requests_name(
    far: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = far.snapshots.get(far.snapshots.resolve("latest")).content
    second, third = (far.snapshots.publish(Manifest(replace(content, retriever=name))) for name in ("ivf", "rotated"))
    vectors = bytearray(far.files.read(content.files["embeddings/part-0.npy"].path))
    vectors[-1] ^= 1
    own_file = far.blobs.put_bytes(bytes(vectors))
    files = {**content.files, "embeddings/part-0.npy": own_file}
    named = far.snapshots.publish(Manifest(replace(content, files=files)))
    read, may_read, is_read = Far.cat_file, threading.Event(), threading.Event()

    def hold_own_file(self: Far, path: str, start: int | None = None, end: int | None = None) -> bytes:
        if path.endswith(Path(own_file.path).name):
            is_read.set()
            may_read.wait(300)
        return read(self, path, start, end)

    monkeypatch.setattr(Far, "cat_file", hold_own_file)
    with serving(far.url, tmp_path / "pulled", replace(QUICK, retrievers=("bm25", "ivf"))) as served:

        def ask() -> tuple[int, str]:
            reply = served.client.post(f"/retrieve?snapshot={named}", json={"queries": ["bada"], "topk": 3})
            return reply.status_code, reply.json().get("detail", "")

        opening = (503, f"snapshot {named} is being opened: ask again in a moment")
        assert ask() == opening
        assert is_read.wait(300)
        far.takedowns.record_replacement(second, third)
        may_read.set()
        replies: list[tuple[int, str]] = []
        until(lambda: replies.append(ask()) or replies[-1] != opening)
        assert replies[-1] == (200, "")


def test_a_service_that_closes_answers_the_requests_that_it_has_accepted(
    far: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, is_held, may_read = Far.cat_file, threading.Event(), threading.Event()

    def hold(self: Far, path: str, start: int | None = None, end: int | None = None) -> bytes:
        is_held.set()
        may_read.wait(PATIENCE)
        return read(self, path, start, end)

    service = Service(FollowedRef(far.url, "latest", tmp_path / "pulled"), replace(FROM_STORE, pull=False))
    service.start()
    until(lambda: service.is_ready)

    async def search_while_closing() -> SearchResult:
        accepted = asyncio.create_task(service.search([" ".join(WORDS)], 100))
        await asyncio.to_thread(is_held.wait, PATIENCE)
        closing = asyncio.create_task(asyncio.to_thread(service.close))
        later: list[Any] = []
        while not later or isinstance(later[0], TimeoutError):  # while it is queued behind the accepted request
            later = await asyncio.gather(asyncio.wait_for(service.search(["bada"]), 0.01), return_exceptions=True)
        assert isinstance(later[0], ShuttingDownError)
        may_read.set()
        await closing
        return await accepted

    monkeypatch.setattr(Far, "cat_file", hold)
    (hits,) = asyncio.run(search_while_closing()).hits
    assert len(hits) == 100


def test_a_request_waits_for_a_snapshot_that_it_names_no_longer_than_for_its_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rag_model.serving.service._OPENING_SECONDS", math.inf)
    service = Service(PulledFolder(tmp_path), replace(QUICK, request_seconds=0.01))  # it is never started

    async def hold() -> None:
        async with service.hold("latest@3"):
            pass

    with pytest.raises(SnapshotOpeningError):
        asyncio.run(asyncio.wait_for(hold(), PATIENCE))
    service.close()


def test_without_a_pull_unreadable_ranges_are_errors_and_cached_ranges_answer(
    far: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(far.url, tmp_path / "pulled", replace(FROM_STORE, pull=False)) as served:
        before = served.search("bada")
        assert not (tmp_path / "pulled").exists()
        with monkeypatch.context() as patched:
            patched.setattr(Far, "cat_file", _fail)
            assert served.search("bada") == before
            cut = served.client.post("/search", json={"questions": [" ".join(WORDS)], "k": 100})
            assert cut.status_code == 503
            assert "the network is down" in cut.json()["detail"]
        may_answer = threading.Event()
        with monkeypatch.context() as patched:
            patched.setattr(ranges, "_MAX_SILENT_SECONDS", 0.1)
            patched.setattr(ranges, "_MAX_PROBE_SECONDS", 0.1)
            patched.setattr(Far, "cat_file", lambda *arguments, **options: may_answer.wait(300) and b"")
            for _ in range(3):  # more than the service searches at once
                silent = served.client.post("/search", json={"questions": [" ".join(WORDS)], "k": 100})
                assert silent.status_code == 503
                assert "the store does not answer" in silent.json()["detail"]
            assert served.search("bada") == before
            may_answer.set()
        (snapshot,) = far.snapshots.list_ids()
        content = far.snapshots.get(snapshot).content
        far.files.remove(far.snapshots.manifest_path(snapshot))
        for ref in content.files.values():
            far.files.remove(ref.path)
        gone = served.client.post("/search", json={"questions": [" ".join(WORDS)], "k": 100})
        assert gone.status_code == 410
        assert "expired or was taken down" in gone.json()["detail"]


def _fail(*arguments: object, **options: object) -> None:
    raise OSError("the network is down")
