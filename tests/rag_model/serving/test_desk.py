"""The desk: an edition stays open while somebody reads from it, and not a moment longer."""

import gc
import threading
import weakref
from pathlib import Path

import pytest

from rag_model.retrieve.questions import Questions
from rag_model.serving.desk import Desk, NotReadyError
from rag_model.serving.edition import Edition, Named
from rag_model.store.pulling.pull import pull
from tests.fixtures.serving import PATIENCE, QUICK, Library, with_limits


def opened(library: Library, dest: Path, snapshot: str, before: Edition | None = None, **bounds: object) -> Edition:
    folder = pull(library.store, snapshot, dest).path
    named = Named("latest", 1, snapshot, "2026-11-01T00:00:00+00:00")
    return Edition.open(folder, named, with_limits(**bounds) if bounds else QUICK, before=before)


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


def test_what_is_freed_is_gone_from_memory(shared_library: Library, dest: Path) -> None:
    """The edition, its index and its maps; the encoder goes on, as the next edition carries the same."""
    desk = Desk()
    desk.put(opened(shared_library, dest, shared_library.red, swap="low-memory"))
    with desk.edition() as edition:
        edition.warm()
        gone, asker = weakref.ref(edition), edition.asker
        assert str(dest) in Path("/proc/self/maps").read_text()
    blue = opened(shared_library, dest, shared_library.blue, edition)
    assert blue.asker is asker
    desk.put(blue)
    del edition
    gc.collect()
    assert gone() is None
    assert shared_library.red not in Path("/proc/self/maps").read_text()
    desk.close()


def test_an_edition_outlives_the_folder_of_its_encoder(shared_library: Library, dest: Path) -> None:
    """Its encoder is shared with the next edition, after `keep` has deleted the folder that it was read from."""
    red = opened(shared_library, dest, shared_library.red)
    red.close()
    folder = pull(shared_library.store, shared_library.blue, dest, keep=1).path
    assert not (dest / shared_library.red).exists()
    blue = Edition.open(folder, Named("latest", 2, shared_library.blue, ""), QUICK, before=red)
    blue.warm()
    blue.close()
