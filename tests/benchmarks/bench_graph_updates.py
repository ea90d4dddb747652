"""Measure a graph that is updated in place for many generations beside a rebuilt graph, over real passages.

Every generation drops `--churn` of the passages at random, and adds as many others; the pool of
passages is reused cyclically. Prints one JSON line per measured generation. `shortfall_k` is the
largest difference, in points, by which a rebuilt index's recall@k exceeds the updated one's at
equal distance computations. With `--rebuilds N`, the updated index is compared with the mean of N
rebuilt ones, whose passages are inserted in other orders, and `rebuilt_shortfalls_k` compares each
rebuilt index with the mean of the others. The peer is hnswlib's `mark_deleted` and
`add_items(replace_deleted=True)`, beside its own rebuild; faiss searches its graphs and counts
distances. The vectors are MiniLM's, or those of `--encoder`, and are kept in `--cache`. The full
measurement needs `pip install hnswlib`:

    python tests/benchmarks/bench_graph_updates.py --passages passages.jsonl.xz --words 30 --questions a.jsonl.xz
        --n 100000 --generations 100 --cells 4 --max-questions 4000 --cache FOLDER

`--through reindex` builds the generations with `reindex` itself. Each is a dump of JSON lines, from
which the next snapshot is built, and the measured ones are built again with `--rebuild-graphs`. The
encoder is then a static one (`made_static.py`), and there is no peer. `cpu_s` are the CPU seconds
of a generation in this process, and of the last rebuild of all graphs; `cells` are the metrics of
the graph in the snapshot. It takes about three minutes of an idle core:

    python tests/benchmarks/bench_graph_updates.py --through reindex --passages passages.jsonl.xz --words 30
        --questions a.jsonl.xz --n 10000 --generations 24 --measure 1 12 24 --cells 4 --max-questions 2000
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
from made_static import made_static
from passages import cut_pieces, draw_sample, embed_sample
from recall_curves import compare_curves, interpolate_recall
from synthetic import write_parts

from flows.demo import demo_encoder
from flows.reindex import reindex
from rag_model.encoders.encoder import Encoder
from rag_model.index.build import iter_slices
from rag_model.index.exact_search import ExactIndex
from rag_model.index.files.engine import FaissIndex, Rows, Vectors, faiss
from rag_model.index.files.pieces import path_opener
from rag_model.index.graphs.cells import Cells
from rag_model.index.graphs.graph import (
    NO_LINK,
    CellGraph,
    ScoredLinks,
    count_node_links,
    pack_links,
    score_targets,
)
from rag_model.index.graphs.history import CellHistory, CellQuality
from rag_model.index.graphs.kind import KIND, _load_trained_file
from rag_model.index.graphs.stitch import CellShard, CrossLinks, link_across_border
from rag_model.index.graphs.update import SEARCH_TURNS, load_graph, update_cell_graph, update_cross_links
from rag_model.index.quality.results import OperatingPoint
from rag_model.index.quality.sweep import VectorQuerySet
from rag_model.index.recipe import IndexRecipe, VectorPlan, resolve
from rag_model.snapshots.recipe import Recipe, read_recipe
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot

PARTS = 4
RECIPE = """
[index.hnsw]
factory = "{factory}"
cells = {cells}
[gate.floors.hnsw]
mean = 0.0
p5 = 0.0
"""
EF_SEARCH = {20: (20, 30, 40, 60, 80, 120, 160, 240, 320), 100: (100, 160, 256, 400)}
Report = dict[str, Any]
Curves = dict[int, list[OperatingPoint]]  # of an index, by depth


@dataclass(frozen=True, slots=True)
class Generation:
    """The passages of a generation."""

    rows: Rows  # (n,) rows of the pool
    vectors: Vectors  # (n, d) float32


def iter_generations(pool: Vectors, n: int, churn: float, generations: int) -> Iterator[Generation]:
    """Yield the passages of each generation, from generation 0; new passages come last."""
    rng, rows, next_row, count = np.random.default_rng(0), np.arange(n), n, round(churn * n)
    yield Generation(rows, pool[rows])
    for _ in range(generations):
        remaining = rows[np.sort(rng.permutation(n)[count:])]
        unused_rows = np.setdiff1d(np.arange(len(pool)), remaining)
        added_rows = unused_rows[np.argsort((unused_rows - next_row) % len(pool))][:count]
        next_row = int(added_rows[-1]) + 1
        rows = np.concatenate([remaining, added_rows])
        yield Generation(rows, pool[rows])


@dataclass(slots=True)
class Cell:
    """The links of a cell, and the passages that they connect."""

    members: Rows
    sources: Rows
    lists: ScoredLinks
    crossings: CrossLinks
    generation: int = 0

    @classmethod
    def build(cls, plan: VectorPlan, corpus: Generation, members: Rows, sources: Rows) -> "Cell":
        """Build the graph of the members, and link the sources to it."""
        vectors = corpus.vectors[members]
        graph = CellGraph.build(plan, vectors)
        crossings = link_across_border(graph, vectors, corpus.vectors[sources], plan.metric)
        return cls(corpus.rows[members], corpus.rows[sources], graph.lists, crossings)

    def update(self, plan: VectorPlan, corpus: Generation, members: Rows, sources: Rows) -> "Cell":
        """Return the cell of the next generation."""
        old_members = match_rows(self.members, corpus.rows[members])
        old_sources = match_rows(self.sources, corpus.rows[sources])
        vectors, source_vectors = corpus.vectors[members], corpus.vectors[sources]
        graph, generation = update_cell_graph(plan, self.lists, old_members, vectors), self.generation + 1
        has_turn = corpus.rows[sources] % SEARCH_TURNS == generation % SEARCH_TURNS
        changes = self.lists, old_members, old_sources, graph, vectors, source_vectors, has_turn
        crossings = update_cross_links(plan, self.crossings, *changes)
        return Cell(corpus.rows[members], corpus.rows[sources], graph.lists, crossings, generation)


def match_rows(old_rows: Rows, new_rows: Rows) -> Rows:
    """Return the position of each new passage among the old ones, or -1."""
    order = np.argsort(old_rows)
    positions = order[np.minimum(np.searchsorted(old_rows, new_rows, sorter=order), len(old_rows) - 1)]
    return np.where(old_rows[positions] == new_rows, positions, -1)


def group_by_cell(plan: VectorPlan, cells: Cells, corpus: Generation) -> list[tuple[Rows, Rows]]:
    """Return the members and the sources of each cell, as rows of the corpus."""
    nearest_cells, joins, links = cells.assign(plan.metric, corpus.vectors)
    groups = []
    for cell in range(plan.cells):
        members = np.union1d(np.flatnonzero(nearest_cells == cell), joins[0][joins[1] == cell])
        groups.append((members, np.sort(links[0][links[1] == cell])))
    return groups


class Bookwheel:
    """Bookwheel's stages: cells, their graphs, and the merge."""

    def __init__(self, plan: VectorPlan, folder: Path, corpus: Generation) -> None:
        """Train the cells and build their graphs."""
        self.plan, self.folder, self.trained = plan, folder, folder / "trained"
        KIND.train(plan, write_parts(folder, corpus.vectors, PARTS), self.trained)
        self.partition = _load_trained_file(plan, self.trained)[0]
        start = process_time()
        self.cells = [Cell.build(plan, corpus, *rows) for rows in group_by_cell(plan, self.partition, corpus)]
        self.build_seconds = process_time() - start

    def update(self, corpus: Generation) -> None:
        """Update the graphs of all cells."""
        groups = group_by_cell(self.plan, self.partition, corpus)
        self.cells = [cell.update(self.plan, corpus, *rows) for cell, rows in zip(self.cells, groups, strict=True)]

    def load(self, corpus: Generation) -> tuple[FaissIndex, Report]:
        """Return the updated index, and facts about it."""
        return self._merge(corpus, self.cells)

    def rebuild(self, corpus: Generation) -> tuple[FaissIndex, Report]:
        """Return an index that is built from the passages in their order, and facts about it."""
        return self._merge(corpus, None)

    def _merge(self, corpus: Generation, cells: list[Cell] | None) -> tuple[FaissIndex, Report]:
        """Merge the cells; with None, rebuild all cells first."""
        plan, trained, out = self.plan, self.trained, self.folder / "index.faiss"
        parts = write_parts(self.folder, corpus.vectors, PARTS)
        shards = [self.folder / f"shard-{number}" for number in range(plan.cells)]
        pieces = [self.folder / f"piece-{number}" for number in range(PARTS)]
        for number, (part, piece) in enumerate(zip(parts, pieces, strict=True)):
            KIND.scatter(plan, trained, part, number, piece)
        for number, shard in enumerate(shards):
            if cells is None:
                KIND.shard(plan, trained, iter_slices(pieces, plan.cells, number), number, shard)
            else:
                cell = cells[number]
                digests = cell.members.astype(np.uint64), cell.sources.astype(np.uint64)
                is_original = np.ones(len(cell.members), np.bool_)
                history = CellHistory(0, len(is_original), CellQuality(0.0, 0.0, 1.0), is_original, *digests)
                CellShard(cell.lists, cell.crossings, history).write(plan, number, shard)
        openers = [path_opener(path) for path in pieces], [path_opener(path) for path in shards]
        stats = KIND.merge(plan, trained, parts, *openers, out)
        index = faiss.read_index(str(out))
        unreachable = stats["unreachable_repaired"]
        return index, {"unreachable": unreachable, "degree": measure_degree(index)}


