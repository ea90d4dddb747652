"""Several encoder spaces in one snapshot: each has its vectors, its encoder, its index and its own gate."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_model.retrieve.indexes import open_index
from rag_model.store.store import Store
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.manifest import question_encoder_path
from rag_model.store.versions.snapshot import Snapshot

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
        assert content.representation_of("hnsw") == "embeddings" != content.representation_of("small") == "small"
        own, other = vectors_of(snapshot, "embeddings"), vectors_of(snapshot, "small")
        assert (own.dtype, other.dtype) == (np.float16, np.float32)
        assert snapshot.folder(question_encoder_path("small")).is_dir()
        found = open_index(snapshot, "small").search(other[:5], 1)[0]
        assert found[:, 0] == pytest.approx((other[:5] ** 2).sum(axis=1), rel=1e-4)

    again = reindex(store)
    assert (again.json["snapshot"], again.json["counts"]["embedded"]) == (first.json["snapshot"], 0)

    result = bookwheel("takedown", "12", "--store", store, "--yes", "--json")
    assert result.code == 0, result.err
    with Snapshot.open(str(store)) as after:
        left = [len(vectors_of(after, name)) for name in ("embeddings", "small")]
        assert left == [after.n, after.n]
        assert 0 < after.n < len(own)
        assert open_index(after, "small").n == open_index(after, "hnsw").n == after.n
        assert all(any((row == kept).all() for kept in other) for row in vectors_of(after, "small")[:5])
        identity = after.id
    assert verify_version(Store.open(str(store)), identity) == []


def test_a_question_encoder_asks_the_space_that_is_its_own(
    reindex: Any, bookwheel: Any, tmp_path: Path, tiny: Path, other_tiny: Path
) -> None:
    store = tmp_path / "store"
    assert reindex(store).code == 0
    given = ("search", "political philosophy", "--store", store, "--json", "--question-encoder")
    carried = bookwheel(*given[:-1], "--index", "small").json["results"]
    assert bookwheel(*given, other_tiny, "--index", "small").json["results"] == carried
    wrong = bookwheel(*given, tiny, "--index", "small")
    assert (wrong.code, "weights differ" in wrong.complaint) == (3, True)
    assert bookwheel(*given, "/nowhere", "--index", "small").code == 1
    assert bookwheel(*given, tiny, "--retriever", "rrf(hnsw, small)").code == 0


def test_an_index_is_added_over_a_further_space(reindex: Any, bookwheel: Any, tmp_path: Path) -> None:
    store, more = tmp_path / "store", tmp_path / "more.toml"
    assert reindex(store).code == 0
    given = ("add-index", "latest", "--recipe", more, "--store", store, "--json")
    more.write_text('retriever = "rrf(hnsw, lists)"\n[index.lists]\nfactory = "IVF4,Flat"\nover = "small"\n')
    result = bookwheel(*given)
    assert result.code == 0, result.err
    with Snapshot.open(str(store)) as snapshot:
        content = snapshot.manifest.content
        assert {*content.indexes} == {"hnsw", "small", "lists"}
        assert (content.representation_of("lists"), content.default_retriever) == ("small", "rrf(hnsw, lists)")
    more.write_text('[represent.third]\nencoder = "x"\n[index.lists]\nfactory = "IVF4,Flat"\nover = "third"\n')
    assert "has no representation 'third'" in bookwheel(*given).complaint
    more.write_text('[index.lists]\nfactory = "IVF4,Flat"\nover = "smal"\n')
    assert "choose from embeddings, small" in bookwheel(*given).complaint


def test_equal_spaces_of_two_dtypes_keep_their_vectors(reindex: Any, recipe: Path, tmp_path: Path, tiny: Path) -> None:
    recipe.write_text(RECIPE.format(encoder=tiny).replace("small", "also"))
    store = tmp_path / "store"
    assert reindex(store).code == 0
    recipe.write_text(recipe.read_text().replace("part_bytes = 50_000", "part_bytes = 60_000"))
    again = reindex(store)
    assert again.code == 0, again.err
    encoded = [json.loads(path.read_text())["facts"]["encoded"] for path in (store / "memo" / "embed").iterdir()]
    with Snapshot.open(str(store)) as snapshot:
        assert sum(encoded) == 2 * snapshot.n  # by the first build alone, once for each


def test_equal_vectors_are_tuned_for_the_questions_of_each(
    reindex: Any, recipe: Path, tmp_path: Path, tiny: Path
) -> None:
    """Two representations with one passage encoder and other questions have equal index files."""
    prompt = 'spec = { question_prompt = "a theory of the king of the city by the river " }'
    table = '[index.{name}]\nfactory = "IVF16,Flat"\nrecall_target = 0.9\nover = "{over}"\n'
    head = f'[gate]\nfloors = {{}}\n[represent.asked]\nencoder = "{tiny}"\n{prompt}\n'
    tables = [table.format(name="plain", over="embeddings"), table.format(name="asked", over="asked")]
    searches = []
    for order in (tables, tables[::-1]):
        recipe.write_text("\n".join([head, *order]))
        store = tmp_path / f"store-{len(searches)}"
        assert reindex(store).code in (0, 3)
        with Snapshot.open(str(store), Store.open(str(store)).snapshots.list_ids()[0]) as snapshot:
            searches.append({name: entry["search"] for name, entry in snapshot.manifest.content.indexes.items()})
    assert searches[0] == searches[1]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("[index.a]\nfactory = 'HNSW8'\nover = 'smal'", "index a is over 'smal', but HNSW8 takes vectors"),
        ("[index.a]\nfactory = 'HNSW8'\nover = 'text'", "choose from embeddings"),
        ("[represent.text]\nencoder = 'x'", "every snapshot has a representation text"),
        ("[represent.'../x']\nencoder = 'x'", "cannot name a representation"),
        ("[represent._x]\nencoder = 'x'", "cannot name a representation"),
        ("retriever = 'rerank(exact, /models/cross, 5)'", "names the folder /models/cross"),
        ("[represent.small]\ndtype = 'float16'", "[represent.small] of the recipe names no encoder"),
        ("[index.a]\nfactory = 'HNSW8'\nsettings = { a = 1 }", "settings do not apply to HNSW8"),
    ],
)
def test_wrong_representations_are_refused(wrong: str, said: str, reindex: Any, tmp_path: Path, recipe: Path) -> None:
    recipe.write_text(wrong)
    result = reindex(tmp_path / "store")
    assert result.code == 2
    assert said in result.complaint
