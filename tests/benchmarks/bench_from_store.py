"""Compare search of a remote store by verified ranges with a whole pull of the same snapshot.

The store answers each request after `--ms` milliseconds (`far_store.py`), with any bandwidth.
Passages are made of real sentences, in parts of 50,000; vectors are random points near centres, so
that lists are as uneven as real ones. The questions are real. For each cold question the snapshot
is opened again, with an empty cache.

One JSON line: for `bm25` and `ivfpq` the median and largest seconds to open and to answer a cold
question, sequential rounds of requests, and bytes; the milliseconds of a warm question, of one on a
pulled folder with memory-mapped copies, and their ratio; whether all hits and scores are those of
the pulled files; seconds and bytes of a pull without such copies; peak memory; sizes.
`python tests/benchmarks/bench_from_store.py [--passages 40000] [--ms 20] [--k 5] [--texts FILE]
[--questions FILE]`, where files are JSON lines with `title` and `text`, or `question`; two minutes
by default.
"""

import argparse
import json
import mmap
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from far_store import Far, latency
from passages import demo_passages, read_json_lines

from flows.demo import QUESTIONS
from rag_model.corpus.passages import PassageWriter
from rag_model.corpus.records import Passage
from rag_model.index.build import run_stages
from rag_model.index.postings.kind import KIND
from rag_model.index.recipe import IndexRecipe, resolve
from rag_model.retrieve.dense import DenseRetriever
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.hits import Hit
from rag_model.snapshots.range_digests import add_range_digests, list_range_tasks
from rag_model.store.pulling.pull import pull
from rag_model.store.recorded_tasks import compute_once
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest, PartEntry, select_files
from rag_model.store.versions.moves import tag
from rag_model.store.versions.snapshot import Snapshot

PART, WARM_PASSES = 50_000, 4
Vectors = npt.NDArray[np.float32]


