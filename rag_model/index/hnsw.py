"""HNSW by shards: one graph a cell, built apart, stitched into one that plain faiss reads.

faiss cannot merge HNSW graphs. But a cell's graph already knows, for each of its vectors, good neighbours
within the cell, and a vector near a border sits in two cells' graphs. Union the lists of each vector, keep
the best 2M, link the few nodes of the upper levels anew, check that every node can be reached: that is one
HNSW graph over the corpus.

A corpus of one cell is built in one go, as faiss would, and merging only copies it.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_model.errors import InputError, ResourceError
from rag_model.index import engine
from rag_model.index.cells import Cells, assign
from rag_model.index.engine import FaissIndex, Rows, faiss
from rag_model.index.factory import Graph, parse
from rag_model.index.graph import (
    BLOCK,
    Bottom,
    add_upper_levels,
    best_links,
    levels_of,
    new_graph,
    prepare,
    similarities,
)
from rag_model.index.reach import repair
from rag_model.index.recipe import Facts, IndexPlan
from rag_model.index.vectors import VectorFiles

VERSION = 1
Lists = npt.NDArray[Any]  # records of one node's `links` (2M int32, numbers within the cell) and `near` (2M float32)


def reads(plan: IndexPlan, parts: int) -> list[tuple[int, ...]]:
    """Return the parts that each shard reads: a cell may draw on every part."""
    return [tuple(range(parts))] * plan.cells


def train(plan: IndexPlan, vectors: Sequence[Path], out: Path) -> Facts:
    """Cut the corpus into cells and write every row's.

    Raises:
        InputError: the vectors are not the plan's, or hold a NaN or an infinity.
        ResourceError: memory ran out, or the file cannot be written.
    """
    cells = assign(plan, VectorFiles.of(vectors, plan.n, plan.d))
    cells.save(out)
    return {"cells": [len(cells.rows(cell)) for cell in range(cells.count)]}


def shard(plan: IndexPlan, trained: Path, vectors: Sequence[Path], number: int, out: Path) -> Facts:
    """Build a cell's graph and write its bottom lists with their similarities; a single cell's whole index.

    Holds the cell's vectors twice, and its graph.

    Raises:
        InputError: a file is damaged or of another plan, or a row holds a NaN or an infinity.
        ResourceError: memory ran out, or the file cannot be written.
    """
    files = VectorFiles.of(vectors, plan.n, plan.d)
    with engine.guarded(
        ResourceError, f"cell {number} of {plan.factory} could not be built: see the cause with --debug"
    ):
        if plan.cells == 1:
            return _whole(plan, files, out)
        rows = Cells.load(trained, plan).rows(number)
        _write_lists(_lists_of(plan, files, rows), out)
    return {"rows": len(rows), "bytes": out.stat().st_size}


def merge(plan: IndexPlan, trained: Path, vectors: Sequence[Path], shards: Sequence[Path], out: Path) -> Facts:
    """Stitch the cells' graphs into one index over all vectors.

    Holds the index in memory; the shards are memory-mapped and pass by block by block.

    Raises:
        InputError: a shard is missing, truncated, or of another cell or plan.
        ResourceError: memory ran out, or the file cannot be written.
    """
    if plan.cells == 1:
        return _copy(plan, shards[0], out)
    files = VectorFiles.of(vectors, plan.n, plan.d)
    cells = Cells.load(trained, plan)
    members = [cells.rows(cell) for cell in range(plan.cells)]
    lists = [_read_lists(path, 2 * _links(plan), len(rows)) for path, rows in zip(shards, members, strict=True)]
    with engine.guarded(ResourceError, f"the cells of {plan.factory} could not be merged: see the cause with --debug"):
        index = _with_storage(plan, files)
        levels = levels_of(plan.n, _links(plan))
        prepare(index, levels)
        add_upper_levels(index, levels, files.take(np.flatnonzero(levels > 1)))
        _stitch(index, cells, members, lists)
        return _finished(index, files, out)


def _links(plan: IndexPlan) -> int:
    factory = parse(plan.factory)
    if not isinstance(factory, Graph) or factory.links is None:
        raise InputError(f"the plan names {plan.factory}, which is no HNSW graph: plan the index anew")
    return factory.links


def _whole(plan: IndexPlan, files: VectorFiles, out: Path) -> Facts:
    """Build the index in one go."""
    vectors = files.all()
    index = faiss.index_factory(plan.d, plan.factory, engine.metric_code(plan.metric))
    index.hnsw.efConstruction = plan.ef_construction
    if not index.is_trained:
        index.train(files.sample(plan.train_sample, plan.seed))
    index.add(vectors)
    index.hnsw.efSearch = plan.search["efSearch"]
    return _finished(index, files, out)


def _finished(index: FaissIndex, files: VectorFiles, out: Path) -> Facts:
    """Make every node of a linked index reachable, and write it."""
    repaired = repair(index, files)
    degree = Bottom(index).degree()
    engine.write(index, out)
    return {"rows": files.n, "bytes": out.stat().st_size, "degree": degree, "unreachable_repaired": repaired}


def _copy(plan: IndexPlan, shard_file: Path, out: Path) -> Facts:
    rows = int(engine.read(shard_file, mmap=True).ntotal)
    if rows != plan.n:
        raise InputError(f"{shard_file} holds {rows} vectors where the plan says {plan.n}: build it again")
    try:
        shutil.copyfile(shard_file, out)
    except OSError as failed:
        raise ResourceError(f"cannot write {out}: {failed.strerror}") from failed
    return {"rows": rows, "bytes": out.stat().st_size}


def _lists_of(plan: IndexPlan, files: VectorFiles, rows: Rows) -> Lists:
    vectors = files.take(rows)
    links = _links(plan)
    lists = np.empty(len(rows), _record(2 * links))
    if len(rows):
        index = new_graph(plan.d, links, plan.metric, plan.ef_construction)
        index.add(vectors)
        lists["links"] = Bottom(index)[:]
        lists["near"] = similarities(vectors, lists["links"], plan.metric)
    return lists


def _record(width: int) -> np.dtype[Any]:
    return np.dtype([("links", "<i4", (width,)), ("near", "<f4", (width,))])


def _write_lists(lists: Lists, path: Path) -> None:
    try:
        with path.open("wb") as file:
            np.save(file, lists, allow_pickle=False)
    except OSError as failed:
        raise ResourceError(f"cannot write {path}: {failed.strerror}") from failed


def _read_lists(path: Path, width: int, rows: int) -> Lists:
    try:
        lists: Lists = np.load(path, mmap_mode="r" if rows else None, allow_pickle=False)
    except (OSError, ValueError, EOFError) as broken:
        raise InputError(f"{path} is not a whole shard: build it again") from broken
    if lists.shape != (rows,) or lists.dtype != _record(width):
        raise InputError(f"{path} is the shard of another cell or plan: build it again")
    return lists


def _with_storage(plan: IndexPlan, files: VectorFiles) -> FaissIndex:
    """Return an HNSW index that holds every vector and no link."""
    index = faiss.index_factory(plan.d, plan.factory, engine.metric_code(plan.metric))
    index.hnsw.efConstruction = plan.ef_construction
    storage = faiss.downcast_index(index.storage)
    if not storage.is_trained:
        storage.train(files.sample(plan.train_sample, plan.seed))
    for _, block in files.blocks():
        storage.add(block)
    index.ntotal, index.is_trained = plan.n, True
    index.hnsw.efSearch = plan.search["efSearch"]
    return index


def _stitch(index: FaissIndex, cells: Cells, members: Sequence[Rows], lists: Sequence[Lists]) -> None:
    """Write every node's bottom list: the best of what its cells say."""
    bottom = Bottom(index)
    for first, last, candidates, near in _candidates(cells, members, lists, bottom.width):
        bottom[first:last] = best_links(candidates, near, bottom.width)


def _candidates(
    cells: Cells, members: Sequence[Rows], lists: Sequence[Lists], width: int
) -> Iterator[tuple[int, int, Rows, npt.NDArray[np.float32]]]:
    """Yield (first row, last row, candidates, similarities) by block: what one or two cells say of a row."""
    n = len(cells.of_row)
    for first in range(0, n, BLOCK):
        last = min(n, first + BLOCK)
        candidates = np.full((last - first, 2, width), -1, np.int64)
        near = np.full(candidates.shape, -np.inf, np.float32)
        for cell, (rows, found) in enumerate(zip(members, lists, strict=True)):
            low, high = np.searchsorted(rows, (first, last))
            here = rows[low:high]
            place = (cells.of_row[here, 0] != cell).astype(np.int64)  # 0: its own cell, 1: across the border
            links = found["links"][low:high]
            candidates[here - first, place] = np.where(links >= 0, rows[links], -1)
            near[here - first, place] = found["near"][low:high]
        yield first, last, candidates.reshape(last - first, -1), near.reshape(last - first, -1)
