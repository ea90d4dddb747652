"""Cells: partition a corpus so that HNSW graphs can be built separately and then stitched into one.

k-means of a sample gives the centroids. Each vector belongs to its nearest cell. Vectors near a
border connect the graphs of neighbouring cells. For this, all pairs of a vector and another near
cell are sorted by margin: how much nearer the vector is to its own cell. In the first pairs
(`border` of them per vector on average), the vector joins the graph of the other cell too. In the
next pairs (`linked` per vector), it is linked into the other cell without joining it: links lead
from the vector to members of that cell and back, but the vector is not a node of that cell's graph.

A part's piece holds its vectors sorted by cell, so that a cell's worker reads only its slice of
every part. Groups 2c and 2c + 1 are cell c's members (its own vectors and those that join it from
neighbouring cells) and the vectors linked into it. Within a group rows ascend, so reading the parts
in order gives a cell's rows in order. A cell's slice has a header (the sizes of both groups, and
the bytes per component), the vectors of both groups, and a digest of each vector, by which an
update recognizes unchanged vectors.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from rag_model.errors import InputError, ResourceError
from rag_model.index.files import engine
from rag_model.index.files.engine import FaissIndex, Rows, Vectors, faiss
from rag_model.index.files.pieces import Array, Opener, compute_stamp, open_piece_head, write_sliced_piece
from rag_model.index.files.vectors import VectorFiles
from rag_model.index.graphs.graph import Links
from rag_model.index.recipe import VectorPlan

_POINTS_PER_CELL = 1_000  # training points per cell: enough for stable borders
_KMEANS_ROUNDS = 10
# Maximum number of further cells that a vector may join. More than one is needed, because one in
# seven neighbours lies beyond the second nearest cell.
_MAX_OTHER_CELLS = 3
_KMEANS_SHARE = 0.75  # share of the cells from k-means; the others come from splitting the largest
_MAX_IMBALANCE = 1.5  # largest accepted size of a cell, as a multiple of the mean
_MAX_SPLITS = 2  # maximum number of splits per planned cell
# If the ratio of planned to earlier cells is larger than this, the cells are trained again.
MAX_CELL_RATIO = 2

CellIds = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]  # 8-byte digests of stored vectors
Pairs = tuple[npt.NDArray[np.int64], CellIds]  # (p,) vector numbers, and (p,) cells
_GROUP_STARTS, _ROWS, _PART_ROWS = range(3)  # positions of the arrays in a piece's head
# sizes of both groups of a slice, and the bytes per component of its vectors
_SLICE_HEADER = np.dtype([("members", "<i8"), ("linked", "<i8"), ("width", "<i8")])


@dataclass(frozen=True, slots=True)
class Cells:
    """The trained partition of a corpus."""

    centroids: Vectors  # (c, d) float32, c <= the plan's cells; any further cells are empty
    # A vector joins another cell if its margin is smaller than this. The margin is the difference
    # between its similarities to the centroids of its own cell and of the other cell.
    join_margin: float
    link_margin: float  # other vectors are linked into a cell if their margin is smaller than this

    def to_arrays(self) -> list[Array]:
        """Return the cells as arrays."""
        return [np.array([self.join_margin, self.link_margin]), self.centroids]

    @classmethod
    def from_arrays(cls, thresholds: Array, centroids: Array) -> Self:
        """Return the cells from the result of `to_arrays`."""
        join_margin, link_margin = thresholds.tolist()
        return cls(centroids, join_margin, link_margin)

    def assign(self, metric: engine.Metric, vectors: Vectors) -> tuple[CellIds, Pairs, Pairs]:
        """Return each vector's own cell, the cells that it joins, and those it is linked into.

        Args:
            metric: the plan's metric.
            vectors: (m, d) float32.

        Returns:
            (m,) int64 own cells; the joined pairs; the linked pairs. Pairs are two (p,) int64
            arrays: vector numbers and cells.
        """
        cell_ids, margins = self._find_nearest(metric, vectors)
        is_joining = margins < self.join_margin  # (m, c - 1) bool
        is_linking = (margins < self.link_margin) & ~is_joining
        # (m, c) -> (m,)
        return cell_ids[:, 0], _list_pairs(cell_ids, is_joining), _list_pairs(cell_ids, is_linking)

    def _find_nearest(self, metric: engine.Metric, vectors: Vectors) -> tuple[CellIds, Vectors]:
        """Return the (m, c) nearest cells, nearest first, and the (m, c - 1) margins of all but the
        first.
        """
        similarities, cell_ids = _build_flat_index(self.centroids, metric).search(
            vectors, min(1 + _MAX_OTHER_CELLS, len(self.centroids))
        )
        return cell_ids, np.abs(similarities[:, 1:] - similarities[:, :1])  # (m, c - 1) - (m, 1)


def learn_cells(plan: VectorPlan, sample: Vectors) -> Cells:
    """Partition a sample, (m, d) float32, into at most `plan.cells` cells of about equal size.

    Raises:
        ResourceError: memory ran out.
    """
    with engine.translate_errors(
        ResourceError, f"{len(sample)} vectors could not be cut into {plan.cells} cells: use fewer"
    ):
        centroids = _learn_balanced_centroids(plan, sample) if plan.cells > 1 else np.zeros((1, plan.d), np.float32)
        # (m, c - 1) -> (m (c - 1),)
        margins = np.sort(Cells(centroids, 0, 0)._find_nearest(plan.metric, sample)[1], axis=None)
    shares = plan.border, plan.border + plan.linked
    join_margin, link_margin = (_find_margin(margins, share * len(sample)) for share in shares)
    return Cells(centroids, join_margin, link_margin)


def _find_margin(margins: Vectors, n_pairs: float) -> float:
    """Return a margin that about `n_pairs` of the ascending `margins` do not exceed.

    The result is rounded to three digits, so that no file contains the exact margin of a vector.
    """
    margin = margins[min(round(n_pairs), len(margins) - 1)] if n_pairs and len(margins) else 0.0
    return float(f"{margin:.3g}")


def _list_pairs(cells: CellIds, mask: npt.NDArray[np.bool_]) -> Pairs:
    vector_numbers, columns = np.nonzero(mask)  # (m, c - 1) -> (p,), (p,)
    return vector_numbers, cells[vector_numbers, columns + 1]


def count_cell_sample(plan: VectorPlan) -> int:
    """Return the size of the sample for `learn_cells`."""
    return min(plan.n, max(_POINTS_PER_CELL * plan.cells, 4 * _POINTS_PER_CELL))


def split_large_cells(plan: VectorPlan, cells: Cells, sample: Vectors) -> Cells:
    """Split the cells that have grown beyond the limit.

    If there are enough cells, each split removes the smallest cell, whose number goes to one half
    of the split cell. All other cells keep their numbers, and only those near a change get or lose
    vectors.

    Raises:
        ResourceError: memory ran out.
    """
    with engine.translate_errors(ResourceError, f"the cells of {plan.factory} could not be split: use fewer"):
        return replace(cells, centroids=_split_largest(plan, cells.centroids.copy(), sample)[0])


def merge_small_cells(plan: VectorPlan, cells: Cells, sample: Vectors) -> tuple[Cells, list[int]]:
    """Merge the smallest cells into their neighbours until there are as many as planned.

    Each vector of a merged cell goes to the nearest other cell. The last cell gets the number of
    the merged cell, so that cells are numbered without a gap. Return the cells, and the previous
    number of each cell.

    Raises:
        ResourceError: memory ran out.
    """
    centroids, previous_numbers = cells.centroids.copy(), [*range(len(cells.centroids))]
    with engine.translate_errors(ResourceError, f"the cells of {plan.factory} could not be merged: use more"):
        cell_numbers = _assign_nearest(plan, centroids, sample)
        while len(centroids) > plan.cells:
            last_cell = len(centroids) - 1
            smallest_cell = int(np.bincount(cell_numbers, minlength=len(centroids)).argmin())
            orphans = np.flatnonzero(cell_numbers == smallest_cell)
            centroids[smallest_cell] = centroids[last_cell]
            previous_numbers[smallest_cell] = previous_numbers[last_cell]
            cell_numbers[cell_numbers == last_cell] = smallest_cell
            centroids, previous_numbers = centroids[:last_cell], previous_numbers[:last_cell]
            cell_numbers[orphans] = _assign_nearest(plan, centroids, sample[orphans])
    return replace(cells, centroids=np.ascontiguousarray(centroids)), previous_numbers


def redact_cells(plan: VectorPlan, cells: Cells, sample: Vectors, removed: Iterable[Vectors]) -> Cells | None:
    """Return cells without a trace of removed vectors; None if a cell would be empty.

    A centroid is a mean of vectors, and may equal one of them. So the centroid of each cell that
    may contain a removed vector becomes the mean of the remaining vectors. All other centroids stay
    unchanged, and so do the graphs of their cells.

    Args:
        plan: plan of the index.
        cells: the cells with the removed vectors.
        sample: (m, d) float32, a sample of the remaining vectors.
        removed: blocks of (r, d) float32.

    Raises:
        ResourceError: memory ran out.
    """
    if len(cells.centroids) == 1:
        return cells
    with engine.translate_errors(ResourceError, f"the cells of {plan.factory} could not be redacted: use fewer"):
        sample_cells = _assign_nearest(plan, cells.centroids, sample)
        near_cells, centroids = set[int](), cells.centroids.copy()
        for block in removed:
            near_cells.update(np.unique(cells._find_nearest(plan.metric, block)[0]).tolist())
        for cell in sorted(near_cells):
            cell_vectors = sample[sample_cells == cell]
            if not len(cell_vectors):
                return None
            mean = cell_vectors.mean(axis=0, dtype=np.float64)  # (s, d) -> (d,)
            centroids[cell] = mean / (np.linalg.norm(mean) or 1.0) if plan.metric == "ip" else mean
    return replace(cells, centroids=centroids)


def _learn_balanced_centroids(plan: VectorPlan, points: Vectors) -> Vectors:
    """Return at most `plan.cells` centroids, from k-means and repeated splits of the largest cell.

    After k-means alone, the largest cell would have two or three times the mean size, and the build
    would wait for it.
    """
    centroids = _run_kmeans(plan, points, max(2, round(_KMEANS_SHARE * plan.cells)))
    centroids, cell_numbers = _split_largest(plan, centroids, points)
    return np.ascontiguousarray(centroids[np.bincount(cell_numbers, minlength=len(centroids)) > 0])


def _split_largest(plan: VectorPlan, centroids: Vectors, points: Vectors) -> tuple[Vectors, CellIds]:
    """Split the largest cell until there are enough cells and none is too large.

    Once there are enough cells, each split removes the smallest one.
    """
    cell_numbers = _assign_nearest(plan, centroids, points)
    for _ in range(_MAX_SPLITS * plan.cells):
        cell_sizes = np.bincount(cell_numbers, minlength=len(centroids))
        largest_cell, free_cell = int(cell_sizes.argmax()), int(cell_sizes.argmin())
        if len(centroids) >= plan.cells and cell_sizes[largest_cell] <= _MAX_IMBALANCE * len(points) / plan.cells:
            break
        positions = np.flatnonzero(cell_numbers == largest_cell)
        half_centroids = _run_kmeans(plan, points[positions], 2)
        second_half = positions[_assign_nearest(plan, half_centroids, points[positions]) == 1]
        if len(second_half) in (0, len(positions)):  # equal points cannot be split
            break
        if len(centroids) < plan.cells:
            # (c, d) -> (c + 1, d)
            centroids, free_cell = np.vstack([centroids, half_centroids[-1:]]), len(centroids)
        orphans = np.flatnonzero(cell_numbers == free_cell)
        centroids[[largest_cell, free_cell]] = half_centroids
        cell_numbers[second_half] = free_cell
        cell_numbers[orphans] = _assign_nearest(plan, centroids, points[orphans])
    return centroids, cell_numbers


def _assign_nearest(plan: VectorPlan, centroids: Vectors, points: Vectors) -> CellIds:
    if not len(points):
        return np.empty(0, np.int64)
    # (p, 1) -> (p,)
    nearest_cells: CellIds = _build_flat_index(centroids, plan.metric).search(points, 1)[1][:, 0]
    return nearest_cells


def _run_kmeans(plan: VectorPlan, points: Vectors, n_clusters: int) -> Vectors:
    kmeans = faiss.Kmeans(
        points.shape[1],
        min(n_clusters, len(points)),
        niter=_KMEANS_ROUNDS,
        seed=1 + plan.seed,
        spherical=plan.metric == "ip",
        min_points_per_centroid=1,
        max_points_per_centroid=len(points),
    )
    kmeans.train(points)
    centroids: Vectors = kmeans.centroids
    return centroids


def _build_flat_index(centroids: Vectors, metric: engine.Metric) -> FaissIndex:
    flat_index = faiss.IndexFlat(centroids.shape[1], engine.to_faiss_metric(metric))
    flat_index.add(centroids)
    return flat_index


def write_cell_slices(plan: VectorPlan, trained: Path, cells: Cells, part: VectorFiles, number: int, out: Path) -> Rows:
    """Sort the vectors of a part by cell and write them; return where each group begins.

    Memory holds up to five copies of the part's vectors.

    Raises:
        InputError: a row holds a NaN or an infinity.
        ResourceError: the file cannot be written.
    """
    vectors = part.read_all()
    group_starts, rows = _sort_by_group(plan, cells, vectors)
    stored_vectors, bounds = vectors.astype(part.dtype, copy=False), group_starts.tolist()
    digests = _digest_vectors(stored_vectors)
    slices = [
        _pack_slice(stored_vectors[rows[start:end]], digests[rows[start:end]], linked_start - start)
        for start, linked_start, end in zip(bounds[:-1:2], bounds[1::2], bounds[2::2], strict=True)
    ]
    head_arrays: list[Array] = [group_starts, rows, np.array([part.n])]
    write_sliced_piece(
        out, compute_stamp(plan, trained, "scattered", number), head_arrays, slices, np.diff(group_starts)[::2].tolist()
    )
    return group_starts


def _pack_slice(vectors: Vectors, digests: Digests, n_members: int) -> bytes:
    if not len(vectors):
        return b""
    header = np.array((n_members, len(vectors) - n_members, vectors.itemsize), _SLICE_HEADER)
    return b"".join((header.tobytes(), vectors.data.cast("B"), digests.astype("<u8").tobytes()))


def _digest_vectors(vectors: Vectors) -> Digests:
    """Return the digests of vectors, (m, d), as they are stored."""
    data, size = vectors.tobytes(), vectors.itemsize * vectors.shape[1]
    digests = [blake2b(data[start : start + size], digest_size=8).digest() for start in range(0, len(data), size)]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


@dataclass(frozen=True, slots=True)
class CellVectors:
    """The members of a cell, or the vectors linked into it, in row order."""

    vectors: Vectors  # (m, d) float32
    digests: Digests  # (m,) digests of the stored bytes: equal vectors have equal digests


def unpack_slices(slices: Iterable[bytes], dim: int) -> tuple[CellVectors, CellVectors]:
    """Return the vectors of a cell, and the vectors of other cells that get links to it.

    Raises:
        InputError: a slice does not hold vectors of `dim` dimensions.
    """
    members, linked_vectors = ([np.empty((0, dim), np.float32)] for _ in range(2))
    member_digests, linked_digests = ([np.empty(0, np.uint64)] for _ in range(2))
    header_bytes, digest_size = _SLICE_HEADER.itemsize, 8
    for data in slices:
        member_count, linked_count, value_bytes = (
            np.frombuffer(data, _SLICE_HEADER, 1)[0].tolist() if len(data) >= header_bytes else (0, 0, 0)
        )
        n_vectors = member_count + linked_count
        if (
            min(member_count, linked_count) < 0
            or value_bytes not in (2, 4)
            or len(data) != header_bytes + n_vectors * (dim * value_bytes + digest_size)
        ):
            raise InputError(
                f"a slice of a scattered piece does not hold vectors of {dim} dimensions: build the index again"
            )
        stored_vectors = np.frombuffer(data, f"<f{value_bytes}", n_vectors * dim, header_bytes)
        # flat -> (m + l, d); `concatenate` makes it float32
        vectors = stored_vectors.reshape(-1, dim)
        digests = np.frombuffer(data, "<u8", n_vectors, header_bytes + stored_vectors.nbytes)
        members.append(vectors[:member_count])
        linked_vectors.append(vectors[member_count:])
        member_digests.append(digests[:member_count])
        linked_digests.append(digests[member_count:])
    return (
        CellVectors(np.concatenate(members), np.concatenate(member_digests)),
        CellVectors(np.concatenate(linked_vectors), np.concatenate(linked_digests)),
    )


def read_group_rows(plan: VectorPlan, trained: Path, scattered: Sequence[Opener]) -> list[Links]:
    """Return the global rows of every group, as ascending int32.

    The result takes 4 bytes for each row of each group. While the function runs, it needs twice
    this memory, and 8 bytes per cell and part.

    Raises:
        InputError: a piece is missing, truncated, or of another build.
    """
    group_starts = np.empty((len(scattered), 2 * plan.cells + 1), np.int32)
    rows_by_part, first_row = list[Links](), 0
    for i, opener in enumerate(scattered):
        stamp = compute_stamp(plan, trained, "scattered", i)
        with open_piece_head(opener, plan.shards, stamp, _PART_ROWS + 1, f"the scattered piece of part {i}") as piece:
            group_starts[i] = piece.read(_GROUP_STARTS)
            rows_by_part.append(piece.read(_ROWS) + np.int32(first_row))
            first_row += int(piece.read(_PART_ROWS)[0])
    # (groups,)
    ends = np.cumsum(group_starts[:, 1:].sum(0, np.int64) - group_starts[:, :-1].sum(0, np.int64))
    next_positions, group_rows = np.concatenate([[0], ends[:-1]]), np.empty(int(ends[-1]), np.int32)
    for i, part_rows in enumerate(rows_by_part):
        sizes = np.diff(group_starts[i])
        group_rows[np.repeat(next_positions - group_starts[i, :-1], sizes) + np.arange(len(part_rows))] = part_rows
        next_positions += sizes
    return np.split(group_rows, ends[:-1])


def _sort_by_group(plan: VectorPlan, cells: Cells, vectors: Vectors) -> tuple[Rows, Links]:
    own_cells, (joining_rows, joined_cells), (linking_rows, linked_cells) = cells.assign(plan.metric, vectors)
    # (m,), (p,), (l,) -> (m + p + l,)
    group_numbers = np.concatenate([2 * own_cells, 2 * joined_cells, 2 * linked_cells + 1])
    grouped_rows = np.concatenate([np.arange(len(vectors)), joining_rows, linking_rows])
    sorted_positions = np.lexsort((grouped_rows, group_numbers))
    group_starts = np.searchsorted(group_numbers[sorted_positions], np.arange(2 * plan.cells + 1))
    return group_starts, grouped_rows[sorted_positions].astype(np.int32)
