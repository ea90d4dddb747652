"""A fault at every write of a whole `reindex`: run again, it ends as if undisturbed, and nothing is lost.

The flow is called as the function it is and does its small jobs in this process, so that all its writes come in turn.
Faults are at the border of the operating system (a file's bytes, its name, its folder, a deletion) and, for a store
that is no disk, at that of fsspec (a request, refused or carried out and its answer lost).
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

LOOSE = RecallFloor(0.0, 0.0)  # the neighbours of random vectors are hard to find
SMALL = replace(
    RECIPE,
    part_bytes=5_000,
    index={"hnsw": IndexRecipe("HNSW8"), "lists": IndexRecipe("IVF4,Flat")},
    gate=GateRecipe(queries=8, floors={"hnsw": LOOSE, "lists": LOOSE}),
)
# An object store has the same faults with one index as with two, which a disk has.
ONE_INDEX = replace(SMALL, index={"hnsw": SMALL.index["hnsw"]}, gate=GateRecipe(queries=8, floors={"hnsw": LOOSE}))
Faults = Callable[[int], AbstractContextManager[list[str]]]


def _describe(operation: str, path: str) -> str:
    """Return an operation with the folder of the store that it touches: `replace memo/embed`."""
    folders = path.rpartition("/store/")[2].lstrip("/").split("/")[:-1]
    return f"{operation} {'/'.join(folders[: 2 if folders[:1] == ['memo'] else 1])}"


@contextmanager
def on_disk(fatal: int) -> Iterator[list[str]]:
    """From operation `fatal` on no file reaches the disk, gets its name or goes; yields a list of operations."""
    seen: list[str] = []

    def failing(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def operation(*args: Any, **kwargs: Any) -> Any:
            path = str(Path(f"/proc/self/fd/{args[0]}").readlink()) if name == "fsync" else str(args[-1])
            if name == "fsync" or "/store/" in path:
                seen.append(_describe(name, path))
                if len(seen) >= fatal:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **kwargs)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "link", "replace", "remove"):
            patch.setattr(os, name, failing(name))
        yield seen


def _by_request(fatal: int, *, carried_out: bool = False, once: bool = False) -> Iterator[list[str]]:
    seen: list[str] = []

    def failing(name: str) -> Callable[..., Any]:
        real = getattr(MemoryFileSystem, name)

        def request(*args: Any, **kwargs: Any) -> Any:
            path = str(args[2 if name == "put_file" else 1]).lstrip("/")  # begins with the store's own folder
            seen.append(_describe(name, path.partition("/")[2]))
            if len(seen) < fatal or (once and len(seen) > fatal):
                return real(*args, **kwargs)
            if carried_out and len(seen) == fatal:
                real(*args, **kwargs)
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))

        return request

    with pytest.MonkeyPatch.context() as patch:
        for name in ("pipe_file", "put_file", "rm_file"):
            patch.setattr(MemoryFileSystem, name, failing(name))
        yield seen


@contextmanager
def refused(fatal: int) -> Iterator[list[str]]:
    """From request `fatal` on the connection is reset before anything is done."""
    yield from _by_request(fatal)


@contextmanager
def refused_once(fatal: int) -> Iterator[list[str]]:
    """Request `fatal` is refused, and the next ones are not: what goes on regardless must not rely on it."""
    yield from _by_request(fatal, once=True)


@contextmanager
def unanswered(fatal: int) -> Iterator[list[str]]:
    """Request `fatal` is carried out, and its answer is lost; then nobody answers any more."""
    yield from _by_request(fatal, carried_out=True)


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
def month(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that holds last month's snapshot."""
    path = tmp_path_factory.mktemp("month") / "store"
    build(str(path), 0)
    return path


@pytest.fixture
def copied(month: Path, tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Return a function that copies the store to a disk or into memory and returns its URL."""
    made: list[str] = []

    def remove_copies() -> None:
        while made:
            fsspec.filesystem("memory").rm(made.pop(), recursive=True)

    def copy(place: str) -> str:
        if place == "disk":
            return str(shutil.copytree(month, tmp_path / secrets.token_hex(4) / "store"))
        remove_copies()  # this file system compares each path with those of all copies
        made.append(f"memory://{secrets.token_hex(4)}")
        fsspec.filesystem("memory").put(f"{month}/", made[-1], recursive=True)
        return made[-1]

    yield copy
    remove_copies()


def state(url: str) -> tuple[list[str], dict[str, list[str]]]:
    """What there is of snapshots, sound ones all, and where the refs have been."""
    store = Store.open(url)
    assert [problem for known in store.snapshots.list_ids() for problem in verify_version(store, known)] == []
    return sorted(store.snapshots.list_ids()), {
        ref: [move.snapshot for move in store.refs.read_history(ref)] for ref in store.refs.list_names()
    }


def records(url: str) -> dict[str, bytes | None]:
    files = Store.open(url).files
    return {file.path: files.read(file.path) for file in files.iter_tree("memo")}


def check(url: str, build: Build, faults: Faults, fatal: int, expected: Any) -> bool:
    """Build with a fault, look, and build again; return whether there was a fault at all."""
    before = state(url)
    with faults(fatal) as seen, suppress(BookwheelError):  # nothing else is raised
        build(url, 1)
    known = records(url)
    snapshots, refs = state(url)
    assert {*before[0]} <= {*snapshots} <= {*expected[0]}
    assert refs in (before[1], expected[1])
    made = build(url, 1)
    assert state(url) == expected
    assert made["snapshot"] == expected[1]["latest"][-1]
    now = records(url)
    assert all(now[path] == data for path, data in known.items()), "what was recorded is what counts"
    return len(seen) >= fatal


PLACES: dict[str, tuple[str, Faults]] = {
    "a full disk": ("disk", on_disk),
    "a request refused": ("memory", refused),
    "one request refused": ("memory", refused_once),
    "an answer lost": ("memory", unanswered),
}


def operations(url: str, build: Build, faults: Faults) -> tuple[list[str], Any]:
    """Build undisturbed; return the operations that takes, and the state afterwards."""
    with faults(1 << 30) as seen:
        build(url, 1)
    return list(seen), state(url)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLACES)
def test_a_write_of_a_reindex_fails(kind: str, copied: Callable[[str], str], build: Build) -> None:
    place, faults = PLACES[kind]
    writes, expected = operations(copied(place), build, faults)
    last = {write: number for number, write in enumerate(writes, start=1)}
    assert len(last) > 10, "one of each operation on each folder fails"
    fatal = {1, *last.values()}
    if kind == "one request refused":  # and the run goes on, to the next of its kind
        fatal = {1 + writes.index(write) for write in last}
    assert all(check(copied(place), build, faults, number, expected) for number in sorted(fatal))
    assert not check(copied(place), build, faults, len(writes) + 1, expected)
