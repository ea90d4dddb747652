"""Reachability: a node that no walk from the entry point finds is a passage that no question finds.

Duplicates, outliers and inner products of unequal norms leave such nodes, in a one-shot graph as in a
stitched one. The graph is mapped and changed in its file, so that none of it needs to fit in memory.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from rag_model.index import engine
from rag_model.index.engine import FaissIndex, Rows, Vectors, faiss
from rag_model.index.graph import BLOCK
from rag_model.index.graph_file import GraphFile
from rag_model.index.vectors import VectorFiles

_NEAR = 16  # reachable nodes tried as the way in
_EFFORT = 64  # efSearch with which they are looked for


class Reach:
    """Which nodes a walk on the bottom level reaches from the entry point, and by which links: a tree."""

    def __init__(self, graph: GraphFile) -> None:
        """Walk a graph breadth first; holds 4 bytes a node."""
        self._graph = graph
        self._parent = np.full(graph.n, -1, np.int32)
        self._last = graph.entry
        self._parent[self._last] = self._last
        self._walk(np.array([self._last]))

    def missing(self) -> Rows:
        """Return the nodes that are not reached, ascending."""
        return np.flatnonzero(self._parent < 0)

    def reached(self, nodes: Rows | int) -> npt.NDArray[np.bool_]:
        """Return which of `nodes` are reached."""
        reached: npt.NDArray[np.bool_] = np.asarray(self._parent[nodes] >= 0)
        return reached

    def link(self, node: int, ways_in: Rows) -> None:
        """Link `node` behind the first of `ways_in` (reached, nearest first) that has room; walk on from it.

        Room is an empty slot, or the last link that the tree does not need: so no node is ever lost by
        finding one. The node walked to last is a leaf of the tree, whose slots are all free: it is the way in
        when no other is.
        """
        for way in [*ways_in.tolist(), self._last]:
            if self._write(way, node):
                self._parent[node] = way
                self._last = node
                self._walk(np.array([node]))
                return
        raise AssertionError("a leaf of the walk has no room for a link")

    def _write(self, way: int, node: int) -> bool:
        """Put a link to `node` into the list of `way`; return whether there was room."""
        source = np.array([way])
        links = self._graph.bottom(source)
        spare = np.flatnonzero((links[0] < 0) | (self._parent[links[0]] != way))
        if len(spare) == 0:
            return False
        empty = np.flatnonzero(links[0] < 0)
        links[0, empty[0] if len(empty) else spare[-1]] = node
        self._graph.set_bottom(source, links)
        return True

    def _walk(self, front: Rows) -> None:
        while len(front):
            front = np.concatenate([self._step(front[first : first + BLOCK]) for first in range(0, len(front), BLOCK)])
            if len(front):
                self._last = int(front[-1])

    def _step(self, front: Rows) -> Rows:
        """Mark what `front` links to and nobody did before; return it, ascending."""
        targets = self._graph.bottom(front)
        new = (targets >= 0) & (self._parent[targets] < 0)
        sources = np.broadcast_to(front[:, None], targets.shape)[new]
        found, first = np.unique(targets[new], return_index=True)
        self._parent[found] = sources[first]
        return found.astype(np.int64)


def repair(path: Path, vectors: VectorFiles) -> int:
    """Link every unreachable node of an index file into its graph, in place; return how many there were.

    The way in is the nearest reachable node, as the index's own search finds it. A graph without unreachable
    nodes is left as it is, to the byte.

    Raises:
        InputError: the file is no whole HNSW index, or a row of `vectors` holds a NaN or an infinity.
    """
    reach = Reach(GraphFile.open(path, writable=True))
    missing = reach.missing()
    if not len(missing):
        return 0
    index = engine.read(path, mmap=True)
    for first in range(0, len(missing), BLOCK):
        nodes = missing[first : first + BLOCK]
        for node, near in zip(nodes.tolist(), _near(index, vectors.take(nodes)), strict=True):
            if not reach.reached(node):  # one linked before may have led here
                ways_in = near[near >= 0]
                reach.link(node, ways_in[reach.reached(ways_in)])
    return len(missing)


def _near(index: FaissIndex, vectors: Vectors) -> Rows:
    settings = faiss.SearchParametersHNSW(efSearch=_EFFORT)
    rows: Rows = index.search(vectors, min(_NEAR, int(index.ntotal)), params=settings)[1]
    return rows
