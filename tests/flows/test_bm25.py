"""BM25 indexes of snapshots: independent of part sizes, searched, fused, pulled without vectors, and taken down."""

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


def open_bm25(store: Path) -> Bm25Index:
    with Snapshot.open(str(store)) as snapshot:
        index: Bm25Index = open_index(snapshot, "bm25")
    return index


def test_bm25_index_does_not_depend_on_parts_and_is_searched(
    reindex: Any, bookwheel: Any, recipe: Path, tmp_path: Path
) -> None:
    store, store_of_one_part = tmp_path / "store", tmp_path / "other"
    build = reindex(store)
    assert build.code == 0, build.err
    assert build.json["metrics"]["bm25"]["recall@20"] == 1.0
    recipe.write_text(RECIPE.format(50_000_000))
    assert reindex(store_of_one_part).code == 0
    contents = []
    for url in (store, store_of_one_part):
        with Snapshot.open(str(url)) as snapshot:
            contents.append(snapshot.manifest.content)
    assert len(contents[0].parts) > 1 == len(contents[1].parts)
    assert contents[0].files["index/bm25.postings"] == contents[1].files["index/bm25.postings"]

    options = ("--store", store, "-k", 3, "--json")
    single = bookwheel("search", QUESTION, "???", *options, "--retriever", "bm25")
    assert single.code == 0, single.err
    (first_hit, *_), unmatched_hits = (result["hits"] for result in single.json["results"])
    assert (first_hit["title"], unmatched_hits) == ("Anarchism", [])
    fused = bookwheel("search", QUESTION, *options, "--retriever", "rrf(bm25(k1=1.5, b=.75):50, hnsw(efSearch=40):50)")
    legs = {leg["leg"] for hit in fused.json["results"][0]["hits"] for leg in hit["legs"]}
    assert legs == {"bm25(k1=1.5, b=.75)", "hnsw(efSearch=40)"}
    text = bookwheel("search", "???", "--store", store, "--retriever", "bm25")
    assert text.code == 0, text.err
    assert text.out.splitlines() == ["???", "     nothing found"]
    error = bookwheel("search", QUESTION, *options, "--retriever", "bm25(b=2)")
    assert error.code == 2
    assert "b of BM25 is 2: give a number from 0 to 1" in error.complaint


def test_bm25_is_pulled_without_vectors_and_takedown_removes_terms(
    reindex: Any, bookwheel: Any, tmp_path: Path
) -> None:
    store, pulled = tmp_path / "store", tmp_path / "pulled"
    assert reindex(store).code == 0
    result = bookwheel("pull", "latest", pulled, "--store", store, "--index", "bm25", "--no-embeddings", "--json")
    assert result.code == 0, result.err
    with Snapshot.from_folder(pulled) as snapshot:
        assert open_index(snapshot, "bm25").search([QUESTION], 3)[1].min() >= 0
    assert not open_bm25(store).find_missing_terms("proudhon")
    result = bookwheel("takedown", "12", "--store", store, "--yes", "--json")
    assert result.code == 0, result.err
    assert open_bm25(store).find_missing_terms("proudhon") == ["proudhon"]
    assert bookwheel("verify", "--store", store, "--json").json["ok"]
    assert Store.open(str(store)).snapshots.list_ids()
