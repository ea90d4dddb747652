from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rag_model.errors import InputError
from rag_model.index.build import iter_slices, run_stages
from rag_model.index.exact_search import ExactIndex
from rag_model.index.files import engine
from rag_model.index.files.engine import Metric, faiss, use_threads
from rag_model.index.files.pieces import path_opener
from rag_model.index.files.vectors import VectorFiles
from rag_model.index.graphs import kind as hnsw
from rag_model.index.graphs.cells import learn_cells, read_group_rows, split_large_cells, unpack_slices
from rag_model.index.graphs.graph import (
    NO_LINK,
    draw_levels,
    pack_links,
    select_best_links,
    unpack_links,
)
from rag_model.index.graphs.graph_file import GraphFile
from rag_model.index.graphs.kind import KIND
from rag_model.index.graphs.reach import ReachabilityTree, link_unreachable_nodes
from rag_model.index.graphs.stitch import CellShard
from rag_model.index.quality.sweep import VectorQuerySet, sweep_settings
from rag_model.index.recipe import MERGE_THREADS, IndexRecipe, resolve
from rag_model.index.search import open_index
from rag_model.process import CORES_VARIABLE, count_cores
from tests.benchmarks.recall_curves import compare_curves

Make = Callable[..., Any]  # fixtures of conftest.py


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("unit", [True, False])
def test_merged_cells_match_a_single_graph_at_equal_distances(
    metric: Any, unit: bool, make_vectors: Make, write_parts: Make, build_index: Make
) -> None:
    parts = write_parts(make_vectors(3000, unit=unit), [500, 501, 2200])
    query_set = VectorQuerySet.from_exact_search(ExactIndex(parts, metric), make_vectors(100, seed=7, unit=unit), 20)
    curves = []
    for cells in (1, 6):
        path, plan = build_index(parts, IndexRecipe("HNSW8", metric, cells=cells), f"cells-{cells}")
        assert plan.cells == cells
        efforts = sweep_settings(open_index(path), query_set, [20, 40, 80, 160, 320])
        curves.append(([effort.distances for effort in efforts], [effort.recall_mean for effort in efforts]))
    (work, recall), (merged_work, merged_recall) = curves
    at_equal_work = np.interp(work[1:-1], merged_work, merged_recall)
    assert np.all(at_equal_work >= np.array(recall[1:-1]) - 0.02)
    assert merged_recall[-1] > 0.98


@pytest.mark.parametrize("factory", ["HNSW8", "HNSW8_SQ8", "HNSW8_SQfp16"])
def test_plain_faiss_reads_and_searches_the_merged_file(
    factory: str, make_vectors: Make, write_parts: Make, build_index: Make
) -> None:
    vectors = make_vectors(1500)
    path, plan = build_index(write_parts(vectors, [700]), IndexRecipe(factory, cells=4))
    index = faiss.read_index(str(path))
    assert index.ntotal == 1500
    assert index.hnsw.efSearch == plan.search["efSearch"]
    assert index.hnsw.efConstruction == plan.ef_construction
    nearest = index.search(vectors[::10], 1)[1][:, 0]
    assert np.mean(nearest == np.arange(0, 1500, 10)) > 0.98
    index.add(vectors[:5])  # plain faiss can add vectors to the file
    assert index.search(vectors[:1], 2)[1].max() >= 1500


@pytest.mark.parametrize("cells", [1, 4])
@pytest.mark.parametrize("factory", ["HNSW8", "HNSW8_SQ4", "HNSW8_SQ8", "HNSW8_SQfp16"])
def test_faiss_would_write_the_same_bytes(
    factory: str, cells: int, make_vectors: Make, write_parts: Make, build_index: Make
) -> None:
    path, _ = build_index(write_parts(make_vectors(1000), [300]), IndexRecipe(factory, cells=cells))
    assert faiss.serialize_index(faiss.read_index(str(path))).tobytes() == path.read_bytes()


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_build_is_reproducible(metric: Any, make_vectors: Make, write_parts: Make, build_index: Make) -> None:
    parts = write_parts(make_vectors(1200), [400])
    recipe = IndexRecipe("HNSW8", metric, cells=5)
    assert build_index(parts, recipe, "a")[0].read_bytes() == build_index(parts, recipe, "b")[0].read_bytes()


