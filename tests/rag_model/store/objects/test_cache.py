"""The cache of remote blobs has a size limit and holds only verified copies."""

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rag_model.errors import UsageError
from rag_model.store import Store
from rag_model.store.objects import cache as cache_module
from rag_model.store.objects.cache import get_partial_path, make_room_for


@pytest.fixture
def put_bytes(memory_store: Store) -> Callable[[int], Path]:
    """Store 1,000 bytes and return their copy in the cache."""
    return lambda n: memory_store.blobs.get_local_path(memory_store.blobs.put_bytes(bytes([n]) * 1000))


def age_file(path: Path, hours: float) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns - int(hours * 3600e9), status.st_mtime_ns))


def test_least_recently_used_copy_is_deleted_first(
    put_bytes: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOOKWHEEL_CACHE_BYTES", "3100")
    first, second, third = put_bytes(1), put_bytes(2), put_bytes(3)
    age_file(first, 2), age_file(second, 3), age_file(third, 4)
    put_bytes(3)  # uses the third copy again
    with second.open("rb") as reader:
        fourth = put_bytes(4)
        assert [path.exists() for path in (first, second, third, fourth)] == [True, False, True, True]
        assert reader.read() == b"\2" * 1000  # an open file stays readable
    assert put_bytes(2) == second
    assert second.read_bytes() == b"\2" * 1000


def test_copy_in_use_is_kept_beyond_the_bound(
    put_bytes: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOOKWHEEL_CACHE_BYTES", "1")
    assert all(path.exists() for path in [put_bytes(n) for n in range(4)])


def test_partial_file_is_deleted_unless_a_fetch_has_locked_it(
    memory_store: Store, put_bytes: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOOKWHEEL_CACHE_BYTES", "1500")
    partials = [get_partial_path(put_bytes(n)) for n in range(2)]
    for partial_path in partials:
        partial_path.write_bytes(b"beginning of a copy")
        os.utime(partial_path, (0, 0))
    with partials[0].open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        make_room_for(1000)
        assert [path.exists() for path in partials] == [True, False]
    memory_store.blobs.delete_local_copy(memory_store.blobs.put_bytes(bytes([0]) * 1000))
    assert not partials[0].exists()


_BOUND = 1_024_000  # a process may add 1,000 bytes, a 1024th of it, between two listings


@pytest.fixture
def listings(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Set a limit of `_BOUND` bytes, and record the folders that are listed."""
    monkeypatch.setenv("BOOKWHEEL_CACHE_BYTES", str(_BOUND))
    listed, glob = list[Path](), Path.glob

    def record_glob(self: Path, pattern: str) -> Iterator[Path]:
        listed.append(self)
        return glob(self, pattern)

    monkeypatch.setattr(Path, "glob", record_glob)
    return listed


def add_copy(cache: Path, number: int, size: int, hours: float = 0.0) -> Path:
    """Add a copy as `Blobs.get_local_path` does."""
    make_room_for(size)
    path = cache / "aa" / f"{number:064x}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    age_file(path, hours)
    return path


def count_cached_bytes(cache: Path) -> int:
    return sum(path.stat().st_size for path in (cache / "aa").iterdir())


def test_cache_is_not_listed_for_every_copy(cache: Path, listings: list[Path]) -> None:
    """If every copy caused a listing, the thousandth would cost a thousand times the first."""
    for number in range(50):
        add_copy(cache, number, 250)
    assert listings == [cache] * 10  # one listing allows for 1,000 bytes: this copy and four more
    listings.clear()
    add_copy(cache, 50, 1001)
    add_copy(cache, 51, 1001)
    assert listings == [cache] * 2  # each copy is larger than 1,000 bytes


def test_bound_holds_between_listings(cache: Path, listings: list[Path]) -> None:
    old = [add_copy(cache, number, 200_000, hours=9 - number) for number in range(5)]
    for number in range(5, 500):
        add_copy(cache, number, 250, hours=1.5)
        assert count_cached_bytes(cache) <= _BOUND
    assert [path.exists() for path in old] == [False, True, True, True, True]
    assert listings.count(cache) < 130


def test_full_cache_of_copies_in_use_is_not_listed_for_every_copy(cache: Path, listings: list[Path]) -> None:
    add_copy(cache, 0, _BOUND)
    listings.clear()
    copies = [add_copy(cache, number, 250) for number in range(1, 26)]
    assert all(path.exists() for path in copies)
    assert listings == [cache] * 5


def test_sixteen_processes_exceed_the_bound_by_at_most_a_64th(
    cache: Path, listings: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes see an empty cache, then one fills it, then the others continue."""
    number = 0

    def add_from_process(process: dict[tuple[Path, int], int], size: int, hours: float) -> None:
        nonlocal number
        number += 1
        monkeypatch.setattr(cache_module, "_allowance", process)
        add_copy(cache, number, size, hours)

    processes: list[dict[tuple[Path, int], int]] = [{} for _ in range(16)]
    for process in processes:
        add_from_process(process, 250, 1.5)
    for _ in range(10):
        add_from_process(processes[0], 100_000, 3.0)
    assert count_cached_bytes(cache) > 0.9 * _BOUND
    for _ in range(20):
        for process in processes[1:]:
            add_from_process(process, 250, 1.5)
            assert count_cached_bytes(cache) <= _BOUND * 65 / 64


def test_without_a_bound_old_copies_stay_while_half_the_disk_is_free(put_bytes: Callable[[int], Path]) -> None:
    first = put_bytes(1)
    age_file(first, 1000)
    assert put_bytes(2).exists()
    assert first.exists()


def test_bound_must_be_a_number(put_bytes: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOKWHEEL_CACHE_BYTES", "10GB")
    with pytest.raises(UsageError, match="BOOKWHEEL_CACHE_BYTES is '10GB': give a number of bytes"):
        put_bytes(1)


def test_blob_is_verified_if_the_cache_cannot_store_stamps(
    store: Store, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("a file, where a folder should be")
    blob = store.blobs.put_bytes(b"sound")
    assert store.blobs.get_local_path(blob).read_bytes() == b"sound"
