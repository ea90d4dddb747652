"""Measure an index in little memory whose candidates are ranked by vectors on disk: recall, row reads, cold latency.

For each size, bookwheel's builders build every `--index`, and the smallest nprobe with the recall
`--target` against exact search is determined. `codes` is the number of codes that a query then
compares; `max_recall` is the recall with every list searched, which only the codes limit; `at_256`
is the recall with 256 lists. A query reads `row_reads` vectors. `bytes` is the index file's size a
vector, and `bytes_at_wikipedia` the same for 21 million x 768. `cold_ms` are the milliseconds of
single queries whose vectors are not in the page cache, and of their parts `codes` and `reads`.
`plain_faiss` has indexes of as many bytes a vector, without vectors on disk: IVF-PQ with the same
lists and nprobe, and HNSW over product codes.

`fit` has, for each index, a and b of codes = a n^b at the target and of 1 - max_recall = a n^b, by
least squares over the sizes, the values of both curves for Wikipedia, and the largest relative
error of a curve. Prints one JSON line. The default takes a minute on synthetic vectors; `--vectors
FILE --queries FILE` (.npy) measures others.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from bench_index_memory import build_index, project_memory
from hnsw_builds import trial_of
from synthetic import BERT, WIKIPEDIA, Synthetic, write_parts

from rag_model.index.exact_search import rerank
from rag_model.index.files.engine import Vectors, faiss
from rag_model.index.files.vectors import open_vectors
from rag_model.index.quality.sweep import VectorQuerySet
from rag_model.index.recipe import IndexRecipe, VectorPlan, count_lists, resolve
from rag_model.index.search import open_index

PARTS = 4
MIN_LOSS = 1e-4  # replaces a loss of 0, whose logarithm is infinite
Row = dict[str, Any]


def measure(
    plan: VectorPlan, path: Path, parts: Sequence[Path], trial: VectorQuerySet, options: argparse.Namespace
) -> Row:
    """Find the nprobe of the target, and measure recall, reads and cold latency with it."""
    index = open_index(path, defaults=plan.search, vectors=parts)

    @cache
    def recall(nprobe: int) -> float:
        rows = index.search(trial.vectors, trial.k, nprobe=nprobe, refine=options.refine)[1]
        return float(trial.compute_recalls(rows).mean())

    low, high = 0, 1
    while high < index.n_lists and recall(high) < options.target:
        low, high = high, min(2 * high, index.n_lists)
    while high - low > max(1, high // 16) and recall(high) >= options.target:
        middle = (low + high) // 2
        low, high = (low, middle) if recall(middle) >= options.target else (middle, high)
    return {
        "n": plan.n,
        "index": plan.factory,
        "nprobe": high,
        "recall": round(recall(high), 4),
        "codes": round(high * plan.n / index.n_lists),
        "max_recall": round(recall(index.n_lists), 4),
        "at_256": round(recall(min(256, index.n_lists)), 4),
        "bytes": round(path.stat().st_size / plan.n, 1),
    } | measure_cold(path, parts, trial, high, options)


def measure_cold(
    path: Path, parts: Sequence[Path], trial: VectorQuerySet, nprobe: int, options: argparse.Namespace
) -> Row:
    """Time single queries, before each of which the vectors are dropped from the page cache."""
    index, times, candidates = open_index(path), list[tuple[float, float]](), options.refine * trial.k
    index.search(trial.vectors, candidates, nprobe=nprobe)  # loads the codes into memory
    for query in trial.vectors[: options.cold]:
        drop_from_page_cache(parts)
        vectors, start = open_vectors(parts), perf_counter()
        rows = index.search(query[None], candidates, nprobe=nprobe)[1]
        search_end = perf_counter()
        rerank(vectors, index.metric, query[None], rows, trial.k)
        times.append((1000 * (search_end - start), 1000 * (perf_counter() - search_end)))
        del vectors
    milliseconds = np.array(times)  # (q, 2)
    cold = {f"p{share}": float(np.percentile(milliseconds.sum(axis=1), share)) for share in (50, 99)}
    cold |= dict(zip(("codes", "reads"), np.median(milliseconds, axis=0).tolist(), strict=True))
    return {"row_reads": candidates, "cold_ms": {name: round(value, 2) for name, value in cold.items()}}


def drop_from_page_cache(files: Sequence[Path]) -> None:
    """Drop unmapped files from the page cache."""
    gc.collect()
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_peers(row: Row, vectors: Vectors, trial: VectorQuerySet) -> list[Row]:
    """Measure plain faiss at about the bytes a vector of a bookwheel index."""
    dim = vectors.shape[1]
    plan = resolve(IndexRecipe(row["index"]), len(vectors), dim)
    code_bytes = faiss.extract_index_ivf(faiss.index_factory(dim, row["index"])).code_size  # and 8 bytes for the id
    links = 8 if code_bytes > 96 else 4  # 2M links of 4 bytes at the bottom, fewer above
    widths = [pieces for pieces in range(1, dim) if dim % pieces == 0]
    codes = max(pieces for pieces in widths if pieces <= code_bytes)
    graph_codes = max([pieces for pieces in widths if pieces <= code_bytes + 8 - 9 * links - 12], default=1)
    peer_rows = []
    for factory, name, value in (
        (f"IVF{count_lists(plan)},PQ{codes}np", "nprobe", row["nprobe"]),
        (f"HNSW{links}_PQ{graph_codes}", "efSearch", 512),
    ):
        index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
        index.train(vectors[:: max(1, len(vectors) // 20_000)])
        index.add(vectors)
        faiss.ParameterSpace().set_index_parameter(index, name, value)
        start = perf_counter()
        rows = index.search(trial.vectors, trial.k)[1]
        milliseconds = 1000 * (perf_counter() - start) / len(rows)
        recall = float(trial.compute_recalls(rows).mean())
        peer_rows.append({"index": factory, name: value, "recall": round(recall, 4), "ms": round(milliseconds, 3)})
    return peer_rows


def fit(rows: Sequence[Row]) -> Row:
    """Fit codes and loss against the number of vectors, and extrapolate to Wikipedia."""
    sizes = np.log([row["n"] for row in rows])
    curves: Row = {}
    for name, values in (
        ("codes", [row["codes"] for row in rows]),
        ("loss", [max(MIN_LOSS, 1 - row["max_recall"]) for row in rows]),
    ):
        power, start = np.polyfit(sizes, np.log(values), 1) if len(rows) > 1 else (0.0, np.log(values[0]))
        error = np.abs(np.exp(start + power * sizes) / values - 1).max()
        numbers = {"a": np.exp(start), "b": power, "at_wikipedia": np.exp(start + power * np.log(WIKIPEDIA))}
        curves[name] = {key: float(f"{value:.4g}") for key, value in (numbers | {"error": error}).items()}
    return curves


def main() -> None:
    """Build and measure each index at each size; print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[3_000, 9_000, 27_000])
    parser.add_argument("--index", nargs="+", default=["IVF,RaBitQ,Refine(vectors)"], help="factory strings")
    parser.add_argument("--dim", type=int, default=384, help="dimensions of synthetic vectors")
    parser.add_argument("--vectors", type=Path, help="(n, d) .npy, instead of synthetic vectors")
    parser.add_argument("--queries", type=Path, help="(q, d) .npy, with --vectors")
    parser.add_argument("--max-questions", type=int, default=200, help="maximum number of queries")
    parser.add_argument("--k", type=int, default=20)
    parser.add_argument("--refine", type=int, default=10, help="ratio of the candidates whose vectors are read to k")
    parser.add_argument("--target", type=float, default=0.98, help="recall@k to reach")
    parser.add_argument("--cold", type=int, default=20, help="queries with a cold page cache")
    parser.add_argument("--peers", type=int, default=100_000, help="measure plain faiss up to this number of vectors")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    faiss.omp_set_num_threads(options.threads)
    rows: dict[str, list[Row]] = {factory: [] for factory in options.index}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.vectors:
            vectors, queries = (
                np.load(options.vectors, mmap_mode="r"),
                np.load(options.queries)[: options.max_questions],
            )
        else:
            vectors = np.load(Synthetic(options.dim).parts(folder, max(options.sizes), 1)[0], mmap_mode="r")
            queries = Synthetic(options.dim).questions(options.max_questions)
        for n in options.sizes:
            (part_folder := folder / f"{n}").mkdir()
            parts = write_parts(part_folder, vectors[:n].astype(np.float16), PARTS)
            trial = trial_of(parts, "ip", queries, options.k)
            for number, factory in enumerate(options.index):
                plan = resolve(IndexRecipe(factory), n, vectors.shape[1])
                path, costs = build_index(plan, parts, part_folder / f"index-{number}", options.threads)
                row = measure(plan, path, parts, trial, options) | costs
                if n <= options.peers and not number:
                    row["plain_faiss"] = measure_peers(row, vectors[:n].astype(np.float32), trial)
                print(json.dumps(row), file=sys.stderr, flush=True)
                rows[factory].append(row)
    indexes = {
        factory: {
            "bytes_at_wikipedia": round(1e9 * project_memory(factory)["index_gb"] / WIKIPEDIA, 1),
            "lists_at_wikipedia": count_lists(resolve(IndexRecipe(factory), WIKIPEDIA, BERT)),
            "fit": fit(measured_rows),
            "rows": measured_rows,
        }
        for factory, measured_rows in rows.items()
    }
    header = {"benchmark": "small_memory", "dim": vectors.shape[1], "k": options.k, "target": options.target}
    print(json.dumps(header | {"indexes": indexes}))


if __name__ == "__main__":
    main()
