"""Measure HNSW by cells beside one-shot faiss at equal M and efConstruction: CPU, critical path, memory and recall.

Both sides build the same factory over the same synthetic vectors, each stage in its own process
with one thread. `cpu_ratio` is all our stages (k-means, assignment, scatter, shards, merge) over
one shot; `critical_ratio` is k-means, the largest scatter, the largest shard and the merge over one
shot. `shortfall_…` is the most by which one shot's recall@k exceeds ours at equal distance
computations, and negative where ours is always better. `merge_…` memory is anonymous; `unreachable`
nodes are counted by plain faiss and numpy. Prints one JSON line.

`--sizes A,B,C` repeats it with cells in proportion, for CPU per vector and critical path as n
grows; `--norms 0,0.1,0.3` repeats it for log-normal norms; `--augment` also builds our index over
vectors with one more dimension, which makes all norms equal. The defaults take about a minute; the
figures at a million vectors need

    python tests/benchmarks/bench_hnsw.py --n 1000000 --cells 16 --jobs 2
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from charts import write_lines
from hnsw_builds import Report, Work, against, at_equal_distances, both, qualities, trial_of
from synthetic import Synthetic, append_norm_component

from rag_model.index.recipe import IndexRecipe, resolve

CELL_ROWS = 62_500
DEFAULT = IndexRecipe("HNSW16")


@dataclass(frozen=True, slots=True)
class Case:
    """A synthetic corpus, and the settings of its index."""

    n: int
    norms: float
    cells: int
    options: argparse.Namespace

    @property
    def recipe(self) -> IndexRecipe:
        """Return the recipe of bookwheel's index."""
        options = self.options
        storage = "" if options.storage == "Flat" else f"_{options.storage}"
        return IndexRecipe(
            f"HNSW{options.links}{storage}",
            options.metric,
            ef_construction=options.ef_construction,
            cells=self.cells,
            border=options.border,
            linked=options.linked,
        )


def measure(case: Case, folder: Path) -> Report:
    """Build a case by cells and in one shot, and compare them."""
    options = case.options
    generator = Synthetic(options.dim, case.norms)
    parts = generator.parts(folder, case.n, options.parts)
    plan = resolve(case.recipe, case.n, options.dim)
    works: dict[str, Work] = {"ours": (plan, parts)}
    if options.augment:
        works["equal_norm"] = (
            resolve(case.recipe, case.n, options.dim + 1),
            append_norm_component(parts, folder / "equal_norm_parts"),
        )
    builds = both(works, folder, options.jobs)
    trial = trial_of(parts, options.metric, generator.questions(options.questions), options.k)
    measured_qualities = qualities(builds, trial, options.jobs)
    return {
        "n": case.n,
        "norms": case.norms,
        "cells": plan.cells,
        "factory": plan.factory,
        **against("ours", builds, measured_qualities, plan),
        **{name: against(name, builds, measured_qualities, work[0]) for name, work in works.items() if name != "ours"},
        "recall_at_distances": at_equal_distances(measured_qualities),
        "builds": {name: build.report() | measured_qualities[name].report() for name, build in builds.items()},
    }


def summarize_scaling(rows: list[Report]) -> list[Report]:
    """Return the CPU microseconds a vector and the critical path of each size."""
    scaling_rows = []
    for row in rows:
        single, ours = (row["builds"][name] for name in ("one_shot", "ours"))
        scaling_rows.append(
            {
                "n": row["n"],
                "cells": row["cells"],
                "one_shot_us_per_vector": round(1e6 * single["cpu_s"] / row["n"], 1),
                "us_per_vector": round(1e6 * ours["cpu_s"] / row["n"], 1),
                "one_shot_s": single["cpu_s"],
                "ours_s": ours["cpu_s"],
                "critical_s": ours["critical_s"],
            }
        )
    return scaling_rows


def plot(rows: list[Report], out: Path) -> None:
    """Draw the CPU seconds of one shot, of all our stages, and of our critical path."""
    lines = {
        "one shot": [(row["n"], row["one_shot_s"]) for row in rows],
        "ours, all stages": [(row["n"], row["ours_s"]) for row in rows],
        "ours, critical path": [(row["n"], row["critical_s"]) for row in rows],
    }
    write_lines(out, lines, title="CPU seconds to build HNSW", across="vectors", up="CPU seconds")


def _parse_numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=100_000)
    parser.add_argument("--sizes", type=_parse_numbers, help="several sizes instead of --n, with cells in proportion")
    parser.add_argument("--dim", type=int, default=96)
    parser.add_argument(
        "--cells", type=int, help="cells of the largest size; default: one for 62,500 vectors, at least 4"
    )
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--links", type=int, default=16, help="M")
    parser.add_argument("--ef-construction", type=int, default=100)
    parser.add_argument("--border", type=float, default=DEFAULT.border)
    parser.add_argument("--linked", type=float, default=DEFAULT.linked)
    parser.add_argument("--metric", choices=("ip", "l2"), default="ip")
    parser.add_argument("--storage", choices=("Flat", "SQfp16", "SQ8"), default="Flat")
    parser.add_argument("--norms", type=_parse_numbers, default=[0.0], help="sigma of log-normal norms; 0: all are 1")
    parser.add_argument("--augment", action="store_true", help="also build with one more dimension and equal norms")
    parser.add_argument("--questions", type=int, default=2_000)
    parser.add_argument("--k", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1, help="concurrent builds, and threads that measure recall")
    parser.add_argument("--plot", type=Path, help="write the scaling as SVG")
    parser.add_argument("--workdir", type=Path, help="folder of the files; default: a temporary folder")
    return parser.parse_args()


def main() -> None:
    """Measure every case; print one line."""
    options = parse_arguments()
    sizes = [int(size) for size in options.sizes or [options.n]]
    cells = options.cells or max(4, round(max(sizes) / CELL_ROWS))
    rows = []
    for n in sizes:
        for norms in options.norms:
            case = Case(n, norms, max(1, round(cells * n / max(sizes))), options)
            with tempfile.TemporaryDirectory(dir=options.workdir) as folder:
                rows.append(measure(case, Path(folder)))
    settings = {"benchmark": "hnsw", "dim": options.dim, "metric": options.metric, "threads": 1, "jobs": options.jobs}
    report = settings | (rows[0] if len(rows) == 1 else {"rows": rows})
    if len(sizes) > 1:
        report["scaling"] = summarize_scaling(rows)
    if options.plot:
        plot(summarize_scaling(rows), options.plot)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