def test_build_from_float16_vectors(make_vectors: Make, write_parts: Make, build_index: Make) -> None:
    vectors = make_vectors(1500).astype(np.float16)
    path, _ = build_index(write_parts(vectors, [600]), IndexRecipe("HNSW8", cells=3))
    rows = open_index(path).search(vectors[:50].astype(np.float32), 1)[1]
    assert np.mean(rows[:, 0] == np.arange(50)) > 0.95


@pytest.mark.parametrize("metric_cells", [("ip", 1), ("ip", 4), ("l2", 1), ("l2", 4)])
@pytest.mark.parametrize("kind", ["duplicates", "zeros", "all equal", "unequal norms"])
def test_every_node_of_a_hard_corpus_is_reachable(
    kind: str, metric_cells: tuple[Any, int], make_vectors: Make, write_parts: Make, build_index: Make
) -> None:
    metric, cells = metric_cells
    vectors = make_vectors(800)
    if kind == "duplicates":
        vectors = np.repeat(vectors[:20], 40, axis=0)
    elif kind == "zeros":
        vectors[::5] = 0
    elif kind == "all equal":
        vectors[:] = vectors[0]
    else:
        vectors *= np.random.default_rng(0).exponential(size=(800, 1)).astype(np.float32)
    path, plan = build_index(write_parts(vectors), IndexRecipe("HNSW8", metric, cells=cells))
    assert plan.cells == cells
    assert len(ReachabilityTree(GraphFile.open(path)).find_unreachable()) == 0
    assert np.isfinite(open_index(path).search(vectors[:20], 10)[0]).all()


def test_unreachable_nodes_are_linked_and_none_lost(make_vectors: Make, write_parts: Make, tmp_path: Path) -> None:
    vectors, path = make_vectors(800), tmp_path / "index"
    index = faiss.index_factory(32, "HNSW4", faiss.METRIC_INNER_PRODUCT)
    index.add(vectors)
    faiss.write_index(index, str(path))
    graph, nodes = GraphFile.open(path, writable=True), np.arange(800)
    links = graph.read_links(nodes)
    links[np.isin(links, np.arange(100, 140))] = -1
    graph.write_links(nodes, -np.sort(-links, axis=1))  # empty slots last, as faiss wants them
    unreachable = ReachabilityTree(graph).find_unreachable()
    assert set(range(100, 140)) <= set(unreachable)
    assert link_unreachable_nodes(path, VectorFiles(write_parts(vectors))) == len(unreachable)
    assert len(ReachabilityTree(GraphFile.open(path)).find_unreachable()) == 0
    repaired = path.read_bytes()
    assert link_unreachable_nodes(path, VectorFiles(write_parts(vectors))) == 0
    assert path.read_bytes() == repaired


@given(
    arrays.arrays(np.int64, (5, 12), elements=st.integers(-1, 9)),
    arrays.arrays(np.float32, (5, 10), elements=st.floats(-4, 4, width=32)),
)
def test_select_best_links_keeps_distinct_links(candidates: Any, similarity: Any) -> None:
    candidate_scores = np.take_along_axis(similarity, np.maximum(candidates, 0), 1)
    best_links = select_best_links(pack_links(candidate_scores, candidates), 4)
    for candidate_row, links, scores in zip(candidates, best_links, similarity, strict=True):
        distinct = {int(c) for c in candidate_row if c >= 0}
        expected = sorted(distinct, key=lambda c: (-scores[c], np.signbit(scores[c]), c))[:4]
        assert links.tolist() == expected + [-1] * (4 - len(expected))


def test_drawn_levels_equal_faiss(make_vectors: Make) -> None:
    n = 20_000  # more than one block
    index = faiss.IndexHNSWFlat(2, 8)
    index.hnsw.prepare_level_tab(n)
    np.testing.assert_array_equal(draw_levels(n, 8), faiss.vector_to_array(index.hnsw.levels))


def test_assign_gives_every_vector_a_cell_and_the_planned_pairs(make_vectors: Make) -> None:
    vectors = make_vectors(3000)
    plan = resolve(IndexRecipe("HNSW8", cells=6, border=0.25, linked=0.5), 3000, 32)
    cells = learn_cells(plan, vectors)
    vector_cells, joins, links = cells.assign("ip", vectors)
    assert set(vector_cells) == set(range(6))
    assert np.bincount(vector_cells).max() < 2 * 3000 / 6
    assert len(joins[0]) / 3000 == pytest.approx(0.25, abs=0.01)
    assert len(links[0]) / 3000 == pytest.approx(0.5, abs=0.01)
    for rows, other_cells in (joins, links):
        assert np.all(vector_cells[rows] != other_cells)
    assert not set(zip(*joins, strict=True)) & set(zip(*links, strict=True))


