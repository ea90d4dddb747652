"""The tuner finds the smallest setting that finds enough, and says so when none does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.errors import UsageError
from rag_model.index.exact_search import ExactIndex
from rag_model.index.files.engine import faiss
from rag_model.index.quality.results import compute_recall
from rag_model.index.quality.sweep import VectorQuerySet
from rag_model.index.quality.tune import _double_up_to, _find_smallest, tune_search
from rag_model.index.search import FaissFileIndex, open_index

Make = Callable[..., Any]  # fixtures of conftest.py
Built = Callable[[str], tuple[FaissFileIndex, VectorQuerySet]]


@pytest.fixture
def built(make_vectors: Make, write_parts: Make, tmp_path: Path) -> Built:
    """Build an index with plain faiss over 3,000 vectors; return it with a trial of 100 questions."""
    vectors, questions = make_vectors(3_000), make_vectors(100, seed=5)
    trial = VectorQuerySet.from_exact_search(ExactIndex(write_parts(vectors)), questions, 10)

    def build(factory: str) -> tuple[FaissFileIndex, VectorQuerySet]:
        index = faiss.index_factory(32, factory, faiss.METRIC_INNER_PRODUCT)
        index.train(vectors)
        index.add(vectors)
        faiss.write_index(index, str(tmp_path / "index.faiss"))
        return open_index(tmp_path / "index.faiss"), trial

    return build


def recall(index: FaissFileIndex, trial: VectorQuerySet, **search: int) -> float:
    found = index.search(trial.vectors, trial.k, **search)[1]
    return float(compute_recall(found, trial.rows, trial.scores, trial.k).mean())


@pytest.mark.parametrize(
    ("factory", "name", "target"),
    [
        ("HNSW4", "efSearch", 0.9),
        ("HNSW4", "efSearch", 0.97),
        ("IVF32,Flat", "nprobe", 0.8),
        ("IVF32,SQ8", "nprobe", 0.95),
    ],
)
def test_tune_returns_the_smallest_sufficient_setting(built: Built, factory: str, name: str, target: float) -> None:
    index, trial = built(factory)
    tuned = tune_search(index, trial, target)
    assert tuned.note == ""
    value = tuned.search[name]
    assert recall(index, trial, **{name: value}) == tuned.recall >= target
    assert value > 1
    assert recall(index, trial, **{name: value - 1}) < target
    assert tune_search(index, trial, target) == tuned


def test_unreachable_target_is_noted_and_approached(built: Built) -> None:
    index, trial = built("IVF32,PQ8x4np")
    tuned = tune_search(index, trial, 0.99)
    best = max(recall(index, trial, nprobe=value) for value in range(1, 33))
    value = tuned.search["nprobe"]
    assert best - 0.02 < tuned.recall == recall(index, trial, nprobe=value) < 0.99
    assert tuned.recall >= recall(index, trial, nprobe=32) - 0.005
    assert value < 32
    assert tuned.note.startswith("recall@10 of 0.99 cannot be reached, the best is ")
    assert f"so nprobe={value} is set, which finds {tuned.recall:.3f}: longer codes or a refinement" in tuned.note


@pytest.mark.parametrize("where", ["file", "vectors"])
def test_tune_chooses_the_cheapest_refine_factor(where: str, built: Built, tmp_path: Path) -> None:
    index, trial = built("IVF32,PQ8x4np" + (",Refine(Flat)" if where == "file" else ""))
    if where == "vectors":
        index = open_index(tmp_path / "index.faiss", vectors=[tmp_path / "part-00000.npy"])
    tuned = tune_search(index, trial, 0.99)
    assert tuned.note == ""
    assert recall(index, trial, **tuned.search) == tuned.recall >= 0.99
    look, lists = tuned.search["refine"], tuned.search["nprobe"]
    assert look > 1  # codes alone never get so far
    assert recall(index, trial, nprobe=lists - 1, refine=look) < 0.99
    for other in (look // 2, look * 2):  # neither a narrower nor a wider look is cheaper
        enough = [n for n in range(1, 33) if recall(index, trial, nprobe=n, refine=other) >= 0.99]
        assert not enough or enough[0] * 3_000 / 32 + 80 * other >= lists * 3_000 / 32 + 80 * look


def test_tune_skips_insufficient_refine_factors(built: Built) -> None:
    index, trial = built("IVF32,PQ8x4np,Refine(SQfp16)")
    tuned = tune_search(index, trial, 0.6)
    assert tuned.recall >= 0.6
    assert tuned.search["refine"] <= 2


def test_ef_search_is_at_least_k(built: Built) -> None:
    index, trial = built("HNSW16")
    assert tune_search(index, trial, 0.01).search == {"efSearch": 10}


def test_tune_of_flat_has_no_setting(built: Built) -> None:
    tuned = tune_search(*built("Flat"), 0.99)
    assert (tuned.search, tuned.recall, tuned.note) == ({}, 1.0, "")


@pytest.mark.parametrize("target", [0.0, 1.0, -1.0, float("nan")])
def test_target_out_of_range_is_refused(built: Built, target: float) -> None:
    with pytest.raises(UsageError, match="between 0 and 1"):
        tune_search(*built("Flat"), target)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=70), st.integers(1, 5), st.floats(0.01, 0.99))
def test_find_smallest_bisects_any_rising_recall(recalls: list[float], least: int, target: float) -> None:
    rising, calls = np.maximum.accumulate(recalls), []

    def look(value: int) -> float:
        calls.append(value)
        return float(rising[value - least])

    most = least + len(recalls) - 1
    enough = np.flatnonzero(rising >= target)
    assert _find_smallest(look, least, most, target) == (least + int(enough[0]) if len(enough) else None)
    assert len(set(calls)) <= 2 * len(_double_up_to(least, most)) + 1
    assert set(calls) <= set(range(least, most + 1))
