"""Read mutated files one after another, in a process that may die.

Writes the number of a case before it is tried, and its outcome after it: one line each. So the last line tells which
case killed it, and its parent goes on with the next one.
"""

import os
import resource
import signal
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa

from rag_model.errors import BookwheelError
from tests.fuzz.kinds import KINDS
from tests.fuzz.mutation import mutate

SECONDS = 5.0  # of CPU time of a case; then the process is killed
WAITED_SECONDS = 120.0  # of a case that waits
MEMORY = 1 << 30  # bytes, beside what the modules and the sound files take; mapped files do not count
_READERS = {kind.name: kind.read for kind in KINDS}
Job = tuple[str, str, int, int]  # a kind's name, the folder with the sound file alone, the first case and the last + 1


def read_mutated_files(jobs: Sequence[Job], outputs: Sequence[Path]) -> None:
    """Try the cases of jobs; write standard output and standard error to two files."""
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    pa.set_io_thread_count(1)  # the sound files start it: under the limit the start of a thread may end the process
    pa.set_cpu_count(1)
    sound = [next(path for path in Path(folder).iterdir() if path.is_file()) for _, folder, _, _ in jobs]
    for (name, *_), path in zip(jobs, sound, strict=True):
        _READERS[name](path)  # imports and compiled code are no part of a case
    used_bytes = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()  # data and stacks
    resource.setrlimit(resource.RLIMIT_DATA, (used_bytes + MEMORY,) * 2)
    for (name, _, first, last), path in zip(jobs, sound, strict=True):
        data = path.read_bytes()
        for number in range(first, last):
            print(f"try {number} {name}", flush=True)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.setitimer(signal.ITIMER_REAL, WAITED_SECONDS)
            path.unlink()  # never in place: an earlier case may have mapped it
            path.write_bytes(mutate(data, number))
            print(_outcome(_READERS[name], path), flush=True)
    for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
        signal.setitimer(timer, 0)


def _outcome(read: Callable[[Path], object], path: Path) -> str:
    try:
        read(path)
    except BookwheelError as error:
        return "long" if len(str(error).splitlines()) > 1 else "refused"
    except MemoryError:
        return "memory"
    except Exception as raw:
        frames = traceback.extract_tb(raw.__traceback__)
        place = next((frame for frame in reversed(frames) if "rag_model" in frame.filename), frames[-1])
        return f"raw {type(raw).__name__} {Path(place.filename).name}:{place.lineno} {' '.join(str(raw).split())[:150]}"
    return "read"
