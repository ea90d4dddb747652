"""Reachability: a node that no walk from the entry point finds is a passage that no question finds.

Duplicates, outliers and inner products of unequal norms leave such nodes, in a one-shot graph as in a
stitched one.
"""

import numpy as np
import numpy.typing as npt

from rag_model.index import engine
from rag_model.index.engine import FaissIndex, Rows, Vectors, faiss
from rag_model.index.graph import Links, bottom_slots
from rag_model.index.vectors import VectorFiles

_NEAR = 16  # reachable nodes tried as the way in
_EFFORT = 64  # efSearch with which they are looked for
_BATCH = 4_096


class Reach:
    """Which nodes a walk on the bottom level reaches from the entry point, and by which links: a tree."""

    def __init__(self, index: FaissIndex) -> None:
        """Walk the graph of an index in memory, breadth first."""
        self._slots = bottom_slots(index)
        self._links = engine.view_of(index.hnsw.neighbors)  # a view: what is written here is in the graph
        self._parent: Rows = np.full(len(self._slots), -1, np.int64)
        self._last = int(index.hnsw.entry_point)
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
            slot = self._room(way)
            if slot is not None:
                self._links[slot] = node
                self._parent[node] = way
                self._last = node
                self._walk(np.array([node]))
                return
        raise AssertionError("a leaf of the walk has no room for a link")

    def _room(self, way: int) -> int | None:
        slots = self._slots[way]
        targets: Links = self._links[slots]
        empty = np.flatnonzero(targets < 0)
        if len(empty):
            return int(slots[empty[0]])
        spare = np.flatnonzero(self._parent[targets] != way)
        return int(slots[spare[-1]]) if len(spare) else None

    def _walk(self, front: Rows) -> None:
        while len(front):
            targets = self._links[self._slots[front]]
            new = (targets >= 0) & (self._parent[targets] < 0)
            sources = np.broadcast_to(front[:, None], targets.shape)[new]
            front, first = np.unique(targets[new], return_index=True)
            self._parent[front] = sources[first]
            if len(front):
                self._last = int(front[-1])


def repair(index: FaissIndex, vectors: VectorFiles) -> int:
    """Link every unreachable node into the graph; return how many there were.

    The way in is the nearest reachable node, as the index's own search finds it. A graph without unreachable
    nodes is left as it is, to the byte.

    Raises:
        InputError: a row of `vectors` holds a NaN or an infinity.
    """
    reach = Reach(index)
    missing = reach.missing()
    for first in range(0, len(missing), _BATCH):
        nodes = missing[first : first + _BATCH]
        for node, near in zip(nodes.tolist(), _near(index, vectors.take(nodes)), strict=True):
            if not reach.reached(node):  # one linked before may have led here
                ways_in = near[near >= 0]
                reach.link(node, ways_in[reach.reached(ways_in)])
    return len(missing)


def _near(index: FaissIndex, vectors: Vectors) -> Rows:
    settings = faiss.SearchParametersHNSW(efSearch=_EFFORT)
    rows: Rows = index.search(vectors, min(_NEAR, int(index.ntotal)), params=settings)[1]
    return rows
