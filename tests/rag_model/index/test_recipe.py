import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.errors import InputError, UsageError
from rag_model.index.factory import check_dimensions, parse_factory
from rag_model.index.files.engine import faiss
from rag_model.index.recipe import IndexRecipe, choose_search, count_lists, resolve

TEMPLATES = [
    "HNSW",
    "HNSW32_SQ4,Refine(vectors)",
    "IVF,PQ",
    "OPQ,IVF,PQ",
    "IVF,RaBitQ4",
    "IVF,SQ8",
    "IVF,Flat",
    "Flat",
    "IVF,PQ,Refine(SQ8)",
    "OPQ,IVF,PQ,Refine(vectors)",
]


@given(st.sampled_from(TEMPLATES), st.integers(1, 30_000_000), st.integers(2, 1100))
def test_faiss_accepts_every_resolved_factory(template: str, n: int, d: int) -> None:
    plan = resolve(IndexRecipe(template), n, d)
    check_dimensions(parse_factory(plan.factory), d)
    assert "IVF," not in plan.factory
    assert 1 <= plan.train_sample <= n
    assert 1 <= plan.cells <= n
    assert faiss.index_factory(d, plan.factory).d == d


@given(st.integers(1, 30_000_000))
def test_lists_are_fewer_than_training_points(n: int) -> None:
    factory = parse_factory(resolve(IndexRecipe("IVF,PQ"), n, 64).factory)
    assert factory.lists <= max(1, n // 39)


def test_wikipedia_in_four_gigabytes() -> None:
    plan = resolve(IndexRecipe("IVF,PQ"), 21_015_324, 768)
    assert plan.factory == "IVF16384_HNSW32,PQ192np"
    assert plan.search == {"nprobe": 128}
    assert resolve(IndexRecipe("HNSW"), 21_015_324, 768).cells == 337


def test_rabitq_is_rotated_unless_the_recipe_names_a_transform() -> None:
    assert resolve(IndexRecipe("IVF8,RaBitQ,Refine(vectors)"), 5000, 96).factory == "RR96,IVF8,RaBitQ"
    assert resolve(IndexRecipe("PCAR32,IVF8,RaBitQ2"), 5000, 96).factory == "PCAR32,IVF8,RaBitQ2"


def test_resolve_keeps_given_numbers() -> None:
    recipe = IndexRecipe("OPQ16_64,IVF32_HNSW8,PQ16", train_sample=2000, search={"nprobe": 3})
    plan = resolve(recipe, 5000, 128)
    assert (plan.factory, plan.train_sample, plan.search) == (
        "OPQ16_64,IVF32_HNSW8,PQ16",
        2000,
        {"nprobe": 3},
    )
    assert plan.notes == ()


def test_refinement_has_a_search_parameter() -> None:
    plan = resolve(IndexRecipe("IVF,PQ,Refine(SQfp16)"), 5000, 384)
    assert plan.factory == "IVF128,PQ96np,Refine(SQfp16)"
    assert plan.search == {"nprobe": 128, "refine": 10} == choose_search(plan.factory)
    plan = resolve(IndexRecipe("IVF,PQ,Refine(SQfp16)", search={"refine": 7}), 5000, 384)
    assert plan.search == {"nprobe": 128, "refine": 7}
    with pytest.raises(UsageError, match="refine is not a search parameter of this index: it takes nprobe"):
        IndexRecipe("IVF,PQ", search={"refine": 7})
    fallback = resolve(IndexRecipe("IVF,PQ,Refine(SQfp16)", search={"refine": 7}), 500, 384)
    assert (fallback.factory, fallback.search) == ("IVF8,Flat", {"nprobe": 8})


def test_vector_refinement_changes_no_byte() -> None:
    plain, refined = (resolve(IndexRecipe(text), 5000, 384) for text in ("IVF,PQ", "IVF,PQ,Refine(vectors)"))
    assert refined.index_inputs() == plain.index_inputs()
    assert refined.entry() == plain.entry() | {"refine": "vectors", "search": {"nprobe": 128, "refine": 10}}


@given(st.integers(1, 30_000_000))
def test_default_nprobe_with_refinement_grows_where_256_lists_are_too_few(n: int) -> None:
    plan = resolve(IndexRecipe("IVF,PQ,Refine(vectors)"), n, 64)
    if plan.refine:
        lists = count_lists(plan)
        assert min(256, lists) <= plan.search["nprobe"] <= max(256, lists // 5)
        assert lists > 1_024 or plan.search == {"nprobe": min(256, lists), "refine": 10}
    else:
        assert plan.search == {"nprobe": count_lists(plan)}, "too few vectors to train codes, so every list is searched"


def test_search_settings_change_no_byte() -> None:
    tuned = resolve(IndexRecipe("HNSW", recall_target=0.95, search={"efSearch": 7}), 5000, 384)
    assert tuned.recall_target == 0.95
    assert tuned.index_inputs() == resolve(IndexRecipe("HNSW"), 5000, 384).index_inputs()


def test_too_few_vectors_fall_back_with_a_note() -> None:
    plan = resolve(IndexRecipe("IVF1024,PQ8np"), 300, 32)
    assert plan.factory == "IVF7,Flat"
    assert len(plan.notes) == 2
    assert "too few to train IVF1024,PQ8np" in plan.notes[0]
    cells = resolve(IndexRecipe("HNSW16", cells=8), 300, 32)
    assert cells.cells == 4
    assert "too few for 8 cells" in cells.notes[0]


def test_indivisible_dimension_is_rotated() -> None:
    assert resolve(IndexRecipe("IVF,PQ"), 10_000, 97).factory == "OPQ24_96,IVF256,PQ24np"


def test_plan_is_json_and_its_entry_has_what_a_search_needs() -> None:
    recipe = IndexRecipe("IVF,PQ")
    plan = resolve(recipe, 5000, 384)
    assert json.loads(json.dumps(plan.to_json())) == plan.to_json()
    assert json.loads(json.dumps(asdict(recipe)))["factory"] == "IVF,PQ"
    assert plan.entry() == {
        "kind": "ivf",
        "over": "embeddings",
        "factory": "IVF128,PQ96np",
        "metric": "ip",
        "n": 5000,
        "d": 384,
        "search": {"nprobe": 16},
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"metric": "cosine"}, "choose ip"),
        ({"border": 1.5}, "0 <= border <= 1"),
        ({"linked": -0.5}, "linked >= 0"),
        ({"recall_target": 1.0}, "between 0 and 1"),
        ({"recall_target": 0.0}, "between 0 and 1"),
        ({"cells": 0}, "cells must be at least 1"),
        ({"ef_construction": 0}, "ef_construction"),
        ({"search": {"nprobe": 4}}, "it takes efSearch"),
        ({"search": {"efSearch": 0}}, "at least 1"),
    ],
)
def test_invalid_setting_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        IndexRecipe("HNSW32", **settings)


def test_resolve_refuses_impossible_recipes() -> None:
    with pytest.raises(InputError, match="at least one vector"):
        resolve(IndexRecipe("HNSW32"), 0, 32)
    with pytest.raises(UsageError, match="train_sample is 100"):
        resolve(IndexRecipe("IVF64,PQ8np", train_sample=100), 5000, 32)
    with pytest.raises(UsageError, match="PQ7 cannot cut"):
        resolve(IndexRecipe("IVF64,PQ7np"), 100, 32)
