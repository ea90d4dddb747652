"""The arrays of an HNSW graph: read from faiss, ranked, and written in faiss's own file layout.

faiss keeps every node's links in one array: 2M slots at the bottom level, then M for each level above; -1 ends a list.
Its `levels` count from 1: a node of level 1 is only on the bottom, and about one node in M is on more levels.

Reference: Malkov, Yashunin. Efficient and robust approximate nearest neighbor search using hierarchical navigable
small world graphs. PAMI 2020.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_model.index.files import engine
from rag_model.index.files.engine import FaissIndex, Metric, Rows, Vectors, faiss

Links = npt.NDArray[np.int32]
Keys = npt.NDArray[np.uint64]  # a link: similarity in the upper half, largest first, and the node in the lower

BLOCK = 8_192  # nodes handled at once
NO_LINK = np.uint64(0xFFFF_FFFF_FFFF_FFFF)  # sorts behind every link


def new_graph(d: int, links: int, metric: Metric, ef_construction: int) -> FaissIndex:
    """Return an empty `IndexHNSWFlat` with M = `links`."""
    index = faiss.IndexHNSWFlat(d, links, engine.metric_code(metric))
    index.hnsw.efConstruction = ef_construction
    return index


def bottom_links(index: FaissIndex, first: int, last: int) -> Links:
    """Return a copy of the bottom lists of nodes [first, last) of an index in memory: (m, 2M) int32, -1 where empty."""
    width = int(index.hnsw.nb_neighbors(0))
    starts = engine.view_of(index.hnsw.offsets)[first:last].astype(np.int64)
    links: Links = engine.view_of(index.hnsw.neighbors)[starts[:, None] + np.arange(width)]  # (m, 1) + (2M,) -> (m, 2M)
    return links


def similarities(sources: Vectors, vectors: Vectors, links: Rows | Links, metric: Metric) -> Vectors:
    """Return (m, w) float32 similarities of link targets to their sources; larger = nearer, -inf where there is no
    link.

    The result for two vectors has the same bits in both directions.

    Args:
        sources: (m, d) float32.
        vectors: (n, d) float32, the targets.
        links: (m, w) rows of `vectors`, -1 where there is no link.
        metric: inner products, or negated squared distances.
    """
    near = np.empty(links.shape, np.float32)
    if not near.size:
        return near
    compare = faiss.fvec_inner_products_by_idx if metric == "ip" else faiss.fvec_L2sqr_by_idx
    rows = np.ascontiguousarray(links, np.int64)
    arrays = [faiss.swig_ptr(array) for array in (near, np.ascontiguousarray(sources), vectors, rows)]
    compare(*arrays, vectors.shape[1], len(sources), links.shape[1])
    return near if metric == "ip" else -near


def keys_of(near: Vectors, links: Rows | Links) -> Keys:
    """Return links as sortable keys of the same shape: ascending keys are the nearest first, `NO_LINK` for -1."""
    bits = np.ascontiguousarray(near).view(np.uint32)
    rising = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))  # integers in the order of the floats
    keys = (~rising).astype(np.uint64) << np.uint64(32) | links.astype(np.uint32)
    return np.where(links < 0, NO_LINK, keys)


def links_of(keys: Keys) -> Links:
    """Return the nodes of keys: int32 of the same shape, -1 for `NO_LINK`."""
    return (keys & np.uint64(0xFFFF_FFFF)).astype(np.uint32).view(np.int32)


def best_links(candidates: Keys, keep: int) -> Links:
    """Return (b, keep) int32: each node's nearest distinct candidates, nearest first, then -1.

    Args:
        candidates: (b, c >= keep) keys; a node may appear more than once, then with the same similarity.
        keep: links that fit in a list. The nearest are kept: pruning by the paper's heuristic instead loses recall
            here, because the source graphs are already pruned.
    """
    ranked = np.sort(candidates, axis=1)
    again = ranked[:, 1:] == ranked[:, :-1]  # (b, c) -> (b, c - 1) bool
    ranked[:, 1:][again] = NO_LINK
    repeats = np.flatnonzero(again[:, : 2 * keep].any(axis=1))
    ranked[repeats] = np.sort(ranked[repeats], axis=1)
    return links_of(ranked[:, :keep])  # (b, c) -> (b, keep)


def levels_of(n: int, links: int) -> Links:
    """Return the levels that faiss would draw for `n` nodes added at once: (n,) int32, from 1."""
    hnsw = faiss.HNSW(links)
    levels = np.empty(n, np.int32)
    for first in range(0, n, BLOCK):
        hnsw.reset()  # does not reset the random generator
        count = min(BLOCK, n - first)
        hnsw.prepare_level_tab(count)
        levels[first : first + count] = engine.array_of(hnsw.levels)
    return levels


@dataclass(frozen=True, slots=True)
class Upper:
    """The levels above the bottom: an HNSW of the nodes that reach them."""

    nodes: Rows  # those of level > 1, ascending
    begins: Rows  # (len(nodes) + 1,): where the links of each node begin
    links: Links  # their lists of all upper levels end to end, the lowest first
    entry: int  # the node at which every search starts
    top: int  # the highest level, from 0

    @classmethod
    def link(cls, levels: Links, links: int, vectors: Vectors, metric: Metric, ef_construction: int) -> "Upper":
        """Link the nodes of level > 1 among themselves.

        Args:
            levels: (n,) int32, from 1.
            links: M.
            vectors: (u, d) float32 of the nodes with level > 1, in order.
            metric: of the similarities.
            ef_construction: candidates while a node is inserted.
        """
        nodes = np.flatnonzero(levels > 1)
        if len(nodes) == 0:
            return cls(nodes, np.zeros(1, np.int64), np.empty(0, np.int32), 0, 0)
        small = new_graph(vectors.shape[1], links, metric, ef_construction)
        small.hnsw.set_nb_neighbors(0, links)
        faiss.copy_array_to_vector(levels[nodes] - 1, small.hnsw.levels)
        small.add(vectors)
        targets = engine.array_of(small.hnsw.neighbors)
        named = np.where(targets >= 0, nodes[targets], -1).astype(np.int32)
        begins = engine.array_of(small.hnsw.offsets).astype(np.int64)
        return cls(nodes, begins, named, int(nodes[small.hnsw.entry_point]), int(small.hnsw.max_level) + 1)

    def within(self, first: int, last: int) -> tuple[Rows, Links, Rows]:
        """Return the upper nodes in [first, last), their links end to end, and the number of links of each."""
        low, high = np.searchsorted(self.nodes, (first, last))
        begins = self.begins[low : high + 1]
        return self.nodes[low:high], self.links[begins[0] : begins[-1]], np.diff(begins)


def slots_of(levels: Links, links: int) -> Rows:
    """Return the slots of each node's lists, (n,) int64: 2M, plus M for each level above the bottom."""
    return (np.int64(2 * links) + np.int64(links) * (levels.astype(np.int64) - 1)).astype(np.int64)


def blocks(n: int, size: int = BLOCK) -> Iterator[tuple[int, int]]:
    """Yield ranges [first, last) over `n` nodes."""
    for first in range(0, n, size):
        yield first, min(n, first + size)


def laid_out(bottom: Links, levels: Links, links: int, upper: tuple[Rows, Links, Rows], first: int) -> npt.NDArray[Any]:
    """Return the slots of a block of nodes in file order: each node's bottom list, then its upper lists.

    Args:
        bottom: (b, 2M) int32.
        levels: (b,) of the block's nodes.
        links: M.
        upper: the result of `Upper.within` for the block.
        first: the block's first node.
    """
    slots = slots_of(levels, links)
    starts = np.cumsum(slots) - slots
    block = np.full(int(slots.sum()), -1, np.int32)
    block[starts[:, None] + np.arange(bottom.shape[1])] = bottom  # (b, 1) + (2M,) -> (b, 2M)
    nodes, targets, counts = upper
    begins = np.repeat(starts[nodes - first] + bottom.shape[1], counts)  # (u,) -> (sum of counts,)
    block[begins + _count_up(counts)] = targets
    return block


def _count_up(counts: Rows) -> Rows:
    """Return 0 … c-1 for each count c, end to end."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
