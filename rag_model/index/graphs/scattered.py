"""The vectors of one part, sorted by cell, so that a cell's worker reads only its slice of every part.

Groups 2c and 2c + 1 are cell c's members (its own vectors and those that join it from neighbouring cells) and the
vectors that are linked into it. Within a group rows ascend, so reading the parts in order gives a cell's rows in order.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from rag_model.digest import digest_bytes
from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.files.pieces import Array, Opener, Piece, stamp_of, write_piece
from rag_model.index.files.vectors import VectorFiles
from rag_model.index.graphs.cells import Cells
from rag_model.index.graphs.graph import Links
from rag_model.index.recipe import VectorPlan

_READERS = 16  # pieces that are read at once
_BEGINS, _ROWS, _VECTORS, _COUNT = range(4)  # the arrays of a piece


def write_scattered(
    plan: VectorPlan, trained: Path, cells: Cells, part: VectorFiles, number: int, out: Path
) -> tuple[Rows, list[str]]:
    """Sort a part's vectors by cell and write them in their own dtype.

    Returns the start of each group, and the end; and for each cell a digest of both its groups, "" if they are empty.

    Holds the part's vectors two to three times.

    Raises:
        InputError: a row holds a NaN or an infinity.
        ResourceError: the file cannot be written.
    """
    vectors = part.all()
    begins, rows = _sorted(plan, cells, vectors)
    scattered = vectors.astype(part.dtype)[rows]
    arrays: list[Array] = [begins, rows, scattered, np.array([part.n])]
    write_piece(out, stamp_of(plan, trained, "scattered", number), arrays)
    edges = begins.tolist()
    slices = [_slice(scattered[a:c], b - a) for a, b, c in zip(edges[:-1:2], edges[1::2], edges[2::2], strict=True)]
    return begins, slices


def _slice(vectors: Array, members: int) -> str:
    """Return a digest of a cell's slice of a part: 128 bits, because there are parts x cells of them."""
    return digest_bytes(b"%d %s" % (members, vectors.data.cast("B")))[-32:] if len(vectors) else ""


def read_vectors(plan: VectorPlan, trained: Path, scattered: Sequence[Opener], cell: int) -> tuple[Vectors, Vectors]:
    """Return a cell's members and the vectors linked into it: (m, d) and (l, d) float32, of all parts, in row order.

    Fetches only their bytes, of many parts at once: on an object store that is mostly waiting.

    Raises:
        InputError: a piece is missing, truncated, or of another build.
    """

    def read(number: int) -> tuple[Array, int]:
        with _piece(plan, trained, scattered, number) as piece:
            first, middle, last = piece.read(_BEGINS, 2 * cell, 2 * cell + 3).tolist()
            return piece.read(_VECTORS, first, last), middle - first

    members, linked = ([np.empty((0, plan.d), np.float32)] for _ in range(2))
    with ThreadPoolExecutor(_READERS) as threads:
        for vectors, count in threads.map(read, range(len(scattered))):
            members.append(vectors[:count].astype(np.float32))
            linked.append(vectors[count:].astype(np.float32))
    return np.concatenate(members), np.concatenate(linked)


def read_rows(plan: VectorPlan, trained: Path, scattered: Sequence[Opener]) -> list[Links]:
    """Return the global rows of every group, ascending int32: 4 bytes per vector, copies included.

    Raises:
        InputError: a piece is missing, truncated, or of another build.
    """
    found: list[list[Array]] = [[] for _ in range(2 * plan.cells)]
    start = 0
    for piece in _pieces(plan, trained, scattered):
        begins, rows = piece.read(_BEGINS), piece.read(_ROWS)
        for group in np.flatnonzero(np.diff(begins)):
            found[group].append(rows[begins[group] : begins[group + 1]] + np.int32(start))
        start += int(piece.read(_COUNT)[0])
    return [np.concatenate([np.empty(0, np.int32), *pieces]) for pieces in found]


def _sorted(plan: VectorPlan, cells: Cells, vectors: Vectors) -> tuple[Rows, Links]:
    own, (joining, joined), (linking, linked) = cells.assign(plan.metric, vectors)
    groups = np.concatenate([2 * own, 2 * joined, 2 * linked + 1])  # (m,), (p,), (l,) -> (m + p + l,)
    rows = np.concatenate([np.arange(len(vectors)), joining, linking])
    order = np.lexsort((rows, groups))
    begins = np.searchsorted(groups[order], np.arange(2 * plan.cells + 1))
    return begins, rows[order].astype(np.int32)


def _pieces(plan: VectorPlan, trained: Path, scattered: Sequence[Opener]) -> Iterator[Piece]:
    """Open the pieces one after the other: there may be more pieces than the limit of open files."""
    for number in range(len(scattered)):
        with _piece(plan, trained, scattered, number) as piece:
            yield piece


def _piece(plan: VectorPlan, trained: Path, scattered: Sequence[Opener], number: int) -> Piece:
    stamp = stamp_of(plan, trained, "scattered", number)
    return Piece.open(scattered[number], stamp, 4, f"the scattered piece of part {number}")
