"""IVF-PQ and kin, added by part and merged, beside bare faiss that adds everything to one index.

One JSON line. Both sides start from the same trained index. For each factory: whether the merged file answers
with the same distances and ids (and is the same bytes), the seconds of all shards and the merge over those of
one shot, the seconds of the longest way (largest shard, then the merge) over one shot, peak memory of each
process, bytes on disk. One thread a process, as the jobs run it.
`python tests/benchmarks/bench_ivfpq.py [--vectors 200000] [--dim 96] [--parts 8]`, about a minute.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from rag_model.index import ivf
from rag_model.index.engine import Vectors, faiss
from rag_model.index.recipe import IndexPlan, IndexRecipe, resolve

FACTORIES = ("IVF1024,PQ24np", "OPQ24_96,IVF1024_HNSW32,PQ24np", "IVF1024,RaBitQ4")
QUERIES, K, NPROBE = 500, 100, 32


@dataclass(frozen=True, slots=True)
class Cost:
    """What one process took."""

    seconds: float
    peak_mb: int


def write_parts(folder: Path, n: int, dim: int, parts: int) -> list[Path]:
    """Write clustered vectors of uneven parts; return their files."""
    cuts = np.sort(np.random.default_rng(1).choice(np.arange(1, n), parts - 1, replace=False))
    edges = [0, *cuts.tolist(), n]
    paths = []
    for number, (first, last) in enumerate(pairwise(edges)):
        paths.append(folder / f"part-{number:05d}.npy")
        np.save(paths[-1], vectors_of(last - first, dim, number).astype(np.float16))
    return paths


def vectors_of(n: int, dim: int, seed: int) -> Vectors:
    """Return (n, dim) float32 unit vectors around 1,000 centres, of an inner dimension of 24."""
    shape, rng = np.random.default_rng(99), np.random.default_rng([seed, 7])
    centres, spread = shape.normal(size=(1000, 24)), shape.normal(size=(24, dim))
    vectors = np.tanh((centres[rng.integers(0, 1000, n)] + rng.normal(size=(n, 24))) @ spread / 5)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def alone(work: Callable[..., Any], *arguments: Any) -> Cost:
    """Do `work` in a fresh process with one faiss thread."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measured, work, *arguments).result()


def _measured(work: Callable[..., Any], *arguments: Any) -> Cost:
    faiss.omp_set_num_threads(1)
    start = time.perf_counter()
    work(*arguments)
    seconds = time.perf_counter() - start
    status = Path("/proc/self/status").read_text()  # ru_maxrss would still hold the parent's peak
    return Cost(seconds, int(status.partition("VmHWM:")[2].split()[0]) >> 10)


def one_shot(trained: Path, parts: list[Path], out: Path) -> None:
    """Add every part to one index, with faiss and nothing else."""
    index = faiss.read_index(str(trained))
    for part in parts:
        index.add(np.load(part).astype(np.float32))
    faiss.write_index(index, str(out))


def compare(plan: IndexPlan, parts: list[Path], folder: Path) -> dict[str, Any]:
    """Build a plan both ways; return what it took and whether the answers are equal."""
    trained, one, merged = folder / "trained", folder / "one.faiss", folder / "merged.faiss"
    shards = [folder / f"shard-{number:05d}" for number in range(len(parts))]
    training = alone(ivf.train, plan, parts, trained)
    whole = alone(one_shot, trained, parts, one)
    added = [alone(ivf.shard, plan, trained, [part], number, shards[number]) for number, part in enumerate(parts)]
    merge = alone(ivf.merge, plan, trained, parts, shards, merged)
    return {
        "factory": plan.factory,
        **same_answers(one, merged, plan.d),
        "train_s": round(training.seconds, 2),
        "one_shot_s": round(whole.seconds, 2),
        "shards_s": round(sum(cost.seconds for cost in added), 2),
        "merge_s": round(merge.seconds, 2),
        "time_ratio": round((sum(cost.seconds for cost in added) + merge.seconds) / whole.seconds, 2),
        "longest_way_ratio": round((max(cost.seconds for cost in added) + merge.seconds) / whole.seconds, 2),
        "one_shot_peak_mb": whole.peak_mb,
        "shard_peak_mb": max(cost.peak_mb for cost in added),
        "merge_peak_mb": merge.peak_mb,
        "index_mb": round(merged.stat().st_size / 1e6, 1),
        "shards_mb": round(sum(path.stat().st_size for path in shards) / 1e6, 1),
    }


def same_answers(one: Path, merged: Path, dim: int) -> dict[str, bool]:
    """Search both files with plain faiss; return whether distances, ids and bytes are equal."""
    queries = vectors_of(QUERIES, dim, 10**6)
    answers = []
    for path in (one, merged):
        index = faiss.read_index(str(path))
        faiss.extract_index_ivf(index).nprobe = NPROBE
        answers.append(index.search(queries, K))
    (distances, ids), (merged_distances, merged_ids) = answers
    return {
        "same_distances": bool(np.array_equal(distances, merged_distances)),
        "same_ids": bool(np.array_equal(ids, merged_ids)),
        "same_bytes": one.read_bytes() == merged.read_bytes(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vectors", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=96)
    parser.add_argument("--parts", type=int, default=8)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as name:
        parts = write_parts(Path(name), options.vectors, options.dim, options.parts)
        for factory in FACTORIES:
            plan = resolve(IndexRecipe(factory), options.vectors, options.dim)
            results.append(compare(plan, parts, Path(name)))
    report = {
        "benchmark": "ivfpq",
        "vectors": options.vectors,
        "dim": options.dim,
        "parts": options.parts,
        "equal": all(one["same_distances"] and one["same_ids"] for one in results),
        "indexes": results,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