def test_unpack_slices_in_row_order(make_vectors: Make, write_parts: Make, tmp_path: Path) -> None:
    vectors = make_vectors(1500).astype(np.float16)
    parts = write_parts(vectors, [0, 400, 400])
    plan = resolve(IndexRecipe("HNSW8", cells=3), 1500, 32)
    trained = tmp_path / "trained"
    hnsw.KIND.train(plan, parts, trained)
    pieces = [tmp_path / f"scattered-{number}" for number in range(len(parts))]
    part_stats = [hnsw.KIND.scatter(plan, trained, part, number, pieces[number]) for number, part in enumerate(parts)]
    assert [stats["rows"] for stats in part_stats] == [0, 400, 0, 1100]
    openers = [path_opener(piece) for piece in pieces]
    rows = read_group_rows(plan, trained, openers)
    assert sum(map(len, rows)) == sum(stats["written"] for stats in part_stats)
    assert set(np.concatenate(rows[::2])) == set(range(1500))
    for group, group_rows in enumerate(rows):
        assert np.all(np.diff(group_rows) > 0)
        group_vectors = unpack_slices(iter_slices(pieces, plan.shards, group // 2), plan.d)[group % 2].vectors
        np.testing.assert_array_equal(group_vectors, vectors[group_rows].astype(np.float32))


@pytest.mark.parametrize("head", [(2, 1, 4), (3, -1, 4), (-1, 3, 4), (1, 1, 8), (1, 1, 2), (2**62, 2, 4)])
def test_unpack_refuses_invalid_slices(head: tuple[int, int, int]) -> None:
    """The head contradicts the two vectors of three float32 and their digests, or is incomplete."""
    valid_slice = np.array([1, 1, 4]).tobytes() + np.ones(6, np.float32).tobytes() + bytes(16)
    assert [len(part.vectors) for part in unpack_slices([valid_slice], 3)] == [1, 1]
    for data in (np.array(head).tobytes() + valid_slice[24:], valid_slice[:23], valid_slice[:-1]):
        with pytest.raises(InputError, match="does not hold vectors of 3 dimensions"):
            unpack_slices([data], 3)


def test_bytes_do_not_depend_on_the_block_size_of_the_merge(
    make_vectors: Make, write_parts: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, plan = write_parts(make_vectors(1500), [0, 400]), resolve(IndexRecipe("HNSW8", cells=3), 1500, 32)
    run_stages(plan, parts, tmp_path / "whole", tmp_path)
    monkeypatch.setattr(hnsw, "_choose_block_rows", lambda cells: 100 * cells)
    run_stages(plan, parts, tmp_path / "pieces", tmp_path)
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "pieces").read_bytes()


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_bytes_do_not_depend_on_the_threads_of_the_merge(
    metric: Any, make_vectors: Make, write_parts: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs have upper levels (one node in eight) and, by inner product, small vectors that are unreachable."""
    vectors = make_vectors(1500) * np.random.default_rng(0).exponential(size=(1500, 1)).astype(np.float32)
    vectors[::50] = vectors[0]  # threads could process equal vectors in any order
    parts, plan = write_parts(vectors), resolve(IndexRecipe("HNSW8", metric, cells=3), 1500, 32)
    repaired_counts = set()
    monkeypatch.setattr(hnsw, "_THREAD_NODES", 1)
    for count in (1, 3, 8):
        monkeypatch.setattr(hnsw, "_count_merge_threads", lambda count=count: count)
        (merged,) = run_stages(plan, parts, tmp_path / str(count), tmp_path)["merge"]
        repaired_counts.add(merged["unreachable_repaired"])
    assert len({(tmp_path / str(count)).read_bytes() for count in (1, 3, 8)}) == 1
    assert len(repaired_counts) == 1
    assert (repaired_counts.pop() > 100) == (metric == "ip")
    assert faiss.omp_get_max_threads() == 1, "other stages use one thread"


def test_merge_threads_follow_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CORES_VARIABLE, "1")
    assert hnsw._count_merge_threads() == 1
    monkeypatch.delenv(CORES_VARIABLE)
    assert hnsw._count_merge_threads() == min(MERGE_THREADS, count_cores())


@pytest.mark.parametrize("spread", [0.05, 0.5])
def test_recall_with_varying_norms_is_that_of_a_single_graph(
    spread: float, make_vectors: Make, write_parts: Make, build_index: Make, tmp_path: Path
) -> None:
    """By inner product, a single graph leaves small vectors unreachable; merging must not make that worse."""
    vectors = make_vectors(2000) * np.random.default_rng(0).lognormal(sigma=spread, size=(2000, 1)).astype(np.float32)
    plain = faiss.index_factory(32, "HNSW8", faiss.METRIC_INNER_PRODUCT)
    plain.hnsw.efConstruction = 100
    plain.add(vectors)
    faiss.write_index(plain, str(tmp_path / "plain"))
    parts = write_parts(vectors, [500])
    path, _ = build_index(parts, IndexRecipe("HNSW8", cells=4))
    query_set = VectorQuerySet.from_exact_search(ExactIndex(parts), make_vectors(200, seed=7), 10)
    curves = [sweep_settings(open_index(file), query_set, [32, 64, 128, 256]) for file in (tmp_path / "plain", path)]
    assert compare_curves(curves[1], curves[0]) < 0.03
    assert len(ReachabilityTree(GraphFile.open(path)).find_unreachable()) == 0


def test_dominant_cell_is_split(make_vectors: Make, write_parts: Make) -> None:
    plan = resolve(IndexRecipe("HNSW8", cells=8), 2000, 32)
    crowd = np.vstack([make_vectors(200), make_vectors(1)[:1] + 0.01 * make_vectors(1800, seed=5)])
    vector_cells, _, _ = learn_cells(plan, crowd).assign("ip", crowd)
    assert np.bincount(vector_cells).max() < 1000
    crowd[200:] = crowd[200]  # equal vectors cannot be split
    vector_cells, _, _ = learn_cells(plan, crowd).assign("ip", crowd)
    assert len(set(vector_cells[200:])) == 1


def test_a_cell_that_has_grown_is_split_and_the_others_stay(make_vectors: Make) -> None:
    plan = resolve(IndexRecipe("HNSW8", cells=12), 6000, 32)
    cells = learn_cells(plan, vectors := make_vectors(3000))
    vector_cells, _, _ = cells.assign("ip", vectors)
    largest = int(np.bincount(vector_cells).argmax())
    crowd = np.vstack([vectors, np.repeat(vectors[vector_cells == largest], 3, axis=0)])
    crowd += 0.01 * make_vectors(len(crowd), seed=5)
    split = split_large_cells(plan, cells, crowd)
    changed_cells = np.flatnonzero((split.centroids != cells.centroids).any(axis=1))
    assert largest in changed_cells
    assert len(changed_cells) <= 4, "of 12 cells"
    sizes = [np.bincount(clustering.assign("ip", crowd)[0]).max() for clustering in (cells, split)]
    assert sizes[1] < 0.75 * sizes[0]
    second_split = split_large_cells(plan, split, crowd)
    np.testing.assert_array_equal(second_split.centroids, split.centroids)


@pytest.mark.parametrize(
    ("n", "old_cells", "recipe_cells", "cells", "linked"),
    [
        (250_000, 7, None, 7, 1.2),  # unchanged, although 4 cells are enough
        (250_000, 12, None, 8, 1.2),  # merged
        (250_000, 17, None, 4, 1.2),  # too many, so they are trained again
        (250_000, 3, None, 4, 1.2),  # split
        (60_000, 3, None, 2, 1.2),  # merged, although one cell is enough
        (60_000, 5, None, 1, 0.0),
        (100, 3, None, 1, 0.0),
        (250_000, 1, None, 4, 1.2),
        (250_000, 7, 5, 5, 1.2),
    ],
)
def test_cells_follow_a_corpus_that_grows_or_shrinks(
    n: int, old_cells: int, recipe_cells: int | None, cells: int, linked: float
) -> None:
    recipe = IndexRecipe("HNSW32", cells=recipe_cells)
    inputs = {**resolve(replace(recipe, cells=max(2, old_cells)), 10**6, 32).piece_inputs(), "cells": old_cells}
    plan = KIND.steady(recipe, resolve(recipe, n, 32), inputs)
    assert (plan.cells, plan.linked) == (cells, linked)
    assert KIND.can_follow(plan, inputs) == (cells != old_cells <= 2 * cells and min(old_cells, cells) > 1)


def test_merged_cells_are_as_good_as_new_ones_at_equal_distances(
    make_vectors: Make, write_parts: Make, build_index: Make, tmp_path: Path
) -> None:
    """A third of the corpus remains, and some cells are empty; the fullest cells keep their graphs."""
    vectors, old_plan = make_vectors(6000), resolve(IndexRecipe("HNSW8", cells=8), 6000, 32)
    parts = write_parts(vectors)
    (tmp_path / "work").mkdir()
    run_stages(old_plan, parts, tmp_path / "old", tmp_path / "work")
    trained = tmp_path / "work" / "trained"
    cells, _ = hnsw._load_trained_file(old_plan, trained)
    vector_cells = cells.assign("ip", vectors)[0]
    sizes = np.bincount(vector_cells)
    is_dropped = np.isin(vector_cells, [0, sizes.argmax()]) | (np.random.default_rng(1).random(6000) > 0.5)
    remaining = vectors[~is_dropped]
    np.save(tmp_path / "remaining.npy", remaining)
    plan, rows = resolve(IndexRecipe("HNSW8", cells=5), len(remaining), 32), [tmp_path / "remaining.npy"]
    assert KIND.can_follow(plan, old_plan.piece_inputs())
    numbers = [KIND.follow(plan, trained, rows, tmp_path / name)["previous_shards"] for name in ("one", "two")]
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert numbers[0] == numbers[1]
    assert len({*numbers[0]}) == 5
    assert not {0, int(sizes.argmax())} & {*numbers[0]}, "empty cells are merged first"
    KIND.scatter(plan, tmp_path / "one", rows[0], 0, tmp_path / "piece")
    shards = [tmp_path / f"merged-{number}" for number in range(5)]
    reasons = []
    for number, shard in enumerate(shards):
        previous = path_opener(tmp_path / "work" / f"shard-{numbers[0][number]:05d}")
        slices = iter_slices([tmp_path / "piece"], 5, number)
        reasons.append(KIND.update(plan, tmp_path / "one", slices, number, previous, shard).get("reason"))
    assert reasons.count(None) > 2
    openers = [[path_opener(tmp_path / "piece")], [path_opener(shard) for shard in shards]]
    KIND.merge(plan, tmp_path / "one", rows, *openers, tmp_path / "merged")
    query_set = VectorQuerySet.from_exact_search(ExactIndex(rows), make_vectors(200, seed=7), 20)
    rebuilt, _ = build_index(rows, IndexRecipe("HNSW8", cells=5))
    curves = [sweep_settings(open_index(path), query_set, [20, 40, 80, 160]) for path in (rebuilt, tmp_path / "merged")]
    assert compare_curves(curves[1], curves[0]) < 0.01
    assert len(ReachabilityTree(GraphFile.open(tmp_path / "merged")).find_unreachable()) == 0


def test_pieces_of_another_run_are_refused(make_vectors: Make, write_parts: Make, tmp_path: Path) -> None:
    parts = write_parts(make_vectors(1500), [700])
    plan = resolve(IndexRecipe("HNSW8", cells=3), 1500, 32)
    trained, out = tmp_path / "trained", tmp_path / "out"
    hnsw.KIND.train(plan, parts, trained)
    pieces = [tmp_path / f"scattered-{number}" for number in range(2)]
    for number, part in enumerate(parts):
        hnsw.KIND.scatter(plan, trained, part, number, pieces[number])
    scattered = [path_opener(piece) for piece in pieces]
    files = [tmp_path / f"shard-{number}" for number in range(3)]
    for number, path in enumerate(files):
        hnsw.KIND.shard(plan, trained, iter_slices(pieces, 3, number), number, path)
    shards = [path_opener(path) for path in files]
    assert hnsw.KIND.merge(plan, trained, parts, scattered, shards, out)["rows"] == 1500
    with pytest.raises(InputError, match="shard 0 of HNSW8 is a piece of another build"):
        hnsw.KIND.merge(plan, trained, parts, scattered, shards[::-1], out)
    with pytest.raises(InputError, match="part 0 is a piece of another build"):
        hnsw.KIND.merge(plan, trained, parts, scattered[::-1], shards, out)
    other_plan = resolve(IndexRecipe("HNSW8", cells=3, seed=1), 1500, 32)
    with pytest.raises(InputError, match="trained is a piece of another build"):
        hnsw.KIND.scatter(other_plan, trained, parts[0], 0, tmp_path / "other")
    fewer = resolve(IndexRecipe("HNSW8", cells=3), 1400, 32)
    with pytest.raises(InputError, match="not the plan's 1400"):
        hnsw.KIND.merge(fewer, trained, parts, scattered, shards, out)
    files[1].write_bytes(files[1].read_bytes()[:-9])
    with pytest.raises(InputError, match="shard 1 of HNSW8 is truncated"):
        hnsw.KIND.merge(plan, trained, parts, scattered, shards, out)
    files[1].unlink()
    with pytest.raises(InputError, match="cannot open shard 1 of HNSW8"):
        hnsw.KIND.merge(plan, trained, parts, scattered, shards, out)
    trained.write_bytes(b"")
    with pytest.raises(InputError, match="truncated or damaged"):
        hnsw.KIND.scatter(plan, trained, parts[0], 0, pieces[0])


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_a_shard_has_the_same_bytes_with_any_number_of_threads(
    metric: Any, make_vectors: Make, write_parts: Make, tmp_path: Path
) -> None:
    assert KIND.threaded
    vectors = make_vectors(1500)
    vectors[::50] = vectors[0]
    parts, plan = write_parts(vectors), resolve(IndexRecipe("HNSW8", metric, cells=2), 1500, 32)
    hnsw.KIND.train(plan, parts, tmp_path / "trained")
    hnsw.KIND.scatter(plan, tmp_path / "trained", parts[0], 0, tmp_path / "piece")
    shard_bytes = set()
    for count in (1, 3, 8):
        with use_threads(count):
            hnsw.KIND.shard(plan, tmp_path / "trained", iter_slices([tmp_path / "piece"], 2, 1), 1, tmp_path / "shard")
        shard_bytes.add((tmp_path / "shard").read_bytes())
    assert len(shard_bytes) == 1


@pytest.mark.parametrize(
    ("metric", "unit", "count", "expected"),
    [("ip", True, 1100, True), ("ip", False, 1100, False), ("l2", False, 1100, True), ("ip", True, 1000, False)],
)
def test_cagra_builds_graphs_of_distances_and_of_unit_vectors(
    make_vectors: Make, monkeypatch: pytest.MonkeyPatch, metric: Metric, unit: bool, count: int, expected: bool
) -> None:
    monkeypatch.setattr(engine.faiss, "GpuIndexCagra", object, raising=False)
    monkeypatch.setattr(engine, "count_gpus", lambda: 1)
    vectors = make_vectors(count, unit=unit)
    halves = vectors.astype(np.float16).astype(np.float32)  # as they are stored
    assert engine.can_build_graph(halves, metric) is expected


def scatter_and_write(plan: Any, folder: Path, vectors: Any, name: str) -> Path:
    np.save(folder / f"{name}.npy", vectors)
    hnsw.KIND.scatter(plan, folder / "trained", folder / f"{name}.npy", 0, folder / name)
    return folder / name


@pytest.fixture
def one_cell(make_vectors: Make, tmp_path: Path) -> tuple[Any, Any]:
    """Write the trained file and the shard of an index with one cell; return its plan and its vectors."""
    vectors = make_vectors(600).astype(np.float16)
    vectors[100:120] = vectors[0]
    plan = resolve(IndexRecipe("HNSW8", cells=1), 600, 32)
    np.save(tmp_path / "rows.npy", vectors)
    hnsw.KIND.train(plan, [tmp_path / "rows.npy"], tmp_path / "trained")
    piece = scatter_and_write(plan, tmp_path, vectors, "piece")
    hnsw.KIND.shard(plan, tmp_path / "trained", iter_slices([piece], 1, 0), 0, tmp_path / "shard")
    return plan, vectors


@pytest.mark.parametrize(
    ("change", "inserted", "generation", "reason"),
    [
        (lambda old, added: np.vstack([old[1:100], old[140:], added[:9]]), 9, 1, None),
        (lambda old, added: np.vstack([old, old[:9]]), 9, 1, None),
        (lambda old, added: old[::-1], 0, 1, None),
        (lambda old, added: old[: 600 // 4], 150, 0, "75% of its vectors were replaced since it was built"),
        (lambda old, added: added, 600, 0, "most of its vectors are new"),
        (lambda old, added: old[:0], 0, 0, "it has no vectors"),
    ],
    ids=["duplicates go", "duplicates come", "another order", "most go", "all new", "emptied"],
)
def test_update_of_a_cell_inserts_and_removes_vectors(
    change: Callable[[Any, Any], Any],
    inserted: int,
    generation: int,
    reason: str | None,
    one_cell: tuple[Any, Any],
    make_vectors: Make,
    tmp_path: Path,
) -> None:
    plan, old = one_cell
    vectors = np.ascontiguousarray(change(old, make_vectors(600, seed=3).astype(np.float16)))
    piece, outputs = scatter_and_write(plan, tmp_path, vectors, "changed"), []
    for number in range(2):
        arguments = iter_slices([piece], 1, 0), 0, path_opener(tmp_path / "shard"), tmp_path / f"updated-{number}"
        stats = hnsw.KIND.update(plan, tmp_path / "trained", *arguments)
        assert (stats["inserted"], stats["generation"], stats.get("reason")) == (inserted, generation, reason)
        outputs.append((tmp_path / f"updated-{number}").read_bytes())
    assert outputs[0] == outputs[1]
    if not len(vectors):
        return
    shards = [path_opener(tmp_path / "updated-0")]
    changed = resolve(IndexRecipe("HNSW8", cells=1), len(vectors), 32)
    rows = [tmp_path / "changed.npy"]
    hnsw.KIND.merge(changed, tmp_path / "trained", rows, [path_opener(piece)], shards, tmp_path / "index")
    query_set = VectorQuerySet.from_exact_search(ExactIndex(rows), make_vectors(100, seed=7), 10)
    hits = open_index(tmp_path / "index").search(query_set.vectors, 10, efSearch=64)[1]
    assert query_set.compute_recalls(hits).mean() > 0.98
    removed = {row.tobytes() for row in old} - {row.tobytes() for row in vectors}
    digests = {blake2b(row, digest_size=8).digest() for row in removed}
    assert not [1 for trace in removed | digests if trace in outputs[0]]


def test_cell_whose_graph_has_decayed_is_built_again(
    one_cell: tuple[Any, Any], make_vectors: Make, tmp_path: Path
) -> None:
    plan, old = one_cell
    vectors = np.vstack([old[5:], make_vectors(5, seed=3).astype(np.float16)])
    piece = scatter_and_write(plan, tmp_path, vectors, "changed")
    shard = CellShard.read(plan, path_opener(tmp_path / "shard"))
    for name, value, expected_reason in (
        ("degree", shard.history.built_quality.degree * 2, "its vectors have fewer links"),
        ("unreachable", -1.0, "a search cannot reach"),
        ("recall", 1.5, "its recall is"),
    ):
        baseline = replace(shard.history.built_quality, **{name: value})
        replace(shard, history=replace(shard.history, built_quality=baseline)).write(plan, 0, tmp_path / "worse")
        arguments = iter_slices([piece], 1, 0), 0, path_opener(tmp_path / "worse"), tmp_path / "out"
        stats = hnsw.KIND.update(plan, tmp_path / "trained", *arguments)
        assert stats["reason"].startswith(expected_reason)
        assert stats["generation"] == 0


def check_similarities(lists: Any, sources: Any, targets: Any, metric: Metric) -> None:
    """Check that the similarity of each link is that of the two vectors that it connects."""
    rows, slots = np.nonzero(lists != NO_LINK)
    source, target = sources[rows], targets[unpack_links(lists[rows, slots])]
    expected = (source * target).sum(axis=1) if metric == "ip" else -np.square(source - target).sum(axis=1)
    bits = ~(lists[rows, slots] >> np.uint64(32)).astype(np.uint32)
    stored = np.where(bits >> 31, bits ^ np.uint32(1 << 31), ~bits).astype(np.uint32).view(np.float32)
    np.testing.assert_allclose(stored, expected, atol=1e-5)


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_a_redacted_index_has_no_trace_of_removed_vectors(metric: Metric, make_vectors: Make, tmp_path: Path) -> None:
    plan = resolve(IndexRecipe("HNSW8_SQ8", metric, cells=24), 2_000, 32)
    vectors = make_vectors(2_000).astype(np.float16)
    vectors[700] = 4 * vectors[700]  # the largest components decide the quantiser
    vectors[900] = vectors[0]
    is_removed = np.zeros(2_000, np.bool_)
    is_removed[[700, 900, 1_200, 1_205]] = True
    trained, redacted, rows = tmp_path / "trained", tmp_path / "redacted", tmp_path / "remaining.npy"
    np.save(tmp_path / "rows.npy", vectors)
    hnsw.KIND.train(plan, [tmp_path / "rows.npy"], trained)
    cells, empty = hnsw._load_trained_file(plan, trained)
    cells = replace(cells, centroids=cells.centroids.copy())
    cells.centroids[:2] = vectors[[1_200, 1_205]]  # like cells whose sample had only this vector
    hnsw._write_trained_file(plan, cells, empty, vectors.astype(np.float32), trained)
    piece = scatter_and_write(plan, tmp_path, vectors, "piece")
    for number in range(24):
        hnsw.KIND.shard(plan, trained, iter_slices([piece], 24, number), number, tmp_path / f"old-{number}")

    remaining, plan = vectors[~is_removed], replace(plan, n=int((~is_removed).sum()))
    np.save(rows, remaining)
    removed = vectors[is_removed].astype(np.float32)
    blocks = np.split(removed, [1])
    assert "reason" not in hnsw.KIND.redact(plan, trained, [rows], iter(blocks), redacted)
    hnsw.KIND.scatter(plan, redacted, rows, 0, tmp_path / "new-piece")
    shards, generations = list[Path](), list[int]()
    for number in range(24):
        for out in (tmp_path / f"shard-{number}", tmp_path / f"again-{number}"):
            slices = iter_slices([tmp_path / "new-piece"], 24, number)
            old = path_opener(tmp_path / f"old-{number}")
            stats = hnsw.KIND.update(plan, redacted, slices, number, old, out)
        assert (tmp_path / f"shard-{number}").read_bytes() == out.read_bytes()
        generations.append(stats["generation"])
        shard = CellShard.read(plan, path_opener(out))
        slices = iter_slices([tmp_path / "new-piece"], 24, number)
        members, sources = unpack_slices(slices, 32)
        check_similarities(shard.lists, members.vectors, members.vectors, metric)
        check_similarities(shard.cross_links.out_links, sources.vectors, members.vectors, metric)
        into = np.repeat(np.arange(len(members.vectors)), np.diff(shard.cross_links.in_starts))
        check_similarities(shard.cross_links.in_links[:, None], members.vectors[into], sources.vectors, metric)
        np.testing.assert_array_equal(shard.history.members, members.digests)
        np.testing.assert_array_equal(shard.history.sources, sources.digests)
        shards.append(out)
    assert sum(generations) > 12, "most graphs were updated"
    openers = [path_opener(shard) for shard in shards]
    hnsw.KIND.merge(plan, redacted, [rows], [path_opener(tmp_path / "new-piece")], openers, tmp_path / "index")

    old_file = trained.read_bytes()
    traces = [removed[number].astype(dtype).tobytes() for number in (0, 2, 3) for dtype in ["f2", "f4"]]
    traces += [blake2b(trace, digest_size=8).digest() for trace in traces]
    assert any(trace in old_file for trace in traces)
    for file in (redacted, tmp_path / "new-piece", *shards, tmp_path / "index"):
        assert not [1 for trace in traces if trace in file.read_bytes()]
    new_cells, quantiser = hnsw._load_trained_file(plan, redacted)
    largest = faiss.vector_to_array(faiss.downcast_index(quantiser.storage).sq.trained).max()
    assert largest <= 2 * np.abs(remaining).max()
    is_same = (new_cells.centroids == cells.centroids).all(axis=1)
    assert not is_same[:2].any()
    assert is_same.any()
    index = faiss.IndexFlat(32, engine.to_faiss_metric(metric))
    index.add(cells.centroids)
    nearest_cells, removed_cells = index.search(remaining.astype(np.float32), 1)[1][:, 0], index.search(removed, 4)[1]
    np.testing.assert_array_equal(np.flatnonzero(~is_same), np.unique(removed_cells))
    for cell in np.unique(removed_cells):
        mean = remaining[nearest_cells == cell].mean(axis=0, dtype=np.float64)
        expected = mean / np.linalg.norm(mean) if metric == "ip" else mean
        np.testing.assert_allclose(new_cells.centroids[cell], expected, rtol=1e-5, atol=1e-7)


def test_cells_are_trained_again_if_one_had_only_removed_vectors(make_vectors: Make, tmp_path: Path) -> None:
    plan, vectors = resolve(IndexRecipe("HNSW8", "l2", cells=6), 600, 32), make_vectors(600)
    distant_vector = vectors[:1] + 100
    np.save(tmp_path / "rows.npy", vectors)
    cells = learn_cells(plan, vectors)
    cells.centroids[4] = distant_vector
    hnsw._write_trained_file(plan, cells, hnsw._create_index(plan), vectors, tmp_path / "trained")
    stats = hnsw.KIND.redact(plan, tmp_path / "trained", [tmp_path / "rows.npy"], [distant_vector], tmp_path / "out")
    assert stats["reason"] == "a cell held only vectors that were removed"
    hnsw.KIND.train(plan, [tmp_path / "rows.npy"], tmp_path / "trained")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "trained").read_bytes()
