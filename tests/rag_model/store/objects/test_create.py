"""The probe of exclusive creation is not fooled by a backend that looks for a file and then writes it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from rag_model.errors import StoreError
from rag_model.store.objects import files
from rag_model.store.objects.files import create_exclusive, probe_exclusive_creation
from rag_model.store.store import Store
from tests.fixtures.slow_lookup import Looking


class LooksThenWrites(AbstractFileSystem):
    """Files in a folder; a second writer is refused only if it comes after the first has written."""

    protocol = "looksthenwrites"
    cachable = False

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.inner = DirFileSystem(str(folder), LocalFileSystem())
        self.looking = Looking()

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if self.exists(path):
            raise FileExistsError(path)
        self.looking.wait()
        self.inner.makedirs(self._parent(path), exist_ok=True)
        self.inner.pipe_file(path, value)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        return bytes(self.inner.cat_file(path))

    def exists(self, path: str, **kwargs: Any) -> bool:
        return bool(self.inner.exists(path))

    def rm_file(self, path: str) -> None:
        self.inner.rm_file(path)


class Overwrites(LooksThenWrites):
    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self.inner.makedirs(self._parent(path), exist_ok=True)
        self.inner.pipe_file(path, value)


class Excludes(LooksThenWrites):
    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if not create_exclusive(self.inner.fs, f"{self.inner.path}/{path}", value):
            raise FileExistsError(path)


def test_one_that_looks_and_then_writes_refuses_a_late_writer_alone(tmp_path: Path) -> None:
    fs = LooksThenWrites(tmp_path)
    assert create_exclusive(fs, "late", b"first")
    assert not create_exclusive(fs, "late", b"second")
    assert not probe_exclusive_creation(fs, "probe")


@pytest.mark.parametrize(("kind", "good"), [(Overwrites, False), (Excludes, True)])
def test_others_are_told_apart_and_nothing_stays(kind: type[LooksThenWrites], good: bool, tmp_path: Path) -> None:
    assert probe_exclusive_creation(kind(tmp_path), "probe") is good
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


class TestS3:
    def test_a_real_server_lets_one_win(self, s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "_RACE_WRITERS", 8)
        assert s3_store.files.supports_exclusive_creation()


@pytest.mark.parametrize("make", [Path.touch, os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_a_file_where_a_folder_must_be_is_said(make: Callable[[Path], None], tmp_path: Path) -> None:
    """A record of the memo is written until one is there: it must not be tried forever."""
    store = Store.open(str(tmp_path / "store"), create=True)
    (tmp_path / "store/memo").mkdir(exist_ok=True)
    make(tmp_path / "store/memo/chunk")
    with pytest.raises(StoreError, match=r"Not a directory.*memo/chunk"):
        store.memo.write_record("chunk", "0" * 64, {}, {})
