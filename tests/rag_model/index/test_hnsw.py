from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rag_model.errors import InputError
from rag_model.index import hnsw
from rag_model.index.cells import Cells, assign
from rag_model.index.engine import faiss, read
from rag_model.index.exact import ExactIndex
from rag_model.index.graph import Bottom, best_links, levels_of
from rag_model.index.health import Trial, sweep
from rag_model.index.reach import Reach, repair
from rag_model.index.recipe import IndexRecipe, resolve
from rag_model.index.search import open_index
from rag_model.index.vectors import VectorFiles

Make = Callable[..., Any]  # fixtures of conftest.py


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("unit", [True, False])
def test_merged_cells_find_what_one_shot_finds_at_equal_work(
    metric: Any, unit: bool, make_vectors: Make, write_parts: Make, build_index: Make
) -> None:
    parts = write_parts(make_vectors(6000, unit=unit), [1000, 1001, 4500])
    trial = Trial.of(ExactIndex(parts, metric), make_vectors(200, seed=7, unit=unit), 20)
    curves = []
    for cells in (1, 6):
        path, plan = build_index(parts, IndexRecipe("HNSW8", metric, cells=cells), f"cells-{cells}")
        assert plan.cells == cells
        efforts = sweep(open_index(path), trial, [20, 40, 80, 160, 320])
        curves.append(([effort.distances for effort in efforts], [effort.recall_mean for effort in efforts]))
    (work, recall), (merged_work, merged_recall) = curves
    at_equal_work = np.interp(work[1:-1], merged_work, merged_recall)
    assert np.all(at_equal_work >= np.array(recall[1:-1]) - 0.02)
    assert merged_recall[-1] > 0.98


@pytest.mark.parametrize("factory", ["HNSW8", "HNSW8_SQ8", "HNSW8_SQfp16"])
def test_plain_faiss_reads_and_searches_the_merged_file(
    factory: str, make_vectors: Make, write_parts: Make, build_index: Make
) -> None:
    vectors = make_vectors(3000)
    path, plan = build_index(write_parts(vectors, [1500]), IndexRecipe(factory, cells=4))
    index = faiss.read_index(str(path))
    assert index.ntotal == 3000
    assert index.hnsw.efSearch == plan.search["efSearch"]
    assert index.hnsw.efConstruction == plan.ef_construction
    found = index.search(vectors[::10], 1)[1][:, 0]
    assert np.mean(found == np.arange(0, 3000, 10)) > 0.98
    index.add(vectors[:5])  # the file is an ordinary index: it can be added to
    assert index.search(vectors[:1], 2)[1].max() >= 3000


def test_one_cell_is_what_faiss_builds(make_vectors: Make, write_parts: Make, build_index: Make) -> None:
    vectors = make_vectors(2000)
    path, plan = build_index(write_parts(vectors, [300]), IndexRecipe("HNSW16"))
    plain = faiss.index_factory(32, "HNSW16", faiss.METRIC_INNER_PRODUCT)
    plain.hnsw.efConstruction, plain.hnsw.efSearch = plan.ef_construction, plan.search["efSearch"]
    plain.add(vectors)
    assert plan.cells == 1
    assert path.read_bytes() == faiss.serialize_index(plain).tobytes()


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_the_build_repeats_to_the_byte(metric: Any, make_vectors: Make, write_parts: Make, build_index: Make) -> None:
    parts = write_parts(make_vectors(2500), [900])
    recipe = IndexRecipe("HNSW8", metric, cells=5)
    assert build_index(parts, recipe, "a")[0].read_bytes() == build_index(parts, recipe, "b")[0].read_bytes()


def test_float16_vectors_build_too(make_vectors: Make, write_parts: Make, build_index: Make) -> None:
    vectors = make_vectors(1500).astype(np.float16)
    path, _ = build_index(write_parts(vectors, [600]), IndexRecipe("HNSW8", cells=3))
    rows = open_index(path).search(vectors[:50].astype(np.float32), 1)[1]
    assert np.mean(rows[:, 0] == np.arange(50)) > 0.95


@pytest.mark.parametrize("metric_cells", [("ip", 1), ("ip", 4), ("l2", 1), ("l2", 4)])
@pytest.mark.parametrize("kind", ["duplicates", "zeros", "all equal", "unequal norms"])
def test_every_node_of_a_hard_corpus_can_be_reached(
    kind: str, metric_cells: tuple[Any, int], make_vectors: Make, write_parts: Make, build_index: Make
) -> None:
    metric, cells = metric_cells
    vectors = make_vectors(1600)
    if kind == "duplicates":
        vectors = np.repeat(vectors[:20], 80, axis=0)
    elif kind == "zeros":
        vectors[::5] = 0
    elif kind == "all equal":
        vectors[:] = vectors[0]
    else:
        vectors *= np.random.default_rng(0).exponential(size=(1600, 1)).astype(np.float32)
    path, plan = build_index(write_parts(vectors), IndexRecipe("HNSW8", metric, cells=cells))
    assert plan.cells == cells
    assert len(Reach(read(path)).missing()) == 0
    assert np.isfinite(open_index(path).search(vectors[:20], 10)[0]).all()


