"""Measure a snapshot before it is published: each index against exact search, on questions the corpus asks itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rag_model.encoders.encoder import Encoder
from rag_model.evaluation.gate import Findings, GateRecipe
from rag_model.evaluation.sampling import sample_rows, sample_sentences
from rag_model.index.engine import Vectors
from rag_model.index.health import Effort, Trial, sweep
from rag_model.index.recall import percentile5, recall_at
from rag_model.index.search import IndexFile
from rag_model.retrieve.dense import index_of
from rag_model.store.paths import EXACT, QUESTION_ENCODER
from rag_model.store.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Measured:
    """What was seen of a snapshot's indexes."""

    k: int
    found: Mapping[str, Findings]  # by index, each query's recall@k at the index's own setting
    curves: Mapping[str, Sequence[Effort]]  # by index, recall against latency

    def metrics(self) -> dict[str, Any]:
        """Return the figures that the manifest keeps: recall@k by index, mean and 5th percentile."""
        return {
            index: {
                f"recall@{self.k}": round(float(findings.recalls.mean()), 4),
                f"recall@{self.k}_p5": round(percentile5(findings.recalls), 4),
            }
            for index, findings in self.found.items()
        }


def measure(snapshot: Snapshot, recipe: GateRecipe) -> Measured:
    """Ask each index of a snapshot the same sampled questions, and exact search for the truth.

    The questions are sentences of sampled passages, encoded by the question encoder that the snapshot carries.

    Raises:
        InputError: an index or its vectors are damaged.
    """
    entries = snapshot.manifest.content.indexes
    if not snapshot.n:
        return Measured(recipe.k, {}, {})
    k = min(recipe.k, snapshot.n)
    trial = Trial.of(index_of(snapshot, EXACT), _questions(snapshot, recipe), k)
    found, curves = {}, {}
    for name, entry in entries.items():
        index = index_of(snapshot, name)
        rows = index.search(trial.vectors, k)[1]
        found[name] = Findings(entry["factory"], recall_at(rows, trial.rows, trial.scores, k))
        curves[name] = sweep(index, trial) if isinstance(index, IndexFile) else []
    return Measured(k, found, curves)


def _questions(snapshot: Snapshot, recipe: GateRecipe) -> Vectors:
    rows = sample_rows(snapshot.n, recipe.queries, recipe.seed)
    sentences = sample_sentences(snapshot.passages(rows), recipe.seed)
    return Encoder.load(snapshot.folder(QUESTION_ENCODER), "question").encode_questions(sentences)
