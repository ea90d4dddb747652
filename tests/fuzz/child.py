"""Read mutated files one after another, in a process that may die.

Writes a line with the number of each case before it is tried, and a line with its outcome afterwards. The last line
names the case that killed the process, and the parent continues with the next case.
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

SECONDS = 5.0  # CPU time of a case, after which the process is killed
WAITED_SECONDS = 120.0  # elapsed time of a case
MEMORY = 1 << 30  # bytes in addition to those of the modules and the intact files; mapped files do not count
_READERS = {kind.name: kind.read for kind in KINDS}
Job = tuple[str, str, int, int]  # a kind's name, the folder of its intact file, the first case and the last + 1


def read_mutated_files(jobs: Sequence[Job], outputs: Sequence[Path]) -> None:
    """Try the cases of jobs; write standard output and standard error to two files."""
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    pa.set_io_thread_count(1)  # the intact files start the thread, because its start may fail under the memory limit
    pa.set_cpu_count(1)
    intact_files = [next(path for path in Path(folder).iterdir() if path.is_file()) for _, folder, _, _ in jobs]
    for (name, *_), path in zip(jobs, intact_files, strict=True):
        _READERS[name](path)  # so that imports and compilation are not part of a case
    used_bytes = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()  # data and stacks
    resource.setrlimit(resource.RLIMIT_DATA, (used_bytes + MEMORY,) * 2)
    for (name, _, first, last), path in zip(jobs, intact_files, strict=True):
        data = path.read_bytes()
        for number in range(first, last):
            print(f"try {number} {name}", flush=True)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.setitimer(signal.ITIMER_REAL, WAITED_SECONDS)
            path.unlink()  # a new file, because an earlier case may have mapped the old one
            path.write_bytes(mutate(data, number))
            print(_try_read(_READERS[name], path), flush=True)
    for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
        signal.setitimer(timer, 0)


def _try_read(read: Callable[[Path], object], path: Path) -> str:
    try:
        read(path)
    except BookwheelError as error:
        return "long" if len(str(error).splitlines()) > 1 else "refused"
    except MemoryError:
        return "memory"
    except Exception as raw:
        frames = traceback.extract_tb(raw.__traceback__)
        frame = next((frame for frame in reversed(frames) if "rag_model" in frame.filename), frames[-1])
        return f"raw {type(raw).__name__} {Path(frame.filename).name}:{frame.lineno} {' '.join(str(raw).split())[:150]}"
    return "read"
