"""What of the parent's index may be used: of the same plan and space, and still there."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rag_model.corpus.records import Part
from rag_model.index.quality.results import TrainingStats
from rag_model.index.recipe import IndexRecipe, VectorPlan, resolve
from rag_model.snapshots.parent import Parent
from rag_model.snapshots.reused_training import (
    build_training_entry,
    find_reusable_training,
    find_reuse_obstacles,
    keep_parent_sizes,
    note_obstacles,
)
from rag_model.snapshots.stage_results import EmbedResult
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest, PartEntry, embeddings_in_space

RECIPE = IndexRecipe("HNSW8")
TRAINED = TrainingStats({"cells": 0.5}, 1.2, 1.25)
N = 200_000


def planned(recipe: IndexRecipe = RECIPE, n: int = N) -> VectorPlan:
    return resolve(recipe, n, 16)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path), create=True)


def parent_of(store: Store, plan: VectorPlan, **changes: Any) -> Parent:
    """Return a parent of two parts with one index."""
    files = {f"embeddings/part-0000{number}.npy": store.blobs.put_bytes(b"old %d" % number) for number in range(2)}
    files["trained/hnsw"] = store.blobs.put_bytes(b"cells")
    entry = plan.entry() | {"trained": build_training_entry(plan, TRAINED)}
    parts = (PartEntry("part-00000", 0, 9, 5), PartEntry("part-00001", 10, 19, 5))
    content = Content(
        {}, parts, files, representations=embeddings_in_space({"digest": "space"}), indexes={"hnsw": entry}
    )
    return Parent(Manifest(replace(content, **changes)))


def test_a_corpus_that_grew_inherits(store: Store) -> None:
    parent = parent_of(store, planned())
    assert find_reuse_obstacles(parent, "hnsw", planned(n=N + 9), "space") == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, ["seed"]),
        ({"factory": "HNSW16"}, ["factory"]),
        ({"factory": "IVF64,SQ8"}, ["cells", "code", "factory", "kind", "linked"]),
        ({"metric": "l2"}, ["metric"]),
        ({"linked": 1.0}, ["linked"]),
        ({"cells": 3}, []),
        ({"cells": 9}, ["cells"]),
        ({"ef_construction": 50}, ["ef_construction"]),
        ({"search": {"efSearch": 99}}, []),
        ({"drift": 2.0}, []),
    ],
)
def test_another_recipe_is_named(store: Store, change: dict[str, Any], named: list[str]) -> None:
    plan = planned(replace(RECIPE, **change))
    assert find_reuse_obstacles(parent_of(store, planned()), "hnsw", plan, "space") == named
    notes = note_obstacles(plan, named).notes
    assert notes == ((f"trained again: the parent's index differs in {', '.join(named)}",) if named else ())


def test_a_plan_with_some_more_cells_inherits(store: Store) -> None:
    parent, n = parent_of(store, planned()), round(1.7 * N)
    plan = keep_parent_sizes(RECIPE, planned(n=n), parent, "hnsw")
    assert isinstance(plan, VectorPlan)
    assert (planned().cells, plan.cells) == (4, 6)
    assert find_reuse_obstacles(parent, "hnsw", plan, "space") == []
    assert find_reuse_obstacles(parent, "hnsw", plan, "another") == ["cells", "space"]
    found = find_reusable_training(store, parent, "hnsw", plan, "space", [], [])
    assert found is not None
    assert found.growth == "there are 6 cells instead of 4"


def test_without_a_trained_file_there_is_nothing_to_inherit(store: Store) -> None:
    plan, whole = planned(), parent_of(store, planned())
    assert find_reuse_obstacles(whole, "hnsw", plan, "another") == ["space"]
    assert find_reuse_obstacles(whole, "other", plan, "space") == ["no record"]
    assert find_reuse_obstacles(Parent(), "hnsw", plan, "space") == ["no parent"]
    older = parent_of(store, plan, indexes={"hnsw": plan.entry()})  # written before trained files were kept
    damaged = parent_of(store, plan, indexes={"hnsw": {**plan.entry(), "trained": {"plan": None}}})
    for parent in (older, damaged, parent_of(store, plan, files={})):
        assert find_reuse_obstacles(parent, "hnsw", plan, "space") == ["no record"]
        assert keep_parent_sizes(RECIPE, plan, parent, "hnsw") == plan
    assert note_obstacles(plan, ["no record"]) == plan


def test_the_vectors_that_changed_are_named_beside_those_that_did_not(store: Store) -> None:
    parent, parts = (
        parent_of(store, planned()),
        [Part(f"part-0000{i}", "pages", 10 * i, 10 * i + 9, ()) for i in (0, 1)],
    )
    assert parent.manifest is not None
    same = parent.manifest.content.files["embeddings/part-00000.npy"]
    new = store.blobs.put_bytes(b"new")
    made = [EmbedResult(ref, 5) for ref in (same, new)]
    found = find_reusable_training(store, parent, "hnsw", planned(), "space", parts, made)
    assert found is not None
    assert (found.snapshot, found.stats) == (parent.manifest.id, TRAINED)
    assert [ref for ref, _ in found.changed_parts] == [new]
    assert found.unchanged_parts == (same,)
    assert not found.fits_untested(1.2)
    unchanged = find_reusable_training(store, parent, "hnsw", planned(), "space", parts[:1], made[:1])
    assert unchanged is not None
    assert unchanged.fits_untested(1.2)
    store.files.local_path(found.blob.path).unlink()
    assert find_reusable_training(store, parent, "hnsw", planned(), "space", parts, made) is None


def test_cells_stay_while_about_as_many_would_be_chosen(store: Store) -> None:
    parent = parent_of(store, planned())
    assert planned().cells == 4
    for n, cells in ((300_000, 4), (400_000, 7), (110_000, 4), (90_000, 2)):
        assert keep_parent_sizes(RECIPE, planned(n=n), parent, "hnsw").cells == cells, n
    named = replace(RECIPE, cells=5)
    assert keep_parent_sizes(named, planned(named), parent, "hnsw").cells == 5, "who names a number gets it"
    assert keep_parent_sizes(RECIPE, planned(n=1000), parent, "hnsw").cells == 2
