"""The cache of remote blobs: bounded, and only ever holding what was verified."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rag_model.errors import UsageError
from rag_model.store import Store


@pytest.fixture
def put(memory_store: Store) -> Callable[[int], Path]:
    """Store 1,000 bytes and return their copy in the cache."""
    return lambda n: memory_store.blobs.local(memory_store.blobs.put_bytes(bytes([n]) * 1000))


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


def test_many_copies_are_listed_now_and_then(
    put: Callable[[int], Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a listing for each, the hundredth would cost a hundred times the first; the bound is kept all the same."""
    monkeypatch.setenv("BOOKWHEEL_CACHE_BYTES", "1000000")
    listed, glob = list[Path](), Path.glob

    def noted(self: Path, pattern: str) -> Iterator[Path]:
        listed.append(self)
        return glob(self, pattern)

    monkeypatch.setattr(Path, "glob", noted)
    for n in range(100):
        put(n)
    assert 1 <= listed.count(cache) < 15
    monkeypatch.setenv("BOOKWHEEL_CACHE_BYTES", "50000")
    for path in glob(cache, "??/*"):
        age(path, 2)
    before = len(listed)
    for n in range(100, 140):
        put(n)
        assert sum(path.stat().st_size for path in glob(cache, "??/*")) <= 50_000
    assert len(listed) - before <= 40


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
    assert local_store.blobs.local(blob).read_bytes() == b"sound"
