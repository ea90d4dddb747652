"""Measure weighted terms as an index of a snapshot beside a product of sparse matrices: speed, build and bytes.

The peer holds the same weights as one scipy CSR matrix, terms by passages, multiplies it with the
questions' matrix and sorts the product, so that it computes all scores, like bm25s. Both sides have
one thread and take turns over the same questions in every round; figures are medians of rounds.
Scores must be equal to the last digit, and 8 parts must merge to the bytes of one. `ratio` is our
questions a second over the peer's. `refresh` derives the index of the next month from its parent:
its CPU seconds over those of a build, and the share of the bytes that a pull fetches over the share
of the passages that changed. Prints one JSON line.

By default all data is synthetic: 128 terms a passage of a vocabulary of 30,522, drawn by Zipf's
law, with weights of a gamma distribution; and 32 terms a question, 8 heavy ones of one passage and
light ones by Zipf's law. `--model FOLDER` encodes the demo's passages, or those of `--passages FILE
--questions FILE` (JSON lines, plain or .xz, with `title` and `text`, and `question`), with any
masked-language model. One that was not trained for this gives weight to almost every term, and its
figures describe the machinery alone.
"""

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from isolated_run import run_alone
from passages import demo_passages, draw_sample
from scipy.sparse import csr_matrix

from rag_model.corpus.ragged_file import QUERY_UNITS, SparseVectors, SparseWriter, compute_offsets
from rag_model.encoders.sparse_encoder import SparseEncoder
from rag_model.index.files.engine import Vectors
from rag_model.index.files.pieces import path_opener
from rag_model.index.kind import IndexFiles
from rag_model.index.postings.impact import KIND
from rag_model.index.postings.search import ImpactIndex, quantize_queries
from rag_model.index.recipe import IndexRecipe
from rag_model.store.pulling.delta_files import write_new_terms

_VOCABULARY = 30_522
_SCALE = 64
_OWN = 8  # heavy terms of a synthetic question, all from one passage; the others are light
_BATCH = 64  # questions of one product of the peer


def draw_synthetic(options: argparse.Namespace) -> tuple[SparseVectors, Vectors, int]:
    """Return passages whose terms follow Zipf's law, questions of such terms, and the size of the vocabulary."""
    rng = np.random.default_rng(7)
    totals = np.cumsum(1 / np.arange(1, _VOCABULARY + 1) ** 0.8)
    drawn_terms = np.searchsorted(totals / totals[-1], rng.random((options.count, 2 * options.terms)))
    rows = [_take_terms(row, options.terms) for row in drawn_terms]
    terms = np.concatenate(rows).astype(np.int32)
    weights = np.clip(np.rint(rng.gamma(1.5, 0.5, len(terms)) * _SCALE), 1, 255).astype(np.uint8)
    passages = SparseVectors(terms, weights, compute_offsets(np.array([len(row) for row in rows])))
    questions = np.zeros((options.max_questions, options.question_terms, 2), np.float32)
    for row in questions:
        own_terms = rng.permutation(rows[rng.integers(len(rows))])[:_OWN]
        candidate_terms = np.searchsorted(totals / totals[-1], rng.random(4 * options.question_terms))
        added = rng.permutation(np.setdiff1d(candidate_terms, own_terms))
        terms = np.concatenate([own_terms, added])[: options.question_terms]
        weights = np.concatenate([rng.gamma(4.0, 0.4, len(own_terms)), rng.gamma(1.0, 0.3, len(added))])[: len(terms)]
        order = np.argsort(-weights)
        row[: len(terms)] = np.stack([terms[order], weights[order]], axis=1)
    return passages, questions, _VOCABULARY


def _take_terms(row: np.ndarray, count: int) -> np.ndarray:
    """Return the first `count` different terms of a row, ascending."""
    _, positions = np.unique(row, return_index=True)
    return np.sort(row[np.sort(positions)[:count]])


def encode_texts(options: argparse.Namespace) -> tuple[SparseVectors, Vectors, int]:
    """Encode the passages and questions of files, or the demo's, with a model."""
    count = min(options.count, len(demo_passages())) if options.passages is None else options.count
    rows, questions = draw_sample(options.passages, options.questions, count, options.max_questions)
    encoder = SparseEncoder.load(options.model)
    passages = encoder.encode_passages([row["title"] for row in rows], [row["text"] for row in rows])
    return passages, encoder.encode_questions(questions), encoder.dim


