"""Update a cell's graph in place of building it again: drop members, repair their links, insert.

A cell's graph has its members as nodes. The graph's sources are vectors of other cells near the
border that are linked into the cell: they have links to members, and members to them, but they are
no nodes of its graph, and no link leads from one source to another (`stitch`).

An update needs only the bottom lists of the old shard and the vectors of the new members. Upper
levels are drawn and linked again: they hold one member in M, which is cheaper than to keep them.

A dropped member leaves two kinds of gaps. A member that linked to it loses a link, and a member
that it linked to loses a way in. Both gaps are closed at once: a member that lost a link is linked,
in both directions, to near remaining members, unless another of its links leads in the same
direction. These are neighbours of the dropped member and of the nearest links that stay. (Links to
the nearest members in place of the lost ones lose 1.4 points of recall in 24 updates of weak
vectors. Without the neighbours of links that stay, 12 updates of 20,000 such vectors lose .59
instead of .19, and without the links back, 100 updates of 2 % lose a seventh of all links.) Then
faiss inserts the new members. The links that stay keep their similarities.

Reference: Singh et al. FreshDiskANN: a fast and accurate graph-based ANN index for streaming
similarity search. 2021, algorithm 4.
"""

import numpy as np
import numpy.typing as npt

from rag_model.arrays import concatenated_ranges
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
    bottom_links,
    count_slots,
    draw_levels,
    iter_ranges,
    lay_out_slots,
    links_per_node,
    new_graph,
    pack_links,
    pair_similarities,
    similarities,
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

_REPAIR_BLOCK = 1_024  # members whose links are repaired at once
# Members near a member that lost links, from which others are selected: after 50 updates of 2 % of
# 20,000 weak vectors, a cell has 1.02 times its first number of links; with 64 candidates, .95
# times.
_REPAIR_CANDIDATES = 128
_NO_CODE = np.int32(2**31 - 1)  # code of an empty slot, larger than twice any member's number
_OWN_LINKS = 4  # number of a member's nearest remaining links whose neighbours are candidates too
_NEAR_MEMBERS = 32  # number of members near a new member whose sources are offered it as a link
_NEAR_LINKS = 2  # number of a source's nearest links whose neighbours are candidates for its links
SEARCH_TURNS = 32  # updates in which each source searches for its links once


def update_cell_graph(
    plan: VectorPlan,
    lists: ScoredLinks,
    old_members: Rows,
    vectors: Vectors,
) -> CellGraph:
    """Return the graph of a cell after a change of its members.

    The result is a function of the arguments. The result holds no number and no similarity of a
    dropped member. Holds the vectors twice.

    Args:
        plan: plan of the index.
        lists: (o, 2M) bottom lists of the cell's old members.
        old_members: (m,) for each new member its number among the old ones, -1 for a new one.
        vectors: (m, d) float32 of the new members.
    """
    old_members = _remove_repeats(old_members)
    is_staying = old_members >= 0
    staying, inserted = np.flatnonzero(is_staying), np.flatnonzero(~is_staying)
    if not len(staying):
        return CellGraph.build(plan, vectors)
    new_lists = _drop_members(plan, lists, old_members, vectors)
    members = np.concatenate([staying, inserted])
    index = load_graph(plan, new_lists, members, len(staying), vectors)
    if len(inserted):
        index.add(vectors[inserted])
        _rank_changed_links(plan, index, members, new_lists, vectors)
    return CellGraph(index, members, new_lists)


def _remove_repeats(old_numbers: Rows) -> Rows:
    """Return the numbers with -1 in place of each repetition of an earlier number."""
    distinct_numbers = np.full(len(old_numbers), -1)
    numbers, first = np.unique(old_numbers, return_index=True)
    distinct_numbers[first] = numbers
    return distinct_numbers


def _map_members(old_members: Rows, count: int) -> Links:
    """Return the new number of each old member, -1 if dropped; the last entry, -1, stands for no
    link.
    """
    new_numbers = np.full(count + 1, -1, np.int32)
    is_staying = old_members >= 0
    new_numbers[old_members[is_staying]] = np.flatnonzero(is_staying)
    return new_numbers


def _renumber(keys: ScoredLinks, targets: Links) -> ScoredLinks:
    """Replace the targets of keys; -1 removes the link."""
    return np.where(targets < 0, NO_LINK, keys & SIMILARITY_BITS | targets.astype(np.uint32))


