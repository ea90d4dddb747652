"""Measurements of a snapshot: correct indexes pass the gate, and an index of other vectors fails."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beam_jobs import gate
from beam_jobs.job_settings import JobSettings
from rag_model.corpus.passages import PassageWriter
from rag_model.corpus.records import Passage
from rag_model.evaluation.gate import GateRecipe, QuestionFloor, SnapshotSummary, check_snapshot
from rag_model.index.build import run_stages
from rag_model.index.recipe import IndexRecipe, resolve
from rag_model.snapshots.measure import SnapshotMetrics, count_candidates, measure_snapshot, rank_passages
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest
from rag_model.store.versions.snapshot import Snapshot

RECIPE = GateRecipe(k=5, queries=10)


def measure(
    snapshot: Snapshot, recipe: GateRecipe, merges: Mapping[str, Mapping[str, Any]] | None = None
) -> SnapshotMetrics:
    """Measure the indexes of a snapshot as a build does."""
    job_settings = JobSettings.new(snapshot.store.url)
    measurements = gate.measure_indexes(snapshot.store, job_settings, None, snapshot, recipe)
    return measure_snapshot(snapshot, recipe, measurements, merges or {})


def test_every_index_is_compared_with_exact_search(snapshot: Snapshot) -> None:
    measured = measure(snapshot, RECIPE)
    assert {name: recall.factory for name, recall in measured.recalls.items()} == {
        name: entry["factory"] for name, entry in snapshot.manifest.content.indexes.items()
    }
    for recall in measured.recalls.values():
        assert recall.recalls.shape == (10,)
        assert recall.recalls.min() >= 0.6
    assert measured.recalls["hnsw"].recalls.tolist() == [1.0] * 10  # A graph of 12 vectors misses nothing.
    hnsw = measured.measurements["hnsw"]
    settings = [effort.setting for effort in hnsw.curve]
    assert f"efSearch={snapshot.manifest.content.indexes['hnsw']['search']['efSearch']}" in settings
    assert len(settings) == len(set(settings)) >= 4
    figures = measured.metrics()
    assert figures["hnsw"] | {"recall@5": 1.0, "recall@5_p5": 1.0, "unreachable": 0} == figures["hnsw"]
    assert {name: set(values) - {"recall@5", "recall@5_p5"} for name, values in figures.items()} == {
        "hnsw": {"distances", "degree", "unlinked", "unreachable", "quantization_error"},
        "ivfpq": {"distances", "imbalance", "largest_list", "quantization_error"},
    }
    assert hnsw.setting is not None
    assert hnsw.setting in hnsw.curve
    assert figures["hnsw"]["distances"] == pytest.approx(hnsw.setting.distances, abs=0.05)
    assert check_snapshot(RECIPE, SnapshotSummary(snapshot.n, None, ""), measured.recalls).passed


def test_sample_changes_by_the_share_of_passages_that_changed(snapshot: Snapshot, tmp_path: Path) -> None:
    texts = [f"Passage {number} of the corpus." for number in range(2_000)]

    def make_passage(name: str, text: str) -> Passage:
        return Passage(name, name, 1, name, "", text, 0, 5, Passage.hash_of(name, text), None)

    def rank(name: str, passages: Iterable[Passage], count: int, seed: int = 0) -> list[int]:
        with PassageWriter(tmp_path / name) as writer:
            for passage in passages:
                writer.write(passage)
        return rank_passages(tmp_path / name, count, seed)[0].tolist()

    old_passages = [make_passage(str(number), text) for number, text in enumerate(texts)]
    new_passages = [make_passage("new", "A new one.")] * 500 + old_passages[20:1_000] + old_passages[1_010:]
    old_keys, new_keys = (set(rank("part", passages, 200)) for passages in (old_passages, new_passages))
    assert len(old_keys) == len(new_keys) == 200  # Equal passages count once.
    assert 190 <= len(old_keys & new_keys) < 200
    assert not old_keys & set(rank("part", old_passages, 200, seed=1))
    parts = [
        rank(f"part-{first}", old_passages[first : first + 500], count_candidates(100, 500, 2_000))
        for first in (0, 500)
    ]
    assert set(rank("all", old_passages[:1_000], 50)) <= {key for keys in parts for key in keys}


def test_metrics_include_the_repairs_of_the_merge(snapshot: Snapshot) -> None:
    metrics = measure(snapshot, RECIPE, {"hnsw": {"unreachable_repaired": 3}, "ivfpq": {"rows": 12}})
    assert metrics.metrics()["hnsw"]["repaired"] == 3
    assert "repaired" not in metrics.metrics()["ivfpq"]


def test_setting_of_the_manifest_is_measured_too(content: tuple[Store, Content]) -> None:
    store, base_content = content
    entry = {**base_content.indexes["hnsw"], "search": {"efSearch": 21}}
    edited_snapshot = Snapshot.from_manifest(
        store, Manifest(replace(base_content, indexes={**base_content.indexes, "hnsw": entry}))
    )
    point = measure(edited_snapshot, RECIPE).measurements["hnsw"].setting
    assert point is not None
    assert point.setting == "efSearch=21"


def test_k_may_be_larger_than_the_corpus(snapshot: Snapshot) -> None:
    metrics = measure(snapshot, GateRecipe(k=50, queries=500))
    assert metrics.recalls["hnsw"].recalls.shape == (12,)
    assert metrics.recalls["hnsw"].recalls.min() == 1.0


def test_index_of_other_vectors_fails_the_gate(content: tuple[Store, Content], tmp_path: Path) -> None:
    store, base_content = content
    noise = np.random.default_rng(0).normal(size=(12, 384)).astype(np.float32)
    np.save(tmp_path / "noise.npy", noise)
    run_stages(resolve(IndexRecipe("HNSW32"), 12, 384), [tmp_path / "noise.npy"], tmp_path / "out", tmp_path)
    files = {**base_content.files, "index/hnsw.faiss": store.blobs.put_file(tmp_path / "out")}
    broken = Snapshot.from_store(store, store.snapshots.publish(Manifest(replace(base_content, files=files))))
    verdict = check_snapshot(RECIPE, SnapshotSummary(12, None, ""), measure(broken, RECIPE).recalls)
    assert [check.name for check in verdict.checks if not check.passed] == [
        "hnsw recall@5, mean",
        "hnsw recall@5, 5th percentile",
    ]


def test_questions_with_a_floor_are_searched(snapshot: Snapshot, tmp_path: Path) -> None:
    path = tmp_path / "dev.jsonl"
    questions = [("who wrote animal farm?", "Orwell"), ("what does the aardvark eat", "nothing")]
    path.write_text("".join(json.dumps({"question": text, "answers": [answer]}) + "\n" for text, answer in questions))
    floors = {
        "deep": QuestionFloor(str(path), 0.9, "Success@100", "rrf(hnsw, exact)"),  # more passages than the corpus has
        "first": QuestionFloor(str(path), 0.9, "RR@1"),
    }
    scores = measure(snapshot, replace(RECIPE, questions=floors)).retriever_scores
    assert {name: (score.retriever, score.estimate.value, score.estimate.n) for name, score in scores.items()} == {
        "deep": ("rrf(hnsw, exact)", 0.5, 2),
        "first": ("hnsw", 0.5, 2),
    }
