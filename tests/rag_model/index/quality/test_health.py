"""The statistics of index files, also of files that plain faiss wrote."""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_model.errors import InputError
from rag_model.index.exact_search import ExactIndex
from rag_model.index.files.engine import faiss
from rag_model.index.files.vectors import VectorFiles
from rag_model.index.quality import health
from rag_model.index.quality.health import inspect_index
from rag_model.index.quality.sweep import VectorQuerySet, sweep_settings
from rag_model.index.recipe import IndexRecipe
from rag_model.index.search import open_index

Make = Callable[..., Any]  # fixtures of conftest.py
Write = Callable[[Any], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a faiss index as plain faiss does."""

    def to_file(index: Any) -> Path:
        faiss.write_index(index, str(tmp_path / "index.faiss"))
        return tmp_path / "index.faiss"

    return to_file


def build_faiss(factory: str, vectors: np.ndarray, metric: int = faiss.METRIC_INNER_PRODUCT) -> Any:
    index = faiss.index_factory(vectors.shape[1], factory, metric)
    index.train(vectors)
    index.add(vectors)
    return index


def view_links(index: Any) -> list[np.ndarray]:
    """Return a view of each node's bottom list."""
    offsets, width = faiss.vector_to_array(index.hnsw.offsets), index.hnsw.nb_neighbors(0)
    flat = faiss.rev_swig_ptr(index.hnsw.neighbors.data(), index.hnsw.neighbors.size())
    return [flat[offset : offset + width] for offset in offsets[:-1]]


def find_reachable(index: Any) -> set[int]:
    links, visited = view_links(index), {int(index.hnsw.entry_point)}
    front = deque(visited)
    while front:
        targets = {int(target) for target in links[front.popleft()] if target >= 0} - visited
        visited |= targets
        front.extend(targets)
    return visited


@pytest.mark.parametrize("block", [7, 8_192])
def test_graph_stats_count_every_link(
    block: int, make_vectors: Make, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "BLOCK_NODES", block)
    index = build_faiss("HNSW4", make_vectors(300))
    links = view_links(index)
    for node in (17, 200):  # no node links to these any more
        for node_links in links:
            node_links[node_links == node] = -1
    links[0][:] = -1
    graph = inspect_index(write(index)).graph
    assert graph is not None
    degrees = [int((node_links >= 0).sum()) for node_links in links]
    assert graph.degrees == tuple(np.bincount(degrees, minlength=9).tolist())
    assert graph.degrees[0] >= 1
    assert graph.degree == pytest.approx(np.mean(degrees))
    targets = {int(target) for node_links in links for target in node_links if target >= 0}
    assert graph.unlinked == 300 - len(targets) >= 2
    assert graph.unreachable == 300 - len(find_reachable(index)) >= 2


def test_node_with_only_a_self_link_is_unlinked(make_vectors: Make, write: Write) -> None:
    index = build_faiss("HNSW4", make_vectors(50))
    links = view_links(index)
    for node_links in links:
        node_links[node_links == 9] = -1
    links[9][0] = 9
    graph = inspect_index(write(index)).graph
    assert graph is not None
    assert graph.unlinked >= 1


def test_list_stats_measure_imbalance(write: Write) -> None:
    centres = np.eye(8, dtype=np.float32)
    quantizer = faiss.IndexFlatIP(8)
    quantizer.add(centres)
    index = faiss.IndexIVFFlat(quantizer, 8, 8, faiss.METRIC_INNER_PRODUCT)
    index.add(np.repeat(centres, [0, 1, 1, 2, 3, 4, 0, 9], axis=0))
    lists = inspect_index(write(index)).lists
    assert lists is not None
    assert lists.sizes == (2, 2, 2, 1, 1)  # empty; 1; 2 and 3; 4 to 7; 8 to 15
    assert (lists.lists, lists.largest) == (8, 9)
    assert lists.imbalance == pytest.approx(8 * (1 + 1 + 4 + 9 + 16 + 81) / 20**2)


@pytest.mark.parametrize(
    ("factory", "min_error", "max_error"),
    [
        ("HNSW8", 0, 0),
        ("Flat", 0, 0),
        ("IVF8,Flat", 0, 0),
        ("HNSW8_SQfp16", 1e-9, 1e-6),
        ("HNSW8_SQ8", 1e-6, 1e-3),
        ("IVF8,SQ8", 1e-6, 1e-3),
        ("IVF8,PQ8x4np", 0.005, 0.4),
        ("OPQ4_16,IVF8,PQ4x4np", 0.005, 0.4),
    ],
)
def test_quantization_error_equals_decoding_error(
    factory: str, min_error: float, max_error: float, make_vectors: Make, write_parts: Make, write: Write
) -> None:
    vectors = make_vectors(700)
    vectors[5] = 0  # the relative error of a zero vector is undefined
    index = build_faiss(factory, vectors)
    error = inspect_index(write(index), VectorFiles(write_parts(vectors, [300]))).quantization_error
    assert error is not None
    lists = faiss.try_extract_index_ivf(index)
    if lists is not None:
        lists.make_direct_map()
    decoded = index.reconstruct_n(0, 700)
    is_nonzero = np.arange(700) != 5
    relative_errors = np.square(decoded - vectors).sum(axis=1)[is_nonzero] / np.square(vectors).sum(axis=1)[is_nonzero]
    assert error == pytest.approx(relative_errors.mean(), rel=1e-3)
    assert min_error <= error <= max_error


def test_quantization_error_of_a_large_index_is_sampled(
    make_vectors: Make, write_parts: Make, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = make_vectors(2_000)
    path, parts = write(build_faiss("IVF8,PQ8x4np", vectors)), write_parts(vectors, [500])
    sampled_error = inspect_index(path, VectorFiles(parts)).quantization_error
    monkeypatch.setattr(health, "_SAMPLE_ROWS", 2_000)
    exact_error = inspect_index(path, VectorFiles(parts)).quantization_error
    assert sampled_error == pytest.approx(exact_error, rel=0.1)
    assert sampled_error != exact_error
    assert inspect_index(path).quantization_error is None


def test_rabitq_has_no_quantization_error(make_vectors: Make, write_parts: Make, write: Write) -> None:
    vectors = make_vectors(300)
    path = write(build_faiss("IVF8,RaBitQ4", vectors))
    assert inspect_index(path, VectorFiles(write_parts(vectors))).quantization_error is None


def test_inspect_refuses_vectors_of_another_index(make_vectors: Make, write_parts: Make, write: Write) -> None:
    vectors = make_vectors(300)
    index = faiss.index_factory(32, "IVF8,PQ8x4np")
    index.train(vectors)
    index.add_with_ids(vectors, np.arange(300) + 1)
    with pytest.raises(InputError, match="holds id 300 and there are 300 vectors"):
        inspect_index(write(index), VectorFiles(write_parts(vectors)))
    with pytest.raises(InputError, match="holds 300 x 32 vectors, not 299 x 32"):
        inspect_index(write(index), VectorFiles(write_parts(vectors[1:])))


def test_health_metrics_have_manifest_names(make_vectors: Make, write_parts: Make, write: Write) -> None:
    vectors = make_vectors(300)
    graph = inspect_index(write(build_faiss("HNSW8", vectors)), VectorFiles(write_parts(vectors))).metrics()
    assert set(graph) == {"degree", "unlinked", "unreachable", "quantization_error"}
    lists = inspect_index(write(build_faiss("IVF8,PQ8x4np", vectors))).metrics()
    assert set(lists) == {"imbalance", "largest_list"}


def test_distances_include_the_refinement(make_vectors: Make, write_parts: Make, write: Write) -> None:
    vectors = make_vectors(300)
    parts, path = write_parts(vectors), write(build_faiss("IVF8,PQ8x4np", vectors))
    query_set = VectorQuerySet.from_exact_search(ExactIndex(parts), make_vectors(20, seed=4), 5)
    efforts = sweep_settings(open_index(path), query_set)
    refined = sweep_settings(open_index(path, vectors=parts, defaults={"refine": 3}), query_set)
    assert [effort.setting for effort in efforts] == [f"nprobe={lists}" for lists in (1, 2, 4, 8)]
    assert [effort.setting for effort in refined] == [f"nprobe={lists}, refine=3" for lists in (1, 2, 4, 8)]
    assert [effort.distances for effort in refined] == pytest.approx([effort.distances + 15 for effort in efforts])
    assert efforts[-1].distances == 300


def test_inspect_refuses_a_damaged_file(tmp_path: Path, make_vectors: Make, write: Write) -> None:
    path = write(build_faiss("HNSW8", make_vectors(300)))
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(InputError, match=r"index\.faiss is not a complete"):
        inspect_index(path)


@pytest.mark.parametrize("factory", ["HNSW8", "IVF4,Flat", "Flat"])
def test_recall_is_one_for_equal_passages(
    factory: str, make_vectors: Make, write_parts: Make, build_index: Make
) -> None:
    """Which of 600 equal vectors an index returns does not affect its quality."""
    vectors = np.repeat(make_vectors(1), 600, axis=0)
    parts = write_parts(vectors, [250])
    index = open_index(build_index(parts, IndexRecipe(factory))[0])
    queries = np.vstack([vectors[:3], make_vectors(3, seed=4)])
    query_set = VectorQuerySet.from_exact_search(ExactIndex(parts), queries, 10)
    assert [effort.recall_mean for effort in sweep_settings(index, query_set)][-1] == 1
    rows = np.full((6, 10), -1)
    rows[:, 0] = 599
    assert query_set.compute_recalls(rows).tolist() == [0.1] * 6
