"""A rate is measured by real building; no test says how fast a machine is."""

import pytest

from rag_model.index.files.engine import faiss
from rag_model.index.recipe import IndexRecipe, resolve
from rag_model.index.sizing.rate import Rate, cpu_seconds, measure_rate

STAGES = {"train": 1.0, "scatter": 2.0, "shard": 3.0, "merge": 4.0}
LISTED = {stage: spent for stage, spent in STAGES.items() if stage != "shard"}


@pytest.mark.parametrize("factory", ["HNSW8", "IVF16,PQ4x4np", "IVF16,SQ8", "Flat"])
def test_every_structure_has_a_rate(factory: str) -> None:
    faiss.omp_set_num_threads(2)  # a rate is measured on one
    plan = resolve(IndexRecipe(factory, ef_construction=20), 3000, 8)
    seconds = cpu_seconds(plan, measure_rate(plan))
    assert seconds.keys() == {"train", "scatter", "merge"} | ({"shard"} if factory == "HNSW8" else set())
    assert all(spent >= 0 for spent in seconds.values())
    assert faiss.omp_get_max_threads() == 2


def test_a_graph_of_more_vectors_or_larger_cells_takes_longer() -> None:
    recipe = IndexRecipe("HNSW32", cells=4)
    rate = Rate(resolve(recipe, 4000, 96), STAGES, 1e11, power=0.4)
    small, large = (cpu_seconds(resolve(recipe, n, 96), rate) for n in (100_000, 1_000_000))
    assert all(large[stage] >= 9 * small[stage] for stage in ("scatter", "shard", "merge"))
    assert large["shard"] > 11 * small["shard"], "a vector costs more in a larger graph"
    finer = cpu_seconds(resolve(IndexRecipe("HNSW32", cells=64), 1_000_000, 96), rate)
    assert finer["shard"] < large["shard"]
    assert finer["merge"] == large["merge"]


def test_codes_are_trained_piece_by_piece() -> None:
    def trained(factory: str, piece: float) -> float:
        plan = resolve(IndexRecipe(factory), 10_000, 96)
        rate = Rate(resolve(IndexRecipe("IVF64,PQ24np"), 4000, 96), LISTED, 1e30, power=0.2, piece=piece)
        return cpu_seconds(plan, rate)["train"]

    assert trained("IVF64,PQ48np", 0.5) == pytest.approx(24.0)
    assert trained("OPQ24,IVF64,PQ24np", 0.5) > trained("IVF64,PQ24np", 0.5) == pytest.approx(12.0)
    assert measure_rate(resolve(IndexRecipe("IVF4,PQ2x4np"), 1100, 8)).piece > 0
    assert measure_rate(resolve(IndexRecipe("IVF4,SQ8"), 1100, 8)).piece == 0


def test_comparing_with_every_centroid_takes_longer_than_their_graph() -> None:
    def scattered(factory: str) -> float:
        rate = Rate(resolve(IndexRecipe(factory.replace("65536", "64")), 4000, 96), LISTED, 1e11, power=0.2)
        return cpu_seconds(resolve(IndexRecipe(factory), 10**8, 96), rate)["scatter"]

    assert scattered("IVF65536,SQ8") > 2 * 10**8 * 65536 * 96 / 1e11
    assert scattered("IVF65536_HNSW32,SQ8") < 10 * 2.0 * 10**8 / 4000
