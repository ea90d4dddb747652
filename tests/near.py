"""Print the tests of the files that changed since a commit, for `make test-near`.

`python tests/near.py [COMMIT]`, by default HEAD. The tests of `rag_model/store/diff.py` are
`tests/rag_model/store/test_diff.py`, or all of `tests/rag_model/store` if there is no such file.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALWAYS = [Path("tests/test_house.py"), Path("tests/test_language.py")]
PACKAGES = ("flows", "beam_jobs", "rag_model")


def list_changed_files(commit: str) -> list[Path]:
    """Return the changed and the new files, relative to the root."""
    commands = (["git", "diff", "--name-only", commit], ["git", "ls-files", "--others", "--exclude-standard"])
    outputs = [subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True) for command in commands]
    return [Path(line) for output in outputs for line in output.stdout.splitlines()]


def find_tests(changed: Path) -> Path | None:
    """Return the test file or folder of a changed file, relative to the root; None if it has none."""
    if changed.parts[0] == "tests":
        return changed if changed.name.startswith("test_") and (ROOT / changed).is_file() else None
    if changed.parts[0] not in PACKAGES:
        return None
    folder = Path("tests") / changed.parent
    test = folder / f"test_{changed.stem}.py"
    if (ROOT / test).is_file():
        return test
    while not (ROOT / folder).is_dir():
        folder = folder.parent
    return folder


def list_near_tests(commit: str = "HEAD") -> list[Path]:
    """Return the tests of changed files in order, without files in listed folders."""
    tests = {test for test in map(find_tests, list_changed_files(commit)) if test is not None}
    return sorted({test for test in tests if not tests & {*test.parents}} | {*ALWAYS})


if __name__ == "__main__":
    print(*list_near_tests(*sys.argv[1:]))
