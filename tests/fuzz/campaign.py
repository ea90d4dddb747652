"""Try many mutations of each kind of file: `python -m tests.fuzz.campaign [CASES [KIND [FIRST]]]`, or `make fuzz`.

Prints one JSON line for each kind. A crash, an exception other than `BookwheelError`, an error of several lines, more
than 1 GB or more than 5 seconds is a defect. The line names its first cases: `… campaign 1 KIND CASE` repeats a case.
"""

import json
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.fixtures.forked_processes import start_process
from tests.fuzz.child import Job, read_mutated_files
from tests.fuzz.kinds import KINDS, Kind

ACCEPTABLE = {"read", "refused"}
_SHOWN = 5  # cases of each defect


@dataclass(slots=True)
class Result:
    """The outcomes of the cases of one kind."""

    kind: str
    counts: Counter[str] = field(default_factory=Counter)
    defects: dict[str, list[int]] = field(default_factory=dict)  # the first cases of each defect

    def add(self, number: int, outcome: str) -> None:
        """Count a case."""
        self.counts[outcome.split(maxsplit=1)[0]] += 1
        if outcome not in ACCEPTABLE:
            cases = self.defects.setdefault(outcome, [])
            if len(cases) < _SHOWN:
                cases.append(number)


def try_kinds(kinds: Sequence[Kind], first: int, last: int) -> list[Result]:
    """Try the cases first … last - 1 of kinds in a child process, which starts again after a case that kills it."""
    results = {kind.name: Result(kind.name) for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        jobs_by_kind = {
            kind.name: (first, _make_intact_file(kind, Path(folder, str(number)))) for number, kind in enumerate(kinds)
        }
        while jobs_by_kind:
            jobs = [
                (name, str(_create_work_folder(Path(folder), *intact)), start, last)
                for name, (start, intact) in jobs_by_kind.items()
            ]
            name, number = _run_child(results, jobs, Path(folder))
            for done in list(jobs_by_kind)[: list(jobs_by_kind).index(name)]:
                del jobs_by_kind[done]
            jobs_by_kind[name] = number + 1, jobs_by_kind[name][1]
            if number + 1 >= last:
                del jobs_by_kind[name]
    return list(results.values())


def _run_child(results: dict[str, Result], jobs: Sequence[Job], folder: Path) -> tuple[str, int]:
    """Run one child; return the kind and the number of the last case that it tried."""
    outputs = [folder / name for name in ("out", "err")]
    child = start_process(read_mutated_files, jobs, outputs)
    child.join()
    output, errors = (path.read_text(errors="replace") for path in outputs)
    lines, name, number = iter(output.splitlines()), "", -1
    for line in lines:
        if line.startswith("try "):  # libraries print other lines
            _, digits, name = line.split(" ", 2)
            number = int(digits)
            results[name].add(number, next(lines, None) or _describe_death(child.exitcode or 0))
    if not name:
        raise RuntimeError(f"an intact file of {', '.join(job[0] for job in jobs)} cannot be read: {errors[-2000:]}")
    return name, number


def _describe_death(code: int) -> str:
    if code in {-signal.SIGALRM, -signal.SIGPROF}:
        return "slow"
    return f"crash {signal.Signals(-code).name if code < 0 else code}"


def _make_intact_file(kind: Kind, folder: Path) -> tuple[str, bytes]:
    folder.mkdir()
    path = kind.make(folder)
    return path.name, path.read_bytes()


def _create_work_folder(folder: Path, name: str, intact: bytes) -> Path:
    """Return a new folder with a copy of the intact file alone."""
    work = Path(tempfile.mkdtemp(dir=folder))
    (work / name).write_bytes(intact)
    return work


def main(arguments: Sequence[str]) -> int:
    """Try CASES of each kind, or of one; return 1 if there was a defect."""
    cases, name, first = [*arguments, *("1000", "", "0")[len(arguments) :]]
    results = [
        result
        for kind in KINDS
        if name in {"", kind.name}
        for result in try_kinds([kind], int(first), int(first) + int(cases))
    ]
    for result in results:
        print(json.dumps({"kind": result.kind, **result.counts, "defects": result.defects}), flush=True)
    return int(any(result.defects for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
