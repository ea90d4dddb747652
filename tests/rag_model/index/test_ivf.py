from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.errors import InputError
from rag_model.index import ivf
from rag_model.index.engine import faiss, read, write
from rag_model.index.recipe import IndexPlan, IndexRecipe, resolve

Make = Callable[..., Any]  # fixtures of conftest.py

FACTORIES = [
    "IVF16,PQ8np",
    "IVF16_HNSW8,PQ4x4np",
    "OPQ4_16,IVF8,PQ4x4np",
    "IVF8,RaBitQ4",
    "IVF8,SQ8",
    "IVF4,Flat",
    "Flat",
]


@pytest.fixture(scope="module")
def trained(make_vectors: Make) -> dict[tuple[str, str], Any]:
    sample = make_vectors(1500, 32, unit=False)
    made = {}
    for metric in ("ip", "l2"):
        for factory in FACTORIES:
            plan = resolve(IndexRecipe(factory, metric), len(sample), 32)
            assert plan.factory == factory
            made[factory, metric] = ivf.empty(plan, sample)
    return made


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_merged_parts_equal_one_shot(
    data: st.DataObject,
    trained: dict[tuple[str, str], Any],
    make_vectors: Make,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Any cut of any corpus: the same distances, the same ids, the same bytes as adding it all at once."""
    factory, metric = data.draw(st.sampled_from(FACTORIES)), data.draw(st.sampled_from(["ip", "l2"]))
    n = data.draw(st.integers(1, 400))
    vectors = make_vectors(n, 32, data.draw(st.integers(0, 5)), unit=data.draw(st.booleans()))
    repeated = data.draw(st.lists(st.integers(0, n - 1), max_size=20))
    vectors[repeated] = vectors[0]
    vectors[data.draw(st.lists(st.integers(0, n - 1), max_size=5))] = 0
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=5)))

    folder = tmp_path_factory.mktemp("merge")
    write(trained[factory, metric], folder / "trained")
    parts, shards = [], []
    for number, rows in enumerate(np.split(vectors, cuts)):
        parts.append(folder / f"{number}.npy")
        shards.append(folder / f"{number}.shard")
        np.save(parts[-1], rows)
    one = read(folder / "trained")
    one.add(vectors)
    plan = _plan(factory, metric, n)
    for number, path in enumerate(parts):
        facts = ivf.shard(plan, folder / "trained", [path], number, shards[number])
        assert facts["rows"] == len(np.load(path))
    ivf.merge(plan, folder / "trained", parts, shards, folder / "merged")
    write(one, folder / "one")

    k, queries = min(n, 10), make_vectors(7, 32, 77)
    merged = faiss.read_index(str(folder / "merged"))
    for mine, theirs in zip(merged.search(queries, k), one.search(queries, k), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert (folder / "merged").read_bytes() == (folder / "one").read_bytes()


def _plan(factory: str, metric: Any, n: int) -> IndexPlan:
    """A plan as for a corpus large enough for the factory, over n vectors."""
    return replace(resolve(IndexRecipe(factory, metric), 1500, 32), n=n)


def test_the_whole_build_repeats_to_the_byte(make_vectors: Make, write_parts: Make, build_index: Make) -> None:
    parts = write_parts(make_vectors(2000), [700, 701])
    recipe = IndexRecipe("OPQ8,IVF,PQ8x4np", seed=3)
    first, plan = build_index(parts, recipe, "first")
    second, _ = build_index(parts, recipe, "second")
    assert first.read_bytes() == second.read_bytes()
    assert faiss.read_index(str(first)).ntotal == plan.n == 2000


def test_training_says_how_the_lists_are_filled(make_vectors: Make, write_parts: Make, tmp_path: Path) -> None:
    parts = write_parts(make_vectors(1200), [500])
    plan = resolve(IndexRecipe("IVF16,Flat"), 1200, 32)
    assert ivf.reads(plan, 2) == [(0,), (1,)]
    assert ivf.train(plan, parts, tmp_path / "trained")["sample"] == 1200
    for number, part in enumerate(parts):
        ivf.shard(plan, tmp_path / "trained", [part], number, tmp_path / str(number))
    facts = ivf.merge(plan, tmp_path / "trained", parts, [tmp_path / "0", tmp_path / "1"], tmp_path / "out")
    assert facts["rows"] == 1200
    assert facts["largest_list"] >= 1200 / 16
    assert facts["imbalance"] >= 1
    assert read(tmp_path / "out").nprobe == plan.search["nprobe"]


def test_shards_that_do_not_belong_are_refused(make_vectors: Make, write_parts: Make, tmp_path: Path) -> None:
    parts = write_parts(make_vectors(1200), [500])
    plan = resolve(IndexRecipe("IVF16,Flat"), 1200, 32)
    trained, out = tmp_path / "trained", tmp_path / "out"
    ivf.train(plan, parts, trained)
    shards = [tmp_path / "0", tmp_path / "1"]
    for number, part in enumerate(parts):
        ivf.shard(plan, trained, [part], number, shards[number])
    with pytest.raises(InputError, match="holds 700 vectors where"):
        ivf.merge(plan, trained, parts, shards[::-1], out)
    other = resolve(IndexRecipe("IVF8,Flat"), 1200, 32)
    ivf.train(other, parts, tmp_path / "other")
    ivf.shard(other, tmp_path / "other", [parts[1]], 1, shards[1])
    with pytest.raises(InputError, match="was not made from"):
        ivf.merge(plan, trained, parts, shards, out)
    shards[1].write_bytes(shards[1].read_bytes()[:-100])
    with pytest.raises(InputError, match="truncated or damaged"):
        ivf.merge(plan, trained, parts, shards, out)
    assert not out.exists()
