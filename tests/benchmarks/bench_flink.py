"""Measure `bookwheel reindex` on a Flink cluster beside local workers: the overhead of the engine, stage by stage.

Both sides have the same dump and encoder, as many workers of one thread, and their own store; they
produce the same snapshot. The cluster runs on this machine: a JobManager, a TaskManager with two
slots, and a pool of Python workers. A job before the measurement starts the workers, since a
session cluster would have been up for days. Beam's job server, which each launcher starts once,
counts in the first job. On both sides the launcher runs the stages that are shorter than a start of
workers; `jobs` are the stages on Flink, `a_job` is the mean of their overhead, and `ratio` compares
the times of the commands. With `--every-job` every stage is a job on Flink. `memory_mb` is the peak
of all processes of the local run, of the launcher on Flink, and of the two JVMs without the
workers. Prints one JSON line.
`python tests/benchmarks/bench_flink.py [--copies 1] [--every-job] [--encoder DIR]` takes two
minutes with the default encoder, a small one with random weights; `--copies` enlarges the dump.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from dumps import read_export, write_streams
from flink_cluster import SLOTS, Flink, flink
from processes import Cost, run

from beam_jobs.job import run_job
from beam_jobs.job_settings import JobSettings
from beam_jobs.workers import START_VARIABLE
from flows.demo import demo_dump, demo_encoder
from rag_model.store.objects.memo import Memo
from rag_model.store.store import Store

RECIPE = """
[index.hnsw]
factory = "HNSW16"
[gate.floors.hnsw]
mean = 0.0
p5 = 0.0
"""  # random vectors have low recall

ID_STEP = 10**6  # above every page id of the demo dump
STREAM_PAGES = 20  # a Wikipedia dump has 100 a stream; the demo dump would be two
PAGE_ID = re.compile(rb"<id>(\d+)</id>")


def repeat_dump(times: int, folder: Path) -> Path:
    """Write `times` copies of the demo dump's pages, with distinct ids, as a multistream dump."""
    export = read_export(Path(demo_dump()))
    pages = (
        PAGE_ID.sub(lambda match, n=n: b"<id>%d</id>" % (int(match[1]) + n * ID_STEP), page, count=1)
        for n in range(times)
        for page in export.pages
    )
    folder.mkdir()
    return Path(write_streams(export.head, pages, export.foot, folder, STREAM_PAGES))


def write_small_encoder(folder: Path) -> Path:
    """Write a folder of MiniLM's tokenizer and one random layer of 128 dimensions."""
    from transformers import BertConfig, BertModel  # noqa: PLC0415 - imports torch

    config = BertConfig(hidden_size=128, num_hidden_layers=1, num_attention_heads=2, intermediate_size=512)
    BertModel(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(Path(demo_encoder(), name), folder / name)
    return folder


def reindex(
    folder: Path, name: str, dump: Path, encoder: Path, flags: list[str], environment: dict[str, str]
) -> tuple[Cost, dict[str, Any]]:
    """Run `bookwheel reindex` into its own store."""
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE)
    arguments = {"dump": dump, "store": folder / name, "encoder": encoder, "recipe": recipe}
    options = [str(word) for name, value in arguments.items() for word in (f"--{name}", value)]
    command = [str(Path(sys.executable).with_name("bookwheel")), "reindex", *options, "--json", "--", *flags]
    variables = {"BOOKWHEEL_CACHE": str(folder / f"cache-{name}"), "PREFECT_API_URL": "", "BOOKWHEEL_CORES": str(SLOTS)}
    cost = run(command, {**variables, **environment})
    return cost, json.loads(cost.output)


def run_warm_up_job(cluster: Flink, folder: Path) -> None:
    """Run a job without work, so that the cluster's workers are started."""
    store = Store.open(str(folder / "warm"), create=True)
    run_job("warm", do_nothing, [1, 2], JobSettings.new(store.url, cluster.flags))


def do_nothing(task: int, store: Store) -> dict[str, Any]:
    """Return a report without doing any work."""
    return {"key": Memo.compute_key(task)}


def measure(folder: Path, copies: int, encoder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Build locally, then on Flink; return the report."""
    dump = repeat_dump(copies, folder / "dump")
    cost, local = reindex(folder, "local", dump, encoder, [], {})
    (folder / "cluster").mkdir()
    (folder / "hidden").mkdir()
    workers = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with flink(folder / "cluster", workers, hidden=folder / "hidden") as cluster:
        run_warm_up_job(cluster, folder)
        flink_cost, on_flink = reindex(folder, "flink", dump, encoder, cluster.flags, environment)
        jobs = sorted({job.split("-")[1] for job in cluster.jobs()} - {"warm"})
        jvm_mb = {name: cluster.peak_mb(name) for name in ("jobmanager", "taskmanager")}
    seconds = {"local": local["seconds"], "flink": on_flink["seconds"]}
    overhead = {stage: round(seconds["flink"][stage] - local_s, 1) for stage, local_s in seconds["local"].items()}
    return {
        "benchmark": "flink",
        "dump_mb": round(dump.stat().st_size / 1e6, 2),
        "passages": local["counts"]["passages"],
        "same_snapshot": local["snapshot"] == on_flink["snapshot"],
        "seconds": seconds | {"wall": {"local": round(cost.seconds, 1), "flink": round(flink_cost.seconds, 1)}},
        "overhead": overhead,
        "jobs": jobs,
        "a_job": round(mean(overhead[job] for job in jobs), 1) if jobs else None,
        "ratio": round(flink_cost.seconds / cost.seconds, 2),
        "memory_mb": {"local": round(cost.peak_mb), "launcher": round(flink_cost.peak_mb), **jvm_mb},
    }


def main() -> None:
    """Measure, and print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--copies", type=int, default=1, help="repetitions of the demo dump's pages")
    parser.add_argument("--every-job", action="store_true", help="run every stage as a job on Flink")
    parser.add_argument("--encoder", type=Path, help="folder of another encoder")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="bench-flink-") as name:
        folder = Path(name)
        encoder = options.encoder or write_small_encoder(folder / "encoder")
        print(json.dumps(measure(folder, options.copies, encoder, {START_VARIABLE: "0"} if options.every_job else {})))


if __name__ == "__main__":
    main()
