"""A pulled folder is served, and what another pull puts there; what is damaged leaves the old snapshot serving."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from rag_model.errors import BookwheelError, StoreError
from rag_model.serving.following.follower import FolderFollower, PulledFolder
from rag_model.serving.following.snapshot_slot import SnapshotSlot
from rag_model.serving.monitoring.observer import Observer
from rag_model.serving.service import Service
from rag_model.store.pulling.pull import pull
from tests.fixtures.serving import QUICK, Library, until


class Folder:
    """A folder, and what looks at it."""

    def __init__(self, path: Path) -> None:
        self.path, self.slot, self.hopeless = path, SnapshotSlot(), list[BookwheelError]()
        self.follower = FolderFollower(PulledFolder(path), self.slot, QUICK, Observer(), self.hopeless.append)

    def served(self) -> str | None:
        self.follower.poll()
        return None if self.slot.served_ref is None else self.slot.served_ref.snapshot


@pytest.fixture
def folder(made_library: Library, dest: Path) -> Iterator[Folder]:
    pull(made_library.store, made_library.red, dest)
    found = Folder(dest)
    yield found
    found.slot.close()


def test_the_next_pull_is_served(folder: Folder, made_library: Library) -> None:
    assert folder.served() == made_library.red
    before = folder.slot.current
    assert folder.served() == made_library.red
    assert folder.slot.current is before
    pull(made_library.store, made_library.blue, folder.path, keep=1)
    assert folder.served() == made_library.blue
    assert folder.slot.loaded_count == 1


def test_a_service_answers_from_a_folder(folder: Folder, made_library: Library) -> None:
    service = Service(PulledFolder(folder.path), QUICK)
    service.start()
    until(lambda: service.is_ready)
    hits = asyncio.run(service.search(["who?"], 2))
    assert (hits.snapshot, len(hits.hits[0])) == (made_library.red, 2)
    assert (
        service.describe()["ref"],
        service.describe()["number"],
        service.describe()["store_problem"],
    ) == ("current", None, None)
    service.close()


def test_a_damaged_snapshot_leaves_the_old_one_serving(folder: Folder, made_library: Library) -> None:
    assert folder.served() == made_library.red
    pulled = pull(made_library.store, made_library.blue, folder.path).path
    (pulled / "index" / "hnsw.faiss").unlink()
    assert folder.served() == made_library.red
    assert "hnsw.faiss was not pulled" in folder.follower.problem
    assert folder.hopeless == []
    pull(made_library.store, made_library.red, folder.path)
    assert folder.served() == made_library.red


def test_a_folder_without_a_usable_snapshot_is_told(folder: Folder, tmp_path: Path) -> None:
    (next(folder.path.glob("*/index")) / "hnsw.faiss").write_bytes(b"")
    assert folder.served() is None
    assert [type(error) for error in folder.hopeless] == [StoreError]
    with pytest.raises(StoreError, match="no pulled snapshot"):
        PulledFolder(tmp_path / "nowhere").check()
