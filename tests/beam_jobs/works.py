"""Work for jobs under test: workers import it by name, as they do the product's own."""

import os
import signal
from pathlib import Path
from typing import Any

from beam_jobs.tasks import limit_threads
from rag_model.errors import InputError
from rag_model.store.objects.memo import StageResult
from rag_model.store.store import Store


def square(task: int, store: Store) -> dict[str, Any]:
    """Return the square, and which process made it."""
    return {"square": task * task, "pid": os.getpid(), "threads": os.environ.get("OMP_NUM_THREADS")}


def look_around(task: int, store: Store) -> dict[str, Any]:
    """Return the surroundings of this process."""
    return {"variable": os.environ.get("BOOKWHEEL_OF_A_TEST"), "folder": str(Path.cwd()), "parent": os.getppid()}


def fail(task: int, store: Store) -> dict[str, Any]:
    """Raise what a bad input raises."""
    raise InputError(f"part {task} is truncated: fetch it again")


def bug(task: int, store: Store) -> dict[str, Any]:
    """Raise what nobody foresaw."""
    return {"inverse": 1 / (task - task)}


def die(task: int, store: Store) -> dict[str, Any]:
    """End the worker as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def hunger(task: int, store: Store) -> dict[str, Any]:
    """Ask for more memory than there can be."""
    return {"bytes": len(bytearray(1 << 62))}


def linger(task: int, store: Store) -> dict[str, Any]:
    """Say which process this is, and stay."""
    store.runs.write_report("run-1", "started", task, {"pid": os.getpid()})
    signal.pause()
    return {}


def note(task: int, store: Store) -> dict[str, Any]:
    """Write a number down, once, on one thread."""

    def produce(workdir: Path) -> StageResult:
        limit_threads(1)
        (workdir / "out").write_text(str(task))
        return StageResult({"out": workdir / "out"}, {"number": task, "pid": os.getpid()})

    record, made = store.memo.get_or_create("note", {"number": task}, produce)
    return {**record.stats, "out": record.outputs["out"].to_json(), "made": made}


def absent(task: int, store: Store) -> dict[str, Any]:
    """Read a file that is not there."""
    return {"text": Path("absent").read_text()}
