"""`bookwheel add-index`: adds indexes to an existing snapshot, reuses passages and vectors, and needs no dump."""

from pathlib import Path
from typing import Any

import pytest

from rag_model.store.versions.snapshot import Snapshot

RECIPE_WITH_LISTS = """
[index.lists]
factory = "IVF4,Flat"

[index.hnsw]
factory = "HNSW4"

[gate]
floors = { hnsw = { mean = 0.0, p5 = 0.0 }, lists = { mean = 0.0, p5 = 0.0 } }
"""


@pytest.fixture
def recipe_with_lists(tmp_path: Path) -> Path:
    path = tmp_path / "more.toml"
    path.write_text(RECIPE_WITH_LISTS)
    return path


@pytest.mark.usefixtures("prefect_server")
def test_add_index_keeps_the_other_indexes(store: Path, recipe_with_lists: Path, bookwheel: Any) -> None:
    result = bookwheel(
        "add-index", "latest", "--recipe", recipe_with_lists, "--index", "lists", "--store", store, "--json"
    )
    assert result.code == 0, result.err
    assert (result.json["ref"], result.json["number"], set(result.json["metrics"])) == ("latest", 2, {"hnsw", "lists"})
    counts = result.json["counts"]
    assert (counts["articles"], counts["embedded"], counts["reused"]) == (3, 0, 247)
    with Snapshot.open(str(store), "latest@1") as old_snapshot, Snapshot.open(str(store)) as new_snapshot:
        content, old_content = new_snapshot.manifest.content, old_snapshot.manifest.content
        assert {path: content.files[path] for path in old_content.files} == old_content.files
        assert {path.partition("/")[2] for path in set(content.files) - set(old_content.files)} <= {
            "lists.faiss",
            "lists",
        }
        assert (content.parts, content.corpus, content.space) == (
            old_content.parts,
            old_content.corpus,
            old_content.space,
        )
        factories = {name: index["factory"] for name, index in content.indexes.items()}
        assert factories == {"hnsw": "HNSW8", "lists": "IVF4,Flat"}
        assert set(content.recipe["index"]) == {"hnsw", "lists"}
        provenance, old_provenance = new_snapshot.manifest.provenance, old_snapshot.manifest.provenance
        assert provenance["indexed"] == {"of": old_snapshot.id, "indexes": ["lists"]}
        assert (provenance["dump"], provenance["encoder"], provenance["code"]) == (
            old_provenance["dump"],
            old_provenance["encoder"],
            old_provenance["code"],
        )
        assert new_snapshot.manifest.parents == (old_snapshot.id,)
    search_result = bookwheel("search", "what is anarchism?", "--index", "lists", "--store", store, "--json").json[
        "results"
    ][0]
    assert len(search_result["hits"]) == 5
    recipe_text = bookwheel("show", "--recipe-only", "--store", store).out
    assert "[index.lists]" in recipe_text
    lines = bookwheel("diff", "latest@1", "latest", "--store", store).out.splitlines()
    assert any(line.startswith("index     lists: added, kind=ivf, ") for line in lines)
    assert any(line.startswith("setting   recipe.index.lists: none -> (factory=IVF4,Flat, ") for line in lines)
    assert not [line for line in lines if "{" in line or "trained" in line]


def test_add_index_replaces_an_index_of_the_same_name(store: Path, recipe_with_lists: Path, bookwheel: Any) -> None:
    result = bookwheel("add-index", "latest", "--recipe", recipe_with_lists, "--ref", "two", "--store", store, "--json")
    assert result.code == 0, result.err
    with Snapshot.open(str(store), "two") as snapshot:
        factories = {name: index["factory"] for name, index in snapshot.manifest.content.indexes.items()}
        assert factories == {"hnsw": "HNSW4", "lists": "IVF4,Flat"}
    rebuilt = bookwheel("add-index", "two", "--index", "lists", "--ref", "two", "--store", store, "--json")
    assert rebuilt.json["snapshot"] == result.json["snapshot"], "the recipe in the snapshot gives the same index"
    assert rebuilt.json["number"] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["latest", "--index", "bm25"], 2, "the recipe has no index 'bm25': choose from hnsw"),
        (["nothing"], 1, "no snapshot or ref 'nothing'"),
    ],
)
def test_invalid_request_fails_with_one_sentence(
    library: Path, bookwheel: Any, arguments: list[str], code: int, message: str
) -> None:
    result = bookwheel("add-index", *arguments, "--store", library)
    assert (result.code, message in result.complaint) == (code, True)
