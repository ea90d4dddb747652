"""Stitching: links across the borders of cells, and candidates for the merged graph.

A vector whose margin is small, but not small enough to join the second cell's graph, searches that
graph for neighbours. The vector is linked to these neighbours and they to it, which costs a search
instead of an insertion. As in an insertion, the selected neighbours lie in different directions,
because links to neighbours that are close to each other lead to the same region.

Reference: Malkov, Yashunin (see `graph`), algorithm 4.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from rag_model.digest import digest_json
from rag_model.errors import InputError
from rag_model.index.files.engine import Metric, Rows, Vectors
from rag_model.index.files.pieces import Opener, PieceReader, write_piece
from rag_model.index.graphs.cells import MAX_CELL_RATIO
from rag_model.index.graphs.graph import (
    NO_LINK,
    SIMILARITY_BITS,
    CellGraph,
    Links,
    ScoredLinks,
    iter_ranges,
    join_links,
    pack_links,
    score_targets,
    unpack_links,
)
from rag_model.index.graphs.history import HISTORY_ARRAYS, CellHistory
from rag_model.index.recipe import VectorPlan

OUT_LINKS = 8  # number of links of a vector into another cell
IN_LINKS = 8  # maximum number of links from a member back to the sources that are linked to it
# Number of members that a vector's search returns. The vector's links are selected from them; the
# nearest 8 alone would lower recall by .002.
CANDIDATES = 16
_EF_SEARCH = 32  # efSearch of the search for these members
# Number of sources whose links are selected at a time: 24 MiB of members at 768 dimensions.
_BLOCK_SOURCES = 512
# positions of a shard's arrays; the arrays of the cell's history follow
_LISTS, _OUT_LINKS, _IN_STARTS, _IN_LINKS = range(4)
_N_ARRAYS = 4 + HISTORY_ARRAYS


@dataclass(frozen=True, slots=True)
class CrossLinks:
    """The links of one cell across its border; members and sources are numbered within the cell."""

    out_links: ScoredLinks  # (sources, OUT_LINKS): members of each source, nearest first
    in_starts: Rows  # (members + 1,): the start of each member's sources in `in_links`
    in_links: ScoredLinks  # sources by member, nearest first, at most IN_LINKS each


def link_across_border(graph: CellGraph, members: Vectors, sources: Vectors, metric: Metric) -> CrossLinks:
    """Link `sources`, (s, d) float32, to near `members`, (m, d) float32, of a cell, and back."""
    return add_reverse_links(search_members(graph, members, sources, metric), len(members))


def search_members(graph: CellGraph, members: Vectors, sources: Vectors, metric: Metric) -> ScoredLinks:
    """Return the links of `sources`, (s, d) float32, to members that a search finds: (s,
    OUT_LINKS).
    """
    out_links: ScoredLinks = np.full((len(sources), OUT_LINKS), NO_LINK)
    if len(members):
        for start, end in iter_ranges(len(sources), _BLOCK_SOURCES):
            candidates = graph.search(sources[start:end], CANDIDATES, _EF_SEARCH)  # (b, f)
            out_links[start:end] = select_diverse(sources[start:end], members, candidates, metric)
    return out_links


def select_diverse(sources: Vectors, members: Vectors, candidates: Rows | Links, metric: Metric) -> ScoredLinks:
    """Return (s, OUT_LINKS) keys, nearest first, of members in different directions.

    A member is selected if it is nearer to the source than to every member selected before.

    Args:
        sources: (s, d) float32.
        members: (m, d) float32.
        candidates: (s, f >= OUT_LINKS) members for each source, padded with -1.
        metric: the metric of the similarities.
    """
    # (s, f)
    keys = np.sort(pack_links(score_targets(sources, members, candidates, metric), candidates), axis=1)
    targets = unpack_links(keys)
    # (s, f); members[targets] (s, f, d) -> (s, f, f)
    source_scores, pair_scores = (
        score_targets(sources, members, targets, metric),
        _compute_pairwise_similarities(members[targets], metric),
    )
    is_selected = np.zeros(targets.shape, np.bool_)
    for column in range(targets.shape[1]):
        # (s, column)
        is_shadowed = (pair_scores[:, column, :column] > source_scores[:, column, None]) & is_selected[:, :column]
        is_selected[:, column] = (
            (targets[:, column] >= 0) & ~is_shadowed.any(axis=1) & (is_selected.sum(axis=1) < OUT_LINKS)
        )
    keys[~is_selected] = NO_LINK
    return np.sort(keys, axis=1)[:, :OUT_LINKS]  # (s, f) -> (s, OUT)


def _compute_pairwise_similarities(vectors: Vectors, metric: Metric) -> Vectors:
    """Return (s, f, f) similarities between the vectors of each row, (s, f, d)."""
    products: Vectors = vectors @ vectors.transpose(0, 2, 1)  # (s, f, d) @ (s, d, f) -> (s, f, f)
    if metric == "ip":
        return products
    squared_norms = np.diagonal(products, axis1=1, axis2=2)  # (s, f, f) -> (s, f)
    # (s, f, f) - (s, f, 1) - (s, 1, f)
    return 2 * products - squared_norms[:, :, None] - squared_norms[:, None, :]


def add_reverse_links(out_links: ScoredLinks, n_members: int) -> CrossLinks:
    """Return the links of the sources to members, and the best links in the other direction."""
    members = unpack_links(out_links).ravel()  # (s, OUT) -> (s OUT,)
    # (s,) -> (s OUT,)
    sources = np.repeat(np.arange(len(out_links), dtype=np.uint64), out_links.shape[1])
    score_bits = out_links.ravel() >> np.uint64(32)
    link_positions = np.flatnonzero(members >= 0)
    keys = members[link_positions].astype(np.uint64) << np.uint64(32) | score_bits[link_positions]
    # The stable sort orders sources of equal similarity by number.
    order = link_positions[np.argsort(keys, kind="stable")]
    reverse_keys, members = score_bits[order] << np.uint64(32) | sources[order], members[order]
    first_positions = np.searchsorted(members, np.arange(n_members + 1))
    is_nearest = np.arange(len(members)) - first_positions.take(members) < IN_LINKS
    link_starts = np.concatenate([[0], np.cumsum(np.minimum(np.diff(first_positions), IN_LINKS))])
    return CrossLinks(out_links, link_starts, reverse_keys[is_nearest])


@dataclass(frozen=True, slots=True)
class CellShard:
    """A cell's links and its history."""

    lists: ScoredLinks  # (m, 2M) links of each member, nearest first
    cross_links: CrossLinks
    history: CellHistory

    def write(self, plan: VectorPlan, number: int, out: Path) -> None:
        """Write the shard of cell `number`.

        Raises:
            ResourceError: the file cannot be written.
        """
        links = self.cross_links
        arrays = [self.lists, links.out_links, links.in_starts, links.in_links]
        write_piece(out, _compute_shard_stamp(plan, number), [*arrays, *self.history.to_arrays()])

    @classmethod
    def read(cls, plan: VectorPlan, opener: Opener) -> Self:
        """Read the shard of a cell of an earlier build, whatever the cell's number was then.

        Raises:
            InputError: the shard is missing, truncated, or of another build.
        """
        stamps = [_compute_shard_stamp(plan, cell_number) for cell_number in range(MAX_CELL_RATIO * plan.cells)]
        with PieceReader.open(opener, stamps, _N_ARRAYS, f"a shard of {plan.factory}") as piece:
            link_lists, *link_arrays = map(piece.read, range(_LISTS, _IN_LINKS + 1))
            history = CellHistory.from_arrays(
                [piece.read(array_number) for array_number in range(_IN_LINKS + 1, _N_ARRAYS)]
            )
        return cls(link_lists, CrossLinks(*link_arrays), history)


