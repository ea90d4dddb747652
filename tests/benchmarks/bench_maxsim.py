"""Measure late interaction: the loss by codes at equal bytes, and by candidates beside MaxSim over every passage.

`codecs` has the mean squared error of a token's vector, beside ColBERTv2's codec (`Bits2`) at equal
bytes, and the nDCG@10 of MaxSim over the codes of all passages. `candidates` has the nDCG@10 of
`maxsim(hnsw, tokens, DEPTH)` as a share of that over all passages, by depth and rounds of
neighbours, with an interval of the difference; the share of the best ten of all passages among the
hits, which is more telling where the first leg ranks better; and milliseconds a question. `pooled`
has the share of the vectors that token pooling leaves, and the nDCG@10 of MaxSim over all passages
with them.

The token vectors are MiniLM's last hidden states through an untrained random orthonormal
projection, unless `--colbert` names the folder of a trained model, or `--store` a store whose
snapshot has them; the line names the source. A passage is relevant if the question names it as
`paragraph` or among `passages`, or, where neither is named, if it holds an answer. Prints one JSON
line. By default all data is a small part of the demo's; the full measurement is

    python tests/benchmarks/bench_maxsim.py --passages qa_paragraphs.jsonl.xz passages.jsonl.xz --count 8000
        --questions qa_questions.jsonl.xz --max-questions 500 --cache FOLDER
"""

import argparse
import itertools
import json
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from token_data import K, TokenSample, add_options, compute_ndcg, estimate_interval, read, search_exhaustively

from rag_model.corpus.ragged_file import TokenVectors, compute_offsets
from rag_model.encoders.token_encoder import pool_tokens
from rag_model.index.build import run_stages
from rag_model.index.files.engine import Rows, Vectors, faiss
from rag_model.index.graphs.graph_file import GraphFile
from rag_model.index.kind import get_kind_for_factory
from rag_model.index.recipe import IndexRecipe
from rag_model.index.search import open_index
from rag_model.index.tokens.search import TokenIndexFile
from rag_model.retrieve.rerank import MaxSimRetriever
from rag_model.retrieve.retriever import ChildRetriever, Queries, RankedRows, SnapshotRetriever
from rag_model.store.versions.manifest import Content, Manifest, PartEntry
from rag_model.store.versions.snapshot import Snapshot

CODECS = ("MaxSim,Bits2", "MaxSim,PQ64x4", "MaxSim,PQ32", "MaxSim,Bits1", "MaxSim,PQ16")


class Dense(SnapshotRetriever):
    """Retrieves from an HNSW index over one vector a passage."""

    def __init__(self, snapshot: Snapshot, path: Path, vectors: Vectors) -> None:
        super().__init__(snapshot, "hnsw")
        self._index, self._vectors = open_index(path, defaults={"efSearch": 256}), vectors

    def find(self, queries: Queries, k: int) -> RankedRows:
        """Search by the vectors of the queries, whose texts are row numbers."""
        scores, rows = self._index.search(self._vectors[[int(text) for text in queries.texts]], k)
        return RankedRows(self.name, rows, scores)


class KnownQueryScorer:
    """An index of token vectors with precomputed query vectors; the texts of the queries are row numbers."""

    name = "tokens"

    def __init__(self, vectors: Vectors, index: TokenIndexFile) -> None:
        self._vectors, self._index = vectors, index

    def encode(self, queries: Queries) -> Vectors:
        """Return the token vectors of the queries by their numbers."""
        return self._vectors[[int(text) for text in queries.texts]]

    def score(self, query: Vectors, rows: Rows) -> Vectors:
        """Score the rows of the index for a query."""
        return self._index.score(query, rows)


class Links:
    """The links of a graph file."""

    name = "hnsw"

    def __init__(self, graph: GraphFile) -> None:
        self._graph = graph

    def read_links(self, nodes: Rows) -> np.ndarray:
        """Return the neighbours of the nodes in the bottom layer."""
        return self._graph.read_links(nodes)


