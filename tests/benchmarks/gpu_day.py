"""Run all GPU benchmarks one after the other (`make gpu-day`), record each result, and resume after an interruption.

Steps: embedding (with batches of other sizes, without cuDNN's attention, with the torch of other environments, and on
2, 4, 8, … and all GPUs at once), index stages (CAGRA beside faiss's HNSW, if faiss has cuVS), training steps in
float32, TF32 and bf16, and decoding. Each step is a benchmark of this folder in a process of its own.
Written to `--out`:

* `STEP.json`: the command, the reports, the seconds and the environment of a finished step. A step that finished with
  the same command, device and torch is not run again; `STEP.error.txt` has the end of a failed step's output.
* `rows.md`: rows for docs/benchmarks.md; `report.md`: the machine, every step, its figures and its command.

Without a GPU every step runs on tiny sizes on the CPU, to check that each row can be written. `--short` takes small
sizes and few rounds, for minutes instead of an hour. Exit code 1 if a step failed; the others still run.
`python tests/benchmarks/gpu_day.py [--out gpu-day] [--short] [--only STEP ...] [--python PATH ...]`.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from rag_model.atomic_write import atomic_write

Report = dict[str, Any]
Row = tuple[str, str, str, str]  # measurement, bookwheel, peer, ratio
FOLDER = Path(__file__).parent
BATCHES = (8_192, 32_768, 131_072)  # tokens of a batch, beside production's
PRECISIONS = ("no", "tf32", "bf16")
PATIENCE = 4 * 3600  # seconds of a step
_VERSIONS = ("torch", "transformers", "faiss-cpu", "faiss-gpu", "faiss-gpu-cuvs", "numpy")


def embedding_rows(reports: Sequence[Report]) -> Iterator[Row]:
    """Yield the rows of `bench_embedding_gpu.py`; several processes are added up.

    Raises:
        ValueError: two processes used the same GPU, so the sum of their rates is not the rate of several GPUs.
    """
    gpus = [report["gpu"] for report in reports if report["gpu"] is not None]
    if len(set(gpus)) < len(gpus):
        raise ValueError(f"{len(gpus)} processes used GPUs {gpus}: let no other process use a GPU, and run this again")
    first, rate = reports[0], sum(report["passages_per_s"] for report in reports)
    model = f"{first['layers']} layers of {first['hidden']}, {first['dtype']}, torch {first['torch']}"
    devices = f"{len(reports)} processes on {len(gpus)} GPUs"
    yield (
        f"encoding, {model}, batches of {first['batch_tokens']:,} tokens" + (f", {devices}" if reports[1:] else ""),
        f"{rate:,.0f} passages/s, {max(report['peak_gpu_mb'] for report in reports):,} MB",
        f"matrix multiply: {first['matmul_tflops']:g} TFLOP/s; transformers: "
        f"{sum(report['transformers_per_s'] for report in reports):,.0f} passages/s; DPR's release: 83",
        f"{first['share_of_matmul']:.0%} of it; {rate / sum(report['transformers_per_s'] for report in reports):.2f}; "
        f"{rate / 83:,.0f}",
    )
    yield (
        "same: from texts, tokenised while the device works",
        f"{sum(report['from_text_per_s'] for report in reports):,.0f} passages/s",
        f"from ids: {rate:,.0f}",
        f"{first['overlap']:.2f}",
    )


def index_rows(reports: Sequence[Report]) -> Iterator[Row]:
    """Yield the rows of `bench_gpu_index.py`: a build's stages, and the recall of the index."""
    (report,) = reports
    graphs = "CAGRA" if report["graphs_on_the_gpu"] else "faiss's HNSW"
    for index in report["indexes"]:
        sides = {side: index[side] or {} for side in ("gpu", "cpu")}
        for stage in next(side for side in sides.values() if side)["seconds"]:
            gpu, cpu = sides["gpu"].get("seconds", {}).get(stage), sides["cpu"].get("cpu_seconds", {}).get(stage)
            note = f" ({graphs})" if stage == "shard" else ""
            yield (
                f"{index['factory']} over {report['vectors']:,} x {report['dim']}: {stage}{note}; Wikipedia's vectors",
                _describe_stage(sides["gpu"], stage, gpu),
                f"one core: {_describe_stage(sides['cpu'], stage, cpu)}",
                f"{cpu / gpu:.3g}" if cpu and gpu else "",
            )
        recalls = [side.get("recall") for side in sides.values()]
        recall_texts = ["" if recall is None else f"{recall:.4f}" for recall in recalls]
        apart = f"{recalls[0] - recalls[1]:+.4f}" if None not in recalls else ""
        yield f"its recall@{report['k']}", recall_texts[0], f"built by a core: {recall_texts[1]}", apart


