"""A service that reads ranges of the store: until its pull ends, or without any pull."""

import asyncio
import gc
import math
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
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
from tests.fixtures.ranged_snapshot import WORDS, copy_to_far_store, list_questions, publish_ranged
from tests.fixtures.s3_proxy import FaultyServer
from tests.fixtures.serving import QUICK, TIMEOUT, HttpService, run_service, wait_until
from tests.fixtures.tiny_snapshot import copy_store

FROM_STORE = replace(QUICK, from_store=True, retrievers=("bm25", "ivf", "rrf(bm25, exact)"))


@pytest.fixture(scope="module")
def local_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("published")
    store = Store.open(str(folder / "store"), create=True)
    publish_ranged(store, folder)
    return store


@pytest.fixture
def store(local_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("BOOKWHEEL_CACHE", str(tmp_path / "cache"))
    with copy_to_far_store(local_store) as store:
        yield store


def ask_both(service: HttpService, question: str) -> list[dict[str, Any]]:
    """Search with BM25 and with vectors."""
    requests = [{"questions": [question], "k": 5, "retriever": name} for name in ("bm25", "ivf")]
    return [service.client.post("/search", json=request).raise_for_status().json() for request in requests]


def is_ranged(service: HttpService) -> bool:
    current = service.service.slot.current
    return current is not None and current.is_ranged


def test_service_answers_from_the_store_until_the_pull_ends(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_range, may_pull = Far.cat_file, threading.Event()

    def hold_whole_files(self: Far, path: str, start: int | None = None, end: int | None = None) -> bytes:
        if not start and end is not None and end > 90_000:  # Only a pull reads so many bytes at once.
            may_pull.wait(300)
        return read_range(self, path, start, end)

    monkeypatch.setattr(Far, "cat_file", hold_whole_files)
    with run_service(store.url, tmp_path / "pulled", FROM_STORE) as service:
        assert is_ranged(service)
        current = service.service.slot.current
        assert current is not None
        (note,) = current.notes
        assert note.startswith("rrf(bm25, exact) cannot be searched by ranges: served once the snapshot is pulled")
        ranged_replies = [ask_both(service, question) for question in list_questions()]
        early_reply = service.client.post("/search", json={"questions": ["bada"], "retriever": "exact"})
        assert early_reply.status_code == 503
        assert "not pulled yet: search bm25" in early_reply.json()["detail"]
        may_pull.set()
        wait_until(lambda: not is_ranged(service))
        assert [ask_both(service, question) for question in list_questions()] == ranged_replies
        assert service.client.post("/search", json={"questions": ["bada"], "retriever": "exact"}).status_code == 200
        assert (tmp_path / "pulled" / "current").exists()


def test_replaced_snapshot_is_freed_without_a_garbage_collection(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = store.snapshots.get(store.snapshots.resolve("latest")).content
    second = store.snapshots.publish(Manifest(replace(content, retriever="ivf")))
    words = " ".join(WORDS)
    gc.disable()  # In a reference cycle, the snapshot would keep its files mapped, even after a takedown.
    try:
        with run_service(store.url, tmp_path / "pulled", replace(FROM_STORE, pull=False)) as service:
            with monkeypatch.context() as patched:
                patched.setattr(Far, "cat_file", fail_to_read)
                for url, request, status in [
                    ("/search", {"questions": [words], "retriever": "bm25"}, 503),
                    ("/search", {"questions": [words], "retriever": "rotated"}, 400),  # The index is not served.
                    ("/retrieve?retriever=bm25", {"queries": [words]}, 503),
                ]:
                    assert service.client.post(url, json=request).status_code == status
            replaced = weakref.ref(service.service.slot.current)
            tag(store, second, "latest")
            wait_until(lambda: replaced() is None)
    finally:
        gc.enable()


def test_takedowns_and_moves_of_the_ref_interrupt_a_pull(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = store.snapshots.resolve("latest")
    content = store.snapshots.get(first).content
    second, third = (store.snapshots.publish(Manifest(replace(content, retriever=name))) for name in ("ivf", "rotated"))
    read_range, held_blob = Far.cat_file, Path(content.files["embeddings/part-0.npy"].path).name
    gates = [threading.Event()]  # A pull cannot read the vectors before its gate opens.
    pulls: list[str] = []  # the pulls that have reached their gate

    def wait_for_gate(self: Far, path: str, start: int | None = None, end: int | None = None) -> bytes:
        if path.endswith(held_blob) and end is not None and end - (start or 0) > 90_000:
            pulls.append(path)
            gates[min(len(pulls), len(gates)) - 1].wait(300)
        return read_range(self, path, start, end)

    def move(snapshot: str) -> None:
        wait_until(lambda: len(pulls) >= len(gates))
        gates.append(threading.Event())  # The gates of the earlier pulls stay closed.
        tag(store, snapshot, "latest")

    monkeypatch.setattr(Far, "cat_file", wait_for_gate)
    request = {"queries": ["bada"], "topk": 5}
    settings = replace(FROM_STORE, poll_seconds=0.005)
    with run_service(store.url, tmp_path / "pulled", settings) as service, ExitStack() as stack:
        assert service.search("bada")["snapshot"] == first
        move(second)
        service.wait_until_served(second)
        url = f"/retrieve?snapshot={second}"
        wait_until(lambda: service.client.post(url, json=request).status_code == 200)
        passages = Path(content.files["passages/part-0.parquet"].path).name
        cached_path = tmp_path / "cache" / "ranges" / f"{second}-{passages}.ranges"
        cached_file = stack.enter_context(cached_path.open("rb"))
        store.takedowns.record_replacement(second, third)
        move(third)
        service.wait_until_served(third)
        assert is_ranged(service)
        assert not os.fstat(cached_file.fileno()).st_nlink, "the cached ranges contain text that was taken down"
        reply = service.client.post(url, json=request)
        assert reply.status_code == 410
        assert "was taken down" in reply.json()["detail"]
        assert not any(gate.is_set() for gate in gates)
        for gate in gates:
            gate.set()
        wait_until(lambda: not is_ranged(service))
        assert service.search("bada")["snapshot"] == third
        assert not (tmp_path / "pulled" / second).exists()


def test_stalled_s3_response_delays_neither_the_next_version_nor_the_shutdown(
    local_store: Store,
    tmp_path: Path,
    faulty_server: FaultyServer,
    s3_bucket: Callable[[str], AbstractContextManager[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BOOKWHEEL_CACHE", str(tmp_path / "cache"))
    content = local_store.snapshots.get(local_store.snapshots.resolve("latest")).content
    held_path = content.files["embeddings/part-0.npy"].path
    with s3_bucket(faulty_server.url) as url:
        store = copy_store(local_store, url)
        second = store.snapshots.publish(Manifest(replace(content, retriever="ivf")))
        faulty_server.fault = lambda request: "hold" if request.method == "GET" and held_path in request.path else None
        with run_service(url, tmp_path / "pulled", replace(FROM_STORE, retrievers=("bm25",))) as service:
            wait_until(lambda: faulty_server.n_held == 1)
            tag(store, second, "latest")
            service.wait_until_served(second)
            wait_until(lambda: faulty_server.n_held == 2)  # the request of the next pull
            assert is_ranged(service)
        wait_until(lambda: faulty_server.n_abandoned == 2)
    assert not (tmp_path / "pulled" / "current").exists()


def test_store_that_blocks_the_deletion_of_the_lease_does_not_delay_the_shutdown(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete, is_held, may_delete = Far.rm_file, threading.Event(), threading.Event()

    def block_deletion(self: Far, path: str) -> None:
        is_held.set()
        may_delete.wait()
        delete(self, path)

    monkeypatch.setattr("rag_model.serving.following.follower._RELEASE_SECONDS", 0.1)
    monkeypatch.setattr(Far, "rm_file", block_deletion)
    with run_service(store.url, tmp_path / "pulled", replace(FROM_STORE, pull=False)):
        wait_until(lambda: store.files.list_names("intents"))
    assert is_held.is_set()
    may_delete.set()
    wait_until(lambda: not store.files.list_names("intents"))


def test_store_that_stalls_in_its_first_response_delays_neither_a_check_nor_the_shutdown(
    tmp_path: Path, faulty_server: FaultyServer, s3_bucket: Callable[[str], AbstractContextManager[str]]
) -> None:
    must_stop = threading.Event()

    def check_stop() -> None:
        if must_stop.is_set():
            raise FollowerStoppedError

    with s3_bucket(faulty_server.url) as url:
        Store.open(url, create=True)
        faulty_server.fault = lambda request: "hold" if request.method == "GET" else None
        with run_service(url, tmp_path / "pulled", ready=False), ThreadPoolExecutor(1) as pool:
            checking = pool.submit(FollowedRef(url, "latest", tmp_path / "pulled").check, check_stop)
            wait_until(lambda: faulty_server.n_held == 2)
            must_stop.set()
            with pytest.raises(FollowerStoppedError):
                checking.result()
        wait_until(lambda: faulty_server.n_abandoned == 2)


def test_blocked_listing_of_moves_does_not_delay_the_shutdown(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_folder, listings, is_held, may_list = Far.ls, list[str](), threading.Event(), threading.Event()

    def block_listing(self: Far, path: str, detail: bool = True, **options: Any) -> list[Any]:
        if path.endswith("refs/latest"):
            listings.append(path)
            if len(listings) == 1:
                raise OSError
            is_held.set()
            may_list.wait()
        return list_folder(self, path, detail, **options)

    monkeypatch.setattr(Far, "ls", block_listing)
    with run_service(store.url, tmp_path / "pulled", ready=False):
        assert is_held.wait(TIMEOUT)
    may_list.set()


def test_pulled_folder_is_served_until_ranges_can_be_read(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = store.snapshots.resolve("latest")
    second = store.snapshots.publish(Manifest(replace(store.snapshots.get(first).content, retriever="ivf")))
    with run_service(store.url, tmp_path / "pulled", FROM_STORE) as service:
        wait_until(lambda: not is_ranged(service))
    open_store, is_down = Store.open, threading.Event()
    is_down.set()

    def open_if_up(*arguments: Any, **options: Any) -> Store:
        if is_down.is_set():
            raise StoreError("the network is down")
        return open_store(*arguments, **options)

    monkeypatch.setattr(Store, "open", open_if_up)
    with run_service(store.url, tmp_path / "pulled", replace(FROM_STORE, pull=False)) as service:
        assert not is_ranged(service)  # The folder is served during an outage.
        is_down.clear()
        tag(store, second, "latest")
        service.wait_until_served(second)
        assert is_ranged(service)
        assert not (tmp_path / "pulled" / second).exists()


def test_takedowns_delete_the_cached_ranges_of_all_served_versions(store: Store, tmp_path: Path) -> None:
    content = store.snapshots.get(store.snapshots.resolve("latest")).content
    versions = [store.snapshots.publish(Manifest(replace(content, retriever=name))) for name in ("ivf", "rotated")]
    first, second, third = store.snapshots.resolve("latest"), *versions
    settings, cache_folder = replace(FROM_STORE, pull=False), tmp_path / "cache" / "ranges"

    def list_cached() -> dict[str, bool]:
        """Return for each snapshot whether the cache has bytes of its files."""
        cached_bytes = Counter[str]()
        for path in cache_folder.glob("*-*"):
            with suppress(FileNotFoundError):  # the service deletes files meanwhile
                cached_bytes[path.name.partition("-")[0]] += path.stat().st_blocks
        return {snapshot: bool(size) for snapshot, size in cached_bytes.items()}

    with run_service(store.url, tmp_path / "pulled", settings) as service:
        service.search("bada")
        assert list_cached() == {first: True}
    earlier_files = cache_folder / "0a1b.ranges", cache_folder / first / "0a1b.ranges"
    earlier_files[1].parent.mkdir()
    (cache_folder / "link").symlink_to(tmp_path)
    for file in earlier_files:
        file.write_bytes(bytes(8192))
    tag(store, second, "latest")
    with run_service(store.url, tmp_path / "pulled", settings) as service:
        service.search("bada")
        tag(store, third, "latest")
        service.wait_until_served(third)
        service.search("bada")
        assert list_cached() == {first: True, second: True, third: True}
        assert all(file.exists() for file in earlier_files)
        store.takedowns.record_replacement(first, third)
        store.takedowns.record_replacement(second, third)
        wait_until(lambda: list_cached() == {third: True} and not any(file.exists() for file in earlier_files))
        store.takedowns.record_replacement(third, "")
        wait_until(lambda: service.service.slot.current is None)
        wait_until(lambda: list_cached() == {})
        reply = service.client.post("/search", json={"questions": ["bada"]})
        assert (reply.status_code, reply.json()["detail"]) == (
            503,
            "the snapshot was taken down, and no other one is open: publish one, and ask again",
        )


def test_takedown_of_another_snapshot_only_delays_a_requested_one(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = store.snapshots.get(store.snapshots.resolve("latest")).content
    second, third = (store.snapshots.publish(Manifest(replace(content, retriever=name))) for name in ("ivf", "rotated"))
    vectors = bytearray(store.files.read(content.files["embeddings/part-0.npy"].path))
    vectors[-1] ^= 1
    own_file = store.blobs.put_bytes(bytes(vectors))
    files = {**content.files, "embeddings/part-0.npy": own_file}
    requested = store.snapshots.publish(Manifest(replace(content, files=files)))
    read_range, may_read, is_read = Far.cat_file, threading.Event(), threading.Event()

    def hold_own_file(self: Far, path: str, start: int | None = None, end: int | None = None) -> bytes:
        if path.endswith(Path(own_file.path).name):
            is_read.set()
            may_read.wait(300)
        return read_range(self, path, start, end)

    monkeypatch.setattr(Far, "cat_file", hold_own_file)
    with run_service(store.url, tmp_path / "pulled", replace(QUICK, retrievers=("bm25", "ivf"))) as service:

        def retrieve() -> tuple[int, str]:
            reply = service.client.post(f"/retrieve?snapshot={requested}", json={"queries": ["bada"], "topk": 3})
            return reply.status_code, reply.json().get("detail", "")

        opening = (503, f"snapshot {requested} is being opened: ask again in a moment")
        assert retrieve() == opening
        assert is_read.wait(300)
        store.takedowns.record_replacement(second, third)
        may_read.set()
        replies: list[tuple[int, str]] = []
        wait_until(lambda: replies.append(retrieve()) or replies[-1] != opening)
        assert replies[-1] == (200, "")


def test_closing_service_answers_accepted_requests(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_range, is_held, may_read = Far.cat_file, threading.Event(), threading.Event()

    def block_reading(self: Far, path: str, start: int | None = None, end: int | None = None) -> bytes:
        is_held.set()
        may_read.wait(TIMEOUT)
        return read_range(self, path, start, end)

    service = Service(FollowedRef(store.url, "latest", tmp_path / "pulled"), replace(FROM_STORE, pull=False))
    service.start()
    wait_until(lambda: service.is_ready)

    async def search_while_closing() -> SearchResult:
        accepted = asyncio.create_task(service.search([" ".join(WORDS)], 100))
        await asyncio.to_thread(is_held.wait, TIMEOUT)
        closing = asyncio.create_task(asyncio.to_thread(service.close))
        late_replies: list[Any] = []
        while not late_replies or isinstance(late_replies[0], TimeoutError):  # still queued behind the accepted one
            late_search = asyncio.wait_for(service.search(["bada"]), 0.01)
            late_replies = await asyncio.gather(late_search, return_exceptions=True)
        assert isinstance(late_replies[0], ShuttingDownError)
        may_read.set()
        await closing
        return await accepted

    monkeypatch.setattr(Far, "cat_file", block_reading)
    (hits,) = asyncio.run(search_while_closing()).hits
    assert len(hits) == 100


def test_request_waits_for_its_snapshot_no_longer_than_request_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rag_model.serving.service._OPENING_SECONDS", math.inf)
    service = Service(PulledFolder(tmp_path), replace(QUICK, request_seconds=0.01))  # The service is never started.

    async def hold_snapshot() -> None:
        async with service.hold("latest@3"):
            pass

    with pytest.raises(SnapshotOpeningError):
        asyncio.run(asyncio.wait_for(hold_snapshot(), TIMEOUT))
    service.close()


def test_unreadable_ranges_are_errors_and_cached_ranges_are_answered(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_service(store.url, tmp_path / "pulled", replace(FROM_STORE, pull=False)) as service:
        first_reply = service.search("bada")
        assert not (tmp_path / "pulled").exists()
        with monkeypatch.context() as patched:
            patched.setattr(Far, "cat_file", fail_to_read)
            assert service.search("bada") == first_reply
            uncached_reply = service.client.post("/search", json={"questions": [" ".join(WORDS)], "k": 100})
            assert uncached_reply.status_code == 503
            assert "the network is down" in uncached_reply.json()["detail"]
        may_answer = threading.Event()
        with monkeypatch.context() as patched:
            patched.setattr(ranges, "_MAX_SILENT_SECONDS", 0.1)
            patched.setattr(ranges, "_MAX_PROBE_SECONDS", 0.1)
            patched.setattr(Far, "cat_file", lambda *arguments, **options: may_answer.wait(300) and b"")
            for _ in range(3):  # more requests than the service searches at once
                silent_reply = service.client.post("/search", json={"questions": [" ".join(WORDS)], "k": 100})
                assert silent_reply.status_code == 503
                assert "the store does not answer" in silent_reply.json()["detail"]
            assert service.search("bada") == first_reply
            may_answer.set()
        (snapshot,) = store.snapshots.list_ids()
        content = store.snapshots.get(snapshot).content
        store.files.remove(store.snapshots.manifest_path(snapshot))
        for ref in content.files.values():
            store.files.remove(ref.path)
        expired_reply = service.client.post("/search", json={"questions": [" ".join(WORDS)], "k": 100})
        assert expired_reply.status_code == 410
        assert "expired or was taken down" in expired_reply.json()["detail"]


def fail_to_read(*arguments: object, **options: object) -> None:
    raise OSError("the network is down")