def measure_codecs(
    data: TokenSample, token_vectors: TokenVectors, folder: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure each codec: bytes and error of a token, and the nDCG@10 of MaxSim over all passages' codes."""
    results: dict[str, Any] = {}
    for name in options.codecs:
        kind, n = get_kind_for_factory(name), len(token_vectors)
        recipe = IndexRecipe(name, train_sample=options.sample)
        work = folder / name
        work.mkdir()
        start = time.process_time()
        facts = run_stages(kind.plan(recipe, n, token_vectors.vectors.shape[1]), data.tokens, work / "index", work)
        seconds = time.process_time() - start
        index = TokenIndexFile.open(work / "index")
        decoded = index.decode(np.arange(n))
        results[name] = {
            "code_bytes": index.codec.width,
            "bytes_a_passage": round((work / "index").stat().st_size / n),
            "error": round(float(np.square(decoded.vectors - token_vectors.vectors).sum(axis=1).mean()), 4),
            "centroids": facts["train"][0]["centroids"],
            "build_cpu_seconds": round(seconds, 1),
        }
        if not options.errors_only:
            results[name]["ndcg"] = round(
                float(compute_ndcg(search_exhaustively(data, decoded), data.relevant).mean()), 4
            )
    peers = {row["code_bytes"]: row["error"] for name, row in results.items() if "Bits" in name}
    for row in results.values():
        row["error_ratio"] = round(row["error"] / peers.get(row["code_bytes"], row["error"]), 3)
    return results


def measure_pooling(data: TokenSample, token_vectors: TokenVectors, factor: int, exact_ndcg: Vectors) -> dict[str, Any]:
    """Measure the loss of nDCG@10 against `exact_ndcg`, a value a query, when tokens are pooled by `factor`."""
    start = time.process_time()
    ends = token_vectors.offsets.tolist()
    pooled = [pool_tokens(token_vectors.vectors[first:last], factor) for first, last in itertools.pairwise(ends)]
    seconds = time.process_time() - start
    tokens = TokenVectors(np.concatenate(pooled), compute_offsets(np.array([len(vectors) for vectors in pooled])))
    pooled_ndcg = compute_ndcg(search_exhaustively(data, tokens), data.relevant)
    return {
        "vectors": round(len(tokens.vectors) / len(token_vectors.vectors), 3),
        "ndcg": round(float(pooled_ndcg.mean()), 4),
        "share": round(float(pooled_ndcg.mean() / max(exact_ndcg.mean(), 1e-9)), 4),
        "difference": estimate_interval(pooled_ndcg - exact_ndcg),
        "cpu_ms_a_passage": round(1e3 * seconds / len(token_vectors), 2),
    }


def measure_candidates(data: TokenSample, folder: Path, codec: str, depths: Sequence[int]) -> dict[str, Any]:
    """Measure `maxsim` over the candidates of an HNSW index beside MaxSim over the codes of all passages."""
    work = folder / "hnsw"
    work.mkdir()
    np.save(work / "dense.npy", data.dense)
    plan = get_kind_for_factory("HNSW32").plan(IndexRecipe("HNSW32"), *data.dense.shape)
    run_stages(plan, [work / "dense.npy"], work / "index", work)
    index, n = TokenIndexFile.open(folder / codec / "index"), len(data.dense)
    snapshot = Snapshot(Manifest(Content({}, (PartEntry("part", 1, n, n),), {})), Path, Path, "the benchmark")
    leg, graph = Dense(snapshot, work / "index", data.question_vectors), Links(GraphFile.open(work / "index"))
    numbers = [str(number) for number in range(len(data.texts))]
    start = time.perf_counter()
    best = index.search(data.question_tokens, K)[1]
    exact_ndcg = compute_ndcg(best, data.relevant)
    results: dict[str, Any] = {
        "all": {"ndcg": round(float(exact_ndcg.mean()), 4), "ms": _elapsed_ms(start, len(numbers)), "scored": n},
        "dense alone": {
            "ndcg": round(float(compute_ndcg(leg.find(Queries(numbers), K).rows, data.relevant).mean()), 4)
        },
    }
    for depth in [depth for depth in depths if depth <= n]:
        for rounds in (0, 1, 2):
            first = min(depth if rounds == 0 else depth // 2, 100 if rounds else depth)
            scorers = ChildRetriever(leg, first), KnownQueryScorer(data.question_tokens, index)
            retriever = MaxSimRetriever("maxsim", *scorers, graph, depth, rounds)
            start = time.perf_counter()
            rows = np.vstack([retriever.find(Queries([number]), K).rows for number in numbers])
            ms = _elapsed_ms(start, len(numbers))
            candidate_ndcg = compute_ndcg(rows, data.relevant)
            results[f"depth {depth}, rounds {rounds}"] = {
                "ndcg": round(float(candidate_ndcg.mean()), 4),
                "share": round(float(candidate_ndcg.mean() / max(exact_ndcg.mean(), 1e-9)), 4),
                "difference": estimate_interval(candidate_ndcg - exact_ndcg),
                "of_the_best_10": round(
                    float(np.mean([np.isin(a, b).mean() for a, b in zip(best, rows, strict=True)])), 4
                ),
                "ms": ms,
            }
    return results


def _elapsed_ms(began: float, count: int) -> float:
    return round(1e3 * (time.perf_counter() - began) / count, 2)


def main() -> None:
    """Encode or load the vectors, measure, and print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--codecs", nargs="+", default=list(CODECS[:3]))
    parser.add_argument("--sample", type=int, help="tokens that train a codec; default: depends on their number")
    parser.add_argument("--errors-only", action="store_true", help="skip the slow nDCG@10 of each codec")
    parser.add_argument("--pool", type=int, nargs="*", default=[2], help="tokens that are pooled into one vector")
    parser.add_argument("--depths", type=int, nargs="+", default=[100, 200, 500])
    options = parser.parse_args()
    faiss.omp_set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = read(options, options.cache or Path(folder) / "cache")
        token_vectors = data.concatenate()
        best = compute_ndcg(search_exhaustively(data, token_vectors), data.relevant)
        codecs = measure_codecs(data, token_vectors, Path(folder), options)
        best_codec = min(codecs, key=lambda name: (codecs[name]["code_bytes"] != 32, codecs[name]["error"]))
        report = {
            "benchmark": "maxsim",
            "token_vectors": data.encoder,
            "passages": len(token_vectors),
            "questions": len(data.texts),
            "tokens_a_passage": round(len(token_vectors.vectors) / len(token_vectors), 1),
            "bytes_a_passage_float16": round(2 * token_vectors.vectors.size / len(token_vectors)),
            "ndcg_uncompressed": round(float(best.mean()), 4),
            "codecs": codecs,
            "pooled": {factor: measure_pooling(data, token_vectors, factor, best) for factor in options.pool},
            "searched": best_codec,
            "candidates": measure_candidates(data, Path(folder), best_codec, options.depths),
            "ratio": round(1 / codecs[best_codec]["error_ratio"], 2),
            "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
