import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_model.errors import InputError, ResourceError
from rag_model.index.build import iter_slices, run_stages
from rag_model.index.exact_search import ExactIndex
from rag_model.index.files.pieces import path_opener
from rag_model.index.kind import KINDS, IndexBuilder, IndexPlanner, IndexSearcher, get_kind
from rag_model.index.recipe import IndexRecipe, resolve
from rag_model.index.search import open_index

Make = Callable[..., Any]  # fixtures of conftest.py
RECIPES = [IndexRecipe("HNSW8"), IndexRecipe("HNSW8", cells=4), IndexRecipe("IVF,SQ8"), IndexRecipe("Flat")]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_stages_run_from_files_alone_and_report_json_statistics(
    recipe: IndexRecipe, make_vectors: Make, write_parts: Make, tmp_path: Path
) -> None:
    """Workers receive a pickled plan and files; shards are built in any order; statistics are JSON."""
    vectors = make_vectors(1500)
    parts = write_parts(vectors, [400, 900])
    plan = pickle.loads(pickle.dumps(resolve(recipe, 1500, 32)))
    kind = get_kind(plan.kind)
    assert kind.VERSION >= 1
    trained, out = tmp_path / "trained", tmp_path / "out.faiss"
    stats = [kind.train(plan, parts, trained)]
    pieces = [tmp_path / f"scattered-{number}" for number in range(len(parts))]
    for number in reversed(range(len(parts))):
        stats.append(kind.scatter(plan, trained, parts[number], number, pieces[number]))
    scattered = [path_opener(piece) for piece in pieces]
    shards = [tmp_path / f"shard-{number}" for number in range(plan.shards)]
    for number in reversed(range(plan.shards)):
        stats.append(kind.shard(plan, trained, iter_slices(pieces, plan.shards, number), number, shards[number]))
    stats.append(kind.merge(plan, trained, parts, scattered, [path_opener(shard) for shard in shards], out))
    assert json.loads(json.dumps(stats)) == stats
    assert stats[-1]["rows"] == 1500
    assert stats[-1]["bytes"] == out.stat().st_size
    exact_nearest = ExactIndex(parts).search(vectors[:50], 5)[1]
    nearest = open_index(out).search(vectors[:50], 5)[1]
    assert np.mean([len(set(a) & set(b)) / 5 for a, b in zip(nearest, exact_nearest, strict=True)]) > 0.9


@pytest.mark.parametrize("n", [1, 2, 39, 300])
@pytest.mark.parametrize("factory", ["HNSW32", "HNSW32_SQ8", "IVF1024,PQ8np", "OPQ8,IVF,PQ", "IVF,RaBitQ4", "Flat"])
def test_tiny_corpus_is_indexed(factory: str, n: int, make_vectors: Make, write_parts: Make, build_index: Make) -> None:
    vectors = make_vectors(n)
    path, plan = build_index(write_parts(vectors, [n // 2]), IndexRecipe(factory, cells=8))
    scores, rows = open_index(path, defaults=plan.search).search(vectors, 1)
    assert np.all(np.isfinite(scores))
    assert np.mean(rows[:, 0] == np.arange(n)) > 0.8


@pytest.mark.parametrize("recipe", RECIPES[:3], ids=str)
def test_unwritable_output_is_a_resource_error(
    recipe: IndexRecipe, make_vectors: Make, write_parts: Make, tmp_path: Path
) -> None:
    parts = write_parts(make_vectors(1100))
    with pytest.raises(ResourceError, match="cannot write"):
        run_stages(resolve(recipe, 1100, 32), parts, tmp_path / "out", tmp_path / "no" / "such" / "folder")


def test_damaged_or_missing_slice_is_refused(make_vectors: Make, write_parts: Make, tmp_path: Path) -> None:
    plan = resolve(IndexRecipe("HNSW8", cells=3), 1100, 32)
    run_stages(plan, write_parts(make_vectors(1100), [500]), tmp_path / "out", tmp_path)
    paths = [tmp_path / "scattered-00000", tmp_path / "scattered-00001"]
    data, (first, *_) = paths[0].read_bytes(), iter_slices(paths, plan.shards, 1)
    offset = data.index(first) + 40
    paths[0].write_bytes(data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :])
    with pytest.raises(InputError, match="scattered-00000 is damaged: delete that file"):
        next(iter_slices(paths, plan.shards, 1))
    assert next(iter_slices(paths, plan.shards, 0))
    paths[0].unlink()
    with pytest.raises(InputError, match=r"cannot read .*scattered-00000 \(No such file"):
        next(iter_slices(paths, plan.shards, 0))


@pytest.mark.parametrize("protocol", [IndexBuilder, IndexSearcher, IndexPlanner])
def test_built_in_kinds_have_every_member_of_the_protocol(protocol: type) -> None:
    assert set(KINDS.list_names()) == {"hnsw", "ivf", "exact", "bm25", "impact", "tokens"}
    members = {name for name in {*vars(protocol), *protocol.__annotations__} if not name.startswith("_")}
    assert not any(members - set(dir(get_kind(name))) for name in KINDS.list_names())
