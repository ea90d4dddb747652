import re
from collections.abc import Callable
from typing import Any

import pytest

from rag_model.errors import ResourceError
from rag_model.index.estimate import check_fits, estimate
from rag_model.index.recipe import IndexRecipe, resolve

Make = Callable[..., Any]  # fixtures of conftest.py
WIKIPEDIA = (21_015_324, 768)


@pytest.mark.parametrize(
    "factory",
    [
        "HNSW8",
        "HNSW32_SQ8",
        "HNSW16_SQfp16",
        "IVF,PQ",
        "OPQ4_16,IVF16_HNSW8,PQ4x4np",
        "IVF16,RaBitQ4",
        "IVF16,SQ8",
        "Flat",
    ],
)
def test_the_size_on_disk_is_what_was_estimated(
    factory: str, make_vectors: Make, write_parts: Make, build_index: Make
) -> None:
    path, plan = build_index(write_parts(make_vectors(3000), [1000]), IndexRecipe(factory))
    cost = estimate(plan)
    assert cost.disk_bytes == pytest.approx(path.stat().st_size, rel=0.02)
    assert cost.disk_bytes < cost.search_bytes <= cost.build_bytes


def test_wikipedia_is_refused_on_a_laptop_with_a_factory_that_fits() -> None:
    plan = resolve(IndexRecipe("HNSW32"), *WIKIPEDIA)
    with pytest.raises(ResourceError, match=r"71\.\d GB of memory to build, and 16\.0 GB are free") as refused:
        check_fits(plan, 16 * 10**9)
    offered = re.search(r"use (\S+)$", str(refused.value))
    assert offered is not None
    assert check_fits(resolve(IndexRecipe(offered[1]), *WIKIPEDIA), 16 * 10**9).build_bytes <= 16 * 10**9


def test_the_best_that_fits_is_offered() -> None:
    plan = resolve(IndexRecipe("HNSW32"), *WIKIPEDIA)
    with pytest.raises(ResourceError, match=r"use HNSW32_SQfp16$"):
        check_fits(plan, 45 * 10**9)
    with pytest.raises(ResourceError, match=r"use HNSW32_SQ8$"):
        check_fits(plan, 30 * 10**9)
    with pytest.raises(ResourceError, match="use a larger machine"):
        check_fits(plan, 10**9)
    assert check_fits(plan, 80 * 10**9) == estimate(plan)


def test_a_demo_fits_anywhere() -> None:
    for factory in ("HNSW32", "IVF,PQ"):
        assert check_fits(resolve(IndexRecipe(factory), 5000, 384), 2**29).disk_bytes < 2**25
