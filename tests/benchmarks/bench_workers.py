"""Beam's local workers as `bookwheel reindex` starts them: memory on a larger dump, and speed of two workers.

Two JSON lines. `memory`: the peak of the largest worker of the chunk job and of the embed job on the demo dump, and on
a multistream dump of eight copies of its pages, with distinct page ids; `ratio` is the second over the first. The
encoder is MiniLM's tokenizer and one small random layer: real weights add the same megabytes to both, and minutes.
`speed`: the seconds in which one worker and two chunk the larger dump. Start-up is excluded by subtracting a second run
of the same job, whose parts are all recorded. The runs alternate, and the fastest counts.
`python tests/benchmarks/bench_workers.py [--repeat 8] [--rounds 3]`, about a minute and a half.
"""

import argparse
import bz2
import json
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from processes import run

from beam_jobs import chunk, embed
from beam_jobs.chunk import ChunkTask
from beam_jobs.embed import EmbedTask
from beam_jobs.launch import Launch, Report
from flows.demo import demo_dump, demo_encoder
from rag_model.snapshots.encoding import EncodeRecipe, store_encoder
from rag_model.snapshots.planning import plan_parts
from rag_model.snapshots.recipe import Recipe
from rag_model.snapshots.stage_results import ChunkResult
from rag_model.store.store import Store
from rag_model.toml import from_table

STREAM_PAGES = 20  # a Wikipedia dump has 100 a stream; the demo dump would be two
ID_STEP = 10**6  # above every page id of the demo dump
WORKER = "beam_jobs.local_worker"  # only Beam's workers have it on their command line


@dataclass(frozen=True, slots=True)
class JobCost:
    """The result and the cost of a job."""

    facts: list[Report]
    seconds: float  # of the job, start-up included
    cpu_seconds: float  # of the busiest worker
    peak_mb: float  # of the largest worker

    @property
    def rows(self) -> int:
        """Return the number of passages of all parts."""
        return sum(fact["rows"] for fact in self.facts)


def chunk_job(dump: Path, store: Path, workers: int) -> list[Report]:
    """Chunk a dump's parts with `workers` workers."""
    recipe = Recipe()
    plan = plan_parts(Store.open(str(store), create=True), str(dump), recipe)
    tasks = [ChunkTask(part, plan.siteinfo, recipe.chunk) for part in plan.parts]
    return [
        {**asdict(chunk_result), "rows": chunk_result.rows} for chunk_result in chunk.run(tasks, launch(store, workers))
    ]


def embed_job(facts: Path, encoder: Path, store: Path, workers: int) -> list[Report]:
    """Encode the parts whose chunk results are in `facts`."""
    encoding = store_encoder(Store.open(str(store)), str(encoder), EncodeRecipe())
    chunk_results = [
        from_table(ChunkResult, {name: value for name, value in report.items() if name != "rows"}, "a report")
        for report in json.loads(facts.read_text())
    ]
    tasks = [EmbedTask.of(chunk_result, encoding, "float16") for chunk_result in chunk_results]
    return embed.run(tasks, launch(store, workers))


def launch(store: Path, workers: int) -> Launch:
    """Return the launch of a job on local workers."""
    return Launch.new(str(store), [f"--direct_num_workers={workers}"])


def start(job: str, *arguments: Path | int) -> JobCost:
    """Run a job in a new process, and measure its workers."""
    cost = run([sys.executable, __file__, "--job", job, *map(str, arguments)])
    output = json.loads(cost.output)
    workers = [process for process in cost.processes.values() if WORKER in process.command]
    busiest, hungriest = max(worker.cpu_seconds for worker in workers), max(worker.peak_mb for worker in workers)
    return JobCost(output["facts"], output["seconds"], busiest, hungriest)


def run_job(job: str, *arguments: str) -> None:
    """Run a job in this process, and print its results and its seconds."""
    paths, workers = [Path(argument) for argument in arguments[:-1]], int(arguments[-1])
    started = time.perf_counter()
    facts = {"chunk": chunk_job, "embed": embed_job}[job](*paths, workers)  # type: ignore[operator]
    print(json.dumps({"facts": facts, "seconds": time.perf_counter() - started}))


