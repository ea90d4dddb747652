from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.errors import InputError, UsageError
from rag_model.index import exact_search
from rag_model.index.build import build_index as build
from rag_model.index.exact_search import ExactIndex, search_neighbors, update_neighbors
from rag_model.index.files import vectors as vectors_module
from rag_model.index.files.engine import faiss, view_array
from rag_model.index.files.vectors import find_equal_rows
from rag_model.index.kind import get_kind_for_factory
from rag_model.index.quality.results import compute_p5, compute_recall
from rag_model.index.quality.sweep import VectorQuerySet, sweep_settings
from rag_model.index.quality.tune import tune_search
from rag_model.index.recipe import IndexRecipe
from rag_model.index.search import open_index, write_default_search

Make = Callable[..., Any]  # fixtures of conftest.py
FACTORIES = ["HNSW8", "IVF16,PQ8x4np", "OPQ8,IVF16_HNSW8,PQ8x4np", "IVF16,RaBitQ4", "Flat"]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_neighbors_updated_for_many_generations_equal_exact_search(
    data: st.DataObject, make_vectors: Make, tmp_path: Path
) -> None:
    """Rows are removed, added, repeated and moved; queries change; two parts become one."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1_000)))
    metric, depth, width = data.draw(st.sampled_from(["ip", "l2"])), 6, data.draw(st.integers(6, 14))
    corpus = make_vectors(120, seed=int(rng.integers(1_000)))
    queries = make_vectors(9, seed=7)
    paths = [tmp_path / "0.npy", tmp_path / "1.npy"]
    for path, rows in zip(paths, np.split(corpus, [50]), strict=True):
        np.save(path, rows)
    lists = [search_neighbors(ExactIndex([path], metric), queries, width) for path in paths]
    for generation in range(12):
        is_alive = rng.random(len(corpus)) > data.draw(st.sampled_from([0.0, 0.02, 0.3]))
        added = make_vectors(int(rng.integers(0, 8)), seed=generation + 100)
        repeated = corpus[rng.integers(0, len(corpus), int(rng.integers(0, 4)))]
        corpus = np.concatenate([corpus[is_alive], added, repeated])[: data.draw(st.sampled_from([500, 500, 60, 4]))]
        corpus = corpus[rng.permutation(len(corpus))]
        order = rng.permutation(len(queries))
        is_same = rng.random(len(queries)) > 0.1
        queries = np.where(is_same[:, None], queries[order], make_vectors(len(queries), seed=generation + 500))
        np.save(tmp_path / "new.npy", corpus)
        index = ExactIndex([tmp_path / "new.npy"], metric)
        equal_rows = [find_equal_rows(path, tmp_path / "new.npy") for path in paths]
        known_lists = [part_lists.select(np.where(is_same, order, -1)) for part_lists in lists]
        updated = update_neighbors(index, queries, list(zip(known_lists, equal_rows, strict=True)), depth, width)
        products = queries.astype(np.float64) @ corpus.astype(np.float64).T
        exact = products if metric == "ip" else -np.square(queries[:, None] - corpus).sum(axis=2)
        k = min(depth, len(corpus))
        np.testing.assert_allclose(updated.scores[:, :k], -np.sort(-exact, axis=1)[:, :k], rtol=0, atol=1e-5)
        np.testing.assert_allclose(np.take_along_axis(exact, updated.rows[:, :k], 1), updated.scores[:, :k], atol=1e-5)
        assert [len({*rows} - {-1}) for rows in updated.rows.tolist()] == (updated.rows >= 0).sum(axis=1).tolist()
        (tmp_path / "new.npy").rename(tmp_path / "0.npy")
        paths, lists = [tmp_path / "0.npy"], [updated]


def test_neighbors_stay_exact_after_whole_neighborhoods_are_replaced(make_vectors: Make, tmp_path: Path) -> None:
    """First, more new rows are near than a list has places; then the best rows are replaced by farther ones."""
    query, corpus, lists = make_vectors(1, seed=7), make_vectors(120, seed=8), []
    for generation, (n_removed, added_scores) in enumerate([
        (0, []), (8, np.linspace(2, 3, 40)), (2, [1.5, 1.6, 1.7]), (2, []),
    ]):  # fmt: skip
        best_first = np.argsort(-(corpus @ query[0]))
        added = query / np.square(query).sum() * np.reshape(added_scores, (-1, 1))
        corpus = np.concatenate([corpus[best_first[n_removed:]], added]).astype(np.float32)
        path = tmp_path / f"{generation}.npy"
        np.save(path, corpus)
        index = ExactIndex([path], "ip")
        if generation:
            equal_rows = find_equal_rows(tmp_path / f"{generation - 1}.npy", path)
            lists = [update_neighbors(index, query, [(lists[0], equal_rows)], depth=6, width=8)]
        else:
            lists = [search_neighbors(index, query, 8)]
        np.testing.assert_allclose(lists[0].scores[0, :6], -np.sort(-(corpus @ query[0]))[:6], rtol=1e-5)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_exact_search_equals_numpy(
    data: st.DataObject, make_vectors: Make, write_parts: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any cut, block size and metric, the scores are those of a full sort, and the rows have them."""
    n, metric = data.draw(st.integers(1, 120)), data.draw(st.sampled_from(["ip", "l2"]))
    monkeypatch.setattr(vectors_module, "BLOCK_BYTES", 4 * 32 * data.draw(st.integers(1, 50)))
    corpus, queries = make_vectors(n, seed=data.draw(st.integers(0, 3))), make_vectors(3, seed=9)
    corpus[data.draw(st.lists(st.integers(0, n - 1)))] = corpus[0]
    parts = write_parts(corpus, sorted(data.draw(st.lists(st.integers(0, n), max_size=3))))
    k = data.draw(st.integers(1, n))
    scores, rows = ExactIndex(parts, metric).search(queries, k)
    distances = np.square(queries[:, None] - corpus[None]).sum(axis=2)
    truth = queries @ corpus.T if metric == "ip" else -distances
    np.testing.assert_allclose(scores, -np.sort(-truth, axis=1)[:, :k], atol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(truth, rows, 1), scores, atol=1e-5)
    assert all(len(set(hits)) == k for hits in rows.tolist())


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("factory", FACTORIES)
def test_index_file_returns_the_same_rows_as_faiss(
    factory: str, mmap: bool, make_vectors: Make, write_parts: Make, build_index: Make
) -> None:
    path, plan = build_index(write_parts(make_vectors(1500), [700]), IndexRecipe(factory))
    queries = make_vectors(30, seed=5)
    index = open_index(path, mmap=mmap, defaults=plan.search)
    assert (index.n, index.dim, index.metric, index.structure) == (1500, 32, "ip", plan.kind)
    scores, rows = index.search(queries, 10)
    assert (scores.dtype, rows.dtype) == (np.float32, np.int64)
    plain_scores, plain_rows = faiss.read_index(str(path)).search(queries, 10)
    np.testing.assert_array_equal(rows, plain_rows)
    np.testing.assert_array_equal(scores[rows >= 0], plain_scores[rows >= 0])