def write_parts(rows: SparseVectors, parts: int, dim: int, folder: Path) -> None:
    """Write rows to parts of about equal size."""
    folder.mkdir()
    (folder / "count").write_text(json.dumps([len(rows), dim, parts]))
    bounds = np.linspace(0, len(rows), parts + 1).astype(int)
    for number in range(parts):
        with SparseWriter(folder / f"part-{number:05d}.sparse", dim, _SCALE) as writer:
            writer.write(rows.take(np.arange(bounds[number], bounds[number + 1])))


def build(folder: Path, factory: str) -> float:
    """Build an index of a folder's part files; return the CPU seconds."""
    start = time.process_time()
    n, dim, parts = json.loads((folder / "count").read_text())
    plan, trained_path = KIND.plan(IndexRecipe(factory), n, dim), folder / "trained"
    KIND.train(plan, [], trained_path)
    rows = [folder / f"part-{number:05d}.sparse" for number in range(parts)]
    pieces = [folder / f"piece-{number:05d}" for number in range(parts)]
    for number in range(parts):
        KIND.scatter(plan, trained_path, rows[number], number, pieces[number])
    KIND.merge(plan, trained_path, rows, [path_opener(piece) for piece in pieces], [], folder / f"{factory}.postings")
    return time.process_time() - start


def refresh(rows: SparseVectors, folder: Path, dim: int) -> dict[str, float | bool]:
    """Derive an index from its parent after one passage in 140 was replaced; compare it with a build."""
    rng, plan = np.random.default_rng(11), KIND.plan(IndexRecipe("Impact"), len(rows), dim)
    base_rows = np.where(rng.random(len(rows)) < 1 / 140, -1, np.arange(len(rows)))
    new_rows = np.flatnonzero(base_rows < 0)
    source_rows = np.where(base_rows < 0, rng.integers(0, len(rows), len(rows)), base_rows)
    next_rows = rows.take(source_rows)
    cpu_seconds = {}
    for name in ("first", "derived"):  # the first call compiles
        start = time.process_time()
        parent_index, out = folder / "Impact.postings", folder / name
        KIND.derive(plan.entry(), plan.entry(), parent_index, base_rows, lambda rows: iter([next_rows.take(rows)]), out)
        cpu_seconds[name] = time.process_time() - start
    month = folder / "month"
    write_parts(next_rows, 8, dim, month)
    build_seconds = build(month, "Impact")
    write_new_terms(base_rows, next_rows.take(new_rows), folder / "delta")
    share, size = len(new_rows) / len(rows), (folder / "derived").stat().st_size
    return {
        "changed_share": round(share, 5),
        "cpu_ratio": round(cpu_seconds["derived"] / build_seconds, 3),
        "equals_a_build": (folder / "derived").read_bytes() == (month / "Impact.postings").read_bytes(),
        "pull_ratio": round((folder / "delta").stat().st_size / size / share, 2),
    }


def open_impact_index(folder: Path, factory: str) -> ImpactIndex:
    """Open the index that `build` made."""
    n, dim, _ = json.loads((folder / "count").read_text())
    entry = KIND.plan(IndexRecipe(factory), n, dim).entry()
    return KIND.open(IndexFiles(folder / f"{factory}.postings", list, n), entry)


