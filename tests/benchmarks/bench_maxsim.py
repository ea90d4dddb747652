"""Late interaction: what codes lose at equal bytes, and what candidates lose beside MaxSim over every passage.

One JSON line. `codecs`: mean squared error of a token's vector, beside ColBERTv2's codec (`Bits2`) at equal bytes, and
nDCG@10 of MaxSim over all passages by the codes. `candidates`: nDCG@10 of `maxsim(hnsw, tokens, DEPTH)` as a share of
that of all passages, by depth and rounds of neighbours, with an interval of the difference; the share of the best ten
of all passages that are found, which says more where the first leg is the better judge; milliseconds a question.

The token vectors are MiniLM's last hidden states through a random orthonormal projection, not trained, unless
`--colbert` names the folder of a trained one: the line says which. A passage is relevant that the question names as
`paragraph`, or where there is none, that holds an answer. By default all is the demo's and little; in earnest

    python tests/benchmarks/bench_maxsim.py --passages qa_paragraphs.jsonl.xz passages.jsonl.xz --count 8000
        --questions qa_questions.jsonl.xz --asked 500 --cache FOLDER
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from passages import demo_passages, lines

from flows.demo import QUESTIONS, demo_encoder
from rag_model.corpus.token_file import TokenFile, TokenVectors, TokenWriter
from rag_model.digest import digest_json
from rag_model.encoders.encoder import Encoder
from rag_model.encoders.token_encoder import TokenEncoder
from rag_model.encoders.token_model import TokenModel
from rag_model.encoders.token_spec import TokenSpec
from rag_model.evaluation.questions.match import Answers
from rag_model.index.files.engine import Rows, Vectors, faiss
from rag_model.index.graphs.graph_file import GraphFile
from rag_model.index.recipe import IndexRecipe
from rag_model.index.registry import kind_for
from rag_model.index.search import open_index
from rag_model.index.stages import build
from rag_model.index.tokens.maxsim import maxsim
from rag_model.index.tokens.search import TokenIndexFile
from rag_model.retrieve.found import Found, SnapshotRetriever
from rag_model.retrieve.leg import Leg
from rag_model.retrieve.maxsim import Graph, MaxSimRetriever, Tokens
from rag_model.retrieve.questions import Questions
from rag_model.store.versions.manifest import Content, Manifest, PartEntry
from rag_model.store.versions.snapshot import Snapshot

CODECS = ("MaxSim,Bits2", "MaxSim,PQ64x4", "MaxSim,PQ32", "MaxSim,Bits1", "MaxSim,PQ16")
UNTRAINED = "MiniLM's hidden states through a random orthonormal projection to 128, not trained"
K = 10
_WINDOW = 512


@dataclass(frozen=True, slots=True)
class Data:
    """Passages and questions, encoded twice."""

    tokens: Path  # token vectors of the passages
    dense: Path  # one vector of each
    asked_tokens: Vectors  # (q, l, d)
    asked: Vectors  # (q, 384)
    relevant: list[set[int]]  # rows, by question
    texts: list[str]
    encoder: str


class Dense(SnapshotRetriever):
    """An HNSW index over one vector a passage."""

    def __init__(self, snapshot: Snapshot, path: Path, vectors: Vectors) -> None:
        super().__init__(snapshot, "hnsw")
        self._index, self._vectors = open_index(path, defaults={"efSearch": 256}), vectors

    def find(self, asked: Questions, k: int) -> Found:
        """Search by the vectors of the questions, whose texts are their numbers."""
        scores, rows = self._index.search(self._vectors[[int(text) for text in asked.texts]], k)
        return Found(self.name, rows, scores)


class Known:
    """An encoder whose vectors are known: the texts of questions are their numbers."""

    def __init__(self, vectors: Vectors) -> None:
        self._vectors = vectors

    def encode_questions(self, questions: Sequence[str]) -> Vectors:
        """Return the token vectors of questions by number."""
        return self._vectors[[int(text) for text in questions]]


def read(options: argparse.Namespace, cache: Path) -> Data:
    """Encode passages and questions, or find their vectors in the cache."""
    cache.mkdir(parents=True, exist_ok=True)
    rows = [row for path in options.passages for row in lines(path)]
    if not rows:
        rows = demo_passages()
        rows = rows[:: max(1, len(rows) // options.count)]
    asked = lines(options.questions or QUESTIONS)
    rows, asked = rows[: options.count], asked[:: max(1, len(asked) // options.asked)][: options.asked]
    known = dict[str, int]()
    for number, row in enumerate(rows):  # a later file may use an id again: questions are about the first
        known.setdefault(str(row.get("id")), number)
    if all("paragraph" in one for one in asked):
        asked = [one for one in asked if str(one["paragraph"]) in known]
        relevant = [{known[str(one["paragraph"])]} for one in asked]
    else:
        answers = [Answers(one["answers"]) for one in asked]
        relevant = [{n for n, row in enumerate(rows) if one.are_in(row["text"])} for one in answers]
    kept = [number for number, rel in enumerate(relevant) if rel]
    asked, relevant = [asked[number] for number in kept], [relevant[number] for number in kept]
    texts = [one["question"] for one in asked]
    key = digest_json([[row["text"] for row in rows], texts, str(options.colbert)])[-12:]
    files = [cache / f"{key}-{name}" for name in ("tokens.arrow", "dense.npy", "asked_tokens.npy", "asked.npy")]
    if not all(file.is_file() for file in files):
        _encode(rows, texts, options.colbert, files, cache)
    return Data(files[0], files[1], np.load(files[2]), np.load(files[3]), relevant, texts, options.colbert or UNTRAINED)


def _encode(
    rows: Sequence[dict[str, Any]], texts: list[str], colbert: str | None, files: list[Path], cache: Path
) -> None:
    folder = Path(colbert) if colbert else cache / "untrained"
    if not colbert:
        plain = Path(demo_encoder())
        TokenModel.begin(plain, 128, device="cpu").save(folder, plain, TokenSpec())
    many, one = TokenEncoder.load(folder, device="cpu"), Encoder.load(demo_encoder(), device="cpu")
    titles, bodies = [row["title"] for row in rows], [row["text"] for row in rows]
    with TokenWriter(files[0].with_suffix(".part"), many.dim, "float16") as writer:
        for first in range(0, len(rows), _WINDOW):
            some = slice(first, first + _WINDOW)
            writer.write(many.encode_passages(titles[some], bodies[some]))
    files[0].with_suffix(".part").rename(files[0])
    np.save(files[1], one.encode_passages(titles, bodies))
    np.save(files[2], many.encode_questions(texts))
    np.save(files[3], one.encode_questions(texts))


def ndcg(rows: Rows, relevant: Sequence[set[int]]) -> Vectors:
    """Return (q,) nDCG@10 of lists of rows, (q, >= 10), with relevance 0 or 1."""
    gains = 1 / np.log2(np.arange(2, K + 2))
    found = np.array([[row in rel for row in line[:K].tolist()] for line, rel in zip(rows, relevant, strict=True)])
    ideal = np.array([gains[: len(rel)].sum() for rel in relevant])
    return (found * gains[: found.shape[1]]).sum(axis=1) / ideal


def interval(difference: Vectors) -> list[float]:
    """Return the 95 % interval of a mean, by 2,000 resamples of the questions."""
    chosen = np.random.default_rng(0).integers(len(difference), size=(2_000, len(difference)))
    return [round(float(edge), 4) for edge in np.percentile(difference[chosen].mean(axis=1), (2.5, 97.5))]


def exhaustive(data: Data, every: TokenVectors) -> Rows:
    """Return the best rows of every question by MaxSim over all passages, (q, 10)."""
    best = []
    for question in data.asked_tokens:
        scores = maxsim(question[None], every.vectors, every.offsets)[0]
        best.append(np.lexsort((np.arange(len(scores)), -scores))[:K])
    return np.array(best)


def codecs(data: Data, every: TokenVectors, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure codecs: bytes and error of a token, nDCG@10 of all passages by the codes."""
    found: dict[str, Any] = {}
    for name in options.codecs:
        kind, n = kind_for(name), len(every)
        recipe = IndexRecipe(name, train_sample=options.sample)
        work = folder / name
        work.mkdir()
        began = time.process_time()
        facts = build(kind.plan(recipe, n, every.vectors.shape[1]), [data.tokens], work / "index", work)
        seconds = time.process_time() - began
        index = TokenIndexFile.open(work / "index")
        coded = index.decoded(np.arange(n))
        found[name] = {
            "code_bytes": index.codec.width,
            "bytes_a_passage": round((work / "index").stat().st_size / n),
            "error": round(float(np.square(coded.vectors - every.vectors).sum(axis=1).mean()), 4),
            "centroids": facts["train"][0]["centroids"],
            "build_cpu_seconds": round(seconds, 1),
        }
        if not options.errors_only:
            found[name]["ndcg"] = round(float(ndcg(exhaustive(data, coded), data.relevant).mean()), 4)
    peers = {row["code_bytes"]: row["error"] for name, row in found.items() if "Bits" in name}
    for row in found.values():
        row["error_ratio"] = round(row["error"] / peers.get(row["code_bytes"], row["error"]), 3)
    return found


