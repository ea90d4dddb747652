"""Measure IVF-PQ and similar indexes, coded by part and merged as a stream, beside one index of bare faiss.

Both sides start from the same trained index. For each factory the line has: whether the merged file
returns the same distances and ids, and is the same bytes; the CPU seconds of all parts and the
merge over those of one shot; the seconds of the critical path (the largest part, then the merge)
over those of one shot; and the anonymous memory of each beyond its interpreter and libraries,
beside the bytes of the index. Each process has one thread, as in jobs. Prints one JSON line.
`python tests/benchmarks/bench_ivfpq.py [--vectors 200000] [--dim 96] [--parts 8] [--factory
IVF1024,PQ24np …]` takes two minutes.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from isolated_run import WorkCost, run_alone
from synthetic import Synthetic

from rag_model.index.files.engine import Vectors, faiss
from rag_model.index.files.pieces import path_opener
from rag_model.index.lists import kind
from rag_model.index.recipe import IndexRecipe, VectorPlan, resolve

FACTORIES = (
    "IVF1024,PQ24np",
    "OPQ24_96,IVF1024_HNSW32,PQ24np",
    "IVF1024,RaBitQ4",
    "IVF1024,PQ24np,Refine(SQfp16)",
    "IVF1024,Flat",
)
QUERIES, K, NPROBE = 500, 100, 32


def build_one_shot(trained: Path, parts: list[Path], out: Path) -> None:
    """Add every part to one index with bare faiss."""
    index = faiss.read_index(str(trained))
    for part in parts:
        index.add(np.load(part).astype(np.float32))
    faiss.write_index(index, str(out))


def compare(plan: VectorPlan, parts: list[Path], questions: Vectors, folder: Path) -> dict[str, Any]:
    """Build a plan both ways; return the costs, and whether the results are equal."""
    trained_path, one_shot_path, merged_path = folder / "trained", folder / "one.faiss", folder / "merged.faiss"
    pieces = [folder / f"piece-{number:05d}" for number in range(len(parts))]
    training = run_alone(kind.KIND.train, plan, parts, trained_path)
    one_shot_cost = run_alone(build_one_shot, trained_path, parts, one_shot_path)
    scatters = [
        run_alone(kind.KIND.scatter, plan, trained_path, part, number, pieces[number])
        for number, part in enumerate(parts)
    ]
    merge = run_alone(
        kind.KIND.merge, plan, trained_path, parts, [path_opener(piece) for piece in pieces], [], merged_path
    )
    return {
        "factory": plan.factory,
        **compare_answers(one_shot_path, merged_path, questions),
        "train_cpu_s": round(training.cpu_seconds, 2),
        "one_shot_cpu_s": round(one_shot_cost.cpu_seconds, 2),
        "parts_cpu_s": round(sum(part.cpu_seconds for part in scatters), 2),
        "merge_cpu_s": round(merge.cpu_seconds, 2),
        "cpu_ratio": round(sum(stage.cpu_seconds for stage in (*scatters, merge)) / one_shot_cost.cpu_seconds, 2),
        "longest_way_ratio": round((max(part.seconds for part in scatters) + merge.seconds) / one_shot_cost.seconds, 2),
        "one_shot_mb": measure_stage_mb(one_shot_cost),
        "part_mb": max(measure_stage_mb(part) for part in scatters),
        "merge_mb": measure_stage_mb(merge),
        "index_mb": round(merged_path.stat().st_size / 1e6, 1),
        "trained_mb": round(trained_path.stat().st_size / 1e6, 1),
        "pieces_mb": round(sum(path.stat().st_size for path in pieces) / 1e6, 1),
    }


def measure_stage_mb(stage: WorkCost) -> float:
    """Return the megabytes of anonymous memory that a stage adds to those of its process at the start."""
    return round(stage.anonymous_mb - stage.started_mb, 1)


def compare_answers(one_shot_path: Path, merged: Path, questions: Vectors) -> dict[str, bool]:
    """Search both files with bare faiss; return whether distances, ids and bytes are equal."""
    answers = []
    for path in (one_shot_path, merged):
        index = faiss.read_index(str(path))
        faiss.extract_index_ivf(index).nprobe = NPROBE
        answers.append(index.search(questions, K))
    (distances, ids), (merged_distances, merged_ids) = answers
    return {
        "same_distances": bool(np.array_equal(distances, merged_distances)),
        "same_ids": bool(np.array_equal(ids, merged_ids)),
        "same_bytes": one_shot_path.read_bytes() == merged.read_bytes(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vectors", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=96)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--factory", nargs="+", default=FACTORIES)
    options = parser.parse_args()
    results, generator = [], Synthetic(options.dim)
    with tempfile.TemporaryDirectory() as name:
        parts = generator.parts(Path(name), options.vectors, options.parts)
        for factory in options.factory:
            plan = resolve(IndexRecipe(factory), options.vectors, options.dim)
            results.append(compare(plan, parts, generator.questions(QUERIES), Path(name)))
    report = {
        "benchmark": "ivfpq",
        "vectors": options.vectors,
        "dim": options.dim,
        "parts": options.parts,
        "equal": all(result["same_distances"] and result["same_ids"] and result["same_bytes"] for result in results),
        "indexes": results,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
