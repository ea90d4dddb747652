"""Task functions of test jobs; workers import them by name, as they import those of the product."""

import os
import signal
from pathlib import Path
from typing import Any

from beam_jobs.tasks import limit_threads
from rag_model.errors import InputError
from rag_model.store.objects.memo import StageResult
from rag_model.store.store import Store


def square(task: int, store: Store) -> dict[str, Any]:
    """Return the square, and the process that computed it."""
    return {"square": task * task, "pid": os.getpid(), "threads": os.environ.get("OMP_NUM_THREADS")}


def describe_process(task: int, store: Store) -> dict[str, Any]:
    """Return the surroundings of this process."""
    return {"variable": os.environ.get("BOOKWHEEL_OF_A_TEST"), "folder": str(Path.cwd()), "parent": os.getppid()}


def raise_input_error(task: int, store: Store) -> dict[str, Any]:
    """Fail as a bad input does."""
    raise InputError(f"part {task} is truncated: fetch it again")


def divide_by_zero(task: int, store: Store) -> dict[str, Any]:
    """Raise an exception that is a bug."""
    return {"inverse": 1 / (task - task)}


def kill_worker(task: int, store: Store) -> dict[str, Any]:
    """End the worker as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def allocate_too_much(task: int, store: Store) -> dict[str, Any]:
    """Allocate more memory than a machine can have."""
    return {"bytes": len(bytearray(1 << 62))}


def wait_forever(task: int, store: Store) -> dict[str, Any]:
    """Report the id of this process, and wait until it is killed."""
    store.runs.write_report("run-1", "started", task, {"pid": os.getpid()})
    signal.pause()
    return {}


def record_number(task: int, store: Store) -> dict[str, Any]:
    """Write a number to a recorded file, on one thread."""

    def produce(workdir: Path) -> StageResult:
        limit_threads(1)
        (workdir / "out").write_text(str(task))
        return StageResult({"out": workdir / "out"}, {"number": task, "pid": os.getpid()})

    record, is_new = store.memo.get_or_create("record_number", {"number": task}, produce)
    return {**record.stats, "out": record.outputs["out"].to_json(), "is_new": is_new}


def read_missing_file(task: int, store: Store) -> dict[str, Any]:
    """Read a file that does not exist."""
    return {"text": Path("absent").read_text()}
