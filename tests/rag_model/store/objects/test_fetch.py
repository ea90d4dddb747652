"""Fetching one file: by one process at a time, and never believing what did not hash right."""

import fcntl
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rag_model.digest import digest_bytes
from rag_model.store.objects.blobs import PARTIAL_SUFFIX, fetch_file, partial_bytes

DATA = b"sound bytes"
ID = digest_bytes(DATA)


def rest(start: int) -> Iterator[bytes]:
    yield from (DATA[at : at + 3] for at in range(start, len(DATA), 3))


def never(start: int) -> Iterator[bytes]:
    pytest.fail(f"bytes from {start} were asked for")


@pytest.mark.parametrize("left", [b"", DATA[:5], DATA, b"other", DATA + b"more"])
def test_whatever_was_left_ends_well(tmp_path: Path, left: bytes) -> None:
    (tmp_path / f".file{PARTIAL_SUFFIX}").write_bytes(left)
    assert partial_bytes(tmp_path / "file") == len(left)
    assert fetch_file(ID, len(DATA), tmp_path / "file", rest)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == DATA
    assert partial_bytes(tmp_path / "file") == 0


def test_what_is_left_is_not_asked_for_again(tmp_path: Path) -> None:
    (tmp_path / f".file{PARTIAL_SUFFIX}").write_bytes(DATA)
    calls: list[int] = []
    assert fetch_file(ID, len(DATA), tmp_path / "file", lambda start: calls.append(start) or rest(start))  # type: ignore[func-returns-value]
    assert calls == [len(DATA)]


def test_wrong_bytes_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"what was there")
    assert not fetch_file("sha256:" + hashlib.sha256(b"x").hexdigest(), len(DATA), tmp_path / "file", rest)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"what was there"


def test_who_waited_takes_what_the_other_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process holds the lock when this one comes, and has finished when this one gets it."""
    dest, partial, real = tmp_path / "file", tmp_path / f".file{PARTIAL_SUFFIX}", fcntl.flock

    def flock(file: object, how: int) -> None:
        if dest.exists():
            return real(file, how)  # type: ignore[arg-type]
        if how & fcntl.LOCK_NB:
            raise BlockingIOError
        partial.write_bytes(DATA)
        partial.replace(dest)
        return None

    monkeypatch.setattr("rag_model.store.objects.blobs.fcntl.flock", flock)
    assert fetch_file(ID, len(DATA), dest, never)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
