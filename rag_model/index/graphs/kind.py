"""The kind `hnsw`: one graph per cell, built separately and stitched into one faiss graph.

faiss cannot merge HNSW graphs. But the graph of a cell already has good neighbours for each of its
vectors within the cell, and a vector near a border is also in the graph of the second cell or
linked into it. The merge unites the lists of each vector, keeps the best 2M, links the few nodes of
the upper levels again, and makes every node reachable: the result is one HNSW graph over the
corpus.

The merge keeps neither all vectors nor the whole graph in memory: it writes both in blocks, in
faiss's own file layout.

Vectors of unequal norm (DPR's) are linked by their inner products. The usual alternative appends a
dimension that makes all norms equal (Bachrach et al., RecSys 2014). Both methods were compared with
one graph that faiss built by inner product, over 40,000 x 96 vectors in 4 cells with log-normal
norms of sigma .05, .15 and .5, at equal distance computations and efSearch 64. The appended
dimension lost .03, .19 and .45 of recall@20; links by inner product, with the repair, gained .001,
.009 and .004.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np

from rag_model.arrays import match_digests
from rag_model.digest import digest_json
from rag_model.errors import InputError, ResourceError
from rag_model.index.files import engine
from rag_model.index.files.engine import FaissIndex, Rows, Vectors, faiss
from rag_model.index.files.pieces import Opener, PieceReader, path_opener, write_piece
from rag_model.index.files.vectors import VectorFiles, sample_vectors
from rag_model.index.graphs.cells import (
    MAX_CELL_RATIO,
    Cells,
    CellVectors,
    count_cell_sample,
    learn_cells,
    merge_small_cells,
    read_group_rows,
    redact_cells,
    split_large_cells,
    unpack_slices,
    write_cell_slices,
)
from rag_model.index.graphs.graph import (
    BLOCK_NODES,
    UPPER_EF_CONSTRUCTION,
    CellGraph,
    Links,
    ScoredLinks,
    UpperLevels,
    count_node_links,
    draw_levels,
    iter_ranges,
    lay_out_slots,
    select_best_links,
)
from rag_model.index.graphs.graph_file import write_head, write_storage, write_tail
from rag_model.index.graphs.history import CellHistory, CellQuality
from rag_model.index.graphs.reach import link_unreachable_nodes
from rag_model.index.graphs.stitch import (
    CellShard,
    GraphShard,
    collect_candidates,
    get_cell_inputs,
    link_across_border,
)
from rag_model.index.plan import IndexStats
from rag_model.index.quality.health import compute_centroid_distance, measure_error
from rag_model.index.recipe import MERGE_THREADS, IndexRecipe, VectorPlan, choose_search
from rag_model.index.vector_kind import (
    BYTES_PER_SECOND,
    KMEANS_ROUNDS,
    PRODUCTS_PER_SECOND,
    VectorKind,
)
from rag_model.process import count_cores

_THREAD_NODES = 8_192  # upper nodes per thread while upper levels are linked
_MAX_BLOCKS = 8  # candidates are collected for this many blocks at once, at most; 6 MB each
# Number of vectors from which the losses are measured; at most twice as many are used.
LOSS_SAMPLE = 4_096
# Seconds of one core, per dimension and candidate, to insert a vector into a graph of
# `_REFERENCE_NODES`.
_INSERT_SECONDS = 4.3e-9  # fitted to builds of 20,000 to 200,000 vectors (`bench_plan.py`)
# Time of an insertion besides its products, as the dimensions whose products take as long.
_INSERT_OVERHEAD_DIMS = 140
_REFERENCE_NODES = 20_000
# Inserting a vector costs this power of the number of nodes: .31 at 96 dimensions, .55 at 768.
_GROWTH_EXPONENT = 0.35
# Time to write a node's links, as the number of dimensions of a vector that is copied in this time.
_MERGE_OVERHEAD_DIMS = 300
_UPDATE_SHARE = 0.1  # time to update a cell with 2 % new vectors, as a share of its build time
_MAX_CELL_GROWTH = 1.25  # maximum ratio of planned to parent cells at which no cell is added
_MIN_NODES_PER_LINK = 4  # minimum nodes per cell, as a multiple of the links per node


class GraphKind(VectorKind):
    """HNSW: `HNSW32`, `HNSW32_SQ8`, `HNSW32_SQfp16`."""

    name: ClassVar[str] = "hnsw"
    VERSION: ClassVar[int] = 13
    threaded: ClassVar[bool] = True
    factories = re.compile("HNSW")

    def steady(self, recipe: IndexRecipe, plan: VectorPlan, parent_inputs: Mapping[str, Any]) -> VectorPlan:
        """Keep the parent's number of cells if the recipe sets no number and the planned one is
        close.

        A corpus grows a little every month, and a new cell would take vectors from others, whose
        graphs would change. A shrinking corpus keeps its cells longer, since small cells cost
        little. If the corpus has shrunk below half of its size, only the excess cells are merged,
        so that few vectors change their cell.
        """
        parent_cells = parent_inputs.get("cells", 0)
        n_cells = min(parent_cells, MAX_CELL_RATIO * plan.cells)
        is_close = n_cells > 1 and plan.cells / _MAX_CELL_GROWTH <= n_cells >= parent_cells / MAX_CELL_RATIO
        if recipe.cells is not None or not is_close or plan.n < n_cells * count_node_links(plan) * _MIN_NODES_PER_LINK:
            return plan
        return replace(plan, cells=n_cells, border=recipe.border, linked=recipe.linked)

    def can_follow(self, plan: VectorPlan, parent_inputs: Mapping[str, Any]) -> bool:
        """Return whether the plan differs from the parent's only in the number of cells, by at most
        a factor of `MAX_CELL_RATIO`.
        """
        parent_cells = parent_inputs.get("cells", 0)
        min_cells, max_cells = sorted((parent_cells, plan.cells)) if isinstance(parent_cells, int) else (0, 0)
        is_close = 1 < min_cells < max_cells <= MAX_CELL_RATIO * min_cells
        return is_close and {**parent_inputs, "cells": plan.cells} == plan.piece_inputs()

    def train(self, plan: VectorPlan, rows: Sequence[Path], out: Path) -> IndexStats:
        """Learn the cells of the corpus and the storage's quantiser from a sample.

        Raises:
            InputError: the vectors do not match the plan, or the sample holds a NaN or an infinity.
            ResourceError: memory ran out, or the file cannot be written.
        """
        index, sample = _create_index(plan), _read_sample(plan, rows)
        index.train(sample)
        return _write_trained_file(plan, learn_cells(plan, sample), index, sample, out)

    def follow(self, plan: VectorPlan, trained: Path, rows: Sequence[Path], out: Path) -> IndexStats:
        """Merge the smallest cells if there are too many; split large cells until there are enough.

        The other cells keep their numbers, except those that get the number of a merged cell. The
        statistics contain the previous number of each cell (`previous_shards`).

        Raises:
            InputError: the trained file is damaged, the vectors do not match the plan, or the
                sample holds a NaN or an infinity.
            ResourceError: memory ran out, or the file cannot be written.
        """
        sample = sample_vectors(rows, plan.n, plan.d, count_cell_sample(plan), plan.seed)
        cells, index = _load_trained_file(plan, trained)
        merged_cells, previous_numbers = merge_small_cells(plan, cells, sample)
        stats = _write_trained_file(plan, split_large_cells(plan, merged_cells, sample), index, sample, out)
        has_merged = len(previous_numbers) < len(cells.centroids)
        return stats | ({"previous_shards": previous_numbers} if has_merged else {})

    def redact(
        self,
        plan: VectorPlan,
        trained: Path,
        rows: Sequence[Path],
        removed: Iterable[Vectors],
        out: Path,
    ) -> IndexStats:
        """Write the trained file without a trace of `removed`, blocks of (r, d) float32 vectors.

        Cells that cannot contain a removed vector stay unchanged. The storage's quantiser is
        trained again, since no graph depends on it. If a cell has only removed vectors, everything
        is trained again.

        Raises:
            InputError: the trained file is damaged, the vectors do not match the plan, or the
                sample holds a NaN or an infinity.
            ResourceError: memory ran out, or the file cannot be written.
        """
        index, sample = _create_index(plan), _read_sample(plan, rows)
        cells = redact_cells(plan, _load_trained_file(plan, trained)[0], sample, removed)
        index.train(sample)
        stats = _write_trained_file(plan, cells or learn_cells(plan, sample), index, sample, out)
        return stats if cells else stats | {"reason": "a cell held only vectors that were removed"}

    def losses(self, plan: VectorPlan, trained: Path, vectors: Vectors) -> dict[str, float]:
        """Return the losses of vectors, (m, d) float32: `cells`, `links` and `codes`.

        `cells` is the distance to the cells' centroids, and `codes` the error of the codes. `links`
        is the planned number of links across borders per vector, divided by the actual number:
        with too few of them, a walk cannot reach all graphs.

        Raises:
            InputError: the trained file is damaged or of another plan.
        """
        return _compute_losses(plan, *_load_trained_file(plan, trained), vectors)

    def scatter(self, plan: VectorPlan, trained: Path, rows: Path, number: int, out: Path) -> IndexStats:
        """Sort a part's vectors by cell.

        Raises:
            InputError: a file is damaged or of another plan, or a row holds a NaN or an infinity.
            ResourceError: the file cannot be written.
        """
        files, (cells, _) = VectorFiles([rows]), _load_trained_file(plan, trained)
        if files.dim != plan.d:
            raise InputError(f"{rows} has {files.dim} dimensions, not the plan's {plan.d}: plan the index again")
        group_starts = write_cell_slices(plan, trained, cells, files, number, out)
        return {"rows": files.n, "written": int(group_starts[-1]), "bytes": out.stat().st_size}

    def shard(self, plan: VectorPlan, trained: Path, slices: Iterable[bytes], number: int, out: Path) -> IndexStats:
        """Build a cell's graph, link it to vectors of other cells, and write its bottom lists.

        Each link is stored with its similarity. Memory holds two copies of the cell's vectors, and
        the cell's graph.

        Raises:
            InputError: a slice does not hold vectors of the plan.
            ResourceError: memory ran out, or the file cannot be written.
        """
        members, sources = unpack_slices(slices, plan.d)
        with _translate_errors(plan, number):
            shard = _build_shard(plan, members, sources)
        shard.write(plan, number, out)
        return _describe_shard(shard, len(members.digests), out)

    def update(
        self,
        plan: VectorPlan,
        trained: Path,
        slices: Iterable[bytes],
        number: int,
        previous: Opener,
        out: Path,
    ) -> IndexStats:
        """Update the graph of an earlier build's cell, or build it again if `CellHistory` gives a
        reason.

        The result depends only on the slices and the earlier shard.

        Raises:
            InputError: a slice does not hold vectors of the plan, or the earlier shard is damaged
                or of another build.
            ResourceError: memory ran out, or the file cannot be written.
        """
        earlier_shard = CellShard.read(plan, previous)
        new_members, sources = unpack_slices(slices, plan.d)
        old_members = match_digests(earlier_shard.history.members, new_members.digests)
        n_inserted = int((old_members < 0).sum())
        history = earlier_shard.history.after_update(old_members, new_members, sources)
        with _translate_errors(plan, number):
            reason = history.explain_rebuild(n_inserted)
            if reason is None:
                shard, reason = _update_shard(plan, earlier_shard, history, old_members, new_members, sources)
            if reason is not None:
                shard, n_inserted = _build_shard(plan, new_members, sources), len(new_members.digests)
        shard.write(plan, number, out)
        return _describe_shard(shard, n_inserted, out) | ({"reason": reason} if reason else {})

    def merge(
        self,
        plan: VectorPlan,
        trained: Path,
        rows: Sequence[Path],
        scattered: Sequence[Opener],
        shards: Sequence[Opener],
        out: Path,
    ) -> IndexStats:
        """Stitch the cells' graphs into one index over all vectors.

        Memory holds about 20 bytes per vector, and two copies of the vectors of the upper levels
        (one in M vectors). Several threads (`MERGE_THREADS`) link the upper levels and the
        unreachable nodes, because the merge of an index is a single task; faiss from 1.15.1 on
        builds the same graph with any number of threads.

        Raises:
            InputError: a piece is missing, truncated, or of another build.
            ResourceError: memory ran out, or the file cannot be written.
        """
        files, (_, empty_index) = VectorFiles.open_checked(rows, plan.n, plan.d), _load_trained_file(plan, trained)
        with (
            _open_shards(plan, trained, scattered, shards) as graph_shards,
            engine.translate_errors(
                ResourceError, f"cells of {plan.factory} could not be merged: run with --debug for the cause"
            ),
        ):
            levels = draw_levels(plan.n, count_node_links(plan))
            upper_levels = _build_upper_levels(plan, levels, files)
            try:
                with out.open("wb", buffering=1 << 20) as file:
                    write_head(file, empty_index, levels)
                    _write_links(plan, file, graph_shards, levels, upper_levels)
                    write_tail(file, empty_index, upper_levels, choose_search(plan.factory)["efSearch"])
                    write_storage(
                        file, faiss.downcast_index(empty_index.storage), plan.n, (block for _, block in files.blocks())
                    )
            except OSError as error:
                raise ResourceError(f"cannot write {out}: {error.strerror}") from error
        with engine.use_threads(_count_merge_threads()):
            n_repaired = link_unreachable_nodes(out, files)
        return {"rows": plan.n, "bytes": out.stat().st_size, "unreachable_repaired": n_repaired}

    def seconds(self, plan: VectorPlan, stage: str, rows: int, size: int, *, inherited: bool = False) -> float:
        """Return the estimated seconds of one task of a stage on one core."""
        if stage == "train":
            n_products = KMEANS_ROUNDS * count_cell_sample(plan) * plan.cells * plan.d
            return 1 if inherited else 0.1 + n_products / PRODUCTS_PER_SECOND
        if stage == "scatter":  # size / (2 d) rows of float16, each compared with all cells
            return size / BYTES_PER_SECOND + size / 2 * plan.cells / PRODUCTS_PER_SECOND
        if stage == "shard":
            n_candidates: float = (
                rows * (1 + plan.linked / 2) * plan.ef_construction * (rows / _REFERENCE_NODES) ** _GROWTH_EXPONENT
            )
            time_share = _UPDATE_SHARE if inherited else 1
            return time_share * n_candidates * (_INSERT_OVERHEAD_DIMS + plan.d) * _INSERT_SECONDS
        return 1.1 * plan.n * (_MERGE_OVERHEAD_DIMS + plan.d) / BYTES_PER_SECOND


def _translate_errors(plan: VectorPlan, cell_number: int) -> AbstractContextManager[None]:
    return engine.translate_errors(
        ResourceError, f"cell {cell_number} of {plan.factory} could not be built: run with --debug for the cause"
    )


def _build_shard(plan: VectorPlan, members: CellVectors, sources: CellVectors) -> CellShard:
    graph = CellGraph.build(plan, members.vectors)
    cross_links = link_across_border(graph, members.vectors, sources.vectors, plan.metric)
    quality = CellQuality.measure(graph, members.vectors, plan.metric)
    return CellShard(graph.lists, cross_links, CellHistory.from_build(members, sources, quality))


def _update_shard(
    plan: VectorPlan,
    earlier_shard: CellShard,
    history: CellHistory,
    old_members: Rows,
    members: CellVectors,
    sources: CellVectors,
) -> tuple[CellShard, str | None]:
    """Return the updated shard; and the reason to build the cell again instead, or None."""
    # Imports numba, which takes half a second.
    from rag_model.index.graphs.update import SEARCH_TURNS, update_cell_graph, update_cross_links  # noqa: PLC0415

    old_sources = match_digests(earlier_shard.history.sources, sources.digests)
    graph = update_cell_graph(plan, earlier_shard.lists, old_members, members.vectors)
    quality = CellQuality.measure(graph, members.vectors, plan.metric, history.built_quality)
    reason = quality.explain_decay(history.built_quality)
    cross_links = update_cross_links(
        plan,
        earlier_shard.cross_links,
        earlier_shard.lists,
        old_members,
        old_sources,
        graph,
        members.vectors,
        sources.vectors,
        sources.digests % SEARCH_TURNS == history.generation % SEARCH_TURNS,
    )
    return CellShard(graph.lists, cross_links, history), reason


def _describe_shard(shard: CellShard, n_inserted: int, out: Path) -> IndexStats:
    history = shard.history
    return {
        "rows": len(history.members),
        "linked": len(history.sources),
        "inserted": n_inserted,
        "generation": history.generation,
        "replaced": round(history.replaced_share, 4),
        "bytes": out.stat().st_size,
    }


def _count_merge_threads() -> int:
    """Return the number of threads that link upper levels and unreachable nodes."""
    return min(MERGE_THREADS, count_cores())


def _create_index(plan: VectorPlan) -> FaissIndex:
    """Return an untrained index without vectors."""
    index = faiss.index_factory(plan.d, plan.factory, engine.to_faiss_metric(plan.metric))
    index.hnsw.efConstruction = plan.ef_construction
    return index


def _read_sample(plan: VectorPlan, row_files: Sequence[Path]) -> Vectors:
    """Return the vectors that cells and the storage's quantiser are trained on."""
    n_sampled = count_cell_sample(plan)
    if not _create_index(plan).is_trained:
        n_sampled = max(n_sampled, plan.train_sample)
    return sample_vectors(row_files, plan.n, plan.d, n_sampled, plan.seed)


