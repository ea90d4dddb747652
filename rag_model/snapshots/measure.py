"""Measure a snapshot before it is published: each index against exact search, on questions drawn from the corpus. And
examine each index file: links, lists and codes, which explain its recall. And ask the user's own questions, where the
gate holds a retriever to a floor on them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from rag_model.encoders.carried import load_carried
from rag_model.encoders.sparse_encoder import SparseEncoder
from rag_model.encoders.token_encoder import TokenEncoder
from rag_model.evaluation.bootstrap import mean_interval
from rag_model.evaluation.gate import Findings, GateRecipe, QuestionFloor, Reached
from rag_model.evaluation.questions.files import read_questions
from rag_model.evaluation.questions.sampling import sample_rows, sample_sentences
from rag_model.evaluation.retrieval.judging import Judge
from rag_model.evaluation.retrieval.retrieved import ask
from rag_model.index.factory import with_refinement
from rag_model.index.kind import Measurement, SparseTrial, TextTrial, TokenTrial
from rag_model.index.quality.health import Effort, Health, Trial
from rag_model.index.quality.recall import percentile5
from rag_model.index.registry import kind_of
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.indexes import exact_index_of, files_of
from rag_model.store.versions.paths import EMBEDDINGS, question_encoder
from rag_model.store.versions.snapshot import Snapshot

AnyTrial = Trial | TokenTrial | SparseTrial | TextTrial
_TOKEN_QUESTIONS, _TOKEN_PASSAGES = 64, 2_000  # exact MaxSim over whole corpora costs hundred times a dense scan


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of a snapshot's indexes, by the index's name."""

    k: int
    found: Mapping[str, Findings]  # each query's recall@k at the index's own setting
    curves: Mapping[str, Sequence[Effort]]  # recall against work and time
    settings: Mapping[str, Effort] = field(default_factory=dict)  # the index's own setting, as a point of its curve
    health: Mapping[str, Health] = field(default_factory=dict)
    repaired: Mapping[str, int] = field(default_factory=dict)  # unreachable nodes that the merge linked
    figures: Mapping[str, Mapping[str, float | int]] = field(default_factory=dict)  # further figures of a kind
    reached: Mapping[str, Reached] = field(default_factory=dict)  # by the name of a floor on questions

    def metrics(self) -> dict[str, Any]:
        """Return the figures that the manifest keeps by index: recall@k, mean and 5th percentile, cost and health.

        `distances` are computed per query; `repaired` counts the nodes of a graph that were unreachable before the
        repair, `unreachable` those that still are.
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
        return figures | dict(self.figures.get(index, {}))


def measure(snapshot: Snapshot, recipe: GateRecipe, merges: Mapping[str, Mapping[str, Any]] | None = None) -> Measured:
    """Search each index of a snapshot with the same sampled questions, compare with exact search, examine its file.

    The questions are sentences of sampled passages, encoded by the question encoder that the snapshot carries.

    Args:
        snapshot: published or not.
        recipe: number of questions, depth and seed.
        merges: the report of each index's merge, by name, with the number of repaired nodes.

    Raises:
        InputError: an index or its vectors are damaged.
    """
    if not snapshot.n:
        return Measured(recipe.k, {}, {})
    trials, content = trials_of(snapshot, recipe), snapshot.manifest.content
    measured: dict[str, Measurement] = {}
    for name, entry in content.indexes.items():
        measured[name] = kind_of(entry).measure(files_of(snapshot, name), entry, trials(content.over(name)))
    return Measured(
        min(recipe.k, snapshot.n),
        {name: Findings(_factory(content.indexes[name]), own.recalls) for name, own in measured.items()},
        {name: own.curve for name, own in measured.items() if own.curve},
        {name: own.setting for name, own in measured.items() if own.setting is not None},
        {name: own.health for name, own in measured.items() if own.health is not None},
        _repaired(merges or {}),
        {name: own.figures for name, own in measured.items() if own.figures},
        {name: reach(snapshot, floor) for name, floor in recipe.questions.items()},
    )


def reach(snapshot: Snapshot, floor: QuestionFloor) -> Reached:
    """Ask a retriever the questions that it is held to a floor on.

    It is asked as deep as the measure looks, or as deep as it goes.

    Raises:
        InputError: the questions or a model cannot be read.
        UsageError: the questions cannot be judged so, or the expression is wrong.
    """
    asked = read_questions(floor.file)
    judge = Judge.of(asked, floor.judged_by, patterns=floor.patterns)
    named = floor.retriever or snapshot.manifest.content.default_retriever
    retriever = open_retriever(snapshot, named)
    depth = min(judge.depth(floor.measure), retriever.most)
    outcomes = list(ask(retriever, asked.questions, depth, patterns=floor.patterns))
    return Reached(named, mean_interval(judge.values(outcomes, [floor.measure])[floor.measure]))


def _factory(entry: Mapping[str, Any]) -> str:
    return with_refinement(entry["factory"], entry.get("refine"))


def trials_of(snapshot: Snapshot, recipe: GateRecipe) -> Callable[[str], AnyTrial]:
    """Return a function that gives the trial of a representation by name; each is made once."""

    @cache
    def made(representation: str) -> AnyTrial:
        return _TRIALS.get(snapshot.manifest.content.kind_of(representation), trial_of)(
            snapshot, recipe, representation
        )

    return made


def trial_of(snapshot: Snapshot, recipe: GateRecipe, representation: str = EMBEDDINGS) -> Trial:
    """Return questions drawn from the corpus, with their true neighbours to depth min(`recipe.k`, n).

    Raises:
        InputError: the vectors are damaged.
    """
    encoder = load_carried(snapshot.folder(question_encoder(representation)))
    questions = encoder.encode_questions(_asked(snapshot, recipe)[1])
    return Trial.of(exact_index_of(snapshot, representation), questions, min(recipe.k, snapshot.n))


def token_trial_of(snapshot: Snapshot, recipe: GateRecipe, representation: str) -> TokenTrial:
    """Return questions drawn from the corpus as token vectors, and a sample of passages that holds their sources."""
    rows, sentences = _asked(snapshot, replace(recipe, queries=min(recipe.queries, _TOKEN_QUESTIONS)))
    encoder = TokenEncoder.load(snapshot.folder(question_encoder(representation)))
    among = np.union1d(rows, sample_rows(snapshot.n, _TOKEN_PASSAGES, recipe.seed)).astype(np.int64)
    return TokenTrial(encoder.encode_questions(sentences), min(recipe.k, snapshot.n), among)


def sparse_trial_of(snapshot: Snapshot, recipe: GateRecipe, representation: str) -> SparseTrial:
    """Return questions drawn from the corpus as weighted terms."""
    rows, sentences = _asked(snapshot, recipe)
    encoder = SparseEncoder.load(snapshot.folder(question_encoder(representation)))
    return SparseTrial(encoder.encode_questions(sentences), min(recipe.k, snapshot.n), np.array(rows, np.int64))


def text_trial_of(snapshot: Snapshot, recipe: GateRecipe, representation: str) -> TextTrial:
    """Return questions drawn from the corpus as they are."""
    rows, sentences = _asked(snapshot, recipe)
    return TextTrial(sentences, min(recipe.k, snapshot.n), np.array(rows, np.int64))


_TRIALS: dict[str, Callable[[Snapshot, GateRecipe, str], AnyTrial]] = {  # by the kind of a representation
    "vectors": trial_of,
    "tokens": token_trial_of,
    "sparse": sparse_trial_of,
    "text": text_trial_of,
}


def _asked(snapshot: Snapshot, recipe: GateRecipe) -> tuple[list[int], list[str]]:
    """Return sampled rows, and a sentence of each passage."""
    rows = sample_rows(snapshot.n, recipe.queries, recipe.seed)
    return rows, sample_sentences(snapshot.passages(rows), recipe.seed)


def _repaired(merges: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    known = "unreachable_repaired"
    return {name: facts[known] for name, facts in merges.items() if known in facts}
