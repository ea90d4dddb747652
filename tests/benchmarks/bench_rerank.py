"""Measure reranking on a CPU beside sentence-transformers' CrossEncoder at its defaults: same weights, pairs, threads.

Prints one JSON line of speed: our pairs/s with torch in float32 (`ratio`, of CPU seconds), with
onnxruntime from a float32 graph of the same weights, and from the given graph if the model is a
quantised one. Each side runs in its own process, and they take turns; figures are medians of
rounds. With `--paragraphs` and `--questions` (JSON lines: `id`, `title`, `text`; `question`,
`answers`, `paragraph`) a second line has the effect of `rerank(exact, MODEL, 50)` on Success@5,
with paired intervals. Without `--model` it is MiniLM-L6 with a random head, which is as fast as a
trained one. `python tests/benchmarks/bench_rerank.py [--model DIR] [--pairs 200] [--threads 2]`.
"""

import argparse
import json
import lzma
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from onnx_models import as_graph, as_safetensors, with_new_head
from passages import draw_sample

from flows.demo import demo_encoder
from rag_model.encoders.cross_encoder import CrossEncoder
from rag_model.encoders.encoder import Encoder
from rag_model.evaluation.bootstrap import Estimate, estimate_difference, estimate_mean
from rag_model.evaluation.matching import AnswerMatcher

WARM_UP = 32  # pairs, before the first round
SHOWN = 5  # passages that are measured after reranking
Scores = npt.NDArray[np.float32]
Pairs = tuple[list[str], list[str], list[str]]  # questions, titles, texts
Score = Callable[[Pairs], Scores]
Load = Callable[[str, int], Score]


@dataclass(slots=True)
class ScorerProcess:
    """One model, in its own process."""

    pipe: Connection
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    peak: int = 0  # MB

    @classmethod
    def start(cls, load: Load, folder: Path, threads: int) -> "ScorerProcess":
        context = multiprocessing.get_context("spawn")
        pipe, end = context.Pipe()
        context.Process(target=serve, args=(end, load, str(folder), threads), daemon=True).start()
        return cls(pipe)

    def score(self, pairs: Pairs, *, timed: bool = True) -> Scores:
        self.pipe.send(pairs)
        seconds, cpu, scores, self.peak = self.pipe.recv()
        if timed:
            self.seconds.append(seconds)
            self.cpu_seconds.append(cpu)
        return scores


def load_ours(folder: str, threads: int) -> Score:
    torch.set_num_threads(threads)
    encoder = CrossEncoder.load(Path(folder), device="cpu")
    return lambda pairs: encoder.scores(*pairs)


def load_peer(folder: str, threads: int) -> Score:
    torch.set_num_threads(threads)
    encoder = import_module("sentence_transformers").CrossEncoder(folder, device="cpu")  # imported in its process
    logit = torch.nn.Identity()

    def score(pairs: Pairs) -> Scores:
        text_pairs = [(question, f"{title} {text}".strip()) for question, title, text in zip(*pairs, strict=True)]
        scores: Scores = encoder.predict(text_pairs, activation_fn=logit)
        return scores

    return score


def serve(pipe: Connection, load: Load, folder: str, threads: int) -> None:
    """Score the pairs from the pipe; send back wall and CPU seconds, scores and this process's peak memory."""
    score = load(folder, threads)
    while (pairs := pipe.recv()) is not None:
        start, cpu_start = time.perf_counter(), time.process_time()
        scores = score(pairs)
        elapsed = time.perf_counter() - start, time.process_time() - cpu_start
        pipe.send((*elapsed, scores, read_peak_mb()))