def test_repair_links_what_was_cut_off_and_loses_nothing(make_vectors: Make, write_parts: Make) -> None:
    vectors = make_vectors(800)
    index = faiss.index_factory(32, "HNSW4", faiss.METRIC_INNER_PRODUCT)
    index.add(vectors)
    bottom = Bottom(index)
    lost = np.arange(100, 140)
    links = bottom[:]
    links[np.isin(links, lost)] = -1
    bottom[:] = -np.sort(-links, axis=1)  # empty slots last, as faiss wants them
    before = Reach(index).missing()
    assert set(lost) <= set(before)
    assert repair(index, VectorFiles(write_parts(vectors))) == len(before)
    assert len(Reach(index).missing()) == 0
    assert repair(index, VectorFiles(write_parts(vectors))) == 0


@settings(max_examples=50, deadline=None)
@given(
    arrays.arrays(np.int64, (5, 12), elements=st.integers(-1, 9)),
    arrays.arrays(np.float32, (5, 10), elements=st.integers(0, 4).map(float)),
)
def test_the_best_distinct_links_are_kept(candidates: Any, similarity: Any) -> None:
    near = np.where(candidates >= 0, np.take_along_axis(similarity, np.maximum(candidates, 0), 1), -np.inf)
    kept = best_links(candidates, near.astype(np.float32), 4)
    for row, found, all_near in zip(candidates, kept, similarity, strict=True):
        wanted = sorted({int(c) for c in row if c >= 0}, key=lambda c: (-all_near[c], c))[:4]
        assert found.tolist() == wanted + [-1] * (4 - len(wanted))


def test_levels_are_those_faiss_would_draw(make_vectors: Make) -> None:
    n = 20_000  # more than one block
    index = faiss.IndexHNSWFlat(2, 8)
    index.hnsw.prepare_level_tab(n)
    np.testing.assert_array_equal(levels_of(n, 8), faiss.vector_to_array(index.hnsw.levels))


def test_cells_cover_the_corpus_and_the_border_has_its_share(make_vectors: Make, write_parts: Make) -> None:
    parts = write_parts(make_vectors(3000), [1000])
    plan = resolve(IndexRecipe("HNSW8", cells=6, border=0.25), 3000, 32)
    cells = assign(plan, VectorFiles(parts))
    first, second = cells.of_row.T
    assert set(first) == set(range(6))
    assert np.all(first != second)
    assert np.mean(second >= 0) == pytest.approx(0.25, abs=0.01)
    members = [cells.rows(cell) for cell in range(6)]
    assert sum(map(len, members)) == 3000 + np.sum(second >= 0)
    assert np.all(np.diff(members[0]) > 0)


def test_files_of_another_run_are_refused(make_vectors: Make, write_parts: Make, tmp_path: Path) -> None:
    parts = write_parts(make_vectors(1500))
    plan = resolve(IndexRecipe("HNSW8", cells=3), 1500, 32)
    trained, out = tmp_path / "trained", tmp_path / "out"
    facts = hnsw.train(plan, parts, trained)
    assert sum(facts["cells"]) == 2250
    assert hnsw.reads(plan, 7) == [tuple(range(7))] * 3
    shards = [tmp_path / str(number) for number in range(3)]
    for number, path in enumerate(shards):
        assert hnsw.shard(plan, trained, parts, number, path)["rows"] == facts["cells"][number]
    with pytest.raises(InputError, match="of another cell or plan"):
        hnsw.merge(plan, trained, parts, shards[::-1], out)
    other = resolve(IndexRecipe("HNSW8", cells=3), 1400, 32)
    with pytest.raises(InputError, match="not the plan's 1400"):
        hnsw.shard(other, trained, parts, 0, out)
    shards[1].write_bytes(shards[1].read_bytes()[:-9])
    with pytest.raises(InputError, match="not a whole shard"):
        hnsw.merge(plan, trained, parts, shards, out)
    trained.write_bytes(b"")
    with pytest.raises(InputError, match="not a whole file of cells"):
        Cells.load(trained, plan)
    assert not out.exists()
