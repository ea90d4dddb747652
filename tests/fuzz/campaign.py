"""Try many mutations of each kind of file: `python -m tests.fuzz.campaign [CASES [KIND [FIRST]]]`, or `make fuzz`.

Prints one JSON line a kind. A crash, an exception that is no `BookwheelError`, an error of several lines, more than
1 GB or more than 5 seconds is a defect, whose first cases the line names: `… campaign 1 KIND CASE` tries one again.
"""

import json
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.fixtures.forked import start_process
from tests.fuzz.child import Job, read_mutated_files
from tests.fuzz.kinds import KINDS, Kind

SOUND = {"read", "refused"}
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


def tried(kinds: Sequence[Kind], first: int, last: int) -> list[Result]:
    """Try the cases first … last - 1 of some kinds in a child process, which is started again after each that kills."""
    results = {kind.name: Result(kind.name) for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        left = {kind.name: (first, _sound(kind, Path(folder, str(place)))) for place, kind in enumerate(kinds)}
        while left:
            jobs = [(name, str(_work(Path(folder), *sound)), start, last) for name, (start, sound) in left.items()]
            name, number = _run(results, jobs, Path(folder))
            for done in list(left)[: list(left).index(name)]:
                del left[done]
            left[name] = number + 1, left[name][1]
            if number + 1 >= last:
                del left[name]
    return list(results.values())


def _run(results: dict[str, Result], jobs: Sequence[Job], folder: Path) -> tuple[str, int]:
    """Run one child; return the kind and the number of the last case that it tried."""
    outputs = [folder / name for name in ("out", "err")]
    child = start_process(read_mutated_files, jobs, outputs)
    child.join()
    output, errors = (path.read_text(errors="replace") for path in outputs)
    lines, name, number = iter(output.splitlines()), "", -1
    for line in lines:
        if line.startswith("try "):  # others are what a library prints
            _, digits, name = line.split(" ", 2)
            number = int(digits)
            results[name].add(number, next(lines, None) or _died(child.exitcode or 0))
    if not name:
        raise RuntimeError(f"a sound file of {', '.join(job[0] for job in jobs)} cannot be read: {errors[-2000:]}")
    return name, number


def _died(code: int) -> str:
    if code in {-signal.SIGALRM, -signal.SIGPROF}:
        return "slow"
    return f"crash {signal.Signals(-code).name if code < 0 else code}"


def _sound(kind: Kind, folder: Path) -> tuple[str, bytes]:
    folder.mkdir()
    made = kind.make(folder)
    return made.name, made.read_bytes()


def _work(folder: Path, name: str, sound: bytes) -> Path:
    """Return a new folder with a copy of the sound file alone."""
    work = Path(tempfile.mkdtemp(dir=folder))
    (work / name).write_bytes(sound)
    return work


def main(arguments: Sequence[str]) -> int:
    """Try CASES of each kind, or of one; return 1 if there was a defect."""
    cases, name, first = [*arguments, *("1000", "", "0")[len(arguments) :]]
    found = [
        result
        for kind in KINDS
        if name in {"", kind.name}
        for result in tried([kind], int(first), int(first) + int(cases))
    ]
    for result in found:
        print(json.dumps({"kind": result.kind, **result.counts, "defects": result.defects}), flush=True)
    return int(any(result.defects for result in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
