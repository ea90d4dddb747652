"""What is chosen for a pull, and what a folder says of what was left out."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rag_model.errors import StoreError, UsageError
from rag_model.store import BlobRef, Content, Manifest, Snapshot, Store
from rag_model.store.pulling.pull import pull
from rag_model.store.versions.manifest import file_kind, select_files

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


def test_a_file_is_of_one_kind() -> None:
    assert {path: file_kind(path) for path in PATHS} == PATHS


@pytest.mark.parametrize(
    ("choice", "kinds"),
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
def test_a_choice_is_of_kinds(choice: dict[str, Any], kinds: str) -> None:
    assert {file_kind(path) for path in filter(select_files(CONTENT, **choice), PATHS)} == set(kinds.split())


def test_an_index_that_ranks_by_the_embeddings_is_not_pulled_without_them() -> None:
    ranks = replace(CONTENT, indexes={**INDEXES, "ivfpq": {"refine": "vectors"}})
    assert set(map(file_kind, filter(select_files(ranks, embeddings=False), PATHS))) == {
        "passages",
        "encoder",
        "index/hnsw",
    }
    assert "index/ivfpq" in set(map(file_kind, filter(select_files(ranks, indexes=["ivfpq"]), PATHS)))
    with pytest.raises(UsageError, match="index ivfpq ranks its hits by the embeddings: pull them too"):
        select_files(ranks, indexes=["ivfpq"], embeddings=False)


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        ({"indexes": ["hnws"]}, "no index 'hnws' to pull: choose from hnsw, ivfpq, exact"),
        ({"indexes": ["exact"], "embeddings": False}, "index exact is searched in the embeddings"),
        ({"indexes": ["hnsw"], "passages_only": True}, "one or the other"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(choice: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        select_files(CONTENT, **choice)


def test_what_was_left_out_is_named_and_added_later(
    local_store: Store, publish: Callable[..., str], tmp_path: Path
) -> None:
    content = local_store.snapshots.get(publish(local_store)).content
    indexed = Content({}, content.parts, {**content.files, "index/hnsw.faiss": local_store.blobs.put_bytes(b"graph")})
    snapshot = local_store.snapshots.publish(Manifest(indexed))
    first = pull(local_store, snapshot, tmp_path, select=select_files(indexed, passages_only=True))
    with Snapshot.from_folder(tmp_path) as pulled:
        assert pulled.passages([2200])[0].text == "text 2200"
        for attempt in (
            lambda: pulled.embeddings("part-00000"),
            lambda: pulled.path("index/hnsw.faiss"),
            lambda: pulled.folder("encoder/question"),
        ):
            with pytest.raises(StoreError, match=r"was not pulled to .*: pull again, and include it"):
                attempt()
        more = pull(local_store, snapshot, tmp_path, select=select_files(indexed, embeddings=False))
        assert pulled.path("index/hnsw.faiss").read_bytes() == b"graph"
        rest = pull(local_store, snapshot, tmp_path)
        assert pulled.embeddings("part-00000").shape == (1500, 4)
    assert more.reused_bytes == first.fetched_bytes
    assert rest.reused_bytes == first.fetched_bytes + more.fetched_bytes
