"""HNSW by cells: one graph per cell, built separately and stitched into one that plain faiss reads.

faiss cannot merge HNSW graphs. But a cell's graph already holds good neighbours within the cell for each of its
vectors. Vectors near a border are in two cells' graphs, or are linked into the second one. The merge unites the lists
of each vector, keeps the best 2M, links the few nodes of the upper levels again, and checks that every node can be
reached: the result is one HNSW graph over the corpus.

The merge holds neither all vectors nor the graph: both are written in blocks, in faiss's own file layout.

Vectors of unequal norm (DPR's) are linked by their inner products. The usual alternative, one more dimension that
makes all norms equal (Bachrach et al., RecSys 2014), was measured at log-normal norms of sigma .05, .15 and .5 over
40,000 x 96 in 4 cells: at equal distance computations and efSearch 64 it lost .03, .19 and .45 of recall@20 compared
with one graph built at once by inner product, while links by inner product, with the repair, gained .001, .009 and
.004.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from rag_model.cores import cores
from rag_model.digest import digest_json
from rag_model.errors import InputError, ResourceError
from rag_model.index import gpu
from rag_model.index.factory import Graph, parse
from rag_model.index.files import engine
from rag_model.index.files.engine import FaissIndex, Vectors, faiss
from rag_model.index.files.pieces import Opener, Piece, opener, write_piece
from rag_model.index.files.vectors import VectorFiles
from rag_model.index.graphs.cells import Cells, learn, sample_size
from rag_model.index.graphs.crossings import cross
from rag_model.index.graphs.graph import (
    BLOCK,
    Keys,
    Links,
    Upper,
    best_links,
    blocks,
    bottom_links,
    keys_of,
    laid_out,
    levels_of,
    new_graph,
    similarities,
)
from rag_model.index.graphs.graph_file import write_head, write_storage, write_tail
from rag_model.index.graphs.reach import repair
from rag_model.index.graphs.scattered import read_rows, vectors_of, write_scattered
from rag_model.index.graphs.stitch import Shard, candidates, write_shard
from rag_model.index.plan import Facts
from rag_model.index.quality.losses import distance, relative_error
from rag_model.index.recipe import MERGE_THREADS, VectorPlan, default_search

VERSION = 7
# Candidates while a node of the upper levels is inserted, by one task over all cells. These only find where a search
# begins: over 2,000,000 x 64, 40 has the recall of 100 (.9936 at efSearch 128, -.0003 at 32) in .37 of the time.
_UPPER = 40
_BLOCKS = 8  # whose candidates are in memory at once, 6 MB each
LOSSES = 4_096  # vectors of the sample, at most twice as many, on which `losses` are measured


def train(plan: VectorPlan, vectors: Sequence[Path], out: Path) -> Facts:
    """Learn the cells of the corpus and the storage's quantiser from a sample.

    Raises:
        InputError: the vectors do not match the plan, or the sample holds a NaN or an infinity.
        ResourceError: memory ran out, or the file cannot be written.
    """
    files = VectorFiles.of(vectors, plan.n, plan.d)
    index = faiss.index_factory(plan.d, plan.factory, engine.metric_code(plan.metric))
    index.hnsw.efConstruction = plan.ef_construction
    sample = files.sample(
        sample_size(plan) if index.is_trained else max(sample_size(plan), plan.train_sample), plan.seed
    )
    cells = learn(plan, sample)
    index.train(sample)
    write_piece(out, _stamp(plan), [*cells.arrays(), faiss.serialize_index(index)])
    lost = _losses(plan, cells, index, sample[:: -(-len(sample) // LOSSES)])
    return {"sample": len(sample), "cells": len(cells.centroids), "losses": lost}


def losses(plan: VectorPlan, trained: Path, vectors: Vectors) -> dict[str, float]:
    """Return how far vectors, (m, d) float32, lie from their `cells`, how few `links` cross borders, and the error of
    their `codes`.

    `links` is the number per vector that the plan asks for over the actual number: with few links, the graphs fall
    apart.

    Raises:
        InputError: the trained file is damaged or of another plan.
    """
    return _losses(plan, *_load(plan, trained), vectors)


def scatter(plan: VectorPlan, trained: Path, vectors: Path, number: int, out: Path) -> Facts:
    """Sort a part's vectors by cell.

    Raises:
        InputError: a file is damaged or of another plan, or a row holds a NaN or an infinity.
        ResourceError: the file cannot be written.
    """
    part, (cells, _) = VectorFiles([vectors]), _load(plan, trained)
    if part.dim != plan.d:
        raise InputError(f"{vectors} has {part.dim} dimensions, not the plan's {plan.d}: plan the index again")
    begins = write_scattered(plan, trained, cells, part, number, out)
    return {"rows": part.n, "written": int(begins[-1]), "bytes": out.stat().st_size}


def shard(plan: VectorPlan, trained: Path, slices: Iterable[bytes], number: int, out: Path) -> Facts:
    """Build a cell's graph, link it to vectors of other cells, and write its bottom lists with their similarities.

    Holds the cell's vectors twice, and its graph.

    Raises:
        InputError: a slice is of other vectors.
        ResourceError: memory ran out, or the file cannot be written.
    """
    members, sources = vectors_of(slices, plan.d)
    with engine.guarded(
        ResourceError, f"cell {number} of {plan.factory} could not be built: run with --debug for the cause"
    ):
        graph = _graph(plan, members)
        lists = _lists(plan, graph, members)
        crossings = cross(graph, members, sources, plan.metric)
    write_shard(plan, trained, number, lists, crossings, out)
    return {"rows": len(members), "linked": len(sources), "bytes": out.stat().st_size}


def merge(
    plan: VectorPlan,
    trained: Path,
    vectors: Sequence[Path],
    scattered: Sequence[Opener],
    shards: Sequence[Opener],
    out: Path,
) -> Facts:
    """Stitch the cells' graphs into one index over all vectors.

    Holds about 20 bytes per vector, and twice the vectors of the upper levels, which are one in M. Several threads
    (`MERGE_THREADS`) link the upper levels, and search for ways to nodes that no walk reaches: an index has one merge,
    and faiss from 1.15.1 on links the same graph with any number of threads.

    Raises:
        InputError: a piece is missing, truncated, or of another build.
        ResourceError: memory ran out, or the file cannot be written.
    """
    files, (_, empty) = VectorFiles.of(vectors, plan.n, plan.d), _load(plan, trained)
    with (
        _cells_of(plan, trained, scattered, shards) as stitched,
        engine.guarded(ResourceError, f"cells of {plan.factory} could not be merged: run with --debug for the cause"),
    ):
        levels = levels_of(plan.n, _links(plan))
        with engine.threads(_threads()):
            upper = _upper(plan, levels, files)
        try:
            with out.open("wb", buffering=1 << 20) as file:
                write_head(file, empty, levels)
                _write_links(plan, file, stitched, levels, upper)
                write_tail(file, empty, upper, default_search(plan.factory)["efSearch"])
                write_storage(file, faiss.downcast_index(empty.storage), plan.n, (block for _, block in files.blocks()))
        except OSError as failed:
            raise ResourceError(f"cannot write {out}: {failed.strerror}") from failed
    with engine.threads(_threads()):
        repaired = repair(out, files)
    return {"rows": plan.n, "bytes": out.stat().st_size, "unreachable_repaired": repaired}


def _threads() -> int:
    """Return how many threads link upper levels, and search for ways to nodes that no walk reaches."""
    return min(MERGE_THREADS, cores())


def _losses(plan: VectorPlan, cells: Cells, empty: FaissIndex, vectors: Vectors) -> dict[str, float]:
    found = {}
    if plan.cells > 1:
        own, joins, links = cells.assign(plan.metric, vectors)
        found["cells"] = distance(vectors, cells.centroids[own], plan.metric)
        asked, crossing = plan.border + plan.linked, (len(joins[0]) + len(links[0])) / len(vectors)
        found["links"] = asked / max(crossing, asked / 100) if asked else 0.0
    storage = faiss.downcast_index(empty.storage)
    if not isinstance(storage, faiss.IndexFlat):
        found["codes"] = relative_error(vectors, storage.sa_decode(storage.sa_encode(vectors)))
    return {name: float(f"{loss:.4g}") for name, loss in found.items()}


def _links(plan: VectorPlan) -> int:
    factory = parse(plan.factory)
    if not isinstance(factory, Graph) or factory.links is None:
        raise InputError(f"the plan names {plan.factory}, which is not an HNSW graph: plan the index again")
    return factory.links


def _stamp(plan: VectorPlan) -> str:
    return digest_json([plan.shared(), "trained"])


def _load(plan: VectorPlan, trained: Path) -> tuple[Cells, FaissIndex]:
    """Read the file of `train`: the cells, and the index without vectors."""
    try:
        with Piece.open(opener(trained), _stamp(plan), 3, f"the trained file {trained}") as piece:
            return Cells.of(piece.read(0), piece.read(1)), engine.parse(piece.read(2), str(trained))
    except OSError as missing:
        raise InputError(f"cannot read the trained file {trained}: {missing.strerror}") from missing


def _graph(plan: VectorPlan, members: Vectors) -> FaissIndex:
    if gpu.builds_graphs(len(members)):
        return gpu.cagra(members, _links(plan), plan.metric)
    graph = new_graph(plan.d, _links(plan), plan.metric, plan.ef_construction)
    graph.add(members)
    return graph


def _lists(plan: VectorPlan, graph: FaissIndex, members: Vectors) -> Keys:
    """Return (m, 2M) keys: each member's bottom list, nearest first."""
    lists = np.empty((len(members), 2 * _links(plan)), np.uint64)
    for first, last in blocks(len(members)):
        links = bottom_links(graph, first, last)  # (b, 2M)
        lists[first:last] = keys_of(similarities(members[first:last], members, links, plan.metric), links)
    lists.sort(axis=1)
    return lists


