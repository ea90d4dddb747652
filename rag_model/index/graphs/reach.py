"""Reachability: a node that no walk from the entry point reaches is a passage that no query finds.

Duplicates, outliers and inner products of unequal norms leave such nodes, both in a graph built at once and in a
stitched one. The graph is memory-mapped and changed in its file, so it need not fit in memory.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from rag_model.index.files import engine
from rag_model.index.files.engine import FaissIndex, Rows, Vectors, faiss
from rag_model.index.files.vectors import VectorFiles
from rag_model.index.graphs.graph import BLOCK, Links
from rag_model.index.graphs.graph_file import GraphFile

_NEAR = 16  # reachable nodes tried as the source of the new link
_EFFORT = 64  # efSearch of the search for them


class Reach:
    """The tree of nodes that a walk on the bottom level reaches from the entry point."""

    def __init__(self, graph: GraphFile) -> None:
        """Walk a graph breadth first; holds 8 bytes per node."""
        self._graph = graph
        self._parent = np.full(graph.n, -1, np.int32)
        self._queue, self._reached = np.empty(graph.n, np.int32), 0  # every node that was reached, once, and how many
        self._last = graph.entry
        self._parent[self._last] = self._last
        self._walk(self._last)

    def missing(self) -> Rows:
        """Return the nodes that are not reached, ascending."""
        return np.flatnonzero(self._parent < 0)

    def reached(self, nodes: Rows | int) -> npt.NDArray[np.bool_]:
        """Return which of `nodes` are reached."""
        reached: npt.NDArray[np.bool_] = np.asarray(self._parent[nodes] >= 0)
        return reached

    def link(self, node: int, ways_in: Rows) -> None:
        """Link `node` from one of `ways_in` (reached, nearest first); continue the walk from it.

        The source is the first with an empty slot, else the first with a link outside the tree: so no other node
        becomes unreachable, and few lose a link to a near one. The node reached last is a leaf of the tree, whose
        links are all replaceable: it is the source if no other is.
        """
        ways = [*ways_in.tolist(), self._last]
        lists = self._graph.bottom(np.array(ways))
        for rooms in (lists < 0, self._spare(ways, lists)):
            for way, links, room in zip(ways, lists, rooms, strict=True):
                if room.any():
                    links[np.flatnonzero(room)[0 if links[-1] < 0 else -1]] = node
                    self._graph.set_bottom(np.array([way]), links[None])
                    self._parent[node] = way
                    self._last = node
                    self._walk(node)
                    return
        raise AssertionError("a leaf of the walk has no room for a link")

    def _spare(self, ways: list[int], lists: Links) -> npt.NDArray[np.bool_]:
        """Return which slots of the bottom lists of `ways` hold no link of the tree: bool of the lists' shape."""
        spare: npt.NDArray[np.bool_] = (lists < 0) | (self._parent[lists] != np.array(ways)[:, None])  # (w, 2M)
        return spare

    def _walk(self, start: int) -> None:
        """Reach what `start` leads to: one front after another, each the end of the queue that the last one wrote."""
        first, end = self._reached, self._reached + 1
        self._queue[first] = start
        self._reached = end
        while first < end:
            for at in range(first, end, BLOCK):
                found = self._step(self._queue[at : min(at + BLOCK, end)])
                self._queue[self._reached : self._reached + len(found)] = found
                self._reached += len(found)
            first, end = end, self._reached
            self._last = int(self._queue[end - 1])

    def _step(self, front: Links) -> Links:
        """Mark the nodes that `front` links to and that were not reached before; return them, ascending."""
        targets = self._graph.bottom(front)  # (f, 2M)
        new = (targets >= 0) & (self._parent[targets] < 0)
        sources = np.broadcast_to(front[:, None], targets.shape)[new]  # (f, 1) -> (f, 2M) -> (new,)
        found, first = np.unique(targets[new], return_index=True)
        self._parent[found] = sources[first]
        return found


def repair(path: Path, vectors: VectorFiles) -> int:
    """Link every unreachable node of an index file into its graph, in place; return how many there were.

    The new link comes from the nearest reachable node that a search finds. A graph without unreachable
    nodes is not changed.

    Raises:
        InputError: the file is not a complete HNSW index, or a row of `vectors` holds a NaN or an infinity.
    """
    reach = Reach(GraphFile.open(path, writable=True))
    missing = reach.missing()
    if not len(missing):
        return 0
    index = _by_distance(path)
    for first in range(0, len(missing), BLOCK):
        nodes = missing[first : first + BLOCK]
        for node, near in zip(nodes.tolist(), _near(index, vectors.take(nodes)), strict=True):
            if not reach.reached(node):  # an earlier repair may have made it reachable
                ways_in = near[near >= 0]
                reach.link(node, ways_in[reach.reached(ways_in)])
    return len(missing)


def _by_distance(path: Path) -> FaissIndex:
    """Open an index for search by L2, whatever its metric: by inner product, a small vector finds only large ones."""
    index = engine.read(path, mmap=True)
    storage = faiss.downcast_index(index.storage)
    index.metric_type = storage.metric_type = faiss.METRIC_L2
    return index


def _near(index: FaissIndex, vectors: Vectors) -> Rows:
    settings = faiss.SearchParametersHNSW(efSearch=_EFFORT)
    rows: Rows = index.search(vectors, min(_NEAR, int(index.ntotal)), params=settings)[1]
    return rows
