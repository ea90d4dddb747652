"""Vectors like embeddings: clustered, with a low intrinsic dimension, and optionally normalized."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from rag_model.index.build import run_stages
from rag_model.index.files.engine import Vectors, faiss
from rag_model.index.recipe import IndexRecipe, VectorPlan, resolve

MakeVectors = Callable[..., Vectors]
WriteParts = Callable[[Vectors, Sequence[int]], list[Path]]
BuildIndex = Callable[..., tuple[Path, VectorPlan]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, so that building an index again gives the same bytes."""
    thread_count = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(thread_count)


@pytest.fixture(scope="session")
def make_vectors() -> MakeVectors:
    def make(n: int, d: int = 32, seed: int = 0, unit: bool = True) -> Vectors:
        rng = np.random.default_rng(seed)
        centres = np.random.default_rng(99).normal(size=(60, 12))
        latent = centres[rng.integers(0, 60, n)] + 0.8 * rng.normal(size=(n, 12))
        spread = np.random.default_rng(98).normal(size=(12, d))
        vectors = np.tanh(latent @ spread / 4) + 0.05 * rng.normal(size=(n, d))
        if unit:
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors.astype(np.float32)

    return make


@pytest.fixture
def write_parts(tmp_path: Path) -> WriteParts:
    """Return a function that writes vectors as part files, split at the given rows."""

    def write(vectors: Vectors, cuts: Sequence[int] = ()) -> list[Path]:
        paths = []
        for number, rows in enumerate(np.split(vectors, list(cuts))):
            paths.append(tmp_path / f"part-{number:05d}.npy")
            np.save(paths[-1], rows)
        return paths

    return write


@pytest.fixture
def build_index(tmp_path: Path) -> BuildIndex:
    """Return a function that plans and builds an index of part files, and returns its file and its plan."""

    def make(parts: Sequence[Path], recipe: IndexRecipe, name: str = "index") -> tuple[Path, VectorPlan]:
        arrays = [np.load(path) for path in parts]
        plan = resolve(recipe, sum(map(len, arrays)), arrays[0].shape[1])
        workdir = tmp_path / f"{name}-work"
        workdir.mkdir()
        run_stages(plan, parts, tmp_path / f"{name}.faiss", workdir)
        return tmp_path / f"{name}.faiss", plan

    return make
