"""The trained files of the parent's index are reused if the plan and the encoder space are equal."""

from dataclasses import replace
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


def create_plan(recipe: IndexRecipe = RECIPE, n: int = N) -> VectorPlan:
    return resolve(recipe, n, 16)


def create_parent(store: Store, plan: VectorPlan, **changes: Any) -> Parent:
    """Return a parent of two parts with one index."""
    files = {f"embeddings/part-0000{number}.npy": store.blobs.put_bytes(b"old %d" % number) for number in range(2)}
    files["trained/hnsw"] = store.blobs.put_bytes(b"cells")
    entry = plan.entry() | {"trained": build_training_entry(plan, TRAINED)}
    parts = (PartEntry("part-00000", 0, 9, 5), PartEntry("part-00001", 10, 19, 5))
    content = Content(
        {}, parts, files, representations=embeddings_in_space({"digest": "space"}), indexes={"hnsw": entry}
    )
    return Parent(Manifest(replace(content, **changes)))


def test_training_is_reused_for_a_larger_corpus(store: Store) -> None:
    parent = create_parent(store, create_plan())
    assert find_reuse_obstacles(parent, "hnsw", create_plan(n=N + 9), "space") == []


@pytest.mark.parametrize(
    ("change", "differences"),
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
def test_differences_of_the_recipe_are_noted(store: Store, change: dict[str, Any], differences: list[str]) -> None:
    plan = create_plan(replace(RECIPE, **change))
    assert find_reuse_obstacles(create_parent(store, create_plan()), "hnsw", plan, "space") == differences
    notes = note_obstacles(plan, differences).notes
    assert notes == ((f"trained again: the parent's index differs in {', '.join(differences)}",) if differences else ())


def test_training_is_reused_for_a_plan_with_more_cells(store: Store) -> None:
    parent, n = create_parent(store, create_plan()), round(1.7 * N)
    plan = keep_parent_sizes(RECIPE, create_plan(n=n), parent, "hnsw")
    assert isinstance(plan, VectorPlan)
    assert (create_plan().cells, plan.cells) == (4, 6)
    assert find_reuse_obstacles(parent, "hnsw", plan, "space") == []
    assert find_reuse_obstacles(parent, "hnsw", plan, "another") == ["cells", "space"]
    reusable = find_reusable_training(store, parent, "hnsw", plan, "space", [], [])
    assert reusable is not None
    assert reusable.growth == "there are 6 cells instead of 4"


def test_nothing_is_reused_without_a_trained_file(store: Store) -> None:
    plan, complete_parent = create_plan(), create_parent(store, create_plan())
    assert find_reuse_obstacles(complete_parent, "hnsw", plan, "another") == ["space"]
    assert find_reuse_obstacles(complete_parent, "other", plan, "space") == ["no record"]
    assert find_reuse_obstacles(Parent(), "hnsw", plan, "space") == ["no parent"]
    older = create_parent(store, plan, indexes={"hnsw": plan.entry()})  # without a record, as by earlier versions
    damaged = create_parent(store, plan, indexes={"hnsw": {**plan.entry(), "trained": {"plan": None}}})
    for parent in (older, damaged, create_parent(store, plan, files={})):
        assert find_reuse_obstacles(parent, "hnsw", plan, "space") == ["no record"]
        assert keep_parent_sizes(RECIPE, plan, parent, "hnsw") == plan
    assert note_obstacles(plan, ["no record"]) == plan


def test_changed_and_unchanged_parts_are_listed(store: Store) -> None:
    parent = create_parent(store, create_plan())
    parts = [Part(f"part-0000{i}", "pages", 10 * i, 10 * i + 9, ()) for i in (0, 1)]
    assert parent.manifest is not None
    unchanged_blob = parent.manifest.content.files["embeddings/part-00000.npy"]
    changed_blob = store.blobs.put_bytes(b"new")
    embed_results = [EmbedResult(ref, 5) for ref in (unchanged_blob, changed_blob)]
    reusable = find_reusable_training(store, parent, "hnsw", create_plan(), "space", parts, embed_results)
    assert reusable is not None
    assert (reusable.snapshot, reusable.stats) == (parent.manifest.id, TRAINED)
    assert [ref for ref, _ in reusable.changed_parts] == [changed_blob]
    assert reusable.unchanged_parts == (unchanged_blob,)
    assert not reusable.fits_untested(1.2)
    unchanged = find_reusable_training(store, parent, "hnsw", create_plan(), "space", parts[:1], embed_results[:1])
    assert unchanged is not None
    assert unchanged.fits_untested(1.2)
    store.files.local_path(reusable.blob.path).unlink()
    assert find_reusable_training(store, parent, "hnsw", create_plan(), "space", parts, embed_results) is None


def test_number_of_cells_is_kept_while_it_is_about_right(store: Store) -> None:
    parent = create_parent(store, create_plan())
    assert create_plan().cells == 4
    for n, cells in ((300_000, 4), (400_000, 7), (110_000, 4), (90_000, 2)):
        assert keep_parent_sizes(RECIPE, create_plan(n=n), parent, "hnsw").cells == cells, n
    recipe_with_cells = replace(RECIPE, cells=5)
    fixed_plan = keep_parent_sizes(recipe_with_cells, create_plan(recipe_with_cells), parent, "hnsw")
    assert fixed_plan.cells == 5, "a recipe can set the number of cells"
    assert keep_parent_sizes(RECIPE, create_plan(n=1000), parent, "hnsw").cells == 2