def _describe_stage(side: Report, stage: str, seconds: float | None) -> str:
    if seconds is None:
        return ""
    gpu_mb = (side["gpu_mb"] or {}).get(stage)
    memory = f", {gpu_mb:,} MB" if gpu_mb is not None else ""
    return f"{seconds:g} s{memory}; {side['hours_for_wikipedia'][stage]:g} h"


def training_rows(reports: Sequence[Report]) -> Iterator[Row]:
    """Yield the rows of `bench_rag_step.py`."""
    (report,) = reports
    for name, result in report["results"].items():
        yield (
            f"training step, RAG-{name}, precision {report['precision']}",
            f"{result['ours_tokens_per_s']:,} tokens/s",
            f"transformers: {result['theirs_tokens_per_s']:,}",
            f"{result['wall_ratio']:g}",
        )


def decoding_rows(reports: Sequence[Report]) -> Iterator[Row]:
    """Yield the rows of `bench_rag_decode.py`."""
    for report in reports:
        yield (
            f"decoding, RAG-{report['kind'].title()}, {report['beams']} beams, {report['k']} passages",
            f"{report['ours_tokens_per_s']:,g} tokens/s",
            f"transformers: {report['peer_tokens_per_s']:,g}",
            f"{report['ratio']:g}; equal answers {report['same']:.0%}",
        )


@dataclass(frozen=True, slots=True)
class DayStep:
    """One benchmark with its options."""

    name: str
    script: str
    options: str
    rows: Callable[[Sequence[Report]], Iterator[Row]]
    processes: int = 1  # side by side
    python: str = sys.executable
    environment: Mapping[str, str] | None = None  # versions and device of `python`; None: those of this process

    @property
    def command(self) -> str:
        """The command, as the report shows it."""
        return f"{self.script} {self.options}".strip()


def list_steps(
    gpus: int, environments: Mapping[str, Mapping[str, str]], options: dict[str, str], *, is_short: bool = False
) -> list[DayStep]:
    """Return the steps of the day: of tiny sizes without a GPU, of small ones for a short day.

    `environments` has the versions of other interpreters, by path; there is one more encoding step for each.
    """
    embedding, device = "bench_embedding_gpu.py", "cuda" if gpus else "cpu"
    short = "--passages 16 --windows 1" if not gpus else "--windows 2" if is_short else ""
    sizes = "--layers 12 --dim 1024 --questions 64 --steps 20" if gpus else "--layers 1 --dim 64 --steps 1"
    training = f"--device {device} --kind sequence {sizes} --rounds {1 if is_short or not gpus else 3}"
    tiny = "--questions 1 --k 2 --context 8 --answer 2 --width 64 --layers 1 --beams 1 --rounds 1"
    answers = "--questions 16 --k 5 --width 1024 --layers 12" if gpus else tiny
    index = "--vectors 50000 --factory HNSW32 IVF4096,PQ96np" if is_short else ""
    index = index if gpus else "--vectors 600 --dim 16 --parts 1 --questions 20 --k 5 --factory HNSW8"
    steps = [DayStep("embedding", embedding, short, embedding_rows)]
    steps += [
        DayStep(f"embedding-{tokens}", embedding, f"{short} --batch-tokens {tokens}".strip(), embedding_rows)
        for tokens in (BATCHES if gpus else BATCHES[:1])
    ]
    for number, (python, versions) in enumerate(environments.items()):
        earlier = list(environments.values())[:number]
        same_torch = sum(
            earlier_versions["torch"] == versions["torch"] for earlier_versions in earlier
        )  # may differ in transformers
        suffix = f"-{same_torch + 1}" if same_torch else ""
        name = f"embedding-torch-{versions['torch']}{suffix}"
        steps.append(DayStep(name, embedding, short, embedding_rows, 1, python, versions))
    steps += [DayStep("embedding-no-cudnn", embedding, f"{short} --no-cudnn".strip(), embedding_rows)]
    gpu_counts = [1 << power for power in range(1, gpus.bit_length()) if 1 << power < gpus]  # 2, 4, 8, …
    steps += [
        DayStep(f"embedding-gpus-{count}", embedding, short, embedding_rows, processes=count)
        for count in ([*gpu_counts, gpus] if gpus > 1 else () if gpus else (2,))
    ]
    steps += [DayStep("index", "bench_gpu_index.py", index, index_rows)]
    steps += [
        DayStep(f"training-{precision}", "bench_rag_step.py", f"{training} --precision {precision}", training_rows)
        for precision in PRECISIONS
    ]
    steps += [DayStep("decoding", "bench_rag_decode.py", f"--device {device} {answers}", decoding_rows)]
    return [replace(step, options=options.get(step.name, step.options)) for step in steps]


