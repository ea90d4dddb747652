"""Crossings: links between the graph of a cell and the vectors beyond its border, both ways.

A vector that is near the border, but not nearest to it, does not join the second cell's graph: it asks that graph for
its neighbours. It is linked to them and they to it, at the price of a search instead of an insertion. As an insertion
would, it keeps those that lie in different directions: links to neighbours of each other lead to the same place.

Reference: Malkov, Yashunin (see `graph`), algorithm 4.
"""

from dataclasses import dataclass

import numpy as np

from rag_model.index.files.engine import FaissIndex, Metric, Rows, Vectors, faiss
from rag_model.index.graphs.graph import NO_LINK, Keys, blocks, keys_of, links_of, similarities

OUT = 8  # links of a vector into the other cell
IN = 8  # links of a member to vectors beyond the border: the nearest of those that found it
_FOUND = 16  # members that a vector finds, to choose its links from; keeping the nearest 8 loses .002 of recall
_EFFORT = 32  # efSearch with which they are found
_BLOCK = 512  # vectors whose links are chosen at once: 24 MiB of members at 768 dimensions


@dataclass(frozen=True, slots=True)
class Crossings:
    """The links of one cell across its border. Members and sources are numbered within the cell."""

    out: Keys  # (sources, OUT): each source's members, nearest first
    begins: Rows  # (members + 1,): where the sources of each member begin in `into`
    into: Keys  # sources by member, the nearest first, at most IN each


def cross(graph: FaissIndex, members: Vectors, sources: Vectors, metric: Metric) -> Crossings:
    """Link `sources`, (s, d) float32, to near `members`, (m, d) float32, of a cell's graph, and back."""
    out: Keys = np.full((len(sources), OUT), NO_LINK)
    if len(members):
        settings = faiss.SearchParametersHNSW(efSearch=_EFFORT)
        for first, last in blocks(len(sources), _BLOCK):
            found = graph.search(sources[first:last], _FOUND, params=settings)[1]
            out[first:last] = _chosen(sources[first:last], members, found, metric)
    return _both_ways(out, len(members))


def _chosen(sources: Vectors, members: Vectors, found: Rows, metric: Metric) -> Keys:
    """Return (s, OUT) keys: of the members found, nearest first, those nearer to the source than to one chosen before.

    Args:
        sources: (s, d) float32.
        members: (m, d) float32.
        found: (s, f >= OUT) members of each source, -1 where there are fewer.
        metric: by which they are near.
    """
    keys = np.sort(keys_of(similarities(sources, members, found, metric), found), axis=1)
    targets = links_of(keys)
    near, between = similarities(sources, members, targets, metric), _between(members[targets], metric)
    chosen = np.zeros(targets.shape, np.bool_)
    for place in range(targets.shape[1]):
        behind = (between[:, place, :place] > near[:, place, None]) & chosen[:, :place]
        chosen[:, place] = (targets[:, place] >= 0) & ~behind.any(axis=1) & (chosen.sum(axis=1) < OUT)
    keys[~chosen] = NO_LINK
    return np.sort(keys, axis=1)[:, :OUT]


def _between(vectors: Vectors, metric: Metric) -> Vectors:
    """Return (s, f, f): how near the vectors of each row, (s, f, d), are to each other, larger = nearer."""
    products: Vectors = vectors @ vectors.transpose(0, 2, 1)
    if metric == "ip":
        return products
    squares = np.diagonal(products, axis1=1, axis2=2)
    return 2 * products - squares[:, :, None] - squares[:, None, :]


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
