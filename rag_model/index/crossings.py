"""Crossings: links between the graph of a cell and the vectors beyond its border, both ways.

A vector that is near the border, but not nearest to it, does not join the second cell's graph: it asks that graph for
its neighbours. It is linked to them and they to it, at the price of a search instead of an insertion.
"""

from dataclasses import dataclass

import numpy as np

from rag_model.index.engine import FaissIndex, Metric, Rows, Vectors, faiss
from rag_model.index.graph import Keys, keys_of, links_of, similarities

OUT = 8  # links of a vector into the other cell
IN = 8  # links of a member to vectors beyond the border: the nearest of those that found it
_EFFORT = 32  # efSearch with which members are found


@dataclass(frozen=True, slots=True)
class Crossings:
    """The links of one cell across its border. Members and sources are numbered within the cell."""

    out: Keys  # (sources, OUT): each source's members, nearest first
    begins: Rows  # (members + 1,): where the sources of each member begin in `into`
    into: Keys  # sources by member, the nearest first, at most IN each


def cross(graph: FaissIndex, members: Vectors, sources: Vectors, metric: Metric) -> Crossings:
    """Link `sources`, (s, d) float32, to the nearest `members`, (m, d) float32, of a cell's graph, and back."""
    if not len(sources) or not len(members):
        out = np.full((len(sources), OUT), -1, np.int64)
        return _both_ways(keys_of(out.astype(np.float32), out), len(members))
    settings = faiss.SearchParametersHNSW(efSearch=_EFFORT)
    found = graph.search(sources, OUT, params=settings)[1]
    return _both_ways(np.sort(keys_of(similarities(sources, members, found, metric), found), axis=1), len(members))


def _both_ways(out: Keys, members: int) -> Crossings:
    member = links_of(out).ravel()
    source = np.repeat(np.arange(len(out), dtype=np.uint64), out.shape[1])
    back = out.ravel() >> np.uint64(32) << np.uint64(32) | source
    back, member = back[member >= 0], member[member >= 0]
    order = np.lexsort((back, member))
    back, member = back[order], member[order]
    rank = np.arange(len(member)) - np.searchsorted(member, member)
    kept = rank < IN
    begins = np.searchsorted(member[kept], np.arange(members + 1))
    return Crossings(out, begins, back[kept])
