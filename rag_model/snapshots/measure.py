"""Measure a snapshot before it is published: each index against exact search, on questions the corpus asks itself.

And each index file from within: what of its recall is owed to links, lists or codes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rag_model.encoders.encoder import Encoder
from rag_model.evaluation.gate import Findings, GateRecipe
from rag_model.evaluation.sampling import sample_rows, sample_sentences
from rag_model.index.files.engine import Vectors
from rag_model.index.quality.health import Effort, Health, Trial, effort, examine, setting_name, sweep
from rag_model.index.quality.recall import percentile5, recall_at
from rag_model.index.search import IndexFile
from rag_model.retrieve.dense import index_file_of, index_of
from rag_model.snapshots.content import Facts
from rag_model.store.versions.paths import EXACT, QUESTION_ENCODER, embeddings_path, index_path
from rag_model.store.versions.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Measured:
    """What was seen of a snapshot's indexes, by the index's name."""

    k: int
    found: Mapping[str, Findings]  # each query's recall@k at the index's own setting
    curves: Mapping[str, Sequence[Effort]]  # recall against work and time
    settings: Mapping[str, Effort] = field(default_factory=dict)  # the index's own setting, as a point of its curve
    health: Mapping[str, Health] = field(default_factory=dict)
    repaired: Mapping[str, int] = field(default_factory=dict)  # nodes that could not be reached until they were linked

    def metrics(self) -> dict[str, Any]:
        """Return the figures that the manifest keeps by index: recall@k, mean and 5th percentile, price and health.

        `distances` are computed a question; `repaired` counts the nodes of a graph that were unreachable before repair,
        `unreachable` those that still are.
        """
        return {index: self._figures(index) for index in self.found}

    def _figures(self, index: str) -> dict[str, Any]:
        recalls = self.found[index].recalls
        figures: dict[str, Any] = {
            f"recall@{self.k}": round(float(recalls.mean()), 4),
            f"recall@{self.k}_p5": round(percentile5(recalls), 4),
        }
        if index in self.settings:
            figures["distances"] = round(self.settings[index].distances, 1)
        if index in self.health:
            figures |= self.health[index].metrics()
        if index in self.repaired:
            figures["repaired"] = self.repaired[index]
        return figures


def measure(snapshot: Snapshot, recipe: GateRecipe, merges: Mapping[str, Facts] | None = None) -> Measured:
    """Ask each index of a snapshot the same sampled questions, and exact search for the truth; look into its file.

    The questions are sentences of sampled passages, encoded by the question encoder that the snapshot carries.

    Args:
        snapshot: published or not.
        recipe: how many questions, to what depth, drawn by which seed.
        merges: what the merge of each index said, by name; it alone knows what it had to repair.

    Raises:
        InputError: an index or its vectors are damaged.
    """
    if not snapshot.n:
        return Measured(recipe.k, {}, {})
    trial = trial_of(snapshot, recipe)
    found, curves, settings, health = {}, {}, {}, {}
    vectors = [snapshot.path(embeddings_path(part.name)) for part in snapshot.parts]
    for name, entry in snapshot.manifest.content.indexes.items():
        index = index_file_of(snapshot, name)
        rows = index.search(trial.vectors, trial.k)[1]
        found[name] = Findings(entry["factory"], recall_at(rows, trial.rows, trial.scores, trial.k))
        curves[name] = sweep(index, trial)
        settings[name] = _setting(index, trial, entry["search"], curves[name])
        health[name] = examine(snapshot.path(index_path(name)), vectors)
    return Measured(trial.k, found, curves, settings, health, _repaired(merges or {}))


def trial_of(snapshot: Snapshot, recipe: GateRecipe) -> Trial:
    """Return the questions that the corpus asks itself, with their true neighbours to depth `recipe.k` or the corpus's.

    Raises:
        InputError: the vectors are damaged.
    """
    rows = sample_rows(snapshot.n, recipe.queries, recipe.seed)
    sentences = sample_sentences(snapshot.passages(rows), recipe.seed)
    questions: Vectors = Encoder.load(snapshot.folder(QUESTION_ENCODER), "question").encode_questions(sentences)
    return Trial.of(index_of(snapshot, EXACT), questions, min(recipe.k, snapshot.n))


def _setting(index: IndexFile, trial: Trial, search: Mapping[str, int], curve: Sequence[Effort]) -> Effort:
    """Return the effort of an index's own setting: a point of its curve if it lies on it."""
    known = {point.setting: point for point in curve}
    return known.get(setting_name(search)) or effort(index, trial, search)


def _repaired(merges: Mapping[str, Facts]) -> dict[str, int]:
    known = "unreachable_repaired"
    return {name: facts[known] for name, facts in merges.items() if known in facts}
