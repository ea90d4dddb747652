"""What a store is tried out for: reading, writing, excluding, and the time; nothing stays."""

import time
from pathlib import Path

import pytest

from rag_model.errors import StoreError
from rag_model.store.store import Store
from rag_model.store.upkeep.verify import probe_store


def test_a_good_store(store: Store, tmp_path: Path) -> None:
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    probed = probe_store(store)
    assert probed.creates_exclusively
    assert abs(probed.clock_skew) <= 1
    assert probed.seconds >= 0
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before


def test_a_clock_that_is_ahead(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's clock stamps its files; this machine's is five minutes behind."""
    now = time.time
    monkeypatch.setattr("time.time", lambda: now() - 300)
    assert probe_store(store).clock_skew == pytest.approx(300, abs=1)


def test_a_store_that_cannot_be_written(store: Store, tmp_path: Path) -> None:
    (tmp_path / "store" / "probe").write_text("a file where the folder would be")
    with pytest.raises(StoreError, match="cannot write"):
        probe_store(store)
