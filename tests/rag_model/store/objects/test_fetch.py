"""A file is fetched by one process at a time, and its hash is verified."""

import fcntl
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rag_model.digest import digest_bytes
from rag_model.store.objects.blobs import fetch_file, get_partial_size
from rag_model.store.objects.cache import PARTIAL_SUFFIX

DATA = b"sound bytes"
ID = digest_bytes(DATA)


def read_from(start: int) -> Iterator[bytes]:
    yield from (DATA[offset : offset + 3] for offset in range(start, len(DATA), 3))


def fail_to_read(start: int) -> Iterator[bytes]:
    pytest.fail(f"bytes from {start} were requested")


@pytest.mark.parametrize("partial", [b"", DATA[:5], DATA, b"other", DATA + b"more"])
def test_fetch_resumes_from_any_partial_file(tmp_path: Path, partial: bytes) -> None:
    (tmp_path / f".file{PARTIAL_SUFFIX}").write_bytes(partial)
    assert get_partial_size(tmp_path / "file") == len(partial)
    assert fetch_file(ID, len(DATA), tmp_path / "file", read_from)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == DATA
    assert get_partial_size(tmp_path / "file") == 0


def test_complete_partial_file_is_not_fetched_again(tmp_path: Path) -> None:
    (tmp_path / f".file{PARTIAL_SUFFIX}").write_bytes(DATA)
    calls: list[int] = []
    assert fetch_file(ID, len(DATA), tmp_path / "file", lambda start: calls.append(start) or read_from(start))  # type: ignore[func-returns-value]
    assert calls == [len(DATA)]


def test_wrong_bytes_are_discarded(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"previous content")
    assert not fetch_file("sha256:" + hashlib.sha256(b"x").hexdigest(), len(DATA), tmp_path / "file", read_from)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"previous content"


def test_waiting_process_uses_the_file_of_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process holds the lock first, and has fetched the file when this process gets the lock."""
    dest, partial, flock_file = tmp_path / "file", tmp_path / f".file{PARTIAL_SUFFIX}", fcntl.flock

    def flock(file: object, how: int) -> None:
        if dest.exists():
            return flock_file(file, how)  # type: ignore[arg-type]
        if how & fcntl.LOCK_NB:
            raise BlockingIOError
        partial.write_bytes(DATA)
        partial.replace(dest)
        return None

    monkeypatch.setattr("rag_model.store.objects.blobs.fcntl.flock", flock)
    assert fetch_file(ID, len(DATA), dest, fail_to_read)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