def candidates(data: Data, folder: Path, codec: str, depths: Sequence[int]) -> dict[str, Any]:
    """Measure `maxsim` over the candidates of an HNSW index, beside MaxSim over all passages by the same codes."""
    work = folder / "hnsw"
    work.mkdir()
    dense = np.load(data.dense)
    build(kind_for("HNSW32").plan(IndexRecipe("HNSW32"), *dense.shape), [data.dense], work / "index", work)
    index, n = TokenIndexFile.open(folder / codec / "index"), len(dense)
    snapshot = Snapshot(Manifest(Content({}, (PartEntry("part", 1, n, n),), {})), Path, Path, "the benchmark")
    leg, graph = Dense(snapshot, work / "index", data.asked), Graph("hnsw", GraphFile.open(work / "index"))
    numbers = [str(number) for number in range(len(data.texts))]
    began = time.perf_counter()
    best = index.search(data.asked_tokens, K)[1]
    whole = ndcg(best, data.relevant)
    found: dict[str, Any] = {
        "all": {"ndcg": round(float(whole.mean()), 4), "ms": _ms(began, len(numbers)), "scored": n},
        "dense alone": {"ndcg": round(float(ndcg(leg.find(Questions(numbers), K).rows, data.relevant).mean()), 4)},
    }
    for depth in [depth for depth in depths if depth <= n]:
        for rounds in (0, 1, 2):
            first = min(depth if rounds == 0 else depth // 2, 100 if rounds else depth)
            given = Leg(leg, first), "tokens", Tokens(Known(data.asked_tokens), index)  # type: ignore[arg-type]
            retriever = MaxSimRetriever(*given, graph, depth, rounds)
            began = time.perf_counter()
            rows = np.vstack([retriever.find(Questions([number]), K).rows for number in numbers])
            ms = _ms(began, len(numbers))
            own = ndcg(rows, data.relevant)
            found[f"depth {depth}, rounds {rounds}"] = {
                "ndcg": round(float(own.mean()), 4),
                "share": round(float(own.mean() / max(whole.mean(), 1e-9)), 4),
                "difference": interval(own - whole),
                "of_the_best_10": round(
                    float(np.mean([np.isin(a, b).mean() for a, b in zip(best, rows, strict=True)])), 4
                ),
                "ms": ms,
            }
    return found


def _ms(began: float, count: int) -> float:
    return round(1e3 * (time.perf_counter() - began) / count, 2)


def main() -> None:
    """Encode or find the vectors, measure, print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=Path, nargs="+", default=[], help="JSON lines with title and text")
    parser.add_argument("--questions", type=Path, help="JSON lines with question, and paragraph or answers")
    parser.add_argument("--count", type=int, default=600, help="passages, from the first on")
    parser.add_argument("--asked", type=int, default=60, help="questions")
    parser.add_argument("--colbert", help="folder of a trained ColBERT")
    parser.add_argument("--codecs", nargs="+", default=list(CODECS[:3]))
    parser.add_argument("--sample", type=int, help="tokens that train a codec; by default by their number")
    parser.add_argument("--errors-only", action="store_true", help="no nDCG@10 of each codec: it takes longest")
    parser.add_argument("--depths", type=int, nargs="+", default=[100, 200, 500])
    parser.add_argument("--cache", type=Path, help="keeps the vectors; by default a temporary folder")
    options = parser.parse_args()
    faiss.omp_set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = read(options, options.cache or Path(folder) / "cache")
        file = TokenFile(data.tokens)
        every = TokenVectors.joined(list(file.blocks()))
        best = ndcg(exhaustive(data, every), data.relevant)
        coded = codecs(data, every, Path(folder), options)
        chosen = min(coded, key=lambda name: (coded[name]["code_bytes"] != 32, coded[name]["error"]))
        told = {
            "benchmark": "maxsim",
            "token_vectors": data.encoder,
            "passages": file.n,
            "questions": len(data.texts),
            "tokens_a_passage": round(file.tokens / file.n, 1),
            "bytes_a_passage_float16": round(2 * file.dim * file.tokens / file.n),
            "ndcg_uncompressed": round(float(best.mean()), 4),
            "codecs": coded,
            "searched": chosen,
            "candidates": candidates(data, Path(folder), chosen, options.depths),
            "ratio": round(1 / coded[chosen]["error_ratio"], 2),
            "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
        }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
