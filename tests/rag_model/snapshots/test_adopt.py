"""Passages and vectors of others become parts of a store; what passages may be."""

import json
from pathlib import Path

import numpy as np
import pytest

from rag_model.errors import InputError
from rag_model.index.files.intake import look
from rag_model.snapshots.adopt import adopt
from rag_model.store.store import Store


def test_a_passage_as_long_as_a_book_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "vectors.npy", np.ones((1, 4), np.float32))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "a", "text": "x" * 100_001}))
    with pytest.raises(InputError, match="passage a has 100,001 characters, and at most 100,000 are possible: cut it"):
        adopt(
            Store.open(str(tmp_path / "store"), create=True),
            str(tmp_path / "rows.jsonl"),
            look([tmp_path / "vectors.npy"]),
        )