def read_peak_mb() -> int:
    """Return this process's peak memory; `getrusage` returns the parent's peak if that was larger."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) >> 10


def compare_speed(contenders: dict[str, ScorerProcess], pairs: Pairs, rounds: int) -> dict[str, Any]:
    warm = tuple(pair[:WARM_UP] for pair in pairs)
    for contender in contenders.values():
        contender.score(warm, timed=False)  # type: ignore[arg-type]
    for _ in range(rounds):
        scores = {name: contender.score(pairs) for name, contender in contenders.items()}
    for contender in contenders.values():
        contender.pipe.send(None)
    cpu = {name: statistics.median(contender.cpu_seconds) for name, contender in contenders.items()}
    wall = {name: statistics.median(contender.seconds) for name, contender in contenders.items()}
    count = len(pairs[0])
    return {
        "pairs": count,
        "mean_words": round(statistics.mean(len(text.split()) for text in pairs[2]), 1),
        "words": np.percentile([len(text.split()) for text in pairs[2]], [0, 50, 100]).tolist(),
        "ratio": round(cpu["peer"] / cpu["torch"], 2),
        "ratio_onnx": round(cpu["peer"] / cpu["onnx"], 2),
        "ratio_wall": round(wall["peer"] / wall["torch"], 2),
        "pairs_per_cpu_s": {name: round(count / seconds, 1) for name, seconds in cpu.items()},
        "pairs_per_s": {name: round(count / seconds, 1) for name, seconds in wall.items()},
        "peak_mb": {name: contender.peak for name, contender in contenders.items()},
        "largest_difference": {name: float(np.abs(scores[name] - scores["peer"]).max()) for name in contenders},
        "cpu_seconds": {name: [round(s, 2) for s in contender.cpu_seconds] for name, contender in contenders.items()},
        "seconds": {name: [round(s, 2) for s in contender.seconds] for name, contender in contenders.items()},
    }


def compare_hits(model: Path, paragraphs: Path, questions: Path, count: int, depth: int) -> dict[str, Any]:
    """Compare the first 5 hits of an exact dense search with the first 5 after its `depth` hits are reranked."""
    corpus = _read(paragraphs)
    sample = [_read(questions)[row] for row in np.random.default_rng(0).permutation(len(_read(questions)))[:count]]
    encoder = Encoder.load(demo_encoder(), device="cpu")
    vectors = encoder.encode_passages([p["title"] for p in corpus], [p["text"] for p in corpus])
    scores = encoder.encode_questions([question["question"] for question in sample]) @ vectors.T  # (q, n)
    ranked_rows = np.argsort(-scores, axis=1, kind="stable")[:, :depth]
    flat = [corpus[row] for row in ranked_rows.ravel().tolist()]
    start = time.perf_counter()
    pair_scores = CrossEncoder.load(model, device="cpu").scores(
        [question["question"] for question in sample for _ in range(depth)],
        [paragraph["title"] for paragraph in flat],
        [paragraph["text"] for paragraph in flat],
    )
    seconds = time.perf_counter() - start
    order = np.argsort(-pair_scores.reshape(ranked_rows.shape), axis=1, kind="stable")
    reranked_rows = np.take_along_axis(ranked_rows, order, 1)
    report: dict[str, Any] = {"benchmark": "rerank_quality", "questions": len(sample), "passages": len(corpus)}
    report |= {"depth": depth, "ms_a_question": round(1000 * seconds / len(sample), 1)}
    for name, holds in (("Success@5", _has_answer), ("gold@5", _is_gold), ("gold@1", _is_gold)):
        k = 1 if name == "gold@1" else SHOWN
        input_hits, reranked_hits = (
            [_holds(holds, question, rows, corpus, k) for question, rows in zip(sample, rows_of_questions, strict=True)]
            for rows_of_questions in (ranked_rows, reranked_rows)
        )
        report[name] = {
            "input": _round_interval(estimate_mean(input_hits)),
            "reranked": _round_interval(estimate_mean(reranked_hits)),
            "difference": _round_interval(estimate_difference(reranked_hits, input_hits)),
        }
    return report


def _has_answer(question: dict[str, Any], passage: dict[str, Any]) -> bool:
    return AnswerMatcher(tuple(question["answers"])).match(passage["text"])


def _is_gold(question: dict[str, Any], passage: dict[str, Any]) -> bool:
    return bool(question["paragraph"] == passage["id"])


def _holds(
    holds: Callable[[dict[str, Any], dict[str, Any]], bool],
    question: dict[str, Any],
    rows: npt.NDArray[np.int64],
    corpus: Sequence[dict[str, Any]],
    k: int,
) -> float:
    return float(any(holds(question, corpus[row]) for row in rows[:k].tolist()))


def _round_interval(estimate: Estimate) -> list[float]:
    return [round(estimate.value, 4), round(estimate.low, 4), round(estimate.high, 4)]


def _read(path: Path) -> list[dict[str, Any]]:
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as lines:
        return [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a cross-encoder's folder, safetensors or a quantised ONNX graph")
    parser.add_argument("--passages", type=Path, help="JSON lines with title and text; by default the demo's")
    parser.add_argument("--questions", type=Path, help="JSON lines with question; by default the demo's")
    parser.add_argument("--paragraphs", type=Path, help="JSON lines with id, title and text, to rerank")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-questions", type=int, default=200, help="questions whose passages are reranked")
    parser.add_argument("--depth", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as workdir:
        model_folder, work = options.model, Path(workdir)
        is_quantised = model_folder is not None and not (model_folder / "model.safetensors").is_file()
        folder = as_safetensors(model_folder, work / "floats") if is_quantised else model_folder
        folder = folder or with_new_head(Path(demo_encoder()), work / "drawn")
        models: dict[str, tuple[Load, Path]] = {"torch": (load_ours, folder), "peer": (load_peer, folder)}
        if is_quantised:
            models["onnx_as_given"] = (load_ours, model_folder)
        os.environ["OMP_NUM_THREADS"] = str(options.threads)  # for the processes that it starts
        if options.rounds:
            rows, texts = draw_sample(
                options.passages, [options.questions] if options.questions else [], options.pairs, 10**9
            )
            questions = [texts[number % len(texts)] for number in range(len(rows))]
            pairs = questions, [row["title"] for row in rows], [row["text"] for row in rows]
            models["onnx"] = (load_ours, as_graph(folder, work / "graph"))
            contenders = {name: ScorerProcess.start(*model, options.threads) for name, model in models.items()}
            head = {"benchmark": "rerank", "model": model_folder.name if model_folder else "minilm-l6, drawn head"}
            print(json.dumps({**head, "threads": options.threads, **compare_speed(contenders, pairs, options.rounds)}))
        if options.paragraphs and options.questions:
            best = models.get("onnx_as_given", models["torch"])[1]
            print(
                json.dumps(
                    compare_hits(best, options.paragraphs, options.questions, options.max_questions, options.depth)
                )
            )


if __name__ == "__main__":
    main()
