"""What an index will cost, known before any work starts: memory of each stage, memory to search, bytes on disk.

The figures come from the plan alone. A build that will not fit is refused at once, with a factory string that
would fit, rather than after hours by the kernel.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rag_model.errors import ResourceError
from rag_model.index.factory import Factory, Graph, Lists, parse
from rag_model.index.files.engine import FaissIndex, faiss, metric_code
from rag_model.index.files.intake import PART_BYTES
from rag_model.index.files.vectors import BLOCK_BYTES
from rag_model.index.graphs.cells import sample_size
from rag_model.index.lists.ivf import BLOCK_BYTES as LIST_BLOCK
from rag_model.index.lists.training import lists_of
from rag_model.index.recipe import VectorPlan
from rag_model.index.sizing.amounts import gigabytes

PROCESS = 192 << 20  # Python, numpy and faiss: there at any n
_HEADER = 512  # of a file: what does not grow with anything
_ID = 8  # bytes of an id in a list
_KEY = 8  # bytes of a link with its similarity
_CROSSED = 8 + 8  # links of a vector across a border, there and back
_UNEVEN = 2.0  # the largest cell is held to be so many times the mean: splitting keeps it below
_PLACE = 8  # bytes of a row in one cell while the merge reads where all rows are: 4 of them stay
_WALKED = 12  # of a row in the merge: its level, the walk's parent and front


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes."""

    stages: Mapping[str, int]  # memory of one task of each stage: train, scatter, shard, merge
    search_bytes: int  # memory once every page of the index has been touched
    disk_bytes: int  # the finished index file
    work_bytes: int  # disk for what lies beside the vectors while it is built: pieces, and the file twice

    @property
    def build_bytes(self) -> int:
        """Return the memory of the largest stage, its tasks one at a time."""
        return max(self.stages.values())

    def side_by_side(self, workers: int) -> int:
        """Return the memory of the largest stage where so many parts or shards are worked on at once."""
        times = {"train": 1, "merge": 1}
        return max(size * times.get(stage, workers) for stage, size in self.stages.items())


def estimate(plan: VectorPlan, part_rows: int | None = None) -> Estimate:
    """Estimate what a plan costs. Disk is exact to a percent or two; memory is a bound to plan by.

    `part_rows` are of the largest part; None: of one as the tool cuts it.
    """
    factory = parse(plan.factory)
    empty = faiss.index_factory(plan.d, plan.factory, metric_code(plan.metric))
    size = _index_bytes(plan, factory, empty)
    rows = min(plan.n, part_rows or max(1, PART_BYTES // (4 * plan.d)))
    stages = (
        _graph_stages(plan, factory, rows) if isinstance(factory, Graph) else _list_stages(plan, factory, empty, rows)
    )
    return Estimate(
        stages={stage: round(held) + PROCESS for stage, held in stages.items()},
        search_bytes=size + PROCESS,
        disk_bytes=size,
        work_bytes=round(_pieces_bytes(plan, factory, empty)) + 2 * size,
    )


def check_disk(plan: VectorPlan, folder: Path) -> None:
    """Check that a folder's disk has room for the finished index, before hours go into writing half of it.

    Raises:
        ResourceError: it has not.
    """
    check_room(plan.factory, estimate(plan).disk_bytes, folder)


def check_room(factory: str, needed: int, folder: Path) -> None:
    """Check that a folder's disk has room for so many bytes of a finished index.

    Raises:
        ResourceError: it has not.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ResourceError(
            f"merging {factory} needs {gigabytes(needed)} of disk in {folder}, and {gigabytes(free)} are free: "
            "free some, or set TMPDIR to a folder on a disk with room"
        )


def _graph_stages(plan: VectorPlan, factory: Graph, part_rows: int) -> dict[str, float]:
    links, vector = factory.links or 0, 4 * plan.d
    sample = max(sample_size(plan), 0 if factory.storage == "Flat" else plan.train_sample)
    members, sources = _shard_rows(plan)
    return {
        "train": 3 * sample * vector,  # the sample, and what k-means makes of it
        "scatter": part_rows * vector * (3 + plan.border + plan.linked),  # read, in the file's dtype, sorted
        "shard": members * (2 * vector + graph_bytes(links) + 2 * links * _KEY)
        + sources * (2 * vector + _CROSSED * _KEY),
        "merge": plan.n * (_WALKED + _PLACE * (1 + plan.border + plan.linked))
        + plan.n / links * (2 * vector + graph_bytes(links))
        + 2 * BLOCK_BYTES,
    }


def _shard_rows(plan: VectorPlan) -> tuple[float, float]:
    """Return how many members the largest cell of a graph may have, and how many vectors linked into it."""
    if plan.cells == 1:
        return plan.n, 0
    mean = plan.n / plan.cells
    return min(plan.n, _UNEVEN * (1 + plan.border) * mean), min(plan.n, _UNEVEN * plan.linked * mean)


def _list_stages(plan: VectorPlan, factory: Factory, empty: FaissIndex, part_rows: int) -> dict[str, float]:
    trained = _trained_bytes(plan, factory, empty)
    return {
        "train": 3 * 4 * plan.d * plan.train_sample + trained,  # the sample, rotated, and its residuals
        "scatter": trained + 3 * BLOCK_BYTES + part_rows * 3 * (_code_bytes(empty) + _ID),
        "merge": 2 * trained + 3 * LIST_BLOCK + BLOCK_BYTES,
    }


def _index_bytes(plan: VectorPlan, factory: Factory, empty: FaissIndex) -> int:
    if isinstance(factory, Graph):
        return _HEADER + round(plan.n * (int(empty.storage.sa_code_size()) + graph_bytes(factory.links or 0)))
    if isinstance(factory, Lists):
        refined = int(empty.refine_index.sa_code_size()) if isinstance(empty, faiss.IndexRefine) else 0
        return round(_trained_bytes(plan, factory, empty)) + plan.n * (_code_bytes(empty) + _ID + refined)
    return _HEADER + plan.n * 4 * plan.d


def _trained_bytes(plan: VectorPlan, factory: Factory, empty: FaissIndex) -> float:
    """Return the bytes of an index of lists without vectors: centroids, the graph over them, rotation and codec."""
    lists = lists_of(empty)
    if not isinstance(factory, Lists) or lists is None:
        return _HEADER
    width = int(lists.d)
    centroid = 4 * width + 8 + (graph_bytes(factory.coarse) if factory.coarse else 0)
    pieces = 4 * width << factory.codes.bits if factory.codes.name == "PQ" else 0
    rotation = 4 * width * plan.d if factory.rotation is not None else 0
    return _HEADER + int(lists.nlist) * centroid + pieces + rotation


def _code_bytes(empty: FaissIndex) -> int:
    lists = lists_of(empty)
    return 0 if lists is None else int(lists.code_size)


def graph_bytes(links: int) -> float:
    """Return a node's bytes: 2M links at the bottom, M on 1/(M-1) further levels, its level, its offset."""
    return 4 * (2 * links + links / (links - 1)) + 4 + 8


def _pieces_bytes(plan: VectorPlan, factory: Factory, empty: FaissIndex) -> float:
    """Return what scattering and the shards write: vectors by cell and lists of links, or codes by list."""
    if not isinstance(factory, Graph):
        return plan.n * (_code_bytes(empty) + _ID + 4) + _trained_bytes(plan, factory, empty)
    links = (1 + plan.border) * 2 * (factory.links or 0) + plan.linked * _CROSSED
    return plan.n * ((1 + plan.border + plan.linked) * (4 * plan.d + 4) + _KEY * links)
