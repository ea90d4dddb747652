"""The probe of a store tests writing, exclusive creation and its clock, and leaves no files."""

import time
from pathlib import Path

import pytest

from rag_model.errors import StoreError
from rag_model.store.store import Store
from rag_model.store.upkeep.verify import probe_store


def test_working_store_passes_and_no_file_stays(store: Store, tmp_path: Path) -> None:
    files_before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    result = probe_store(store)
    assert result.creates_exclusively
    assert abs(result.clock_skew) <= 1
    assert result.seconds >= 0
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == files_before


def test_clock_skew_is_measured(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's clock is five minutes behind the clock that sets the times of the store's files."""
    read_clock = time.time
    monkeypatch.setattr("time.time", lambda: read_clock() - 300)
    assert probe_store(store).clock_skew == pytest.approx(300, abs=1)


def test_store_without_write_access_is_reported(store: Store, tmp_path: Path) -> None:
    (tmp_path / "store" / "probe").write_text("a file where the folder would be")
    with pytest.raises(StoreError, match="cannot write"):
        probe_store(store)
