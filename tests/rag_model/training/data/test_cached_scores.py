"""Teacher scores are cached in a file, which survives the process that computed them."""

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


class LengthTeacher:
    """Scores pairs by their lengths, counts the scored pairs, and optionally kills its process at a given pair."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.pair_count, self.dies_at = 0, dies_at

    def scores(self, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> npt.NDArray[np.float32]:
        self.pair_count += len(questions)
        if self.dies_at is not None and self.pair_count >= self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.array([len(a) + len(b) + len(c) / 3 for a, b, c in zip(questions, titles, texts, strict=True)], "f4")


def score(teacher: LengthTeacher, folder: Path, identity: str = "a", texts: list[str] = TEXTS) -> list[float]:
    return CachedPairScorer(teacher, identity, folder, block_size=BLOCK).scores(QUESTIONS, TITLES, texts).tolist()


def test_killed_process_loses_at_most_one_block(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, __file__, tmp_path, "7"], check=False)
    assert killed.returncode == -signal.SIGKILL
    teacher, messages = LengthTeacher(), list[tuple[int, int]]()
    scores = CachedPairScorer(teacher, "a", tmp_path, lambda *counts: messages.append(counts), BLOCK).scores(
        QUESTIONS, TITLES, TEXTS
    )
    assert teacher.pair_count == 10 - 2 * BLOCK, "the killed process recorded two blocks"
    assert (scores == LengthTeacher().scores(QUESTIONS, TITLES, TEXTS)).all()
    assert messages == [(3, 10), (6, 10), (9, 10), (10, 10)]
    content = (tmp_path / SCORES_FILE).read_bytes()
    second_teacher = LengthTeacher()
    assert score(second_teacher, tmp_path) == scores.tolist()
    assert (second_teacher.pair_count, (tmp_path / SCORES_FILE).read_bytes()) == (0, content)


def test_scores_of_another_teacher_or_another_text_are_not_used(tmp_path: Path) -> None:
    score(LengthTeacher(), tmp_path)
    other_teacher, same_teacher = LengthTeacher(), LengthTeacher()
    score(other_teacher, tmp_path, "b")
    score(same_teacher, tmp_path, texts=[*TEXTS[:-1], "other"])
    assert (other_teacher.pair_count, same_teacher.pair_count) == (10, 1)


def test_pair_of_a_damaged_line_is_scored_again(tmp_path: Path) -> None:
    expected = score(LengthTeacher(), tmp_path)
    first, second, *other_lines = (tmp_path / SCORES_FILE).read_bytes().splitlines(keepends=True)
    (tmp_path / SCORES_FILE).write_bytes(b"".join([first, second.replace(b": [2", b": [3", 1), *other_lines])[:-5])
    teacher = LengthTeacher()
    assert score(teacher, tmp_path) == expected
    assert teacher.pair_count == BLOCK + 1, "the block of the changed line, and the pair of the truncated last line"
    next_teacher = LengthTeacher()
    score(next_teacher, tmp_path)
    assert next_teacher.pair_count == 0


if __name__ == "__main__":
    score(LengthTeacher(int(sys.argv[2])), Path(sys.argv[1]))
