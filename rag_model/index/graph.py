"""The arrays of an HNSW graph: read out of faiss, stitched from several graphs, written back.

faiss keeps every node's links in one array: 2M slots at the bottom level, then M for each level above; -1
ends a list. Its `levels` count from 1: a node of level 1 is on the bottom only, and about one node in M is on
more.

Reference: Malkov, Yashunin. Efficient and robust approximate nearest neighbor search using hierarchical
navigable small world graphs. PAMI 2020.
"""

import numpy as np
import numpy.typing as npt

from rag_model.index import engine
from rag_model.index.engine import FaissIndex, Metric, Rows, Vectors, faiss

Links = npt.NDArray[np.int32]

BLOCK = 8_192  # nodes handled at once


def new_graph(d: int, links: int, metric: Metric, ef_construction: int) -> FaissIndex:
    """Return an empty `IndexHNSWFlat` with M = `links`."""
    index = faiss.IndexHNSWFlat(d, links, engine.metric_code(metric))
    index.hnsw.efConstruction = ef_construction
    return index


class Bottom:
    """The bottom level of an index in memory: what is written here is in the graph."""

    def __init__(self, index: FaissIndex) -> None:
        """Look at the arrays of an index; the view lives as long as the index, and not longer."""
        self.n, self.width = int(index.ntotal), int(index.hnsw.nb_neighbors(0))
        self._starts = engine.array_of(index.hnsw.offsets)[:-1].astype(np.int64)
        self._links = engine.view_of(index.hnsw.neighbors)

    def __getitem__(self, nodes: Rows | slice) -> Links:
        """Return a copy of the nodes' lists: (m, 2M) int32 node numbers, -1 where empty."""
        links: Links = self._links[self._slots(nodes)]
        return links

    def __setitem__(self, nodes: Rows | slice, links: Links) -> None:
        """Write the nodes' lists: (m, 2M) int32, filled from the left."""
        self._links[self._slots(nodes)] = links

    def degree(self) -> float:
        """Return the mean number of links of a node."""
        total = sum(int((self[first : first + BLOCK] >= 0).sum()) for first in range(0, self.n, BLOCK))
        return round(total / max(1, self.n), 2)

    def _slots(self, nodes: Rows | slice) -> Rows:
        slots: Rows = self._starts[nodes][:, None] + np.arange(self.width)
        return slots


def similarities(vectors: Vectors, links: Links, metric: Metric) -> Vectors:
    """Return (n, 2M) float32: how near each link's target is, larger = nearer, -inf where a slot is empty."""
    near = np.full(links.shape, -np.inf, np.float32)
    block = max(1, (64 << 20) // (4 * vectors.shape[1] * max(1, links.shape[1])))
    for first in range(0, len(links), block):
        ids = links[first : first + block]
        targets, sources = vectors[np.maximum(ids, 0)], vectors[first : first + block]
        if metric == "ip":
            score = np.matmul(targets, sources[:, :, None])[..., 0]
        else:
            score = -np.square(targets - sources[:, None, :]).sum(axis=2)
        near[first : first + block] = np.where(ids >= 0, score, -np.inf)
    return near


def best_links(candidates: Rows, near: Vectors, keep: int) -> Links:
    """Return (b, keep) int32: each node's nearest distinct candidates, nearest first, then -1.

    Args:
        candidates: (b, c) node numbers, -1 where empty; a node may appear more than once, equally near.
        near: (b, c) similarities.
        keep: links a list has room for. The nearest are kept: pruning by the paper's heuristic instead loses
            recall here, because the graphs that the lists come from were pruned already.
    """
    order = np.argsort(candidates, axis=1, kind="stable")
    candidates, near = np.take_along_axis(candidates, order, 1), np.take_along_axis(near, order, 1)
    again = np.zeros(candidates.shape, bool)
    again[:, 1:] = candidates[:, 1:] == candidates[:, :-1]
    near = np.where(again | (candidates < 0), -np.inf, near)
    order = np.argsort(-near, axis=1, kind="stable")[:, :keep]
    best = np.take_along_axis(candidates, order, 1)
    return np.where(np.isneginf(np.take_along_axis(near, order, 1)), -1, best).astype(np.int32)


def levels_of(n: int, links: int) -> Links:
    """Return the levels that faiss would draw for `n` nodes added at once: (n,) int32, from 1."""
    hnsw = faiss.HNSW(links)
    levels = np.empty(n, np.int32)
    for first in range(0, n, BLOCK):
        hnsw.reset()  # keeps the random generator where it stands
        count = min(BLOCK, n - first)
        hnsw.prepare_level_tab(count)
        levels[first : first + count] = engine.array_of(hnsw.levels)
    return levels


def prepare(index: FaissIndex, levels: Links) -> None:
    """Give an index without nodes room for `len(levels)` of them, all lists empty."""
    faiss.copy_array_to_vector(levels, index.hnsw.levels)
    index.hnsw.prepare_level_tab(len(levels), True)


def add_upper_levels(index: FaissIndex, levels: Links, vectors: Vectors) -> None:
    """Link the levels above the bottom: they are an HNSW of the nodes that reach them.

    Args:
        index: prepared with `levels`.
        levels: (n,) int32, from 1.
        vectors: (u, d) float32: those of the nodes with level > 1, in order.
    """
    upper = np.flatnonzero(levels > 1)
    hnsw = index.hnsw
    if len(upper) == 0:
        hnsw.entry_point, hnsw.max_level = 0, 0
        return
    small = faiss.IndexHNSWFlat(index.d, hnsw.nb_neighbors(1), index.metric_type)
    small.hnsw.set_nb_neighbors(0, hnsw.nb_neighbors(1))
    small.hnsw.efConstruction = hnsw.efConstruction
    faiss.copy_array_to_vector(levels[upper] - 1, small.hnsw.levels)
    small.add(vectors)
    _copy_above(index, small, upper)
    hnsw.entry_point, hnsw.max_level = int(upper[small.hnsw.entry_point]), small.hnsw.max_level + 1


def _copy_above(index: FaissIndex, small: FaissIndex, upper: Rows) -> None:
    """Copy the lists of `small`'s nodes behind the bottom lists of the nodes they stand for."""
    begins = engine.array_of(small.hnsw.offsets).astype(np.int64)
    links = engine.array_of(small.hnsw.neighbors)
    starts = engine.array_of(index.hnsw.offsets)[:-1].astype(np.int64)[upper] + index.hnsw.nb_neighbors(0)
    shift = np.repeat(starts - begins[:-1], np.diff(begins))
    view = engine.view_of(index.hnsw.neighbors)
    view[np.arange(len(links)) + shift] = np.where(links >= 0, upper[links], -1)
