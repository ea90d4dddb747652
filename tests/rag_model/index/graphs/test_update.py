"""Updated graphs of cells compared with rebuilt graphs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rag_model.index.files.engine import Metric, Rows, Vectors, faiss, to_faiss_metric, use_threads
from rag_model.index.graphs import update
from rag_model.index.graphs.graph import NO_LINK, CellGraph, Links, ScoredLinks, score_targets, unpack_links
from rag_model.index.graphs.stitch import CrossLinks, link_across_border
from rag_model.index.graphs.update import SEARCH_TURNS, update_cell_graph, update_cross_links
from rag_model.index.recipe import IndexRecipe, VectorPlan, resolve

Make = Callable[..., Any]  # fixtures of conftest.py


def plan_cells(metric: Metric = "ip", factory: str = "HNSW8") -> VectorPlan:
    return resolve(IndexRecipe(factory, metric, cells=2), 10_000, 32)


def draw_old_members(count: int, dropped: int, added: int, rng: np.random.Generator) -> Rows:
    """Return `old_members` of a cell that loses and gains random members at random positions."""
    numbers = np.sort(rng.permutation(count)[dropped:])
    return np.insert(numbers, np.sort(rng.integers(0, len(numbers) + 1, added)), -1)


def fill(old_members: Rows, vectors: Vectors, new_vectors: Vectors) -> Vectors:
    """Return the vectors of the members: those that stay, and new ones."""
    filled = np.empty((len(old_members), vectors.shape[1]), np.float32)
    filled[old_members >= 0] = vectors[old_members[old_members >= 0]]
    filled[old_members < 0] = new_vectors
    return filled


def find_nearest(vectors: Vectors, queries: Vectors, k: int, metric: Metric) -> Rows:
    exact = faiss.IndexFlat(vectors.shape[1], to_faiss_metric(metric))
    exact.add(vectors)
    rows: Rows = exact.search(queries, k)[1]
    return rows


def measure_recall(graph: CellGraph, vectors: Vectors, queries: Vectors, metric: Metric) -> float:
    """Return recall@10 at 120 distance computations per query, interpolated."""
    exact, points = find_nearest(vectors, queries, 10, metric).tolist(), []
    for ef_search in (10, 14, 20, 28, 40, 56, 80):
        faiss.cvar.hnsw_stats.reset()
        rows = graph.search(queries, 10, ef_search).tolist()
        hits = [len(set(row) & set(best)) for row, best in zip(rows, exact, strict=True)]
        points.append((faiss.cvar.hnsw_stats.ndis / len(queries), np.mean(hits) / 10))
    return float(np.interp(120, *np.transpose(points)))


def check_links(lists: ScoredLinks, vectors: Vectors, metric: Metric) -> None:
    """Check the form and the similarities of bottom lists."""
    targets, present = unpack_links(lists), lists != NO_LINK
    assert (np.sort(lists, axis=1) == lists).all()
    assert targets[present].max(initial=-1) < len(vectors)
    assert not (targets == np.arange(len(vectors))[:, None]).any()
    assert all(len(set(row[row >= 0])) == (row >= 0).sum() for row in targets)
    expected = score_targets(vectors, vectors, targets, metric)
    bits = (~(lists >> np.uint64(32)).astype(np.uint32)).astype(np.uint32)
    stored = np.where(bits >> 31, bits ^ np.uint32(1 << 31), ~bits).view(np.float32)
    np.testing.assert_array_equal(stored[present], expected[present])


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_recall_of_updated_graphs_stays_that_of_rebuilt_ones(
    metric: Metric, make_vectors: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, pool, queries = plan_cells(metric), make_vectors(12_000), make_vectors(400, seed=5)

    def update_often() -> tuple[CellGraph, Vectors]:
        rng, next_row, vectors = np.random.default_rng(1), 3_000, pool[:3_000]
        graph = CellGraph.build(plan, vectors)
        for _ in range(12):
            old_members = draw_old_members(3_000, 300, 300, rng)
            vectors = fill(old_members, vectors, pool[next_row : next_row + 300])
            graph, next_row = update_cell_graph(plan, graph.lists, old_members, vectors), next_row + 300
        return graph, vectors

    graph, vectors = update_often()
    check_links(graph.lists, vectors, metric)
    rebuilt = measure_recall(CellGraph.build(plan, vectors), vectors, queries, metric)
    updated = measure_recall(graph, vectors, queries, metric)
    reloaded = update_cell_graph(plan, graph.lists, np.arange(3_000), vectors)
    assert updated >= rebuilt - 0.005
    assert measure_recall(reloaded, vectors, queries, metric) >= rebuilt - 0.01

    def find_none(members: Rows, *_: object) -> Links:
        return np.full((len(members), 1), -1, np.int32)

    monkeypatch.setattr(update, "_list_candidates", find_none)
    unrepaired, vectors = update_often()
    assert measure_recall(unrepaired, vectors, queries, metric) < updated - 0.005


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_replacement_links_have_a_direction_of_their_own_and_lead_back(metric: Metric, make_vectors: Make) -> None:
    plan, vectors = plan_cells(metric), make_vectors(1_000)
    graph = CellGraph.build(plan, vectors)
    remaining = np.flatnonzero(np.arange(1_000) % 5)
    targets = unpack_links(update_cell_graph(plan, graph.lists, remaining, vectors[remaining]).lists)
    links = [remaining[row[row >= 0]].tolist() for row in targets]
    old_links = unpack_links(graph.lists[remaining]).tolist()
    kept_links = [set(row) & set(old_row) for row, old_row in zip(links, old_links, strict=True)]
    rank = dict(zip(remaining.tolist(), range(len(remaining)), strict=True))

    def nearness(vector: Vectors, members: list[int]) -> Vectors:
        difference = vectors[members] - vector
        similarities: Vectors = vectors[members] @ vector if metric == "ip" else -np.square(difference).sum(axis=1)
        return similarities

    def has_own_direction(member: int, link: int) -> bool:
        limit = nearness(vectors[member], [link])[0]
        neighbors = sorted(kept_links[rank[member]])
        is_nearer = nearness(vectors[member], neighbors) > limit
        return bool((nearness(vectors[link], neighbors)[is_nearer] <= limit + 1e-5).all())

    replacements = [(m, link) for m in rank for link in links[rank[m]] if link not in kept_links[rank[m]]]
    assert len(replacements) > 500
    assert all(has_own_direction(a, b) or has_own_direction(b, a) for a, b in replacements)
    assert np.mean([a in links[rank[b]] for a, b in replacements]) > 0.9
    degree = np.mean([len(row) for row in links])
    assert abs(degree / (graph.lists != NO_LINK).sum(axis=1).mean() - 1) < 0.1


def test_updates_have_the_same_bytes_with_any_number_of_threads(make_vectors: Make) -> None:
    plan = plan_cells()
    vectors = make_vectors(2_000)
    added = make_vectors(100, seed=3)
    sources = make_vectors(900, seed=4)
    vectors[::40] = vectors[0]
    graph = CellGraph.build(plan, vectors)
    links = link_across_border(graph, vectors, sources, "ip")
    old_members = draw_old_members(2_000, 100, 100, np.random.default_rng(0))
    members, results = fill(old_members, vectors, added), set()
    for count in (1, 2, 8):
        with use_threads(count):
            updated = update_cell_graph(plan, graph.lists, old_members, members)
            reordered = np.arange(900)[::-1]
            has_turn = np.arange(900) % 32 == 0
            changes = old_members, reordered, updated, members, sources[::-1], has_turn
            crossing = update_cross_links(plan, links, graph.lists, *changes)
        arrays = (updated.lists, crossing.out_links, crossing.in_starts, crossing.in_links)
        results.add(b"".join(array.tobytes() for array in arrays))
    assert len(results) == 1


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize(
    "change",
    [
        "none",
        "all",
        "emptied",
        "one stays",
        "one remains",
        "moved",
        "duplicates",
        "named twice",
        "from empty",
        "few links",
    ],
)
def test_update_survives_extreme_changes(change: str, metric: Metric, make_vectors: Make) -> None:
    plan = plan_cells(metric, "HNSW4_SQ8" if change == "few links" else "HNSW8")
    old = make_vectors(600)
    added, sources = make_vectors(200, seed=2), make_vectors(90, seed=3)
    rng, old_members = np.random.default_rng(0), np.arange(600)
    if change == "from empty":
        old, old_members = old[:0], np.full(200, -1)
    elif change == "all":
        old_members = np.full(200, -1)
    elif change == "emptied":
        old_members, added = np.empty(0, np.int64), added[:0]
    elif change == "one stays":
        old_members = np.insert(np.full(200, -1), 50, 17)
    elif change == "one remains":
        old_members = np.array([17])
    elif change == "moved":
        old_members = rng.permutation(600)[:500]
    elif change == "duplicates":
        old[100:400] = old[0]
        old_members, added = draw_old_members(600, 200, 200, rng), np.repeat(old[:1], 200, axis=0)
    elif change == "few links":
        old_members = draw_old_members(600, 90, 60, rng)
    elif change == "named twice":
        old_members = np.concatenate([np.arange(600), np.arange(200)])
    graph = CellGraph.build(plan, old)
    links = link_across_border(graph, old, sources, metric)
    vectors = fill(old_members, old, added[: int((old_members < 0).sum())])
    updated = update_cell_graph(plan, graph.lists, old_members, vectors)
    check_links(updated.lists, vectors, metric)
    if change in ("all", "from empty"):
        np.testing.assert_array_equal(updated.lists, CellGraph.build(plan, vectors).lists)
    if change == "none":
        np.testing.assert_array_equal(updated.lists, graph.lists)
    if change != "duplicates" and len(vectors):
        nearest = find_nearest(vectors, vectors[:1], 1, metric)
        np.testing.assert_array_equal(updated.search(vectors[:1], 1, 10), nearest)
    old_sources = np.where(np.arange(90) < 60, np.arange(90)[::-1], -1)
    changes = old_members, old_sources, updated, vectors, sources[::-1], np.zeros(90, np.bool_)
    crossing = update_cross_links(plan, links, graph.lists, *changes)
    # a search that begins among equal members, two thirds of all, may not leave them
    tolerance = 0.4 if change == "duplicates" else 0.05
    check_crossing(plan, crossing, vectors, sources[::-1], tolerance)


def check_crossing(
    plan: VectorPlan,
    links: CrossLinks,
    vectors: Vectors,
    sources: Vectors,
    tolerance: float,
) -> None:
    """Check the form of cross links, and that they reach nearly as many nearest members as new ones."""
    assert (len(links.out_links), len(links.in_starts)) == (len(sources), len(vectors) + 1)
    targets, present = unpack_links(links.out_links), links.out_links != NO_LINK
    assert present[:, 0].all() or not len(vectors)
    assert all(len(set(row[row >= 0])) == (row >= 0).sum() for row in targets)
    assert targets.max(initial=-1) < len(vectors)
    if len(vectors):
        nearest = find_nearest(vectors, sources, 1, plan.metric)
        fresh = link_across_border(CellGraph.build(plan, vectors), vectors, sources, plan.metric)
        scores, fresh_scores, best = (
            score_targets(sources, vectors, rows, plan.metric)
            for rows in (targets[:, :1], unpack_links(fresh.out_links)[:, :1], nearest)
        )
        assert (scores == best).mean() >= (fresh_scores == best).mean() - tolerance
    into = unpack_links(links.in_links)
    members = np.repeat(np.arange(len(vectors)), np.diff(links.in_starts))
    assert (targets[into] == members[:, None]).any(axis=1).all()


def test_cross_links_of_many_updates_match_those_of_a_search(make_vectors: Make) -> None:
    plan, pool, sources = plan_cells(), make_vectors(8_000), make_vectors(2_000, seed=4)
    vectors, current, rng = pool[:2_000], sources[:1_000], np.random.default_rng(0)
    graph = CellGraph.build(plan, vectors)
    links = link_across_border(graph, vectors, current, "ip")
    for generation in range(40):
        old_members, old_sources = draw_old_members(2_000, 100, 100, rng), draw_old_members(1_000, 10, 10, rng)
        vectors = fill(old_members, vectors, pool[2_000 + 100 * generation :][:100])
        current = fill(old_sources, current, sources[1_000 + 10 * generation :][:10])
        updated = update_cell_graph(plan, graph.lists, old_members, vectors)
        has_turn = np.arange(1_000) % SEARCH_TURNS == generation % SEARCH_TURNS
        changes = old_members, old_sources, updated, vectors, current, has_turn
        links, graph = update_cross_links(plan, links, graph.lists, *changes), updated
    check_crossing(plan, links, vectors, current, 0.06)
    searched = link_across_border(graph, vectors, current, "ip")
    nearest = find_nearest(vectors, current, 4, "ip")
    share, fresh_share = (
        np.mean((unpack_links(out)[:, :, None] == nearest[:, None]).any(axis=1))
        for out in (links.out_links, searched.out_links)
    )
    assert share >= fresh_share - 0.05
    assert len(links.in_links) >= 0.93 * len(searched.in_links)
