"""Measure a snapshot before it is published: each index against exact search, on questions the corpus asks itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_model.encoders.encoder import Encoder
from rag_model.evaluation.gate import GateRecipe
from rag_model.evaluation.recall import Effort, measure_effort, percentile5, recall_at
from rag_model.evaluation.sampling import sample_rows, sample_sentences
from rag_model.index.engine import Rows, Vectors
from rag_model.retrieve.dense import EXACT, QUESTION_ENCODER, index_of
from rag_model.store.snapshot import Snapshot

_SWEEP = {"efSearch": (16, 32, 64, 128, 256), "nprobe": (1, 4, 16, 64, 256)}
_TIES = 2  # times k that exact search returns, so that ties at the k-th place are seen


@dataclass(frozen=True, slots=True)
class Measured:
    """What was seen of a snapshot's indexes."""

    k: int
    recalls: Mapping[str, npt.NDArray[np.float64]]  # by index, each query's recall@k at the index's own setting
    curves: Mapping[str, Sequence[Effort]]  # by index, recall against latency

    def metrics(self) -> dict[str, Any]:
        """Return the figures that the manifest keeps: recall@k by index, mean and 5th percentile."""
        return {
            index: {
                f"recall@{self.k}": round(float(values.mean()), 4),
                f"recall@{self.k}_p5": round(percentile5(values), 4),
            }
            for index, values in self.recalls.items()
        }


def measure(snapshot: Snapshot, recipe: GateRecipe) -> Measured:
    """Ask each index of a snapshot the same sampled questions, and exact search for the truth.

    The questions are sentences of sampled passages, encoded by the question encoder that the snapshot carries.

    Raises:
        InputError: an index or its vectors are damaged.
    """
    names = list(snapshot.manifest.content.indexes)
    if not snapshot.n or not names:
        return Measured(recipe.k, {}, {})
    k = min(recipe.k, snapshot.n)
    questions = _questions(snapshot, recipe)
    scores, exact = index_of(snapshot, EXACT).search(questions, min(_TIES * k, snapshot.n))
    recalls, curves = {}, {}
    for name in names:
        index = index_of(snapshot, name)
        found = index.search(questions, k)[1]
        recalls[name] = recall_at(found, exact, scores, k)
        curves[name] = _curve(snapshot, name, questions, (exact, scores), k)
    return Measured(k, recalls, curves)


def _questions(snapshot: Snapshot, recipe: GateRecipe) -> Vectors:
    rows = sample_rows(snapshot.n, recipe.queries, recipe.seed)
    sentences = sample_sentences(snapshot.passages(rows), recipe.seed)
    return Encoder.load(snapshot.folder(QUESTION_ENCODER), "question").encode_questions(sentences)


def _curve(
    snapshot: Snapshot, name: str, questions: Vectors, truth: tuple[Rows, Vectors], k: int
) -> list[Effort]:
    index = index_of(snapshot, name)
    parameter = next(iter(snapshot.manifest.content.indexes[name]["search"]), None)
    settings = [{parameter: value} for value in _SWEEP[parameter]] if parameter else [{}]
    return [
        measure_effort(
            ", ".join(f"{key}={value}" for key, value in setting.items()) or "exact",
            lambda setting=setting: index.search(questions, k, **setting)[1],  # type: ignore[misc]
            *truth,
            k=k,
        )
        for setting in settings
    ]
