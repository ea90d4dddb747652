"""What a command costs the machine: wall-clock and CPU seconds, and memory, of all the processes it starts.

A reader of `/proc` (Linux), because no call of the system tells it: a parent's usage leaves out children that
were not waited for, and a peak is reported for one process, not for several together.
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
_INTERVAL = 0.1  # seconds between two looks: a process that ends loses half of it, on average


@dataclass(slots=True)
class Process:
    """One process of a command, as last seen."""

    command: str
    cpu_seconds: float = 0.0
    peak_mb: float = 0.0  # resident, pages shared with others included, as the kernel keeps it


@dataclass(slots=True)
class Cost:
    """What a command and its descendants took."""

    output: str  # standard output
    errors: str  # standard error
    seconds: float
    cpu_seconds: float
    peak_mb: float  # of all together, shared pages counted once
    processes: dict[int, Process] = field(repr=False)


def run(command: Sequence[str], environment: dict[str, str] | None = None) -> Cost:
    """Run a command in a session of its own and watch it; a failure ends the benchmark with what it said."""
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


def _watch(session: int, ended: threading.Event, seen: dict[int, Process], peaks: list[float]) -> None:
    while not ended.wait(_INTERVAL):
        total = sum(_look(pid, seen) for pid in members(session))
        peaks[0] = max(peaks[0], total)


def members(session: int) -> Iterator[int]:
    """Yield the ids of a session's processes."""
    for entry in Path("/proc").iterdir():
        with suppress(ValueError, ProcessLookupError, PermissionError):
            if os.getsid(int(entry.name)) == session:
                yield int(entry.name)


def _look(pid: int, seen: dict[int, Process]) -> float:
    """Note what a process has used; return the megabytes it holds, its share of what is shared."""
    folder = Path("/proc", str(pid))
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        command = (folder / "cmdline").read_text().replace("\0", " ").strip()
        peak = _megabytes((folder / "status").read_text(), "VmHWM:")
        proportional_mb = _megabytes((folder / "smaps_rollup").read_text(), "\nPss:")
    except (OSError, ValueError):  # it has just ended
        return 0.0
    process = seen.setdefault(pid, Process(command))
    process.command = command or process.command
    process.cpu_seconds = (int(fields[11]) + int(fields[12])) / _TICKS
    process.peak_mb = max(process.peak_mb, peak)
    return proportional_mb


def _megabytes(text: str, name: str) -> float:
    return int(text.partition(name)[2].split()[0]) * 1024 / 1e6 if name in text else 0.0