def measure_degree(index: FaissIndex) -> float:
    """Return the mean number of links per node, on all levels."""
    links = faiss.vector_to_array(index.hnsw.neighbors)
    return round(float((links >= 0).sum() / index.ntotal), 2)


class Hnswlib:
    """The peer, whose bottom layer is searched by faiss."""

    def __init__(self, plan: VectorPlan, corpus: Generation) -> None:
        """Add the passages to an empty index."""
        try:
            hnswlib = import_module("hnswlib")
        except ImportError as error:
            raise SystemExit("the peer is missing: pip install hnswlib, or give --no-peer") from error
        self.plan, self.rows = plan, corpus.rows
        start = process_time()
        self.index = hnswlib.Index("ip", plan.d)
        settings = {"M": count_node_links(plan), "ef_construction": plan.ef_construction}
        self.index.init_index(len(corpus.rows), allow_replace_deleted=True, **settings)
        self.index.set_num_threads(1)
        self.index.add_items(corpus.vectors, corpus.rows)
        self.build_seconds = process_time() - start

    def update(self, corpus: Generation) -> None:
        """Delete the removed passages, and add the new ones in their place."""
        for row in np.setdiff1d(self.rows, corpus.rows).tolist():
            self.index.mark_deleted(row)
        is_new = ~np.isin(corpus.rows, self.rows)
        self.index.add_items(corpus.vectors[is_new], corpus.rows[is_new], replace_deleted=True)
        self.rows = corpus.rows

    def load(self, corpus: Generation) -> tuple[FaissIndex, Report]:
        """Return the updated graph as a faiss index."""
        return self._load_graph(corpus), {}

    def rebuild(self, corpus: Generation) -> tuple[FaissIndex, Report]:
        """Return a graph to which the passages are added in their order."""
        return Hnswlib(self.plan, corpus).load(corpus)

    def _load_graph(self, corpus: Generation) -> FaissIndex:
        state = self.index.__getstate__()[0]
        elements = state["data_level0"].view(np.uint8).reshape(-1, state["size_data_per_element"])
        # Each element has the number of its links, and room for 2M links.
        lists = elements[:, state["offset_level0"] : state["offset_data"]].copy().view(np.uint32)
        labels = elements[:, state["label_offset"] :].copy().view(np.uint64)[:, 0].astype(np.int64)
        order = np.argsort(corpus.rows)
        rows = order[np.searchsorted(corpus.rows, labels, sorter=order)]  # the row of each element
        is_link = np.arange(lists.shape[1] - 1) < (lists[:, :1] & 0xFFFF)
        links = np.where(is_link, rows[np.where(is_link, lists[:, 1:], 0)], -1)
        keys = np.full(links.shape, NO_LINK)
        keys[rows] = pack_links(score_targets(corpus.vectors[rows], corpus.vectors, links, "ip"), links)
        keys.sort(axis=1)
        return load_graph(self.plan, keys, np.arange(len(rows)), len(rows), corpus.vectors)


