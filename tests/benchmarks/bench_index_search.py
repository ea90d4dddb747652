"""Measure queries a second at a recall of .95: bookwheel over its merged index beside a bare faiss loop over one shot.

Both indexes are built in the same run from the same vectors, and each is searched at its own
smallest `efSearch` with a recall of .95. Bare faiss holds its index in memory and searches;
bookwheel maps the file, checks the query and passes the setting with the call. They take turns, and
medians of the rounds are compared. A `ratio` of 1 or more means that bookwheel is no slower, with
all queries as one batch, and one by one, like a service. `merged_ratio` is bare faiss over the
merged file beside bare faiss over one shot, which isolates the graph's effect on speed. Prints one
JSON line.
`python tests/benchmarks/bench_index_search.py [--n 1000000 --cells 16 --jobs 2]`
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from hnsw_builds import both, trial_of
from synthetic import Synthetic

from rag_model.index.files.engine import Vectors, faiss
from rag_model.index.quality.tune import tune_search
from rag_model.index.recipe import IndexRecipe, resolve
from rag_model.index.search import open_index

Search = Callable[[Vectors], object]
Rates = dict[str, list[float]]  # queries a second of each contender in each round


def open_bare(path: Path, ef_search: int, k: int) -> Search:
    """Return a search of an index that bare faiss holds in memory."""
    index = faiss.read_index(str(path))
    index.hnsw.efSearch = ef_search
    return lambda vectors: index.search(vectors, k)


def open_ours(path: Path, ef_search: int, k: int) -> Search:
    """Return a search of an index that bookwheel maps."""
    index = open_index(path)
    return lambda vectors: index.search(vectors, k, efSearch=ef_search)


def race(contenders: dict[str, Search], questions: list[Vectors], rounds: int) -> Rates:
    """Search every batch with all contenders in turns; return queries a second, without the warm-up round."""
    rates: Rates = {name: [] for name in contenders}
    n_questions = sum(len(batch) for batch in questions)
    for number in range(rounds + 1):
        turn = list(contenders.items())
        for name, search in turn if number % 2 else turn[::-1]:
            start = perf_counter()
            for batch in questions:
                search(batch)
            rates[name].append(n_questions / (perf_counter() - start))
    return {name: round_rates[1:] for name, round_rates in rates.items()}


def compute_ratio(rates: Rates, name: str) -> float:
    """Return the median ratio of a contender's rate to that of bare faiss over the one-shot index."""
    return round(statistics.median(a / b for a, b in zip(rates[name], rates["one_shot"], strict=True)), 3)


def main() -> None:
    """Build, tune the searches, measure, and print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=96)
    parser.add_argument("--cells", type=int, default=4)
    parser.add_argument("--links", type=int, default=16, help="M")
    parser.add_argument("--ef-construction", type=int, default=100)
    parser.add_argument("--questions", type=int, default=2_000)
    parser.add_argument("--k", type=int, default=20)
    parser.add_argument("--target", type=float, default=0.95)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="threads of a batch; single queries use one")
    parser.add_argument("--jobs", type=int, default=1, help="concurrent builds")
    options = parser.parse_args()
    generator = Synthetic(options.dim)
    recipe = IndexRecipe(f"HNSW{options.links}", ef_construction=options.ef_construction, cells=options.cells)
    plan = resolve(recipe, options.n, options.dim)
    with tempfile.TemporaryDirectory() as folder:
        parts = generator.parts(Path(folder), options.n, 8)
        builds = both({"ours": (plan, parts)}, Path(folder), options.jobs)
        trial = trial_of(parts, "ip", generator.questions(options.questions), options.k)
        points = {name: tune_search(open_index(build.path), trial, options.target) for name, build in builds.items()}
        effort = {name: operating_point.search["efSearch"] for name, operating_point in points.items()}
        contenders = {
            "one_shot": open_bare(builds["one_shot"].path, effort["one_shot"], options.k),
            "merged": open_bare(builds["ours"].path, effort["ours"], options.k),
            "ours": open_ours(builds["ours"].path, effort["ours"], options.k),
        }
        faiss.omp_set_num_threads(options.threads)
        batch = race(contenders, [trial.vectors], options.rounds)
        single = race(contenders, [trial.vectors[row : row + 1] for row in range(len(trial.vectors))], options.rounds)
    report = {
        "benchmark": "index_search",
        "n": options.n,
        "dim": options.dim,
        "cells": plan.cells,
        "factory": plan.factory,
        "threads": options.threads,
        "target": options.target,
        "recall": {name: round(operating_point.recall, 4) for name, operating_point in points.items()},
        "ef_search": effort,
        "ratio": {"batch": compute_ratio(batch, "ours"), "one_by_one": compute_ratio(single, "ours")},
        "merged_ratio": {"batch": compute_ratio(batch, "merged"), "one_by_one": compute_ratio(single, "merged")},
        "batch_per_s": {name: round(statistics.median(round_rates)) for name, round_rates in batch.items()},
        "one_by_one_per_s": {name: round(statistics.median(round_rates)) for name, round_rates in single.items()},
        "rounds": {name: [round(rate) for rate in round_rates] for name, round_rates in batch.items()},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
