"""Measure MUVERA, which encodes a passage's token vectors as one vector for single-vector indexes, beside exact MaxSim.

For each index over the fixed vectors the line has: how many candidates contain the passage that
MaxSim ranks first, for 95 % of the questions (the paper's recall@N of the exact nearest, arXiv
2405.19504, figure 3); that share for 100 candidates; bytes a passage; CPU seconds to build; and
milliseconds a question for 100 candidates. `Flat` compares all fixed vectors, so its loss is the
encoding's, and any further loss is an index's. `rank by one vector` is the same for MiniLM's own
vectors, searched exactly. Data and options are those of `bench_maxsim.py`. Prints one JSON line.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from token_data import TokenSample, add_options, read, search_exhaustively

from rag_model.encoders.muvera import Muvera
from rag_model.index.build import run_stages
from rag_model.index.files.engine import Rows, Vectors, faiss
from rag_model.index.kind import get_kind_for_factory
from rag_model.index.recipe import IndexRecipe, choose_search
from rag_model.index.search import open_index

SHARE = 0.95
_DEEP = 1_000  # the deepest candidate list
_FIRST = 100


def count_candidates(candidate_rows: Rows, best: Rows) -> dict[str, Any]:
    """Return how many of (q, m) candidates contain the best row, (q,), for `SHARE` of the queries; None if m do not."""
    hit = candidate_rows == best[:, None]
    ranks = np.where(hit.any(axis=1), hit.argmax(axis=1) + 1, np.inf)
    required_rank = float(np.sort(ranks)[int(np.ceil(SHARE * len(ranks))) - 1])
    return {
        "candidates": int(required_rank) if np.isfinite(required_rank) else None,
        f"found_in_{_FIRST}": round(float((ranks <= _FIRST).mean()), 3),
    }


def measure_index(factory: str, vectors: Path, question_vectors: Vectors, best: Rows, folder: Path) -> dict[str, Any]:
    """Build an index over the fixed vectors, and measure its candidates, size and speed."""
    work = folder / factory
    work.mkdir()
    n, d = np.load(vectors, mmap_mode="r").shape
    kind, start = get_kind_for_factory(factory), time.process_time()
    plan = kind.plan(IndexRecipe(factory), n, d)
    run_stages(plan, [vectors], work / "index", work)
    seconds = time.process_time() - start
    index, deep = open_index(work / "index", defaults=_widest_search(plan.factory)), min(_DEEP, n)
    rows = index.search(question_vectors, deep)[1]
    start = time.perf_counter()
    for question in question_vectors:
        index.search(question[None], min(_FIRST, n))
    return {
        **count_candidates(rows, best),
        "bytes_a_passage": round((work / "index").stat().st_size / n),
        "build_cpu_seconds": round(seconds, 1),
        "ms": round(1e3 * (time.perf_counter() - start) / len(question_vectors), 2),
    }


def _widest_search(factory: str) -> dict[str, int]:
    return {"efSearch": 2 * _FIRST} if factory.startswith("HNSW") else choose_search(factory)


def measure(data: TokenSample, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Encode the passages and questions, and measure each index."""
    token_vectors = data.concatenate()
    best = search_exhaustively(data, token_vectors)[:, 0]
    muvera = Muvera(token_vectors.vectors.shape[1], options.repetitions, options.bits, options.projected)
    start = time.process_time()
    fixed_vectors = muvera.encode_passages(token_vectors)
    seconds = time.process_time() - start
    np.save(folder / "fixed.npy", fixed_vectors)
    queries = muvera.encode_questions(data.question_tokens)
    deep = np.argsort(-(data.question_vectors @ data.dense.T), axis=1)[:, :_DEEP]
    indexes = {name: measure_index(name, folder / "fixed.npy", queries, best, folder) for name in options.indexes}
    return {
        "benchmark": "muvera",
        "token_vectors": data.encoder,
        "passages": len(token_vectors),
        "questions": len(data.texts),
        "components": muvera.encoded_dim,
        "encode_cpu_ms": round(1e3 * seconds / len(token_vectors), 2),
        "indexes": indexes,
        "rank by one vector": count_candidates(deep, best),
        "ratio": max(row[f"found_in_{_FIRST}"] for row in indexes.values()),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
    }


def main() -> None:
    """Encode or load the vectors, measure, and print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument(
        "--repetitions", type=int, default=10, help="R; 20 with 5 bits are the paper's 10,240 components"
    )
    parser.add_argument("--bits", type=int, default=4, help="k_sim")
    parser.add_argument("--projected", type=int, default=16, help="d_proj")
    parser.add_argument("--indexes", nargs="+", default=["Flat", "HNSW32", "IVF,PQ"])
    options = parser.parse_args()
    faiss.omp_set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = read(options, options.cache or Path(folder) / "cache")
        print(json.dumps(measure(data, options, Path(folder))))


if __name__ == "__main__":
    main()
