"""The cache of remote blobs: bounded, and only ever holding what was verified."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rag_model.errors import UsageError
from rag_model.store import Store
from rag_model.store.objects import cache as cache_module
from rag_model.store.objects.cache import make_room_for


@pytest.fixture
def put(memory_store: Store) -> Callable[[int], Path]:
    """Store 1,000 bytes and return their copy in the cache."""
    return lambda n: memory_store.blobs.get_local_path(memory_store.blobs.put_bytes(bytes([n]) * 1000))


def age(path: Path, hours: float) -> None:
    found = path.stat()
    os.utime(path, ns=(found.st_atime_ns - int(hours * 3600e9), found.st_mtime_ns))


def test_the_longest_unused_leaves_first(put: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOKWHEEL_CACHE_BYTES", "3100")
    first, second, third = put(1), put(2), put(3)
    age(first, 2), age(second, 3), age(third, 4)
    put(3)  # used again
    with second.open("rb") as reader:
        fourth = put(4)
        assert [path.exists() for path in (first, second, third, fourth)] == [True, False, True, True]
        assert reader.read() == b"\2" * 1000  # who has opened it keeps it
    assert put(2) == second
    assert second.read_bytes() == b"\2" * 1000


def test_what_was_just_used_stays(put: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOKWHEEL_CACHE_BYTES", "1")
    assert all(path.exists() for path in [put(n) for n in range(4)])


_BOUND = 1_024_000  # of which a process adds 1,000 bytes between two listings


@pytest.fixture
def listings(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were listed since the list was cleared; a bound of `_BOUND` bytes."""
    monkeypatch.setenv("BOOKWHEEL_CACHE_BYTES", str(_BOUND))
    listed, glob = list[Path](), Path.glob

    def noted(self: Path, pattern: str) -> Iterator[Path]:
        listed.append(self)
        return glob(self, pattern)

    monkeypatch.setattr(Path, "glob", noted)
    return listed


def add(cache: Path, number: int, size: int, hours: float = 0.0) -> Path:
    """Add a copy as `Blobs.local` does."""
    make_room_for(size)
    path = cache / "aa" / f"{number:064x}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    age(path, hours)
    return path


def held(cache: Path) -> int:
    return sum(path.stat().st_size for path in (cache / "aa").iterdir())


def test_copies_are_listed_now_and_then(cache: Path, listings: list[Path]) -> None:
    """With a listing for each, the thousandth would cost a thousand times the first."""
    for number in range(50):
        add(cache, number, 250)
    assert listings == [cache] * 10  # the first of five, and four more that fit into what it found
    listings.clear()
    add(cache, 50, 1001)
    add(cache, 51, 1001)
    assert listings == [cache] * 2  # each is more than that


def test_the_bound_is_kept_though_copies_are_listed_now_and_then(cache: Path, listings: list[Path]) -> None:
    old = [add(cache, number, 200_000, hours=9 - number) for number in range(5)]
    for number in range(5, 500):
        add(cache, number, 250, hours=1.5)
        assert held(cache) <= _BOUND
    assert [path.exists() for path in old] == [False, True, True, True, True]
    assert listings.count(cache) < 130


def test_a_full_cache_of_copies_in_use_is_listed_now_and_then(cache: Path, listings: list[Path]) -> None:
    add(cache, 0, _BOUND)
    listings.clear()
    kept = [add(cache, number, 250) for number in range(1, 26)]
    assert all(path.exists() for path in kept)
    assert listings == [cache] * 5


def test_many_processes_exceed_the_bound_by_a_64th(
    cache: Path, listings: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen see an empty cache; one fills it; then the others go on."""
    number = 0

    def by(process: dict[tuple[Path, int], int], size: int, hours: float) -> None:
        nonlocal number
        number += 1
        monkeypatch.setattr(cache_module, "_allowance", process)
        add(cache, number, size, hours)

    processes: list[dict[tuple[Path, int], int]] = [{} for _ in range(16)]
    for process in processes:
        by(process, 250, 1.5)
    for _ in range(10):
        by(processes[0], 100_000, 3.0)
    assert held(cache) > 0.9 * _BOUND
    for _ in range(20):
        for process in processes[1:]:
            by(process, 250, 1.5)
            assert held(cache) <= _BOUND * 65 / 64


def test_without_a_bound_half_the_disk_is_left(put: Callable[[int], Path]) -> None:
    first = put(1)
    age(first, 1000)
    assert put(2).exists()
    assert first.exists()


def test_a_bound_is_a_number(put: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOKWHEEL_CACHE_BYTES", "10GB")
    with pytest.raises(UsageError, match="BOOKWHEEL_CACHE_BYTES is '10GB': give a number of bytes"):
        put(1)


def test_a_cache_that_cannot_keep_stamps_still_verifies(
    local_store: Store, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("a file, where a folder should be")
    blob = local_store.blobs.put_bytes(b"sound")
    assert local_store.blobs.get_local_path(blob).read_bytes() == b"sound"
