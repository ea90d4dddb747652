"""What was learnt is kept while new vectors are like the old ones, and not when they are not."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.errors import UsageError
from rag_model.index.kind import get_kind
from rag_model.index.quality.health import SAMPLE_VECTORS, FitSample, sample_changes
from rag_model.index.quality.results import FitResult, TrainingStats
from rag_model.index.recipe import IndexRecipe, resolve
from rag_model.toml import from_table

Make = Callable[..., Any]  # fixtures of conftest.py
FACTORIES = ["HNSW8", "HNSW8_SQ8", "IVF16,PQ8np", "OPQ8,IVF16,PQ8np", "IVF16,SQ8", "IVF16,RaBitQ4", "IVF,Flat"]


@pytest.fixture
def fit_of(make_vectors: Make, write_parts: Make, tmp_path: Path) -> Callable[..., FitResult]:
    """Train on a corpus; return how it fits other vectors."""

    def run(factory: str, new: Any, metric: Any = "ip", cells: int = 6, among: int = 0) -> FitResult:
        plan = resolve(IndexRecipe(factory, metric, cells=cells), 6000, 32)
        parts, trained = write_parts(make_vectors(6000)), tmp_path / "trained"
        kind: Any = get_kind(plan.kind)
        losses = kind.train(plan, parts, trained)["losses"]
        now = np.concatenate([new, make_vectors(6000)[:among]])
        fit: FitResult = kind.fit_samples(plan, trained, losses, FitSample(new, make_vectors(6000)[::7], now))
        return fit

    return run


def rotated(vectors: Any) -> Any:
    return vectors @ np.linalg.qr(np.random.default_rng(3).normal(size=(32, 32)))[0].astype(np.float32)


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("factory", FACTORIES)
def test_similar_vectors_fit_and_rotated_ones_do_not(
    factory: str, metric: Any, fit_of: Callable[..., FitResult], make_vectors: Make
) -> None:
    plan = resolve(IndexRecipe(factory), 6000, 32)
    more = make_vectors(600, seed=11)
    same, other = fit_of(factory, more, metric), fit_of(factory, rotated(more), metric)
    assert same.rows == other.rows == 600
    assert same.losses, "something is measured of each structure"
    assert same.explain_misfit(plan.drift) is None, same
    assert other.explain_misfit(plan.drift) is not None, other
    assert from_table(FitResult, asdict(other), "a fit") == other


def test_few_outliers_are_no_drift_and_many_are(fit_of: Callable[..., FitResult], make_vectors: Make) -> None:
    strange = rotated(make_vectors(100, seed=11))
    few, many = fit_of("HNSW8", strange, among=6000), fit_of("HNSW8", strange, among=200)
    assert few.explain_misfit(1.2) is None, few
    assert str(many.explain_misfit(1.2)).startswith("the loss of cells is "), many


def test_fit_of_lists_compares_recall_of_new_and_old_vectors(
    fit_of: Callable[..., FitResult], make_vectors: Make
) -> None:
    new, old = fit_of("IVF16,PQ8np", make_vectors(600, seed=11)).recall or (0, 0)
    assert abs(new - old) < 0.1
    assert FitResult(600, {}, recall=(0.7, 0.9)).explain_missed_neighbors() == (
        "recall is 0.70 for 600 new vectors and 0.90 for old ones"
    )
    assert FitResult(600, {}, recall=(0.82, 0.9)).explain_missed_neighbors() is None, "as near as chance puts it"
    assert FitResult(31, {}, recall=(0.2, 0.9)).explain_missed_neighbors() is None, "so few that their mean is chance"
    assert fit_of("HNSW8", make_vectors(600, seed=11)).recall is None


@pytest.mark.parametrize(("factory", "cells"), [("Flat", 1), ("HNSW8", 1)])
def test_untrained_kinds_always_fit(
    factory: str, cells: int, fit_of: Callable[..., FitResult], make_vectors: Make
) -> None:
    fit = fit_of(factory, rotated(make_vectors(600)), cells=cells)
    assert (dict(fit.losses), fit.explain_misfit(1.0)) == ({}, None)


def test_few_new_vectors_are_not_judged(fit_of: Callable[..., FitResult], make_vectors: Make) -> None:
    few = fit_of("HNSW8", rotated(make_vectors(31)))
    now, before = few.losses["cells"]
    assert now > 1.2 * before
    assert few.explain_misfit(1.2) is None
    assert fit_of("HNSW8", np.empty((0, 32), np.float32)) == FitResult(0, {})


def test_imbalanced_cells_are_a_misfit() -> None:
    first = TrainingStats({"cells": 0.4}).with_imbalance(1.3)
    assert (first.imbalance, first.imbalance_now) == (1.3, 1.3)
    later = TrainingStats.from_json(asdict(first)).with_imbalance(1.7)
    assert (later.imbalance, later.imbalance_now, later.losses) == (1.3, 1.7, first.losses)
    assert later.explain_misfit(1.2) is None
    assert later.with_imbalance(1.9).explain_misfit(1.2) == "the largest cell has grown to 1.90 times the mean"
    assert TrainingStats({}).with_imbalance(6.0).explain_misfit(1.2) is None, (
        "equal vectors, which nothing splits, are not learnt anew for ever"
    )
    assert TrainingStats({}).with_imbalance(0.0).explain_misfit(1.2) is None, "lists have no cells"


@given(seed=st.integers(0, 99), before=st.sets(st.integers(0, 30)), now=st.sets(st.integers(0, 30), min_size=1))
def test_new_vectors_have_no_equal_bytes_in_the_parent(
    seed: int, before: set[int], now: set[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    table = np.random.default_rng(seed).normal(size=(31, 4)).astype(np.float16)
    for name, rows in (("before", before), ("now", now), ("same", {0})):
        np.save(folder / name, table[sorted(rows)])
    sampled = sample_changes([(folder / "now.npy", [folder / "before.npy"])], [folder / "same.npy"], seed)
    np.testing.assert_array_equal(sampled.new_vectors, table[sorted(now - before)].astype(np.float32))
    np.testing.assert_array_equal(sampled.old_vectors, table[[*sorted(now & before), 0]].astype(np.float32))
    np.testing.assert_array_equal(sampled.changed_vectors, table[sorted(now)].astype(np.float32))


def test_sample_covers_a_new_part(write_parts: Make) -> None:
    vectors = np.random.default_rng(0).normal(size=(3 * SAMPLE_VECTORS, 4)).astype(np.float32)
    (part,) = write_parts(vectors)
    sampled = sample_changes([(part, [])], [], 1)
    assert (sampled.new_vectors.shape, sampled.old_vectors.shape, sampled.changed_vectors.shape) == (
        (SAMPLE_VECTORS, 4),
        (0, 4),
        (SAMPLE_VECTORS, 4),
    )
    np.testing.assert_array_equal(sampled.new_vectors, sample_changes([(part, [])], [], 1).new_vectors)


def test_drift_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match=r"drift is 0\.5"):
        IndexRecipe("HNSW", drift=0.5)
