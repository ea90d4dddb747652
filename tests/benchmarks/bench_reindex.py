"""Measure the whole `bookwheel reindex` of the demo dump beside a bare script of common tools.

The bare script (`--bare`, below, also in its own process) is the work of an afternoon:
wikiextractor 3.1, windows of 100 words, sentence-transformers `encode` at its defaults, and for
each of our indexes the same faiss factory string in one shot, with all cores. It has no parts, no
workers, no resumable records, no gate and no snapshot. Both start from nothing and take turns.
`--work full` is the default recipe (HNSW and IVF-PQ). `--work same` gives both the same work except
the gate: windows of 100 words and HNSW alone. Prints one JSON line a work; `ratio` is the script's
seconds over ours, so that 1 or more is no slower, and `ratio_a_passage` corrects for the number of
passages.
`python tests/benchmarks/bench_reindex.py [--rounds 1] [--work full|same|both]` takes about three
minutes a round and work.
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from processes import Cost, run

from flows.demo import demo_dump, demo_encoder

WORDS = 100
RECIPES = {
    "full": "",
    "same": '[chunk]\nchunker = "words"\n\n[index.hnsw]\nfactory = "HNSW"\n',
}
EF_CONSTRUCTION = 100  # as in the default recipe


@dataclass(frozen=True, slots=True)
class BuildResult:
    """The cost and the outputs of one run."""

    cost: Cost
    passages: int
    stages: Mapping[str, float]  # seconds
    sizes_mb: Mapping[str, float]
    indexes: Mapping[str, str]  # factory strings, by name


def run_ours(work: str, folder: Path) -> BuildResult:
    """Run `bookwheel reindex` into a fresh store."""
    store, recipe = folder / "store", folder / "recipe.toml"
    recipe.write_text(RECIPES[work])
    command = Path(sys.executable).with_name("bookwheel")
    dump = ["--dump", demo_dump(), "--store", str(store), "--encoder", demo_encoder()]
    fresh = {"BOOKWHEEL_CACHE": str(folder / "cache")}
    cost = run([str(command), "reindex", *dump, "--recipe", str(recipe), "--json"], fresh)
    reply = json.loads(cost.output)
    show_process = subprocess.run(
        [str(command), "show", reply["snapshot"], "--store", str(store), "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    content = json.loads(show_process.stdout)["content"]
    sizes = {
        kind: round(sum(f["size"] for path, f in content["files"].items() if path.startswith(kind)) / 1e6, 2)
        for kind in ("passages", "embeddings", "index")
    }
    factories = {name: index["factory"] for name, index in content["indexes"].items()}
    return BuildResult(cost, reply["counts"]["passages"], reply["seconds"], sizes, factories)


def run_theirs(indexes: Mapping[str, str], folder: Path) -> BuildResult:
    """Run the bare script into an empty folder."""
    out = folder / "bare"
    out.mkdir()
    cost = run([sys.executable, __file__, "--bare", str(out), "--indexes", json.dumps(indexes)])
    reply = json.loads(cost.output)
    return BuildResult(cost, reply["passages"], reply["seconds"], reply["sizes_mb"], indexes)


def run_bare(out: Path, indexes: Mapping[str, str]) -> None:
    """Run as the bare script: write text, passages, vectors and indexes to `out`; print a report."""
    start, seconds = time.perf_counter(), {}
    extract = [sys.executable, "-m", "wikiextractor.WikiExtractor", demo_dump(), "--json", "--no-templates", "-q"]
    subprocess.run([*extract, "-o", str(out / "text")], check=True)
    passages = list(split_windows(out / "text"))
    (out / "passages.jsonl").write_text("".join(json.dumps(p) + "\n" for p in passages))
    seconds["chunk"] = time.perf_counter() - start

    faiss, np = (
        import_module("faiss"),
        import_module("numpy"),
    )  # imported here, so that the time counts
    model = import_module("sentence_transformers").SentenceTransformer(demo_encoder())
    vectors = model.encode([f"{p['title']} {p['text']}" for p in passages])
    np.save(out / "embeddings.npy", vectors)
    seconds["embed"] = time.perf_counter() - start - sum(seconds.values())

    for name, factory in indexes.items():
        index = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
        if hasattr(index, "hnsw"):
            index.hnsw.efConstruction = EF_CONSTRUCTION
        index.train(vectors)
        index.add(vectors)
        faiss.write_index(index, str(out / f"{name}.faiss"))
        seconds[name] = time.perf_counter() - start - sum(seconds.values())
    print(json.dumps({"passages": len(passages), "seconds": round_seconds(seconds), "sizes_mb": measure_sizes(out)}))


def split_windows(text: Path) -> list[dict[str, str]]:
    """Split the articles that wikiextractor wrote into disjoint windows of 100 words."""
    passages = []
    for path in sorted(path for path in text.rglob("wiki_*") if path.is_file()):
        for article in map(json.loads, path.read_text().splitlines()):
            words = re.findall(r"\S+", article["text"])
            cuts = (words[start : start + WORDS] for start in range(0, len(words), WORDS))
            passages += [{"title": article["title"], "text": " ".join(words_of_passage)} for words_of_passage in cuts]
    return passages


def measure_sizes(out: Path) -> dict[str, float]:
    """Return the megabytes of the bare script's files, named like those of a snapshot."""
    kinds = {"passages": "passages.jsonl", "embeddings": "embeddings.npy", "index": "*.faiss"}
    return {kind: round(sum(p.stat().st_size for p in out.glob(name)) / 1e6, 2) for kind, name in kinds.items()}