def get_cell_inputs(plan: VectorPlan) -> dict[str, Any]:
    """Return the values of the plan that determine a cell; the number of cells does not."""
    return {name: setting for name, setting in plan.piece_inputs().items() if name != "cells"}


def _compute_shard_stamp(plan: VectorPlan, cell_number: int) -> str:
    """Return the stamp of a shard.

    It does not cover the trained file, because a split of cells changes the file, but few shards.
    """
    return digest_json([get_cell_inputs(plan), "shard", cell_number])


@dataclass(frozen=True, slots=True)
class CandidateLinks:
    """Candidates from one cell for some rows of a block."""

    rows: npt.NDArray[np.int32]  # (r,) distinct, relative to the block's first row
    counts: Rows  # (r,) number of candidates for each row
    keys: ScoredLinks  # (sum of counts,) keys of all candidates, row by row


@dataclass(frozen=True, slots=True)
class GraphShard:
    """A cell's graph, open for reading, and the global row of each of its members and sources."""

    piece: PieceReader
    members: Links  # (m,) global rows, ascending
    sources: Links  # (s,) global rows of the vectors linked into the cell, ascending

    @classmethod
    def open(cls, plan: VectorPlan, opener: Opener, number: int, members: Links, sources: Links) -> Self:
        """Open shard `number`.

        Raises:
            InputError: the shard is missing, truncated, of another build, or of other rows.
        """
        piece = PieceReader.open(
            opener, _compute_shard_stamp(plan, number), _N_ARRAYS, f"shard {number} of {plan.factory}"
        )
        if (piece.count_rows(_LISTS), piece.count_rows(_OUT_LINKS)) != (len(members), len(sources)):
            piece.close()
            raise InputError(f"shard {number} of {plan.factory} does not match the scattered vectors: build it again")
        return cls(piece, members, sources)

    def iter_candidates(self, start: int, end: int) -> Iterator[CandidateLinks]:
        """Yield this cell's candidates for rows [start, end): member lists, and cross links."""
        first, last = np.searchsorted(self.members, (start, end))
        if first < last:
            # (r, 2M), (r,)
            lists, rows = self.piece.read(_LISTS, first, last), self.members[first:last] - start
            # (r, 2M) -> (r 2M,)
            yield CandidateLinks(rows, np.full(len(rows), lists.shape[1]), _to_global_rows(lists, self.members).ravel())
            in_starts = self.piece.read(_IN_STARTS, first, last + 1)
            in_links = self.piece.read(_IN_LINKS, int(in_starts[0]), int(in_starts[-1]))
            yield CandidateLinks(rows, np.diff(in_starts), _to_global_rows(in_links, self.sources))
        first, last = np.searchsorted(self.sources, (start, end))
        if first < last:
            # (r, OUT), (r,)
            links, rows = self.piece.read(_OUT_LINKS, first, last), self.sources[first:last] - start
            # (r, OUT) -> (r OUT,)
            yield CandidateLinks(rows, np.full(len(rows), links.shape[1]), _to_global_rows(links, self.members).ravel())


