"""Measure the memory of each kind of index for Wikipedia, and its recall: a table for choosing an index.

Bytes are estimated for 21,015,324 passages of 768 dimensions by the library's own estimate.
Recall@k is measured at `--n`, over synthetic vectors or real passages (`--passages`, MiniLM's 384
dimensions), at the index's default search setting and at its widest, `at_most`, with every list or
512 candidates. The exact vectors that `Refine(vectors)` reads are counted separately, since they
are the embeddings on disk. `--markdown FILE` writes the table. Prints one JSON line. The defaults
take about a minute; the full measurement is `--n 100000 --dim 768`, without OPQ.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hnsw_builds import trial_of
from isolated_run import run_alone
from passages import embed_sample
from synthetic import BERT, WIKIPEDIA, Synthetic, write_parts

from rag_model.index.build import run_stages
from rag_model.index.estimate import estimate_resources
from rag_model.index.quality.sweep import VectorQuerySet, measure_point
from rag_model.index.recipe import IndexRecipe, VectorPlan, resolve
from rag_model.index.search import FaissFileIndex, open_index

PARTS = 4
HALF = 2  # bytes of a dimension of the stored embeddings, which are float16
Row = dict[str, Any]


def list_factories(dim: int) -> list[str]:
    """Return the factory strings of the compared indexes."""
    pq, rabitq = f"OPQ96_{dim},IVF,PQ96np", "IVF,RaBitQ4"
    refined = [f"{codes},Refine({refinement})" for codes in (pq, rabitq) for refinement in ("SQfp16", "vectors")]
    return ["Flat", "HNSW32", "HNSW32_SQ8", pq, *refined[:2], rabitq, *refined[2:]]


def project_memory(factory: str) -> Row:
    """Estimate the gigabytes of an index of Wikipedia."""
    plan = resolve(IndexRecipe(factory), WIKIPEDIA, BERT)
    estimate = estimate_resources(plan)
    vector_bytes = HALF * WIKIPEDIA * BERT if plan.refine else 0
    return {
        "projected": plan.factory + (f",Refine({plan.refine})" if plan.refine else ""),
        "index_gb": round(estimate.disk_bytes / 1e9, 1),
        "search_gb": round(estimate.search_bytes / 1e9, 1),
        "build_gb": round(estimate.peak_bytes() / 1e9, 1),
        "vectors_on_disk_gb": round(vector_bytes / 1e9, 1),
    }


def build_index(plan: VectorPlan, parts: Sequence[Path], folder: Path, threads: int) -> tuple[Path, Row]:
    """Build an index in its own process; return its file and the costs."""
    folder.mkdir()
    out = folder / "index.faiss"
    cost = run_alone(run_stages, plan, parts, out, folder, threads=threads)
    costs = {"build_cpu_s": round(cost.cpu_seconds, 1), "build_anonymous_mb": round(cost.anonymous_mb)}
    return out, costs | {"bytes_a_vector": round(out.stat().st_size / plan.n, 1)}


def measure_index(plan: VectorPlan, path: Path, parts: Sequence[Path], trial: VectorQuerySet) -> Row:
    """Measure an index at its default search setting, and at its widest."""
    index = open_index(path, defaults=plan.search, vectors=parts if plan.refine else ())
    default, widest = measure_point(index, trial, plan.search), measure_point(index, trial, _widen_search(index, plan))
    return {
        "measured": plan.factory,
        "search": dict(plan.search),
        "recall_mean": round(default.recall_mean, 4),
        "recall_p5": round(default.recall_p5, 4),
        "at_most": round(widest.recall_mean, 4),
        "ms": round(default.milliseconds, 3),
    }


def _widen_search(index: FaissFileIndex, plan: VectorPlan) -> dict[str, int]:
    hardest = {"efSearch": 512, "nprobe": index.n_lists}
    return {name: hardest.get(name, value) for name, value in plan.search.items()}


def format_table(rows: Sequence[Row], settings: Row) -> str:
    """Format the rows as a Markdown table."""
    heads = [
        f"index, {WIKIPEDIA:,} x {BERT}",
        "GB (projected)",
        f"recall@{settings['k']}, n = {settings['n']:,} x {settings['dim']}",
        "5th percentile",
        "at most",
    ]
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        disk_note = f" + {row['vectors_on_disk_gb']} on disk" if row["vectors_on_disk_gb"] else ""
        recall_cells = [f"{row[name]:.3f}" for name in ("recall_mean", "recall_p5", "at_most")]
        lines.append([f"`{row['projected']}`", f"{row['index_gb']}{disk_note}", *recall_cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Estimate, build and measure each index; print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=4_000, help="vectors or passages over which recall is measured")
    parser.add_argument("--dim", type=int, default=384, help="dimensions of synthetic vectors, a multiple of 96")
    parser.add_argument("--max-questions", type=int, default=500, help="maximum number of questions")
    parser.add_argument("--k", type=int, default=20)
    parser.add_argument("--passages", type=Path, help="JSON lines with title and text, instead of synthetic vectors")
    parser.add_argument("--questions", type=Path, nargs="+", default=[], help="JSON lines with question")
    parser.add_argument("--cache", type=Path, help="keeps the passages' vectors; by default a temporary folder")
    parser.add_argument("--train-sample", type=int, help="vectors that train the codes; OPQ at 768 takes minutes")
    parser.add_argument("--threads", type=int, default=2, help="threads of each build")
    parser.add_argument("--only", nargs="+", help="factory strings, instead of all")
    parser.add_argument("--markdown", type=Path, help="write the table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.passages:
            cache = options.cache or folder / "cache"
            real = embed_sample(cache, options.passages, options.questions, options.n, options.max_questions)
            (n, dim), parts, questions = real.passages.shape, write_parts(folder, real.passages, PARTS), real.questions
        else:
            n, dim, generator = options.n, options.dim, Synthetic(options.dim)
            parts, questions = generator.parts(folder, n, PARTS), generator.questions(options.max_questions)
        trial = trial_of(parts, "ip", questions, options.k)
        factory_strings = options.only or list_factories(dim)
        rows, files = [], dict[str, tuple[Path, Row]]()
        for factory in factory_strings:
            plan = resolve(IndexRecipe(factory, train_sample=options.train_sample), n, dim)
            if plan.factory not in files:  # `Refine(vectors)` uses the same file
                files[plan.factory] = build_index(plan, parts, folder / str(len(files)), options.threads)
            path, costs = files[plan.factory]
            wide = project_memory(factory.replace(f"_{dim},", f"_{BERT},"))
            rows.append(wide | measure_index(plan, path, parts, trial) | costs)
    settings = {"benchmark": "index_memory", "n": n, "dim": dim, "k": options.k, "real": options.passages is not None}
    if options.markdown:
        options.markdown.write_text(format_table(rows, settings))
    print(json.dumps(settings | {"bytes": f"projected for {WIKIPEDIA:,} x {BERT}", "indexes": rows}))


if __name__ == "__main__":
    main()
