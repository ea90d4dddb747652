"""An index with a recall target is searched as hard as that takes, the same in every run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beam_jobs import gate
from beam_jobs.launch import Launch
from rag_model.evaluation.gate import GateRecipe
from rag_model.index.files.engine import faiss
from rag_model.index.recipe import IndexRecipe, resolve
from rag_model.snapshots.content import BuiltIndex
from rag_model.snapshots.measure import QuerySample
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest
from rag_model.store.versions.snapshot import Snapshot
from tests.rag_model.snapshots.test_measure import measure

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


def tune(store: Store, draft: Content, indexes: list[BuiltIndex], recipe: GateRecipe = RECIPE) -> list[BuiltIndex]:
    """Tune the indexes of a draft as a build does."""
    return gate.tune_indexes(store, Launch.new(store.url), None, draft, indexes, recipe)


def test_a_target_sets_the_search_and_without_one_nothing_changes(content: tuple[Store, Content]) -> None:
    store, what = content
    before = built(what, hnsw=0.9, ivfpq=None)
    after = tune(store, what, before)
    assert after[0].plan.search == {"efSearch": 3}  # a graph of a dozen finds all with as many candidates as asked for
    assert after[0].plan.notes == before[0].plan.notes
    assert after[1] == before[1]
    assert (after[0].name, after[0].blob) == (before[0].name, before[0].blob)


def test_the_gate_asks_other_questions_than_the_tuner(
    content: tuple[Store, Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, what = content
    samples: list[QuerySample] = []
    read_sample = gate.read_sample

    def record_sample(*arguments: Any) -> QuerySample:
        samples.append(read_sample(*arguments))
        return samples[-1]

    monkeypatch.setattr(gate, "read_sample", record_sample)
    few = GateRecipe(k=3, queries=4)
    tune(store, what, built(what, hnsw=0.7, ivfpq=None), few)
    with Snapshot.from_manifest(store, Manifest(what)) as snapshot:
        measure(snapshot, few)
        measure(snapshot, few)
    assert samples[0].sentences != samples[1].sentences
    assert samples[1].sentences == samples[2].sentences


def test_a_rerun_takes_the_recorded_setting(content: tuple[Store, Content], monkeypatch: pytest.MonkeyPatch) -> None:
    store, what = content
    indexes = built(what, hnsw=0.8, ivfpq=None)
    first = tune(store, what, indexes)
    monkeypatch.delattr(gate, "read_sample")  # a machine whose questions would differ need not ask them
    assert tune(store, what, indexes) == first
    with pytest.raises(NameError):
        tune(store, what, indexes, replace(RECIPE, k=2))


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
    (tuned,) = tune(store, draft, [index])
    assert tuned.plan.search == {"nprobe": 1}
    assert tuned.plan.notes[-1].startswith("recall@3 of 0.99 cannot be reached")


def test_the_manifest_says_the_setting_and_the_gate_searches_with_it(content: tuple[Store, Content]) -> None:
    store, what = content
    (hnsw, _) = tune(store, what, built(what, hnsw=0.9, ivfpq=None))
    tuned = replace(what, indexes={**what.indexes, "hnsw": hnsw.plan.entry()})
    assert Manifest(tuned).id != Manifest(what).id
    with Snapshot.from_manifest(store, Manifest(tuned)) as snapshot:
        assert measure(snapshot, RECIPE).operating_points["hnsw"].setting == "efSearch=3"
