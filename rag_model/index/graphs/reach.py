"""Reachability: a search can find a node only if a walk from the entry point reaches it.

Duplicates, outliers and inner products of unequal norms leave unreachable nodes, both in a graph
built at once and in a stitched one. The graph is memory-mapped and changed in its file, so it need
not fit in memory.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from rag_model.index.files import engine
from rag_model.index.files.engine import FaissIndex, Rows, Vectors, faiss
from rag_model.index.files.vectors import VectorFiles
from rag_model.index.graphs.graph import BLOCK_NODES, Links
from rag_model.index.graphs.graph_file import GraphFile

_MAX_SOURCES = 16  # maximum number of reachable nodes to try as the source of a new link
_EF_SEARCH = 64  # efSearch of the search for these sources


class ReachabilityTree:
    """The tree of nodes that a walk on the bottom level reaches from the entry point."""

    def __init__(self, graph: GraphFile) -> None:
        """Walk a graph breadth first; memory holds 8 bytes per node."""
        self._graph = graph
        self._parent = np.full(graph.n, -1, np.int32)
        # the reached nodes, in the order of the walk, and their count
        self._queue, self._n_reached = np.empty(graph.n, np.int32), 0
        self._last_node = graph.entry_point
        self._parent[self._last_node] = self._last_node
        self._walk_from(self._last_node)

    def find_unreachable(self) -> Rows:
        """Return the unreachable nodes, ascending."""
        return np.flatnonzero(self._parent < 0)

    def is_reachable(self, nodes: Rows | int) -> npt.NDArray[np.bool_]:
        """Return a mask of the reachable nodes among `nodes`."""
        reachable_mask: npt.NDArray[np.bool_] = np.asarray(self._parent[nodes] >= 0)
        return reachable_mask

    def link(self, node: int, sources: Rows) -> None:
        """Add a link from one of `sources` to `node`, and continue the walk at `node`.

        The sources are reachable nodes, nearest first. The chosen source is the first one with an
        empty slot, or else the first one with a link outside the tree. So no other node becomes
        unreachable, and few nodes lose a link to a near node. If there is no such source, the node
        reached last is chosen: it is a leaf of the tree, so all its links can be replaced.
        """
        candidates = [*sources.tolist(), self._last_node]
        link_lists = self._graph.read_links(np.array(candidates))
        for free_slots in (link_lists < 0, self._find_replaceable(candidates, link_lists)):
            for source, links, is_free in zip(candidates, link_lists, free_slots, strict=True):
                if is_free.any():
                    links[np.flatnonzero(is_free)[0 if links[-1] < 0 else -1]] = node
                    self._graph.write_links(np.array([source]), links[None])
                    self._parent[node] = source
                    self._last_node = node
                    self._walk_from(node)
                    return
        raise AssertionError("a leaf of the walk has no free slot for a link")

    def _find_replaceable(self, candidates: list[int], lists: Links) -> npt.NDArray[np.bool_]:
        """Return a (w, 2M) mask of the slots in `lists` that do not contain a link of the tree."""
        parents = self._parent[lists]
        replaceable_mask: npt.NDArray[np.bool_] = (lists < 0) | (parents != np.array(candidates)[:, None])
        return replaceable_mask

    def _walk_from(self, start_node: int) -> None:
        """Mark all nodes reachable from `start_node`, breadth first."""
        front_start, front_end = self._n_reached, self._n_reached + 1
        self._queue[front_start] = start_node
        self._n_reached = front_end
        while front_start < front_end:
            for position in range(front_start, front_end, BLOCK_NODES):
                nodes = self._expand_front(self._queue[position : min(position + BLOCK_NODES, front_end)])
                self._queue[self._n_reached : self._n_reached + len(nodes)] = nodes
                self._n_reached += len(nodes)
            front_start, front_end = front_end, self._n_reached
            self._last_node = int(self._queue[front_end - 1])

    def _expand_front(self, front_nodes: Links) -> Links:
        """Mark the unreached nodes that `front_nodes` link to; return them, ascending."""
        targets = self._graph.read_links(front_nodes).ravel()  # (f, 2M) -> (f 2M,)
        new_slots = np.flatnonzero((targets >= 0) & (self._parent.take(targets) < 0))[::-1]
        new_targets = targets[new_slots]
        # Of several values for a target, numpy keeps the last one. Because `new_slots` descends,
        # that is the first of the `front_nodes` that links to the target.
        self._parent[new_targets] = front_nodes[new_slots // self._graph.width]
        return np.unique(new_targets)


def link_unreachable_nodes(path: Path, vectors: VectorFiles) -> int:
    """Link every unreachable node of an index file into its graph, in place; return their number.

    The new link comes from the nearest reachable node that a search finds. A graph without
    unreachable nodes is not changed.

    Raises:
        InputError: the file is not a complete HNSW index, or a row of `vectors` holds a NaN or an
            infinity.
    """
    tree = ReachabilityTree(GraphFile.open(path, writable=True))
    unreachable_nodes = tree.find_unreachable()
    if not len(unreachable_nodes):
        return 0
    l2_index = _open_for_l2(path)
    for batch_start in range(0, len(unreachable_nodes), BLOCK_NODES):
        nodes = unreachable_nodes[batch_start : batch_start + BLOCK_NODES]
        for node, neighbors in zip(nodes.tolist(), _search_neighbors(l2_index, vectors.read_rows(nodes)), strict=True):
            if not tree.is_reachable(node):  # a previous link may have made it reachable
                near_sources = neighbors[neighbors >= 0]
                tree.link(node, near_sources[tree.is_reachable(near_sources)])
    return len(unreachable_nodes)


def _open_for_l2(path: Path) -> FaissIndex:
    """Open an index to search it by L2, because by inner product a search with a short vector
    returns only long vectors.
    """
    l2_index = engine.read_index(path, mmap=True)
    storage = faiss.downcast_index(l2_index.storage)
    l2_index.metric_type = storage.metric_type = faiss.METRIC_L2
    return l2_index


def _search_neighbors(index: FaissIndex, vectors: Vectors) -> Rows:
    parameters = faiss.SearchParametersHNSW(efSearch=_EF_SEARCH)
    nodes: Rows = index.search(vectors, min(_MAX_SOURCES, int(index.ntotal)), params=parameters)[1]
    return nodes
