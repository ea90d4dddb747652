"""Run a function of this package in a child process, under limits of time and memory, so that it may die there.

The child is `python -m MODULE`, which ends in `answer(function)`: it reads one JSON value, and writes one.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

from rag_model.errors import BookwheelError, raised, told

_MIB = 1 << 20
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # its memory is not limited, and is another process's


class DiedError(BookwheelError):
    """The child died, took too long, or needed more memory than it was given: the sentence begins with a verb."""


def call(module: str, value: Any, *, seconds: float, memory: int) -> Any:
    """Return what the function of `module` returns for a JSON value.

    Args:
        module: one that ends in `answer`.
        value: its argument.
        seconds: it is killed after that.
        memory: bytes that it may allocate beside what Python and its modules take; mapped files do not count.

    Raises:
        BookwheelError: the error that the function raised, as `raised` gives it.
        DiedError: it died.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"} | _NO_GPU
    given = json.dumps({"value": value, "memory": memory, "seconds": ceil(seconds) + 1}).encode()
    try:
        command = [sys.executable, "-m", module]
        child = subprocess.run(command, input=given, capture_output=True, timeout=seconds, env=environment, check=False)
    except subprocess.TimeoutExpired as slow:
        raise DiedError(f"took more than {seconds:.0f} s") from slow
    if child.returncode < 0:
        raise DiedError(f"was ended by {signal.Signals(-child.returncode).name}")
    return _returned(child.stdout, memory)


def _returned(output: bytes, memory: int) -> Any:
    try:
        answered = json.loads(output.rpartition(b"\n")[2])  # a library may print before
        kind, said = answered["error"], answered["value"]
    except (ValueError, KeyError, TypeError) as silent:
        raise DiedError("ended without a word") from silent
    if kind == "MemoryError":
        raise DiedError(f"needed more than {memory / _MIB:,.0f} MiB of memory")
    if kind:
        raise raised(kind, said)
    return said


def answer(function: Callable[[Any], Any]) -> None:
    """Call `function` with the value on standard input, under its limit; write what it returns or raises."""
    given = json.loads(sys.stdin.buffer.read())
    signal.alarm(given["seconds"])  # by the kernel, where the parent that would end this process was killed
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (_data() + given["memory"],) * 2)
    try:
        kind, said = "", function(given["value"])
    except MemoryError:
        kind, said = "MemoryError", ""
    except BookwheelError as failed:
        kind, said = ("MemoryError", "") if isinstance(failed.__cause__, MemoryError) else told(failed).values()
    except Exception as failed:
        kind, said = "InputError", f"{type(failed).__name__}: {failed}"
    sys.stdout.write("\n" + json.dumps({"error": kind, "value": said}))


def _data() -> int:
    """Return the bytes of data that this process holds, as RLIMIT_DATA counts them; 0 where that is unknown."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0