@contextmanager
def _cells_of(
    plan: VectorPlan, trained: Path, scattered: Sequence[Opener], shards: Sequence[Opener]
) -> Iterator[list[Shard]]:
    rows = read_rows(plan, trained, scattered)
    with ExitStack() as opened:
        cells = []
        for number, source in enumerate(shards):
            cell = Shard.open(plan, trained, source, number, rows[2 * number], rows[2 * number + 1])
            opened.callback(cell.piece.close)
            cells.append(cell)
        yield cells


def _upper(plan: VectorPlan, levels: Links, files: VectorFiles) -> Upper:
    vectors = files.take(np.flatnonzero(levels > 1))
    return Upper.link(levels, _links(plan), vectors, plan.metric, min(_UPPER, plan.ef_construction))


def _write_links(plan: VectorPlan, file: BinaryIO, cells: Sequence[Shard], levels: Links, upper: Upper) -> None:
    """Write every node's lists; the bottom list holds the best candidates of its cells."""
    links = _links(plan)
    for start, keys in _asked(plan, cells, 2 * links):
        for low, high in blocks(len(keys)):
            first, last = start + low, start + high
            bottom = best_links(keys[low:high], 2 * links)
            file.write(laid_out(bottom, levels[first:last], links, upper.within(first, last), first).data)


def _asked(plan: VectorPlan, cells: Sequence[Shard], width: int) -> Iterator[tuple[int, Keys]]:
    """Yield the first row of each block, and the block's candidates.

    Another thread reads those of the next block meanwhile: candidates take as long as ranking and writing them, and the
    merge has no other task beside it.
    """
    places = [*blocks(plan.n, _asked_at_once(len(cells)))]
    with ThreadPoolExecutor(1) as thread:
        following = [thread.submit(candidates, cells, *place, width) for place in places[:1]]
        for number, (start, _) in enumerate(places, 1):
            keys = following.pop().result()
            following = [thread.submit(candidates, cells, *place, width) for place in places[number : number + 1]]
            yield start, keys


def _asked_at_once(cells: int) -> int:
    """Return the rows that all cells are asked about at once.

    Every cell has a few rows of any block, and a question costs as much as a hundred rows: with a block of one size,
    the merge would grow with the square of the corpus. More than eight blocks would take too much memory.
    """
    return BLOCK * min(_BLOCKS, max(1, cells // 16))
