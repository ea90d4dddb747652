"""The desk: an edition stays open while somebody reads from it, and not a moment longer."""

import gc
import threading
import weakref
from pathlib import Path

import pytest

from rag_model.encoders.encoder import Encoder
from rag_model.retrieve.factory import Opened
from rag_model.retrieve.questions import Questions
from rag_model.retrieve.scorers import Scorers
from rag_model.serving.answering.asking import Asker
from rag_model.serving.answering.edition import Edition, ServedRef
from rag_model.serving.answering.offer import Offer
from rag_model.serving.following.desk import Desk, NotReadyError
from rag_model.store.pulling.pull import pull
from rag_model.store.versions.paths import QUESTION_ENCODER
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.serving import PATIENCE, QUICK, Library, with_limits


def opened(library: Library, dest: Path, snapshot: str, before: Edition | None = None, **bounds: object) -> Edition:
    folder = pull(library.store, snapshot, dest).path
    named = ServedRef("latest", 1, snapshot, "2026-11-01T00:00:00+00:00")
    return Edition.open(folder, named, with_limits(**bounds) if bounds else QUICK, before=before)


def mapped(library: Library, dest: Path, snapshot: str, dtype: str) -> Edition:
    """Open an edition that maps its files, with an encoder of this dtype: by default the processor decides."""
    folder = pull(library.store, snapshot, dest).path
    found = Snapshot.from_folder(folder)
    asker = Asker(Encoder.load(folder / QUESTION_ENCODER, "question", dtype=dtype))
    offer, opened = Offer.of(found, QUICK, weighs=False), Opened(found, lambda: asker, Scorers(), mmap=True)
    return Edition(ServedRef("latest", 1, snapshot, ""), offer, opened, QUICK, None)


def mapped_inodes(folder: Path) -> set[int]:
    """Return the inodes of the files below a folder, deleted ones too, that this process maps."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return {int(fields[4]) for fields in lines if fields[-1].startswith(f"{folder}/")}


def inodes_of(folder: Path) -> set[int]:
    return {path.stat().st_ino for path in folder.rglob("*")}


def test_an_empty_desk_says_so() -> None:
    with pytest.raises(NotReadyError, match="no snapshot is open yet"), Desk().edition():
        pass
    assert Desk().named is None


def test_the_last_reader_frees_an_old_edition(shared_library: Library, dest: Path) -> None:
    freed: list[str] = []
    desk = Desk(freed.append)
    red = opened(shared_library, dest, shared_library.red)
    desk.put(red)
    first, second = desk.edition(), desk.edition()
    assert first.__enter__() is second.__enter__() is red
    blue = opened(shared_library, dest, shared_library.blue, red)
    desk.put(blue)
    with desk.edition() as current:
        assert current is blue
    first.__exit__(None, None, None)
    assert (desk.held, freed, desk.drained(0)) == (2, [], False)
    assert red.search(Questions(["who?"]), 3)[0][0].passage.title.startswith("red")
    second.__exit__(None, None, None)
    assert (desk.held, freed, desk.drained(PATIENCE)) == (1, [shared_library.red], True)
    desk.close()
    assert freed == [shared_library.red, shared_library.blue]
    assert desk.held == 0


def test_who_waits_for_the_drain_is_woken(shared_library: Library, dest: Path) -> None:
    desk = Desk()
    desk.put(opened(shared_library, dest, shared_library.red))
    reader = desk.edition()
    reader.__enter__()
    desk.put(opened(shared_library, dest, shared_library.blue))
    drained: list[bool] = []
    waiting = threading.Thread(target=lambda: drained.append(desk.drained(PATIENCE)))
    waiting.start()
    reader.__exit__(None, None, None)
    waiting.join()
    assert drained == [True]
    desk.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_freed_is_gone_from_memory(shared_library: Library, dest: Path, dtype: str) -> None:
    """The edition, its index and its maps; the encoder goes on, as the next edition carries the same.

    float32 weights may stay mapped from the first snapshot's file, which is the next one's as well.
    """
    desk = Desk()
    desk.put(mapped(shared_library, dest, shared_library.red, dtype))
    with desk.edition() as edition:
        edition.warm()
        gone, asker = weakref.ref(edition), edition.asker
        assert inodes_of(dest / shared_library.red / "index") & mapped_inodes(dest)
    blue = opened(shared_library, dest, shared_library.blue, edition)
    assert blue.asker is asker
    desk.put(blue)
    del edition
    gc.collect()
    assert gone() is None
    assert mapped_inodes(dest / shared_library.red) <= inodes_of(dest / shared_library.blue / QUESTION_ENCODER)
    pull(shared_library.store, shared_library.blue, dest, keep=1)
    assert not (dest / shared_library.red).exists()
    assert mapped_inodes(dest) <= inodes_of(dest)
    blue.warm()
    desk.close()


def test_an_edition_outlives_the_folder_of_its_encoder(shared_library: Library, dest: Path) -> None:
    """Its encoder is shared with the next edition, after `keep` has deleted the folder that it was read from."""
    red = opened(shared_library, dest, shared_library.red)
    red.close()
    folder = pull(shared_library.store, shared_library.blue, dest, keep=1).path
    assert not (dest / shared_library.red).exists()
    blue = Edition.open(folder, ServedRef("latest", 2, shared_library.blue, ""), QUICK, before=red)
    blue.warm()
    blue.close()
