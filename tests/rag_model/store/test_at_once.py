"""What has many small files is asked for at once: on an object store each answer is 20 ms of waiting."""

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

MANY = 6


@contextmanager
def crowd(*requests: tuple[str, str]) -> Iterator[None]:
    """Answer requests of a kind, below a folder, only when `MANY` of them have come.

    A caller that asks one by one waits for an answer in vain, and fails.
    """
    with pytest.MonkeyPatch.context() as patch:
        for method, folder in requests:
            patch.setattr(MemoryFileSystem, method, gathering(getattr(MemoryFileSystem, method), folder))
        yield


def gathering(answer: Callable[..., Any], folder: str) -> Callable[..., Any]:
    gathered = threading.Barrier(MANY)

    def waiting(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        if f"/{folder}/" in path:
            gathered.wait(timeout=300)
        return answer(self, path, *args, **kwargs)

    return waiting


def published(store: Store, files: int = 1) -> str:
    blobs = {f"index/{number}": store.blobs.put_bytes(b"%d" % number) for number in range(files)}
    content = Content({"kind": "wiki"}, (PartEntry("part-00000", 1, 1, 1),), blobs, {}, {}, {})
    return store.snapshots.publish(Manifest(content))


def moved(store: Store, times: int) -> str:
    identity = published(store)
    for number in range(times):
        store.refs.move("latest", identity, number)
    return identity


def test_the_reports_of_a_job(memory_store: Store) -> None:
    for number in range(MANY):
        memory_store.runs.write_report("run", "chunk", number, {"number": number})
    with crowd(("cat_file", "runs")):
        assert memory_store.runs.read_reports("run", "chunk") == [{"number": number} for number in range(MANY)]


def test_the_moves_of_a_ref(memory_store: Store) -> None:
    moved(memory_store, MANY)
    with crowd(("cat_file", "latest")):
        assert [move.number for move in memory_store.refs.read_history("latest")] == [*range(1, MANY + 1)]


def test_the_refs_of_a_store(memory_store: Store) -> None:
    identity = published(memory_store)
    for number in range(MANY):
        memory_store.refs.move(f"month-{number}", identity, 0)
    with crowd(("cat_file", "refs")):
        assert len(memory_store.refs.list_names()) == MANY
        assert len(memory_store.refs.list_refs_to(identity)) == MANY


def test_the_moves_that_may_expire(memory_store: Store) -> None:
    identity = published(memory_store)
    for name in range(MANY):
        for number in range(3):
            memory_store.refs.move(f"month-{name}", identity, number)
    with crowd(("cat_file", "refs")):
        assert len(expire_store(memory_store, ExpirePolicy(keep=2, older_than=0)).moves) == MANY


def test_the_moves_that_are_verified(memory_store: Store) -> None:
    identity = moved(memory_store, MANY)
    with crowd(("cat_file", "latest")):
        assert verify_version(memory_store, identity) == []


def test_the_deltas_that_are_verified(memory_store: Store) -> None:
    parts = tuple(PartEntry(f"part-{number:05d}", number, number, 1) for number in range(MANY))
    identity = ""
    for month in range(2):
        files = {f"passages/{part.name}.parquet": memory_store.blobs.put_bytes(b"%d" % month) for part in parts}
        parents = (identity,) if identity else ()
        content = Content({"kind": "wiki"}, parts, files, {"month": month}, {}, {})
        identity = memory_store.snapshots.publish(Manifest(content, parents=parents))
    with crowd(("cat_file", "memo/delta")):
        assert verify_version(memory_store, identity) == []


def test_the_sizes_of_the_files_of_a_snapshot(memory_store: Store) -> None:
    identity = published(memory_store, files=MANY)
    with crowd(("info", "blobs")):
        assert find_missing(memory_store, memory_store.snapshots, identity) == []


def recorded(store: Store) -> None:
    for number in range(MANY):
        blob = store.blobs.put_bytes(b"%d" % number)
        store.memo.write_record(f"stage-{number}", "0" * 64, {"out": blob}, {})


def test_the_records_of_the_memo(memory_store: Store) -> None:
    recorded(memory_store)
    memory_store.snapshots.publish(Manifest(Content({}, (), {})))  # a store without any root is left alone
    with crowd(("cat_file", "memo")):
        assert collect_garbage(memory_store, grace=0, dry_run=True)["memo"].files == MANY


def test_the_folders_of_a_folder(memory_store: Store) -> None:
    recorded(memory_store)
    with crowd(("ls", "memo")):
        assert len(list(memory_store.files.iter_tree("memo"))) == MANY
