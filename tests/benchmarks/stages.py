"""Measure each stage of a command: CPU seconds of all its processes, and the anonymous memory of each process.

A command names its current stage on standard error; a watcher samples every process of its session ten times a
second, and adds the CPU seconds since the last sample to the current stage. A stage that starts again is separate, with
a number after its name. Anonymous memory (`RssAnon`) is a process's own; pages of mapped files (`RssFile`), which the
kernel can drop, are counted separately.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import members

_TICKS = os.sysconf("SC_CLK_TCK")
_INTERVAL = 0.1  # seconds between two samples; half of it is missed of each process, on average
_STAGE_LINE = re.compile(r"(.+) …|(.+) done, [\d.]+ s")  # a line at the start or the end of a stage
_KINDS = {"mb": "RssAnon:", "mapped_mb": "RssFile:"}
_PEAKS = tuple(f"{whose}_{kind}" for kind in _KINDS for whose in ("launcher", "worker"))  # in the order of `StageCost`
OUTSIDE = "outside"  # of all stages: before, between and after them


@dataclass(slots=True)
class StageCost:
    """The cost of a stage, or of a whole verb."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    launcher_mb: float = 0.0  # peak of the anonymous memory of the command's own process
    worker_mb: float = 0.0  # of its largest child; 0 if the launcher did the work itself
    launcher_mapped_mb: float = 0.0  # the same, of pages of mapped files
    worker_mapped_mb: float = 0.0


@dataclass(slots=True)
class StageLog:
    """The reply of a command, and the costs of its stages, in order."""

    reply: Any = None
    stages: dict[str, StageCost] = field(default_factory=dict)

    @property
    def total(self) -> StageCost:
        """The cost of all stages together."""
        costs = list(self.stages.values())
        sums = (sum(getattr(cost, name) for cost in costs) for name in ("seconds", "cpu_seconds"))
        return StageCost(*sums, *(max(getattr(cost, name) for cost in costs) for name in _PEAKS))


OnStage = Callable[[str, StageCost], None]


class Watch:
    """A thread that samples the processes of a command's session until it is stopped."""

    def __init__(self, session: int, on_stage: OnStage | None = None) -> None:
        """Start outside of any stage; `on_stage` is called for each stage that ends, in the thread of `read`."""
        self.stages: dict[str, StageCost] = {OUTSIDE: StageCost()}
        self._session, self._stage, self._cpu = session, OUTSIDE, dict[int, float]()
        self._on_stage = on_stage
        self._start_counts = Counter[str]()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def read(self, lines: Iterator[str]) -> str:
        """Follow the stages that a command names until its output ends; return the output."""
        printed_lines = []
        for line in lines:
            printed_lines.append(line)
            if stage_match := _STAGE_LINE.fullmatch(line.strip()):
                started_stage, ended = stage_match.groups()
                if started_stage:
                    self._start_counts[started_stage] += 1
                    self._stage = self._name_stage(started_stage)
                    continue
                self._stage, ended = OUTSIDE, self._name_stage(ended)
                if self._on_stage and ended in self.stages:
                    self._on_stage(ended, self.stages[ended])
        return "".join(printed_lines)

    def _name_stage(self, stage: str) -> str:
        """Return the name of the latest run of a stage."""
        times = self._start_counts[stage]
        return f"{stage} {times}" if times > 1 else stage

    def stop(self) -> dict[str, StageCost]:
        """Stop sampling, and return the cost of each stage."""
        self._ended.set()
        self._thread.join()
        return self.stages

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._ended.wait(_INTERVAL):
            stage, current_time = self.stages.setdefault(self._stage, StageCost()), time.perf_counter()
            stage.seconds, last = stage.seconds + current_time - last, current_time
            for pid in members(self._session):
                self._sample_process(pid, stage)

    def _sample_process(self, pid: int, stage: StageCost) -> None:
        folder = Path("/proc", str(pid))
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            status = (folder / "status").read_text()
        except OSError:  # the process has just ended
            return
        cpu_seconds = (int(fields[11]) + int(fields[12])) / _TICKS
        stage.cpu_seconds += cpu_seconds - self._cpu.get(pid, 0.0)
        self._cpu[pid] = cpu_seconds
        whose = "launcher" if pid == self._session else "worker"
        for kind, line in _KINDS.items():
            megabytes = int(status.partition(line)[2].split()[0]) * 1024 / 1e6 if line in status else 0.0
            setattr(stage, f"{whose}_{kind}", max(getattr(stage, f"{whose}_{kind}"), megabytes))


def bookwheel(*words: str, environment: dict[str, str], on_stage: OnStage | None = None) -> StageLog:
    """Run a verb to its end; a failure ends the benchmark with the verb's error output."""
    process = _start(words, environment)
    watch, error_texts = Watch(process.pid, on_stage), list[str]()
    assert process.stderr is not None
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: error_texts.append(watch.read(process.stderr)))  # type: ignore[arg-type]
    reader.start()
    output = process.stdout.read()
    process.wait()
    reader.join()
    stages = watch.stop()
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}: {error_texts[0][-2000:]}")
    return StageLog(json.loads(output), stages)


@contextmanager
def service(*words: str, environment: dict[str, str]) -> Iterator[tuple[str, StageLog]]:
    """Run `serve` until the block ends; yield its address, and its costs, which are complete after the block."""
    process, report = _start((*words, "--port", "0"), environment, subprocess.DEVNULL), StageLog()
    watch = Watch(process.pid)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"].removeprefix("http://"), report
    finally:
        report.stages = watch.stop()
        process.terminate()
        process.wait()


def _start(words: Sequence[str], environment: dict[str, str], errors: int = subprocess.PIPE) -> subprocess.Popen[str]:
    program = str(Path(sys.executable).with_name("bookwheel"))
    return subprocess.Popen(
        [program, *words, "--json"],
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
        env={**os.environ, **environment},
    )
