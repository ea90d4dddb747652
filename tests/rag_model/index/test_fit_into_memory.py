import re

import pytest

from rag_model.errors import ResourceError
from rag_model.index.estimate import estimate_resources, fit_into_memory, list_alternatives
from rag_model.index.recipe import IndexRecipe, resolve

WIKIPEDIA = (21_015_324, 768)
GB = 10**9
OPEN = IndexRecipe("HNSW")


@pytest.mark.parametrize(
    ("memory", "factory"),
    [
        (80, "HNSW32"),
        (45, "HNSW32_SQfp16"),
        (30, "HNSW32_SQ8"),
        (16, "IVF16384_HNSW32,PQ192np"),
        (4, "OPQ96_384,IVF16384_HNSW32,PQ96np"),
    ],
)
def test_best_alternative_that_fits_is_chosen(memory: int, factory: str) -> None:
    plan = fit_into_memory(list_alternatives(OPEN, 768), *WIKIPEDIA, memory * GB, serving=True)
    assert plan.factory == factory
    assert estimate_resources(plan).peak_bytes(serving=True) <= memory * GB


def test_error_names_the_smallest_if_nothing_fits() -> None:
    with pytest.raises(ResourceError, match=r"^OPQ48.* 1\.7 GB .* 1\.0 GB are free: add memory, since no index"):
        fit_into_memory(list_alternatives(OPEN, 768), *WIKIPEDIA, GB, serving=True)
    with pytest.raises(ResourceError, match="no index is smaller"):
        fit_into_memory([IndexRecipe("HNSW32")], *WIKIPEDIA, GB, serving=True)
    with pytest.raises(ResourceError, match=r"^Flat .* no index is smaller"):  # to build, exact vectors need least
        fit_into_memory([IndexRecipe("Flat")], *WIKIPEDIA, GB // 10)


def test_given_numbers_are_kept() -> None:
    recipe = IndexRecipe("HNSW16", "l2", ef_construction=40, seed=3)
    plan = fit_into_memory(list_alternatives(recipe, 768), *WIKIPEDIA, 30 * GB, serving=True)
    assert (plan.factory, plan.metric, plan.ef_construction, plan.seed) == ("HNSW16_SQ8", "l2", 40, 3)


def test_error_suggests_a_factory_that_can_be_searched() -> None:
    with pytest.raises(
        ResourceError, match=r"70\.5 GB of memory to build and search, and 16\.0 GB are free"
    ) as refused:
        fit_into_memory([IndexRecipe("HNSW32")], *WIKIPEDIA, 16 * GB, serving=True)
    offered = re.search(r"use (\S+)$", str(refused.value))
    assert offered is not None
    assert fit_into_memory([IndexRecipe(offered[1])], *WIKIPEDIA, 16 * GB, serving=True).factory == offered[1]


def test_graph_too_large_to_search_can_be_built() -> None:
    assert fit_into_memory([IndexRecipe("HNSW32")], *WIKIPEDIA, 16 * GB).factory == "HNSW32"


def test_more_cells_are_used_until_one_fits() -> None:
    default = resolve(IndexRecipe("HNSW32"), 10**6, 768)
    memory = estimate_resources(default).stages["shard"] - GB // 10
    plan = fit_into_memory([IndexRecipe("HNSW32")], 10**6, 768, memory, 10_000)
    assert plan.cells == 2 * default.cells
    assert any("cells" in note for note in plan.notes)
    with pytest.raises(ResourceError, match=r"HNSW32 over 1,000,000 vectors of 768 dimensions needs .* to build, and"):
        fit_into_memory([IndexRecipe("HNSW32", cells=default.cells)], 10**6, 768, memory, 10_000)


def test_smaller_sample_if_memory_is_short() -> None:
    plan = fit_into_memory([IndexRecipe("IVF,PQ")], *WIKIPEDIA, 4 * GB)
    assert plan.train_sample < resolve(IndexRecipe("IVF,PQ"), *WIKIPEDIA).train_sample
    assert any("trained on" in note for note in plan.notes)


def test_small_corpus_fits_in_little_memory() -> None:
    for factory in ("HNSW32", "IVF,PQ"):
        assert estimate_resources(fit_into_memory([IndexRecipe(factory)], 5000, 384, 2**29)).disk_bytes < 2**25
