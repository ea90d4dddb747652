"""Read mutated files one after another, in a process that may die: `python -m tests.fuzz.child FOLDER KIND FIRST LAST`.

Writes the number of a case before it is tried, and its outcome after it: one line each. So the last line tells which
case killed it, and its parent goes on with the next one.
"""

import resource
import signal
import sys
import traceback
from pathlib import Path

from rag_model.errors import BookwheelError
from tests.fuzz.kinds import KINDS
from tests.fuzz.mutation import mutated

SECONDS = 5.0  # of a case; then the process is killed


def main(folder: Path, name: str, first: int, last: int) -> None:
    """Try the cases first … last - 1 of a kind whose sound file is the only one in `folder`."""
    (kind,) = (kind for kind in KINDS if kind.name == name)
    (sound,) = (path for path in folder.iterdir() if path.is_file())
    data = sound.read_bytes()
    kind.read(sound)  # imports and compiled code are no part of a case
    held = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()  # data and stacks
    resource.setrlimit(resource.RLIMIT_DATA, (held + kind.memory,) * 2)
    for number in range(first, last):
        print(f"try {number}", flush=True)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        sound.unlink()  # never in place: an earlier case may have mapped it
        sound.write_bytes(mutated(data, number))
        print(f"{_outcome(kind.read, sound)}", flush=True)
    signal.setitimer(signal.ITIMER_REAL, 0)


def _outcome(read: object, path: Path) -> str:
    try:
        read(path)  # type: ignore[operator]
    except BookwheelError as error:
        return "long" if len(str(error).splitlines()) > 1 else "refused"
    except MemoryError:
        return "memory"
    except Exception as raw:
        where = traceback.extract_tb(raw.__traceback__)
        ours = [frame for frame in where if "rag_model" in frame.filename]
        place = ours[-1] if ours else where[-1]
        return f"raw {type(raw).__name__} {Path(place.filename).name}:{place.lineno} {' '.join(str(raw).split())[:150]}"
    return "read"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
