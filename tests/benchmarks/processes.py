"""Measure a command: wall-clock seconds, CPU seconds and memory of all the processes that it starts.

It samples `/proc` (Linux), because no system call returns these figures: a parent's usage leaves out children that it
did not wait for, and the kernel reports a peak for one process, not for several together.
"""

import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_INTERVAL = 0.1  # seconds between two samples; half of it is missed of each process, on average


@dataclass(slots=True)
class Process:
    """One process of a command, as of the last sample."""

    command: str
    cpu_seconds: float = 0.0
    peak_mb: float = 0.0  # resident memory including shared pages, by the kernel's record


@dataclass(slots=True)
class Cost:
    """The cost of a command and its descendants."""

    output: str  # standard output
    errors: str  # standard error
    seconds: float
    cpu_seconds: float
    peak_mb: float  # of all processes together, with shared pages counted once
    processes: dict[int, Process] = field(repr=False)


def run(command: Sequence[str], environment: dict[str, str] | None = None) -> Cost:
    """Run a command in a new session and measure it; a failure ends the benchmark with its error output."""
    processes: dict[int, Process] = {}
    peaks: list[float] = [0.0]
    started = time.perf_counter()
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **(environment or {})},
    )
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(child.pid, ended, processes, peaks))
    watcher.start()
    output, errors = child.communicate()
    seconds = time.perf_counter() - started
    ended.set()
    watcher.join()
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}: {errors[-2000:]}")
    cpu_seconds = sum(process.cpu_seconds for process in processes.values())
    return Cost(output, errors, seconds, cpu_seconds, peaks[0], processes)


def _watch(session: int, ended: threading.Event, processes: dict[int, Process], peaks: list[float]) -> None:
    while not ended.wait(_INTERVAL):
        total = sum(_sample_process(pid, processes) for pid in members(session))
        peaks[0] = max(peaks[0], total)


def members(session: int) -> Iterator[int]:
    """Yield the ids of a session's processes."""
    for entry in Path("/proc").iterdir():
        with suppress(ValueError, ProcessLookupError, PermissionError):
            if os.getsid(int(entry.name)) == session:
                yield int(entry.name)


def _sample_process(pid: int, processes: dict[int, Process]) -> float:
    """Record a process's usage; return its proportional set size in megabytes."""
    folder = Path("/proc", str(pid))
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        command = (folder / "cmdline").read_text().replace("\0", " ").strip()
        peak = _megabytes((folder / "status").read_text(), "VmHWM:")
        proportional_mb = _megabytes((folder / "smaps_rollup").read_text(), "\nPss:")
    except (OSError, ValueError):  # the process has just ended
        return 0.0
    process = processes.setdefault(pid, Process(command))
    process.command = command or process.command
    process.cpu_seconds = (int(fields[11]) + int(fields[12])) / _TICKS
    process.peak_mb = max(process.peak_mb, peak)
    return proportional_mb


def _megabytes(text: str, name: str) -> float:
    return int(text.partition(name)[2].split()[0]) * 1024 / 1e6 if name in text else 0.0
