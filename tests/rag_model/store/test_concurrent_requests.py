"""Many small files are requested concurrently, because each reply of an object store takes about 20 ms."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from rag_model.store import Content, Manifest, PartEntry, Store
from rag_model.store.upkeep.expire import ExpirePolicy, expire_store
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.upkeep.verify import find_missing, verify_version
from tests.fixtures.store_files import publish_empty

REQUESTS = 6


@contextmanager
def require_concurrent_requests(*requests: tuple[str, str]) -> Iterator[None]:
    """Answer requests of a method for paths in a folder only when `REQUESTS` of them are waiting.

    A caller that sends one request at a time never gets a reply, and fails.
    """
    with pytest.MonkeyPatch.context() as patch:
        for method, folder in requests:
            patch.setattr(MemoryFileSystem, method, answer_together(getattr(MemoryFileSystem, method), folder))
        yield


def answer_together(answer: Callable[..., Any], folder: str) -> Callable[..., Any]:
    barrier = threading.Barrier(REQUESTS)

    def wait_for_all(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        if f"/{folder}/" in path:
            barrier.wait(timeout=300)
        return answer(self, path, *args, **kwargs)

    return wait_for_all


def publish_snapshot(store: Store, files: int = 1) -> str:
    blobs = {f"index/{number}": store.blobs.put_bytes(b"%d" % number) for number in range(files)}
    content = Content({"kind": "wiki"}, (PartEntry("part-00000", 1, 1, 1),), blobs, {}, {}, {})
    return store.snapshots.publish(Manifest(content))


def move_ref(store: Store, times: int) -> str:
    snapshot_id = publish_snapshot(store)
    for number in range(times):
        store.refs.move("latest", snapshot_id, number)
    return snapshot_id


def test_reports_of_a_job_are_read_concurrently(memory_store: Store) -> None:
    for number in range(REQUESTS):
        memory_store.runs.write_report("run", "chunk", number, {"number": number})
    with require_concurrent_requests(("cat_file", "runs")):
        assert memory_store.runs.read_reports("run", "chunk") == [{"number": number} for number in range(REQUESTS)]


def test_moves_of_a_ref_are_read_concurrently(memory_store: Store) -> None:
    move_ref(memory_store, REQUESTS)
    with require_concurrent_requests(("cat_file", "latest")):
        assert [move.number for move in memory_store.refs.read_history("latest")] == [*range(1, REQUESTS + 1)]


def test_refs_are_read_concurrently(memory_store: Store) -> None:
    snapshot_id = publish_snapshot(memory_store)
    for number in range(REQUESTS):
        memory_store.refs.move(f"month-{number}", snapshot_id, 0)
    with require_concurrent_requests(("cat_file", "refs")):
        assert len(memory_store.refs.list_names()) == REQUESTS
        assert len(memory_store.refs.list_refs_to(snapshot_id)) == REQUESTS


def test_expire_reads_moves_concurrently(memory_store: Store) -> None:
    snapshot_id = publish_snapshot(memory_store)
    for name in range(REQUESTS):
        for number in range(3):
            memory_store.refs.move(f"month-{name}", snapshot_id, number)
    with require_concurrent_requests(("cat_file", "refs")):
        assert len(expire_store(memory_store, ExpirePolicy(keep=2, older_than=0)).moves) == REQUESTS


def test_verify_reads_moves_concurrently(memory_store: Store) -> None:
    snapshot_id = move_ref(memory_store, REQUESTS)
    with require_concurrent_requests(("cat_file", "latest")):
        assert verify_version(memory_store, snapshot_id) == []


def test_verify_reads_deltas_concurrently(memory_store: Store) -> None:
    parts = tuple(PartEntry(f"part-{number:05d}", number, number, 1) for number in range(REQUESTS))
    snapshot_id = ""
    for month in range(2):
        files = {f"passages/{part.name}.parquet": memory_store.blobs.put_bytes(b"%d" % month) for part in parts}
        parents = (snapshot_id,) if snapshot_id else ()
        content = Content({"kind": "wiki"}, parts, files, {"month": month}, {}, {})
        snapshot_id = memory_store.snapshots.publish(Manifest(content, parents=parents))
    with require_concurrent_requests(("cat_file", "memo/delta")):
        assert verify_version(memory_store, snapshot_id) == []


def test_file_sizes_are_read_concurrently(memory_store: Store) -> None:
    snapshot_id = publish_snapshot(memory_store, files=REQUESTS)
    with require_concurrent_requests(("info", "blobs")):
        assert find_missing(memory_store, memory_store.snapshots, snapshot_id) == []


def write_records(store: Store) -> None:
    for number in range(REQUESTS):
        blob = store.blobs.put_bytes(b"%d" % number)
        store.memo.write_record(f"stage-{number}", "0" * 64, {"out": blob}, {})


def test_gc_reads_records_concurrently(memory_store: Store) -> None:
    write_records(memory_store)
    publish_empty(memory_store)  # gc deletes nothing in a store without roots
    with require_concurrent_requests(("cat_file", "memo")):
        assert collect_garbage(memory_store, grace=0, dry_run=True)["memo"].files == REQUESTS


def test_folders_are_listed_concurrently(memory_store: Store) -> None:
    write_records(memory_store)
    with require_concurrent_requests(("ls", "memo")):
        assert len(list(memory_store.files.iter_tree("memo"))) == REQUESTS
