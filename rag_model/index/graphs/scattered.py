"""The vectors of one part, sorted by cell, so that a cell's worker reads only its slice of every part.

Groups 2c and 2c + 1 are cell c's members (its own vectors and those that join it from neighbouring cells) and the
vectors that are linked into it. Within a group rows ascend, so reading the parts in order gives a cell's rows in order.
A cell's slice is its two groups' vectors, behind their counts and the bytes of a number.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from rag_model.errors import InputError
from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.files.pieces import Array, Opener, stamp_of
from rag_model.index.files.slices import open_head, write_sliced
from rag_model.index.files.vectors import VectorFiles
from rag_model.index.graphs.cells import Cells
from rag_model.index.graphs.graph import Links
from rag_model.index.recipe import VectorPlan

_BEGINS, _ROWS, _COUNT = range(3)  # the arrays of a piece's head
_COUNTS = np.dtype([("members", "<i8"), ("linked", "<i8"), ("width", "<i8")])  # how a slice begins


def write_scattered(plan: VectorPlan, trained: Path, cells: Cells, part: VectorFiles, number: int, out: Path) -> Rows:
    """Sort a part's vectors by cell and write them in their own dtype; return the start of each group, and the end.

    Holds the part's vectors up to five times.

    Raises:
        InputError: a row holds a NaN or an infinity.
        ResourceError: the file cannot be written.
    """
    vectors = part.all()
    begins, rows = _sorted(plan, cells, vectors)
    stored, edges = vectors.astype(part.dtype, copy=False), begins.tolist()
    slices = [
        _slice(stored[rows[first:last]], middle - first)
        for first, middle, last in zip(edges[:-1:2], edges[1::2], edges[2::2], strict=True)
    ]
    arrays: list[Array] = [begins, rows, np.array([part.n])]
    write_sliced(out, stamp_of(plan, trained, "scattered", number), arrays, slices, np.diff(begins)[::2].tolist())
    return begins


def _slice(vectors: Vectors, members: int) -> bytes:
    if not len(vectors):
        return b""
    counts = np.array((members, len(vectors) - members, vectors.itemsize), _COUNTS)
    return b"".join((counts.tobytes(), vectors.data.cast("B")))


def vectors_of(slices: Iterable[bytes], dim: int) -> tuple[Vectors, Vectors]:
    """Return a cell's members and the vectors linked into it, (m, d) and (l, d) float32, of its slices in row order.

    Raises:
        InputError: bytes are no slice of vectors of `dim` dimensions.
    """
    members, linked = ([np.empty((0, dim), np.float32)] for _ in range(2))
    for data in slices:
        count, more, width = np.frombuffer(data, _COUNTS, 1)[0].tolist() if len(data) >= _COUNTS.itemsize else (0, 0, 0)
        if min(count, more) < 0 or width not in (2, 4) or len(data) != _COUNTS.itemsize + (count + more) * dim * width:
            raise InputError(
                f"a slice of a scattered piece does not hold vectors of {dim} dimensions: build the index again"
            )
        # flat -> (m + l, d)
        vectors = np.frombuffer(data, f"<f{width}", offset=_COUNTS.itemsize).reshape(-1, dim).astype(np.float32)
        members.append(vectors[:count])
        linked.append(vectors[count:])
    return np.concatenate(members), np.concatenate(linked)


def read_rows(plan: VectorPlan, trained: Path, scattered: Sequence[Opener]) -> list[Links]:
    """Return the global rows of every group, ascending int32: 4 bytes per vector, copies included, and as much again
    meanwhile, with 8 for each cell of each part.

    Raises:
        InputError: a piece is missing, truncated, or of another build.
    """
    begins = np.empty((len(scattered), 2 * plan.cells + 1), np.int32)
    parts, start = list[Links](), 0
    for number, opener in enumerate(scattered):
        stamp = stamp_of(plan, trained, "scattered", number)
        with open_head(opener, plan.shards, stamp, _COUNT + 1, f"the scattered piece of part {number}") as piece:
            begins[number] = piece.read(_BEGINS)
            parts.append(piece.read(_ROWS) + np.int32(start))
            start += int(piece.read(_COUNT)[0])
    ends = np.cumsum(begins[:, 1:].sum(0, np.int64) - begins[:, :-1].sum(0, np.int64))  # (groups,): all end to end
    free, rows = np.concatenate([[0], ends[:-1]]), np.empty(int(ends[-1]), np.int32)
    for number, own in enumerate(parts):
        counts = np.diff(begins[number])
        rows[np.repeat(free - begins[number, :-1], counts) + np.arange(len(own))] = own
        free += counts
    return np.split(rows, ends[:-1])


def _sorted(plan: VectorPlan, cells: Cells, vectors: Vectors) -> tuple[Rows, Links]:
    own, (joining, joined), (linking, linked) = cells.assign(plan.metric, vectors)
    groups = np.concatenate([2 * own, 2 * joined, 2 * linked + 1])  # (m,), (p,), (l,) -> (m + p + l,)
    rows = np.concatenate([np.arange(len(vectors)), joining, linking])
    order = np.lexsort((rows, groups))
    begins = np.searchsorted(groups[order], np.arange(2 * plan.cells + 1))
    return begins, rows[order].astype(np.int32)
