"""Measure HNSW by cells beside one-shot faiss over real passages and questions: recall at equal work.

`shortfall_…` is the most by which one shot's recall@k exceeds ours at equal distance computations:
the mean over the questions, their 5th percentile, and the mean of the worst twentieth. MiniLM's
vectors are kept in `--cache`. Prints one JSON line. By default the passages and questions are the
demo's; the full measurement is

    python tests/benchmarks/bench_hnsw_passages.py --passages passages.jsonl.xz --questions a.jsonl.xz b.jsonl.xz
        --count 60000 --max-questions 3000 --cache FOLDER
"""

import argparse
import json
import tempfile
from pathlib import Path

from hnsw_builds import Report, against, at_equal_distances, both, qualities, trial_of
from passages import SampledVectors, embed_sample
from synthetic import write_parts

from rag_model.index.recipe import IndexRecipe, VectorPlan, resolve

PARTS = 4


def measure(vectors: SampledVectors, plans: dict[str, VectorPlan], folder: Path, options: argparse.Namespace) -> Report:
    """Build in one shot and by every plan, and compare them."""
    parts = write_parts(folder, vectors.passages, PARTS)
    builds = both({name: (plan, parts) for name, plan in plans.items()}, folder, options.jobs)
    measured_qualities = qualities(builds, trial_of(parts, "ip", vectors.questions, options.k), options.jobs)
    return {
        **{name: against(name, builds, measured_qualities, plan) for name, plan in plans.items()},
        "recall_at_distances": at_equal_distances(measured_qualities, (500, 1_000, 2_000, 4_000)),
        "builds": {name: build.report() | measured_qualities[name].report() for name, build in builds.items()},
    }


def main() -> None:
    """Embed or load the vectors, measure, and print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=Path, help="JSON lines with title and text")
    parser.add_argument("--questions", type=Path, nargs="+", default=[], help="JSON lines with question")
    parser.add_argument("--count", type=int, default=60_000, help="maximum number of passages")
    parser.add_argument("--max-questions", type=int, default=3_000, help="maximum number of questions")
    parser.add_argument("--cache", type=Path, help="keeps the vectors; by default a temporary folder")
    parser.add_argument("--cells", type=int, nargs="+", default=[8])
    parser.add_argument("--links", type=int, default=16, help="M")
    parser.add_argument("--ef-construction", type=int, default=100)
    parser.add_argument("--k", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1, help="concurrent builds, and threads that measure recall")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cache = options.cache or Path(folder) / "cache"
        vectors = embed_sample(cache, options.passages, options.questions, options.count, options.max_questions)
        n, dim = vectors.passages.shape
        recipes = {
            f"{cells} cells": IndexRecipe(f"HNSW{options.links}", ef_construction=options.ef_construction, cells=cells)
            for cells in options.cells
        }
        plans = {name: resolve(recipe, n, dim) for name, recipe in recipes.items()}
        results = measure(vectors, plans, Path(folder), options)
    settings = {
        "benchmark": "hnsw_passages",
        "passages": n,
        "questions": len(vectors.questions),
        "dim": dim,
        "k": options.k,
    }
    print(json.dumps(settings | {"factory": f"HNSW{options.links}"} | results))


if __name__ == "__main__":
    main()
