"""Passages and vectors of others become parts of a store; what passages may be."""

import json
from pathlib import Path

import numpy as np
import pytest

from rag_model.corpus.passages import PassageFile
from rag_model.corpus.timestamps import format_iso
from rag_model.errors import InputError
from rag_model.index.files.intake import inspect_vectors
from rag_model.snapshots.imported import import_parts
from rag_model.store.store import Store


def test_a_passage_as_long_as_a_book_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "vectors.npy", np.ones((1, 4), np.float32))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "a", "text": "x" * 100_001}))
    with pytest.raises(InputError, match="passage a has 100,001 characters, and at most 100,000 are possible: cut it"):
        import_parts(
            Store.open(str(tmp_path / "store"), create=True),
            str(tmp_path / "rows.jsonl"),
            inspect_vectors([tmp_path / "vectors.npy"]),
        )


def test_imported_passages_keep_their_dates(tmp_path: Path) -> None:
    np.save(tmp_path / "vectors.npy", np.ones((2, 4), np.float32))
    rows = [{"id": "a", "text": "x", "revised": "2026-11-01T12:00:00Z"}, {"id": "b", "text": "y"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    store = Store.open(str(tmp_path / "store"), create=True)
    (cut,) = import_parts(store, str(tmp_path / "rows.jsonl"), inspect_vectors([tmp_path / "vectors.npy"])).passages
    with PassageFile(store.blobs.get_local_path(cut.passages)) as file:
        assert [format_iso(passage.revised) for passage in file.iter_passages()] == ["2026-11-01T12:00:00Z", None]
