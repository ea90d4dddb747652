"""How the estimated seconds grow; no test says how fast a machine is."""

import pytest

from rag_model.index.recipe import IndexRecipe, resolve
from rag_model.index.registry import kind_for
from rag_model.index.sizing.rate import stage_seconds


def seconds(factory: str, n: int, cells: int | None = None) -> dict[str, float]:
    return stage_seconds(resolve(IndexRecipe(factory, cells=cells), n, 96), 96)


@pytest.mark.parametrize("factory", ["HNSW8", "IVF16,PQ4x4np", "IVF16,SQ8", "Flat", "MaxSim", "BM25"])
def test_every_kind_says_how_long_its_stages_take(factory: str) -> None:
    said = stage_seconds(kind_for(factory).plan(IndexRecipe(factory), 3000, 8), 8)
    assert said.keys() == {"train", "scatter", "merge"} | ({"shard"} if factory == "HNSW8" else set())
    assert all(spent > 0 for spent in said.values())


def test_a_graph_of_more_vectors_or_larger_cells_takes_longer() -> None:
    small, large = (seconds("HNSW32", n, 4) for n in (100_000, 1_000_000))
    assert all(large[stage] >= 9.9 * small[stage] for stage in ("scatter", "shard", "merge"))
    assert large["shard"] > 11 * small["shard"], "a vector costs more in a larger graph"
    finer = seconds("HNSW32", 1_000_000, 64)
    assert finer["shard"] < large["shard"]
    assert finer["merge"] == large["merge"]


def test_more_candidates_take_longer() -> None:
    few, many = (resolve(IndexRecipe("HNSW32", ef_construction=ef), 100_000, 96) for ef in (50, 100))
    assert stage_seconds(many, 96)["shard"] == pytest.approx(2 * stage_seconds(few, 96)["shard"])


def test_comparing_with_every_centroid_takes_longer_than_their_graph() -> None:
    assert seconds("IVF65536,SQ8", 10**8)["scatter"] > 5 * seconds("IVF65536_HNSW32,SQ8", 10**8)["scatter"]
    assert seconds("IVF64,SQ8", 10**6)["scatter"] == seconds("IVF64_HNSW32,SQ8", 10**6)["scatter"]


def test_codes_and_a_rotation_take_longer_to_train() -> None:
    plain, codes, rotated = (
        seconds(name, 10**6)["train"] for name in ("IVF64,SQ8", "IVF64,PQ24np", "OPQ,IVF64,PQ24np")
    )
    assert plain < codes < rotated
