"""Measure index builds on a GPU beside one core: seconds, recall, memory of the GPU, and hours for Wikipedia.

Each index (an HNSW by cells, inverted lists of codes) is built twice with production's stages, each
task in its own process with one thread: with one visible GPU, the first if there are several, and
with an empty `CUDA_VISIBLE_DEVICES`. The GPU computes k-means and the nearest centroids of the
lists, and with cuVS the graph of each cell (CAGRA); codes, links across cells and the merge run on
the CPU on both sides. The seconds of a GPU stage include the start of CUDA in each task. `recall`
is recall@k against exact search, at the plan's own setting. `gpu_mb` is the peak of the GPU's
memory in a stage beyond that before it. Torch reads it from outside, so it includes every process
(null where torch sees no GPU). faiss itself reserves 1.5 GB.

`hours_for_wikipedia` is extrapolated from the CPU seconds of one core, or the seconds of a GPU and
a core, for vectors of the same dimensions. It assumes cells as large as here, and that a vector is
compared with all centroids of Wikipedia's plan; a GPU does so, but a CPU searches a graph over the
centroids from 8,192 lists on. Codes are counted as if they grew with the lists. So all stages but
`shard` and `merge` are upper bounds, and high ones on a CPU.

Without a GPU it runs the CPU side alone on little data: `device` is then `cpu`, and a GPU's figures
are null. No other program may use the GPU. `--sides gpu` leaves out the CPU, for example with
`--vectors 1000000`. Prints one JSON line, after the output of cuVS.
`python tests/benchmarks/bench_gpu_index.py [--vectors 125000] [--dim 768] [--factory HNSW32
IVF4096,PQ192np]`; `gpu_day.py` prints it as rows of a table. With `--vectors 50000 --factory HNSW32
IVF4096,PQ96np` an H200 took a minute, and a core of its machine four.
"""

import argparse
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from hnsw_builds import Build, by_cells, trial_of
from isolated_run import WorkCost, run_alone
from synthetic import WIKIPEDIA, Synthetic

from rag_model.index.files import engine
from rag_model.index.graphs.cells import count_cell_sample
from rag_model.index.quality.sweep import VectorQuerySet
from rag_model.index.recipe import IndexRecipe, VectorPlan, count_lists, resolve
from rag_model.index.search import open_index

SIDES = ("cpu", "gpu")
_OPEN = {"hnsw": "HNSW", "ivf": "IVF,PQ"}  # recipes whose parameters follow from the size of the corpus
_INTERVAL = 0.01  # seconds between two readings of the GPU's memory
_SHOWS = "CUDA_VISIBLE_DEVICES"


class TaskRunner:
    """Runs the tasks of a build in processes where faiss sees one GPU, or none."""

    def __init__(self, name: str) -> None:
        """Create a runner without measurements; `name` is `gpu` or `cpu`."""
        self.gpu_mb: dict[str, int | None] = {}
        self._seen = os.environ.get(_SHOWS, "0").partition(",")[0] if name == "gpu" else ""

    def run(self, work: Callable[..., Any], *arguments: Any) -> WorkCost:
        """Call `work` in its own process, and record the peak memory of the GPU under the name of `work`."""
        if not self._seen:
            with restrict_gpus(""):
                return run_alone(work, *arguments)
        with restrict_gpus(self._seen), watch_gpu() as peaks:
            cost = run_alone(work, *arguments)
        known_peaks = [peak for peak in (self.gpu_mb.get(work.__name__), *peaks) if peak is not None]
        self.gpu_mb[work.__name__] = max(known_peaks, default=None)
        return cost


@contextmanager
def restrict_gpus(gpus: str) -> Iterator[None]:
    """Set `CUDA_VISIBLE_DEVICES` for processes that start in the block; an empty string hides all GPUs."""
    previous_gpus = os.environ.get(_SHOWS)
    os.environ[_SHOWS] = gpus
    try:
        yield
    finally:
        if previous_gpus is None:
            del os.environ[_SHOWS]
        else:
            os.environ[_SHOWS] = previous_gpus


@contextmanager
def watch_gpu() -> Iterator[list[int]]:
    """Yield a list, to which the block's peak of GPU memory beyond the memory before is written, in megabytes.

    The list stays empty where torch sees no GPU.
    """
    peaks: list[int] = []
    cuda = _import_cuda()
    if not cuda.is_available():
        yield peaks
        return
    stop, bytes_before = threading.Event(), _read_gpu_bytes(cuda)
    peaks.append(0)

    def watch() -> None:
        while not stop.wait(_INTERVAL):
            peaks[0] = max(peaks[0], (_read_gpu_bytes(cuda) - bytes_before) >> 20)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        stop.set()
        thread.join()


