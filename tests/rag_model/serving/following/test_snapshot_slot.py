"""The slot keeps a snapshot open exactly as long as it is current or has readers."""

import gc
import weakref
from pathlib import Path

import pytest

from rag_model.encoders.encoder import Encoder
from rag_model.errors import NotReadyError
from rag_model.retrieve.context import RetrieverContext
from rag_model.retrieve.retriever import Queries
from rag_model.serving.answering.available_retrievers import AvailableRetrievers
from rag_model.serving.answering.loaded_snapshot import (
    LoadedSnapshot,
    ServedRef,
    SharedQuestionEncoder,
)
from rag_model.serving.following.group import WorkerSlot
from rag_model.serving.following.snapshot_slot import SnapshotSlot
from rag_model.serving.workers import WorkerLink
from rag_model.store.pulling.pull import pull
from rag_model.store.versions.manifest import QUESTION_ENCODER
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.serving import QUICK, Library, make_settings


def open_snapshot(
    library: Library, dest: Path, snapshot: str, previous: LoadedSnapshot | None = None, **bounds: object
) -> LoadedSnapshot:
    folder = pull(library.store, snapshot, dest).path
    served_ref = ServedRef("latest", 1, snapshot, "2026-11-01T00:00:00+00:00")
    return LoadedSnapshot.open(folder, served_ref, make_settings(**bounds) if bounds else QUICK, previous=previous)


def open_mapped(library: Library, dest: Path, snapshot: str, dtype: str) -> LoadedSnapshot:
    """Open a snapshot that maps its files, with an encoder of this dtype, not of the processor's default."""
    folder = pull(library.store, snapshot, dest).path
    snapshot_files = Snapshot.from_folder(folder)
    encoder = SharedQuestionEncoder(Encoder.load(folder / QUESTION_ENCODER, "question", dtype=dtype))
    available = AvailableRetrievers.plan(snapshot_files, QUICK, uses_inner_products=False)
    context = RetrieverContext(snapshot_files, lambda: encoder)
    return LoadedSnapshot(ServedRef("latest", 1, snapshot, ""), available, context, QUICK, None)


def list_mapped_inodes(folder: Path) -> set[int]:
    """Return the inodes of the files below a folder, deleted ones too, that this process maps."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return {int(fields[4]) for fields in lines if fields[-1].startswith(f"{folder}/")}


def list_inodes(folder: Path) -> set[int]:
    return {path.stat().st_ino for path in folder.rglob("*")}


def test_empty_slot_reports_that_no_snapshot_is_open() -> None:
    with pytest.raises(NotReadyError, match="no snapshot is open yet"), SnapshotSlot().acquire():
        pass
    assert SnapshotSlot().served_ref is None


def test_last_reader_frees_a_replaced_snapshot(shared_library: Library, dest: Path) -> None:
    freed: list[str] = []
    slot = SnapshotSlot(freed.append)
    red = open_snapshot(shared_library, dest, shared_library.red)
    slot.swap(red)
    first, second = slot.acquire(), slot.acquire()
    assert first.__enter__() is second.__enter__() is red
    blue = open_snapshot(shared_library, dest, shared_library.blue, red)
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
def test_freed_snapshot_leaves_the_memory(shared_library: Library, dest: Path, dtype: str) -> None:
    """The snapshot, its index and its maps are freed, and its encoder is shared with the next snapshot.

    float32 weights may stay mapped from the file of the first snapshot, because the next one has the same file.
    """
    slot = SnapshotSlot()
    slot.swap(open_mapped(shared_library, dest, shared_library.red, dtype))
    with slot.acquire() as red:
        red.warm_up()
        red_reference, question_encoder = weakref.ref(red), red.question_encoder
        assert list_inodes(dest / shared_library.red / "index") & list_mapped_inodes(dest)
    blue = open_snapshot(shared_library, dest, shared_library.blue, red)
    assert blue.question_encoder is question_encoder
    slot.swap(blue)
    del red
    gc.collect()
    assert red_reference() is None
    assert list_mapped_inodes(dest / shared_library.red) <= list_inodes(dest / shared_library.blue / QUESTION_ENCODER)
    pull(shared_library.store, shared_library.blue, dest, keep_snapshots=1)
    assert not (dest / shared_library.red).exists()
    assert list_mapped_inodes(dest) <= list_inodes(dest)
    blue.warm_up()
    slot.close()


def test_snapshot_works_after_the_folder_of_its_encoder_is_deleted(shared_library: Library, dest: Path) -> None:
    """The next snapshot shares the encoder, and `keep` deletes the folder from which the encoder was read."""
    red = open_snapshot(shared_library, dest, shared_library.red)
    red.close()
    folder = pull(shared_library.store, shared_library.blue, dest, keep_snapshots=1).path
    assert not (dest / shared_library.red).exists()
    blue = LoadedSnapshot.open(folder, ServedRef("latest", 2, shared_library.blue, ""), QUICK, previous=red)
    blue.warm_up()
    blue.close()


def test_all_workers_serve_a_prepared_snapshot_from_the_switch_on(library: Library, dest: Path) -> None:
    link = WorkerLink(1, None, (None, None), [0, 0, 0], dest, is_restarted=False)  # type: ignore[arg-type]
    freed: list[str] = []
    slot = WorkerSlot(freed.append, link)
    red, blue = open_snapshot(library, dest, library.red), open_snapshot(library, dest, library.blue)

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
    link.switch_number = 3  # The other workers serve a snapshot that this worker has not opened.
    assert slot.served_ref is None
    with pytest.raises(NotReadyError, match="this worker is still opening the current snapshot"):
        slot.hold_current()
    slot.close()
