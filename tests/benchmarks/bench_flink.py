"""`bookwheel reindex` on a Flink cluster beside the same on local workers: what an engine costs, stage by stage.

The same dump and encoder, two worker processes of one thread on either side, a store of its own for each; both end in
the same snapshot. The cluster is a real one on this machine: a JobManager, a TaskManager with two slots, a pool of
Python workers, warmed by a job before (a session cluster has been up for days); starting Beam's job server, which each
launcher does once, counts in the first stage. `overhead` is what Flink took longer; `a_job` its mean over the stages
that are jobs. It is about the same for a dump of any size, so `ratio` is of this small one. `memory_mb`: the peak of a
local run's processes together; on Flink of the launcher's, and of the two JVMs, without the workers.
One JSON line. `python tests/benchmarks/bench_flink.py [--copies 1]`: two minutes; `--copies` makes the dump larger.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from bench_workers import repeat_dump, small_encoder
from flink_cluster import SLOTS, Flink, flink
from processes import Cost, run

from beam_jobs.job import run_job
from beam_jobs.launch import Launch
from rag_model.store.objects.memo import Memo
from rag_model.store.store import Store

JOBS = ("chunk", "embed", "train", "scatter", "shard", "merge")
RECIPE = """
[index.hnsw]
factory = "HNSW16"
[gate.floors.hnsw]
mean = 0.0
p5 = 0.0
"""  # the neighbours of random vectors are hard to find


def reindex(folder: Path, name: str, dump: Path, encoder: Path, flags: list[str]) -> tuple[Cost, dict[str, Any]]:
    """Build as a user does, into a store of its own."""
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE)
    given = {"dump": dump, "store": folder / name, "encoder": encoder, "recipe": recipe}
    options = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    command = [str(Path(sys.executable).with_name("bookwheel")), "reindex", *options, "--json", "--", *flags]
    cost = run(command, {"BOOKWHEEL_CACHE": str(folder / f"cache-{name}"), "PREFECT_API_URL": ""})
    return cost, json.loads(cost.output)


def warm(cluster: Flink, folder: Path) -> None:
    """Run a job of nothing."""
    store = Store.open(str(folder / "warm"), create=True)
    run_job("warm", nothing, [1, 2], Launch.new(store.url, cluster.flags))


def nothing(task: int, store: Store) -> dict[str, Any]:
    """Do nothing, on a worker."""
    return {"key": Memo.key(task)}


def measure(folder: Path, copies: int) -> dict[str, Any]:
    """Build locally, then on Flink."""
    dump, encoder = repeat_dump(copies, folder / "dump"), small_encoder(folder / "encoder")
    cost, local = reindex(folder, "local", dump, encoder, [f"--direct_num_workers={SLOTS}"])
    (folder / "cluster").mkdir()
    (folder / "hidden").mkdir()
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with flink(folder / "cluster", environment, hidden=folder / "hidden") as cluster:
        warm(cluster, folder)
        flink_cost, on_flink = reindex(folder, "flink", dump, encoder, cluster.flags)
        jvm_mb = {name: cluster.peak_mb(name) for name in ("jobmanager", "taskmanager")}
    seconds = {"local": local["seconds"], "flink": on_flink["seconds"]}
    overhead = {stage: round(seconds["flink"][stage] - spent, 1) for stage, spent in seconds["local"].items()}
    return {
        "benchmark": "flink",
        "dump_mb": round(dump.stat().st_size / 1e6, 2),
        "passages": local["counts"]["passages"],
        "same_snapshot": local["snapshot"] == on_flink["snapshot"],
        "seconds": seconds | {"wall": {"local": round(cost.seconds, 1), "flink": round(flink_cost.seconds, 1)}},
        "overhead": overhead,
        "a_job": round(mean(overhead[job] for job in JOBS), 1),
        "ratio": round(flink_cost.seconds / cost.seconds, 2),
        "memory_mb": {"local": round(cost.peak_mb), "launcher": round(flink_cost.peak_mb), **jvm_mb},
    }


def main() -> None:
    """Measure, and print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--copies", type=int, default=1, help="how often the demo dump's pages are repeated")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="bench-flink-") as name:
        print(json.dumps(measure(Path(name), options.copies)))


if __name__ == "__main__":
    main()
