"""What a child returns comes back, and however it dies is one sentence."""

import subprocess
import sys

import psutil
import pytest

from rag_model.child import DiedError, call
from rag_model.errors import InputError, StoreError

MIB = 1 << 20


def test_it_returns_what_its_function_returns() -> None:
    assert call("tests.fixtures.dying", {"é": [1]}, seconds=60, memory=64 * MIB) == [{"é": [1]}, "lives"]


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("segfault", "was ended by SIGSEGV"),
        ("memory", "needed more than 64 MiB of memory"),
        ("loop", "took more than 2 s"),
        ("silence", "ended without a word"),
    ],
)
def test_a_death_is_told(how: str, sentence: str) -> None:
    with pytest.raises(DiedError, match=sentence):
        call("tests.fixtures.dying", how, seconds=2 if how == "loop" else 60, memory=64 * MIB)


def test_its_errors_are_raised_here() -> None:
    with pytest.raises(StoreError, match="a sentence"):
        call("tests.fixtures.dying", "refuse", seconds=60, memory=64 * MIB)
    with pytest.raises(InputError, match="ZeroDivisionError: by zero"):
        call("tests.fixtures.dying", "raise", seconds=60, memory=64 * MIB)


def test_it_ends_in_time_although_its_parent_was_killed() -> None:
    calls = "from rag_model.child import call; call('tests.fixtures.dying', 'loop', seconds=2, memory=1 << 26)"
    with subprocess.Popen([sys.executable, "-c", calls]) as parent:
        while not (children := psutil.Process(parent.pid).children()):
            assert parent.poll() is None
        parent.kill()
    (child,) = children
    child.wait(60)  # raises if it is still there
