"""Measure the error of the CPU seconds that `bookwheel index --plan` estimates, stage by stage.

Each case is built by cells like a job, each stage in its own process with one thread. `ratio` is
the estimate over the measured CPU seconds, of all stages together and by stage. `error` is the
largest of the total ratios or their inverses, minus 1. `wikipedia` has the estimate alone: hours of
one core for DPR's passages, and of the critical path with a worker for every part and every cell.
Prints one JSON line. The default takes two minutes on two idle cores.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from hnsw_builds import by_cells
from synthetic import BERT, WIKIPEDIA, Synthetic

from rag_model.index.recipe import IndexRecipe, resolve
from rag_model.resources.estimates import estimate_stage_seconds

CASES = "20000x96,60000x96,200000x96,20000x768,60000x768"
PARTS = 4


def compare_case(n: int, dim: int, factory: str, folder: Path) -> dict[str, Any]:
    """Build `n` vectors of `dim` dimensions, and compare each stage with the plan."""
    plan = resolve(IndexRecipe(factory), n, dim)
    build = by_cells(plan, Synthetic(dim).parts(folder, n, PARTS), folder / "build")
    planned = estimate_stage_seconds(plan, dim)
    actual = {name: sum(cost.cpu_seconds for cost in stage) for name, stage in build.stages.items()}
    return {
        "n": n,
        "dim": dim,
        "cells": plan.cells,
        "measured_s": round(sum(actual.values()), 2),
        "planned_s": round(sum(planned.values()), 2),
        "ratio": round(sum(planned.values()) / sum(actual.values()), 3),
        "stages": {name: [round(actual[name], 2), round(planned[name], 2)] for name in actual},
    }


def plan_wikipedia(factory: str) -> dict[str, Any]:
    """Return the planned hours of DPR's passages."""
    plan = resolve(IndexRecipe(factory), WIKIPEDIA, BERT)
    hours = {name: seconds / 3600 for name, seconds in estimate_stage_seconds(plan, BERT).items()}
    path = hours["train"] + (hours["scatter"] + hours["shard"]) / max(1, plan.cells) + hours["merge"]
    return {
        "n": WIKIPEDIA,
        "dim": BERT,
        "cells": plan.cells,
        "cpu_hours": round(sum(hours.values()), 2),
        "critical_hours": round(path, 2),
    }


def main() -> None:
    """Compare every case with its plan; print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=CASES, help="vectors x dimensions, with commas")
    parser.add_argument("--index", default="HNSW32")
    options = parser.parse_args()
    rows = []
    for case in options.cases.split(","):
        n, dim = map(int, case.split("x"))
        with tempfile.TemporaryDirectory() as folder:
            rows.append(compare_case(n, dim, options.index, Path(folder)))
    error = max(max(row["ratio"], 1 / row["ratio"]) for row in rows) - 1
    settings = {"benchmark": "plan", "factory": options.index, "threads": 1, "error": round(error, 3)}
    print(json.dumps(settings | {"wikipedia": plan_wikipedia(options.index), "cases": rows}))


if __name__ == "__main__":
    main()
