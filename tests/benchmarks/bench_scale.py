"""Measure how the cost of every stage and command grows with the library, over dumps of several sizes.

For each size a synthetic dump of real sentences is written (`scaled_dump.py`), and the same one a
month later. The commands are those of a user: `reindex`, `reindex` of the next month, `pull`,
`verify`, `diff`, `takedown` of a page (which builds again all snapshots that contain it), `gc`, and
`serve`, which answers one question, with mapped indexes, the default, and with indexes in memory
(`--in-memory`). Each stage and command has its seconds, the CPU seconds of all processes, and the
peak memory of the launcher and of the largest worker, anonymous and mapped.

Parts have 256 KiB of compressed dump at any size (`--part-bytes`). Bookwheel's default is a
sixteenth of a dump of less than 512 MiB, with which the memory of a part would grow with the
library. With `--s3` the stores are on an S3 server on loopback, whose own cost is not counted. Up
to 100,000 passages a graph is built at once, and beyond that in cells of 62,500: the cost of
`shard` jumps there and is linear beyond, so use sizes above it. The first gate in a checkout also
compiles the BM25 search, about twenty CPU seconds.

`growth` has, for stages and commands of at least a CPU second, the exponent e of CPU = a n^e and of
wall-clock seconds, by least squares of the logarithms over the three largest sizes; and
`bytes_a_passage`, the growth of anonymous memory. The launcher runs stages of up to four seconds
itself, and starts workers for longer ones. Sizes of a stage that differ in this (where the worker's
memory is 0) are not compared. `largest_kb` is the largest manifest, list, report, record.

The encoder is by default a static one of 64 dimensions with random vectors (`made_static.py`),
which costs almost nothing, so that the machinery is measured. The peer is the line n^1. Prints one
JSON line, and on standard error each stage and command as it ends, in the order of `columns`, so
that an interrupted run is not lost: half a million passages take an hour. `python
tests/benchmarks/bench_scale.py [--passages 125000,500000] [--texts FILE] [--s3]`, where FILE is
JSON lines with `title` and `text`, plain or `.xz`. By default the texts are the demo's, which
repeat often in a large dump, and there is one small size: almost all of its 45 CPU seconds are
process starts, so that two small sizes would give no meaningful exponent.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import s3fs
from dumps import UNGATED
from fsspec.core import url_to_fs
from made_static import made_static
from passages import demo_passages, read_json_lines
from s3_server import environment_of, run_seaweed
from scaled_dump import Corpus, Month, Sentences
from service_load import get, load
from stages import OUTSIDE, StageCost, StageLog, bookwheel, service

from flows.demo import demo_encoder
from rag_model.store.objects.files import Files, StoredFile

_MONTHS: dict[str, Month] = {"reindex": "old", "rebuild": "new"}
_LARGEST = 3  # sizes to which an exponent is fitted
_PART_BYTES = 1 << 18
_LEAST = 1.0  # CPU seconds; an exponent of less is noise
_ASK = 0.2  # seconds between two readiness probes
Costs = dict[str, StageCost]  # by stage or verb


def run_life_cycle(
    corpus: Corpus, encoder: str, folder: Path, store: str, part_bytes: int
) -> tuple[dict[str, StageLog], dict[str, Any]]:
    """Run all commands on a corpus; return the report of each command, and the sizes of the store."""
    reports = dict[str, StageLog]()
    (folder / "recipe.toml").write_text(f"part_bytes = {part_bytes}\n{UNGATED}")
    cache = {"BOOKWHEEL_CACHE": str(folder / "cache")}
    build = ("--store", store, "--encoder", encoder, "--recipe", str(folder / "recipe.toml"))
    for verb, month in _MONTHS.items():
        dump = corpus.write(month, folder / month)
        reports[verb] = _run(verb, ("reindex", "--dump", dump, *build), cache)
        shutil.rmtree(folder / month)
    sizes = measure_sizes(Files(store))
    for verb, words in _list_commands(corpus, folder / "pulled").items():
        reports[verb] = _run(verb, (*words, "--store", store), cache)
    shutil.rmtree(folder / "pulled")
    for verb in ("serve", "serve --in-memory"):
        reports[verb] = ask_service(verb.split(), store, corpus.question(), cache)
        _print(verb, reports[verb].total)
    counts = reports["reindex"].reply["counts"]
    return reports, {"passages": counts["passages"], "articles": counts["articles"], "largest_kb": sizes}


def _run(verb: str, words: Sequence[str], environment: dict[str, str]) -> StageLog:
    report = bookwheel(*words, environment=environment, on_stage=lambda stage, cost: _print(f"{verb}: {stage}", cost))
    _print(verb, report.total)
    return report


def _print(name: str, cost: StageCost) -> None:
    print(json.dumps(round_costs({name: cost})), file=sys.stderr, flush=True)


def _list_commands(corpus: Corpus, pulled: Path) -> dict[str, tuple[str, ...]]:
    return {
        "pull": ("pull", "latest", str(pulled)),
        "verify": ("verify", "latest"),
        "diff": ("diff", "latest@1", "latest"),
        "takedown": ("takedown", corpus.article(), "--yes"),
        "gc": ("gc", "--grace", "0", "--yes"),
    }


def ask_service(words: Sequence[str], store: str, question: str, environment: dict[str, str]) -> StageLog:
    """Start the service and ask it one question."""
    with service(*words, "--store", store, environment=environment) as (address, report):
        while get(address, "/readyz")[0] != 200:
            time.sleep(_ASK)
        if {response.status for response in load(address, [question], 1, 0.0)} != {200}:
            raise SystemExit("the service returned an error for a question")
        time.sleep(_ASK)
    return report


def measure_sizes(files: Files) -> dict[str, float]:
    """Return the kilobytes of the largest file of each kind that is read whole and could grow with the corpus."""
    kinds = {kind: files.iter_tree(kind) for kind in ("snapshots", "memo", "reports")} | {"lists": _iter_lists(files)}
    return {kind: round(max((file.size for file in group), default=0) / 1e3, 1) for kind, group in kinds.items()}


def _iter_lists(files: Files) -> Iterator[StoredFile]:
    """Yield the blobs that are lists of other blobs."""
    blobs = [*files.iter_tree("blobs")]
    first = files.map_concurrently(lambda file: files.read_range(file.path, 0, min(1, file.size)), blobs)
    return (blob for blob, byte in zip(blobs, first, strict=True) if byte == b"[")


def list_costs(reports: Mapping[str, StageLog]) -> Costs:
    """Return the costs of each command, and of each stage of the commands that have stages."""
    costs = {verb: report.total for verb, report in reports.items()}
    stages = {f"{verb}: {stage}": cost for verb, report in reports.items() for stage, cost in report.stages.items()}
    return costs | {name: cost for name, cost in stages.items() if not name.endswith(OUTSIDE)}


def fit_growth(passages: Sequence[int], costs: Sequence[Costs]) -> dict[str, Any]:
    """Fit the bytes a passage of each stage and command, and the exponents of costly ones; {} for a single size."""
    growth_by_name: dict[str, Any] = {}
    if len(costs) < 2:
        return growth_by_name
    for name, last in costs[-1].items():
        same_mode = (bool(cost[name].worker_mb) == bool(last.worker_mb) if name in cost else False for cost in costs)
        runs = [(n, cost[name]) for n, cost, is_alike in zip(passages, costs, same_mode, strict=True) if is_alike]
        slopes = {kind: _compute_slope(runs, kind) for kind in ("launcher_mb", "worker_mb")}
        growth_by_name[name] = {"bytes_a_passage": slopes}
        if last.cpu_seconds >= _LEAST:
            growth_by_name[name] |= {kind: _fit_exponent(runs[-_LARGEST:], kind) for kind in ("cpu_seconds", "seconds")}
    return growth_by_name


def _fit_exponent(runs: Sequence[tuple[int, StageCost]], kind: str) -> float | None:
    values = [max(getattr(cost, kind), 1e-3) for _, cost in runs]
    if len(runs) < 2:
        return None
    return round(float(np.polyfit(np.log([n for n, _ in runs]), np.log(values), 1)[0]), 3)


def _compute_slope(runs: Sequence[tuple[int, StageCost]], kind: str) -> float | None:
    (few, small), (many, large) = runs[0], runs[-1]
    return round((getattr(large, kind) - getattr(small, kind)) * 1e6 / (many - few), 1) if many > few else None


def round_costs(costs: Costs) -> dict[str, list[float]]:
    """Return seconds, CPU seconds, and the megabytes of launcher and worker, anonymous and mapped, by name."""
    return {name: [round(value, 1) for value in asdict(cost).values()] for name, cost in costs.items()}


@contextmanager
def serve_s3(folder: Path) -> Iterator[str]:
    """Run an S3 server and yield the URL of an empty bucket; commands that start in the block can reach it."""
    (data := folder / "s3").mkdir()
    with run_seaweed(data) as endpoint:
        os.environ |= environment_of(endpoint)
        s3fs.S3FileSystem().makedirs("bench", exist_ok=True)
        yield "s3://bench"


def main() -> None:
    """Measure each size, the smallest first; print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passages", default="2000", help="approximate numbers of passages, with commas")
    parser.add_argument("--texts", type=Path, help="JSON lines with title and text")
    parser.add_argument("--encoder", help="a folder or hub name")
    parser.add_argument("--work", type=Path, help="a folder on a disk with room for the stores")
    parser.add_argument("--part-bytes", type=int, default=_PART_BYTES, help="compressed bytes of a part")
    parser.add_argument("--s3", action="store_true", help="keep the stores on an S3 server on loopback")
    options = parser.parse_args()
    sentences = Sentences.of(read_json_lines(options.texts) if options.texts else demo_passages())
    runs, facts = list[Costs](), list[dict[str, Any]]()
    with (
        tempfile.TemporaryDirectory(prefix="bench-scale-", dir=options.work) as tmp,
        serve_s3(Path(tmp)) if options.s3 else nullcontext(tmp) as stores,
    ):
        encoder = options.encoder or str(made_static(Path(demo_encoder(), "tokenizer.json"), Path(tmp, "encoder")))
        for size in sorted(map(int, options.passages.split(","))):
            folder = Path(tmp, str(size))
            folder.mkdir()
            print(json.dumps({"about_passages": size}), file=sys.stderr, flush=True)
            corpus = Corpus.for_passages(sentences, size)
            store = f"{stores}/{size}/store"
            reports, fact = run_life_cycle(corpus, encoder, folder, store, options.part_bytes)
            url_to_fs(store)[0].rm(store, recursive=True)
            shutil.rmtree(folder)
            runs.append(list_costs(reports))
            facts.append(fact)
    line = {
        "benchmark": "scale",
        "encoder": Path(encoder).name,
        "store": "s3" if options.s3 else "disk",
        "part_bytes": options.part_bytes,
        "sizes": facts,
        "columns": ["seconds", "CPU seconds", "launcher MB", "worker MB", "launcher mapped MB", "worker mapped MB"],
        "costs": [round_costs(costs) for costs in runs],
        "growth": fit_growth([fact["passages"] for fact in facts], runs),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
