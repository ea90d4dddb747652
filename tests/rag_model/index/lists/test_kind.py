from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.errors import InputError
from rag_model.index.exact_search import ExactIndex
from rag_model.index.files import engine
from rag_model.index.files.engine import faiss, read_index, write_index
from rag_model.index.files.pieces import path_opener
from rag_model.index.kind import PreviousPiece
from rag_model.index.lists import kind
from rag_model.index.lists.kind import KIND
from rag_model.index.lists.training import train_index
from rag_model.index.quality.health import compute_list_stats
from rag_model.index.quality.results import compute_recall
from rag_model.index.recipe import IndexRecipe, VectorPlan, resolve
from rag_model.index.search import open_index

Make = Callable[..., Any]  # fixtures of conftest.py

FACTORIES = [
    "IVF16,PQ8np",
    "IVF16_HNSW8,PQ4x4np",
    "OPQ4_16,IVF8,PQ4x4np",
    "RR32,IVF8,RaBitQ4",
    "IVF8,SQ8",
    "IVF4,Flat",
    "Flat",
    "IVF16,PQ8x4np,Refine(SQfp16)",
    "OPQ4_16,IVF8,PQ4x4np,Refine(SQ8)",
    "RR32,IVF8,RaBitQ,Refine(Flat)",
]