class Peer:
    """Computes all scores as a product of sparse matrices, and sorts the k best of each question."""

    def __init__(self, rows: SparseVectors, dim: int) -> None:
        weights = rows.weights.astype(np.float64)  # exact, since the sums are whole numbers
        self.terms = csr_matrix((weights, rows.terms, rows.offsets), shape=(len(rows), dim)).T.tocsr()

    def search(self, questions: Vectors, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (q, k) scores in units, and rows; ties are in any order."""
        batches = [self._batch(questions[first : first + _BATCH], k) for first in range(0, len(questions), _BATCH)]
        scores, rows = zip(*batches, strict=True)
        return np.concatenate(scores), np.concatenate(rows)

    def _batch(self, questions: Vectors, k: int) -> tuple[np.ndarray, np.ndarray]:
        terms, units = quantize_queries(questions)
        ends = np.arange(len(questions) + 1) * terms.shape[1]
        shape = len(questions), self.terms.shape[0]
        query_matrix = csr_matrix((units.reshape(-1).astype(np.float64), terms.reshape(-1), ends), shape=shape)
        product = (query_matrix @ self.terms).tocsr()
        scores, rows = np.zeros((len(questions), k)), np.full((len(questions), k), -1)
        for number in range(len(questions)):
            first, last = product.indptr[number : number + 2]
            values, passage_rows = product.data[first:last], product.indices[first:last]
            best = np.argpartition(-values, min(k, len(values)) - 1)[:k] if len(values) else []
            best = np.array(best, np.int64)[np.argsort(-values[best], kind="stable")]
            scores[number, : len(best)], rows[number, : len(best)] = values[best], passage_rows[best]
        return scores, rows

    @property
    def size(self) -> int:
        """The bytes of the matrix if a weight took one byte."""
        return self.terms.nnz * 5 + self.terms.indptr.nbytes


def measure_speeds(sides: dict[str, Callable[[], Any]], n_questions: int, rounds: int) -> dict[str, float]:
    """Return each side's questions per CPU second, as the median of rounds in which the sides take turns."""
    round_seconds: dict[str, list[float]] = {name: [] for name in sides}
    for search in sides.values():
        search()  # compiles, and reads the pages of the file
    for _ in range(rounds):
        for name, search in sides.items():
            start = time.process_time()
            search()
            round_seconds[name].append(time.process_time() - start)
    return {name: round(n_questions / statistics.median(seconds), 1) for name, seconds in round_seconds.items()}


def main() -> None:
    options = _parse_options()
    rows, questions, dim = encode_texts(options) if options.model else draw_synthetic(options)
    n, k = len(rows), min(options.k, len(rows))
    with tempfile.TemporaryDirectory() as work:
        folder, once = Path(work, "parts"), Path(work, "once")
        write_parts(rows, options.parts, dim, folder)
        write_parts(rows, 1, dim, once)
        cost = run_alone(build, folder, "Impact")
        seconds = {"Impact": cost.value, "Impact1": build(folder, "Impact1"), "in_one_part": build(once, "Impact")}
        equal = (folder / "Impact.postings").read_bytes() == (once / "Impact.postings").read_bytes()
        index, bag, peer = open_impact_index(folder, "Impact"), open_impact_index(folder, "Impact1"), Peer(rows, dim)
        sides: dict[str, Callable[[], Any]] = {
            "ours": lambda: index.search(questions, k),
            "peer": lambda: peer.search(questions, k),
            "ours_10_terms": lambda: index.search(questions, k, terms=10),
            "ours_one_bit": lambda: bag.search(questions, k),
            "ours_reading_all": lambda: index.search(questions, k, skip=False),
        }
        rates = measure_speeds(sides, len(questions), options.rounds)
        theirs = (peer.search(questions, k)[0] / (QUERY_UNITS * _SCALE)).astype(np.float32)
        scores, best = index.search(questions, k)
        rows_of_10_terms = index.search(questions, k, terms=10)[1]
        recall = np.mean([len({*a} & {*b}) / k for a, b in zip(best.tolist(), rows_of_10_terms.tolist(), strict=True)])
        sizes = {name: (folder / f"{name}.postings").stat().st_size for name in ("Impact", "Impact1")}
        report = {
            "benchmark": "sparse",
            "ratio": round(rates["ours"] / rates["peer"], 3),
            "questions_per_cpu_second": rates,
            "model": options.model is not None,
            "n": n,
            "vocabulary": dim,
            "questions": len(questions),
            "terms_a_question": round(float((questions[..., 1] > 0).sum(axis=1).mean()), 1),
            "terms_a_passage": round(len(rows.terms) / n, 1),
            "k": k,
            "scores_are_equal": bool(np.array_equal(np.where(best >= 0, scores, 0), theirs)),
            "recall_of_10_terms": round(float(recall), 4),
            "bytes_per_passage": round(sizes["Impact"] / n, 1),
            "bytes_per_passage_one_bit": round(sizes["Impact1"] / n, 1),
            "peer_bytes_per_passage": round(peer.size / n, 1),
            "build_cpu_seconds": {name: round(value, 2) for name, value in seconds.items()},
            "refresh": refresh(rows, folder, dim),
            "parts": options.parts,
            "merged_is_one_shot": equal,
            "peak_mb": round(cost.anonymous_mb),
            "peak_mb_all": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        }
    print(json.dumps(report))


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="folder of a masked-language model, in place of synthetic weights")
    parser.add_argument("--passages", type=Path)
    parser.add_argument("--questions", type=Path, nargs="*", default=[])
    parser.add_argument("--count", type=int, default=40_000, help="passages")
    parser.add_argument("--terms", type=int, default=128, help="maximum terms of a synthetic passage")
    parser.add_argument("--question-terms", type=int, default=32, help="maximum terms of a synthetic question")
    parser.add_argument("--max-questions", type=int, default=300)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-k", type=int, default=10)
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")
    main()