def _read_gpu_bytes(cuda: Any) -> int:
    """Return the bytes that all processes together hold on the GPU."""
    free, total = cuda.mem_get_info(0)
    return int(total - free)


def _import_cuda() -> Any:
    """Return `torch.cuda`, which is imported late because the processes of tasks need no torch."""
    return import_module("torch").cuda


def measure(side: str, plan: VectorPlan, parts: Sequence[Path], trial: VectorQuerySet, folder: Path) -> dict[str, Any]:
    """Build an index on one side; return its costs, its recall, and the hours that Wikipedia would take."""
    runner = TaskRunner(side)
    build = by_cells(plan, parts, folder, runner.run)
    rows = open_index(build.path, defaults=plan.search).search(trial.vectors, trial.k)[1]
    seconds, cpu = (_sum_costs(build, kind) for kind in ("seconds", "cpu_seconds"))
    costs = cpu if side == "cpu" else seconds  # equal to the wall time on an idle machine, with one thread
    return {
        "seconds": {stage: round(value, 2) for stage, value in seconds.items()},
        "cpu_seconds": {stage: round(value, 2) for stage, value in cpu.items()},
        "recall": round(float(trial.compute_recalls(rows).mean()), 4),
        "gpu_mb": runner.gpu_mb or None,
        "hours_for_wikipedia": {
            stage: round(scale_work(plan)[stage] * cost / 3600, 2) for stage, cost in costs.items()
        },
    }


def _sum_costs(build: Build, kind: str) -> dict[str, float]:
    return {stage: sum(getattr(cost, kind) for cost in costs) for stage, costs in build.stages.items() if costs}


def scale_work(plan: VectorPlan) -> dict[str, float]:
    """Return by stage how many times more work Wikipedia is than this plan, at the same dimensions."""
    wikipedia_plan = resolve(IndexRecipe(_OPEN[plan.kind]), WIKIPEDIA, plan.d)
    rows, centroid_ratio = WIKIPEDIA / plan.n, _count_centroids(wikipedia_plan) / _count_centroids(plan)
    return {
        "train": _sample_size(wikipedia_plan) / _sample_size(plan) * centroid_ratio,
        "scatter": rows * centroid_ratio,
        "shard": rows,
        "merge": rows,
    }


def _count_centroids(plan: VectorPlan) -> int:
    return plan.cells if plan.kind == "hnsw" else count_lists(plan)


def _sample_size(plan: VectorPlan) -> int:
    return count_cell_sample(plan) if plan.kind == "hnsw" else plan.train_sample


def name_device() -> str:
    """Return the name of the GPU that faiss sees, or `cpu`."""
    if not engine.has_gpu():
        return "cpu"
    cuda = _import_cuda()
    return str(cuda.get_device_name(0)) if cuda.is_available() else "a GPU that torch does not see"


def main() -> None:
    """Build each index on each side; print one line."""
    has_gpu = engine.has_gpu()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=int, default=125_000 if has_gpu else 4_000)
    parser.add_argument("--dim", type=int, default=768 if has_gpu else 32)
    parser.add_argument("--factory", nargs="+", default=["HNSW32", "IVF4096,PQ192np" if has_gpu else "IVF64,PQ8np"])
    parser.add_argument("--cells", type=int, help="cells of an HNSW; default: the plan's")
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--questions", type=int, default=500 if has_gpu else 100)
    parser.add_argument("--k", type=int, default=20)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    options = parser.parse_args()
    generator, indexes = Synthetic(options.dim), []
    with tempfile.TemporaryDirectory(prefix="bench-gpu-index-") as name:
        folder = Path(name)
        parts = generator.parts(folder, options.vectors, options.parts)
        trial = trial_of(parts, "ip", generator.questions(options.questions), options.k)
        for factory in options.factory:
            plan = resolve(IndexRecipe(factory, cells=options.cells), options.vectors, options.dim)
            sides: dict[str, Any] = {"factory": plan.factory, **dict.fromkeys(SIDES)}
            for side in options.sides:
                if side == "cpu" or has_gpu:
                    sides[side] = measure(side, plan, parts, trial, folder / f"{len(indexes)}-{side}")
            indexes.append(sides)
    report = {
        "benchmark": "gpu_index",
        "device": name_device(),
        "graphs_on_the_gpu": engine.can_build_graph(generator.questions(min(options.vectors, 4_000)), "ip"),
        **{name: getattr(options, name) for name in ("vectors", "dim", "parts", "questions", "k")},
        "indexes": indexes,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
