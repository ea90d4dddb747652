"""Measure a finished index: recall against latency over a range of settings, and the setting that is sufficient.

It is searched with given queries, or with its own vectors, and compared with exact search of the files that it was
built from. Its own vectors are easier queries: each is its own nearest neighbour.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rag_model.errors import UsageError
from rag_model.index.exact.scan import ExactIndex
from rag_model.index.files.engine import Vectors
from rag_model.index.files.intake import look
from rag_model.index.files.vectors import VectorFiles
from rag_model.index.quality.health import Effort, Trial, examine, sweep
from rag_model.index.quality.tune import tune
from rag_model.index.recipe import VectorPlan
from rag_model.index.search import open_index

DEPTH = 20  # neighbours searched per query
_QUESTIONS = 1_000  # queries: enough to distinguish recalls .005 apart
_FEWEST = 100
_PRODUCTS = 4e11  # multiplications allowed for exact search: half a minute of two cores


@dataclass(frozen=True, slots=True)
class Appraisal:
    """The measurements of an index."""

    questions: int
    own: bool  # whether the queries were its own vectors
    k: int  # of recall@k
    efforts: tuple[Effort, ...]  # cheapest first
    health: Mapping[str, float | int]  # by name, as in a manifest
    search: Mapping[str, int]  # the setting to write into the file: the one tuned for, else the default
    note: str = ""  # one sentence if the recall target cannot be reached


def appraise(path: Path, plan: VectorPlan, vectors: Sequence[Path], questions: Vectors | None = None) -> Appraisal:
    """Measure an index file, and tune it if its plan has a recall target.

    Args:
        path: the index.
        plan: the plan of the build.
        vectors: the `.npy` files that it was built from, in order.
        questions: (q, d) float32; None: up to 1,000 of its own vectors, drawn by the plan's seed.

    Raises:
        InputError: the index or a vector file is damaged.
        UsageError: the questions do not fit the index.
    """
    asked = VectorFiles(vectors).sample(_affordable(plan), plan.seed + 1) if questions is None else questions
    index, k = open_index(path), min(DEPTH, plan.n)
    trial = Trial.of(ExactIndex(vectors, plan.metric), asked, k)
    search, note = dict(plan.search), ""
    if plan.recall_target is not None:
        tuned = tune(index, trial, plan.recall_target)
        search, note = search | dict(tuned.search), tuned.note
    efforts = tuple(sweep(index, trial))
    return Appraisal(len(asked), questions is None, k, efforts, examine(path, vectors).metrics(), search, note)


def read_questions(path: Path, d: int, most: int = _QUESTIONS) -> Vectors:
    """Read encoded questions from a `.npy` or Parquet file: the first `most`, (q, d) float32.

    Raises:
        InputError: the file is damaged or holds no vectors.
        UsageError: they are of another dimension, or hold a NaN or an infinity.
    """
    found = look([path])
    if found.d != d:
        raise UsageError(f"the questions in {path} have {found.d} dimensions and the vectors {d}: use one encoder")
    (block, *_) = found.files[0].blocks(most)
    return np.ascontiguousarray(block, dtype=np.float32)


def _affordable(plan: VectorPlan) -> int:
    return min(plan.n, max(_FEWEST, min(_QUESTIONS, int(_PRODUCTS / (plan.n * plan.d)))))
