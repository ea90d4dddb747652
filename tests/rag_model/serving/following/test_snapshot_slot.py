"""The slot: an edition stays open while somebody reads from it, and not a moment longer."""

import gc
import weakref
from pathlib import Path

import pytest

from rag_model.encoders.encoder import Encoder
from rag_model.errors import NotReadyError
from rag_model.retrieve.context import RetrieverContext
from rag_model.retrieve.retriever import Queries
from rag_model.serving.answering.loaded_snapshot import AvailableRetrievers, LoadedSnapshot, ServedRef
from rag_model.serving.answering.served_model import SharedQuestionEncoder
from rag_model.serving.following.group import WorkerSlot
from rag_model.serving.following.snapshot_slot import SnapshotSlot
from rag_model.serving.workers import WorkerLink
from rag_model.store.pulling.pull import pull
from rag_model.store.versions.manifest import QUESTION_ENCODER
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.serving import QUICK, Library, with_limits


def opened(
    library: Library, dest: Path, snapshot: str, before: LoadedSnapshot | None = None, **bounds: object
) -> LoadedSnapshot:
    folder = pull(library.store, snapshot, dest).path
    named = ServedRef("latest", 1, snapshot, "2026-11-01T00:00:00+00:00")
    return LoadedSnapshot.open(folder, named, with_limits(**bounds) if bounds else QUICK, previous=before)


def mapped(library: Library, dest: Path, snapshot: str, dtype: str) -> LoadedSnapshot:
    """Open an edition that maps its files, with an encoder of this dtype: by default the processor decides."""
    folder = pull(library.store, snapshot, dest).path
    found = Snapshot.from_folder(folder)
    asker = SharedQuestionEncoder(Encoder.load(folder / QUESTION_ENCODER, "question", dtype=dtype))
    offer, opened = (
        AvailableRetrievers.plan(found, QUICK, uses_inner_products=False),
        RetrieverContext(found, lambda: asker),
    )
    return LoadedSnapshot(ServedRef("latest", 1, snapshot, ""), offer, opened, QUICK, None)


def mapped_inodes(folder: Path) -> set[int]:
    """Return the inodes of the files below a folder, deleted ones too, that this process maps."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return {int(fields[4]) for fields in lines if fields[-1].startswith(f"{folder}/")}


def inodes_of(folder: Path) -> set[int]:
    return {path.stat().st_ino for path in folder.rglob("*")}


def test_an_empty_desk_says_so() -> None:
    with pytest.raises(NotReadyError, match="no snapshot is open yet"), SnapshotSlot().acquire():
        pass
    assert SnapshotSlot().served_ref is None


def test_the_last_reader_frees_an_old_edition(shared_library: Library, dest: Path) -> None:
    freed: list[str] = []
    slot = SnapshotSlot(freed.append)
    red = opened(shared_library, dest, shared_library.red)
    slot.swap(red)
    first, second = slot.acquire(), slot.acquire()
    assert first.__enter__() is second.__enter__() is red
    blue = opened(shared_library, dest, shared_library.blue, red)
    slot.swap(blue)
    with slot.acquire() as current:
        assert current is blue
    first.__exit__(None, None, None)
    assert (slot.loaded_count, freed) == (2, [])
    assert red.search(Queries(["who?"]), 3)[0][0].passage.title.startswith("red")
    second.__exit__(None, None, None)
    assert (slot.loaded_count, freed) == (1, [shared_library.red])
    slot.close()
    assert freed == [shared_library.red, shared_library.blue]
    assert slot.loaded_count == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_freed_is_gone_from_memory(shared_library: Library, dest: Path, dtype: str) -> None:
    """The edition, its index and its maps; the encoder goes on, as the next edition carries the same.

    float32 weights may stay mapped from the first snapshot's file, which is the next one's as well.
    """
    slot = SnapshotSlot()
    slot.swap(mapped(shared_library, dest, shared_library.red, dtype))
    with slot.acquire() as edition:
        edition.warm_up()
        gone, asker = weakref.ref(edition), edition.question_encoder
        assert inodes_of(dest / shared_library.red / "index") & mapped_inodes(dest)
    blue = opened(shared_library, dest, shared_library.blue, edition)
    assert blue.question_encoder is asker
    slot.swap(blue)
    del edition
    gc.collect()
    assert gone() is None
    assert mapped_inodes(dest / shared_library.red) <= inodes_of(dest / shared_library.blue / QUESTION_ENCODER)
    pull(shared_library.store, shared_library.blue, dest, keep=1)
    assert not (dest / shared_library.red).exists()
    assert mapped_inodes(dest) <= inodes_of(dest)
    blue.warm_up()
    slot.close()


def test_an_edition_outlives_the_folder_of_its_encoder(shared_library: Library, dest: Path) -> None:
    """Its encoder is shared with the next edition, after `keep` has deleted the folder that it was read from."""
    red = opened(shared_library, dest, shared_library.red)
    red.close()
    folder = pull(shared_library.store, shared_library.blue, dest, keep=1).path
    assert not (dest / shared_library.red).exists()
    blue = LoadedSnapshot.open(folder, ServedRef("latest", 2, shared_library.blue, ""), QUICK, previous=red)
    blue.warm_up()
    blue.close()


def test_all_workers_serve_a_prepared_snapshot_from_the_moment_of_the_switch(library: Library, dest: Path) -> None:
    link = WorkerLink(1, None, (None, None), [0, 0, 0], dest, is_restarted=False)  # type: ignore[arg-type]
    freed: list[str] = []
    slot = WorkerSlot(freed.append, link)
    red, blue = opened(library, dest, library.red), opened(library, dest, library.blue)

    slot.set_prepared(red, 1)
    with pytest.raises(NotReadyError):
        slot.hold_current()
    link.switch_number = 1
    assert slot.hold_current() is red
    slot.set_prepared(blue, 2)
    assert slot.served_ref == red.served_ref
    link.switch_number = 2
    with slot.acquire() as current:
        assert current is blue
    assert freed == []
    slot.release(red)
    assert freed == [library.red]
    link.switch_number = 3  # the others serve what this worker has not opened
    assert slot.served_ref is None
    with pytest.raises(NotReadyError, match="this worker is still opening the current snapshot"):
        slot.hold_current()
    slot.close()
