"""The gate's jobs: workers measure as one process does, and the launcher reads no vectors."""

import io
import json
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beam_jobs import gate
from beam_jobs.job_settings import JobSettings
from beam_jobs.workers import START_VARIABLE
from rag_model.corpus.passages import PassageFile
from rag_model.corpus.records import Passage
from rag_model.evaluation.gate import GateRecipe
from rag_model.index.exact_search import ExactIndex
from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.kind import IndexMeasurement
from rag_model.index.quality.results import PROCESS_BYTES
from rag_model.index.recipe import IndexRecipe, resolve
from rag_model.snapshots.content import BuiltIndex
from rag_model.snapshots.measure import measure_snapshot
from rag_model.store.objects.blobs import BlobRef, Blobs
from rag_model.store.objects.memo import TARGET_KEY
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest, passages_path
from rag_model.store.versions.snapshot import Snapshot
from tests.rag_model import conftest as corpus

RECIPE = GateRecipe(k=3, queries=8)
passages, encoder, content = corpus.passages, corpus.encoder, corpus.content


def get_untimed_metrics(snapshot: Snapshot, measurements: Mapping[str, IndexMeasurement]) -> object:
    """Return all metrics that do not depend on the clock."""
    metrics = measure_snapshot(snapshot, RECIPE, measurements, {})
    curves = {name: [replace(point, milliseconds=0) for point in m.curve] for name, m in measurements.items()}
    recalls = {name: recall.recalls.tolist() for name, recall in metrics.recalls.items()}
    return metrics.metrics(), {name: m.health for name, m in measurements.items()}, curves, recalls


@pytest.fixture
def store(content: tuple[Store, Content], tmp_path: Path) -> Store:
    """Return a copy of the store, to which the jobs write."""
    return Store.open(str(shutil.copytree(content[0].files.local_path(""), tmp_path / "store")))


@pytest.fixture
def snapshot(store: Store, content: tuple[Store, Content]) -> Snapshot:
    """Return a draft with a graph and lists, over two parts."""
    return Snapshot.from_manifest(store, Manifest(content[1]))


@pytest.fixture
def job_settings(store: Store, monkeypatch: pytest.MonkeyPatch) -> JobSettings:
    """Return the settings that give every job to workers, which are threads of this process."""
    monkeypatch.setenv(START_VARIABLE, "0")
    return JobSettings.new(store.url, ["--runner=FnApiRunner"])


def test_workers_measure_what_one_process_measures(
    store: Store, snapshot: Snapshot, job_settings: JobSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[int, int]] = []
    measurements = gate.measure_indexes(store, job_settings, lambda *step: steps.append(step), snapshot, RECIPE)
    monkeypatch.delenv(START_VARIABLE)  # the launcher then measures itself
    shutil.rmtree(store.files.local_path("memo"))
    expected = gate.measure_indexes(store, JobSettings.new(store.url), None, snapshot, RECIPE)
    assert get_untimed_metrics(snapshot, measurements) == get_untimed_metrics(snapshot, expected)
    assert steps == sorted(steps)
    assert steps[-1] == (4, 4)  # two parts, then two indexes