@pytest.fixture(scope="module")
def trained_indexes(make_vectors: Make) -> dict[tuple[str, str], Any]:
    sample = make_vectors(1500, 32, unit=False)
    indexes = {}
    for metric in ("ip", "l2"):
        for factory in FACTORIES:
            plan = resolve(IndexRecipe(factory, metric), len(sample), 32)
            assert plan.factory == factory
            indexes[factory, metric] = train_index(plan, sample)
    return indexes


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_merge_equals_adding_all_vectors_to_faiss(
    data: st.DataObject,
    trained_indexes: dict[tuple[str, str], Any],
    make_vectors: Make,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """However a corpus is cut, distances, ids and bytes equal those of adding all parts to one index."""
    factory, metric = data.draw(st.sampled_from(FACTORIES)), data.draw(st.sampled_from(["ip", "l2"]))
    n = data.draw(st.integers(1, 400))
    vectors = make_vectors(n, 32, data.draw(st.integers(0, 5)), unit=data.draw(st.booleans()))
    repeated = data.draw(st.lists(st.integers(0, n - 1), max_size=20))
    vectors[repeated] = vectors[0]
    vectors[data.draw(st.lists(st.integers(0, n - 1), max_size=5))] = 0
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=5)))

    folder = tmp_path_factory.mktemp("merge")
    write_index(trained_indexes[factory, metric], folder / "trained")
    parts, pieces = [], []
    for number, rows in enumerate(np.split(vectors, cuts)):
        parts.append(folder / f"{number}.npy")
        pieces.append(folder / f"{number}.piece")
        np.save(parts[-1], rows)
    expected_index = read_index(folder / "trained")
    for rows in np.split(vectors, cuts):
        expected_index.add(rows)
    plan = _make_plan(factory, metric, n)
    for number, path in enumerate(parts):
        stats = kind.KIND.scatter(plan, folder / "trained", path, number, pieces[number])
        assert stats["rows"] == len(np.load(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "BLOCK_BYTES", data.draw(st.sampled_from([1, 300, 3000, 32 << 20])))
        kind.KIND.merge(
            plan, folder / "trained", parts, [path_opener(piece) for piece in pieces], [], folder / "merged"
        )
    write_index(expected_index, folder / "expected")

    k, queries = min(n, 10), make_vectors(7, 32, 77)
    merged = faiss.read_index(str(folder / "merged"))
    for actual, expected in zip(merged.search(queries, k), expected_index.search(queries, k), strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert (folder / "merged").read_bytes() == (folder / "expected").read_bytes()


def _make_plan(factory: str, metric: Any, n: int) -> VectorPlan:
    """Return the plan of a corpus that is large enough for the factory, with n as its size."""
    return replace(resolve(IndexRecipe(factory, metric), 1500, 32), n=n)


def test_build_is_reproducible(make_vectors: Make, write_parts: Make, build_index: Make) -> None:
    parts = write_parts(make_vectors(1100), [700, 701])
    recipe = IndexRecipe("OPQ4_8,IVF,PQ4x4np", seed=3)
    first, plan = build_index(parts, recipe, "first")
    second, _ = build_index(parts, recipe, "second")
    assert first.read_bytes() == second.read_bytes()
    assert faiss.read_index(str(first)).ntotal == plan.n == 1100


def _scatter_parts(plan: VectorPlan, parts: list[Path], folder: Path) -> list[Path]:
    """Train and scatter in a new folder; return the pieces, which lie next to the trained file."""
    folder.mkdir()
    kind.KIND.train(plan, parts, folder / "trained")
    pieces = [folder / f"piece-{number}" for number in range(len(parts))]
    for number, part in enumerate(parts):
        kind.KIND.scatter(plan, folder / "trained", part, number, pieces[number])
    return pieces


def _merge(plan: VectorPlan, parts: list[Path], pieces: list[Path], out: Path) -> dict[str, Any]:
    return kind.KIND.merge(plan, pieces[0].parent / "trained", parts, [path_opener(piece) for piece in pieces], [], out)


def test_stages_report_the_stats_of_their_files(make_vectors: Make, write_parts: Make, tmp_path: Path) -> None:
    parts = write_parts(make_vectors(1200), [500])
    plan = resolve(IndexRecipe("IVF16,PQ4x4np"), 1200, 32)
    assert kind.KIND.train(plan, parts, tmp_path / "trained")["sample"] == 1200
    pieces = _scatter_parts(plan, parts, tmp_path / "build")
    stats = _merge(plan, parts, pieces, tmp_path / "out")
    merged = read_index(tmp_path / "out")
    lists = faiss.extract_index_ivf(merged)
    sizes = [lists.invlists.list_size(number) for number in range(16)]
    assert (stats["rows"], stats["bytes"]) == (1200, (tmp_path / "out").stat().st_size)
    list_stats = compute_list_stats(merged)
    assert list_stats.largest == max(sizes)
    assert list_stats.imbalance == pytest.approx(16 * sum(size**2 for size in sizes) / 1200**2, rel=1e-3)
    assert lists.nprobe == plan.search["nprobe"]


@pytest.mark.parametrize("factory", ["IVF16,Flat", "IVF1,PQ4x4np"])
def test_seed_applies_to_every_clustering(
    factory: str, make_vectors: Make, write_parts: Make, build_index: Make
) -> None:
    parts = write_parts(make_vectors(1100))
    index_bytes = [build_index(parts, IndexRecipe(factory, seed=seed), str(seed))[0].read_bytes() for seed in (3, 4)]
    assert index_bytes[0] != index_bytes[1]


@pytest.mark.parametrize("filled", [1, 2, 3, 4])
def test_sparse_list_sizes_are_written_as_in_faiss(filled: int, write_parts: Make, tmp_path: Path) -> None:
    """faiss stores the sizes of all lists if more than half have vectors, otherwise only of those that have."""
    centroids = np.eye(4, 8, dtype=np.float32)
    expected_index = faiss.index_factory(8, "IVF4,Flat")
    expected_index.quantizer.add(centroids)
    expected_index.is_trained = True
    write_index(expected_index, tmp_path / "trained")
    parts, pieces = write_parts(np.repeat(centroids[:filled], 50, axis=0)), [tmp_path / "piece"]
    expected_index.add(np.load(parts[0]))
    assert sum(expected_index.invlists.list_size(number) > 0 for number in range(4)) == filled
    plan = resolve(IndexRecipe("IVF4,Flat", "l2"), 50 * filled, 8)
    kind.KIND.scatter(plan, tmp_path / "trained", parts[0], 0, pieces[0])
    _merge(plan, parts, pieces, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == faiss.serialize_index(expected_index).tobytes()


@pytest.mark.parametrize("d", [1, 9])
@pytest.mark.parametrize("distinct", [1, 7, 0])
@pytest.mark.parametrize("factory", ["IVF,RaBitQ4,Refine(SQ8)", "IVF_HNSW8,PQ", "IVF,RaBitQ", "IVF,SQ8"])
def test_build_from_few_distinct_vectors(
    factory: str, distinct: int, d: int, write_parts: Make, build_index: Make, tmp_path: Path
) -> None:
    """There are fewer distinct vectors than centroids, or only zeros, and one part is empty."""
    rng = np.random.default_rng(1)
    vectors = rng.normal(size=(max(1, distinct), d))[rng.integers(0, max(1, distinct), 1100)].astype(np.float32)
    vectors = vectors if distinct else np.zeros_like(vectors)
    parts = write_parts(vectors, [500, 500])
    path, plan = build_index(parts, IndexRecipe(factory, "l2"))
    expected_index = read_index(tmp_path / "index-work" / "trained")
    for part in parts:
        expected_index.add(np.load(part))
    assert path.read_bytes() == faiss.serialize_index(expected_index).tobytes()
    scores, rows = open_index(path, defaults=plan.search).search(vectors[:3], 5, nprobe=len(vectors))
    assert np.all(np.isfinite(scores))
    assert all(len(set(hits)) == 5 for hits in rows.tolist())


@pytest.mark.parametrize("factory", ["PCA8,IVF4,Flat", "PCAR8,IVF4,SQ8", "OPQ4_8,IVF4,Flat"])
def test_products_of_reduced_vectors_keep_the_mean(factory: str, write_parts: Make, build_index: Make) -> None:
    """The mean is in a dimension whose small variance decides the order of products."""
    vectors = np.random.default_rng(4).normal(size=(1100, 32)).astype(np.float32)
    vectors[:, 7:] *= 0.1
    vectors[:, 20] += 50
    path, _ = build_index(write_parts(vectors), IndexRecipe(factory))
    queries = vectors[::60]
    expected = np.argsort(-queries @ vectors.T, axis=1)[:, :20]
    rows = open_index(path).search(queries, 20, nprobe=4)[1]
    recall = np.mean([len({*row} & {*best}) / 20 for row, best in zip(rows.tolist(), expected.tolist(), strict=True)])
    assert recall > 0.8


@pytest.mark.skipif(not engine.has_gpu(), reason="faiss sees no GPU")
@pytest.mark.parametrize("factory", ["IVF64,PQ16np", "OPQ16,IVF64_HNSW8,PQ16np", "IVF64,RaBitQ"])
def test_gpu_build_has_equal_recall(
    factory: str, make_vectors: Make, write_parts: Make, build_index: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, questions, recalls = write_parts(make_vectors(5000), [2000]), make_vectors(100, seed=5), []
    scores, truth = ExactIndex(parts).search(questions, 10)
    for name in ("gpu", "cpu"):
        path, plan = build_index(parts, IndexRecipe(factory), name)
        rows = open_index(path, defaults=plan.search).search(questions, 10)[1]
        recalls.append(compute_recall(rows, truth, scores, 10).mean())
        monkeypatch.setattr(engine, "has_gpu", lambda: False)
    assert recalls[0] == pytest.approx(recalls[1], abs=0.03)


def test_shard_of_lists_is_refused(make_vectors: Make, write_parts: Make, tmp_path: Path) -> None:
    plan = resolve(IndexRecipe("IVF16,Flat"), 1200, 32)
    assert plan.shards == 0
    with pytest.raises(ValueError, match="no shards"):
        KIND.shard(plan, tmp_path / "trained", [], 0, tmp_path / "out")


def test_pieces_that_do_not_belong_are_refused(make_vectors: Make, write_parts: Make, tmp_path: Path) -> None:
    parts, out = write_parts(make_vectors(1200), [500]), tmp_path / "out"
    plan, other_plan = (resolve(IndexRecipe(factory), 1200, 32) for factory in ("IVF16,Flat", "IVF8,Flat"))
    pieces = _scatter_parts(plan, parts, tmp_path / "mine")
    with pytest.raises(InputError, match="part 0 is a piece of another build"):
        _merge(plan, parts, pieces[::-1], out)
    other_pieces = _scatter_parts(other_plan, parts, tmp_path / "theirs")
    with pytest.raises(InputError, match="part 1 is a piece of another build"):
        _merge(plan, parts, [pieces[0], other_pieces[1]], out)
    kind.KIND.scatter(plan, tmp_path / "mine" / "trained", parts[0], 1, pieces[1])
    with pytest.raises(InputError, match="part 1 holds 500 vectors and the part has 700"):
        _merge(plan, parts, pieces, out)
    kind.KIND.scatter(plan, tmp_path / "mine" / "trained", parts[1], 1, pieces[1])
    pieces[1].write_bytes(pieces[1].read_bytes()[:-100])
    with pytest.raises(InputError, match="part 1 is truncated or damaged"):
        _merge(plan, parts, pieces, out)
    pieces[1].unlink()
    with pytest.raises(InputError, match=r"cannot open .* part 1"):
        _merge(plan, parts, pieces, out)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_vectors_of_previous_pieces_are_not_encoded_again(
    data: st.DataObject,
    trained_indexes: dict[tuple[str, str], Any],
    make_vectors: Make,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Rows stay, move, are repeated, removed or new; the bytes are those of a piece that encodes all rows."""
    # The last bits of a rotated vector depend on how many are rotated at once, and RaBitQ keeps its length.
    factories = [factory for factory in FACTORIES if not factory.startswith("RR")]
    factory, metric = data.draw(st.sampled_from(factories)), data.draw(st.sampled_from(["ip", "l2"]))
    plan, folder = resolve(IndexRecipe(factory, metric), 1500, 32), tmp_path_factory.mktemp("reused")
    write_index(trained_indexes[factory, metric], folder / "trained")
    old_vectors = make_vectors(300, seed=1, unit=False)
    new_vectors = make_vectors(data.draw(st.integers(0, 60)), seed=2, unit=False)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    remaining = rng.integers(0, 300, data.draw(st.integers(0, 300)))
    current = rng.permutation(np.concatenate([old_vectors[remaining], new_vectors]))
    if data.draw(st.booleans()):
        old_vectors, current = old_vectors.astype(np.float16), current.astype(np.float16)
    split = data.draw(st.integers(1, 299))
    paths = [folder / name for name in ("first.npy", "second.npy", "current.npy")]
    for path, vectors in zip(paths, (old_vectors[:split], old_vectors[split:], current), strict=True):
        np.save(path, vectors)
    previous_pieces = []
    for number, path in enumerate(paths[:2]):
        kind.KIND.scatter(plan, folder / "trained", path, number, folder / f"piece-{number}")
        previous_pieces.append(PreviousPiece(path, path_opener(folder / f"piece-{number}"), number))
    KIND.scatter(plan, folder / "trained", paths[2], 7, folder / "expected")
    stats = KIND.carry(plan, folder / "trained", paths[2], 7, previous_pieces, folder / "reused")
    assert (folder / "reused").read_bytes() == (folder / "expected").read_bytes()
    assert stats["rows"] == len(current)
    assert stats["encoded"] == (len(current) if factory == "Flat" else len(new_vectors))


def test_damaged_previous_piece_is_refused(make_vectors: Make, write_parts: Make, tmp_path: Path) -> None:
    plan, parts = resolve(IndexRecipe("IVF8,SQ8"), 1200, 32), write_parts(make_vectors(1200), [500])
    (piece, out), trained = _scatter_parts(plan, parts, tmp_path / "mine"), tmp_path / "mine" / "trained"

    def carry(number: int) -> None:
        KIND.carry(plan, trained, parts[1], 1, [PreviousPiece(parts[0], path_opener(piece), number)], out)

    with pytest.raises(InputError, match="part 3 is a piece of another build"):
        carry(3)
    data = piece.read_bytes()
    piece.write_bytes(data[:-1])
    with pytest.raises(InputError, match="part 0 is truncated or damaged"):
        carry(0)
    offset = len(data) - 500 * (4 + 32)  # the first row of the sorted codes
    piece.write_bytes(data.replace(b"'row'", b"'wor'"))
    with pytest.raises(InputError, match="part 0 does not hold each of the part's 500 rows once"):
        carry(0)
    piece.write_bytes(data[:offset] + b"\xff\xff\xff\xff" + data[offset + 4 :])
    with pytest.raises(InputError, match="part 0 does not hold each of the part's 500 rows once"):
        carry(0)
    parts[0].write_bytes(parts[0].read_bytes()[:-1])
    with pytest.raises(InputError, match=r"part-00000\.npy is not a complete \.npy file"):
        carry(0)


@pytest.mark.parametrize("factory", ["IVF8,PQ4x4np", "Flat"])
def test_error_names_the_invalid_row(factory: str, make_vectors: Make, write_parts: Make, tmp_path: Path) -> None:
    vectors = make_vectors(1200)
    plan = resolve(IndexRecipe(factory), 1200, 32)
    parts = write_parts(vectors, [500])
    kind.KIND.train(plan, parts, tmp_path / "trained")
    vectors[777, 3] = np.nan
    parts = write_parts(vectors, [500])
    with pytest.raises(InputError, match=r"row 277 of .*part-00001.npy holds a NaN"):
        kind.KIND.scatter(plan, tmp_path / "trained", parts[1], 1, tmp_path / "piece")


def test_part_of_another_dimension_is_refused(make_vectors: Make, write_parts: Make, tmp_path: Path) -> None:
    plan, parts = resolve(IndexRecipe("IVF8,Flat"), 1200, 32), write_parts(make_vectors(1200))
    kind.KIND.train(plan, parts, tmp_path / "trained")
    np.save(parts[0], make_vectors(1200, 16))
    with pytest.raises(InputError, match="16 dimensions, the index has 32"):
        kind.KIND.scatter(plan, tmp_path / "trained", parts[0], 0, tmp_path / "piece")


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("factory", [factory for factory in FACTORIES if factory != "Flat"])
def test_follow_adapts_lists_and_codes_but_not_the_rotation(
    factory: str,
    metric: Any,
    trained_indexes: dict[tuple[str, str], Any],
    make_vectors: Make,
    write_parts: Make,
    tmp_path: Path,
) -> None:
    corpus = make_vectors(1500, 32, unit=False)
    added = 4 * np.roll(corpus[:60] + corpus[0], 5, axis=1)  # far from all other vectors
    vectors = np.concatenate([corpus, added]).astype(np.float32)
    plan = resolve(IndexRecipe(factory, metric), len(vectors), 32)
    old_file, new_file = tmp_path / "old", tmp_path / "new"
    write_index(trained_indexes[factory, metric], old_file)
    stats = kind.KIND.follow(plan, old_file, write_parts(vectors), new_file)
    assert stats["losses"] == kind.KIND.losses(plan, new_file, vectors)
    for name, loss in kind.KIND.losses(plan, old_file, added).items():
        assert kind.KIND.losses(plan, new_file, added)[name] < 0.95 * loss, name
    if "OPQ" in factory:
        np.testing.assert_array_equal(*(read_rotation(read_index(file)) for file in (old_file, new_file)))
    second_file = tmp_path / "again"
    kind.KIND.follow(plan, old_file, write_parts(vectors), second_file)
    assert second_file.read_bytes() == new_file.read_bytes()


def read_rotation(index: Any) -> Any:
    base = faiss.downcast_index(index.base_index) if isinstance(index, faiss.IndexRefine) else index
    return faiss.vector_to_array(faiss.downcast_VectorTransform(base.chain.at(0)).A)


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_recalls_accept_any_of_several_equal_vectors(metric: Any, tmp_path: Path) -> None:
    """All vectors are as near as the tenth neighbor, so every row that is found counts."""
    vectors = np.tile(np.random.default_rng(0).standard_normal((2, 16)).astype(np.float32), (400, 1))
    plan = resolve(IndexRecipe("IVF2,Flat", metric), len(vectors), 16)
    write_index(train_index(plan, vectors), tmp_path / "trained")
    assert KIND.recalls(plan, tmp_path / "trained", vectors[:400], vectors[400:]) == (1.0, 1.0)
