"""Real passages and questions, and their vectors by MiniLM, which are cached in a folder.

Passages are JSON lines with `title` and `text`, questions JSON lines with `question`; plain or `.xz`. Without
files they are the demo's, which every checkout has.
"""

import json
import lzma
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flows.demo import QUESTIONS, demo_dump, demo_encoder
from rag_model.corpus.chunk import ChunkRecipe, chunk_part
from rag_model.corpus.passages import PassageFile
from rag_model.corpus.plan import plan_dump
from rag_model.digest import digest_json
from rag_model.encoders.encoder import Encoder

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SampledVectors:
    """MiniLM's vectors of passages and questions, which have unit length."""

    passages: Vectors  # (n, 384) float32, memory-mapped
    questions: Vectors  # (q, 384) float32


def embed_sample(
    cache: Path,
    passages: Path | None,
    questions: Sequence[Path],
    count: int,
    max_questions: int,
    words: int = 0,
    encoder: str | None = None,
) -> SampledVectors:
    """Embed `count` passages and `max_questions` questions, drawn by a fixed seed, or read their vectors from `cache`.

    With `words`, up to three pieces of `words` words of every passage are embedded in its place. `encoder` is the
    folder of another encoder than MiniLM.
    """
    cache.mkdir(parents=True, exist_ok=True)
    names = [path.name for path in (passages, *questions) if path is not None]
    key = digest_json([*names, count, max_questions, *([words] if words else []), *([encoder] if encoder else [])])[
        -12:
    ]
    files = [cache / f"{kind}-{key}.npy" for kind in ("passages", "questions")]
    if not all(file.is_file() for file in files):
        rows, texts = draw_sample(passages, questions, count, max_questions)
        rows = [piece for row in rows for piece in cut_pieces(row, words)] if words else rows
        for file, vectors in zip(files, _encode(rows, texts, encoder), strict=True):
            np.save(file, vectors, allow_pickle=False)
    return SampledVectors(np.load(files[0], mmap_mode="r"), np.load(files[1]))


def draw_sample(
    passages: Path | None, questions: Sequence[Path], count: int, max_questions: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the passages and questions whose vectors `embed_sample` returns."""
    rows = _sample_rows(read_json_lines(passages) if passages else demo_passages(), count)
    return rows, _sample_rows(
        [row["question"] for path in questions or [QUESTIONS] for row in read_json_lines(path)], max_questions
    )


def demo_passages() -> list[dict[str, str]]:
    """Return title and text of the demo dump's passages."""
    with tempfile.TemporaryDirectory() as workdir:
        plan = plan_dump(demo_dump(), workdir=Path(workdir), stage=str)
        out = Path(workdir) / "passages.parquet"
        rows = []
        for part in plan.parts:
            facts = chunk_part(part, plan.siteinfo, ChunkRecipe(), out)
            rows += [{"title": p.title, "text": p.text} for p in PassageFile(out).read_rows(list(range(facts.rows)))]
        return rows


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines, plain or `.xz`."""
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as read:
        return [json.loads(line) for line in read]


def _sample_rows(rows: list[Any], count: int) -> list[Any]:
    row_numbers = np.random.default_rng(0).permutation(len(rows))[:count]
    return [rows[number] for number in np.sort(row_numbers)]


def cut_pieces(row: dict[str, Any], words: int) -> list[dict[str, Any]]:
    """Return the first three pieces of `words` words of a passage, without a last piece of under 40 %."""
    text = row["text"].split()
    pieces = [text[first : first + words] for first in range(0, min(len(text), 3 * words), words)]
    return [row | {"text": " ".join(piece)} for piece in pieces if 5 * len(piece) >= 2 * words]


def _encode(rows: Sequence[dict[str, Any]], questions: Sequence[str], folder: str | None) -> tuple[Vectors, Vectors]:
    encoder = Encoder.load(folder or demo_encoder(), device="cpu")
    passages = encoder.encode_passages([row["title"] for row in rows], [row["text"] for row in rows])
    return passages, encoder.encode_questions(questions)