@pytest.mark.parametrize("k", [3, 50])
def test_the_launcher_reads_neither_vectors_nor_indexes(
    store: Store, snapshot: Snapshot, job_settings: JobSettings, monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    reads: list[tuple[str, int]] = []
    fetch: Callable[[Blobs, BlobRef], Path] = Blobs.get_local_path

    def record(blobs: Blobs, ref: BlobRef) -> Path:
        reads.append((ref.id, threading.get_ident()))
        return fetch(blobs, ref)

    monkeypatch.setattr(Blobs, "get_local_path", record)
    recipe, files = replace(RECIPE, k=k), snapshot.manifest.content.files
    assert gate.measure_indexes(store, job_settings, None, snapshot, recipe)
    large_file_ids = {ref.id for path, ref in files.items() if path.startswith(("embeddings/", "index/"))}
    assert large_file_ids <= {blob for blob, _ in reads}
    assert not large_file_ids & {blob for blob, thread in reads if thread == threading.get_ident()}


def test_gate_of_a_refresh_compares_only_new_rows_and_reads_only_new_passages(
    store: Store, snapshot: Snapshot, job_settings: JobSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, measure = snapshot.manifest.content, partial(gate.measure_indexes, store, job_settings, None)
    recipe = replace(RECIPE, k=2)
    sampled_rows: list[int] = []
    read_rows = PassageFile.read_rows

    def record_rows(file: PassageFile, rows: Sequence[int]) -> list[Passage]:
        sampled_rows.extend(rows)
        return read_rows(file, rows)

    monkeypatch.setattr(PassageFile, "read_rows", record_rows)
    measure(snapshot, recipe)
    assert len(sampled_rows) == RECIPE.queries
    name = f"embeddings/{content.parts[0].name}.npy"
    vectors = np.load(store.blobs.get_local_path(content.files[name]))
    vectors[1] = vectors[3]
    np.save(tmp_path / "changed.npy", vectors)
    files = {**content.files, name: store.blobs.put_file(tmp_path / "changed.npy")}
    changed = Snapshot.from_manifest(store, Manifest(replace(content, files=files)))
    comparison_counts: list[int] = []
    search_blocks = ExactIndex._search_blocks

    def record(index: ExactIndex, queries: Vectors, blocks: Iterable[tuple[Rows, Vectors]], k: int) -> Any:
        counted_blocks = list(blocks)
        comparison_counts.extend(len(queries) * len(block) for _, block in counted_blocks)
        return search_blocks(index, queries, counted_blocks, k)

    monkeypatch.setattr(ExactIndex, "_search_blocks", record)
    measurements = measure(changed, recipe, parent=content)
    assert len(sampled_rows) == RECIPE.queries  # sentences of unchanged passages are not read again
    assert 0 < sum(comparison_counts) < RECIPE.queries * len(vectors)
    monkeypatch.undo()
    shutil.rmtree(store.files.local_path("memo"))
    expected = measure(changed, recipe)
    assert {name: measurement.recalls.tolist() for name, measurement in measurements.items()} == {
        name: measurement.recalls.tolist() for name, measurement in expected.items()
    }


def test_neighbors_in_an_unchanged_part_are_those_of_a_search_despite_new_queries(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float16)
    vectors[40:50] = vectors[:10]  # equal rows
    queries = vectors[::6].astype(np.float32)
    neighbors = []
    for name, parent_queries in (("full", ()), ("refresh", queries[1:])):
        store = Store.open(str(tmp_path / name), create=True)
        rows, new, old = (store.blobs.put_bytes(to_npy(array)) for array in (vectors, queries, parent_queries))
        task = gate.NeighborTask(rows, len(vectors), new, "ip", 5)
        if len(parent_queries):
            gate.find_neighbors(replace(task, queries=old), store)
            task = replace(task, parent_rows=(rows,), parent_queries=old)
        with np.load(io.BytesIO(store.blobs.read(BlobRef.from_json(gate.find_neighbors(task, store))))) as arrays:
            neighbors.append({key: arrays[key][:, :5].tolist() for key in ("scores", "rows")})
    assert neighbors[0] == neighbors[1]


def to_npy(array: object) -> bytes:
    np.save(buffer := io.BytesIO(), array)
    return buffer.getvalue()


def test_a_recorded_sample_depends_on_the_passages_that_it_quotes(
    store: Store, snapshot: Snapshot, job_settings: JobSettings
) -> None:
    gate.measure_indexes(store, job_settings, None, snapshot, RECIPE)
    content = snapshot.manifest.content
    key = store.memo.compute_key(gate._list_query_inputs(content, RECIPE, "embeddings"))
    record = store.memo.find(gate.QUERIES, key)
    assert record is not None
    sentences = json.loads(store.blobs.read(record.outputs["sample"]))["sentences"]
    assert len(sentences) == RECIPE.queries
    passages = {content.files[passages_path(part.name)].id for part in content.parts}
    assert passages <= set(record.stats[TARGET_KEY]), "an edit may change a passage and not its vector"


def test_tuning_on_workers_is_recorded_as_in_one_process(
    store: Store, snapshot: Snapshot, job_settings: JobSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = snapshot.manifest.content
    entry = content.indexes["hnsw"]
    plan = resolve(IndexRecipe(entry["factory"], recall_target=0.9), snapshot.n, snapshot.dim)
    blob = content.files["index/hnsw.faiss"]
    built_indexes = [BuiltIndex("hnsw", replace(plan, search=entry["search"]), blob)]
    first = gate.tune_indexes(store, job_settings, None, content, built_indexes, RECIPE)
    assert first[0].plan.search == {"efSearch": 3}
    monkeypatch.delattr(gate, "read_sample")
    assert gate.tune_indexes(store, JobSettings.new(store.url), None, content, built_indexes, RECIPE) == first


def test_a_worker_reads_only_sampled_rows_of_a_remote_index(
    store: Store, snapshot: Snapshot, job_settings: JobSettings, s3_store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, remote_store = snapshot.manifest.content, Store.open(s3_store_url, create=True)
    refined_entry = {**content.indexes["ivfpq"], "refine": "vectors"}
    content = replace(content, indexes={**content.indexes, "ivfpq": refined_entry})
    snapshot = Snapshot.from_manifest(store, Manifest(content))
    expected = gate.measure_indexes(store, job_settings, None, snapshot, RECIPE)
    for blob in content.files.values():
        remote_store.blobs.put_file(store.blobs.get_local_path(blob))
    remote_snapshot, remote_settings = (
        Snapshot.from_manifest(remote_store, snapshot.manifest),
        replace(job_settings, store_url=s3_store_url),
    )
    tasks = gate._create_tasks(remote_store, remote_snapshot, RECIPE, dict.fromkeys(content.indexes))
    tasks = gate._add_queries(remote_store, remote_snapshot, tasks, remote_settings, gate._GateProgress(None, 2), None)
    fetched_ids = set[str]()
    fetch: Callable[[Blobs, BlobRef], Path] = Blobs.get_local_path
    monkeypatch.setattr(Blobs, "get_local_path", lambda blobs, ref: fetched_ids.add(ref.id) or fetch(blobs, ref))
    for task in tasks:
        measurement = gate.read_measurement(gate.measure_one(task, remote_store))
        assert measurement.health == expected[task.index].health
        assert measurement.recalls.tolist() == expected[task.index].recalls.tolist()
    assert fetched_ids == {content.files[content.index_file(name)].id for name in content.indexes}


@pytest.mark.parametrize(("name", "index_bytes"), [("hnsw", 1_000), ("words", 16_000)])
def test_memory_of_a_measurement_includes_decoded_posting_lists(
    name: str, index_bytes: int, content: tuple[Store, Content]
) -> None:
    draft = replace(content[1], indexes={"hnsw": {}, "words": {"kind": "bm25", "file": "index/words.postings"}})
    task = gate.MeasureTask(draft.files["embeddings/part-00000.npy"], name, RECIPE, file_bytes=1_000)
    assert gate._set_worker_count(JobSettings("", "run"), [task], draft).task_bytes == PROCESS_BYTES + index_bytes
