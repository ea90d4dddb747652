"""Indexes over a snapshot that exists: its passages and vectors stay, its dump is not asked for."""

from pathlib import Path
from typing import Any

import pytest

from rag_model.store.versions.snapshot import Snapshot

MORE = """
[index.lists]
factory = "IVF4,Flat"

[index.hnsw]
factory = "HNSW4"

[gate]
floors = { hnsw = { mean = 0.0, p5 = 0.0 }, lists = { mean = 0.0, p5 = 0.0 } }
"""


@pytest.fixture
def more(tmp_path: Path) -> Path:
    path = tmp_path / "more.toml"
    path.write_text(MORE)
    return path


@pytest.mark.usefixtures("prefect_server")
def test_an_index_is_added_beside_the_others(store: Path, more: Path, bookwheel: Any) -> None:
    result = bookwheel("add-index", "latest", "--recipe", more, "--index", "lists", "--store", store, "--json")
    assert result.code == 0, result.err
    assert (result.json["ref"], result.json["number"], set(result.json["metrics"])) == ("latest", 2, {"hnsw", "lists"})
    assert (result.json["counts"]["articles"], result.json["counts"]["embedded"], result.json["counts"]["reused"]) == (
        3,
        0,
        247,
    )
    with Snapshot.open(str(store), "latest@1") as before, Snapshot.open(str(store)) as after:
        actual, reference = after.manifest.content, before.manifest.content
        assert {path: actual.files[path] for path in reference.files} == reference.files
        assert {path.partition("/")[2] for path in set(actual.files) - set(reference.files)} <= {"lists.faiss", "lists"}
        assert (actual.parts, actual.corpus, actual.space) == (reference.parts, reference.corpus, reference.space)
        assert {name: index["factory"] for name, index in actual.indexes.items()} == {
            "hnsw": "HNSW8",
            "lists": "IVF4,Flat",
        }
        assert set(actual.recipe["index"]) == {"hnsw", "lists"}
        made, was = after.manifest.provenance, before.manifest.provenance
        assert made["indexed"] == {"of": before.id, "indexes": ["lists"]}
        assert (made["dump"], made["encoder"], made["code"]) == (was["dump"], was["encoder"], was["code"])
        assert after.manifest.parents == (before.id,)
    hits = bookwheel("search", "what is anarchism?", "--index", "lists", "--store", store, "--json").json["results"][0]
    assert len(hits["hits"]) == 5
    shown = bookwheel("show", "--recipe-only", "--store", store).out
    assert "[index.lists]" in shown
    lines = bookwheel("diff", "latest@1", "latest", "--store", store).out.splitlines()
    assert any(line.startswith("index     lists: added, kind=ivf, ") for line in lines)
    assert any(line.startswith("setting   recipe.index.lists: none -> (factory=IVF4,Flat, ") for line in lines)
    assert not [line for line in lines if "{" in line or "trained" in line]


def test_an_index_is_built_anew_in_the_place_of_another(store: Path, more: Path, bookwheel: Any) -> None:
    result = bookwheel("add-index", "latest", "--recipe", more, "--ref", "two", "--store", store, "--json")
    assert result.code == 0, result.err
    with Snapshot.open(str(store), "two") as after:
        factories = {name: index["factory"] for name, index in after.manifest.content.indexes.items()}
        assert factories == {"hnsw": "HNSW4", "lists": "IVF4,Flat"}
    again = bookwheel("add-index", "two", "--index", "lists", "--ref", "two", "--store", store, "--json")
    assert again.json["snapshot"] == result.json["snapshot"], "its own recipe gives it again"
    assert again.json["number"] == 1


@pytest.mark.parametrize(
    ("given", "code", "why"),
    [
        (["latest", "--index", "bm25"], 2, "the recipe has no index 'bm25': choose from hnsw"),
        (["nothing"], 1, "no snapshot or ref 'nothing'"),
    ],
)
def test_what_cannot_be_is_one_sentence(library: Path, bookwheel: Any, given: list[str], code: int, why: str) -> None:
    result = bookwheel("add-index", *given, "--store", library)
    assert (result.code, why in result.complaint) == (code, True)
