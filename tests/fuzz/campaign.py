"""Try many mutations of each kind of file: `python -m tests.fuzz.campaign [CASES [KIND …]]`, or `make fuzz`.

Prints one JSON line a kind. A crash, an exception that is no `BookwheelError`, more than 1 GB or more than 5 seconds is
a defect: the line then names the first cases of it. `python -m tests.fuzz.campaign 1 KIND CASE` tries one again.
"""

import json
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.kinds import KINDS, Kind

SOUND = {"read", "refused"}
_ROOT = Path(__file__).parents[2]
_SHOWN = 5  # cases of each defect


@dataclass(slots=True)
class Result:
    """What became of the cases of one kind."""

    kind: str
    counts: Counter[str] = field(default_factory=Counter)
    defects: dict[str, list[int]] = field(default_factory=dict)  # what -> the first cases

    def add(self, number: int, outcome: str) -> None:
        """Count a case."""
        self.counts[outcome.split(maxsplit=1)[0]] += 1
        if outcome not in SOUND:
            cases = self.defects.setdefault(outcome, [])
            if len(cases) < _SHOWN:
                cases.append(number)


def tried(kind: Kind, first: int, last: int) -> Result:
    """Try the cases first … last - 1 of a kind, each in a child process that survives all cases but those that kill."""
    result = Result(kind.name)
    with tempfile.TemporaryDirectory() as folder:
        sound = kind.make(_new(Path(folder, "make"))).read_bytes()
        name = kind.make(_new(Path(folder, "again"))).name
        while first < last:
            work = _new(Path(folder, f"from-{first}"))
            (work / name).write_bytes(sound)
            first = _tried(result, work, first, last)
    return result


def _tried(result: Result, work: Path, first: int, last: int) -> int:
    """Run one child; return the case that follows the last one it tried."""
    command = [sys.executable, "-m", "tests.fuzz.child", str(work), result.kind, str(first), str(last)]
    child = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    lines, number = iter(child.stdout.splitlines()), first - 1
    for line in lines:
        if not line.startswith("try "):
            continue  # what a library prints
        number = int(line.split()[1])
        outcome = next((line for line in lines), None)
        result.add(number, outcome or _died(child.returncode))
    if number < first:
        raise RuntimeError(f"{result.kind}: the sound file cannot be read: {child.stderr[-2000:]}")
    return number + 1


def _died(code: int) -> str:
    if code == -signal.SIGALRM:
        return "slow"
    return f"crash {signal.Signals(-code).name if code < 0 else code}"


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def main(arguments: Iterable[str]) -> int:
    """Try CASES of each kind, or of those that are named; return 1 if there was a defect."""
    cases, *names = arguments or ["1000"]
    start = int(names.pop()) if names and names[-1].isdecimal() else 0
    results = [tried(kind, start, start + int(cases)) for kind in KINDS if not names or kind.name in names]
    for result in results:
        print(json.dumps({"kind": result.kind, **result.counts, "defects": result.defects}), flush=True)
    return int(any(result.defects for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
