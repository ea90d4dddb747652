"""The probe of exclusive creation detects a backend that looks for a file and then writes it."""

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
from tests.fixtures.slow_lookup import LookupBarrier


class LooksThenWrites(AbstractFileSystem):
    """Files in a folder; a second writer is refused only if it comes after the first has written."""

    protocol = "looksthenwrites"
    cachable = False

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.inner = DirFileSystem(str(folder), LocalFileSystem())
        self.lookup_gate = LookupBarrier()

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if self.exists(path):
            raise FileExistsError(path)
        self.lookup_gate.wait()
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


class CreatesExclusively(LooksThenWrites):
    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if not create_exclusive(self.inner.fs, f"{self.inner.path}/{path}", value):
            raise FileExistsError(path)


def test_probe_rejects_backend_that_looks_and_then_writes(tmp_path: Path) -> None:
    fs = LooksThenWrites(tmp_path)
    assert create_exclusive(fs, "late", b"first")
    assert not create_exclusive(fs, "late", b"second")
    assert not probe_exclusive_creation(fs, "probe")


@pytest.mark.parametrize(("kind", "is_exclusive"), [(Overwrites, False), (CreatesExclusively, True)])
def test_probe_leaves_no_files(kind: type[LooksThenWrites], is_exclusive: bool, tmp_path: Path) -> None:
    assert probe_exclusive_creation(kind(tmp_path), "probe") is is_exclusive
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


class TestS3:
    def test_real_server_accepts_one_writer(self, s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "_RACE_WRITERS", 8)
        assert s3_store.files.supports_exclusive_creation()


@pytest.mark.parametrize("make", [Path.touch, os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_file_in_place_of_a_folder_is_reported(make: Callable[[Path], None], tmp_path: Path) -> None:
    """A memo record is written again until it exists, so an impossible write must be an error."""
    store = Store.open(str(tmp_path / "store"), create=True)
    (tmp_path / "store/memo").mkdir(exist_ok=True)
    make(tmp_path / "store/memo/chunk")
    with pytest.raises(StoreError, match=r"Not a directory.*memo/chunk"):
        store.memo.write_record("chunk", "0" * 64, {}, {})
