import re
from dataclasses import replace

import pytest

from rag_model.errors import ResourceError, UsageError
from rag_model.index.estimate import (
    choose_by_recall,
    count_disk_bytes,
    estimate_resources,
    fit_into_memory,
    list_alternatives,
)
from rag_model.index.factory import with_refinement
from rag_model.index.recipe import IndexRecipe, resolve

WIKIPEDIA = (21_015_324, 768)
GB = 10**9
RECIPE = IndexRecipe("HNSW")


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
    plan = fit_into_memory(list_alternatives(RECIPE, 768), *WIKIPEDIA, memory * GB, serving=True)
    assert plan.factory == factory
    assert estimate_resources(plan).peak_bytes(serving=True) <= memory * GB


@pytest.mark.parametrize(
    ("recall", "memory", "disk", "factory"),
    [
        (0.9, 80, 100, "HNSW32"),
        (0.9, 80, 60, "HNSW32_SQfp16"),
        (0.98, 30, None, "HNSW32_SQ8"),
        (0.98, 16, None, "HNSW32_SQ4,Refine(vectors)"),
        (0.98, 8, None, "IVF16384_HNSW32,PQ192np,Refine(vectors)"),
        (0.98, 3, None, "PCAR384,IVF16384_HNSW32,RaBitQ2,Refine(vectors)"),
        (0.97, 2.8, None, "RR768,IVF16384_HNSW32,RaBitQ,Refine(vectors)"),
        (0.8, 3, 10, "OPQ96_384,IVF16384_HNSW32,PQ96np"),
    ],
)
def test_best_alternative_that_reaches_the_recall_is_chosen(
    recall: float, memory: float, disk: int | None, factory: str
) -> None:
    alternatives = list_alternatives(replace(RECIPE, recall_target=recall), 768, with_vectors=True)
    disk_bytes = None if disk is None else disk * GB
    plan = fit_into_memory(
        choose_by_recall(alternatives, *WIKIPEDIA), *WIKIPEDIA, round(memory * GB), serving=True, disk=disk_bytes
    )
    assert with_refinement(plan.factory, plan.refine) == factory
    assert disk_bytes is None or count_disk_bytes(plan) <= disk_bytes


@pytest.mark.parametrize("d", [1, 3])
def test_vectors_of_few_dimensions_have_a_plan(d: int) -> None:
    assert choose_by_recall(list_alternatives(RECIPE, d), 100, d)


def test_recall_that_no_index_reaches_in_the_memory_or_disk_is_refused() -> None:
    high, low = (replace(RECIPE, recall_target=recall) for recall in (0.9995, 0.95))
    with pytest.raises(UsageError, match=r"^no index reaches recall@20 0\.9995; HNSW32 reaches about 0\.999: lower"):
        choose_by_recall(list_alternatives(high, 768), *WIKIPEDIA)
    alternatives = choose_by_recall(list_alternatives(low, 768), *WIKIPEDIA)
    with pytest.raises(ResourceError, match=r"^HNSW32_SQ8 .* add memory, or lower the recall target$"):
        fit_into_memory(alternatives, *WIKIPEDIA, 16 * GB, serving=True)
    with pytest.raises(ResourceError, match=r"^HNSW32_SQ8 .* needs 21\.9 GB of disk, and --disk allows 20\.0 GB"):
        fit_into_memory(alternatives, *WIKIPEDIA, 80 * GB, serving=True, disk=20 * GB)


def test_error_names_the_smallest_if_nothing_fits() -> None:
    with pytest.raises(ResourceError, match=r"^OPQ48.* 1\.8 GB .* 1\.0 GB are available: add memory, since no index"):
        fit_into_memory(list_alternatives(RECIPE, 768), *WIKIPEDIA, GB, serving=True)
    with pytest.raises(ResourceError, match="no index is smaller"):
        fit_into_memory([IndexRecipe("HNSW32")], *WIKIPEDIA, GB, serving=True)
    # Exact vectors need the least memory to build.
    with pytest.raises(ResourceError, match=r"^Flat .* no index is smaller"):
        fit_into_memory([IndexRecipe("Flat")], *WIKIPEDIA, GB // 10)


def test_given_numbers_are_kept() -> None:
    recipe = IndexRecipe("HNSW16", "l2", ef_construction=40, seed=3)
    plan = fit_into_memory(list_alternatives(recipe, 768), *WIKIPEDIA, 30 * GB, serving=True)
    assert (plan.factory, plan.metric, plan.ef_construction, plan.seed) == ("HNSW16_SQ8", "l2", 40, 3)


def test_error_suggests_a_factory_that_can_be_searched() -> None:
    with pytest.raises(ResourceError, match=r"70\.5 GB of memory to .*, and 16\.0 GB are available") as error:
        fit_into_memory([IndexRecipe("HNSW32")], *WIKIPEDIA, 16 * GB, serving=True)
    suggestion = re.search(r"use (\S+)$", str(error.value))
    assert suggestion is not None
    assert fit_into_memory([IndexRecipe(suggestion[1])], *WIKIPEDIA, 16 * GB, serving=True).factory == suggestion[1]


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