def _compute_losses(plan: VectorPlan, cells: Cells, empty_index: FaissIndex, vectors: Vectors) -> dict[str, float]:
    losses_by_name = {}
    if plan.cells > 1:
        cell_numbers, join_pairs, link_pairs = cells.assign(plan.metric, vectors)
        losses_by_name["cells"] = compute_centroid_distance(vectors, cells.centroids[cell_numbers], plan.metric)
        n_planned, n_actual = plan.border + plan.linked, (len(join_pairs[0]) + len(link_pairs[0])) / len(vectors)
        losses_by_name["links"] = n_planned / max(n_actual, n_planned / 100) if n_planned else 0.0
    storage = faiss.downcast_index(empty_index.storage)
    if not isinstance(storage, faiss.IndexFlat):
        losses_by_name["codes"] = measure_error(vectors, storage.sa_decode(storage.sa_encode(vectors)))
    return {name: float(f"{loss:.4g}") for name, loss in losses_by_name.items()}


def _write_trained_file(
    plan: VectorPlan, cells: Cells, empty_index: FaissIndex, sample: Vectors, out: Path
) -> IndexStats:
    write_piece(out, _compute_trained_stamp(plan), [*cells.to_arrays(), faiss.serialize_index(empty_index)])
    sample_losses = _compute_losses(plan, cells, empty_index, sample[:: -(-len(sample) // LOSS_SAMPLE)])
    return {"sample": len(sample), "cells": len(cells.centroids), "losses": sample_losses}


def _compute_trained_stamp(plan: VectorPlan) -> str:
    return digest_json([get_cell_inputs(plan), "trained"])


def _load_trained_file(plan: VectorPlan, trained: Path) -> tuple[Cells, FaissIndex]:
    """Read the file that `train` wrote: the cells, and the index without vectors."""
    try:
        with PieceReader.open(
            path_opener(trained), _compute_trained_stamp(plan), 3, f"the trained file {trained}"
        ) as piece:
            return Cells.from_arrays(piece.read(0), piece.read(1)), engine.parse_index(piece.read(2), str(trained))
    except OSError as error:
        raise InputError(f"cannot read the trained file {trained}: {error.strerror}") from error


@contextmanager
def _open_shards(
    plan: VectorPlan, trained: Path, scattered: Sequence[Opener], shards: Sequence[Opener]
) -> Iterator[list[GraphShard]]:
    group_rows = read_group_rows(plan, trained, scattered)
    with ExitStack() as stack:
        graph_shards = []
        for i, shard_opener in enumerate(shards):
            shard = GraphShard.open(plan, shard_opener, i, group_rows[2 * i], group_rows[2 * i + 1])
            stack.callback(shard.piece.close)
            graph_shards.append(shard)
        yield graph_shards


def _build_upper_levels(plan: VectorPlan, levels: Links, files: VectorFiles) -> UpperLevels:
    vectors = files.read_rows(np.flatnonzero(levels > 1))
    n_candidates = min(UPPER_EF_CONSTRUCTION, plan.ef_construction)
    # With few nodes, threads would spend more time waiting for each other than linking nodes.
    with engine.use_threads(min(_count_merge_threads(), 1 + len(vectors) // _THREAD_NODES)):
        return UpperLevels.build(levels, count_node_links(plan), vectors, plan.metric, n_candidates)


def _write_links(
    plan: VectorPlan, file: BinaryIO, shards: Sequence[GraphShard], levels: Links, upper_levels: UpperLevels
) -> None:
    """Write the lists of every node; the bottom list holds the best candidates of its cells."""
    n_links = count_node_links(plan)
    for block_start, keys in _iter_candidates(plan, shards, 2 * n_links):
        for start_row, end_row in iter_ranges(len(keys)):
            first, end = block_start + start_row, block_start + end_row
            bottom = select_best_links(keys[start_row:end_row], 2 * n_links)
            file.write(
                lay_out_slots(bottom, levels[first:end], n_links, upper_levels.slice_nodes(first, end), first).data
            )


def _iter_candidates(plan: VectorPlan, shards: Sequence[GraphShard], width: int) -> Iterator[tuple[int, ScoredLinks]]:
    """Yield the first row of each block, and the candidates of the block.

    A second thread collects the candidates of the next block while the caller ranks and writes the
    current ones. The two threads take equally long, and no other task needs the second core during
    the merge.
    """
    ranges = [*iter_ranges(plan.n, _choose_block_rows(len(shards)))]
    with ThreadPoolExecutor(1) as executor:
        pending_keys = [executor.submit(collect_candidates, shards, *next_range, width) for next_range in ranges[:1]]
        for next_index, (first_row, _) in enumerate(ranges, 1):
            keys = pending_keys.pop().result()
            pending_keys = [
                executor.submit(collect_candidates, shards, *next_range, width)
                for next_range in ranges[next_index : next_index + 1]
            ]
            yield first_row, keys


def _choose_block_rows(n_cells: int) -> int:
    """Return the number of rows whose candidates are collected at once.

    Every block has a few rows of each cell, and opening a cell takes the time of a hundred rows.
    With a fixed number of rows, the time of the merge would be quadratic in the size of the corpus.
    More than eight times `BLOCK_NODES` rows would need too much memory.
    """
    return BLOCK_NODES * min(_MAX_BLOCKS, max(1, n_cells // 16))


KIND = GraphKind()
