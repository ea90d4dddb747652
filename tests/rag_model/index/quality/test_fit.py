"""What was learnt is kept while new vectors are like the old ones, and not when they are not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.errors import UsageError
from rag_model.index.quality.fit import SAMPLE, Fit, Sampled, TrainingFit, measure, sample
from rag_model.index.recipe import IndexRecipe, resolve
from rag_model.index.registry import kind_named

Make = Callable[..., Any]  # fixtures of conftest.py
FACTORIES = ["HNSW8", "HNSW8_SQ8", "IVF16,PQ8np", "OPQ8,IVF16,PQ8np", "IVF16,SQ8", "IVF16,RaBitQ4", "IVF,Flat"]


@pytest.fixture
def fit_of(make_vectors: Make, write_parts: Make, tmp_path: Path) -> Callable[..., Fit]:
    """Train on a corpus; return how it fits other vectors."""

    def run(factory: str, new: Any, metric: Any = "ip", cells: int = 6, among: int = 0) -> Fit:
        plan = resolve(IndexRecipe(factory, metric, cells=cells), 6000, 32)
        parts, trained = write_parts(make_vectors(6000)), tmp_path / "trained"
        losses = kind_named(plan.kind).train(plan, parts, trained)["losses"]
        now = np.concatenate([new, make_vectors(6000)[:among]])
        return measure(kind_named(plan.kind), plan, trained, losses, Sampled(new, make_vectors(6000)[::7], now))

    return run


def rotated(vectors: Any) -> Any:
    return vectors @ np.linalg.qr(np.random.default_rng(3).normal(size=(32, 32)))[0].astype(np.float32)


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("factory", FACTORIES)
def test_more_of_the_same_fits_and_rotated_vectors_do_not(
    factory: str, metric: Any, fit_of: Callable[..., Fit], make_vectors: Make
) -> None:
    plan = resolve(IndexRecipe(factory), 6000, 32)
    more = make_vectors(600, seed=11)
    same, other = fit_of(factory, more, metric), fit_of(factory, rotated(more), metric)
    assert same.rows == other.rows == 600
    assert same.losses, "something is measured of each structure"
    assert same.reason(plan.drift) is None, same
    assert other.reason(plan.drift) is not None, other
    assert Fit.of(other.to_json()) == other


def test_one_strange_article_among_many_rows_is_no_drift_and_a_third_of_them_is(
    fit_of: Callable[..., Fit], make_vectors: Make
) -> None:
    strange = rotated(make_vectors(100, seed=11))
    few, many = fit_of("HNSW8", strange, among=6000), fit_of("HNSW8", strange, among=200)
    assert few.reason(1.2) is None, few
    assert str(many.reason(1.2)).startswith("cells lose "), many


def test_lists_are_asked_what_they_find(fit_of: Callable[..., Fit], make_vectors: Make) -> None:
    new, old = fit_of("IVF16,PQ8np", make_vectors(600, seed=11)).recall or (0, 0)
    assert abs(new - old) < 0.1
    assert Fit(600, {}, recall=(0.7, 0.9)).missed() == (
        "they found 0.70 of the neighbours of 600 new vectors and 0.90 of old ones'"
    )
    assert Fit(600, {}, recall=(0.82, 0.9)).missed() is None, "as near as chance puts it"
    assert Fit(31, {}, recall=(0.2, 0.9)).missed() is None, "so few that their mean is chance"
    assert fit_of("HNSW8", make_vectors(600, seed=11)).recall is None


@pytest.mark.parametrize(("factory", "cells"), [("Flat", 1), ("HNSW8", 1)])
def test_what_learns_nothing_fits_all(factory: str, cells: int, fit_of: Callable[..., Fit], make_vectors: Make) -> None:
    fit = fit_of(factory, rotated(make_vectors(600)), cells=cells)
    assert (dict(fit.losses), fit.reason(1.0)) == ({}, None)


def test_a_few_vectors_are_chance(fit_of: Callable[..., Fit], make_vectors: Make) -> None:
    few = fit_of("HNSW8", rotated(make_vectors(31)))
    now, before = few.losses["cells"]
    assert now > 1.2 * before
    assert few.reason(1.2) is None
    assert fit_of("HNSW8", np.empty((0, 32), np.float32)) == Fit(0, {})


def test_a_cell_that_outgrew_the_others_wears_the_cells_out() -> None:
    first = TrainingFit({"cells": 0.4}).used(1.3)
    assert (first.imbalance, first.imbalance_now) == (1.3, 1.3)
    later = TrainingFit.of(first.to_json()).used(1.7)
    assert (later.imbalance, later.imbalance_now, later.losses) == (1.3, 1.7, first.losses)
    assert later.reason(1.2) is None
    assert later.used(1.9).reason(1.2) == "the largest cell has grown to 1.90 times the mean"
    assert TrainingFit({}).used(6.0).reason(1.2) is None, (
        "equal vectors, which nothing splits, are not learnt anew for ever"
    )
    assert TrainingFit({}).used(0.0).reason(1.2) is None, "lists have no cells"


@given(seed=st.integers(0, 99), before=st.sets(st.integers(0, 30)), now=st.sets(st.integers(0, 30), min_size=1))
def test_new_vectors_are_those_whose_bytes_were_not_there(
    seed: int, before: set[int], now: set[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    table = np.random.default_rng(seed).normal(size=(31, 4)).astype(np.float16)
    for name, rows in (("before", before), ("now", now), ("same", {0})):
        np.save(folder / name, table[sorted(rows)])
    sampled = sample([(folder / "now.npy", [folder / "before.npy"])], [folder / "same.npy"], seed)
    np.testing.assert_array_equal(sampled.new, table[sorted(now - before)].astype(np.float32))
    np.testing.assert_array_equal(sampled.old, table[[*sorted(now & before), 0]].astype(np.float32))
    np.testing.assert_array_equal(sampled.now, table[sorted(now)].astype(np.float32))


def test_a_part_that_is_all_new_is_drawn_from(write_parts: Make) -> None:
    vectors = np.random.default_rng(0).normal(size=(3 * SAMPLE, 4)).astype(np.float32)
    (part,) = write_parts(vectors)
    sampled = sample([(part, [])], [], 1)
    assert (sampled.new.shape, sampled.old.shape, sampled.now.shape) == ((SAMPLE, 4), (0, 4), (SAMPLE, 4))
    np.testing.assert_array_equal(sampled.new, sample([(part, [])], [], 1).new)


def test_a_drift_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match=r"drift is 0\.5"):
        IndexRecipe("HNSW", drift=0.5)