def _drop_members(
    plan: VectorPlan,
    lists: ScoredLinks,
    old_members: Rows,
    vectors: Vectors,
) -> ScoredLinks:
    """Return (m, 2M) repaired lists by new numbers; those of new members are empty."""
    new_numbers = _map_members(old_members, len(lists))
    new_lists = np.full((len(vectors), lists.shape[1]), NO_LINK)
    staying = np.flatnonzero(old_members >= 0)
    pairs = []  # members that lost a link, and the old numbers of its targets
    for first, last in iter_ranges(len(staying)):
        members = staying[first:last]
        old_lists = lists[old_members[members]]
        old_targets = unpack_links(old_lists)  # (b, 2M)
        targets = new_numbers[old_targets]
        new_lists[members] = np.sort(_renumber(old_lists, targets), axis=1)
        rows, slots = np.nonzero((targets < 0) & (old_targets >= 0))
        pairs.append((members[rows], old_targets[rows, slots]))
    losing_members, lost_targets = map(np.concatenate, zip(*pairs, strict=True))
    affected_members, begins = np.unique(losing_members, return_index=True)
    begins = np.append(begins, len(losing_members))
    offers = []  # reverse links: the members that get one, and its key
    for first, last in iter_ranges(len(affected_members), _REPAIR_BLOCK):
        members, pair = affected_members[first:last], slice(begins[first], begins[last])
        candidates = new_numbers[unpack_links(lists[lost_targets[pair]])]  # (p, 2M)
        rows = np.repeat(np.arange(last - first), np.diff(begins[first : last + 1]))
        links = new_lists[members]
        near_members = unpack_links(links[:, :_OWN_LINKS])
        near_rows, near_slots = np.nonzero(near_members >= 0)
        rows = np.concatenate([rows, near_rows])
        candidates = np.concatenate([candidates, unpack_links(new_lists[near_members[near_rows, near_slots]])])
        candidates = _group_candidates(rows, candidates, members, unpack_links(links))
        added_keys = _select_directions(plan, vectors, members, links, candidates)
        new_lists[members] = np.sort(np.concatenate([links, added_keys], axis=1), axis=1)[:, : links.shape[1]]
        rows, slots = np.nonzero(added_keys != NO_LINK)
        keys = added_keys[rows, slots]
        offers.append((unpack_links(keys), keys & SIMILARITY_BITS | members[rows].astype(np.uint64)))
    if offers:
        _link_back(new_lists, *map(np.concatenate, zip(*offers, strict=True)))
    return new_lists


def _group_candidates(rows: Rows, candidates: Links, members: Rows, links: Links) -> Links:
    """Return (a, c) distinct candidates of each member, then -1, without itself and its links.

    Args:
        rows: (p,) the row in `members` of each list of candidates.
        candidates: (p, w) members, -1 where none.
        members: (a,) members that lost links.
        links: (a, 2M) the links that remain.
    """
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    list_number = np.arange(len(rows)) - np.searchsorted(rows, rows)  # among the lists of the same row
    # A member's code is twice its number, plus 1 for a candidate. Sorting many short rows is several
    # times as fast as sorting all codes at once.
    codes = np.full((len(members), int(list_number.max(initial=-1)) + 1, candidates.shape[1]), _NO_CODE)
    codes[rows, list_number] = np.where(candidates[order] < 0, _NO_CODE, 2 * candidates[order] + 1)
    excluded = np.column_stack([members, np.where(links < 0, members[:, None], links)]).astype(np.int32)
    codes = np.concatenate([codes.reshape(len(members), -1), 2 * excluded], axis=1)
    codes.sort(axis=1)  # now equal members are adjacent, excluded ones first
    is_first = np.ones(codes.shape, np.bool_)
    is_first[:, 1:] = codes[:, 1:] >> 1 != codes[:, :-1] >> 1
    codes[~is_first | (codes % 2 == 0)] = _NO_CODE
    codes.sort(axis=1)
    codes = codes[:, : int((codes < _NO_CODE).sum(axis=1).max(initial=0))]
    return np.where(codes == _NO_CODE, np.int32(-1), codes >> 1)