@pytest.mark.parametrize("factory", FACTORIES)
def test_l2_scores_are_negated_distances(
    factory: str, make_vectors: Make, write_parts: Make, build_index: Make
) -> None:
    path, _ = build_index(write_parts(make_vectors(1500)), IndexRecipe(factory, "l2"))
    scores, _ = open_index(path).search(make_vectors(20, seed=5), 10)
    assert np.all(scores <= 1e-6)
    assert np.all(np.diff(scores, axis=1) <= 0)


def test_search_parameters_apply_to_one_call(make_vectors: Make, write_parts: Make, build_index: Make) -> None:
    path, _ = build_index(write_parts(make_vectors(3000)), IndexRecipe("IVF32,Flat"))
    index, queries = open_index(path), make_vectors(40, seed=5)
    rows_by_probes = {probes: index.search(queries, 10, nprobe=probes)[1] for probes in (1, 4, 32)}
    assert not np.array_equal(rows_by_probes[1], rows_by_probes[32])
    with ThreadPoolExecutor(4) as pool:
        futures = [(n, pool.submit(index.search, queries, 10, nprobe=n)) for n in (1, 32, 4) * 10]
    for probes, future in futures:
        np.testing.assert_array_equal(future.result()[1], rows_by_probes[probes])


REFINED = ["IVF16,PQ8x4np,Refine(SQfp16)", "OPQ8,IVF16_HNSW8,PQ8x4np,Refine(SQ8)", "IVF16,RaBitQ,Refine(Flat)"]
REFINED += ["IVF16,PQ8x4np,Refine(vectors)", "OPQ8,IVF16,RaBitQ,Refine(vectors)"]


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("factory", REFINED)
def test_refinement_improves_recall_of_codes(
    factory: str, metric: Any, make_vectors: Make, write_parts: Make, build_index: Make
) -> None:
    parts = write_parts(make_vectors(1500, unit=False), [700, 700])
    path, plan = build_index(parts, IndexRecipe(factory, metric))
    index = open_index(path, defaults=plan.search, vectors=parts if plan.refine else ())
    queries = make_vectors(40, seed=5)
    scores, exact = ExactIndex(parts, metric).search(queries, 10)
    recalls = []
    for factor in (1, 4, 40):
        refined_scores, rows = index.search(queries, 10, nprobe=16, refine=factor)
        assert np.all(np.diff(refined_scores, axis=1) <= 0)
        recalls.append(float(compute_recall(rows, exact, scores, 10).mean()))
    assert recalls == sorted(recalls)
    assert recalls[0] < 0.9 < recalls[2]
    narrow = compute_recall(index.search(queries, 10, nprobe=1, refine=40)[1], exact, scores, 10).mean()
    assert narrow < recalls[2]
    np.testing.assert_allclose(refined_scores[:, 0], scores[:, 0], rtol=0.02)
    np.testing.assert_array_equal(index.search(queries, 10)[1], index.search(queries, 10, **plan.search)[1])


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_reranked_scores_are_exact(
    metric: Any, make_vectors: Make, write_parts: Make, build_index: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reranking all candidates returns the rows of exact search, with any block size."""
    parts = write_parts(make_vectors(1500), [700])
    path, _ = build_index(parts, IndexRecipe("IVF16,PQ8x4np,Refine(vectors)", metric))
    index, queries = open_index(path, vectors=parts), make_vectors(9, seed=5)
    truth = ExactIndex(parts, metric).search(queries, 20)
    for size in (1, 4 * 32 * 3000, 32 << 20):
        monkeypatch.setattr(exact_search, "BLOCK_BYTES", size)
        scores, rows = index.search(queries, 20, nprobe=16, refine=75)
        np.testing.assert_array_equal(rows, truth[1])
        np.testing.assert_allclose(scores, truth[0], atol=1e-5)
    assert (index.search(queries, 1000, nprobe=1)[1] >= 0).all()
    assert index.search(queries[:0], 5)[1].shape == (0, 5)


def test_open_refuses_vectors_of_another_corpus(make_vectors: Make, write_parts: Make, build_index: Make) -> None:
    path, _ = build_index(write_parts(make_vectors(300)), IndexRecipe("IVF8,Flat"))
    with pytest.raises(InputError, match="299 x 32, not the plan's 300 x 32"):
        open_index(path, vectors=write_parts(make_vectors(299)))


@pytest.mark.parametrize(
    ("factory", "parameters"),
    [
        ("HNSW8", {"efSearch": 77}),
        ("HNSW8_SQ8", {"efSearch": 2}),
        ("IVF16,PQ8x4np", {"nprobe": 5}),
        ("OPQ8,IVF16_HNSW8,PQ8x4np", {"nprobe": 5}),
        ("PCA16,IVF16,SQ8,Refine(SQfp16)", {"nprobe": 300, "refine": 9}),
        ("IVF16,RaBitQ,Refine(Flat)", {"refine": 9}),
        ("Flat", {}),
    ],
)
def test_default_search_is_written_in_place(
    factory: str, parameters: dict[str, int], make_vectors: Make, write_parts: Make, build_index: Make
) -> None:
    path, _ = build_index(write_parts(make_vectors(1100), [500]), IndexRecipe(factory))
    old_data, index = path.read_bytes(), faiss.read_index(str(path))
    write_default_search(path, parameters)
    for name, value in parameters.items():
        if name == "efSearch":
            index.hnsw.efSearch = value
        elif name == "nprobe":
            faiss.extract_index_ivf(index).nprobe = value
        else:
            index.k_factor = value
    assert path.read_bytes() == faiss.serialize_index(index).tobytes()
    assert (path.read_bytes() != old_data) == bool(parameters)
    assert open_index(path).defaults | parameters == open_index(path).defaults
    with pytest.raises(UsageError, match="not a search parameter"):
        write_default_search(path, {"ef": 3})


def test_default_search_is_not_written_into_an_unknown_layout(tmp_path: Path, make_vectors: Make) -> None:
    """`IHc2` has one more field, so efSearch is at another offset."""
    index = faiss.IndexHNSWCagra(32, 8)
    index.train(make_vectors(100))
    index.add(make_vectors(100))
    faiss.write_index(index, str(tmp_path / "cagra"))
    old_data = (tmp_path / "cagra").read_bytes()
    with pytest.raises(InputError, match="holds faiss's IHc2, which bookwheel cannot search"):
        write_default_search(tmp_path / "cagra", {"efSearch": 50})
    assert (tmp_path / "cagra").read_bytes() == old_data


def test_unreachable_rows_are_replaced_by_minus_one(tmp_path: Path, make_vectors: Make) -> None:
    """Only graphs that another program wrote have such rows."""
    graph = faiss.IndexHNSWFlat(32, 8, faiss.METRIC_INNER_PRODUCT)
    graph.add(make_vectors(500))
    links = view_array(graph.hnsw.neighbors)
    isolated = next(row for row in range(500) if row != graph.hnsw.entry_point)
    links[links == isolated] = graph.hnsw.entry_point
    faiss.write_index(graph, str(tmp_path / "graph"))
    scores, rows = open_index(tmp_path / "graph").search(make_vectors(5), 500)
    assert [set(range(500)) - set(hits) for hits in rows.tolist()] == [{isolated}] * 5
    assert np.all(np.isneginf(scores) == (rows == -1))


DEEP = ["HNSW8", "HNSW16_SQ8", "IVF32,Flat", "IVF32,SQ8", "IVF8,PQ16np", "IVF64,PQ16np", "Flat"]
DEEP += ["HNSW16_SQ4,Refine(vectors)", "IVF32,PQ8x4np,Refine(vectors)", "IVF32,PQ8x4np,Refine(SQfp16)"]
DEEP += ["OPQ16,IVF32_HNSW8,PQ16np,Refine(vectors)"]


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("factory", DEEP)
def test_a_search_of_any_depth_is_full_and_has_the_recall_of_the_gate(
    factory: str, metric: Any, make_vectors: Make, write_parts: Make, build_index: Make
) -> None:
    n = 1_000
    parts = write_parts(make_vectors(n), [300])
    path, plan = build_index(parts, IndexRecipe(factory, metric))
    vectors = parts if plan.refine else ()
    floor, queries = get_kind_for_factory(factory).floor(factory), make_vectors(50, seed=5)
    exact = ExactIndex(parts, metric)
    exact_scores, exact_rows = exact.search(queries, n)
    # The smallest settings that pass the gate at its depth.
    query_set = VectorQuerySet.from_exact_search(exact, make_vectors(100, seed=6), 20)
    tuned = tune_search(open_index(path, vectors=vectors), query_set, 0.98).search
    index = open_index(path, defaults=tuned, vectors=vectors)
    for k in (1, 5, 20, 21, 60, 100, 250, 500, 750, n - 1, n):
        scores, rows = index.search(queries, k)
        assert (rows >= 0).all()
        assert all(len(set(hits)) == k for hits in rows.tolist())
        assert np.all(np.diff(scores, axis=1) <= 0)
        if k >= 20:  # the depth of the gate
            recalls = compute_recall(rows, exact_rows, exact_scores, k)
            reaches_floor = recalls.mean() >= floor.mean, compute_p5(recalls) >= floor.p5
            assert reaches_floor == (True, True), (k, tuned, recalls.mean(), compute_p5(recalls))


@pytest.mark.parametrize("factory", ["HNSW8", "IVF32,Flat", "IVF32,PQ8x4np,Refine(vectors)"])
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_smallest_setting_still_finds_k_rows(
    data: st.DataObject, factory: str, make_vectors: Make, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also if most vectors are in a few lists, and the query is far away from them."""
    n = data.draw(st.integers(80, 300))
    folder = tmp_path_factory.mktemp("index")
    corpus = make_vectors(n, seed=data.draw(st.integers(0, 3)))
    corpus[: data.draw(st.integers(0, n - 40))] = corpus[0]
    np.save(folder / "part.npy", corpus)
    plan = build(corpus, folder / "index", IndexRecipe(factory))
    index = open_index(folder / "index", vectors=[folder / "part.npy"] if plan.refine else ())
    smallest = dict.fromkeys(index.defaults, 1)
    k = data.draw(st.integers(1, n))
    rows = index.search(make_vectors(4, seed=9), k, **smallest)[1]
    assert all(len(set(hits) - {-1}) == k for hits in rows.tolist())


@pytest.mark.parametrize("factory", ["HNSW8", "IVF8,Flat", "exact"])
def test_invalid_queries_are_refused(factory: str, make_vectors: Make, write_parts: Make, build_index: Make) -> None:
    parts = write_parts(make_vectors(300))
    index: Any = ExactIndex(parts)
    if factory != "exact":
        index = open_index(build_index(parts, IndexRecipe(factory))[0])
    queries = make_vectors(2)
    with pytest.raises(UsageError, match="k is 301 but the index holds 300 vectors"):
        index.search(queries, 301)
    with pytest.raises(UsageError, match="k is 0"):
        index.search(queries, 0)
    with pytest.raises(UsageError, match=r"shape \(2, 31\)"):
        index.search(queries[:, :31], 5)
    with pytest.raises(UsageError, match="efsearch is not a search parameter"):
        index.search(queries, 5, efsearch=10)
    queries[1, 3] = np.nan
    with pytest.raises(UsageError, match="vector 1 of the query"):
        index.search(queries, 5)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("factory", [*FACTORIES, "IVF16,PQ8x4np,Refine(SQ8)"])
def test_truncated_file_is_refused(
    factory: str, mmap: bool, make_vectors: Make, write_parts: Make, build_index: Make
) -> None:
    path, _ = build_index(write_parts(make_vectors(1100)), IndexRecipe(factory))
    data = path.read_bytes()
    for size in [*range(0, len(data), len(data) // 40), *range(len(data) - 9, len(data))]:
        path.write_bytes(data[:size])
        with pytest.raises(InputError) as error:
            open_index(path, mmap=mmap)
        assert str(path) in str(error.value)
        assert "faiss::" not in str(error.value)


def test_unsupported_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="build it first"):
        open_index(tmp_path / "missing.faiss")
    (tmp_path / "text.faiss").write_text("no index" * 100)
    with pytest.raises(InputError, match="not a complete faiss index"):
        open_index(tmp_path / "text.faiss")
    faiss.write_index(faiss.IndexFlat(8, faiss.METRIC_L1), str(tmp_path / "l1.faiss"))
    with pytest.raises(InputError, match="holds faiss's metric 2, which bookwheel cannot search"):
        open_index(tmp_path / "l1.faiss")
    faiss.write_index(faiss.IndexLSH(8, 16), str(tmp_path / "lsh.faiss"))
    with pytest.raises(InputError, match="holds faiss's IxHe, which bookwheel cannot search"):
        open_index(tmp_path / "lsh.faiss")


@pytest.mark.parametrize(
    ("factory", "first_setting"), [("HNSW8", "efSearch=16"), ("IVF32,Flat", "nprobe=1"), ("Flat", "exact")]
)
def test_recall_rises_with_the_setting(
    factory: str, first_setting: str, make_vectors: Make, write_parts: Make, build_index: Make
) -> None:
    parts = write_parts(make_vectors(2000))
    index = open_index(build_index(parts, IndexRecipe(factory))[0])
    efforts = sweep_settings(index, VectorQuerySet.from_exact_search(ExactIndex(parts), make_vectors(50, seed=3), 10))
    work = [effort.distances for effort in efforts]
    recall = [effort.recall_mean for effort in efforts]
    assert work == sorted(work)
    assert recall == sorted(recall)
    assert recall[-1] > 0.99
    assert all(0 <= effort.recall_p5 <= 1 and effort.milliseconds > 0 for effort in efforts)
    assert efforts[0].setting == first_setting
    if factory != "Flat":
        assert work[0] < work[-1]
