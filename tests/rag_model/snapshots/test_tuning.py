"""An index with a recall target is searched as hard as that takes, the same in every run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rag_model.evaluation.gate import GateRecipe
from rag_model.index.files.engine import faiss
from rag_model.index.recipe import IndexRecipe, resolve
from rag_model.snapshots import measure as measuring
from rag_model.snapshots.content import BuiltIndex
from rag_model.snapshots.measure import measure_snapshot, sample_vector_queries, tune_searches
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest
from rag_model.store.versions.snapshot import Snapshot

RECIPE = GateRecipe(k=3, queries=12)


def built(what: Content, **targets: float | None) -> list[BuiltIndex]:
    """Return the indexes of a content, as the jobs hand them over, with a recall target each."""
    return [
        BuiltIndex(
            name,
            replace(resolve(IndexRecipe(factory, recall_target=targets[name]), 12, 384), search=entry["search"]),
            what.files[f"index/{name}.faiss"],
        )
        for name, factory in (("hnsw", "HNSW32"), ("ivfpq", "IVF4,Flat"))
        for entry in [what.indexes[name]]
    ]


def test_a_target_sets_the_search_and_without_one_nothing_changes(content: tuple[Store, Content]) -> None:
    store, what = content
    before = built(what, hnsw=0.9, ivfpq=None)
    after = tune_searches(store, what, before, RECIPE)
    assert after[0].plan.search == {"efSearch": 3}  # a graph of a dozen finds all with as many candidates as asked for
    assert after[0].plan.notes == before[0].plan.notes
    assert after[1] == before[1]
    assert (after[0].name, after[0].blob) == (before[0].name, before[0].blob)


def test_the_gate_asks_other_questions_than_the_tuner(snapshot: Snapshot) -> None:
    few = GateRecipe(k=3, queries=4)
    gate, tuner = sample_vector_queries(snapshot, few), sample_vector_queries(snapshot, replace(few, seed=1))
    assert not np.array_equal(gate.vectors, tuner.vectors)
    assert np.array_equal(gate.vectors, sample_vector_queries(snapshot, few).vectors)


def test_a_rerun_takes_the_recorded_setting(content: tuple[Store, Content], monkeypatch: pytest.MonkeyPatch) -> None:
    store, what = content
    indexes = built(what, hnsw=0.8, ivfpq=None)
    first = tune_searches(store, what, indexes, RECIPE)
    monkeypatch.delattr(measuring, "sample_queries")  # a machine whose questions would differ need not ask them
    assert tune_searches(store, what, indexes, RECIPE) == first
    with pytest.raises(NameError):
        tune_searches(store, what, indexes, replace(RECIPE, k=2))


def test_a_target_out_of_reach_is_noted(content: tuple[Store, Content], tmp_path: Path) -> None:
    store, what = content
    with Snapshot.from_manifest(store, Manifest(what)) as snapshot:
        vectors = np.concatenate([np.load(snapshot.path(f"embeddings/{part.name}.npy")) for part in snapshot.parts])
    crude = faiss.index_factory(384, "IVF1,PQ1x1np", faiss.METRIC_INNER_PRODUCT)  # a bit for a vector
    crude.train(vectors.astype(np.float32))
    crude.add(vectors.astype(np.float32))
    faiss.write_index(crude, str(tmp_path / "crude"))
    blob: BlobRef = store.blobs.put_file(tmp_path / "crude")
    draft = replace(what, files={**what.files, "index/ivfpq.faiss": blob})
    index = replace(built(what, hnsw=None, ivfpq=0.99)[1], blob=blob)
    (tuned,) = tune_searches(store, draft, [index], RECIPE)
    assert tuned.plan.search == {"nprobe": 1}
    assert tuned.plan.notes[-1].startswith("recall@3 of 0.99 cannot be reached")


def test_the_manifest_says_the_setting_and_the_gate_searches_with_it(content: tuple[Store, Content]) -> None:
    store, what = content
    (hnsw, _) = tune_searches(store, what, built(what, hnsw=0.9, ivfpq=None), RECIPE)
    tuned = replace(what, indexes={**what.indexes, "hnsw": hnsw.plan.entry()})
    assert Manifest(tuned).id != Manifest(what).id
    with Snapshot.from_manifest(store, Manifest(tuned)) as snapshot:
        assert measure_snapshot(snapshot, RECIPE).operating_points["hnsw"].setting == "efSearch=3"
