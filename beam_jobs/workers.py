"""The workers of a run: whether they are of this machine, how many, how much memory they may use, how long they start.

Beam is not imported here: that takes a second, and a small rebuild does not need it.
"""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise, takewhile
from pathlib import Path

from rag_model.cores import at_most, cores
from rag_model.errors import UsageError
from rag_model.extras import versions

_GPU = re.compile(r"nvidia[0-9]+")
_WORKERS = "--direct_num_workers"
_RUNNER = "--runner"
MEMORY = "BOOKWHEEL_WORKER_MEMORY"  # what a launch gave this run
START = "BOOKWHEEL_START_SECONDS"
START_HERE = 4.0  # seconds of a core: below that, starting workers of this machine costs more than they save
_STARTS = {"flinkrunner": 10.0, "flink": 10.0}  # of other engines, as measured: a job of nothing


def here(flags: Sequence[str]) -> bool:
    """Return whether the workers are processes of this machine: there is no `--runner` among Beam's flags."""
    return _runner(flags) is None


def _runner(flags: Sequence[str]) -> str | None:
    """Return the name of the runner in Beam's flags, the last one, in small letters and without its module."""
    words = [word for flag in flags for word in flag.split("=", 1)]
    told = [after for word, after in pairwise([*words, ""]) if word == _RUNNER]
    return told[-1].lower().rpartition(".")[2] if told else None


def start_seconds(flags: Sequence[str]) -> float:
    """Return the seconds of a core below which a job is not worth a start of its runner's workers; 0: any job is.

    `BOOKWHEEL_START_SECONDS` sets it for every runner; otherwise those that were not measured have 0.

    Raises:
        UsageError: the variable is no number of seconds.
    """
    given = os.environ.get(START)
    if given is None:
        return START_HERE if here(flags) else _STARTS.get(_runner(flags) or "", 0.0)
    with suppress(ValueError):
        if (seconds := float(given)) >= 0:
            return seconds
    raise UsageError(f"{START} is {given!r}: set it to a number of seconds, 0 gives every job to workers, or unset it")


def named(flags: Sequence[str]) -> bool:
    """Return whether Beam's flags set the number of workers of this machine."""
    return any(flag.partition("=")[0] == _WORKERS for flag in flags)


def side_by_side(flags: Sequence[str], task_bytes: int, memory_bytes: int | None = None) -> tuple[str, ...]:
    """Return flags that limit the number of local workers to what fits in memory; other runners are not limited.

    Args:
        flags: Beam's; a number of workers in them is kept.
        task_bytes: memory of one task.
        memory_bytes: memory of all workers; None: the free memory.
    """
    free = worker_memory(flags)
    if free is None or named(flags):
        return tuple(flags)
    fitting = max(1, (memory_bytes or free) // task_bytes)
    return (*flags, f"{_WORKERS}={fitting}") if fitting < cores() else tuple(flags)


def gpus(devices: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA GPUs that a worker of this machine may use, without loading torch.

    Counted are the driver's files in `devices`, at most as many as `CUDA_VISIBLE_DEVICES` names; none for a torch that
    is built without CUDA.
    """
    found = len([path for path in devices.glob("nvidia*") if _GPU.fullmatch(path.name)])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:  # what follows a number that is no GPU's does not count
        named = takewhile(lambda one: one.strip() not in {"", "-1", "NoDevFiles"}, visible.split(","))
        found = min(found, len([*named]))
    return 0 if "+cpu" in versions("torch")["torch"] else found


def one_a_gpu(flags: Sequence[str], count: int) -> tuple[str, ...]:
    """Return flags that start one local worker for each of `count` GPUs, whatever the cores; 0: the given flags.

    Two processes on one GPU take turns, and each holds a model and a cache of memory there. A smaller number of workers
    in Beam's flags is kept.
    """
    if not count or not here(flags):
        return tuple(flags)
    kept = [flag for flag in flags if flag.partition("=")[0] != _WORKERS]
    told = [int(flag.partition("=")[2]) for flag in flags if flag.startswith(f"{_WORKERS}=")]
    return (*kept, f"{_WORKERS}={min([count, *(one for one in told if one > 0)])}")


def worker_memory(flags: Sequence[str]) -> int | None:
    """Return the bytes of memory that are free for workers; None if the workers are on other machines.

    A container sees its host's memory: its own limit is given by `BOOKWHEEL_WORKER_MEMORY`, in bytes.

    Raises:
        UsageError: the variable is no number of bytes.
    """
    return at_most(_available(), MEMORY, "number of bytes") if here(flags) else None


def _available() -> int:
    """Return the bytes that are free; on Linux including caches that the kernel can free at once."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
