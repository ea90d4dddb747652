"""Measure a static encoder beside the packages that write such folders, and beside MiniLM: its speed and its loss.

Passages a CPU second of one core, each side in its own process, from text to vectors: ours from a
cold start (no word is cached yet), sentence-transformers' `encode` of the same folder, model2vec's
where it is installed, and MiniLM with bookwheel; `ratio` is ours over the faster of the two
packages. `of_the_second_half` is the rate after the words of the first half have been cached. Then
Success@20 and nDCG@10 (of the gold paragraph) of exact search with either encoder, alone, fused
with BM25, and with `--reranker FOLDER` both reranked, as paired differences with intervals.

`--model FOLDER` is a trained static encoder; by default one is distilled from MiniLM, with less
recall. `--passages` and `--questions` are JSON lines, plain or .xz (`title`, `text`; `question`,
`answers`, and `paragraph`, the id of the gold one); `--paragraphs` has the gold ones (also `id`).
By default all are the demo's, which names no gold ones. `--rounds 0` leaves out the speed, `--max-questions
0` the quality. Prints one JSON line.
`python tests/benchmarks/bench_static.py` takes about a minute.
"""

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from isolated_run import run_alone
from passages import demo_passages, read_json_lines
from static_distillation import write_static_encoder

from flows.demo import QUESTIONS, demo_encoder
from rag_model.corpus.passages import PassageWriter
from rag_model.encoders.cross_encoder import CrossEncoder
from rag_model.encoders.encoder import Encoder
from rag_model.evaluation.bootstrap import Estimate, estimate_difference, estimate_mean
from rag_model.evaluation.matching import AnswerMatcher
from rag_model.index.build import run_stages
from rag_model.index.kind import IndexFiles
from rag_model.index.postings.kind import KIND as BM25
from rag_model.index.recipe import IndexRecipe
from rag_model.retrieve.fusion import fuse
from rag_model.training.data.examples import build_passage

DEPTH = 100  # passages of each list that are fused
K = 60  # the constant of reciprocal rank fusion
WARM_UP = 8  # texts of the warm-up
Encode = Callable[[list[str], list[str]], Any]
Rows = Any  # (q, k) rows, the best first


def load_ours(folder: str) -> Encode:
    return Encoder.load(folder, device="cpu", threads=1).encode_passages


def load_sentence_transformers(folder: str) -> Encode:
    encoder = import_module("sentence_transformers").SentenceTransformer(folder, device="cpu")
    return lambda titles, texts: encoder.encode(join_texts(titles, texts), batch_size=1024)


def load_model2vec(folder: str) -> Encode:
    encoder = import_module("model2vec").StaticModel.from_pretrained(folder)
    return lambda titles, texts: encoder.encode(join_texts(titles, texts), use_multiprocessing=False)


def join_texts(titles: Sequence[str], texts: Sequence[str]) -> list[str]:
    return [f"{title} {text}".strip() for title, text in zip(titles, texts, strict=True)]