def measure_curves(index: FaissIndex, trials: dict[int, VectorQuerySet], order: Rows | None = None) -> Curves:
    """Return the recall curve at each depth over the distances that faiss counts.

    `order` has the trials' row of each row of the index; by default they are equal.
    """
    curves = {}
    for k, trial in trials.items():
        points = []
        for ef_search in EF_SEARCH[k]:
            faiss.cvar.hnsw_stats.reset()
            rows = index.search(trial.vectors, k, params=faiss.SearchParametersHNSW(efSearch=ef_search))[1]
            rows = rows if order is None else np.append(order, -1)[rows]
            distances, recall = (
                faiss.cvar.hnsw_stats.ndis / len(rows),
                float(trial.compute_recalls(rows).mean()),
            )
            points.append(OperatingPoint(f"efSearch={ef_search}", recall, recall, 0.0, distances))
        curves[k] = points
    return curves


def average_curves(curves: Sequence[Curves]) -> Curves:
    """Return the mean distances and recalls of several indexes at each setting."""

    def average(points: Sequence[OperatingPoint]) -> OperatingPoint:
        pairs = [(point.recall_mean, point.distances) for point in points]
        recall, distances = np.mean(pairs, axis=0).tolist()
        return OperatingPoint(points[0].setting, recall, recall, 0.0, distances)

    settings = {k: zip(*(curve[k] for curve in curves), strict=True) for k in curves[0]}
    return {k: list(map(average, points)) for k, points in settings.items()}


