"""A finished index file tells what it is made of, whoever's faiss wrote it."""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_model.errors import InputError
from rag_model.index.exact.scan import ExactIndex
from rag_model.index.files import anatomy
from rag_model.index.files.engine import faiss
from rag_model.index.quality.health import Trial, examine, sweep
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


def built(factory: str, vectors: np.ndarray, metric: int = faiss.METRIC_INNER_PRODUCT) -> Any:
    index = faiss.index_factory(vectors.shape[1], factory, metric)
    index.train(vectors)
    index.add(vectors)
    return index


def links_of(index: Any) -> list[np.ndarray]:
    """Return a view of each node's bottom list."""
    offsets, width = faiss.vector_to_array(index.hnsw.offsets), index.hnsw.nb_neighbors(0)
    flat = faiss.rev_swig_ptr(index.hnsw.neighbors.data(), index.hnsw.neighbors.size())
    return [flat[offset : offset + width] for offset in offsets[:-1]]


def walked(index: Any) -> set[int]:
    links, seen = links_of(index), {int(index.hnsw.entry_point)}
    front = deque(seen)
    while front:
        new = {int(target) for target in links[front.popleft()] if target >= 0} - seen
        seen |= new
        front.extend(new)
    return seen


@pytest.mark.parametrize("block", [7, 8_192])
def test_a_graph_is_counted_link_by_link(
    block: int, make_vectors: Make, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anatomy, "BLOCK", block)
    index = built("HNSW4", make_vectors(300))
    links = links_of(index)
    for node in (17, 200):  # nobody links to these any more
        for of_node in links:
            of_node[of_node == node] = -1
    links[0][:] = -1
    graph = examine(write(index)).graph
    assert graph is not None
    degrees = [int((of_node >= 0).sum()) for of_node in links]
    assert graph.degrees == tuple(np.bincount(degrees, minlength=9).tolist())
    assert graph.degrees[0] >= 1
    assert graph.degree == pytest.approx(np.mean(degrees))
    targets = {int(target) for of_node in links for target in of_node if target >= 0}
    assert graph.unlinked == 300 - len(targets) >= 2
    assert graph.unreachable == 300 - len(walked(index)) >= 2


def test_a_node_that_links_to_itself_alone_is_unlinked(make_vectors: Make, write: Write) -> None:
    index = built("HNSW4", make_vectors(50))
    links = links_of(index)
    for of_node in links:
        of_node[of_node == 9] = -1
    links[9][0] = 9
    graph = examine(write(index)).graph
    assert graph is not None
    assert graph.unlinked >= 1


def test_lists_are_weighed(write: Write) -> None:
    centres = np.eye(8, dtype=np.float32)
    quantizer = faiss.IndexFlatIP(8)
    quantizer.add(centres)
    index = faiss.IndexIVFFlat(quantizer, 8, 8, faiss.METRIC_INNER_PRODUCT)
    index.add(np.repeat(centres, [0, 1, 1, 2, 3, 4, 0, 9], axis=0))
    lists = examine(write(index)).lists
    assert lists is not None
    assert lists.sizes == (2, 2, 2, 1, 1)  # empty; 1; 2 and 3; 4 to 7; 8 to 15
    assert (lists.lists, lists.largest) == (8, 9)
    assert lists.imbalance == pytest.approx(8 * (1 + 1 + 4 + 9 + 16 + 81) / 20**2)


