"""The postings of a part whose passages are mostly those of earlier parts: only the others are analysed.

A passage's postings depend on its title and text, which its hash identifies. So they are taken over from the earlier
part's piece under the passage's new row, and the result is what counting all passages gives, byte for byte.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rag_model.corpus.passages import PassageFile, hashes_of
from rag_model.index.files.pieces import Array
from rag_model.index.postings.analyzer import Analyzer
from rag_model.index.postings.compiled import compiled
from rag_model.index.postings.counting import counted, counted_texts, texts_of
from rag_model.index.postings.part import PartPostings, PartReader, narrow
from rag_model.index.postings.windows import filled, no_batch, no_windows, take, terms_in

Ints = npt.NDArray[np.int64]
_KEPT = 0.5  # share of the passages that must be there already, for less it is quicker to count them all
_MOVES = 64  # places where kept passages are not in their former order; with more, too


def counted_changes(passages: Path, earlier: Sequence[tuple[Path, PartReader]], analyzer: Analyzer) -> PartPostings:
    """Return what `counted` does; passages that are in earlier parts are not analysed again.

    Args:
        passages: the part.
        earlier: passages of other parts, and their pieces.
        analyzer: the one that made the pieces.

    Raises:
        InputError: as `counted`, or a piece is damaged.
    """
    maps, missing = _maps(passages, earlier)
    n = len(missing)
    moves = sum(int((np.diff(found[found >= 0]) < 0).sum()) for found in maps)
    if missing.sum() > (1 - _KEPT) * n or moves > _MOVES:
        return counted(passages, analyzer)
    fresh = np.flatnonzero(missing)
    with PassageFile(passages) as file:
        others = counted_texts(texts_of(file.iter_chosen(fresh.tolist(), ["title", "text"])), analyzer)
    parts = [part.whole() for _, part in earlier]
    return taken_over([*parts, others], [*maps, fresh.astype(np.int32)], n)


def _maps(passages: Path, earlier: Sequence[tuple[Path, PartReader]]) -> tuple[list[Array], Array]:
    """Return for each row of each earlier part its row now or -1, and which rows now are in none of them, (n,)."""
    hashes = hashes_of(passages)
    missing = np.ones(len(hashes), np.bool_)
    maps = []
    for known, part in earlier:
        rows = np.flatnonzero(missing)
        there = hashes_of(known)
        places = pc.index_in(hashes.take(pa.array(rows)), value_set=there).fill_null(part.n).to_numpy()
        places, firsts = np.unique(places, return_index=True)  # a passage that stands here twice is taken over once
        held = places < min(part.n, len(there))
        maps.append(np.full(part.n, -1, np.int32))
        maps[-1][places[held]] = rows[firsts[held]]
        missing[rows[firsts[held]]] = False
    return maps, missing


def taken_over(parts: Sequence[PartPostings], maps: Sequence[Array], n: int) -> PartPostings:
    """Join postings whose rows become those of `maps`; -1: the passage is left out."""
    windows, terms = no_windows(len(parts), max(len(part.ends) for part in parts)), 0
    for number, part in enumerate(parts):
        counts = np.diff(part.ends, prepend=0)
        windows = filled(windows, number, part.text, part.cuts, counts)
        terms += len(counts)
    batch = no_batch(terms, terms, sum(len(part.text) for part in parts))
    for _ in parts:  # each ends once
        take(windows, batch, np.iinfo(np.int64).max)
    rows, weights, kept = _taken(parts, maps, batch.parts, batch.shares, batch.ends[: terms_in(batch)])
    held, cuts = kept > 0, batch.cuts[: len(kept)]
    sizes = np.diff(cuts, prepend=0)
    lengths = np.zeros(n, np.uint16)
    for part, found in zip(parts, maps, strict=True):
        lengths[found[found >= 0]] = part.lengths[found >= 0]
    return PartPostings(
        lengths.astype("<u2"),
        batch.text[: cuts[-1] if len(cuts) else 0][np.repeat(held, sizes)],
        np.cumsum(sizes[held]).astype("<i8"),
        np.cumsum(kept[held]).astype("<i8"),
        narrow(rows, n),
        narrow(weights, int(weights.max(initial=0)) + 1),
    )


def _taken(
    parts: Sequence[PartPostings], maps: Sequence[Array], owners: Ints, shares: Ints, ends: Ints
) -> tuple[Array, Array, Ints]:
    """Return rows and weights term by term, and how many each term has."""
    rows = np.concatenate([part.rows for part in parts], dtype=np.uint32)
    weights = np.concatenate([part.weights for part in parts], dtype=np.uint16)
    starts = _starts([len(part.rows) for part in parts])
    kept = np.empty(len(ends), np.int64)
    out_rows, out_weights = np.empty(len(rows), np.uint32), np.empty(len(rows), np.uint16)
    moved, places = np.concatenate(maps), _starts([len(found) for found in maps])
    spare = np.empty(len(moved), np.uint32), np.empty(len(moved), np.uint16)
    size = _take(owners, shares, ends, starts, rows, weights, moved, places, out_rows, out_weights, *spare, kept)
    return out_rows[:size], out_weights[:size], kept


def _starts(sizes: Sequence[int]) -> Ints:
    return np.cumsum([0, *sizes[:-1]], dtype=np.int64)


@compiled
def _merge(rows, weights, begin, middle, end, spare_rows, spare_weights):
    """Merge two ascending runs, [begin, middle) and [middle, end), in place."""
    if begin == middle or rows[middle - 1] < rows[middle]:
        return
    size = end - middle
    for i in range(size):
        spare_rows[i], spare_weights[i] = rows[middle + i], weights[middle + i]
    left, right, at = middle - 1, size - 1, end - 1
    while right >= 0:
        if left >= begin and rows[left] > spare_rows[right]:
            rows[at], weights[at] = rows[left], weights[left]
            left -= 1
        else:
            rows[at], weights[at] = spare_rows[right], spare_weights[right]
            right -= 1
        at -= 1


@compiled
def _take(owners, shares, ends, starts, rows, weights, maps, places, out_rows, out_weights, spare, spare_weights, kept):
    """Take over the postings of each term under their new rows, in their order; return how many there are.

    Args:
        owners: (s,) the source of each share; those of a term one after another.
        shares: (s,) its postings.
        ends: (t,) where the shares of each term end.
        starts: where the postings of each source begin; moved.
        rows: of all sources, one after another; counted from the source's first.
        weights: of all sources.
        maps: the new row of each row of each source, or -1.
        places: where those of each source begin.
        out_rows: filled.
        out_weights: filled.
        spare: uint32, with room for a row of each.
        spare_weights: the same for weights.
        kept: (t,) filled with the postings of each term.
    """
    at, share = 0, 0
    for term in range(len(ends)):
        begin = at
        while share < ends[term]:
            source = owners[share]
            first, place = starts[source], places[source]
            starts[source] = first + shares[share]
            run = at
            for i in range(first, starts[source]):
                row = maps[place + rows[i]]
                if row < 0:
                    continue
                if at > run and row < out_rows[at - 1]:  # a passage that was moved: another run begins
                    _merge(out_rows, out_weights, begin, run, at, spare, spare_weights)
                    run = at
                out_rows[at], out_weights[at] = row, weights[i]
                at += 1
            if at > run:
                _merge(out_rows, out_weights, begin, run, at, spare, spare_weights)
            share += 1
        kept[term] = at - begin
    return at
