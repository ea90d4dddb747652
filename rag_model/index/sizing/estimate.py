"""Estimate the cost of an index before any work starts: memory of each stage, memory to search, bytes on disk.

The figures come from the plan alone. A build that will not fit is refused at once, with a factory string that would
fit, instead of being killed after hours.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rag_model.errors import ResourceError
from rag_model.index.factory import Exact, Graph, Lists, parse
from rag_model.index.files.engine import FaissIndex, faiss, metric_code
from rag_model.index.files.intake import PART_BYTES
from rag_model.index.files.vectors import BLOCK_BYTES
from rag_model.index.graphs.cells import sample_size
from rag_model.index.lists.ivf import BLOCK_BYTES as LIST_BLOCK
from rag_model.index.lists.training import lists_of
from rag_model.index.recipe import VectorPlan
from rag_model.index.sizing.amounts import gigabytes

PROCESS = 192 << 20  # Python, numpy and faiss, for any n
_HEADER = 512  # bytes of a file's header
_ID = 8  # bytes of an id in a list
_STORED = 2  # bytes of a stored dimension: representations are float16
_KEY = 8  # bytes of a link with its similarity
_CROSSED = 8 + 8  # links of a vector across a border, in both directions
_UNEVEN = 2.0  # assumed size of the largest cell, as a multiple of the mean: splitting keeps it below
_PLACE = 8  # bytes of a row in one cell while the merge reads the rows: 4 of them stay
_WALKED = 12  # bytes of a row in the merge: its level, the walk's parent and front


@dataclass(frozen=True, slots=True)
class Estimate:
    """The cost of an index, in bytes."""

    stages: Mapping[str, int]  # memory of one task of each stage: train, scatter, shard, merge
    search_bytes: int  # memory when every page of the index has been read
    disk_bytes: int  # the finished index file
    work_bytes: int  # disk during the build, without the vectors: pieces, and twice the file
    beside_bytes: int = 0  # float16 vectors of the snapshot that candidates are ranked by: on a reader's disk too

    @property
    def build_bytes(self) -> int:
        """Return the memory of the largest stage, for one task at a time."""
        return max(self.stages.values())

    def needed_bytes(self, *, serving: bool) -> int:
        """Return the memory of a machine that builds the index and, with `serving`, searches it."""
        return max(self.build_bytes, self.search_bytes if serving else 0)


def estimate(plan: VectorPlan, part_rows: int | None = None) -> Estimate:
    """Estimate the cost of a plan. Disk is exact to one or two percent; memory is an upper bound.

    `part_rows` are the rows of the largest part; None: the default size of a part.
    """
    factory, rows = parse(plan.factory), min(plan.n, part_rows or max(1, PART_BYTES // (4 * plan.d)))
    empty = faiss.index_factory(plan.d, plan.factory, metric_code(plan.metric))
    size, pieces, stages = (
        _graph(plan, factory, empty, rows) if isinstance(factory, Graph) else _lists(plan, factory, empty, rows)
    )
    held = {stage: round(amount) + PROCESS for stage, amount in stages.items()}
    beside = _STORED * plan.n * plan.d if plan.refine else 0
    return Estimate(held, size + PROCESS, size, work_bytes=round(pieces) + 2 * size, beside_bytes=beside)


def check_room(factory: str, needed: int, folder: Path) -> None:
    """Check that a folder's disk has room for `needed` bytes of a finished index.

    Raises:
        ResourceError: it has not.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ResourceError(
            f"merging {factory} needs {gigabytes(needed)} of disk in {folder}, and {gigabytes(free)} are free: "
            "free some, or set TMPDIR to a folder on a disk with room"
        )


Sums = tuple[int, float, dict[str, float]]  # bytes of the index, of the pieces on disk, and memory by stage


def _graph(plan: VectorPlan, factory: Graph, empty: FaissIndex, part_rows: int) -> Sums:
    links, vector = factory.links or 0, 4 * plan.d
    node, copies = _node_bytes(links), 1 + plan.border + plan.linked  # bytes of a node; copies of a vector in all cells
    sample = max(sample_size(plan), 0 if factory.storage == "Flat" else plan.train_sample)
    members, sources = (min(plan.n, _UNEVEN * share * plan.n / plan.cells) for share in (1 + plan.border, plan.linked))
    stages = {
        "train": 3 * sample * vector,  # the sample, and copies in k-means
        "scatter": part_rows * vector * (2 + copies),  # read, in the file's dtype, sorted
        "shard": members * (2 * vector + node + 2 * links * _KEY) + sources * (2 * vector + _CROSSED * _KEY),
        "merge": plan.n * (_WALKED + _PLACE * copies) + plan.n / links * (2 * vector + node) + 2 * BLOCK_BYTES,
    }
    size = _HEADER + round(plan.n * (int(empty.storage.sa_code_size()) + node))
    kept = (1 + plan.border) * 2 * links + plan.linked * _CROSSED  # links of a vector, in the shards' lists
    return size, plan.n * (copies * (vector + 4) + _KEY * kept), stages


def _lists(plan: VectorPlan, factory: Lists | Exact, empty: FaissIndex, part_rows: int) -> Sums:
    lists = lists_of(empty)
    code = 0 if lists is None else int(lists.code_size)
    trained = _HEADER + (_trained_bytes(plan, factory, lists) if isinstance(factory, Lists) else 0)
    refined = int(empty.refine_index.sa_code_size()) if isinstance(empty, faiss.IndexRefine) else 0
    stages = {
        "train": 3 * 4 * plan.d * plan.train_sample + trained,  # the sample, rotated, and its residuals
        "scatter": trained + 3 * BLOCK_BYTES + part_rows * 3 * (code + _ID),
        "merge": 2 * trained + 3 * LIST_BLOCK + BLOCK_BYTES,
    }
    row = 4 * plan.d if lists is None else code + _ID + refined
    return round(trained) + plan.n * row, plan.n * (code + _ID + 4) + trained, stages


def _trained_bytes(plan: VectorPlan, factory: Lists, lists: FaissIndex) -> float:
    """Return the bytes of centroids, the graph over them, codec and rotation."""
    width = int(lists.d)
    centroid = 4 * width + 8 + (_node_bytes(factory.coarse) if factory.coarse else 0)
    codec = 4 * width << factory.codes.bits if factory.codes.name == "PQ" else 0
    return int(lists.nlist) * centroid + codec + (4 * width * plan.d if factory.rotation is not None else 0)


def _node_bytes(links: int) -> float:
    """Return a graph node's bytes: 2M links at the bottom, M on 1/(M-1) further levels, its level, its offset."""
    return 4 * (2 * links + links / (links - 1)) + 4 + 8
