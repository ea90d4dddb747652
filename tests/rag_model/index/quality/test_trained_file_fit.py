"""Trained files are kept as long as new vectors resemble the old ones."""

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
def train_and_fit(make_vectors: Make, write_parts: Make, tmp_path: Path) -> Callable[..., FitResult]:
    """Train on a corpus; return how it fits other vectors."""

    def run(factory: str, new_vectors: Any, metric: Any = "ip", cells: int = 6, n_unchanged: int = 0) -> FitResult:
        plan = resolve(IndexRecipe(factory, metric, cells=cells), 6000, 32)
        parts, trained = write_parts(make_vectors(6000)), tmp_path / "trained"
        kind: Any = get_kind(plan.kind)
        losses = kind.train(plan, parts, trained)["losses"]
        all_vectors = np.concatenate([new_vectors, make_vectors(6000)[:n_unchanged]])
        sample = FitSample(new_vectors, make_vectors(6000)[::7], all_vectors)
        fit: FitResult = kind.fit_samples(plan, trained, losses, sample)
        return fit

    return run


def rotate(vectors: Any) -> Any:
    return vectors @ np.linalg.qr(np.random.default_rng(3).normal(size=(32, 32)))[0].astype(np.float32)


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("factory", FACTORIES)
def test_similar_vectors_fit_and_rotated_ones_do_not(
    factory: str, metric: Any, train_and_fit: Callable[..., FitResult], make_vectors: Make
) -> None:
    plan = resolve(IndexRecipe(factory), 6000, 32)
    new_vectors = make_vectors(600, seed=11)
    fit, rotated_fit = train_and_fit(factory, new_vectors, metric), train_and_fit(factory, rotate(new_vectors), metric)
    assert fit.rows == rotated_fit.rows == 600
    assert fit.losses, "each structure has losses"
    assert fit.explain_misfit(plan.drift) is None, fit
    assert rotated_fit.explain_misfit(plan.drift) is not None, rotated_fit
    assert from_table(FitResult, asdict(rotated_fit), "a fit") == rotated_fit


def test_few_outliers_are_no_drift_and_many_are(train_and_fit: Callable[..., FitResult], make_vectors: Make) -> None:
    rotated_vectors = rotate(make_vectors(100, seed=11))
    few_fit = train_and_fit("HNSW8", rotated_vectors, n_unchanged=6000)
    many_fit = train_and_fit("HNSW8", rotated_vectors, n_unchanged=200)
    assert few_fit.explain_misfit(1.2) is None, few_fit
    assert str(many_fit.explain_misfit(1.2)).startswith("the loss of cells is "), many_fit


def test_fit_of_lists_compares_recall_of_new_and_old_vectors(
    train_and_fit: Callable[..., FitResult], make_vectors: Make
) -> None:
    new_recall, old_recall = train_and_fit("IVF16,PQ8np", make_vectors(600, seed=11)).recall or (0, 0)
    assert abs(new_recall - old_recall) < 0.1
    assert FitResult(600, {}, recall=(0.7, 0.9)).explain_missed_neighbors() == (
        "recall is 0.70 for 600 new vectors and 0.90 for old ones"
    )
    assert FitResult(600, {}, recall=(0.82, 0.9)).explain_missed_neighbors() is None, "within the sampling error"
    assert FitResult(31, {}, recall=(0.2, 0.9)).explain_missed_neighbors() is None, "too few vectors to judge"
    assert train_and_fit("HNSW8", make_vectors(600, seed=11)).recall is None


@pytest.mark.parametrize(("factory", "cells"), [("Flat", 1), ("HNSW8", 1)])
def test_untrained_kinds_always_fit(
    factory: str, cells: int, train_and_fit: Callable[..., FitResult], make_vectors: Make
) -> None:
    fit = train_and_fit(factory, rotate(make_vectors(600)), cells=cells)
    assert (dict(fit.losses), fit.explain_misfit(1.0)) == ({}, None)


def test_few_new_vectors_are_not_judged(train_and_fit: Callable[..., FitResult], make_vectors: Make) -> None:
    fit = train_and_fit("HNSW8", rotate(make_vectors(31)))
    loss, trained_loss = fit.losses["cells"]
    assert loss > 1.2 * trained_loss
    assert fit.explain_misfit(1.2) is None
    assert train_and_fit("HNSW8", np.empty((0, 32), np.float32)) == FitResult(0, {})


def test_imbalanced_cells_are_a_misfit() -> None:
    first = TrainingStats({"cells": 0.4}).with_imbalance(1.3)
    assert (first.imbalance, first.imbalance_now) == (1.3, 1.3)
    later = TrainingStats.from_json(asdict(first)).with_imbalance(1.7)
    assert (later.imbalance, later.imbalance_now, later.losses) == (1.3, 1.7, first.losses)
    assert later.explain_misfit(1.2) is None
    assert later.with_imbalance(1.9).explain_misfit(1.2) == "the largest cell has grown to 1.90 times the mean"
    assert TrainingStats({}).with_imbalance(6.0).explain_misfit(1.2) is None, (
        "no training can split a cell of equal vectors"
    )
    assert TrainingStats({}).with_imbalance(0.0).explain_misfit(1.2) is None, "lists have no cells"


@given(st.integers(0, 99), st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30), min_size=1))
def test_new_vectors_have_no_equal_bytes_in_the_parent(
    tmp_path_factory: pytest.TempPathFactory, seed: int, old_rows: set[int], current_rows: set[int]
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    table = np.random.default_rng(seed).normal(size=(31, 4)).astype(np.float16)
    for name, rows in (("old", old_rows), ("current", current_rows), ("unchanged", {0})):
        np.save(folder / name, table[sorted(rows)])
    sampled = sample_changes([(folder / "current.npy", [folder / "old.npy"])], [folder / "unchanged.npy"], seed)
    np.testing.assert_array_equal(sampled.new_vectors, table[sorted(current_rows - old_rows)].astype(np.float32))
    np.testing.assert_array_equal(sampled.old_vectors, table[[*sorted(current_rows & old_rows), 0]].astype(np.float32))
    np.testing.assert_array_equal(sampled.changed_vectors, table[sorted(current_rows)].astype(np.float32))


def test_sample_covers_a_new_part(write_parts: Make) -> None:
    vectors = np.random.default_rng(0).normal(size=(3 * SAMPLE_VECTORS, 4)).astype(np.float32)
    (part,) = write_parts(vectors)
    sampled = sample_changes([(part, [])], [], 1)
    assert len(sampled.new_vectors) == len(sampled.changed_vectors) == SAMPLE_VECTORS
    assert len(sampled.old_vectors) == 0
    np.testing.assert_array_equal(sampled.new_vectors, sample_changes([(part, [])], [], 1).new_vectors)


def test_drift_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match=r"drift is 0\.5"):
        IndexRecipe("HNSW", drift=0.5)
