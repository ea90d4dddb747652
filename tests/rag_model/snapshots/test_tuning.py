"""The search parameters of an index with a recall target are tuned, with the same result in every run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beam_jobs import gate
from beam_jobs.job_settings import JobSettings
from rag_model.evaluation.gate import GateRecipe
from rag_model.index.files.engine import faiss
from rag_model.index.recipe import IndexRecipe, resolve
from rag_model.index.search import FaissFileIndex
from rag_model.retrieve.indexes import open_index
from rag_model.snapshots.content import BuiltIndex
from rag_model.snapshots.measure import QuerySample
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest
from rag_model.store.versions.snapshot import Snapshot
from tests.rag_model.snapshots.test_measure import measure

RECIPE = GateRecipe(k=3, queries=12)


def create_built_indexes(base_content: Content, **targets: float | None) -> list[BuiltIndex]:
    """Return the indexes of a content, as the jobs return them, with these recall targets."""
    return [
        BuiltIndex(
            name,
            replace(resolve(IndexRecipe(factory, recall_target=targets[name]), 12, 384), search=entry["search"]),
            base_content.files[f"index/{name}.faiss"],
        )
        for name, factory in (("hnsw", "HNSW32"), ("ivfpq", "IVF4,Flat"))
        for entry in [base_content.indexes[name]]
    ]


def tune(store: Store, draft: Content, indexes: list[BuiltIndex], recipe: GateRecipe = RECIPE) -> list[BuiltIndex]:
    """Tune the indexes of a draft as a build does."""
    return gate.tune_indexes(store, JobSettings.new(store.url), None, draft, indexes, recipe)


def test_only_indexes_with_a_recall_target_are_tuned(content: tuple[Store, Content]) -> None:
    store, base_content = content
    untuned = create_built_indexes(base_content, hnsw=0.9, ivfpq=None)
    tuned = tune(store, base_content, untuned)
    assert tuned[0].plan.search == {"efSearch": 3}  # With 3 candidates, a graph of 12 vectors finds all.
    assert tuned[0].plan.notes == untuned[0].plan.notes
    assert tuned[1] == untuned[1]
    assert (tuned[0].name, tuned[0].blob) == (untuned[0].name, untuned[0].blob)


def test_gate_and_tuning_sample_different_queries(
    content: tuple[Store, Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, base_content = content
    samples: list[QuerySample] = []
    read_sample = gate.read_sample

    def record_sample(*arguments: Any) -> QuerySample:
        samples.append(read_sample(*arguments))
        return samples[-1]

    monkeypatch.setattr(gate, "read_sample", record_sample)
    recipe = GateRecipe(k=3, queries=4)
    tune(store, base_content, create_built_indexes(base_content, hnsw=0.7, ivfpq=None), recipe)
    with Snapshot.from_manifest(store, Manifest(base_content)) as snapshot:
        measure(snapshot, recipe)
        measure(snapshot, recipe)
    assert samples[0].sentences != samples[1].sentences
    assert samples[1].sentences == samples[2].sentences


def test_second_run_uses_the_recorded_setting(content: tuple[Store, Content], monkeypatch: pytest.MonkeyPatch) -> None:
    store, base_content = content
    indexes = create_built_indexes(base_content, hnsw=0.8, ivfpq=None)
    first = tune(store, base_content, indexes)
    monkeypatch.delattr(gate, "read_sample")  # No queries are sampled again.
    assert tune(store, base_content, indexes) == first
    with pytest.raises(NameError):
        tune(store, base_content, indexes, replace(RECIPE, k=2))


@pytest.mark.parametrize("factories", [("HNSW32,Refine(vectors)", "HNSW32"), ("HNSW32", "HNSW32,Refine(vectors)")])
def test_index_is_tuned_separately_with_and_without_refinement(
    content: tuple[Store, Content], factories: tuple[str, str]
) -> None:
    store, base_content = content
    for factory in factories:
        plan = resolve(IndexRecipe(factory, recall_target=0.9), 12, 384)
        index = BuiltIndex("hnsw", plan, base_content.files["index/hnsw.faiss"])
        (tuned,) = tune(store, replace(base_content, indexes={"hnsw": plan.entry()}), [index])
        assert tuned.plan.search.keys() == plan.search.keys()
        tuned_content = replace(base_content, indexes={"hnsw": tuned.plan.entry()})
        with Snapshot.from_manifest(store, Manifest(tuned_content)) as snapshot:
            searcher = open_index(snapshot, "hnsw")
            assert isinstance(searcher, FaissFileIndex)
            assert searcher.defaults == tuned.plan.search


def test_unreachable_target_is_noted(content: tuple[Store, Content], tmp_path: Path) -> None:
    store, base_content = content
    with Snapshot.from_manifest(store, Manifest(base_content)) as snapshot:
        vectors = np.concatenate([np.load(snapshot.path(f"embeddings/{part.name}.npy")) for part in snapshot.parts])
    index_of_bits = faiss.index_factory(384, "IVF1,PQ1x1np", faiss.METRIC_INNER_PRODUCT)  # one bit for each vector
    index_of_bits.train(vectors.astype(np.float32))
    index_of_bits.add(vectors.astype(np.float32))
    faiss.write_index(index_of_bits, str(tmp_path / "crude"))
    blob: BlobRef = store.blobs.put_file(tmp_path / "crude")
    draft = replace(base_content, files={**base_content.files, "index/ivfpq.faiss": blob})
    index = replace(create_built_indexes(base_content, hnsw=None, ivfpq=0.99)[1], blob=blob)
    (tuned,) = tune(store, draft, [index])
    assert tuned.plan.search == {"nprobe": 1}
    assert tuned.plan.notes[-1].startswith("recall@3 of 0.99 cannot be reached")


def test_gate_searches_with_the_setting_of_the_manifest(content: tuple[Store, Content]) -> None:
    store, base_content = content
    (hnsw, _) = tune(store, base_content, create_built_indexes(base_content, hnsw=0.9, ivfpq=None))
    tuned = replace(base_content, indexes={**base_content.indexes, "hnsw": hnsw.plan.entry()})
    assert Manifest(tuned).id != Manifest(base_content).id
    with Snapshot.from_manifest(store, Manifest(tuned)) as snapshot:
        point = measure(snapshot, RECIPE).measurements["hnsw"].setting
    assert point is not None
    assert point.setting == "efSearch=3"
