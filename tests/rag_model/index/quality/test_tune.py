"""The tuner chooses the smallest sufficient setting, or says that no setting is sufficient."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.errors import InputError, UsageError
from rag_model.index.exact_search import ExactIndex
from rag_model.index.files.engine import faiss
from rag_model.index.quality.results import compute_recall
from rag_model.index.quality.sweep import VectorQuerySet
from rag_model.index.quality.tune import _double_up_to, _find_smallest, read_queries, tune_search
from rag_model.index.search import FaissFileIndex, open_index

Make = Callable[..., Any]  # fixtures of conftest.py
Build = Callable[[str], tuple[FaissFileIndex, VectorQuerySet]]


@pytest.fixture
def build(make_vectors: Make, write_parts: Make, tmp_path: Path) -> Build:
    """Build an index with plain faiss over 3,000 vectors; return it with 100 queries."""
    vectors, questions = make_vectors(3_000), make_vectors(100, seed=5)
    query_set = VectorQuerySet.from_exact_search(ExactIndex(write_parts(vectors)), questions, 10)

    def build_index(factory: str) -> tuple[FaissFileIndex, VectorQuerySet]:
        index = faiss.index_factory(32, factory, faiss.METRIC_INNER_PRODUCT)
        index.train(vectors)
        index.add(vectors)
        faiss.write_index(index, str(tmp_path / "index.faiss"))
        return open_index(tmp_path / "index.faiss"), query_set

    return build_index


def measure_recall(index: FaissFileIndex, query_set: VectorQuerySet, **search: int) -> float:
    rows = index.search(query_set.vectors, query_set.k, **search)[1]
    return float(compute_recall(rows, query_set.rows, query_set.scores, query_set.k).mean())


@pytest.mark.parametrize(
    ("factory", "name", "target"),
    [
        ("HNSW4", "efSearch", 0.9),
        ("HNSW4", "efSearch", 0.97),
        ("IVF32,Flat", "nprobe", 0.8),
        ("IVF32,SQ8", "nprobe", 0.95),
    ],
)
def test_tune_returns_the_smallest_sufficient_setting(build: Build, factory: str, name: str, target: float) -> None:
    index, query_set = build(factory)
    tuned = tune_search(index, query_set, target)
    assert tuned.note == ""
    value = tuned.search[name]
    assert measure_recall(index, query_set, **{name: value}) == tuned.recall >= target
    assert value > 1
    assert measure_recall(index, query_set, **{name: value - 1}) < target
    assert tune_search(index, query_set, target) == tuned


def test_unreachable_target_is_noted_and_approached(build: Build) -> None:
    index, query_set = build("IVF32,PQ8x4np")
    tuned = tune_search(index, query_set, 0.99)
    best = max(measure_recall(index, query_set, nprobe=value) for value in range(1, 33))
    value = tuned.search["nprobe"]
    assert best - 0.02 < tuned.recall == measure_recall(index, query_set, nprobe=value) < 0.99
    assert tuned.recall >= measure_recall(index, query_set, nprobe=32) - 0.005
    assert value < 32
    assert tuned.note.startswith("recall@10 of 0.99 cannot be reached, the best is ")
    assert f"so nprobe={value} is set, which finds {tuned.recall:.3f}: longer codes or a refinement" in tuned.note


@pytest.mark.parametrize("where", ["file", "vectors"])
def test_tune_chooses_the_cheapest_refine_factor(where: str, build: Build, tmp_path: Path) -> None:
    index, query_set = build("IVF32,PQ8x4np" + (",Refine(Flat)" if where == "file" else ""))
    if where == "vectors":
        index = open_index(tmp_path / "index.faiss", vectors=[tmp_path / "part-00000.npy"])
    tuned = tune_search(index, query_set, 0.99)
    assert tuned.note == ""
    assert measure_recall(index, query_set, **tuned.search) == tuned.recall >= 0.99
    factor, probes = tuned.search["refine"], tuned.search["nprobe"]
    assert factor > 1  # codes alone do not reach this recall
    assert measure_recall(index, query_set, nprobe=probes - 1, refine=factor) < 0.99
    for other_factor in (factor // 2, factor * 2):  # neither fewer nor more candidates are cheaper
        recalls = [measure_recall(index, query_set, nprobe=n, refine=other_factor) for n in range(1, 33)]
        costs = [n * 3_000 / 32 + 80 * other_factor for n, recall in enumerate(recalls, start=1) if recall >= 0.99]
        assert min(costs, default=np.inf) >= probes * 3_000 / 32 + 80 * factor


def test_tune_skips_insufficient_refine_factors(build: Build) -> None:
    index, query_set = build("IVF32,PQ8x4np,Refine(SQfp16)")
    tuned = tune_search(index, query_set, 0.6)
    assert tuned.recall >= 0.6
    assert tuned.search["refine"] <= 2


def test_ef_search_is_at_least_k(build: Build) -> None:
    index, query_set = build("HNSW16")
    assert tune_search(index, query_set, 0.01).search == {"efSearch": 10}


def test_tuned_refined_graph_reaches_recall_target_at_smaller_depths(build: Build, tmp_path: Path) -> None:
    _, query_set = build("HNSW4_SQ4")
    vectors = [tmp_path / "part-00000.npy"]
    index = open_index(tmp_path / "index.faiss", vectors=vectors)
    tuned = tune_search(index, query_set, 0.95)
    assert tuned.note == ""
    assert tuned.search["refine"] > 1  # codes alone do not reach this recall
    assert tuned.search["efSearch"] >= query_set.k * tuned.search["refine"]
    shallow_query_set = VectorQuerySet.from_exact_search(ExactIndex(vectors), query_set.vectors, 5)
    assert measure_recall(index, shallow_query_set, **tuned.search) >= 0.95 - 0.01


def test_tune_of_flat_has_no_setting(build: Build) -> None:
    tuned = tune_search(*build("Flat"), 0.99)
    assert (tuned.search, tuned.recall, tuned.note) == ({}, 1.0, "")


@pytest.mark.parametrize("target", [0.0, 1.0, -1.0, float("nan")])
def test_target_out_of_range_is_refused(build: Build, target: float) -> None:
    with pytest.raises(UsageError, match="between 0 and 1"):
        tune_search(*build("Flat"), target)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=70), st.integers(1, 5), st.floats(0.01, 0.99))
def test_find_smallest_bisects_any_rising_recall(recalls: list[float], smallest: int, target: float) -> None:
    rising_recalls, calls = np.maximum.accumulate(recalls), []

    def measure(value: int) -> float:
        calls.append(value)
        return float(rising_recalls[value - smallest])

    largest = smallest + len(recalls) - 1
    sufficient = (np.flatnonzero(rising_recalls >= target) + smallest).tolist()
    assert _find_smallest(measure, smallest, largest, target) == (sufficient[0] if sufficient else None)
    assert len(set(calls)) <= 2 * len(_double_up_to(smallest, largest)) + 1
    assert set(calls) <= set(range(smallest, largest + 1))


def test_queries_of_all_row_groups_are_read(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((1000, 8)).astype(np.float32)
    column = pa.FixedSizeListArray.from_arrays(vectors.ravel(), 8)
    pq.write_table(pa.table({"vector": column}), tmp_path / "queries.parquet", row_group_size=100)
    np.testing.assert_array_equal(read_queries(tmp_path / "queries.parquet", 8), vectors)
    assert len(read_queries(tmp_path / "queries.parquet", 8, limit=250)) == 250
    np.save(tmp_path / "queries.npy", np.where(np.arange(1000)[:, None] == 7, np.nan, vectors))
    with pytest.raises(InputError, match=r"row 7 of .*: correct the file$"):
        read_queries(tmp_path / "queries.npy", 8)
