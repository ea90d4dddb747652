"""Stores of earlier versions can be read; records of later versions are refused."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from beam_jobs.chunk import DumpTables, chunk, plan_chunk_tasks
from rag_model.corpus.chunk import VERSION, ChunkRecipe
from rag_model.corpus.passages import PassageFile
from rag_model.corpus.plan import plan_dump
from rag_model.corpus.records import format_iso
from rag_model.errors import StoreError
from rag_model.index.kind import get_kind_of_entry
from rag_model.retrieve.dense import DenseRetriever
from rag_model.snapshots.encoding import StoredChunker
from rag_model.snapshots.parent import Parent
from rag_model.snapshots.stage_results import ChunkResult
from rag_model.store import Snapshot, Store
from rag_model.store.diff import diff_snapshots
from rag_model.store.pulling.pull import pull
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.moves import rollback
from rag_model.toml import from_table
from tests.rag_model.snapshots.test_takedown import take_down

STORES = Path(__file__).parents[2] / "fixtures" / "stores"  # written by `tests/fixtures/stores/make.py`
SNAPSHOT_IDS = {  # the first and the latest snapshot of each store format
    1: (
        "03f05beca1e881da985fc291a3ddbd5f93e22164ad8784ff17c8bcb8c3dac54e",
        "233634747049c5e866fc00edf0a6818e0dc01b05e7504d84998dba4d38a53924",
    ),
    2: (
        "95786886b9b74b54d60e9f3ca99746db9f5c8657c36558622eccf8090b20f3fa",
        "c648cd227e373a597fe989b5ffc47bf080c5565e828f7ba80060bd2b24f680c6",
    ),
}
RIVER = "The river runs to the sea."


@pytest.fixture(params=SNAPSHOT_IDS)
def store_format(request: pytest.FixtureRequest) -> int:
    """The format of a store."""
    return int(request.param)


@pytest.fixture
def store(store_format: int, tmp_path: Path) -> Store:
    """A copy of a committed store."""
    return Store.open(str(shutil.copytree(STORES / f"format-{store_format}", tmp_path / "store")))


@pytest.fixture
def latest(store: Store) -> Iterator[Snapshot]:
    with Snapshot.from_store(store) as snapshot:
        yield snapshot


def test_store_is_complete(store: Store, store_format: int) -> None:
    first, latest = SNAPSHOT_IDS[store_format]
    ids = [store.snapshots.resolve(name) for name in ("latest", "latest@1", "2026-11", first[:4])]
    assert ids == [latest, *[first] * 3]
    assert [move.note for move in store.refs.read_history("2026-11")] == ["the first"]
    assert verify_version(store, first) == verify_version(store, latest) == []
    assert {store.snapshots.get(snapshot_id).format for snapshot_id in (first, latest)} == {store_format}


def test_indexes_have_current_kinds(latest: Snapshot) -> None:
    content = latest.manifest.content
    assert {name: get_kind_of_entry(entry).name for name, entry in content.indexes.items()} == {
        "hnsw": "hnsw",
        "lists": "ivf",
    }
    assert {content.representation_of(name) for name in content.indexes} == {"embeddings"}
    assert content.default_retriever == "hnsw"
    assert latest.space == content.space_of("embeddings") is not None


def test_passages_are_read(latest: Snapshot) -> None:
    texts = {passage.title: passage.text for passage in latest.passages(range(latest.n))}
    assert latest.n == 5
    assert texts["Page 2"] == "A theory of war is a theory of the city. The war was in the north."
    assert {passage.revised for passage in latest.passages(range(latest.n))} == {None}, "built without dates"


@pytest.mark.parametrize("index", ["hnsw", "lists", "exact"])
def test_snapshot_is_searched_by_vector(latest: Snapshot, index: str) -> None:
    rows = {passage.text: row for row, passage in enumerate(latest.passages(range(latest.n)))}
    vectors = np.concatenate([latest.embeddings(part.name) for part in latest.parts]).astype(np.float32)
    hits = DenseRetriever(latest, index=index).search_vectors(vectors[[rows[RIVER]]], k=2)[0]
    assert hits[0].passage.text == RIVER
    assert hits[0].score == pytest.approx(1.0, abs=2e-3)
    assert hits[0].to_json()["revised"] is None


def test_store_is_compared_rolled_back_and_swept(store: Store, store_format: int) -> None:
    first, latest = SNAPSHOT_IDS[store_format]
    with Snapshot.from_store(store, "latest@1") as first_snapshot, Snapshot.from_store(store) as latest_snapshot:
        assert diff_snapshots(first_snapshot, latest_snapshot).articles == {"added": 1, "changed": 0, "removed": 0}
    assert rollback(store, "latest").snapshot == first
    assert sum(tally.files for tally in collect_garbage(store, 0.0).values()) == 0
    assert verify_version(store, latest) == []


def test_snapshot_is_pulled(store: Store, tmp_path: Path) -> None:
    for mapped in (False, True):
        pull(store, "latest", tmp_path / f"{mapped}", with_mapped_copies=mapped)
        with Snapshot.from_folder(tmp_path / f"{mapped}") as pulled:
            passages = pulled.passages(range(pulled.n))
            assert RIVER in {passage.text for passage in passages}
            assert {passage.revised for passage in passages} == {None}


def test_takedown_adds_no_dates_to_parts(store: Store) -> None:
    """A snapshot never has both parts with dates and parts without."""
    assert len(take_down(store, "2")) == 2
    with Snapshot.from_store(store) as snapshot:
        assert {passage.page_id for passage in snapshot.passages(range(snapshot.n))} == {"1", "3", "4"}
        for part in snapshot.parts:
            with snapshot.passage_file(part.name) as file:
                assert not file.has_dates


def test_build_reuses_no_passages_without_dates(
    store: Store, latest: Snapshot, tmp_path: Path, page_xml: Callable[..., str], export_xml: Callable[..., bytes]
) -> None:
    """Passages without dates are chunked again once."""
    texts = {passage.page_id: passage.text for passage in latest.passages(range(latest.n))}
    pages = (page_xml(page, text, rev_id=page, title=f"Page {page}") for page, text in texts.items())
    (tmp_path / "dump.xml").write_bytes(export_xml(*pages))
    plan = plan_dump(str(tmp_path / "dump.xml"), workdir=tmp_path, stage=str)
    parent = Parent(replace(latest.manifest, provenance={"code": {"chunk": VERSION}}))
    tasks = plan_chunk_tasks(store, plan, StoredChunker(ChunkRecipe()), parent, DumpTables())
    assert all(task.parent_parts for task in tasks), "the parent has parts to reuse"
    results = [from_table(ChunkResult, chunk(task, store), "a report") for task in tasks]
    assert {result.stats.inherited for result in results} == {0}
    for result in results:
        with PassageFile(store.blobs.get_local_path(result.passages)) as file:
            assert {format_iso(passage.revised) for passage in file.iter_passages()} == {"2026-11-01T12:00:00Z"}


def test_only_snapshot_of_a_later_format_is_refused(store: Store, store_format: int) -> None:
    first, latest = SNAPSHOT_IDS[store_format]
    path = f"snapshots/{latest}.json"
    data = store.files.read(path) or b""
    store.files.write(path, data.replace(f'"format": {store_format}'.encode(), b'"format": 3', 1))
    with pytest.raises(StoreError, match=rf"{path[:14]}.* has format 3, but this bookwheel reads up to 2: upgrade"):
        Snapshot.from_store(store)
    assert verify_version(store, first) == []
    with pytest.raises(StoreError, match="upgrade bookwheel"):
        collect_garbage(store, 0.0)


def test_intent_of_a_later_format_stops_gc(store: Store) -> None:
    store.files.write("intents/later.json", b'{"format": 2}')
    with pytest.raises(StoreError, match=r"intents/later.json has another format: upgrade bookwheel"):
        collect_garbage(store, 0.0)


def test_committed_stores_are_small() -> None:
    assert sum(path.stat().st_size for path in STORES.rglob("*") if path.is_file()) < 200_000
