"""`build_index` writes a file that plain faiss reads, from arrays or files."""

from pathlib import Path

import faiss
import numpy as np
import pytest

from rag_model.errors import InputError, ResourceError, UsageError
from rag_model.index.build import build_index, get_kept_rows_path, install_index
from rag_model.index.recipe import IndexRecipe

VECTORS = np.random.default_rng(3).standard_normal((600, 16)).astype(np.float32)


@pytest.mark.parametrize("factory", ["HNSW8", "IVF8,SQ8", "Flat"])
def test_build_index_from_an_array(factory: str, tmp_path: Path) -> None:
    out = tmp_path / "out.faiss"
    plan = build_index(VECTORS, out, IndexRecipe(factory, "l2", search={"efSearch": 77} if "HNSW" in factory else {}))
    index = faiss.read_index(str(out))
    assert (plan.n, plan.d, index.ntotal, index.metric_type) == (600, 16, 600, faiss.METRIC_L2)
    assert (index.search(VECTORS, 1)[1][:, 0] == np.arange(600)).mean() > 0.95
    assert not hasattr(index, "hnsw") or index.hnsw.efSearch == 77
    assert [path.name for path in tmp_path.iterdir()] == ["out.faiss"]


def test_rows_file_exists_only_if_rows_were_dropped(tmp_path: Path) -> None:
    out, vectors = tmp_path / "out.faiss", VECTORS.copy()
    vectors[[3, 77]] = np.inf
    np.save(tmp_path / "vectors.npy", vectors)
    build_index([tmp_path / "vectors.npy"], out, IndexRecipe("Flat", "l2"), invalid="drop")
    rows = np.load(get_kept_rows_path(out))
    assert faiss.read_index(str(out)).ntotal == len(rows) == 598
    np.testing.assert_array_equal(rows, np.delete(np.arange(600), [3, 77]))
    build_index(VECTORS, out, IndexRecipe("Flat", "l2"))
    assert not get_kept_rows_path(out).exists()


def test_failed_installation_keeps_the_rows_of_the_previous_index(tmp_path: Path) -> None:
    out, vectors = tmp_path / "out.faiss", VECTORS.copy()
    vectors[3] = np.nan
    build_index(vectors, out, IndexRecipe("Flat", "l2"), invalid="drop")
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for kept_rows in (None, np.arange(7)):
        (tmp_path / "damaged").write_bytes(b"IxF2")
        with pytest.raises(InputError):
            install_index(tmp_path / "damaged", out, {}, kept_rows)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_refinement_by_outside_vectors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"use Refine\(SQfp16\) instead"):
        build_index(VECTORS, tmp_path / "out", IndexRecipe("IVF8,SQ8,Refine(vectors)"))
    assert list(tmp_path.iterdir()) == []


def test_failed_build_keeps_the_previous_file(tmp_path: Path) -> None:
    out = tmp_path / "out.faiss"
    out.write_bytes(b"previous file")
    with pytest.raises(UsageError):
        build_index(VECTORS, out, IndexRecipe("IVF,PQ5"))
    assert out.read_bytes() == b"previous file"
    with pytest.raises(ResourceError, match="cannot write"):
        install_index(tmp_path / "none", tmp_path / "out.faiss" / "below", {}, None)