def publish(store: Store, folder: Path, sources: Sequence[dict[str, Any]], count: int, dim: int) -> None:
    """Publish a snapshot of generated passages with BM25 and refined inverted lists."""
    rng, points = random.Random(1), np.random.default_rng(1)
    sentences = [sentence for row in sources for sentence in row["text"].split(". ") if sentence]
    centres = points.normal(size=(max(64, count // 500), dim)).astype(np.float32)
    files, parts, texts, rows = {}, [], [], []
    for first in range(0, count, PART):
        name, size = f"part-{len(parts):05d}", min(PART, count - first)
        with PassageWriter(folder / f"{name}.parquet") as writer:
            for row in range(first, first + size):
                text = ". ".join(rng.choices(sentences, k=5))
                title = sources[row % len(sources)]["title"]
                digest = Passage.hash_of(title, text)
                writer.write(Passage(f"{row}:0", str(row), 1, title, "", text, 0, len(text.split()), digest))
        vectors = centres[points.integers(len(centres), size=size)] + points.normal(size=(size, dim)) * 0.7
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        np.save(folder / f"{name}.npy", vectors.astype(np.float16), allow_pickle=False)
        texts.append(folder / f"{name}.parquet")
        rows.append(folder / f"{name}.npy")
        files[f"passages/{name}.parquet"], files[f"embeddings/{name}.npy"] = map(
            store.blobs.put_file, (texts[-1], rows[-1])
        )
        parts.append(PartEntry(name, first, first + size - 1, size))
    words = KIND.plan(IndexRecipe("BM25", over="text"), count, 0)
    lists = resolve(IndexRecipe(f"IVF,PQ{dim // 4}np,Refine(vectors)"), count, dim)
    run_stages(words, texts, folder / "bm25.postings", folder)
    run_stages(lists, rows, folder / "ivfpq.faiss", folder)
    files["index/bm25.postings"] = store.blobs.put_file(folder / "bm25.postings")
    files["index/ivfpq.faiss"] = store.blobs.put_file(folder / "ivfpq.faiss")
    entries = {"bm25": words.entry() | {"file": "index/bm25.postings"}, "ivfpq": lists.entry()}
    kinds = {"embeddings": {"kind": "vectors"}}
    content = Content({"kind": "passages"}, tuple(parts), files, {}, kinds, entries, "bm25")
    content = add_range_digests(
        store, content, list_range_tasks(content), lambda tasks, _: [compute_once(task, store) for task in tasks]
    )
    tag(store, store.snapshots.publish(Manifest(content)), "latest")


def mount(store: Store) -> None:
    """Copy the files of a local store to the simulated remote file system."""
    for file in store.files.iter_tree():
        with store.files.local_path(file.path).open("rb") as source:
            body: Any = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) if file.size else b""
        Far.write(f"bench/{file.path}", body, file.size, file.modified)


Ask = Callable[[int], Sequence[Hit]]  # from the number of a question to its hits


def open_search(snapshot: Snapshot, index: str, question_set: "QuestionSet") -> Ask:
    """Open an index of a snapshot; return its search."""
    if index == "bm25":
        retriever = open_retriever(snapshot, index)
        return lambda number: retriever.search([question_set.questions[number]], question_set.k)[0]
    dense = DenseRetriever(snapshot, None, index)
    return lambda number: dense.search_vectors(question_set.vectors[number : number + 1], question_set.k)[0]


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """The same number of questions as texts, and as vectors near those of passages."""

    questions: Sequence[str]
    vectors: Vectors
    k: int  # number of hits of each


def list_scores(hits: Sequence[Hit]) -> list[tuple[Passage, float]]:
    return [(hit.passage, hit.score) for hit in hits]


def measure(index: str, local: Snapshot, question_set: QuestionSet, seconds: float) -> dict[str, Any]:
    """Time questions with an empty cache, with a filled cache, and on mapped files."""
    mapped_search, count = open_search(local, index, question_set), len(question_set.questions)
    expected_scores = [list_scores(mapped_search(number)) for number in range(count)]
    costs: dict[str, list[float]] = {
        name: [] for name in ("open_s", "cold_s", "open_bytes", "bytes", "rounds", "requests")
    }
    equal = True
    for number in range(count):
        with tempfile.TemporaryDirectory() as cache, latency(seconds):
            os.environ["BOOKWHEEL_CACHE"] = cache
            start = time.perf_counter()
            with Snapshot.open("far://bench", by_ranges=True) as snapshot:
                ask = open_search(snapshot, index, question_set)
                costs["open_s"].append(time.perf_counter() - start)
                assert snapshot.ranges is not None
                ranges = snapshot.ranges.cache
                counts_before = ranges.rounds, ranges.requests, ranges.fetched_bytes
                start = time.perf_counter()
                hits = ask(number)
                costs["cold_s"].append(time.perf_counter() - start)
                costs["open_bytes"].append(counts_before[2])
                for name, value, earlier in zip(
                    ("rounds", "requests", "bytes"),
                    (ranges.rounds, ranges.requests, ranges.fetched_bytes),
                    counts_before,
                    strict=True,
                ):
                    costs[name].append(value - earlier)
                equal &= list_scores(hits) == expected_scores[number]
                if number == count - 1:
                    warm_seconds, mapped_seconds = _measure_warm_seconds([ask, mapped_search], count)
    result = {name: [round(statistics.median(values), 4), round(max(values), 4)] for name, values in costs.items()}
    return {
        **result,
        "warm_ms": round(1e3 * warm_seconds, 2),
        "mapped_ms": round(1e3 * mapped_seconds, 2),
        "warm_ratio": round(mapped_seconds / warm_seconds, 3),
        "equal": equal,
    }


def _measure_warm_seconds(searches: Sequence[Ask], count: int) -> list[float]:
    """Return the median seconds of each search, in turns; lists are complete after some passes."""
    times: list[list[float]] = []
    for _ in range(WARM_PASSES):
        times = [[] for _ in searches]
        for number in range(count):
            for search, seconds in zip(searches, times, strict=True):
                start = time.perf_counter()
                search(number)
                seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in times]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--passages", type=int, default=40_000)
    parser.add_argument("--dim", type=int, default=96)
    parser.add_argument("--ms", type=float, default=20)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--max-questions", type=int, default=15)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--questions", type=Path, default=QUESTIONS)
    parser.add_argument("--store", type=Path, help="folder of a store that is kept and reused")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store_path = arguments.store or Path(folder) / "store"
        is_new = not store_path.exists()
        store = Store.open(str(store_path), create=True)
        os.environ["BOOKWHEEL_CACHE"] = str(Path(folder) / "stamps")
        if is_new:
            sources = read_json_lines(arguments.texts) if arguments.texts else demo_passages()
            (Path(folder) / "work").mkdir()
            publish(store, Path(folder) / "work", sources, arguments.passages, arguments.dim)
        questions = [row["question"] for row in read_json_lines(arguments.questions)][: arguments.max_questions]
        local = Snapshot.open(str(store_path))
        rows = np.random.default_rng(3).integers(local.n, size=arguments.max_questions)
        first = np.asarray(local.embeddings(local.parts[0].name), np.float32)
        noise = np.random.default_rng(4).normal(size=(arguments.max_questions, first.shape[1])) * 0.05
        question_set = QuestionSet(questions, (first[rows % len(first)] + noise).astype(np.float32), arguments.k)
        mount(store)
        pull(store, "latest", Path(folder) / "mapped", select=select_files(local.manifest.content))
        local = Snapshot.from_folder(Path(folder) / "mapped")
        results = {index: measure(index, local, question_set, arguments.ms / 1e3) for index in ("bm25", "ivfpq")}
        with latency(arguments.ms / 1e3):
            start = time.perf_counter()
            remote = Store.open("far://bench")
            report = pull(
                remote,
                "latest",
                Path(folder) / "pulled",
                select=select_files(local.manifest.content),
                with_mapped_copies=False,
            )
            pull_costs = {"pull_s": round(time.perf_counter() - start, 3), "pull_bytes": report.fetched_bytes}
        sizes = {
            path: ref.size for path, ref in local.manifest.content.files.items() if path.startswith(("index", "ranges"))
        }
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        cold = results["bm25"]["open_s"][0] + results["bm25"]["cold_s"][0]
        print(
            json.dumps(
                {
                    "passages": local.n,
                    "ms": arguments.ms,
                    "k": arguments.k,
                    **results,
                    **pull_costs,
                    "ratio": round(pull_costs["pull_s"] / cold, 2),
                    "peak_mb": peak,
                    "sizes": sizes,
                }
            )
        )


if __name__ == "__main__":
    main()