def _select_directions(
    plan: VectorPlan,
    vectors: Vectors,
    members: Rows,
    links: ScoredLinks,
    candidates: Links,
) -> ScoredLinks:
    """Return (a, w) keys of the candidates that lead in directions without a link, or `NO_LINK`.

    As in an insertion, a candidate is selected if it is nearer to the member than to every link of
    the member, kept or selected before, that is nearer than the candidate.

    Args:
        plan: plan of the index.
        vectors: (m, d) float32.
        members: (a,) members that lost links.
        links: (a, 2M) keys of the links that remain, nearest first.
        candidates: (a, c) candidates of each member, -1 where none.
    """
    keys = pack_links(similarities(vectors[members], vectors, candidates, plan.metric), candidates)
    keys = np.sort(keys, axis=1)[:, :_REPAIR_CANDIDATES]
    width = int((links != NO_LINK).sum(axis=1).max(initial=0))
    keys = np.concatenate([links[:, :width], keys], axis=1)
    order = np.argsort(keys, axis=1)
    keys = np.take_along_axis(keys, order, axis=1)
    targets, is_candidate = unpack_links(keys), order >= width
    is_link = keys != NO_LINK
    # Transposed, because the loop below reads one column of all members at a time.
    link_columns = np.ascontiguousarray(is_link.T)
    target_columns = np.ascontiguousarray(targets.T, np.int64)
    rows, columns = np.nonzero(is_candidate & is_link)  # candidates that no link has excluded yet
    pending_members = targets[rows, columns].astype(np.int64)
    to_member = unpack_similarities(keys[rows, columns])
    rows, columns = rows.astype(np.int32), columns.astype(np.int32)
    for column in range(keys.shape[1]):
        is_pending = columns > column
        compared_candidates = np.flatnonzero(link_columns[column][rows] & is_pending)
        nearer_members = target_columns[column][rows[compared_candidates]]
        between = pair_similarities(vectors, nearer_members, vectors, pending_members[compared_candidates], plan.metric)
        excluded_candidates = compared_candidates[between > to_member[compared_candidates]]
        link_columns[columns[excluded_candidates], rows[excluded_candidates]] = False
        is_pending[excluded_candidates] = False
        pending_candidates = np.flatnonzero(is_pending)
        rows, columns = rows[pending_candidates], columns[pending_candidates]
        pending_members, to_member = pending_members[pending_candidates], to_member[pending_candidates]
        if not len(rows):
            break
    return np.where(is_candidate & link_columns.T, keys, NO_LINK)


def _link_back(lists: ScoredLinks, members: Links, keys: ScoredLinks) -> None:
    """Add the nearest of the links (p,) to the lists of `members`, (p,), that have room, in place."""
    is_new = np.empty(len(keys), np.bool_)
    for first, last in iter_ranges(len(keys)):
        targets = unpack_links(lists[members[first:last]])  # (b, 2M)
        is_new[first:last] = (targets != unpack_links(keys[first:last, None])).all(axis=1)
    members, keys = members[is_new], keys[is_new]
    order = np.lexsort((keys, members))
    members, keys = members[order], keys[order]
    changed_members, begins, counts = np.unique(members, return_index=True, return_counts=True)
    n_filled = (lists[changed_members] != NO_LINK).sum(axis=1)
    slots = np.arange(len(keys)) + np.repeat(n_filled - begins, counts)
    has_room = slots < lists.shape[1]
    lists[members[has_room], slots[has_room]] = keys[has_room]
    lists[changed_members] = np.sort(lists[changed_members], axis=1)


def _group_keys(rows: Rows, keys: ScoredLinks, count: int) -> ScoredLinks:
    """Return the distinct keys of each row, nearest first: (count, c), from (p, w)."""
    is_link = keys != NO_LINK
    flat_rows, flat_keys = np.broadcast_to(rows[:, None], keys.shape)[is_link], keys[is_link]
    order = np.lexsort((flat_keys, flat_rows))
    flat_rows, flat_keys = flat_rows[order], flat_keys[order]
    is_distinct = np.ones(len(flat_keys), np.bool_)
    is_distinct[1:] = (flat_keys[1:] != flat_keys[:-1]) | (flat_rows[1:] != flat_rows[:-1])
    flat_rows, flat_keys = flat_rows[is_distinct], flat_keys[is_distinct]
    column = np.arange(len(flat_rows)) - np.searchsorted(flat_rows, flat_rows)
    grouped_keys = np.full((count, int(column.max(initial=-1)) + 1), NO_LINK)
    grouped_keys[flat_rows, column] = flat_keys
    return grouped_keys


