"""The arrays of an HNSW graph: read from faiss, ranked, and laid out as in faiss's files.

faiss keeps every node's links in one array: 2M slots at the bottom level, then M for each level
above; -1 ends a list. The `levels` of faiss count from 1: a node of level 1 is only on the bottom
level, and about one node in M is on more levels.

Reference: Malkov, Yashunin. Efficient and robust approximate nearest neighbor search using
hierarchical navigable small world graphs. PAMI 2020.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from rag_model.arrays import concatenate_ranges, gather_windows, view_windows
from rag_model.errors import InputError
from rag_model.index.factory import HnswSpec, parse_factory
from rag_model.index.files import engine
from rag_model.index.files.engine import FaissIndex, Metric, Rows, Vectors, faiss
from rag_model.index.recipe import VectorPlan

# Node numbers. A list of links has the nodes to which the links lead; -1 is no link, as in faiss's
# files.
Links = npt.NDArray[np.int32]
# Links with their similarities, called keys: the upper half of a key is the similarity, inverted so
# that sorted keys are nearest first; the lower half is the node.
ScoredLinks = npt.NDArray[np.uint64]

BLOCK_NODES = 8_192  # number of nodes that are processed at a time
NO_LINK = np.uint64(0xFFFF_FFFF_FFFF_FFFF)  # larger than the key of every link
SIMILARITY_BITS = np.uint64(0xFFFF_FFFF_0000_0000)  # the bits of a key that hold the similarity
# Candidates for an inserted node of the upper levels. 40 are enough, because upper levels only
# determine where a search begins: over 2,000,000 vectors of 64 dimensions, 40 candidates instead of
# 100 give the same recall at efSearch 128 (.9936), and .0003 less at efSearch 32, in .37 of the
# time.
UPPER_EF_CONSTRUCTION = 40


def count_node_links(plan: VectorPlan) -> int:
    """Return M, the number of links per node above the bottom level of a plan's graph.

    Raises:
        InputError: the plan's factory is not an HNSW graph.
    """
    factory = parse_factory(plan.factory)
    if not isinstance(factory, HnswSpec) or factory.links is None:
        raise InputError(f"the plan names {plan.factory}, which is not an HNSW graph: plan the index again")
    return factory.links


def create_graph(d: int, n_links: int, metric: Metric, ef_construction: int) -> FaissIndex:
    """Return an empty `IndexHNSWFlat` with M = `n_links`."""
    index = faiss.IndexHNSWFlat(d, n_links, engine.to_faiss_metric(metric))
    index.hnsw.efConstruction = ef_construction
    return index


def copy_bottom_links(index: FaissIndex, start: int, end: int) -> Links:
    """Return a copy of the bottom lists of nodes [start, end): (m, 2M) int32, -1 where empty."""
    n_slots = int(index.hnsw.nb_neighbors(0))
    first_slots = engine.view_array(index.hnsw.offsets)[start:end].astype(np.int64)
    return gather_windows(engine.view_array(index.hnsw.neighbors), first_slots, n_slots)


def score_targets(sources: Vectors, vectors: Vectors, links: Rows | Links, metric: Metric) -> Vectors:
    """Return (m, w) float32 similarities of link targets to their sources; -inf without a link.

    Larger is nearer. The result for two vectors has the same bits in both directions.

    Args:
        sources: (m, d) float32.
        vectors: (n, d) float32, the targets.
        links: (m, w) rows of `vectors`, -1 where there is no link.
        metric: inner products, or negated squared distances.
    """
    similarity = np.empty(links.shape, np.float32)
    if not similarity.size:
        return similarity
    compute_scores = faiss.fvec_inner_products_by_idx if metric == "ip" else faiss.fvec_L2sqr_by_idx
    targets = np.ascontiguousarray(links, np.int64)
    pointers = [faiss.swig_ptr(array) for array in (similarity, np.ascontiguousarray(sources), vectors, targets)]
    compute_scores(*pointers, vectors.shape[1], len(sources), links.shape[1])
    return similarity if metric == "ip" else -similarity


def score_pairs(
    sources: Vectors, rows: Rows | Links, vectors: Vectors, targets: Rows | Links, metric: Metric
) -> Vectors:
    """Return (p,) float32: the similarities of pairs of a row of `sources` and a row of `vectors`.

    The results equal the results of `score_targets` in every bit, but no vector is copied.
    """
    similarity = np.empty(len(rows), np.float32)
    compute_scores = faiss.pairwise_indexed_inner_product if metric == "ip" else faiss.pairwise_indexed_L2sqr
    arrays = [
        np.ascontiguousarray(array, dtype)
        for array, dtype in ((sources, np.float32), (rows, np.int64), (vectors, np.float32), (targets, np.int64))
    ]
    compute_scores(vectors.shape[1], len(rows), *map(faiss.swig_ptr, [*arrays, similarity]))
    return similarity if metric == "ip" else -similarity


@dataclass(frozen=True, slots=True)
class CellGraph:
    """The graph of a cell, which a search for members uses, and the bottom lists of the members."""

    index: FaissIndex
    members: Rows  # (m,) the member of each node of `index`
    lists: ScoredLinks  # (m, 2M) links of each member, nearest first

    @classmethod
    def build(cls, plan: VectorPlan, vectors: Vectors) -> Self:
        """Build the graph of a cell's members, (m, d) float32."""
        n_links = count_node_links(plan)
        if engine.can_build_graph(vectors, plan.metric):
            index = engine.build_cagra_graph(vectors, n_links, plan.metric)
        else:
            index = create_graph(plan.d, n_links, plan.metric, plan.ef_construction)
            index.add(vectors)
        lists = np.empty((len(vectors), 2 * n_links), np.uint64)
        for start, end in iter_ranges(len(vectors)):
            targets = copy_bottom_links(index, start, end)  # (b, 2M)
            lists[start:end] = pack_links(score_targets(vectors[start:end], vectors, targets, plan.metric), targets)
        lists.sort(axis=1)
        return cls(index, np.arange(len(vectors)), lists)

    def search(self, queries: Vectors, k: int, ef_search: int) -> Rows:
        """Return (q, k) members near each query, padded with -1."""
        nodes = self.index.search(queries, k, params=faiss.SearchParametersHNSW(efSearch=ef_search))[1]
        return np.where(nodes < 0, -1, self.members[nodes])


