import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_model.errors import InputError, ResourceError
from rag_model.index.exact.scan import ExactIndex
from rag_model.index.files.pieces import opener
from rag_model.index.recipe import IndexRecipe, resolve
from rag_model.index.registry import KINDS, kind_named
from rag_model.index.search import open_index
from rag_model.index.stages import build, slices_of

Make = Callable[..., Any]  # fixtures of conftest.py
RECIPES = [IndexRecipe("HNSW8"), IndexRecipe("HNSW8", cells=4), IndexRecipe("IVF,SQ8"), IndexRecipe("Flat")]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_launcher_needs_to_know_no_structure(
    recipe: IndexRecipe, make_vectors: Make, write_parts: Make, tmp_path: Path
) -> None:
    """A plan travels to workers that see nothing but files; shards are built in any order; facts are JSON."""
    vectors = make_vectors(1500)
    parts = write_parts(vectors, [400, 900])
    plan = pickle.loads(pickle.dumps(resolve(recipe, 1500, 32)))
    structure = kind_named(plan.kind)
    assert structure.VERSION >= 1
    trained, out = tmp_path / "trained", tmp_path / "out.faiss"
    facts = [structure.train(plan, parts, trained)]
    pieces = [tmp_path / f"scattered-{number}" for number in range(len(parts))]
    for number in reversed(range(len(parts))):
        facts.append(structure.scatter(plan, trained, parts[number], number, pieces[number]))
    scattered = [opener(piece) for piece in pieces]
    shards = [tmp_path / f"shard-{number}" for number in range(plan.shards)]
    for number in reversed(range(plan.shards)):
        facts.append(structure.shard(plan, trained, slices_of(pieces, plan.shards, number), number, shards[number]))
    facts.append(structure.merge(plan, trained, parts, scattered, [opener(shard) for shard in shards], out))
    assert json.loads(json.dumps(facts)) == facts
    assert facts[-1]["rows"] == 1500
    assert facts[-1]["bytes"] == out.stat().st_size
    exact = ExactIndex(parts).search(vectors[:50], 5)[1]
    found = open_index(out).search(vectors[:50], 5)[1]
    assert np.mean([len(set(a) & set(b)) / 5 for a, b in zip(found, exact, strict=True)]) > 0.9


@pytest.mark.parametrize("n", [1, 2, 39, 300])
@pytest.mark.parametrize("factory", ["HNSW32", "HNSW32_SQ8", "IVF1024,PQ8np", "OPQ8,IVF,PQ", "IVF,RaBitQ4", "Flat"])
def test_the_smallest_corpora_work(
    factory: str, n: int, make_vectors: Make, write_parts: Make, build_index: Make
) -> None:
    vectors = make_vectors(n)
    path, plan = build_index(write_parts(vectors, [n // 2]), IndexRecipe(factory, cells=8))
    scores, rows = open_index(path, defaults=plan.search).search(vectors, 1)
    assert np.all(np.isfinite(scores))
    assert np.mean(rows[:, 0] == np.arange(n)) > 0.8


@pytest.mark.parametrize("recipe", RECIPES[:3], ids=str)
def test_a_file_that_cannot_be_written_is_said_in_one_sentence(
    recipe: IndexRecipe, make_vectors: Make, write_parts: Make, tmp_path: Path
) -> None:
    parts = write_parts(make_vectors(1100))
    with pytest.raises(ResourceError, match="cannot write"):
        build(resolve(recipe, 1100, 32), parts, tmp_path / "out", tmp_path / "no" / "such" / "folder")


def test_a_slice_that_is_damaged_or_lost(make_vectors: Make, write_parts: Make, tmp_path: Path) -> None:
    plan = resolve(IndexRecipe("HNSW8", cells=3), 1100, 32)
    build(plan, write_parts(make_vectors(1100), [500]), tmp_path / "out", tmp_path)
    paths = [tmp_path / "scattered-00000", tmp_path / "scattered-00001"]
    whole, (first, *_) = paths[0].read_bytes(), slices_of(paths, plan.shards, 1)
    place = whole.index(first) + 40
    paths[0].write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(InputError, match="scattered-00000 is damaged: delete that file"):
        next(slices_of(paths, plan.shards, 1))
    assert next(slices_of(paths, plan.shards, 0))
    paths[0].unlink()
    with pytest.raises(InputError, match=r"cannot read .*scattered-00000 \(No such file"):
        next(slices_of(paths, plan.shards, 0))


def test_every_kind_has_a_structure() -> None:
    assert set(KINDS.names()) == {"hnsw", "ivf", "exact", "bm25", "impact", "tokens"}