def compare(updated: Curves, rebuilds: Sequence[Curves]) -> Report:
    """Return the shortfall of an updated index in points, and both recalls at the curves' middle.

    It is compared with the mean of the rebuilt indexes, and each of these with that of the others.
    """
    report: Report = {}
    for k, curve in average_curves(rebuilds).items():
        middle = [point for point in curve if point.distances <= max(p.distances for p in updated[k])][len(curve) // 2]
        report[f"shortfall_{k}"] = round(100 * compare_curves(updated[k], curve), 2)
        report[f"at_{round(middle.distances)}_distances_{k}"] = [
            round(interpolate_recall(updated[k], middle.distances), 4),
            round(middle.recall_mean, 4),
        ]
        if len(rebuilds) > 1:
            others = [[of for of in rebuilds if of is not rebuilt] for rebuilt in rebuilds]
            report[f"rebuilt_shortfalls_{k}"] = [
                round(100 * compare_curves(rebuilt[k], average_curves(rest)[k]), 2)
                for rebuilt, rest in zip(rebuilds, others, strict=True)
            ]
    return report


def main() -> None:
    """Embed or load the vectors, and print one line per measured generation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=Path, help="JSON lines with title and text")
    parser.add_argument("--words", type=int, default=30, help="words of a passage after splitting")
    parser.add_argument("--questions", type=Path, nargs="+", default=[], help="JSON lines with question")
    parser.add_argument("--max-questions", type=int, default=1_000, help="maximum number of questions")
    parser.add_argument("--n", type=int, default=2_000)
    parser.add_argument("--generations", type=int, default=12)
    parser.add_argument("--measure", type=int, nargs="+", default=[1, 12, 50, 100], help="measured generations")
    parser.add_argument("--churn", type=float, default=0.02)
    parser.add_argument("--cells", type=int, default=2)
    parser.add_argument("--factory", default="HNSW32")
    parser.add_argument("--encoder", help="folder of another encoder than MiniLM, or `static` for made_static.py's")
    parser.add_argument("--cache", type=Path, help="keeps the vectors; by default a temporary folder")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--rebuilds", type=int, default=1, help="rebuilt graphs to compare with")
    parser.add_argument("--through", choices=["stages", "reindex"], default="stages")
    options = parser.parse_args()
    faiss.omp_set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        if options.through == "reindex":
            run_reindex(Path(name), options)
            return
        drawing = options.passages, options.questions, 1 << 30, options.max_questions, options.words
        encoder = options.encoder
        if encoder == "static":
            encoder = str(made_static(Path(demo_encoder(), "tokenizer.json"), Path(name, "encoder")))
        vectors = embed_sample(options.cache or Path(name), *drawing, encoder)
        n = min(options.n, len(vectors.passages) * 2 // 3)
        pool = np.ascontiguousarray(vectors.passages[np.random.default_rng(0).permutation(len(vectors.passages))])
        plan = resolve(IndexRecipe(options.factory, cells=options.cells), n, pool.shape[1])
        run(plan, pool, vectors.questions, Path(name), options)


def run(plan: VectorPlan, pool: Vectors, questions: Vectors, folder: Path, options: argparse.Namespace) -> None:
    """Update the graphs of all generations, and measure those that the options name."""
    generations = iter_generations(pool, plan.n, options.churn, options.generations)
    first = next(generations)
    sides: dict[str, Bookwheel | Hnswlib] = {"bookwheel": Bookwheel(plan, folder, first)}
    if not options.no_peer:
        sides["hnswlib"] = Hnswlib(plan, first)
    seconds = dict.fromkeys(sides, 0.0)
    for generation, corpus in enumerate(generations, 1):
        for name, side in sides.items():
            start = process_time()
            side.update(corpus)
            seconds[name] += process_time() - start
        if generation not in options.measure:
            continue
        # A rebuild writes the vectors to `folder` in another order.
        (folder / "exact").mkdir(exist_ok=True)
        exact = ExactIndex(write_parts(folder / "exact", corpus.vectors, PARTS), plan.metric)
        trials = {k: VectorQuerySet.from_exact_search(exact, questions, k) for k in EF_SEARCH}
        report: Report = {
            "benchmark": "graph_updates",
            "generation": generation,
            "n": plan.n,
            "pool": len(pool),
        }
        for name, side in sides.items():
            index, facts = side.load(corpus)
            updated, rebuilds = measure_curves(index, trials), list[Curves]()
            for number in range(options.rebuilds):
                shuffled = np.random.default_rng(number).permutation(plan.n)
                order = shuffled if number else np.arange(plan.n)
                reordered = Generation(corpus.rows[order], corpus.vectors[order])
                index, rebuilt_facts = side.rebuild(reordered)
                rebuilds.append(measure_curves(index, trials, order))
            mean_seconds = seconds[name] / generation
            report[name] = (
                compare(updated, rebuilds)
                | {fact: [value, rebuilt_facts[fact]] for fact, value in facts.items()}
                | {
                    "update_cpu_s": round(mean_seconds, 3),
                    "ratio_to_build": round(mean_seconds / side.build_seconds, 4),
                }
            )
        print(json.dumps(report), flush=True)


def run_reindex(folder: Path, options: argparse.Namespace) -> None:
    """Build all generations with `reindex`, and measure those that the options name."""
    rows, questions = draw_sample(options.passages, options.questions, 1 << 30, options.max_questions)
    pool = [piece for row in rows for piece in cut_pieces(row, options.words)]
    pool = [pool[position] for position in np.random.default_rng(0).permutation(len(pool))]
    encoder = str(made_static(Path(demo_encoder(), "tokenizer.json"), folder / "encoder"))
    question_vectors, store = Encoder.load(encoder).encode_questions(questions), str(folder / "store")
    (folder / "recipe.toml").write_text(RECIPE.format(factory=options.factory, cells=options.cells))
    recipe = read_recipe(folder / "recipe.toml")
    numbers = np.arange(len(pool), dtype=np.float32)[:, None]  # placeholders, because `reindex` computes the vectors
    n, seconds = min(options.n, len(pool) * 2 // 3), 0.0
    for generation, corpus in enumerate(iter_generations(numbers, n, options.churn, options.generations)):
        lines = ({"_id": str(row), "title": pool[row]["title"], "text": pool[row]["text"]} for row in corpus.rows)
        dump = folder / "dump.jsonl"
        dump.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        cells, cpu_seconds = build_generation(dump, store, encoder, recipe)
        seconds += cpu_seconds if generation else 0.0
        if generation not in options.measure:
            continue
        rebuild = build_generation(dump, store, encoder, recipe, is_rebuild=True)
        updated, rebuilt = (open_graph(store, ref, folder, question_vectors) for ref in ("latest", "rebuilt"))
        facts = {"cells": cells, "cpu_s": [round(seconds / generation, 2), round(rebuild[1], 2)]}
        report = {"benchmark": "graph_updates", "through": "reindex", "generation": generation, "n": n}
        print(json.dumps(report | {"bookwheel": compare(updated, [rebuilt]) | facts}), flush=True)


def build_generation(
    dump: Path, store: str, encoder: str, recipe: Recipe, *, is_rebuild: bool = False
) -> tuple[Report, float]:
    """Build a snapshot from the previous one; return facts about its cells, and the CPU seconds."""
    start = process_time()
    ref = "rebuilt" if is_rebuild else "latest"
    outcome = reindex.fn(str(dump), store, encoder, recipe, ref, base="latest", rebuild_graphs=is_rebuild)
    metrics = outcome.metrics["hnsw"]
    names = ("built_cells", "updated_cells", "generation", "replaced")
    return {name: metrics[name] for name in names if name in metrics}, process_time() - start


def open_graph(store: str, ref: str, folder: Path, questions: Vectors) -> Curves:
    """Return the curves of a snapshot's graph."""
    with Snapshot.open(store, ref) as snapshot:
        content = snapshot.manifest.content
        vectors = np.concatenate([snapshot.embeddings(part.name) for part in snapshot.parts], dtype=np.float32)
        file = Store.open(store).files.local_path(content.files[content.index_file("hnsw")].path)
    exact = ExactIndex(write_parts(folder, vectors, PARTS), "ip")
    trials = {k: VectorQuerySet.from_exact_search(exact, questions, k) for k in EF_SEARCH}
    return measure_curves(faiss.read_index(str(file)), trials)


if __name__ == "__main__":
    main()