def round_seconds(values: Mapping[str, float]) -> dict[str, float]:
    """Round values to a tenth."""
    return {name: round(value, 1) for name, value in values.items()}


def compare(work: str, rounds: int) -> dict[str, Any]:
    """Run both in turns; return medians and ratios."""
    runs: dict[str, list[BuildResult]] = {"ours": [], "theirs": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="bench-reindex-") as name:
            runs["ours"].append(run_ours(work, Path(name)))
            runs["theirs"].append(run_theirs(runs["ours"][-1].indexes, Path(name)))
            shutil.rmtree(name, ignore_errors=True)
            Path(name).mkdir()
    wall = {who: statistics.median(result.cost.seconds for result in all_of) for who, all_of in runs.items()}
    passage_counts = {who: all_of[-1].passages for who, all_of in runs.items()}
    rate = {who: passage_counts[who] / wall[who] for who in runs}
    return {
        "benchmark": "reindex",
        "work": work,
        "rounds": rounds,
        "indexes": runs["ours"][-1].indexes,
        "ratio": round(wall["theirs"] / wall["ours"], 2),
        "ratio_a_passage": round(rate["ours"] / rate["theirs"], 2),
        "ratios": [round(b.cost.seconds / a.cost.seconds, 2) for a, b in zip(*runs.values(), strict=True)],
        "passages": passage_counts,
        "passages_per_s": round_seconds(rate),
        "seconds": {who: [round(result.cost.seconds, 1) for result in all_of] for who, all_of in runs.items()},
        "cpu_seconds": {who: [round(result.cost.cpu_seconds, 1) for result in all_of] for who, all_of in runs.items()},
        "stages": {who: round_seconds(all_of[-1].stages) for who, all_of in runs.items()},
        "peak_mb": {who: round(max(result.cost.peak_mb for result in all_of)) for who, all_of in runs.items()},
        "sizes_mb": {who: all_of[-1].sizes_mb for who, all_of in runs.items()},
    }


def main() -> None:
    """Compare both, or run as the bare script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--work", choices=["full", "same", "both"], default="full")
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--indexes", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        run_bare(options.bare, options.indexes)
        return
    for work in ("full", "same") if options.work == "both" else (options.work,):
        print(json.dumps(compare(work, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