def run_step(step: DayStep) -> list[Report]:
    """Run a step's processes side by side, and return their reports.

    Raises:
        subprocess.SubprocessError: a process failed or took too long; its output is in the error.
    """
    module = f"tests.benchmarks.{step.script.removesuffix('.py')}"
    # bench_embedding_gpu.py is a module of the tests, the others are scripts that import their neighbours
    start = ["-m", module] if step.script == "bench_embedding_gpu.py" else [str(FOLDER / step.script)]
    command = [step.python, *start, *shlex.split(step.options)]
    environment = _build_process_environment()
    if step.processes > 1:  # as many GPUs as processes, each of which claims one as workers of a build do
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(list_visible_gpus()[: step.processes])
    start_process = partial(subprocess.Popen[str], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    running = [start_process(command, cwd=FOLDER.parents[1], env=environment) for _ in range(step.processes)]
    reports: list[Report] = []
    try:
        for process in running:
            out, errors = process.communicate(timeout=PATIENCE)
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, command, out, errors)
            # libraries of a GPU print lines of their own
            reports += [json.loads(line) for line in out.splitlines() if line.startswith('{"benchmark"')]
    finally:
        for process in running:
            process.kill()
    return reports


def list_visible_gpus() -> list[str]:
    """Return the GPUs of this machine as `CUDA_VISIBLE_DEVICES` names them."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(number) for number in range(torch.cuda.device_count())] if names is None else names.split(",")


def describe_device() -> str:
    """Return the names of the GPUs, or the processor's."""
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return ", ".join(names) or f"cpu ({platform.machine()}, tiny sizes)"


def describe_environment() -> dict[str, str]:
    """Return the versions that decide the figures."""
    versions = {"python": platform.python_version(), "cuda": str(torch.version.cuda), "device": describe_device()}
    for name in _VERSIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def read_environment(python: str) -> dict[str, str]:
    """Return the versions and the device of another interpreter.

    Raises:
        ValueError: the interpreter cannot be started, or has no torch.
    """
    command = [python, str(FOLDER / "gpu_day.py"), "--environment"]
    try:
        output = subprocess.check_output(command, stderr=subprocess.PIPE, text=True, env=_build_process_environment())
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
        advice = "give an interpreter that has torch, transformers and numpy"
        raise ValueError(f"{python} cannot run the benchmarks ({reason}): {advice}") from error
    environment: dict[str, str] = json.loads(output.splitlines()[-1])
    return environment


