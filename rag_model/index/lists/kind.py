"""The kind `ivf`: inverted lists of codes, with or without a refinement that ranks candidates again."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from rag_model.errors import InputError
from rag_model.index.carrying import EarlierPiece
from rag_model.index.factory import Lists, parse
from rag_model.index.files import engine
from rag_model.index.files.engine import Metric, Rows, Vectors, faiss
from rag_model.index.files.pieces import Opener
from rag_model.index.graphs.graph import similarities
from rag_model.index.lists import ivf
from rag_model.index.plan import Facts
from rag_model.index.quality.recall import FLOOR, Floor, recall_at
from rag_model.index.recipe import PQ_SAMPLE, VectorPlan, lists_in
from rag_model.index.vector_kind import MOVED, PRODUCTS, ROUNDS, VectorKind

# Codes alone change the order of near neighbours even if every list is searched: recall .90 (p5 .80) over 5,227
# passages of Wikipedia at a byte for 4 dimensions, .79 (p5 .60) at 8, and less in a large corpus. Codes trained on
# other data find almost nothing. Candidates that are ranked again (`Refine`) come in the order of exact search: FLOOR.
QUANTISED_FLOOR = Floor(mean=0.60, p5=0.30)
_QUANTISERS = ("PQ", "RaBitQ")  # in a factory string; scalar quantisers lose too little to matter
_ASKED = 256  # vectors searched of the new and of the old ones: gives a recall to about .03
_FEWEST = 32  # of each, below which a recall is too uncertain
_K = 10  # neighbours searched for each
_CODED = 1.4e10  # multiplications and additions per second of one core, to compare pieces of vectors with centroids
_ROUNDS = 25  # of k-means for codes
_ROTATED = 4.8  # times longer with OPQ, which trains codes again and again: 4.7 to 5.0 at 96 and 384 dimensions
_NEW = 0.1  # share of a part's vectors that are in no piece of the parent: a month brings some hundredths
_MANY = 1_024  # lists, to compare a vector with which takes as long as to read what was found before
_BY_GRAPH = (380, 0.3)  # a graph over n centroids compares a vector with about a n^b of them; at most with all


class ListKind(VectorKind):
    """Inverted lists: `IVF1024,PQ48np`, `OPQ48_192,IVF65536_HNSW32,PQ48np`, `IVF4096,RaBitQ4,Refine(SQfp16)`."""

    name: ClassVar[str] = "ivf"
    VERSION: ClassVar[int] = ivf.VERSION
    factories = re.compile("IVF|OPQ|PCA")

    def floor(self, factory: str) -> Floor:
        """Return the floor of codes that rank alone, or the usual one."""
        alone = any(name in factory for name in _QUANTISERS) and "Refine" not in factory
        return QUANTISED_FLOOR if alone else FLOOR

    def train(self, plan: VectorPlan, rows: Sequence[Path], out: Path) -> Facts:
        """Train centroids, rotation and codes on a sample."""
        return ivf.train(plan, rows, out)

    def losses(self, plan: VectorPlan, trained: Path, vectors: Vectors) -> dict[str, float]:
        """Return how far vectors lie from their lists' centroids, and the error of their codes."""
        return ivf.losses(plan, trained, vectors)

    def recalls(self, plan: VectorPlan, trained: Path, new: Vectors, old: Vectors) -> tuple[float, float] | None:
        """Return recall@10 of new vectors and of old ones, in lists that hold both; None if there are too few."""
        if min(len(new), len(old)) < _FEWEST:
            return None
        index, both, found = engine.read(trained), np.concatenate([new, old]), []
        with engine.guarded(InputError, f"{trained} could not be searched: build it again"):
            index.add(both)
            for asked in (new[:_ASKED], old[:_ASKED]):
                scores, exact = faiss.knn(asked, both, _K, metric=engine.metric_code(plan.metric))
                signed = scores if plan.metric == "ip" else -scores
                score = partial(_scored, asked, both, plan.metric)  # of equal vectors any may be found
                found.append(recall_at(index.search(asked, _K)[1], exact, signed, _K, score))
        recalls = [round(float(own.mean()), 4) for own in found]
        return recalls[0], recalls[1]

    def follow(self, plan: VectorPlan, trained: Path, rows: Sequence[Path], out: Path) -> Facts:
        """Adapt lists and codes to the current vectors."""
        return ivf.follow(plan, trained, rows, out)

    def scatter(self, plan: VectorPlan, trained: Path, rows: Path, number: int, out: Path) -> Facts:
        """Encode a part's vectors, sorted by list."""
        return ivf.scatter(plan, trained, rows, number, out)

    def carries(self, plan: VectorPlan) -> bool:
        """Whether codes are compared with trained ones, or vectors with many lists: a scalar code is made at once."""
        factory = parse(plan.factory)
        return isinstance(factory, Lists) and (factory.codes.pieces is not None or lists_in(plan) >= _MANY)

    def carry(
        self, plan: VectorPlan, trained: Path, rows: Path, number: int, earlier: Sequence[EarlierPiece], out: Path
    ) -> Facts:
        """Encode only the vectors that are in no earlier piece."""
        return ivf.scatter(plan, trained, rows, number, out, earlier)

    def merge(
        self,
        plan: VectorPlan,
        trained: Path,
        rows: Sequence[Path],
        scattered: Sequence[Opener],
        shards: Sequence[Opener],
        out: Path,
    ) -> Facts:
        """Write the lists, each with its slice of every part in row order."""
        return ivf.merge(plan, trained, rows, scattered, shards, out)

    def seconds(self, plan: VectorPlan, stage: str, rows: int, size: int, *, inherited: bool = False) -> float:
        """Return about how many seconds of one core a task of a stage takes."""
        lists = compared = lists_in(plan)
        factory = parse(plan.factory)
        pieces = factory.codes.pieces if isinstance(factory, Lists) else None
        codes = (1 << factory.codes.bits) / _CODED if isinstance(factory, Lists) and pieces else 0.0
        if stage == "train":
            points = min(plan.train_sample, PQ_SAMPLE)
            rounds = _ROUNDS * (_ROTATED if "OPQ" in plan.factory else 1)
            learned = (ROUNDS * plan.train_sample * lists / PRODUCTS + rounds * points * codes) * plan.d
            return 1 if inherited else 0.1 + learned
        if stage == "scatter":  # size / (2 d) rows, each compared with lists x d numbers
            if isinstance(factory, Lists) and factory.coarse:
                compared = min(lists, int(_BY_GRAPH[0] * lists ** _BY_GRAPH[1]))
            read, new = (3, _NEW) if inherited else (1, 1)  # the parent's rows and piece too
            return read * size / MOVED + new * size / 2 * (compared / PRODUCTS + codes)
        return 0.1 * plan.n * plan.d / MOVED


def _scored(asked: Vectors, vectors: Vectors, metric: Metric, questions: Rows, rows: Rows) -> Vectors:
    """Return the exact scores of rows of `vectors`, (m, k), for some of what was asked, (m,)."""
    return similarities(asked[questions], vectors, rows, metric)


KIND = ListKind()
