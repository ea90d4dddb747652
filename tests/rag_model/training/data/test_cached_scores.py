"""A teacher's scores outlive the process that made them."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rag_model.training.data.pair_scores import SCORES_FILE, CachedPairScorer

QUESTIONS = [f"question {number}" for number in range(10)]
TITLES = ["title"] * 10
TEXTS = ["word " * number for number in range(10)]
BLOCK = 3


class Lengths:
    """A teacher that counts characters, says how many pairs it has read, and may die."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.read, self.dies_at = 0, dies_at

    def scores(self, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> npt.NDArray[np.float32]:
        self.read += len(questions)
        if self.dies_at is not None and self.read >= self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.array([len(a) + len(b) + len(c) / 3 for a, b, c in zip(questions, titles, texts, strict=True)], "f4")


def test_a_killed_process_loses_one_block_at_most(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, __file__, tmp_path, "7"], check=False)
    assert killed.returncode == -signal.SIGKILL
    teacher, messages = Lengths(), list[tuple[int, int]]()
    found = CachedPairScorer(teacher, "a", tmp_path, lambda *both: messages.append(both), BLOCK).scores(
        QUESTIONS, TITLES, TEXTS
    )
    assert teacher.read == 10 - 2 * BLOCK, "two blocks were kept"
    assert (found == Lengths().scores(QUESTIONS, TITLES, TEXTS)).all()
    assert messages == [(3, 10), (6, 10), (9, 10), (10, 10)]
    before = (tmp_path / SCORES_FILE).read_bytes()
    again = Lengths()
    assert (CachedPairScorer(again, "a", tmp_path, block=BLOCK).scores(QUESTIONS, TITLES, TEXTS) == found).all()
    assert (again.read, (tmp_path / SCORES_FILE).read_bytes()) == (0, before)


def test_scores_of_others_are_not_taken(tmp_path: Path) -> None:
    CachedPairScorer(Lengths(), "a", tmp_path, block=BLOCK).scores(QUESTIONS, TITLES, TEXTS)
    other, changed = Lengths(), Lengths()
    CachedPairScorer(other, "b", tmp_path, block=BLOCK).scores(QUESTIONS, TITLES, TEXTS)
    CachedPairScorer(changed, "a", tmp_path, block=BLOCK).scores(QUESTIONS, TITLES, [*TEXTS[:-1], "other"])
    assert (other.read, changed.read) == (10, 1)


def test_a_damaged_line_is_scored_again(tmp_path: Path) -> None:
    expected = CachedPairScorer(Lengths(), "a", tmp_path, block=BLOCK).scores(QUESTIONS, TITLES, TEXTS)
    first, second, *others = (tmp_path / SCORES_FILE).read_bytes().splitlines(keepends=True)
    (tmp_path / SCORES_FILE).write_bytes(b"".join([first, second.replace(b": [2", b": [3", 1), *others])[:-5])
    teacher = Lengths()
    assert (CachedPairScorer(teacher, "a", tmp_path, block=BLOCK).scores(QUESTIONS, TITLES, TEXTS) == expected).all()
    assert teacher.read == BLOCK + 1, "the changed line, and the last, which was cut"
    once_more = Lengths()
    CachedPairScorer(once_more, "a", tmp_path, block=BLOCK).scores(QUESTIONS, TITLES, TEXTS)
    assert once_more.read == 0


if __name__ == "__main__":
    CachedPairScorer(Lengths(int(sys.argv[2])), "a", Path(sys.argv[1]), block=BLOCK).scores(QUESTIONS, TITLES, TEXTS)