def load_graph(
    plan: VectorPlan,
    lists: ScoredLinks,
    members: Rows,
    count: int,
    vectors: Vectors,
) -> FaissIndex:
    """Return a faiss graph over the first `count` of `members`, ready for the others."""
    links, levels = links_per_node(plan), draw_levels(len(members), links_per_node(plan))
    loaded_members, present_levels = members[:count], levels[:count]
    upper = UpperLevels.build(
        present_levels,
        links,
        vectors[loaded_members[present_levels > 1]],
        plan.metric,
        min(UPPER_EF_CONSTRUCTION, plan.ef_construction),
    )
    nodes = _number_nodes(members)
    index = new_graph(plan.d, links, plan.metric, plan.ef_construction)
    slots = np.concatenate([np.zeros(1, np.int64), np.cumsum(count_slots(present_levels, links))])
    neighbors = np.empty(int(slots[-1]), np.int32)
    storage = faiss.downcast_index(index.storage)
    storage.codes.resize(count * plan.d * 4)
    stored_vectors = engine.view_array(storage.codes).view(np.float32).reshape(count, plan.d)
    for first, last in iter_ranges(count):
        bottom = nodes[unpack_links(lists[loaded_members[first:last]])]  # (b, 2M)
        neighbors[slots[first] : slots[last]] = lay_out_slots(
            bottom, levels[first:last], links, upper.slice_nodes(first, last), first
        )
        stored_vectors[first:last] = vectors[loaded_members[first:last]]
    storage.ntotal = index.ntotal = count
    faiss.copy_array_to_vector(slots.astype(np.uint64), index.hnsw.offsets)
    faiss.copy_array_to_vector(neighbors, index.hnsw.neighbors)
    faiss.copy_array_to_vector(levels, index.hnsw.levels)
    index.hnsw.entry_point, index.hnsw.max_level = upper.entry, upper.top
    return index


def _number_nodes(members: Rows) -> Links:
    """Return an (m + 1,) array with the node of each member; the last entry, -1, stands for no
    link.
    """
    nodes = np.full(len(members) + 1, -1, np.int32)
    nodes[members] = np.arange(len(members))
    return nodes


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
    nodes, numbers = _number_nodes(members), np.append(members, -1).astype(np.int32)
    for first, last in iter_ranges(len(members)):
        block = members[first:last]
        links, keys = bottom_links(index, first, last), lists[block]  # (b, 2M)
        is_changed = links != nodes[unpack_links(keys)]
        keys[is_changed] = NO_LINK
        rows, slots = np.nonzero(is_changed & (links >= 0))
        targets = numbers[links[rows, slots]]
        keys[rows, slots] = _pair_keys(plan, vectors, block[rows], vectors, targets)
        keys.sort(axis=1)
        lists[block] = keys


