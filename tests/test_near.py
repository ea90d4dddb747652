"""The selection of tests for `make test-near`."""

from pathlib import Path

import pytest

from tests.near import find_tests


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("rag_model/store/diff.py", "tests/rag_model/store/test_diff.py"),
        ("rag_model/store/upkeep/roots.py", "tests/rag_model/store/upkeep"),
        ("flows/cli.py", "tests/flows/test_cli.py"),
        ("tests/test_near.py", "tests/test_near.py"),
        ("tests/conftest.py", None),
        ("tests/rag_model/store/test_deleted.py", None),
        ("README.md", None),
    ],
)
def test_a_changed_file_selects_the_tests_at_its_mirrored_path(changed: str, tests: str | None) -> None:
    assert find_tests(Path(changed)) == (None if tests is None else Path(tests))
