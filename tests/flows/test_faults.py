"""Faults at the writes of a whole `reindex`: the next run ends with the same state as an undisturbed run.

The flow is called as a function and runs its jobs in this process, so its writes have a fixed order. On a disk, the
faults are errors of system calls (`fsync`, `link`, `replace`, `remove`). In an object store, they are errors of fsspec
requests, which the server either refused, or executed without the client receiving the response.
"""

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from flows.reindex import reindex
from rag_model.errors import BookwheelError
from rag_model.evaluation.gate import GateRecipe
from rag_model.index.quality.results import RecallFloor
from rag_model.index.recipe import IndexRecipe
from rag_model.store.store import Store
from rag_model.store.upkeep.verify import verify_version
from tests.fixtures.monthly_dumps import NEW, OLD, RECIPE, Page

LOOSE = RecallFloor(0.0, 0.0)  # the encoder is random, so recall may be low
SMALL = replace(
    RECIPE,
    part_bytes=5_000,
    index={"hnsw": IndexRecipe("HNSW8"), "lists": IndexRecipe("IVF4,Flat")},
    gate=GateRecipe(queries=8, floors={"hnsw": LOOSE, "lists": LOOSE}),
)
# Two indexes would add no other kinds of requests to an object store.
ONE_INDEX = replace(SMALL, index={"hnsw": SMALL.index["hnsw"]}, gate=GateRecipe(queries=8, floors={"hnsw": LOOSE}))
Faults = Callable[[int], AbstractContextManager[list[str]]]


def _describe(operation: str, path: str) -> str:
    """Return an operation with the folder of the store that it writes to, such as `replace memo/embed`."""
    folders = path.rpartition("/store/")[2].lstrip("/").split("/")[:-1]
    # A record that is not synchronized leaves the same state as one that is not renamed, so one such fault is enough.
    return f"{operation} {'/'.join(folders[: 2 if folders[:1] == ['memo'] and operation != 'fsync' else 1])}"


@contextmanager
def fail_disk_operations(fatal: int) -> Iterator[list[str]]:
    """Fail all disk operations from number `fatal` on; yield the list of operations."""
    operations: list[str] = []

    def fail_from(name: str) -> Callable[..., Any]:
        original = getattr(os, name)

        def operation(*args: Any, **kwargs: Any) -> Any:
            path = str(Path(f"/proc/self/fd/{args[0]}").readlink()) if name == "fsync" else str(args[-1])
            if name == "fsync" or "/store/" in path:
                operations.append(_describe(name, path))
                if len(operations) >= fatal:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args, **kwargs)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "link", "replace", "remove"):
            patch.setattr(os, name, fail_from(name))
        yield operations


def _fail_requests(fatal: int, *, executed: bool = False, once: bool = False) -> Iterator[list[str]]:
    requests: list[str] = []

    def fail_from(name: str) -> Callable[..., Any]:
        original = getattr(MemoryFileSystem, name)

        def request(*args: Any, **kwargs: Any) -> Any:
            path = str(args[2 if name == "put_file" else 1]).lstrip("/")  # begins with the folder of the store
            requests.append(_describe(name, path.partition("/")[2]))
            if len(requests) < fatal or (once and len(requests) > fatal):
                return original(*args, **kwargs)
            if executed and len(requests) == fatal:
                original(*args, **kwargs)
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))

        return request

    with pytest.MonkeyPatch.context() as patch:
        for name in ("pipe_file", "put_file", "rm_file"):
            patch.setattr(MemoryFileSystem, name, fail_from(name))
        yield requests


@contextmanager
def refuse_requests(fatal: int) -> Iterator[list[str]]:
    """Reset the connection before request `fatal` and all later ones are executed."""
    yield from _fail_requests(fatal)


@contextmanager
def refuse_one_request(fatal: int) -> Iterator[list[str]]:
    """Reset the connection before request `fatal` is executed; later requests succeed."""
    yield from _fail_requests(fatal, once=True)


@contextmanager
def drop_responses(fatal: int) -> Iterator[list[str]]:
    """Execute request `fatal` and lose its response; later requests are refused."""
    yield from _fail_requests(fatal, executed=True)