def _build_process_environment() -> dict[str, str]:
    """Return the environment variables of a process that imports this checkout."""
    paths = [str(FOLDER.parents[1]), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def find_result(step: DayStep, out: Path) -> Report | None:
    """Return the result of an earlier run of the same command on the same device with the same torch."""
    try:
        result: Report = json.loads((out / f"{step.name}.json").read_text(encoding="utf-8"))
        is_same = (result["command"], result["python"], result["processes"]) == (
            step.command,
            step.python,
            step.processes,
        )
        environment = step.environment or describe_environment()
        is_same = is_same and all(result["environment"][name] == environment[name] for name in ("device", "torch"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return result if is_same else None


def record_step(step: DayStep, out: Path) -> Report | None:
    """Run a step and write its result; return None if it failed, with the reason in its error file."""
    started, problem = time.perf_counter(), out / f"{step.name}.error.txt"
    problem.unlink(missing_ok=True)
    try:
        reports = run_step(step)
        list(step.rows(reports))  # a report without a figure of the rows is a failure too
    except (subprocess.SubprocessError, KeyError, IndexError, ValueError) as error:
        output = f"{getattr(error, 'stdout', '') or ''}\n{getattr(error, 'stderr', '') or ''}"
        problem.write_text(f"{error}\n{output[-8_000:]}", encoding="utf-8")
        return None
    result: Report = {
        "step": step.name,
        "command": step.command,
        "python": step.python,
        "processes": step.processes,
        "seconds": round(time.perf_counter() - started, 1),
        "environment": dict(step.environment or describe_environment()),
        "reports": reports,
    }
    with atomic_write(out / f"{step.name}.json") as temporary:
        temporary.write_text(json.dumps(result, indent=1), encoding="utf-8")
    return result


def write_tables(steps: Sequence[DayStep], results: dict[str, Report | None], out: Path) -> None:
    """Write the rows for docs/benchmarks.md, and the report."""
    rows = [
        f"| {' | '.join(row)} | `{step.command}` ({result['environment']['device']}) |"
        for step in steps
        if (result := results.get(step.name)) is not None
        for row in step.rows(result["reports"])
    ]
    head = ["| measurement | bookwheel | peer | ratio | command, machine |", "| --- | --- | --- | --- | --- |"]
    (out / "rows.md").write_text("\n".join([*head, *rows]) + "\n", encoding="utf-8")
    environment = [f"* {name}: {value}" for name, value in describe_environment().items()]
    step_rows = [
        f"| {step.name} | {_describe_result(out, step, results.get(step.name))} | `{step.command}` |" for step in steps
    ]
    parts = ["# A day on the GPU", *environment, "", "| step | result | command |", "| --- | --- | --- |", *step_rows]
    (out / "report.md").write_text("\n".join([*parts, "", *head, *rows]) + "\n", encoding="utf-8")


def _describe_result(out: Path, step: DayStep, result: Report | None) -> str:
    if result is not None:
        return f"{result['seconds']:,} s"
    error_file = f"{step.name}.error.txt"
    return f"failed, see {error_file}" if (out / error_file).exists() else "not run yet"


def main() -> None:
    """Run the steps that have no result, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-day"))
    parser.add_argument("--only", nargs="+", help="names of steps")
    parser.add_argument("--python", nargs="+", default=[], help="other interpreters, with whose torch to encode too")
    parser.add_argument(
        "--environment", action="store_true", help="print this interpreter's versions and device as JSON; run no step"
    )
    parser.add_argument("--options", nargs="+", default=[], metavar="STEP=OPTIONS", help="replace a step's options")
    parser.add_argument("--short", action="store_true", help="small sizes, few rounds: minutes")
    parser.add_argument("--list", action="store_true", help="print the steps, and run none")
    options = parser.parse_args()
    if options.environment:
        print(json.dumps(describe_environment()))
        return
    replaced = dict(option.partition("=")[::2] for option in options.options)
    try:
        environments = {python: read_environment(python) for python in options.python}
    except ValueError as error:
        parser.error(str(error))
    steps = list_steps(torch.cuda.device_count(), environments, replaced, is_short=options.short)
    names = [step.name for step in steps]
    if unknown := [name for name in (*(options.only or ()), *replaced) if name not in names]:
        parser.error(f"there is no step {unknown[0]}: choose from {', '.join(names)}")
    steps = [step for step in steps if not options.only or step.name in options.only]
    if options.list:
        print("\n".join(f"{step.name}: {step.command}" for step in steps))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Report | None] = {}
    for step in steps:
        earlier_result = find_result(step, options.out)
        print(f"{step.name}: {'recorded' if earlier_result else step.command}", file=sys.stderr, flush=True)
        results[step.name] = earlier_result or record_step(step, options.out)
        write_tables(steps, results, options.out)
    print((options.out / "rows.md").read_text(encoding="utf-8"), end="")
    failed = [name for name, result in results.items() if result is None]
    sys.exit(f"failed: {', '.join(failed)}; see {options.out}" if failed else 0)


if __name__ == "__main__":
    main()