def pack_links(similarity: Vectors, links: Rows | Links) -> ScoredLinks:
    """Pack links into keys of the same shape; sorted keys are nearest first. -1 is `NO_LINK`."""
    float_bits = np.ascontiguousarray(similarity).view(np.int32)
    # Map larger floats to smaller unsigned integers: in positive floats, invert all bits but the
    # sign.
    descending_bits = float_bits ^ (~(float_bits >> 31) & np.int32(0x7FFF_FFFF))
    return join_links(descending_bits.view(np.uint32).astype(np.uint64) << np.uint64(32), links)


def join_links(keys: ScoredLinks, links: Rows | Links) -> ScoredLinks:
    """Return `keys`, whose lower 32 bits are 0, with `links` in these bits; -1 gives `NO_LINK`."""
    return keys | links.astype(np.int64).view(np.uint64)  # all bits of -1 are set


def unpack_links(keys: ScoredLinks) -> Links:
    """Return the nodes of keys: int32 of the same shape, -1 for `NO_LINK`."""
    return keys.astype(np.uint32).view(np.int32)


def unpack_similarities(keys: ScoredLinks) -> Vectors:
    """Return the float32 similarities of keys, same shape; undefined for `NO_LINK`."""
    sortable_bits = (~keys >> np.uint64(32)).astype(np.uint32)
    bits = np.where(sortable_bits >> 31, sortable_bits & np.uint32(0x7FFF_FFFF), ~sortable_bits)
    return bits.view(np.float32)


def select_best_links(candidates: ScoredLinks, n_links: int) -> Links:
    """Return (b, n_links) int32: each node's nearest distinct candidates, nearest first, then -1.

    The nearest candidates are the best links. Pruning them by the heuristic of the HNSW paper would
    lose recall, because the source graphs are already pruned.

    Args:
        candidates: (b, c >= n_links) keys; a repeated node has the same similarity each time.
        n_links: number of links in a list.
    """
    keys = np.sort(candidates, axis=1)
    # (b, c) -> (b, c - 1) bool
    is_repeated = (keys[:, 1:] == keys[:, :-1]) & (keys[:, 1:] != NO_LINK)
    repeat_rows = np.flatnonzero(is_repeated[:, : 2 * n_links].any(axis=1))
    distinct_keys = keys[repeat_rows]
    distinct_keys[:, 1:][is_repeated[repeat_rows]] = NO_LINK
    keys[repeat_rows] = np.sort(distinct_keys, axis=1)
    return unpack_links(keys[:, :n_links])  # (b, c) -> (b, n_links)


