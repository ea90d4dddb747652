"""A pull selects kinds of files, and a pulled folder names the kinds that it does not have."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rag_model.errors import StoreError, UsageError
from rag_model.store import BlobRef, Content, Manifest, Snapshot, Store
from rag_model.store.pulling.pull import pull
from rag_model.store.versions.manifest import file_kind, select_files
from tests.fixtures.store_files import publish_parts

PATHS = {
    "passages/part-00000.parquet": "passages",
    "embeddings/part-00000.npy": "embeddings",
    "encoder/question/1_Pooling/config.json": "encoder",
    "index/hnsw.faiss": "index/hnsw",
    "index/ivfpq/lists.faiss": "index/ivfpq",
    "index/ivfpq/centroids.npy": "index/ivfpq",
    "trained/hnsw": "trained",
    "articles/part-00000.parquet": "articles",
}
INDEXES: dict[str, dict[str, Any]] = {"hnsw": {}, "ivfpq": {}}
CONTENT = Content({}, (), {path: BlobRef("sha256:" + "0" * 64, 1) for path in PATHS}, indexes=INDEXES)


def test_file_has_one_kind() -> None:
    assert {path: file_kind(path) for path in PATHS} == PATHS


@pytest.mark.parametrize(
    ("selection", "kinds"),
    [
        ({}, "passages embeddings encoder index/hnsw index/ivfpq"),
        ({"indexes": ["hnsw"]}, "passages embeddings encoder index/hnsw"),
        ({"indexes": ["exact"]}, "passages embeddings encoder"),
        ({"indexes": ["exact", "ivfpq"]}, "passages embeddings encoder index/ivfpq"),
        ({"embeddings": False}, "passages encoder index/hnsw index/ivfpq"),
        ({"indexes": ["ivfpq"], "embeddings": False}, "passages encoder index/ivfpq"),
        ({"passages_only": True}, "passages"),
        ({"passages_only": True, "embeddings": False}, "passages"),
    ],
)
def test_selection_consists_of_kinds(selection: dict[str, Any], kinds: str) -> None:
    assert {file_kind(path) for path in filter(select_files(CONTENT, **selection), PATHS)} == set(kinds.split())


def test_index_that_reranks_is_pulled_with_embeddings_only() -> None:
    reranked = replace(CONTENT, indexes={**INDEXES, "ivfpq": {"refine": "vectors"}})
    assert set(map(file_kind, filter(select_files(reranked, embeddings=False), PATHS))) == {
        "passages",
        "encoder",
        "index/hnsw",
    }
    assert "index/ivfpq" in set(map(file_kind, filter(select_files(reranked, indexes=["ivfpq"]), PATHS)))
    with pytest.raises(UsageError, match="index ivfpq ranks its hits by the embeddings: pull them too"):
        select_files(reranked, indexes=["ivfpq"], embeddings=False)


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ({"indexes": ["hnws"]}, "no index 'hnws' to pull: choose from hnsw, ivfpq, exact"),
        ({"indexes": ["exact"], "embeddings": False}, "index exact is searched in the embeddings"),
        ({"indexes": ["hnsw"], "passages_only": True}, "one or the other"),
    ],
)
def test_impossible_selection_is_refused(selection: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        select_files(CONTENT, **selection)


def test_missing_kind_is_reported_and_can_be_pulled_later(store: Store, tmp_path: Path) -> None:
    content = store.snapshots.get(publish_parts(store)).content
    indexed = Content({}, content.parts, {**content.files, "index/hnsw.faiss": store.blobs.put_bytes(b"graph")})
    snapshot = store.snapshots.publish(Manifest(indexed))
    first = pull(store, snapshot, tmp_path, select=select_files(indexed, passages_only=True))
    with Snapshot.from_folder(tmp_path) as pulled:
        assert pulled.passages([2200])[0].text == "text 2200"
        for attempt in (
            lambda: pulled.embeddings("part-00000"),
            lambda: pulled.path("index/hnsw.faiss"),
            lambda: pulled.folder("encoder/question"),
        ):
            with pytest.raises(StoreError, match=r"was not pulled to .*: pull again, and include it"):
                attempt()
        second = pull(store, snapshot, tmp_path, select=select_files(indexed, embeddings=False))
        assert pulled.path("index/hnsw.faiss").read_bytes() == b"graph"
        third = pull(store, snapshot, tmp_path)
        assert pulled.embeddings("part-00000").shape == (1500, 4)
    assert second.reused_bytes == first.fetched_bytes
    assert third.reused_bytes == first.fetched_bytes + second.fetched_bytes
