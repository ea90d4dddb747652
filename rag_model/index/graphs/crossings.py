"""Crossings: links between the graph of a cell and vectors of neighbouring cells, in both directions.

A vector whose margin is small, but not small enough to join the second cell's graph, searches that graph for
its neighbours. It is linked to them and they to it, which costs a search instead of an insertion. As in an insertion,
it keeps neighbours in different directions: links to close neighbours of each other lead to the same place.

Reference: Malkov, Yashunin (see `graph`), algorithm 4.
"""

from dataclasses import dataclass

import numpy as np

from rag_model.index.files.engine import FaissIndex, Metric, Rows, Vectors, faiss
from rag_model.index.graphs.graph import NO_LINK, Keys, blocks, keys_of, links_of, similarities

OUT = 8  # links of a vector into the other cell
IN = 8  # links of a member to vectors of other cells: the nearest of those that found it
_FOUND = 16  # members that a vector finds, from which its links are chosen; the nearest 8 alone lose .002 of recall
_EFFORT = 32  # efSearch of that search
_BLOCK = 512  # vectors whose links are chosen at once: 24 MiB of member vectors at 768 dimensions


@dataclass(frozen=True, slots=True)
class Crossings:
    """The links of one cell across its border. Members and sources are numbered within the cell."""

    out: Keys  # (sources, OUT): each source's members, nearest first
    begins: Rows  # (members + 1,): start of each member's sources in `into`
    into: Keys  # sources by member, nearest first, at most IN each


def cross(graph: FaissIndex, members: Vectors, sources: Vectors, metric: Metric) -> Crossings:
    """Link `sources`, (s, d) float32, to near `members`, (m, d) float32, of a cell's graph, and back."""
    out: Keys = np.full((len(sources), OUT), NO_LINK)
    if len(members):
        settings = faiss.SearchParametersHNSW(efSearch=_EFFORT)
        for first, last in blocks(len(sources), _BLOCK):
            found = graph.search(sources[first:last], _FOUND, params=settings)[1]  # (b, _FOUND)
            out[first:last] = _chosen(sources[first:last], members, found, metric)
    return _both_ways(out, len(members))


def _chosen(sources: Vectors, members: Vectors, found: Rows, metric: Metric) -> Keys:
    """Return (s, OUT) keys, nearest first: found members that are nearer to the source than to an already chosen one.

    Args:
        sources: (s, d) float32.
        members: (m, d) float32.
        found: (s, f >= OUT) members of each source, -1 if there are fewer.
        metric: of the similarities.
    """
    keys = np.sort(keys_of(similarities(sources, members, found, metric), found), axis=1)  # (s, f)
    targets = links_of(keys)
    # (s, f); members[targets] (s, f, d) -> (s, f, f)
    near, between = similarities(sources, members, targets, metric), _between(members[targets], metric)
    chosen = np.zeros(targets.shape, np.bool_)
    for place in range(targets.shape[1]):
        behind = (between[:, place, :place] > near[:, place, None]) & chosen[:, :place]  # (s, place)
        chosen[:, place] = (targets[:, place] >= 0) & ~behind.any(axis=1) & (chosen.sum(axis=1) < OUT)
    keys[~chosen] = NO_LINK
    return np.sort(keys, axis=1)[:, :OUT]  # (s, f) -> (s, OUT)


def _between(vectors: Vectors, metric: Metric) -> Vectors:
    """Return (s, f, f): pairwise similarities of the vectors of each row, (s, f, d); larger = nearer."""
    products: Vectors = vectors @ vectors.transpose(0, 2, 1)  # (s, f, d) @ (s, d, f) -> (s, f, f)
    if metric == "ip":
        return products
    squares = np.diagonal(products, axis1=1, axis2=2)  # (s, f, f) -> (s, f)
    return 2 * products - squares[:, :, None] - squares[:, None, :]  # (s, f, f) - (s, f, 1) - (s, 1, f)


def _both_ways(out: Keys, members: int) -> Crossings:
    member = links_of(out).ravel()  # (s, OUT) -> (s OUT,)
    source = np.repeat(np.arange(len(out), dtype=np.uint64), out.shape[1])  # (s,) -> (s OUT,)
    back = out.ravel() >> np.uint64(32) << np.uint64(32) | source
    back, member = back[member >= 0], member[member >= 0]
    order = np.lexsort((back, member))
    back, member = back[order], member[order]
    rank = np.arange(len(member)) - np.searchsorted(member, member)  # position of each link within its member
    kept = rank < IN
    begins = np.searchsorted(member[kept], np.arange(members + 1))
    return Crossings(out, begins, back[kept])