@pytest.mark.parametrize(
    ("factory", "least", "most"),
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
def test_what_codes_lose_is_what_decoding_shows(
    factory: str, least: float, most: float, make_vectors: Make, write_parts: Make, write: Write
) -> None:
    vectors = make_vectors(700)
    vectors[5] = 0  # no share of nothing can be lost
    index = built(factory, vectors)
    error = examine(write(index), write_parts(vectors, [300])).quantization_error
    assert error is not None
    lists = faiss.try_extract_index_ivf(index)
    if lists is not None:
        lists.make_direct_map()
    decoded = index.reconstruct_n(0, 700)
    kept = np.arange(700) != 5
    lost = np.square(decoded - vectors).sum(axis=1)[kept] / np.square(vectors).sum(axis=1)[kept]
    assert error == pytest.approx(lost.mean(), rel=1e-3)
    assert least <= error <= most


def test_a_large_index_is_judged_by_a_sample(
    make_vectors: Make, write_parts: Make, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = make_vectors(2_000)
    path, parts = write(built("IVF8,PQ8x4np", vectors)), write_parts(vectors, [500])
    sampled = examine(path, parts).quantization_error
    monkeypatch.setattr(anatomy, "_SAMPLE", 2_000)
    whole = examine(path, parts).quantization_error
    assert sampled == pytest.approx(whole, rel=0.1)
    assert sampled != whole
    assert examine(path).quantization_error is None


def test_codes_that_do_not_decode_are_not_judged_by_it(make_vectors: Make, write_parts: Make, write: Write) -> None:
    vectors = make_vectors(300)
    assert examine(write(built("IVF8,RaBitQ4", vectors)), write_parts(vectors)).quantization_error is None


def test_other_vectors_than_its_own_are_refused(make_vectors: Make, write_parts: Make, write: Write) -> None:
    vectors = make_vectors(300)
    index = faiss.index_factory(32, "IVF8,PQ8x4np")
    index.train(vectors)
    index.add_with_ids(vectors, np.arange(300) + 1)
    with pytest.raises(InputError, match="holds id 300 and there are 300 vectors"):
        examine(write(index), write_parts(vectors))
    with pytest.raises(InputError, match="299 x 32, not the plan's 300 x 32"):
        examine(write(index), write_parts(vectors[1:]))


def test_the_figures_have_the_names_of_a_manifest(make_vectors: Make, write_parts: Make, write: Write) -> None:
    vectors = make_vectors(300)
    graph = examine(write(built("HNSW8", vectors)), write_parts(vectors)).metrics()
    assert set(graph) == {"degree", "unlinked", "unreachable", "quantization_error"}
    lists = examine(write(built("IVF8,PQ8x4np", vectors))).metrics()
    assert set(lists) == {"imbalance", "largest_list"}


def test_a_second_look_is_part_of_the_price(make_vectors: Make, write_parts: Make, write: Write) -> None:
    vectors = make_vectors(300)
    parts, path = write_parts(vectors), write(built("IVF8,PQ8x4np", vectors))
    trial = Trial.of(ExactIndex(parts), make_vectors(20, seed=4), 5)
    plain = sweep(open_index(path), trial)
    twice = sweep(open_index(path, vectors=parts, defaults={"refine": 3}), trial)
    assert [effort.setting for effort in plain] == [f"nprobe={lists}" for lists in (1, 2, 4, 8)]
    assert [effort.setting for effort in twice] == [f"nprobe={lists}, refine=3" for lists in (1, 2, 4, 8)]
    assert [effort.distances for effort in twice] == pytest.approx([effort.distances + 15 for effort in plain])
    assert plain[-1].distances == 300


def test_a_damaged_file_is_told(tmp_path: Path, make_vectors: Make, write: Write) -> None:
    path = write(built("HNSW8", make_vectors(300)))
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(InputError, match=r"index\.faiss is not a complete"):
        examine(path)


@pytest.mark.parametrize("factory", ["HNSW8", "IVF4,Flat", "Flat"])
def test_a_corpus_of_equal_passages_is_found_whole(
    factory: str, make_vectors: Make, write_parts: Make, build_index: Make
) -> None:
    """Which of 600 equal vectors an index returns does not affect its quality."""
    vectors = np.repeat(make_vectors(1), 600, axis=0)
    parts = write_parts(vectors, [250])
    index = open_index(build_index(parts, IndexRecipe(factory))[0])
    trial = Trial.of(ExactIndex(parts), np.vstack([vectors[:3], make_vectors(3, seed=4)]), 10)
    assert [effort.recall_mean for effort in sweep(index, trial)][-1] == 1
    strangers = np.full((6, 10), -1)
    strangers[:, 0] = 599
    assert trial.recalls(strangers).tolist() == [0.1] * 6