def draw_levels(n: int, n_links: int) -> Links:
    """Return the levels that faiss draws for `n` nodes added at once: (n,) int32, from 1."""
    hnsw = faiss.HNSW(n_links)
    levels = np.empty(n, np.int32)
    for first_node in range(0, n, BLOCK_NODES):
        hnsw.reset()  # the random generator continues
        n_nodes = min(BLOCK_NODES, n - first_node)
        hnsw.prepare_level_tab(n_nodes)
        levels[first_node : first_node + n_nodes] = engine.copy_array(hnsw.levels)
    return levels


@dataclass(frozen=True, slots=True)
class UpperLevels:
    """The levels above the bottom: an HNSW graph of their nodes."""

    nodes: Rows  # nodes of level > 1, ascending
    link_starts: Rows  # (len(nodes) + 1,): where the links of each node begin
    links: Links  # lists of all upper levels, concatenated by node, lowest level first
    entry_point: int  # node at which every search starts
    top_level: int  # the highest level, counted from 0

    @classmethod
    def build(cls, levels: Links, n_links: int, vectors: Vectors, metric: Metric, ef_construction: int) -> Self:
        """Link the nodes of level > 1 among themselves.

        Args:
            levels: (n,) int32, counted from 1.
            n_links: M.
            vectors: (u, d) float32 of the nodes with level > 1, in order.
            metric: the metric of the similarities.
            ef_construction: candidates for each inserted node.
        """
        nodes = np.flatnonzero(levels > 1)
        if len(nodes) == 0:
            return cls(nodes, np.zeros(1, np.int64), np.empty(0, np.int32), 0, 0)
        upper_graph = create_graph(vectors.shape[1], n_links, metric, ef_construction)
        upper_graph.hnsw.set_nb_neighbors(0, n_links)
        faiss.copy_array_to_vector(levels[nodes] - 1, upper_graph.hnsw.levels)
        upper_graph.add(vectors)
        targets = engine.copy_array(upper_graph.hnsw.neighbors)
        global_links = np.where(targets >= 0, nodes[targets], -1).astype(np.int32)
        offsets = engine.copy_array(upper_graph.hnsw.offsets).astype(np.int64)
        return cls(
            nodes, offsets, global_links, int(nodes[upper_graph.hnsw.entry_point]), int(upper_graph.hnsw.max_level) + 1
        )

    def slice_nodes(self, start: int, end: int) -> tuple[Rows, Links, Rows]:
        """Return the upper nodes in [start, end), their links, and each node's number of links."""
        first_upper, end_upper = np.searchsorted(self.nodes, (start, end))
        starts = self.link_starts[first_upper : end_upper + 1]
        return self.nodes[first_upper:end_upper], self.links[starts[0] : starts[-1]], np.diff(starts)


def count_slots(levels: Links, n_links: int) -> Rows:
    """Return the number of slots of each node, (n,) int64: 2M, plus M per upper level."""
    return (np.int64(2 * n_links) + np.int64(n_links) * (levels.astype(np.int64) - 1)).astype(np.int64)


def iter_ranges(n: int, size: int = BLOCK_NODES) -> Iterator[tuple[int, int]]:
    """Yield ranges [start, end) that cover `n` nodes."""
    for first_item in range(0, n, size):
        yield first_item, min(n, first_item + size)


def lay_out_slots(
    bottom: Links, levels: Links, n_links: int, upper: tuple[Rows, Links, Rows], first_node: int
) -> npt.NDArray[Any]:
    """Return the slots of a block of nodes in file order: bottom list, then upper lists.

    Args:
        bottom: (b, 2M) int32.
        levels: (b,) levels of the block's nodes.
        n_links: M.
        upper: the result of `UpperLevels.slice_nodes` for the block.
        first_node: the block's first node.
    """
    slot_counts = count_slots(levels, n_links)
    slot_starts = np.cumsum(slot_counts) - slot_counts
    link_block = np.full(int(slot_counts.sum()), -1, np.int32)
    windows = view_windows(link_block, bottom.shape[1])
    windows[slot_starts] = np.ascontiguousarray(bottom, np.int32).view(windows.dtype)[:, 0]
    nodes, targets, link_counts = upper
    # (u,) -> (sum of counts,)
    link_starts = np.repeat(slot_starts[nodes - first_node] + bottom.shape[1], link_counts)
    link_block[link_starts + concatenate_ranges(link_counts)] = targets
    return link_block