def _pair_keys(
    plan: VectorPlan,
    sources: Vectors,
    rows: Rows,
    vectors: Vectors,
    members: Rows | Links,
) -> ScoredLinks:
    """Return the keys of links between pairs of a source and a member, (p,) and (p,)."""
    return pack_links(pair_similarities(sources, rows, vectors, members, plan.metric), members)


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

    A source searches for its links if it is new, lost the nearest one, or has its turn: without
    turns, fewer sources would find the members nearest to them after each update. Any other source
    keeps its links, unless it lost one or a new member is near: then its links are selected again,
    from those that it has, the new members, and the neighbours of lost members and of its nearest
    links.

    Args:
        plan: plan of the index.
        links: links before the change.
        old_lists: (o, 2M) bottom lists before the change.
        old_members: (m,) for each new member its number among the old ones, -1 for a new one.
        old_sources: (s,) likewise for the sources.
        graph: the updated graph.
        vectors: (m, d) float32 of the members.
        sources: (s, d) float32 of the sources.
        has_turn: (s,) whether the source searches in any case.
    """
    old_members, old_sources = _remove_repeats(old_members), _remove_repeats(old_sources)
    staying, members_stay = np.flatnonzero(old_sources >= 0), old_members >= 0
    if not len(staying) or not members_stay.any():
        return link_across_border(graph, vectors, sources, plan.metric)
    new_numbers = _map_members(old_members, len(old_lists))
    old_out = links.out[old_sources[staying]]  # (y, OUT)
    old_targets = unpack_links(old_out)
    targets = new_numbers[old_targets]
    out: ScoredLinks = np.full((len(sources), links.out.shape[1]), NO_LINK)
    out[staying] = np.sort(_renumber(old_out, targets), axis=1)
    must_search = has_turn | (old_sources < 0)
    must_search[staying] |= targets[:, 0] < 0
    losing_sources, slots = np.nonzero((targets < 0) & (old_targets >= 0) & ~must_search[staying, None])
    # (p, f)
    near_lost = new_numbers[unpack_links(old_lists[old_targets[losing_sources, slots], :CANDIDATES])]
    losing_sources = staying[losing_sources]
    near_keys = pack_links(similarities(sources[losing_sources], vectors, near_lost, plan.metric), near_lost)
    rows, offers = _offer_new_members(plan, old_members, graph, out, vectors, sources)
    rows, offers = rows[~must_search[rows]], offers[~must_search[rows]]
    changed_sources = np.union1d(losing_sources, rows)
    rows = np.concatenate([rows, np.repeat(losing_sources, near_keys.shape[1])])
    offers = np.concatenate([offers, near_keys.ravel()])
    offered_keys = _group_keys(np.searchsorted(changed_sources, rows), offers[:, None], len(changed_sources))
    for first, last in iter_ranges(len(changed_sources), _REPAIR_BLOCK):
        block = changed_sources[first:last]
        best_keys = _select_distinct(np.concatenate([out[block], offered_keys[first:last]], axis=1))
        near_targets = unpack_links(best_keys[:, :_NEAR_LINKS])  # (b, w)
        further_members = unpack_links(graph.lists[near_targets, :CANDIDATES])  # (b, w, f)
        # (b, w f)
        further_members = np.where(near_targets[:, :, None] < 0, -1, further_members).reshape(len(block), -1)
        keys = pack_links(similarities(sources[block], vectors, further_members, plan.metric), further_members)
        candidates = _select_distinct(np.concatenate([best_keys, keys], axis=1))[:, :CANDIDATES]
        out[block] = select_diverse(sources[block], vectors, unpack_links(candidates), plan.metric)
    searching_sources = np.flatnonzero(must_search | (out == NO_LINK).all(axis=1))
    out[searching_sources] = search_members(graph, vectors, sources[searching_sources], plan.metric)
    return add_reverse_links(out, len(vectors))


def _select_distinct(keys: ScoredLinks) -> ScoredLinks:
    """Return the distinct keys of each row, nearest first, then `NO_LINK`."""
    ranked = np.sort(keys, axis=1)
    ranked[:, 1:][ranked[:, 1:] == ranked[:, :-1]] = NO_LINK
    return np.sort(ranked, axis=1)


def _offer_new_members(
    plan: VectorPlan,
    old_members: Rows,
    graph: CellGraph,
    out: ScoredLinks,
    vectors: Vectors,
    sources: Vectors,
) -> tuple[Rows, ScoredLinks]:
    """Return pairs of a source and a new member that is nearer than the source's farthest link."""
    inserted = np.flatnonzero(old_members < 0)
    near_members = unpack_links(graph.lists[inserted, :_NEAR_MEMBERS])  # (i, f)
    targets = unpack_links(out)  # (s, OUT)
    # Pairs of target and position are sorted as numbers, several times as fast as `argsort`.
    slots = np.sort(targets.ravel().astype(np.int64) << 32 | np.arange(targets.size))
    order, begins = slots & 0xFFFFFFFF, np.searchsorted(slots >> 32, np.arange(len(vectors) + 1))
    # (i, f) sources of each near member
    counts = np.where(near_members < 0, 0, np.diff(begins)[near_members])
    positions = concatenated_ranges(counts.ravel()) + np.repeat(begins[near_members], counts.ravel())
    rows = order[positions] // targets.shape[1]
    number = np.repeat(np.arange(len(inserted)), counts.sum(axis=1))
    number, rows = np.divmod(np.unique(number * len(out) + rows), len(out))
    keys = _pair_keys(plan, sources, rows, vectors, inserted[number])
    current_keys = np.where(out[rows] == NO_LINK, np.uint64(0), out[rows])
    is_nearer = keys < current_keys.max(axis=1)
    return rows[is_nearer], keys[is_nearer]
