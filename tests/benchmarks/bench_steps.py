"""Measure training steps of OpenRAG, the inverse cloze task and DPR, each beside a plain loop of the same equations.

`pools` is OpenRAG's step from the offline pools. In `online`, the bags propose, the current encoder
ranks, and a generator reads until the first passage that does not help (`openrag_steps`). `ict` and
`dpr` are in `contrast_steps`. Passages are the demo's. The loops use torch and transformers alone,
over the same weights and samples. Each side runs in its own process, in turns; the first step of
each is a warm-up. Prints one JSON line a step: `time_ratio` is our CPU seconds over the loop's,
`memory_ratio` our peak over the loop's; and the largest relative difference of the losses.
`python tests/benchmarks/bench_steps.py [--only pools online ict dpr] [--rounds 1] [--steps 2]`
takes under two minutes.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import contrast_steps
import openrag_steps
import step_timing
import torch
from bench_realm import build_library
from isolated_run import WorkCost, run_alone
from passages import read_json_lines
from step_timing import Step

from flows.demo import QUESTIONS
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.examples import Example

KINDS = ("pools", "online", "ict", "dpr")
Side = tuple[Callable[..., Any], tuple[Any, ...]]  # builds a step's modules and loss; its arguments


def run(side: Callable[..., Any], arguments: tuple[Any, ...], steps: int, take_steps: Callable[..., Any]) -> list[Step]:
    """Build one side, and run its steps."""
    module, loss = side(*arguments)
    step_results: list[Step] = take_steps(module, loss, steps, 1e-6)
    return step_results


def compare(kind: str, sides: tuple[Side, Side], options: argparse.Namespace) -> dict[str, Any]:
    """Run both sides in turns and compare them."""
    runs: dict[str, list[WorkCost]] = {"ours": [], "plain": []}
    take_functions = step_timing.take_our_steps, step_timing.take_plain_steps
    for _ in range(options.rounds):
        for costs, take_steps, (side, arguments) in zip(runs.values(), take_functions, sides, strict=True):
            costs.append(run_alone(run, side, arguments, options.steps, take_steps))
    cpu = {name: [step.cpu_seconds for cost in costs for step in cost.value[1:]] for name, costs in runs.items()}
    peak = {name: statistics.median(cost.anonymous_mb for cost in costs) for name, costs in runs.items()}
    losses = [[step.loss for step in run[0].value] for run in runs.values()]
    return {
        "benchmark": "step",
        "kind": kind,
        "time_ratio": round(statistics.median(cpu["ours"]) / statistics.median(cpu["plain"]), 3),
        "memory_ratio": round(peak["ours"] / peak["plain"], 3),
        "cpu_s": {name: [round(value, 2) for value in step_seconds] for name, step_seconds in cpu.items()},
        "peak_mb": {name: round(value) for name, value in peak.items()},
        "largest_loss_difference": max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True)),
    }


def build_sides(folder: Path, options: argparse.Namespace) -> dict[str, tuple[Side, Side]]:
    """Return both sides of each kind."""
    store, steps, size = build_library(folder, options.passages), options.steps, options.batch
    snapshot = Snapshot.open(str(store))
    corpus = snapshot.passages(range(snapshot.n))
    questions = [(row["question"], row["answers"][0]) for row in read_json_lines(Path(QUESTIONS))][
        : options.questions * steps
    ]
    pools_setup = openrag_steps.prepare(folder, corpus, questions, options.questions, steps)
    leads = [
        Example(str(number), f"what is {passage.title}?", (), (passage,), (corpus[-1 - number],))
        for number, passage in enumerate(corpus[: size * steps])
    ]
    online_setup = replace(pools_setup, proposed=options.proposed)
    pairs = {"ict": contrast_steps.ict_pairs(store, size, steps), "dpr": contrast_steps.dpr_pairs(leads, size, steps)}
    return {
        "pools": ((openrag_steps.ours, (pools_setup,)), (openrag_steps.plain, (pools_setup,))),
        "online": ((openrag_steps.ours, (online_setup,)), (openrag_steps.plain, (online_setup,))),
        "ict": ((contrast_steps.ours_ict, (store, size)), (contrast_steps.plain, (pairs["ict"],))),
        "dpr": ((contrast_steps.ours_dpr, (leads, size)), (contrast_steps.plain, (pairs["dpr"],))),
    }


def main() -> None:
    """Compare each kind of step; print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"passages": 80, "questions": 2, "proposed": 6, "batch": 6, "steps": 2, "rounds": 1}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-steps-") as work:
        sides_by_kind = build_sides(Path(work), options)
        for kind in options.only:
            print(json.dumps(compare(kind, sides_by_kind[kind], options)), flush=True)


if __name__ == "__main__":
    main()
