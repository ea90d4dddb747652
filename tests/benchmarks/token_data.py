"""Token vectors of passages and questions for the benchmarks of late interaction: encoded, cached, or from a store."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from passages import demo_passages, read_json_lines

from flows.demo import QUESTIONS, demo_encoder
from rag_model.corpus.ragged_file import TokenFile, TokenVectors, TokenWriter
from rag_model.digest import digest_json
from rag_model.encoders.encoder import Encoder
from rag_model.encoders.spec import TokenSpec
from rag_model.encoders.token_encoder import TokenEncoder
from rag_model.encoders.token_model import TokenModel
from rag_model.evaluation.matching import AnswerMatcher
from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.tokens.search import maxsim
from rag_model.store.versions.manifest import EMBEDDINGS, TOKENS, question_encoder_path
from rag_model.store.versions.snapshot import Snapshot

UNTRAINED = "MiniLM's hidden states through a random orthonormal projection to 128, not trained"
K = 10
_WINDOW = 512


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `read` takes."""
    parser.add_argument("--passages", type=Path, nargs="+", default=[], help="JSON lines with title and text")
    parser.add_argument("--questions", type=Path, help="JSON lines with question, and paragraph, passages or answers")
    parser.add_argument("--count", type=int, default=600, help="passages, from the first on")
    parser.add_argument("--max-questions", type=int, default=60, help="maximum number of questions")
    parser.add_argument("--colbert", help="folder of a trained ColBERT")
    parser.add_argument(
        "--store", help="a store whose snapshot has token vectors, in place of --passages and --colbert"
    )
    parser.add_argument("--cache", type=Path, help="keeps the vectors; by default a temporary folder")


@dataclass(frozen=True, slots=True)
class TokenSample:
    """Passages and questions with token vectors and with single vectors."""

    tokens: list[Path]  # files of the passages' token vectors
    dense: Vectors  # (n, 384), one vector of each passage
    question_tokens: Vectors  # (q, l, d)
    question_vectors: Vectors  # (q, 384)
    relevant: list[set[int]]  # rows, by question
    texts: list[str]
    encoder: str

    def concatenate(self) -> TokenVectors:
        """Return all token vectors of the passages."""
        return TokenVectors.concatenate([block for path in self.tokens for block in TokenFile(path).iter_batches()])


