"""BM25 in a snapshot: built by Beam jobs, equal however parts are cut, searched, fused, pulled alone, taken down."""

from pathlib import Path
from typing import Any

import pytest

from rag_model.index.postings.search import Bm25Index
from rag_model.retrieve.indexes import open_index
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot

RECIPE = """
part_bytes = {}

[index.hnsw]
factory = "HNSW8"

[index.bm25]
factory = "BM25"
"""
QUESTION = "political philosophy anarchism"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "bm25.toml"
    path.write_text(RECIPE.format(50_000))
    return path


def index_of(store: Path) -> Bm25Index:
    with Snapshot.open(str(store)) as snapshot:
        opened: Bm25Index = open_index(snapshot, "bm25")
    return opened


def test_parts_do_not_show_and_questions_are_answered(
    reindex: Any, bookwheel: Any, recipe: Path, tmp_path: Path
) -> None:
    store, other = tmp_path / "store", tmp_path / "other"
    ran = reindex(store)
    assert ran.code == 0, ran.err
    assert ran.json["metrics"]["bm25"]["recall@20"] == 1.0
    recipe.write_text(RECIPE.format(50_000_000))
    assert reindex(other).code == 0
    contents = []
    for place in (store, other):
        with Snapshot.open(str(place)) as snapshot:
            contents.append(snapshot.manifest.content)
    assert len(contents[0].parts) > 1 == len(contents[1].parts)
    assert contents[0].files["index/bm25.postings"] == contents[1].files["index/bm25.postings"]

    asked = ("--store", store, "-k", 3, "--json")
    plain = bookwheel("search", QUESTION, "???", *asked, "--retriever", "bm25")
    assert plain.code == 0, plain.err
    (first, *_), nothing = (result["hits"] for result in plain.json["results"])
    assert (first["title"], nothing) == ("Anarchism", [])
    fused = bookwheel("search", QUESTION, *asked, "--retriever", "rrf(bm25(k1=1.5, b=.75):50, hnsw(efSearch=40):50)")
    legs = {leg["leg"] for hit in fused.json["results"][0]["hits"] for leg in hit["legs"]}
    assert legs == {"bm25(k1=1.5, b=.75)", "hnsw(efSearch=40)"}
    said = bookwheel("search", "???", "--store", store, "--retriever", "bm25")
    assert said.code == 0, said.err
    assert said.out.splitlines() == ["???", "     nothing found"]
    wrong = bookwheel("search", QUESTION, *asked, "--retriever", "bm25(b=2)")
    assert wrong.code == 2
    assert "b of BM25 is 2: give a number from 0 to 1" in wrong.complaint


def test_a_puller_of_words_needs_no_vectors_and_a_taken_page_leaves_no_word(
    reindex: Any, bookwheel: Any, tmp_path: Path
) -> None:
    store, pulled = tmp_path / "store", tmp_path / "pulled"
    assert reindex(store).code == 0
    result = bookwheel("pull", "latest", pulled, "--store", store, "--index", "bm25", "--no-embeddings", "--json")
    assert result.code == 0, result.err
    with Snapshot.from_folder(pulled) as snapshot:
        assert open_index(snapshot, "bm25").search([QUESTION], 3)[1].min() >= 0
    assert not index_of(store).find_missing_terms("proudhon")
    result = bookwheel("takedown", "12", "--store", store, "--yes", "--json")
    assert result.code == 0, result.err
    assert index_of(store).find_missing_terms("proudhon") == ["proudhon"]
    assert bookwheel("verify", "--store", store, "--json").json["ok"]
    assert Store.open(str(store)).snapshots.list_ids()
