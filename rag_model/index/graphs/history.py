"""The history of a cell: the vectors of its graph, and the rules for building the graph again.

A later build updates the graph of a cell instead of building it again (`update`). For that, a shard
holds the digest of each vector, by which unchanged vectors are recognized, and the quality of the
graph when it was built. Each update replaces some members, and repairs links of the remaining
members, but not perfectly. A graph is built again before most of its members are replaced, and as
soon as it is measurably worse than when it was built.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from rag_model.index.files import engine
from rag_model.index.files.engine import Metric, Rows, Vectors, faiss
from rag_model.index.files.pieces import Array
from rag_model.index.graphs.cells import CellVectors, Digests
from rag_model.index.graphs.graph import CellGraph, Links, unpack_links
from rag_model.index.quality.results import compute_recall

# A cell is built again when this share of its vectors was replaced since its build.
MAX_REPLACED_SHARE = 0.75
_MAX_INSERTED_SHARE = 0.5  # with a larger share of new members, a build is cheaper than an update
# Minimum degree of an updated cell, as a share of its degree when it was built. Normal updates stay
# far above it: after 100 updates, each of 2 % of the members, .97 of the links are left.
_MIN_DEGREE = 0.65
_MAX_UNREACHABLE = 0.01  # maximum increase of the share of unreachable members since the build
# Maximum loss of recall since the build: twice the random error of a difference of two recalls.
_MAX_RECALL_LOSS = 0.02
_QUERIES, _DEPTH, _EF_SEARCH = 512, 20, 64  # number of queries, k, and efSearch to measure recall
_FIRST_QUERIES = 64  # if so many queries show no loss of recall, no more are searched

HISTORY_ARRAYS = 4  # the number of arrays that `CellHistory.to_arrays` returns


@dataclass(frozen=True, slots=True)
class CellQuality:
    """Statistics of a cell's graph that show its quality."""

    degree: float  # mean number of links per member
    unreachable: float  # share of the members that no walk from the entry point reaches
    recall: float  # recall@20 with sampled members as queries, at a fixed efSearch

    @classmethod
    def measure(
        cls, graph: CellGraph, vectors: Vectors, metric: Metric, built_quality: "CellQuality | None" = None
    ) -> Self:
        """Measure a graph over `vectors`, (m, d) float32.

        `built_quality` is the quality that an updated graph had when it was built. If it is given,
        efSearch is adapted so that a search computes about as many distances as at the build, and
        fewer queries are searched if these show no loss of recall.
        """
        targets, entry_point = unpack_links(graph.lists), int(graph.index.hnsw.entry_point)
        if entry_point < 0:
            return cls(0.0, 0.0, 1.0)
        unreachable = _count_unreachable(targets, int(graph.members[entry_point])) / len(targets)
        mean_degree = float((targets >= 0).sum(axis=1).mean())
        if built_quality is None:
            return cls(mean_degree, unreachable, _measure_recall(graph, vectors, metric, _EF_SEARCH, _QUERIES))
        ef_search = round(_EF_SEARCH * max(1.0, built_quality.degree / max(mean_degree, 1.0)))
        for n_queries in (_FIRST_QUERIES, _QUERIES):
            recall = _measure_recall(graph, vectors, metric, ef_search, n_queries)
            if recall >= built_quality.recall:
                break
        return cls(mean_degree, unreachable, recall)

    def explain_decay(self, built_quality: "CellQuality") -> str | None:
        """Return the reason to build the cell again, or None.

        `built_quality` is the quality that the cell's graph had when it was built.
        """
        if self.degree < _MIN_DEGREE * built_quality.degree:
            return f"its vectors have fewer links, {self.degree:.1f} instead of {built_quality.degree:.1f}"
        if self.unreachable > built_quality.unreachable + _MAX_UNREACHABLE:
            return f"a search cannot reach {self.unreachable:.1%} of its vectors"
        if self.recall < built_quality.recall - _MAX_RECALL_LOSS:
            return f"its recall is {self.recall:.3f} instead of {built_quality.recall:.3f}"
        return None


