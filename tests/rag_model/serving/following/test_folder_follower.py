"""A pulled folder is served and followed; a damaged snapshot leaves the old one current."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rag_model.errors import BookwheelError, StoreError
from rag_model.serving.following.follower import FolderFollower, PulledFolder
from rag_model.serving.following.snapshot_slot import SnapshotSlot
from rag_model.serving.monitoring.observer import Observer
from rag_model.serving.service import Service
from rag_model.serving.settings import ServiceSettings
from rag_model.store.pulling.pull import pull
from tests.fixtures.serving import QUICK, Library, make_settings, wait_until


class FollowedFolder:
    """A folder and its follower."""

    def __init__(self, path: Path, settings: ServiceSettings = QUICK) -> None:
        self.path, self.slot, self.hopeless = path, SnapshotSlot(), list[BookwheelError]()
        self.follower = FolderFollower(PulledFolder(path), self.slot, settings, Observer(), self.hopeless.append)

    def poll(self) -> str | None:
        self.follower.poll()
        return None if self.slot.served_ref is None else self.slot.served_ref.snapshot


@pytest.fixture
def folder(shared_library: Library, dest: Path) -> Iterator[FollowedFolder]:
    pull(shared_library.store, shared_library.red, dest)
    folder = FollowedFolder(dest)
    yield folder
    folder.slot.close()


def test_next_pull_is_served(folder: FollowedFolder, shared_library: Library) -> None:
    assert folder.poll() == shared_library.red
    first = folder.slot.current
    assert folder.poll() == shared_library.red
    assert folder.slot.current is first
    pull(shared_library.store, shared_library.blue, folder.path, keep_snapshots=1)
    assert folder.poll() == shared_library.blue
    assert folder.slot.loaded_count == 1


def test_copied_folder_is_opened_again_only_if_its_manifest_changes(
    shared_library: Library, dest: Path, tmp_path: Path
) -> None:
    red, blue = (
        pull(shared_library.store, snapshot, dest).path for snapshot in (shared_library.red, shared_library.blue)
    )
    folder = FollowedFolder(Path(shutil.copytree(red, tmp_path / "wiki")))
    assert folder.poll() == shared_library.red
    first = folder.slot.current
    for _ in range(3):
        assert folder.poll() == shared_library.red
        assert folder.slot.current is first
    shutil.copytree(blue, tmp_path / "wiki.new")
    folder.path.rename(tmp_path / "wiki.old")
    (tmp_path / "wiki.new").rename(folder.path)
    assert folder.poll() == shared_library.blue
    second = folder.slot.current
    assert folder.poll() == shared_library.blue
    assert folder.slot.current is second
    folder.slot.close()


def test_service_answers_from_a_folder(folder: FollowedFolder, shared_library: Library) -> None:
    service = Service(PulledFolder(folder.path), QUICK)
    service.start()
    wait_until(lambda: service.is_ready)
    hits = asyncio.run(service.search(["who?"], 2))
    assert (hits.snapshot, len(hits.hits[0])) == (shared_library.red, 2)
    state = service.describe()
    assert (state["ref"], state["number"], state["store_problem"]) == ("current", None, None)
    service.close()


def test_damaged_snapshot_leaves_the_old_one_current(folder: FollowedFolder, shared_library: Library) -> None:
    assert folder.poll() == shared_library.red
    pulled = pull(shared_library.store, shared_library.blue, folder.path).path
    (pulled / "index" / "hnsw.faiss").unlink()
    assert folder.poll() == shared_library.red
    assert "hnsw.faiss was not pulled" in folder.follower.problem
    assert folder.hopeless == []
    pull(shared_library.store, shared_library.red, folder.path)
    assert folder.poll() == shared_library.red
    assert folder.follower.problem == ""


def test_snapshot_is_retried_after_a_temporary_error(
    shared_library: Library, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull(shared_library.store, shared_library.red, dest)
    folder = FollowedFolder(dest, make_settings(in_memory=True))
    assert folder.poll() == shared_library.red
    pull(shared_library.store, shared_library.blue, dest)
    with monkeypatch.context() as patched:
        patched.setattr("rag_model.serving.answering.available_retrievers.get_free_bytes", lambda: 100)
        assert folder.poll() == shared_library.red
    assert "of memory" in folder.follower.problem
    wait_until(lambda: folder.poll() == shared_library.blue)
    assert folder.follower.problem == ""
    folder.slot.close()


def test_folder_without_a_usable_snapshot_is_reported(folder: FollowedFolder, tmp_path: Path) -> None:
    (next(folder.path.glob("*/index")) / "hnsw.faiss").write_bytes(b"")
    assert folder.poll() is None
    assert [type(error) for error in folder.hopeless] == [StoreError]
    with pytest.raises(StoreError, match="no pulled snapshot"):
        PulledFolder(tmp_path / "nowhere").check()