def time_encoding(
    load: Callable[[str], Encode], folder: str, titles: list[str], texts: list[str]
) -> tuple[list[float], Any]:
    """Encode both halves of the texts in this process; return the CPU seconds of each, and a sample of the vectors."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    encode = load(folder)
    encode(titles[-WARM_UP:], texts[-WARM_UP:])
    half, seconds, vectors = len(texts) // 2, [], []
    for half_slice in (slice(half), slice(half, None)):
        start = time.process_time()
        vectors.append(np.asarray(encode(titles[half_slice], texts[half_slice])))
        seconds.append(time.process_time() - start)
    return seconds, np.concatenate(vectors)[:: max(1, len(texts) // 500)]


def measure_speed(static: str, minilm: str, rows: Sequence[dict[str, Any]], slow: int, rounds: int) -> dict[str, Any]:
    titles, texts = [row["title"] or "" for row in rows], [row["text"] for row in rows]
    n = len(rows)
    contenders = {"ours": (load_ours, static, n), "sentence_transformers": (load_sentence_transformers, static, n)}
    if find_spec("model2vec"):
        contenders["model2vec"] = (load_model2vec, static, n)
    contenders["minilm"] = (load_ours, minilm, slow)
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    vectors, peaks, later = dict[str, Any](), dict[str, int](), dict[str, float]()
    for _ in range(rounds):
        for name, (load, folder, passage_count) in contenders.items():
            cost = run_alone(time_encoding, load, folder, titles[:passage_count], texts[:passage_count])
            rates[name].append(min(n, passage_count) / sum(cost.value[0]))
            later[name] = max(later.get(name, 0.0), min(n, passage_count) / 2 / cost.value[0][1])
            vectors[name], peaks[name] = cost.value[1], round(cost.anonymous_mb)
    best = {name: max(round_rates) for name, round_rates in rates.items()}
    peers = [name for name in ("sentence_transformers", "model2vec") if name in best]
    return {
        "passages": len(rows),
        "mean_words": round(float(np.mean([len(text.split()) for text in texts])), 1),
        "ratio": round(best["ours"] / max(best[name] for name in peers), 2),
        "passages_a_core_second": {name: round(rate, 1) for name, rate in best.items()},
        "of_the_second_half": {name: round(rate, 1) for name, rate in later.items()},
        "every_round": {name: [round(rate) for rate in round_rates] for name, round_rates in rates.items()},
        "peak_mb": peaks,
        "least_cosine": {name: round(float(cosines(vectors["ours"], vectors[name]).min()), 6) for name in peers},
        "hours_of_wikipedia": {
            name: round(21_015_324 / rate / 3600, 2) for name, rate in best.items() if name in ("ours", "minilm")
        },
    }


def cosines(first: Any, second: Any) -> Any:
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return ((first * second).sum(axis=1) + (lengths == 0)) / np.where(lengths == 0, 1, lengths)


def search_bm25(corpus: Sequence[dict[str, Any]], questions: list[str], k: int) -> Rows:
    with tempfile.TemporaryDirectory() as base:
        rows, out = Path(base, "rows.parquet"), Path(base, "bm25.postings")
        with PassageWriter(rows) as writer:
            for passage in corpus:
                writer.write(build_passage(passage["title"] or "", passage["text"]))
        plan = BM25.plan(IndexRecipe("BM25", over="text"), len(corpus), 0)
        run_stages(plan, [rows], out, Path(base))
        return BM25.open(IndexFiles(out, lambda: [rows], len(corpus)), plan.entry()).search(questions, k)[1]


def search_exact(folder: str, corpus: Sequence[dict[str, Any]], questions: list[str], k: int) -> Rows:
    encoder = Encoder.load(folder, device="cpu")
    vectors = encoder.encode_passages([p["title"] or "" for p in corpus], [p["text"] for p in corpus])
    return np.argsort(-(encoder.encode_questions(questions) @ vectors.T), axis=1, kind="stable")[:, :k]


class Reranker:
    """A cross-encoder with a cache of the scores of pairs."""

    def __init__(self, folder: Path, corpus: Sequence[dict[str, Any]], questions: list[str]) -> None:
        self._model, self._corpus, self._questions = CrossEncoder.load(folder, device="cpu"), corpus, questions
        self._known: dict[tuple[int, int], float] = {}

    def __call__(self, ranked: Rows, n_questions: int, depth: int) -> Rows:
        """Rank the first `depth` rows of each of the first `n_questions` questions by their scores."""
        pairs = [(q, int(row)) for q in range(n_questions) for row in ranked[q][:depth] if row >= 0]
        unread_pairs = [pair for pair in pairs if pair not in self._known]
        passages = [self._corpus[row] for _, row in unread_pairs]
        titles, texts = [passage["title"] or "" for passage in passages], [passage["text"] for passage in passages]
        scores = self._model.scores([self._questions[q] for q, _ in unread_pairs], titles, texts)
        self._known.update(zip(unread_pairs, scores.tolist(), strict=True))
        return [
            sorted((int(row) for row in ranked[q][:depth] if row >= 0), key=lambda row, q=q: -self._known[q, row])
            for q in range(n_questions)
        ]


class Judge:
    """Computes the Success@20 of each question, and its nDCG@10 where gold paragraphs are named."""

    def __init__(self, corpus: Sequence[dict[str, Any]], question_rows: Sequence[dict[str, Any]]) -> None:
        self._texts = [passage["text"] for passage in corpus]
        self._answers = [AnswerMatcher(question["answers"]) for question in question_rows]
        row_by_id = {passage["id"]: row for row, passage in enumerate(corpus) if "id" in passage}
        self._gold = [row_by_id.get(question.get("paragraph")) for question in question_rows]

    def compute_measures(self, ranked: Rows) -> dict[str, list[float]]:
        measures = {
            "Success@20": [
                float(any(gold.match(self._texts[row]) for row in question_rows[:20] if row >= 0))
                for gold, question_rows in zip(self._answers, ranked, strict=False)
            ]
        }
        if all(gold is not None for gold in self._gold):
            measures["nDCG@10"] = [
                sum(1 / math.log2(2 + rank) for rank, row in enumerate(question_rows[:10]) if row == gold)
                for gold, question_rows in zip(self._gold, ranked, strict=False)
            ]
        return measures


def measure_quality(
    static: str, minilm: str, corpus: Sequence[dict[str, Any]], question_rows: Sequence[dict[str, Any]], options: Any
) -> dict[str, Any]:
    questions = [question["question"] for question in question_rows]
    lexical = search_bm25(corpus, questions, DEPTH)
    lists: dict[str, dict[str, Rows]] = {"bm25": {"bm25": lexical}}
    for name, folder in (("static", static), ("minilm", minilm)):
        dense = search_exact(folder, corpus, questions, DEPTH)
        lists[name] = {"alone": dense, "rrf_bm25": fuse([dense, lexical], K, [1.0, 1.0])[0]}
    if options.reranker:
        reranker = Reranker(options.reranker, corpus, questions)
        for name in ("static", "minilm"):
            for way in ("alone", "rrf_bm25"):
                lists[name][f"rerank({way})"] = reranker(lists[name][way], options.reranked, options.depth)
    judge = Judge(corpus, question_rows)
    measures = {name: {way: judge.compute_measures(rows) for way, rows in ways.items()} for name, ways in lists.items()}
    estimates = {
        name: {
            way: {m: to_percent(estimate_mean(scores)) for m, scores in values.items()} for way, values in ways.items()
        }
        for name, ways in measures.items()
    }
    differences = {
        way: {m: to_percent(estimate_difference(scores, measures["minilm"][way][m])) for m, scores in values.items()}
        for way, values in measures["static"].items()
    }
    return {
        "library": len(corpus),
        "questions": len(question_rows),
        "reranked": options.reranked if options.reranker else 0,
        **estimates,
        "static_less_minilm": differences,
    }


def to_percent(estimate: Estimate) -> list[float]:
    return [round(100 * value, 1) for value in (estimate.value, estimate.low, estimate.high)]


def sample_rows(rows: list[Any], count: int) -> list[Any]:
    order = np.random.default_rng(0).permutation(len(rows))[:count]
    return [rows[row] for row in np.sort(order)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "minilm", "passages", "paragraphs", "questions", "reranker"):
        parser.add_argument(f"--{name}", type=Path)
    for name, default in {"count": 2000, "library": 1000, "max-questions": 300, "slow": 200, "reranked": 50}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--depth", type=int, default=50, help="passages of a question that are reranked")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    minilm = str(options.minilm or demo_encoder())
    rows = read_json_lines(options.passages) if options.passages else demo_passages()
    question_rows = sample_rows(read_json_lines(options.questions or Path(QUESTIONS)), options.max_questions)
    corpus = [*(read_json_lines(options.paragraphs) if options.paragraphs else []), *sample_rows(rows, options.library)]
    with tempfile.TemporaryDirectory() as work:
        static = str(options.model or write_static_encoder(Encoder.load(minilm, device="cpu"), Path(work, "static")))
        report = {"benchmark": "static", "model": options.model.name if options.model else "distilled from MiniLM"}
        report["dim"] = Encoder.load(static).dim
        if options.rounds:
            report |= {
                "speed": measure_speed(static, minilm, sample_rows(rows, options.count), options.slow, options.rounds)
            }
        if question_rows:
            report |= {"quality": measure_quality(static, minilm, corpus, question_rows, options)}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
