"""Estimate the cost of an index before any work starts: memory of each stage, memory to search, bytes on disk.

The figures come from the plan alone. A build that will not fit is refused at once, with a factory string that would
fit, instead of being killed after hours.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rag_model.index.factory import Lists, parse
from rag_model.index.files.engine import FaissIndex, faiss, metric_code
from rag_model.index.files.intake import PART_BYTES
from rag_model.index.files.vectors import BLOCK_BYTES
from rag_model.index.graphs.cells import sample_size
from rag_model.index.lists.ivf import BLOCK_BYTES as LIST_BLOCK
from rag_model.index.lists.training import lists_of
from rag_model.index.recipe import VectorPlan

PROCESS = 192 << 20  # Python, numpy and faiss, for any n
_HEADER = 512  # bytes of a file's header
_ID = 8  # bytes of an id in a list
_LINK = 8  # bytes of a link with its similarity, in a shard
_UNEVEN = 2.0  # assumed size of the largest cell, as a multiple of the mean: splitting keeps it below
_MERGED = 12, 8  # bytes of a row in the merge: its level, the walk's parent and front; and its place in each cell

Sums = tuple[int, float, dict[str, float]]  # bytes of the index, of the pieces on disk, and memory by stage


@dataclass(frozen=True, slots=True)
class Estimate:
    """The cost of an index, in bytes."""

    stages: Mapping[str, int]  # memory of one task of each stage: train, scatter, shard, merge
    search_bytes: int  # memory when every page of the index has been read
    disk_bytes: int  # the finished index file
    work_bytes: int  # disk during the build, without the vectors: pieces, and twice the file

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
    rows = min(plan.n, part_rows or max(1, PART_BYTES // (4 * plan.d)))
    empty = faiss.index_factory(plan.d, plan.factory, metric_code(plan.metric))
    size, pieces, stages = (_graph if plan.kind == "hnsw" else _lists)(plan, empty, rows)
    held = {stage: round(amount) + PROCESS for stage, amount in stages.items()}
    return Estimate(held, size + PROCESS, size, round(pieces) + 2 * size)


def _graph(plan: VectorPlan, empty: FaissIndex, part_rows: int) -> Sums:
    vector, links = 4 * plan.d, int(empty.hnsw.nb_neighbors(1))
    copies = 1 + plan.border + plan.linked  # of a vector, in all cells
    built = 2 * vector + _node_bytes(links) + 2 * links * _LINK  # of a vector in a shard
    row, place = _MERGED
    stages = {
        "train": 3 * vector * max(sample_size(plan), 0 if empty.storage.is_trained else plan.train_sample),
        "scatter": part_rows * vector * (2 + copies),  # read, in the file's dtype, sorted
        "shard": copies * built * min(plan.n, _UNEVEN * plan.n / plan.cells),
        "merge": plan.n * (row + place * copies) + plan.n / links * built + 2 * BLOCK_BYTES,
    }
    size = _HEADER + round(plan.n * (int(empty.storage.sa_code_size()) + _node_bytes(links)))
    return size, plan.n * copies * (vector + 4 + 2 * links * _LINK), stages


def _lists(plan: VectorPlan, empty: FaissIndex, part_rows: int) -> Sums:
    asked, vector = parse(plan.factory), 4 * plan.d
    trained, code, row = float(_HEADER), 0, vector
    if isinstance(asked, Lists):
        lists: FaissIndex = lists_of(empty)
        width, code = 4 * int(lists.d), int(lists.code_size) + _ID
        row = code + (int(empty.refine_index.sa_code_size()) if isinstance(empty, faiss.IndexRefine) else 0)
        trained += int(lists.nlist) * (width + 8 + (_node_bytes(asked.coarse) if asked.coarse else 0))
        trained += (width << asked.codes.bits) * (asked.codes.name == "PQ") + width * plan.d * bool(asked.rotation)
    stages = {
        "train": 3 * vector * plan.train_sample + trained,  # the sample, rotated, and its residuals
        "scatter": trained + 3 * BLOCK_BYTES + 3 * part_rows * code,
        "merge": 2 * trained + 3 * LIST_BLOCK + BLOCK_BYTES,
    }
    return round(trained) + plan.n * row, plan.n * (code + 4) + trained, stages


def _node_bytes(links: int) -> float:
    """Return a graph node's bytes: 2M links at the bottom, M on 1/(M-1) further levels, its level, its offset."""
    return 4 * (2 * links + links / (links - 1)) + 4 + 8
