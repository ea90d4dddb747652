"""What each stage of a command costs: CPU seconds of all its processes, and the anonymous memory of each.

A command says on standard error which stage it is in; a watcher looks ten times a second at every process of its
session, and counts what each spent since the look before to the stage of the moment. A stage that begins again counts
apart, with its number behind its name. Anonymous memory (`RssAnon`) is what a process holds itself; pages of mapped
files (`RssFile`), which the kernel can drop, are told apart from it.
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
_INTERVAL = 0.1  # seconds between two looks: a process that ends loses half of it, on average
_SAID = re.compile(r"(.+) …|(.+) done, [\d.]+ s")  # how a stage begins and ends
_KINDS = {"mb": "RssAnon:", "mapped_mb": "RssFile:"}
_PEAKS = tuple(f"{whose}_{kind}" for kind in _KINDS for whose in ("launcher", "worker"))  # in the order of `Spent`
OUTSIDE = "outside"  # of all stages: start, and what stands between and after them


@dataclass(slots=True)
class Spent:
    """What a stage, or a whole verb, took."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    launcher_mb: float = 0.0  # anonymous memory of the command's own process at its peak
    worker_mb: float = 0.0  # of the largest of the others; 0: there was none, and the launcher did the work
    launcher_mapped_mb: float = 0.0  # the same of pages of mapped files
    worker_mapped_mb: float = 0.0


@dataclass(slots=True)
class Told:
    """What a command printed, and what its stages took, in their order."""

    reply: Any = None
    stages: dict[str, Spent] = field(default_factory=dict)

    @property
    def whole(self) -> Spent:
        """All stages together."""
        costs = list(self.stages.values())
        sums = (sum(getattr(cost, name) for cost in costs) for name in ("seconds", "cpu_seconds"))
        return Spent(*sums, *(max(getattr(cost, name) for cost in costs) for name in _PEAKS))


OnStage = Callable[[str, Spent], None]


class Watch:
    """Looks at a command's session until it is stopped."""

    def __init__(self, session: int, on_stage: OnStage | None = None) -> None:
        """Begin to look, outside of any stage; `on_stage` is told of each stage as it ends, in the thread of `read`."""
        self.stages: dict[str, Spent] = {OUTSIDE: Spent()}
        self._session, self._stage, self._cpu = session, OUTSIDE, dict[int, float]()
        self._on_stage = on_stage
        self._begun = Counter[str]()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def read(self, lines: Iterator[str]) -> str:
        """Follow the stages that a command names, until it says no more; return all that it said."""
        printed_lines = []
        for line in lines:
            printed_lines.append(line)
            if stage_match := _SAID.fullmatch(line.strip()):
                started_stage, ended = stage_match.groups()
                if started_stage:
                    self._begun[started_stage] += 1
                    self._stage = self._named(started_stage)
                    continue
                self._stage, ended = OUTSIDE, self._named(ended)
                if self._on_stage and ended in self.stages:
                    self._on_stage(ended, self.stages[ended])
        return "".join(printed_lines)

    def _named(self, stage: str) -> str:
        """Return the name of a stage for the time that it began last."""
        times = self._begun[stage]
        return f"{stage} {times}" if times > 1 else stage

    def stop(self) -> dict[str, Spent]:
        """Return what each stage took."""
        self._ended.set()
        self._thread.join()
        return self.stages

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._ended.wait(_INTERVAL):
            stage, current_time = self.stages.setdefault(self._stage, Spent()), time.perf_counter()
            stage.seconds, last = stage.seconds + current_time - last, current_time
            for pid in members(self._session):
                self._look(pid, stage)

    def _look(self, pid: int, stage: Spent) -> None:
        folder = Path("/proc", str(pid))
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            status = (folder / "status").read_text()
        except OSError:  # it has just ended
            return
        cpu_seconds = (int(fields[11]) + int(fields[12])) / _TICKS
        stage.cpu_seconds += cpu_seconds - self._cpu.get(pid, 0.0)
        self._cpu[pid] = cpu_seconds
        whose = "launcher" if pid == self._session else "worker"
        for kind, line in _KINDS.items():
            megabytes = int(status.partition(line)[2].split()[0]) * 1024 / 1e6 if line in status else 0.0
            setattr(stage, f"{whose}_{kind}", max(getattr(stage, f"{whose}_{kind}"), megabytes))


def bookwheel(*words: str, environment: dict[str, str], on_stage: OnStage | None = None) -> Told:
    """Run a verb to its end; a failure ends the benchmark with what it said."""
    process = _started(words, environment)
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
    return Told(json.loads(output), stages)


@contextmanager
def service(*words: str, environment: dict[str, str]) -> Iterator[tuple[str, Told]]:
    """Run `serve` until the block ends; yield its address, and what it took, which is there after the block."""
    process, report = _started((*words, "--port", "0"), environment, subprocess.DEVNULL), Told()
    watch = Watch(process.pid)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"].removeprefix("http://"), report
    finally:
        report.stages = watch.stop()
        process.terminate()
        process.wait()


def _started(words: Sequence[str], environment: dict[str, str], errors: int = subprocess.PIPE) -> subprocess.Popen[str]:
    program = str(Path(sys.executable).with_name("bookwheel"))
    return subprocess.Popen(
        [program, *words, "--json"],
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
        env={**os.environ, **environment},
    )