def read(options: argparse.Namespace, cache: Path) -> TokenSample:
    """Encode passages and questions, or read their vectors from the cache or from a store."""
    if options.store:
        return _read_store(options)
    cache.mkdir(parents=True, exist_ok=True)
    rows = [row for path in options.passages for row in read_json_lines(path)]
    if not rows:
        rows = demo_passages()
        rows = rows[:: max(1, len(rows) // options.count)]
    question_rows = read_json_lines(options.questions or QUESTIONS)
    rows, question_rows = (
        rows[: options.count],
        question_rows[:: max(1, len(question_rows) // options.max_questions)][: options.max_questions],
    )
    row_by_id = dict[str, int]()
    for number, row in enumerate(rows):  # questions are about the first row of an id, which later files may repeat
        row_by_id.setdefault(str(row.get("id")), number)
    if all("paragraph" in question for question in question_rows):
        question_rows = [question for question in question_rows if str(question["paragraph"]) in row_by_id]
        relevant = [{row_by_id[str(question["paragraph"])]} for question in question_rows]
    else:
        answers = [AnswerMatcher(question["answers"]) for question in question_rows]
        relevant = [{n for n, row in enumerate(rows) if answer.match(row["text"])} for answer in answers]
    question_numbers = [number for number, rel in enumerate(relevant) if rel]
    question_rows, relevant = (
        [question_rows[number] for number in question_numbers],
        [relevant[number] for number in question_numbers],
    )
    texts = [question["question"] for question in question_rows]
    key = digest_json([[row["text"] for row in rows], texts, str(options.colbert)])[-12:]
    files = [cache / f"{key}-{name}" for name in ("tokens.arrow", "dense.npy", "asked_tokens.npy", "asked.npy")]
    if not all(file.is_file() for file in files):
        _encode(rows, texts, options.colbert, files, cache)
    return TokenSample(
        [files[0]],
        np.load(files[1]),
        np.load(files[2]),
        np.load(files[3]),
        relevant,
        texts,
        options.colbert or UNTRAINED,
    )


def _read_store(options: argparse.Namespace) -> TokenSample:
    with Snapshot.open(options.store) as snapshot:
        parts, passages = snapshot.parts, snapshot.passages(range(snapshot.n))
        rows = {passage.id: row for row, passage in enumerate(passages)}
        question_rows = [
            question
            for question in read_json_lines(options.questions)
            if all(name in rows for name in question["passages"])
        ]
        question_rows = question_rows[:: max(1, len(question_rows) // options.max_questions)][: options.max_questions]
        texts = [question["question"] for question in question_rows]
        token_encoder = TokenEncoder.load(snapshot.folder(question_encoder_path(TOKENS)), device="cpu")
        dense_encoder = Encoder.load(snapshot.folder(question_encoder_path(EMBEDDINGS)), device="cpu")
        dense = np.concatenate([snapshot.embeddings(part.name) for part in parts]).astype(np.float32)
        relevant = [{rows[name] for name in question["passages"]} for question in question_rows]
        both = token_encoder.encode_questions(texts), dense_encoder.encode_questions(texts)
        return TokenSample(snapshot.row_files(TOKENS), dense, *both, relevant, texts, token_encoder.space().name)


def _encode(
    rows: Sequence[dict[str, Any]], texts: list[str], colbert: str | None, files: list[Path], cache: Path
) -> None:
    folder = Path(colbert) if colbert else cache / "untrained"
    if not colbert:
        plain = Path(demo_encoder())
        TokenModel.from_encoder(plain, 128, device="cpu").save(folder, plain, TokenSpec())
    token_encoder, dense_encoder = TokenEncoder.load(folder, device="cpu"), Encoder.load(demo_encoder(), device="cpu")
    titles, bodies = [row["title"] for row in rows], [row["text"] for row in rows]
    with TokenWriter(files[0].with_suffix(".part"), token_encoder.dim, "float16") as writer:
        for first in range(0, len(rows), _WINDOW):
            window = slice(first, first + _WINDOW)
            writer.write(token_encoder.encode_passages(titles[window], bodies[window]))
    files[0].with_suffix(".part").rename(files[0])
    np.save(files[1], dense_encoder.encode_passages(titles, bodies))
    np.save(files[2], token_encoder.encode_questions(texts))
    np.save(files[3], dense_encoder.encode_questions(texts))


def compute_ndcg(rows: Rows, relevant: Sequence[set[int]]) -> Vectors:
    """Return (q,) nDCG@10 of lists of rows, (q, >= 10), with relevance 0 or 1."""
    gains = 1 / np.log2(np.arange(2, K + 2))
    is_relevant = np.array(
        [[row in rel for row in line[:K].tolist()] for line, rel in zip(rows, relevant, strict=True)]
    )
    ideal = np.array([gains[: len(rel)].sum() for rel in relevant])
    return (is_relevant * gains[: is_relevant.shape[1]]).sum(axis=1) / ideal


def estimate_interval(difference: Vectors) -> list[float]:
    """Return the 95 % interval of a mean, by 2,000 resamples of the questions."""
    sample_rows = np.random.default_rng(0).integers(len(difference), size=(2_000, len(difference)))
    return [round(float(edge), 4) for edge in np.percentile(difference[sample_rows].mean(axis=1), (2.5, 97.5))]


def search_exhaustively(data: TokenSample, tokens: TokenVectors) -> Rows:
    """Return the best rows of every question by MaxSim over all passages, (q, 10)."""
    best = []
    for question in data.question_tokens:
        scores = maxsim(question[None], tokens.vectors, tokens.offsets)[0]
        best.append(np.lexsort((np.arange(len(scores)), -scores))[:K])
    return np.array(best)