def _count_unreachable(targets: Links, entry_point: int) -> int:
    """Return the number of nodes that no walk from `entry_point` reaches; the links of node i lead
    to `targets[i]`, (w,), padded with -1.
    """
    is_reached = np.zeros(len(targets) + 1, np.bool_)  # the last entry is for -1, no link
    is_reached[[entry_point, -1]] = True
    front_nodes = np.array([entry_point])
    while len(front_nodes):
        is_new = np.zeros_like(is_reached)
        is_new[targets[front_nodes]] = True
        front_nodes = np.flatnonzero(is_new & ~is_reached)
        is_reached[front_nodes] = True
    return int((~is_reached).sum())


def _measure_recall(graph: CellGraph, vectors: Vectors, metric: Metric, ef_search: int, n_queries: int) -> float:
    queries = vectors[:: -(-len(vectors) // n_queries)]
    k = min(_DEPTH, len(vectors))
    with engine.use_threads(1):  # the last bits of matrix products depend on the number of threads
        distances, rows = faiss.knn(queries, vectors, min(2 * k, len(vectors)), metric=engine.to_faiss_metric(metric))
    scores = distances if metric == "ip" else -distances
    return float(compute_recall(graph.search(queries, k, ef_search), rows, scores, k).mean())


@dataclass(frozen=True, slots=True)
class CellHistory:
    """The vectors of a cell's graph, and the changes of the graph since it was built."""

    generation: int  # number of updates since the build
    built_members: int  # number of members at the build
    built_quality: CellQuality  # quality of the graph at the build
    # (m,): whether a member has been in the cell since the build
    is_original: npt.NDArray[np.bool_]
    members: Digests  # (m,) digests of the members
    sources: Digests  # (s,) digests of the vectors linked into the cell

    @classmethod
    def from_build(cls, members: CellVectors, sources: CellVectors, built_quality: CellQuality) -> Self:
        """Return the history of a graph that has just been built."""
        n_members = len(members.digests)
        return cls(0, n_members, built_quality, np.ones(n_members, np.bool_), members.digests, sources.digests)

    def after_update(self, old_members: Rows, members: CellVectors, sources: CellVectors) -> Self:
        """Return the history after an update to other vectors.

        `old_members` has the previous number of each member; -1 if it was added.
        """
        is_original = np.append(self.is_original, False)[old_members]
        return replace(
            self,
            generation=self.generation + 1,
            is_original=is_original,
            members=members.digests,
            sources=sources.digests,
        )

    @property
    def replaced_share(self) -> float:
        """The share of the members that were replaced since the build."""
        n_members = max(self.built_members, len(self.members))
        return 1 - float(self.is_original.sum()) / n_members if n_members else 0.0

    def explain_rebuild(self, n_inserted: int) -> str | None:
        """Return the reason to build the cell again instead of inserting `n_inserted` members, or
        None.

        Call this method on the history after the update.
        """
        if not len(self.members):
            return "it has no vectors"
        if n_inserted >= _MAX_INSERTED_SHARE * len(self.members):
            return "most of its vectors are new"
        if self.replaced_share >= MAX_REPLACED_SHARE:
            return f"{self.replaced_share:.0%} of its vectors were replaced since it was built"
        return None

    def to_arrays(self) -> list[Array]:
        """Return the history as arrays."""
        values = [self.generation, self.built_members, *astuple(self.built_quality)]
        return [np.array(values, np.float64), self.is_original, self.members, self.sources]

    @classmethod
    def from_arrays(cls, arrays: Sequence[Array]) -> Self:
        """Return the history from the result of `to_arrays`."""
        history_fields, is_original, members, sources = arrays
        generation, built_members, *quality = history_fields.tolist()
        return cls(int(generation), int(built_members), CellQuality(*quality), is_original, members, sources)