def collect_candidates(shards: Sequence[GraphShard], start: int, end: int, width: int) -> ScoredLinks:
    """Return (end - start, c >= width) keys of global rows: all candidates for [start, end)."""
    candidate_links = [links for shard in shards for links in shard.iter_candidates(start, end)]
    n_filled = np.zeros(end - start, np.int64)
    for links in candidate_links:
        n_filled[links.rows] += links.counts
    keys: ScoredLinks = np.full((end - start, max(width, int(n_filled.max(initial=0)))), NO_LINK)
    n_filled[:] = 0
    for links in candidate_links:
        starts = np.cumsum(links.counts) - links.counts
        # (r,) -> (sum of counts,)
        column = np.repeat(n_filled[links.rows] - starts, links.counts) + np.arange(len(links.keys))
        keys[np.repeat(links.rows, links.counts), column] = links.keys
        n_filled[links.rows] += links.counts
    return keys


def _to_global_rows(keys: ScoredLinks, cell_rows: Links) -> ScoredLinks:
    """Replace the targets of links, which are numbered within a cell, with global rows."""
    global_rows = np.append(cell_rows, -1).astype(np.int32)  # the last entry maps -1 to -1
    return join_links(keys & SIMILARITY_BITS, global_rows.take(unpack_links(keys)))