@pytest.fixture(scope="module")
def dumps(
    tmp_path_factory: pytest.TempPathFactory, page_xml: Callable[..., str], export_xml: Callable[..., bytes]
) -> tuple[str, str]:
    def write(pages: Sequence[Page]) -> str:
        path = tmp_path_factory.mktemp("dump") / "dump.xml"
        path.write_bytes(export_xml(*(page_xml(page.page_id, page.text(), rev_id=page.rev_id) for page in pages)))
        return str(path)

    return write(OLD), write(NEW)


Build = Callable[[str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def build(dumps: tuple[str, str], tiny: Path) -> Build:
    """Build last month's snapshot (0) or today's (1) in a store."""

    def run(url: str, month: int) -> dict[str, Any]:
        recipe = ONE_INDEX if url.startswith("memory:") else SMALL
        return asdict(reindex.fn(dumps[month], url, str(tiny), recipe))

    return run


@pytest.fixture(scope="module")
def old_store(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with last month's snapshot."""
    path = tmp_path_factory.mktemp("month") / "store"
    build(str(path), 0)
    return path


@pytest.fixture
def copy_store(old_store: Path, tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Return a function that copies the store to a disk or into memory and returns its URL."""
    urls: list[str] = []

    def remove_copies() -> None:
        while urls:
            fsspec.filesystem("memory").rm(urls.pop(), recursive=True)

    def copy(kind: str) -> str:
        if kind == "disk":
            return str(shutil.copytree(old_store, tmp_path / secrets.token_hex(4) / "store"))
        remove_copies()  # The time of a request grows with the number of files in this file system.
        urls.append(f"memory://{secrets.token_hex(4)}")
        fsspec.filesystem("memory").put(f"{old_store}/", urls[-1], recursive=True)
        return urls[-1]

    yield copy
    remove_copies()


State = tuple[list[str], dict[str, list[str]]]


def read_state(url: str) -> State:
    """Verify all snapshots of a store; return their ids and the history of each ref."""
    store = Store.open(url)
    assert [problem for snapshot in store.snapshots.list_ids() for problem in verify_version(store, snapshot)] == []
    return sorted(store.snapshots.list_ids()), {
        ref: [move.snapshot for move in store.refs.read_history(ref)] for ref in store.refs.list_names()
    }


def read_records(url: str) -> dict[str, bytes | None]:
    files = Store.open(url).files
    return {file.path: files.read(file.path) for file in files.iter_tree("memo")}


def build_with_fault(url: str, build: Build, faults: Faults, fatal: int, old_state: State, expected: State) -> bool:
    """Build with a fault, check the state, and build again; return whether the fault occurred."""
    with faults(fatal) as operations, suppress(BookwheelError):  # The build raises no other error.
        build(url, 1)
    records = read_records(url)
    snapshots, refs = read_state(url)
    assert {*old_state[0]} <= {*snapshots} <= {*expected[0]}
    assert refs in (old_state[1], expected[1])
    result = build(url, 1)
    assert read_state(url) == expected
    assert result["snapshot"] == expected[1]["latest"][-1]
    final_records = read_records(url)
    assert all(final_records[path] == data for path, data in records.items()), "records are never replaced"
    return len(operations) >= fatal


FAULTS: dict[str, tuple[str, Faults]] = {
    "full disk": ("disk", fail_disk_operations),
    "refused requests": ("memory", refuse_requests),
    "one refused request": ("memory", refuse_one_request),
    "lost response": ("memory", drop_responses),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_reindex_recovers_from_a_failed_write(kind: str, copy_store: Callable[[str], str], build: Build) -> None:
    filesystem, faults = FAULTS[kind]
    url = copy_store(filesystem)
    old_state = read_state(url)
    with faults(1 << 30) as operations:  # the operations of a build without a fault
        build(url, 1)
    states = old_state, read_state(url)
    last_of_kind = {operation: number for number, operation in enumerate(operations, start=1)}
    assert len(last_of_kind) > 10, "each kind of operation in each folder fails once"
    fatal_numbers = {1, *last_of_kind.values()}
    if kind == "one refused request":  # The run goes on to later operations of this kind.
        fatal_numbers = {1 + operations.index(operation) for operation in last_of_kind}
    for number in sorted(fatal_numbers):
        assert build_with_fault(copy_store(filesystem), build, faults, number, *states)
    assert not build_with_fault(copy_store(filesystem), build, faults, len(operations) + 1, *states)
