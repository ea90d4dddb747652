"""Several encoder spaces in one snapshot: each has its vectors, its encoder, its index and its own gate."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_model.retrieve.indexes import open_index_of
from rag_model.store.store import Store
from rag_model.store.upkeep.verify import verify
from rag_model.store.versions.paths import question_encoder
from rag_model.store.versions.snapshot import Snapshot

pytestmark = pytest.mark.xdist_group("flows")  # one server for all of them

RECIPE = """
part_bytes = 50_000

[represent.small]
encoder = "{encoder}"
dtype = "float32"

[index.hnsw]
factory = "HNSW8"

[index.small]
factory = "Flat"
over = "small"
"""


@pytest.fixture
def recipe(tmp_path: Path, other_tiny: Path) -> Path:
    """A recipe with a second space."""
    path = tmp_path / "spaces.toml"
    path.write_text(RECIPE.format(encoder=other_tiny))
    return path


def vectors_of(snapshot: Snapshot, representation: str) -> Any:
    return np.concatenate([snapshot.embeddings(part.name, representation) for part in snapshot.parts])


def test_two_spaces_are_built_inherited_and_taken_down(reindex: Any, bookwheel: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    first = reindex(store)
    assert first.code == 0, first.err
    assert first.json["metrics"]["small"]["recall@20"] == 1.0
    assert {"embed", "embed small"} <= first.json["seconds"].keys()
    with Snapshot.open(str(store)) as snapshot:
        content = snapshot.manifest.content
        spaces = [content.space_of(name) for name in ("embeddings", "small")]
        assert spaces[0]
        assert spaces[1]
        assert spaces[0]["digest"] != spaces[1]["digest"]
        assert content.over("hnsw") == "embeddings" != content.over("small") == "small"
        own, other = vectors_of(snapshot, "embeddings"), vectors_of(snapshot, "small")
        assert (own.dtype, other.dtype) == (np.float16, np.float32)
        assert snapshot.folder(question_encoder("small")).is_dir()
        found = open_index_of(snapshot, "small").search(other[:5], 1)[0]
        assert found[:, 0] == pytest.approx((other[:5] ** 2).sum(axis=1), rel=1e-4)

    again = reindex(store)
    assert (again.json["snapshot"], again.json["counts"]["embedded"]) == (first.json["snapshot"], 0)

    ran = bookwheel("takedown", "12", "--store", store, "--yes", "--json", "--", "--runner=FnApiRunner")
    assert ran.code == 0, ran.err
    with Snapshot.open(str(store)) as after:
        left = [len(vectors_of(after, name)) for name in ("embeddings", "small")]
        assert left == [after.n, after.n]
        assert 0 < after.n < len(own)
        assert open_index_of(after, "small").n == open_index_of(after, "hnsw").n == after.n
        assert all(any((row == kept).all() for kept in other) for row in vectors_of(after, "small")[:5])
        identity = after.id
    assert verify(Store.open(str(store)), identity) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("[index.a]\nfactory = 'HNSW8'\nover = 'smal'", "index a is over 'smal', but HNSW8 takes vectors"),
        ("[index.a]\nfactory = 'HNSW8'\nover = 'text'", "choose from embeddings"),
        ("[represent.text]\nencoder = 'x'", "every snapshot has a representation text"),
        ("[represent.'../x']\nencoder = 'x'", "is not a name for a representation"),
        ("[represent.small]\ndtype = 'float16'", "[represent.small] of the recipe names no encoder"),
        ("[index.a]\nfactory = 'HNSW8'\nsettings = { a = 1 }", "settings do not apply to HNSW8"),
    ],
)
def test_wrong_representations_are_refused(wrong: str, said: str, reindex: Any, tmp_path: Path, recipe: Path) -> None:
    recipe.write_text(wrong)
    ran = reindex(tmp_path / "store")
    assert ran.code == 2
    assert said in ran.complaint
