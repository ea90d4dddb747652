"""Both benchmarks of a GPU, one after the other, as rows of a table: what a GPU does, and its peer of the same run.

Prints their JSON lines on standard error and the rows, in Markdown, on standard output. On a machine without a GPU the
rows say `cpu`: they are tiny, and there only to try it. Never run on a GPU.
`python tests/benchmarks/gpu_rows.py [--embedding "--windows 2"] [--index "--vectors 60000 --dim 384"]`.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER = "| what | on {device} | beside | ratio | `tests/benchmarks/` |\n| --- | --- | --- | --- | --- |"
Report = dict[str, Any]


def told(name: str, arguments: str) -> Report:
    """Run a benchmark of this folder; return its report, the last line: a GPU's libraries print lines of their own."""
    command = [sys.executable, str(Path(__file__).with_name(name)), *shlex.split(arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="", file=sys.stderr, flush=True)
    report: Report = json.loads(done.stdout.splitlines()[-1])
    return report


def embedding_row(report: Report) -> str:
    """Return the row of `bench_embedding_gpu.py`."""
    model = f"{report['layers']} layers of {report['hidden']}, {report['dtype']}"
    rate = f"{report['passages_per_s']:,.0f} passages/s, {report['peak_gpu_mb']:,} MB"
    return _row(
        f"encoding, {model}, {report['mean_tokens']:g} tokens a passage; Wikipedia's 21,015,324 passages",
        f"{rate}; {report['hours_for_wikipedia']:g} h",
        f"matrix multiply: {report['matmul_tflops']:g} TFLOP/s; DPR's release: 83 passages/s",
        f"{report['share_of_matmul']:.0%} of it; {report['times_dpr']:g}",
        "bench_embedding_gpu.py",
    )


def index_rows(report: Report) -> Iterator[str]:
    """Yield the rows of `bench_gpu_index.py`: a build's stages, and what the index finds."""
    size = f"{report['vectors']:,} x {report['dim']}"
    for index in report["indexes"]:
        sides = {side: index[side] or {} for side in ("gpu", "cpu")}
        for stage in next(found for found in sides.values() if found)["seconds"]:
            gpu, cpu = (_took(sides[side], stage, kind) for side, kind in (("gpu", "seconds"), ("cpu", "cpu_seconds")))
            yield _row(
                f"{index['factory']} over {size}: {stage}; Wikipedia's vectors of as many dimensions, extrapolated",
                _stage(sides["gpu"], stage, gpu),
                f"one core: {_stage(sides['cpu'], stage, cpu)}",
                f"{cpu / gpu:.3g}" if cpu and gpu else "",
                "bench_gpu_index.py",
            )
        recalls = [found.get("recall") for found in sides.values()]
        shown = ["" if one is None else f"{one:.4f}" for one in recalls]
        apart = f"{recalls[0] - recalls[1]:+.4f}" if None not in recalls else ""
        yield _row(f"its recall@{report['k']}", shown[0], f"built by a core: {shown[1]}", apart, "")


def _took(found: Report, stage: str, kind: str) -> float | None:
    took: float | None = found.get(kind, {}).get(stage)
    return took


def _stage(found: Report, stage: str, took: float | None) -> str:
    if took is None:
        return ""
    held = (found["gpu_mb"] or {}).get(stage)
    return f"{took:g} s{f', {held:,} MB' if held is not None else ''}; {found['hours_for_wikipedia'][stage]:g} h"


def _row(*cells: str) -> str:
    return f"| {' | '.join(f'`{cell}`' if cell.endswith('.py') else cell for cell in cells)} |"


def main() -> None:
    """Run both and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--embedding", default="", help="options of bench_embedding_gpu.py")
    parser.add_argument("--index", default="", help="options of bench_gpu_index.py")
    options = parser.parse_args()
    embedding, index = told("bench_embedding_gpu.py", options.embedding), told("bench_gpu_index.py", options.index)
    print("\n".join([HEADER.format(device=index["device"]), embedding_row(embedding), *index_rows(index)]))


if __name__ == "__main__":
    main()
