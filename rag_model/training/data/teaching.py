"""A teacher's scores, kept in a file block by block: a training that was killed scores no block of pairs twice.

`scores.jsonl` in the work folder has a line a block: `key`, the digest of the teacher and the pairs; `scores`; and
`digest` of both. A line that is damaged or incomplete is dropped, and its block is scored again.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rag_model.digest import digest_json
from rag_model.landing import landing
from rag_model.retrieve.rerank import PairScorer

FILE = "scores.jsonl"
BLOCK = 1_024  # pairs: a cross-encoder's window, so that blocks do not change its scores
Tell = Callable[[int, int], None]  # how much is done, and of how much


class KeptScores:
    """A `PairScorer` whose scores are kept in a folder."""

    def __init__(
        self, teacher: PairScorer, identity: str, folder: Path, tell: Tell = lambda _, __: None, block: int = BLOCK
    ) -> None:
        """Read what `folder` has; `identity` is the digest of the teacher's files."""
        self._teacher, self._identity, self._tell, self._block = teacher, identity, tell, block
        self._path = folder / FILE
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.is_file() else []
        sound = [line for line in lines if _read(line)]
        if len(sound) < len(lines):
            with landing(self._path) as temporary:
                temporary.write_bytes(b"".join(sound))
        self._known = dict(found for line in sound for found in _read(line))

    def scores(self, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return the (n,) float32 scores of n pairs, in order; a block that is not kept is scored and kept."""
        blocks = list[list[float]]()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            for first in range(0, len(questions), self._block):
                part = slice(first, first + self._block)
                pairs = list(questions[part]), list(titles[part]), list(texts[part])
                key = digest_json([self._identity, *pairs])
                if key not in self._known:
                    self._known[key] = self._teacher.scores(*pairs).tolist()
                    file.write(_line(key, self._known[key]))
                    file.flush()  # a killed process loses nothing
                blocks.append(self._known[key])
                self._tell(min(part.stop, len(questions)), len(questions))
        return np.array([score for block in blocks for score in block], np.float32)


def _line(key: str, scores: list[float]) -> str:
    return json.dumps({"key": key, "scores": scores, "digest": _digest(key, scores)}) + "\n"


def _read(line: bytes) -> list[tuple[str, list[float]]]:
    """Return the key and the scores of a line, or nothing if it is damaged."""
    try:
        told = json.loads(line)
        key, scores = told["key"], told["scores"]
        return [(key, scores)] if line.endswith(b"\n") and told["digest"] == _digest(key, scores) else []
    except (ValueError, KeyError, TypeError):
        return []


def _digest(key: str, scores: list[float]) -> str:
    return digest_json([key, json.dumps(scores)])  # as text: a teacher may give a NaN, which is refused later
