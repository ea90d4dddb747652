"""Update a cell's graph instead of building it again: drop members, repair links, insert members.

A cell's graph has its members as nodes. The graph's sources are vectors of other cells near the
border that are linked into the cell: they have links to members, and members to them, but they are
not nodes of its graph, and no link leads from one source to another (`stitch`).

An update needs only the bottom lists of the old shard and the vectors of the new members. Upper
levels are drawn and linked again, which is cheaper than to keep them, because they contain only one
member in M.

A dropped member leaves two kinds of gaps. A member that linked to it loses a link, and a member
that it linked to loses an incoming link. Both kinds of gaps are closed together: a member that lost
a link is linked, in both directions, to near remaining members, unless another of its links leads
in the same direction. The candidates are the neighbours of the dropped member, and the neighbours
of the member's nearest remaining links. Links to the nearest members instead would cost 1.4 points of
recall after 24 updates, measured with *weak vectors* (those of static encoders with 64 dimensions,
whose recall is low). Without the neighbours of remaining links, 12 updates of 20,000 weak vectors
lose .59 points instead of .19. Without links in both directions, 100 updates of 2 % of the members
lose a seventh of all links. Then faiss inserts the new members. The remaining links keep their
similarities.

Reference: Singh et al. FreshDiskANN: a fast and accurate graph-based ANN index for streaming
similarity search. 2021, algorithm 4.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from rag_model.arrays import concatenate_ranges
from rag_model.compiled import compiled
from rag_model.index.files import engine
from rag_model.index.files.engine import FaissIndex, Rows, Vectors, faiss
from rag_model.index.graphs.graph import (
    NO_LINK,
    SIMILARITY_BITS,
    UPPER_EF_CONSTRUCTION,
    CellGraph,
    Links,
    ScoredLinks,
    UpperLevels,
    copy_bottom_links,
    count_node_links,
    count_slots,
    create_graph,
    draw_levels,
    iter_ranges,
    join_links,
    lay_out_slots,
    pack_links,
    score_pairs,
    score_targets,
    unpack_links,
    unpack_similarities,
)
from rag_model.index.graphs.stitch import (
    CANDIDATES,
    CrossLinks,
    add_reverse_links,
    link_across_border,
    search_members,
    select_diverse,
)
from rag_model.index.recipe import VectorPlan

_REPAIR_BLOCK = 1_024  # number of members whose links are repaired at a time
# Number of candidates from which new links are selected for a member that lost links. After 50
# updates of 2 % of 20,000 weak vectors (see above), a cell has 1.02 times as many links as when it
# was built; with 64 candidates, it has .95 times as many.
_REPAIR_CANDIDATES = 128
_OWN_LINKS = 4  # number of a member's nearest links whose neighbours are candidates too
_NEAR_MEMBERS = 32  # a new member is offered as a link to the sources of this many near members
_NEAR_LINKS = 2  # number of a source's nearest links whose neighbours are candidates
SEARCH_TURNS = 32  # each source searches for links once in this many updates


def update_cell_graph(
    plan: VectorPlan,
    lists: ScoredLinks,
    old_members: Rows,
    vectors: Vectors,
) -> CellGraph:
    """Return the graph of a cell after a change of its members.

    The result depends on the arguments alone. The graph contains neither the number nor a
    similarity of a dropped member. Memory holds two copies of the vectors.

    Args:
        plan: plan of the index.
        lists: (o, 2M) bottom lists of the cell's old members.
        old_members: (m,) the previous number of each current member; -1 if it was added.
        vectors: (m, d) float32 of the members after the change.
    """
    old_members = _remove_repeats(old_members)
    is_staying = old_members >= 0
    staying_members, new_members = np.flatnonzero(is_staying), np.flatnonzero(~is_staying)
    if not len(staying_members):
        return CellGraph.build(plan, vectors)
    new_lists = _drop_members(plan, lists, old_members, vectors)
    members = np.concatenate([staying_members, new_members])
    index = load_graph(plan, new_lists, members, len(staying_members), vectors)
    if len(new_members):
        index.add(vectors[new_members])
        _rank_changed_links(plan, index, members, new_lists, vectors)
    return CellGraph(index, members, new_lists)


def _remove_repeats(old_numbers: Rows) -> Rows:
    """Return `old_numbers` with each number only where it occurs first, and -1 elsewhere."""
    distinct_numbers = np.full(len(old_numbers), -1)
    distinct_old, first_positions = np.unique(old_numbers, return_index=True)
    distinct_numbers[first_positions] = distinct_old
    return distinct_numbers


def _map_members(old_members: Rows, n_old: int) -> Links:
    """Return the new number of each old member, -1 if dropped; the last entry maps -1 to -1."""
    new_numbers = np.full(n_old + 1, -1, np.int32)
    is_staying = old_members >= 0
    new_numbers[old_members[is_staying]] = np.flatnonzero(is_staying)
    return new_numbers


def _replace_targets(keys: ScoredLinks, targets: Links) -> ScoredLinks:
    """Replace the targets of keys; -1 removes the link."""
    return join_links(keys & SIMILARITY_BITS, targets)


def _drop_members(
    plan: VectorPlan,
    lists: ScoredLinks,
    old_members: Rows,
    vectors: Vectors,
) -> ScoredLinks:
    """Return (m, 2M) repaired lists with new member numbers; the lists of new members are empty."""
    new_numbers = _map_members(old_members, len(lists))
    new_lists = np.empty((len(vectors), lists.shape[1]), np.uint64)
    new_lists[old_members < 0] = NO_LINK
    staying_members = np.flatnonzero(old_members >= 0)
    lost_links = []  # members that lost a link, and the old numbers of its targets
    for start, end in iter_ranges(len(staying_members)):
        members = staying_members[start:end]
        old_lists = lists[old_members[members]]
        old_targets = unpack_links(old_lists)  # (b, 2M)
        targets = new_numbers.take(old_targets)
        new_lists[members] = np.sort(_replace_targets(old_lists, targets), axis=1)
        lost_slots = np.flatnonzero((targets < 0) & (old_targets >= 0))
        lost_links.append((members[lost_slots // lists.shape[1]], old_targets.ravel()[lost_slots]))
    losing_members, lost_targets = map(np.concatenate, zip(*lost_links, strict=True))
    affected_members, starts = np.unique(losing_members, return_index=True)
    starts = np.append(starts, len(losing_members))
    reverse_links = []  # members that get a reverse link, and the links' keys
    for start, end in iter_ranges(len(affected_members), _REPAIR_BLOCK):
        members = affected_members[start:end]
        links = new_lists[members]
        candidates = _list_candidates(members, starts[start : end + 1], lost_targets, new_numbers, lists, new_lists)
        added_keys = _select_repair_links(plan, vectors, members, links, candidates)
        new_lists[members] = np.sort(np.concatenate([links, added_keys], axis=1), axis=1)[:, : links.shape[1]]
        member_rows, lost_slots = np.nonzero(added_keys != NO_LINK)
        keys = added_keys[member_rows, lost_slots]
        reverse_links.append((unpack_links(keys), keys & SIMILARITY_BITS | members[member_rows].astype(np.uint64)))
    if reverse_links:
        _link_back(new_lists, *map(np.concatenate, zip(*reverse_links, strict=True)))
    return new_lists


@compiled
def _list_candidates(
    members: Any, target_starts: Any, lost_targets: Any, new_numbers: Any, lists: Any, new_lists: Any
) -> Any:
    """Return (a, c) distinct candidates of each member, then -1, without itself and its links.

    Args:
        members: (a,) members that lost links.
        target_starts: (a + 1,) where the lost targets of each member begin.
        lost_targets: old numbers.
        new_numbers: (o + 1,) the result of `_map_members`.
        lists: (o, 2M) lists by old numbers.
        new_lists: (m, 2M) lists by new numbers, without the lost links.
    """
    n_lists = np.diff(target_starts).max() + _OWN_LINKS
    candidates = np.full((len(members), n_lists * lists.shape[1]), -1, np.int32)
    same_numbers = np.arange(len(new_lists)).astype(np.int32)
    # the last member to which each candidate was offered
    offered_to = np.full(len(new_lists), -1, np.int64)
    n_columns = 1
    for i in range(len(members)):
        member, n_candidates = members[i], 0
        offered_to[member] = member
        for key in new_lists[member]:
            if key != NO_LINK:
                offered_to[np.uint32(key)] = member
        for target in lost_targets[target_starts[i] : target_starts[i + 1]]:
            n_candidates = _add_candidates(lists[target], new_numbers, member, offered_to, candidates[i], n_candidates)
        for key in new_lists[member, :_OWN_LINKS]:
            if key != NO_LINK:
                near_keys = new_lists[np.uint32(key)]
                n_candidates = _add_candidates(near_keys, same_numbers, member, offered_to, candidates[i], n_candidates)
        n_columns = max(n_columns, n_candidates)
    return candidates[:, :n_columns]


@compiled
def _add_candidates(keys: Any, new_numbers: Any, member: Any, offered_to: Any, candidates: Any, count: Any) -> Any:
    """Append the targets of `keys` that were not offered to `member` yet; return the new count."""
    for key in keys:
        old_target = np.uint32(key)
        if old_target < len(new_numbers):  # else no link
            target = new_numbers[old_target]
            if target >= 0 and offered_to[target] != member:
                offered_to[target] = member
                candidates[count] = target
                count += 1
    return count


def _select_repair_links(
    plan: VectorPlan,
    vectors: Vectors,
    members: Rows,
    links: ScoredLinks,
    candidates: Links,
) -> ScoredLinks:
    """Return (a, w) keys of the candidates in directions without a link; `NO_LINK` for all others.

    As in an insertion, a candidate is compared with those neighbours of the member that are nearer
    to the member than the candidate: remaining ones, and candidates that are already selected. It
    is selected if it is nearer to the member than to each of these neighbours.

    Args:
        plan: plan of the index.
        vectors: (m, d) float32.
        members: (a,) members that lost links.
        links: (a, 2M) keys of the links that remain, nearest first.
        candidates: (a, c) candidates of each member, -1 where none.
    """
    keys = pack_links(score_targets(vectors[members], vectors, candidates, plan.metric), candidates)
    keys = np.sort(keys, axis=1)[:, :_REPAIR_CANDIDATES]
    member_scores, is_selected = unpack_similarities(keys), np.zeros(keys.shape, np.bool_)
    n_pending = (keys != NO_LINK).sum(axis=1)
    pending_columns = np.broadcast_to(np.arange(keys.shape[1]), keys.shape).copy()
    pair_scores, pairs = np.full(int(n_pending.sum()), -np.inf, np.float32), np.empty((2, keys.size), np.int64)
    selection = is_selected, pending_columns, n_pending, np.zeros(len(members), np.int64)
    while n_pairs := _list_next_pairs(links, keys, member_scores, pair_scores, selection, pairs):
        pair_scores = score_pairs(vectors, pairs[0, :n_pairs], vectors, pairs[1, :n_pairs], plan.metric)
    return np.where(is_selected, keys, NO_LINK)


@compiled
def _list_next_pairs(links: Any, keys: Any, member_scores: Any, pair_scores: Any, selection: Any, pairs: Any) -> Any:
    """Exclude candidates by the similarities of the last pairs, and list the next pairs to compare.

    Return the number of the new pairs.

    For each member, its nearest unprocessed node is paired with all other pending candidates. That
    node is the next one of its links, or the next pending candidate, which is then selected.

    Args:
        links: (a, 2M) keys of each member's links, nearest first.
        keys: (a, w) keys of each member's candidates, nearest first.
        member_scores: (a, w) similarities of the candidates to the member.
        pair_scores: (p,) similarities of the pairs that the previous call listed.
        selection: the arrays that are updated: (a, w) whether a candidate is selected; (a, w) the
            columns of the candidates, the pending ones first; (a,) the number of pending ones; and
            (a,) the next column of `links`.
        pairs: (2, p) receives the pairs.
    """
    is_selected, pending_columns, n_pending, next_link = selection
    n_old_pairs = n_new_pairs = 0
    for i in range(len(keys)):
        n_remaining = 0
        for j in range(n_pending[i]):
            column = pending_columns[i, j]
            pending_columns[i, n_remaining] = column
            n_remaining += not pair_scores[n_old_pairs + j] > member_scores[i, column]
        n_old_pairs += n_pending[i]
        n_selected = 0
        if n_remaining:
            nearest_key = keys[i, pending_columns[i, 0]]
            if next_link[i] < links.shape[1] and links[i, next_link[i]] < nearest_key:
                nearest_key = links[i, next_link[i]]
                next_link[i] += 1
            else:
                is_selected[i, pending_columns[i, 0]] = True
                n_selected = 1
            for j in range(n_selected, n_remaining):
                column = pending_columns[i, j]
                pending_columns[i, j - n_selected] = column
                pairs[0, n_new_pairs], pairs[1, n_new_pairs] = np.uint32(nearest_key), np.uint32(keys[i, column])
                n_new_pairs += 1
        n_pending[i] = n_remaining - n_selected
    return n_new_pairs


def _link_back(lists: ScoredLinks, members: Links, keys: ScoredLinks) -> None:
    """Add (p,) links to the lists of their `members` in place, nearest first, until a list is
    full.
    """
    is_new = np.empty(len(keys), np.bool_)
    for start, end in iter_ranges(len(keys)):
        targets = unpack_links(lists[members[start:end]])  # (b, 2M)
        is_new[start:end] = (targets != unpack_links(keys[start:end, None])).all(axis=1)
    members, keys = members[is_new], keys[is_new]
    sorted_positions = np.lexsort((keys, members))
    members, keys = members[sorted_positions], keys[sorted_positions]
    changed_members, starts, key_counts = np.unique(members, return_index=True, return_counts=True)
    n_filled = (lists[changed_members] != NO_LINK).sum(axis=1)
    new_slots = np.arange(len(keys)) + np.repeat(n_filled - starts, key_counts)
    has_free_slot = new_slots < lists.shape[1]
    lists[members[has_free_slot], new_slots[has_free_slot]] = keys[has_free_slot]
    lists[changed_members] = np.sort(lists[changed_members], axis=1)


def _group_keys(key_rows: Rows, keys: ScoredLinks, n_rows: int) -> ScoredLinks:
    """Return the distinct keys of each row, nearest first: (n_rows, c), from (p, w)."""
    is_link = keys != NO_LINK
    flat_rows, flat_keys = np.broadcast_to(key_rows[:, None], keys.shape)[is_link], keys[is_link]
    sorted_positions = np.lexsort((flat_keys, flat_rows))
    flat_rows, flat_keys = flat_rows[sorted_positions], flat_keys[sorted_positions]
    is_distinct = np.ones(len(flat_keys), np.bool_)
    is_distinct[1:] = (flat_keys[1:] != flat_keys[:-1]) | (flat_rows[1:] != flat_rows[:-1])
    flat_rows, flat_keys = flat_rows[is_distinct], flat_keys[is_distinct]
    column = np.arange(len(flat_rows)) - np.searchsorted(flat_rows, flat_rows)
    grouped_keys = np.full((n_rows, int(column.max(initial=-1)) + 1), NO_LINK)
    grouped_keys[flat_rows, column] = flat_keys
    return grouped_keys


def load_graph(
    plan: VectorPlan,
    lists: ScoredLinks,
    members: Rows,
    n_loaded: int,
    vectors: Vectors,
) -> FaissIndex:
    """Return a faiss graph over the first `n_loaded` of `members`, to which the others can be
    added.
    """
    n_links, levels = count_node_links(plan), draw_levels(len(members), count_node_links(plan))
    loaded_members, loaded_levels = members[:n_loaded], levels[:n_loaded]
    upper_levels = UpperLevels.build(
        loaded_levels,
        n_links,
        vectors[loaded_members[loaded_levels > 1]],
        plan.metric,
        min(UPPER_EF_CONSTRUCTION, plan.ef_construction),
    )
    node_by_member = _number_nodes(members)
    index = create_graph(plan.d, n_links, plan.metric, plan.ef_construction)
    slots = np.concatenate([np.zeros(1, np.int64), np.cumsum(count_slots(loaded_levels, n_links))])
    index.hnsw.neighbors.resize(int(slots[-1]))
    neighbors = engine.view_array(index.hnsw.neighbors)
    storage = faiss.downcast_index(index.storage)
    storage.codes.resize(n_loaded * plan.d * 4)
    stored_vectors = engine.view_array(storage.codes).view(np.float32).reshape(n_loaded, plan.d)
    for start, end in iter_ranges(n_loaded):
        bottom = node_by_member.take(unpack_links(lists[loaded_members[start:end]]))  # (b, 2M)
        neighbors[slots[start] : slots[end]] = lay_out_slots(
            bottom, levels[start:end], n_links, upper_levels.slice_nodes(start, end), start
        )
        stored_vectors[start:end] = vectors[loaded_members[start:end]]
    storage.ntotal = index.ntotal = n_loaded
    faiss.copy_array_to_vector(slots.astype(np.uint64), index.hnsw.offsets)
    faiss.copy_array_to_vector(levels, index.hnsw.levels)
    index.hnsw.entry_point, index.hnsw.max_level = upper_levels.entry_point, upper_levels.top_level
    return index


def _number_nodes(members: Rows) -> Links:
    """Return an (m + 1,) array with the node of each member; the last entry maps -1 to -1."""
    node_by_member = np.full(len(members) + 1, -1, np.int32)
    node_by_member[members] = np.arange(len(members))
    return node_by_member


def _rank_changed_links(
    plan: VectorPlan,
    index: FaissIndex,
    members: Rows,
    lists: ScoredLinks,
    vectors: Vectors,
) -> None:
    """Rank the lists of an index whose nodes are `members`, after an insertion, in place.

    Args:
        plan: plan of the index.
        index: the faiss graph.
        members: (m,) the member of each node.
        lists: (m, 2M) lists before the insertion.
        vectors: (m, d) float32.
    """
    node_by_member, member_of_node = _number_nodes(members), np.append(members, -1).astype(np.int32)
    for first_node, end_node in iter_ranges(len(members)):
        block = members[first_node:end_node]
        node_links, keys = copy_bottom_links(index, first_node, end_node), lists[block]  # (b, 2M)
        is_changed = node_links != node_by_member.take(unpack_links(keys))
        changed_rows = np.flatnonzero(is_changed.any(axis=1))
        block, node_links = block[changed_rows], node_links[changed_rows]
        keys, is_changed = keys[changed_rows], is_changed[changed_rows]
        keys[is_changed] = NO_LINK
        link_rows, slots = np.nonzero(is_changed & (node_links >= 0))
        targets = member_of_node[node_links[link_rows, slots]]
        keys[link_rows, slots] = _pair_keys(plan, vectors, block[link_rows], vectors, targets)
        keys.sort(axis=1)
        lists[block] = keys


def _pair_keys(
    plan: VectorPlan,
    sources: Vectors,
    rows: Rows,
    vectors: Vectors,
    members: Rows | Links,
) -> ScoredLinks:
    """Return the (p,) keys of links; link i leads from source `rows[i]` to member `members[i]`."""
    return pack_links(score_pairs(sources, rows, vectors, members, plan.metric), members)


def update_cross_links(
    plan: VectorPlan,
    links: CrossLinks,
    old_lists: ScoredLinks,
    old_members: Rows,
    old_sources: Rows,
    graph: CellGraph,
    vectors: Vectors,
    sources: Vectors,
    has_turn: npt.NDArray[np.bool_],
) -> CrossLinks:
    """Return the links of a cell across its border after a change of its members and sources.

    A source searches for its links if it is new, lost its nearest link, or has its turn: without
    turns, fewer sources would have links to their nearest members after each update. For any other
    source that lost a link or has a new member near it, links are selected again from its remaining
    links, the new members, and the neighbours of lost members and of its nearest links. All other
    sources keep their links.

    Args:
        plan: plan of the index.
        links: links before the change.
        old_lists: (o, 2M) bottom lists before the change.
        old_members: (m,) the previous number of each current member; -1 if it was added.
        old_sources: (s,) the previous number of each current source; -1 if it was added.
        graph: the updated graph.
        vectors: (m, d) float32 of the members.
        sources: (s, d) float32 of the sources.
        has_turn: (s,) whether the source searches in any case.
    """
    old_members, old_sources = _remove_repeats(old_members), _remove_repeats(old_sources)
    staying_sources, is_staying = np.flatnonzero(old_sources >= 0), old_members >= 0
    if not len(staying_sources) or not is_staying.any():
        return link_across_border(graph, vectors, sources, plan.metric)
    new_numbers = _map_members(old_members, len(old_lists))
    old_out_links = links.out_links[old_sources[staying_sources]]  # (y, OUT)
    old_targets = unpack_links(old_out_links)
    targets = new_numbers[old_targets]
    out_links: ScoredLinks = np.full((len(sources), links.out_links.shape[1]), NO_LINK)
    out_links[staying_sources] = np.sort(_replace_targets(old_out_links, targets), axis=1)
    must_search = has_turn | (old_sources < 0)
    must_search[staying_sources] |= targets[:, 0] < 0
    losing_sources, slots = np.nonzero((targets < 0) & (old_targets >= 0) & ~must_search[staying_sources, None])
    # (p, f)
    lost_neighbors = new_numbers[unpack_links(old_lists[old_targets[losing_sources, slots], :CANDIDATES])]
    losing_sources = staying_sources[losing_sources]
    near_keys = pack_links(score_targets(sources[losing_sources], vectors, lost_neighbors, plan.metric), lost_neighbors)
    source_rows, offer_keys = _offer_new_members(plan, old_members, graph, out_links, vectors, sources)
    source_rows, offer_keys = source_rows[~must_search[source_rows]], offer_keys[~must_search[source_rows]]
    changed_sources = np.union1d(losing_sources, source_rows)
    source_rows = np.concatenate([source_rows, np.repeat(losing_sources, near_keys.shape[1])])
    offer_keys = np.concatenate([offer_keys, near_keys.ravel()])
    offered_keys = _group_keys(np.searchsorted(changed_sources, source_rows), offer_keys[:, None], len(changed_sources))
    for start, end in iter_ranges(len(changed_sources), _REPAIR_BLOCK):
        block = changed_sources[start:end]
        block_keys = np.concatenate([out_links[block], offered_keys[start:end]], axis=1)
        best_keys = _select_distinct(block_keys)
        near_targets = unpack_links(best_keys[:, :_NEAR_LINKS])  # (b, w)
        further_members = unpack_links(graph.lists[near_targets, :CANDIDATES])  # (b, w, f)
        # (b, w f)
        further_members = np.where(near_targets[:, :, None] < 0, -1, further_members).reshape(len(block), -1)
        keys = pack_links(score_targets(sources[block], vectors, further_members, plan.metric), further_members)
        candidates = _select_distinct(np.concatenate([best_keys, keys], axis=1))[:, :CANDIDATES]
        out_links[block] = select_diverse(sources[block], vectors, unpack_links(candidates), plan.metric)
    must_search |= (out_links == NO_LINK).all(axis=1)
    out_links[must_search] = search_members(graph, vectors, sources[must_search], plan.metric)
    return add_reverse_links(out_links, len(vectors))


def _select_distinct(keys: ScoredLinks) -> ScoredLinks:
    """Return the distinct keys of each row, nearest first, then `NO_LINK`."""
    sorted_keys = np.sort(keys, axis=1)
    sorted_keys[:, 1:][sorted_keys[:, 1:] == sorted_keys[:, :-1]] = NO_LINK
    return np.sort(sorted_keys, axis=1)


def _offer_new_members(
    plan: VectorPlan,
    old_members: Rows,
    graph: CellGraph,
    out_links: ScoredLinks,
    vectors: Vectors,
    sources: Vectors,
) -> tuple[Rows, ScoredLinks]:
    """Return pairs of a source and a new member that is nearer than the source's farthest link."""
    new_members = np.flatnonzero(old_members < 0)
    near_members = unpack_links(graph.lists[new_members, :_NEAR_MEMBERS])  # (i, f)
    targets = unpack_links(out_links)  # (s, OUT)
    link_order, target_starts = _group_by_target(targets.ravel(), len(vectors))
    # (i, f) sources of each near member
    link_counts = np.where(near_members < 0, 0, np.diff(target_starts)[near_members])
    positions = concatenate_ranges(link_counts.ravel()) + np.repeat(target_starts[near_members], link_counts.ravel())
    link_rows = link_order[positions] // targets.shape[1]
    member_positions = np.repeat(np.arange(len(new_members)), link_counts.sum(axis=1))
    member_positions, link_rows = np.divmod(np.unique(member_positions * len(out_links) + link_rows), len(out_links))
    keys = _pair_keys(plan, sources, link_rows, vectors, new_members[member_positions])
    current_keys = np.where(out_links[link_rows] == NO_LINK, np.uint64(0), out_links[link_rows])
    is_nearer = keys < current_keys.max(axis=1)
    return link_rows[is_nearer], keys[is_nearer]


@compiled
def _group_by_target(targets: Any, n_targets: Any) -> Any:
    """Return the positions in `targets` by target, without -1, and (n_targets + 1,) where each
    begins.
    """
    target_starts = np.zeros(n_targets + 2, np.int64)
    for target in targets:
        target_starts[target + 2] += target >= 0
    target_starts = np.cumsum(target_starts)
    positions = np.empty(target_starts[-1], np.int64)
    for position, target in enumerate(targets):
        if target >= 0:
            positions[target_starts[target + 1]] = position
            target_starts[target + 1] += 1
    return positions, target_starts[:-1]