def repeat_dump(times: int, out: Path) -> Path:
    """Write `times` copies of the demo dump's pages, with distinct ids, as a multistream dump."""
    head, *pages = bz2.decompress(Path(demo_dump()).read_bytes()).partition(b"</mediawiki>")[0].split(b"<page>")
    out.mkdir()
    dump, index = out / "bench-pages-articles-multistream.xml.bz2", []
    with dump.open("wb") as file:
        file.write(bz2.compress(head))
        for copy_number in range(times):
            for first in range(0, len(pages), STREAM_PAGES):
                renamed = [renumber_page(page, copy_number * ID_STEP) for page in pages[first : first + STREAM_PAGES]]
                index += [b"%d:%d:page" % (file.tell(), number) for number, _ in renamed]
                file.write(bz2.compress(b"".join(page for _, page in renamed)))
        file.write(bz2.compress(b"</mediawiki>"))
    dump.with_name("bench-pages-articles-multistream-index.txt.bz2").write_bytes(bz2.compress(b"\n".join(index)))
    return dump


def renumber_page(page: bytes, step: int) -> tuple[int, bytes]:
    """Raise a page's id by `step`; return the new id and the page."""
    text_before, _, rest = page.partition(b"<id>")
    number, _, text_after = rest.partition(b"</id>")
    return int(number) + step, b"<page>%b<id>%d</id>%b" % (text_before, int(number) + step, text_after)


def small_encoder(out: Path) -> Path:
    """Write a folder of MiniLM's tokenizer and one random layer of 128 dimensions."""
    transformers = import_module("transformers")
    config = transformers.BertConfig(hidden_size=128, num_hidden_layers=1, num_attention_heads=2, intermediate_size=512)
    transformers.BertModel(config).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(Path(demo_encoder(), name), out / name)
    return out


def measure_memory(dumps: dict[str, Path], folder: Path) -> dict[str, Any]:
    """Return the peak of each job's workers on each dump."""
    encoder = small_encoder(folder / "encoder")
    peaks: dict[str, dict[str, float]] = {"chunk": {}, "embed": {}}
    parts, passages = {}, {}
    for name, dump in dumps.items():
        store, facts = folder / f"store-{name}", folder / f"{name}.json"
        chunk_run = start("chunk", dump, store, 2)
        facts.write_text(json.dumps(chunk_run.facts))
        embed_run = start("embed", facts, encoder, store, 2)
        peaks["chunk"][name], peaks["embed"][name] = round(chunk_run.peak_mb, 1), round(embed_run.peak_mb, 1)
        parts[name], passages[name] = len(chunk_run.facts), embed_run.rows
    return {
        "benchmark": "workers, memory",
        "dump_mb": {name: round(dump.stat().st_size / 1e6, 2) for name, dump in dumps.items()},
        "parts": parts,
        "passages": passages,
        "peak_mb": peaks,
        "ratio": {job: round(peak["repeated"] / peak["once"], 3) for job, peak in peaks.items()},
    }


def measure_speed(dump: Path, rounds: int, folder: Path) -> dict[str, Any]:
    """Return the fastest runs of one worker and of two, without start-up.

    `ratio_cpu` compares the CPU seconds of the busiest worker: the ratio on a machine that runs nothing else.
    """
    seconds: dict[int, list[float]] = {1: [], 2: []}
    cpu_seconds: dict[int, list[float]] = {1: [], 2: []}
    for turn in range(rounds):
        for workers, durations in seconds.items():
            store = folder / f"store-{turn}-{workers}"
            fresh = start("chunk", dump, store, workers)
            recorded = start("chunk", dump, store, workers)
            durations.append(round(fresh.seconds - recorded.seconds, 2))
            cpu_seconds[workers].append(round(fresh.cpu_seconds - recorded.cpu_seconds, 2))
            shutil.rmtree(store)
    # Other programs only ever slow a run down.
    one_seconds, two_seconds = (min(durations) for durations in seconds.values())
    one_cpu, two_cpu = (statistics.median(durations) for durations in cpu_seconds.values())
    return {
        "benchmark": "workers, speed",
        "passages": fresh.rows,
        "seconds": {str(workers): durations for workers, durations in seconds.items()},
        "cpu_seconds": {str(workers): durations for workers, durations in cpu_seconds.items()},
        "ratios": [round(a / b, 2) for a, b in zip(*seconds.values(), strict=True)],
        "ratio": round(one_seconds / two_seconds, 2),
        "ratio_cpu": round(one_cpu / two_cpu, 2),
    }


def main() -> None:
    """Measure memory and speed, or run one job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--job", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        run_job(*options.job)
        return
    with tempfile.TemporaryDirectory(prefix="bench-workers-") as name:
        folder = Path(name)
        dumps = {"once": repeat_dump(1, folder / "once"), "repeated": repeat_dump(options.repeat, folder / "repeated")}
        print(json.dumps(measure_memory(dumps, folder)), flush=True)
        print(json.dumps(measure_speed(dumps["repeated"], options.rounds, folder)), flush=True)


if __name__ == "__main__":
    main()
