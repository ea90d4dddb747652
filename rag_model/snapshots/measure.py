"""Measure a snapshot before it is published.

Each index is compared with exact search on queries sampled from the corpus. Its file is examined
for links, lists and codes, which explain its recall. Where the gate sets a floor on the user's own
questions, the retriever is scored on them.

The search parameters of each index are tuned for its recall target before the manifest is written.
They are content, because readers of a snapshot search with them. So they are recorded in the memo
under their exact inputs, and a rerun, even on a machine that rounds differently, gets the same
parameters and the same snapshot.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rag_model.encoders.any_encoder import load_any_encoder
from rag_model.encoders.sparse_encoder import SparseEncoder
from rag_model.encoders.token_encoder import TokenEncoder
from rag_model.evaluation.bootstrap import estimate_mean
from rag_model.evaluation.gate import GateRecipe, IndexRecalls, QuestionFloor, RetrieverScore
from rag_model.evaluation.questions import read_questions, sample_rows, sample_sentences
from rag_model.evaluation.retrieval.judging import RetrievalJudge, retrieve
from rag_model.index.factory import with_refinement
from rag_model.index.files.engine import Vectors
from rag_model.index.kind import IndexMeasurement, SparseQuerySet, TextQuerySet, TokenQuerySet, get_kind_of_entry
from rag_model.index.quality.results import IndexHealth, OperatingPoint, percentile5
from rag_model.index.quality.sweep import VectorQuerySet
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.indexes import index_files, open_exact_index
from rag_model.snapshots.content import BuiltIndex
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.memo import StageResult
from rag_model.store.store import Store
from rag_model.store.versions.manifest import EMBEDDINGS, Content, Manifest, question_encoder_path
from rag_model.store.versions.snapshot import Snapshot

AnyTrial = VectorQuerySet | TokenQuerySet | SparseQuerySet | TextQuerySet
_TOKEN_QUERIES, _TOKEN_PASSAGES = 64, 2_000  # exact MaxSim costs a hundred times a dense scan


@dataclass(frozen=True, slots=True)
class SnapshotMetrics:
    """The metrics of a snapshot's indexes, by the index's name."""

    k: int
    recalls: Mapping[str, IndexRecalls]  # each query's recall@k at the index's own setting
    curves: Mapping[str, Sequence[OperatingPoint]]  # recall against work and time
    operating_points: Mapping[str, OperatingPoint] = field(
        default_factory=dict
    )  # the index's own setting, as a point of its curve
    health: Mapping[str, IndexHealth] = field(default_factory=dict)
    # unreachable nodes that the merge linked
    repaired: Mapping[str, int] = field(default_factory=dict)
    kind_metrics: Mapping[str, Mapping[str, float | int]] = field(
        default_factory=dict
    )  # further metrics of the index kind
    retriever_scores: Mapping[str, RetrieverScore] = field(
        default_factory=dict
    )  # by the name of the gate's question floor

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of each index for the manifest: recall@k, mean and 5th percentile,
        cost, health.

        `distances` is the number of distance computations per query. `repaired` counts the graph
        nodes that were unreachable before the repair, `unreachable` those that still are.
        """
        return {index: self._index_metrics(index) for index in self.recalls}

    def _index_metrics(self, index: str) -> dict[str, Any]:
        recalls = self.recalls[index].recalls
        metrics: dict[str, Any] = {
            f"recall@{self.k}": round(float(recalls.mean()), 4),
            f"recall@{self.k}_p5": round(percentile5(recalls), 4),
        }
        if index in self.operating_points:
            metrics["distances"] = round(self.operating_points[index].distances, 1)
        if index in self.health:
            metrics |= self.health[index].metrics()
        if index in self.repaired:
            metrics["repaired"] = self.repaired[index]
        return metrics | dict(self.kind_metrics.get(index, {}))


# A function that measures all indexes of a snapshot and returns the measurements by index name.
MeasureIndexes = Callable[[Snapshot, GateRecipe], Mapping[str, IndexMeasurement]]


def measure_snapshot(
    snapshot: Snapshot,
    recipe: GateRecipe,
    merges: Mapping[str, Mapping[str, Any]] | None = None,
    measure_indexes: MeasureIndexes | None = None,
) -> SnapshotMetrics:
    """Search each index with the same sampled queries, compare with exact search, and examine its
    file.

    The queries are sentences of sampled passages, encoded by the snapshot's question encoder.

    Args:
        snapshot: a snapshot, published or not.
        recipe: number of queries, depth k and seed.
        merges: the statistics of each index's merge, by name, with the number of repaired nodes.
        measure_indexes: measures the indexes, perhaps on other machines; None: measure them in this
            process.

    Raises:
        InputError: an index or its vectors are damaged.
    """
    if not snapshot.n:
        return SnapshotMetrics(recipe.k, {}, {})
    measurements = (measure_indexes or _measure_indexes)(snapshot, recipe)
    content = snapshot.manifest.content
    return SnapshotMetrics(
        min(recipe.k, snapshot.n),
        {
            name: IndexRecalls(_full_factory(content.indexes[name]), measurement.recalls)
            for name, measurement in measurements.items()
        },
        {name: measurement.curve for name, measurement in measurements.items() if measurement.curve},
        {name: measurement.setting for name, measurement in measurements.items() if measurement.setting is not None},
        {name: measurement.health for name, measurement in measurements.items() if measurement.health is not None},
        _count_repaired(merges or {}),
        {name: measurement.metrics for name, measurement in measurements.items() if measurement.metrics},
        {name: score_retriever(snapshot, floor) for name, floor in recipe.questions.items()},
    )


def _measure_indexes(snapshot: Snapshot, recipe: GateRecipe) -> dict[str, IndexMeasurement]:
    get_query_set, content = cache_query_sets(snapshot, recipe), snapshot.manifest.content
    return {
        name: measure_index(snapshot, name, get_query_set(content.representation_of(name))) for name in content.indexes
    }


def measure_index(snapshot: Snapshot, name: str, query_set: AnyTrial) -> IndexMeasurement:
    """Search one index with queries of its representation, and examine its file.

    Raises:
        InputError: the index or its vectors are damaged.
    """
    entry = snapshot.manifest.content.indexes[name]
    return get_kind_of_entry(entry).measure(index_files(snapshot, name), entry, query_set)


def score_retriever(snapshot: Snapshot, floor: QuestionFloor) -> RetrieverScore:
    """Score a retriever on the questions for which the gate sets a floor.

    It retrieves as many hits as the measure needs, or as many as it can.

    Raises:
        InputError: the questions or a model cannot be read.
        UsageError: the questions do not have the judgements of the measure, or the expression is
            wrong.
    """
    question_set = read_questions(floor.file)
    judge = RetrievalJudge.for_questions(question_set, floor.judged_by, patterns=floor.patterns)
    expression = floor.retriever or snapshot.manifest.content.default_retriever
    retriever = open_retriever(snapshot, expression)
    depth = min(judge.depth(floor.measure), retriever.most)
    outcomes = list(retrieve(retriever, question_set.questions, depth, patterns=floor.patterns))
    return RetrieverScore(expression, estimate_mean(judge.values(outcomes, [floor.measure])[floor.measure]))


def _full_factory(entry: Mapping[str, Any]) -> str:
    return with_refinement(entry["factory"], entry.get("refine"))


def cache_query_sets(snapshot: Snapshot, recipe: GateRecipe) -> Callable[[str], AnyTrial]:
    """Return a function from a representation's name to its queries, which are sampled once."""

    @cache
    def get_query_set(representation: str) -> AnyTrial:
        return _SAMPLERS.get(snapshot.manifest.content.kind_of(representation), sample_vector_queries)(
            snapshot, recipe, representation
        )

    return get_query_set


def sample_vector_queries(snapshot: Snapshot, recipe: GateRecipe, representation: str = EMBEDDINGS) -> VectorQuerySet:
    """Return queries sampled from the corpus, with their exact neighbours to depth min(`recipe.k`,
    n).

    Raises:
        InputError: the vectors are damaged.
    """
    return VectorQuerySet.from_exact_search(
        open_exact_index(snapshot, representation),
        encode_vector_queries(snapshot, recipe, representation),
        min(recipe.k, snapshot.n),
    )


def encode_vector_queries(snapshot: Snapshot, recipe: GateRecipe, representation: str) -> Vectors:
    """Return (q, d) float32: the question encoder's vectors of sentences from sampled passages."""
    encoder = load_any_encoder(snapshot.folder(question_encoder_path(representation)))
    return encoder.encode_questions(_sample_sentences(snapshot, recipe)[1])


def sample_token_queries(snapshot: Snapshot, recipe: GateRecipe, representation: str) -> TokenQuerySet:
    """Return token vectors of sampled queries, and a sample of passages that includes their
    sources.
    """
    rows, sentences = _sample_sentences(snapshot, replace(recipe, queries=min(recipe.queries, _TOKEN_QUERIES)))
    encoder = TokenEncoder.load(snapshot.folder(question_encoder_path(representation)))
    searched_rows = np.union1d(rows, sample_rows(snapshot.n, _TOKEN_PASSAGES, recipe.seed)).astype(np.int64)
    return TokenQuerySet(encoder.encode_questions(sentences), min(recipe.k, snapshot.n), searched_rows)


def sample_sparse_queries(snapshot: Snapshot, recipe: GateRecipe, representation: str) -> SparseQuerySet:
    """Return weighted terms of queries sampled from the corpus."""
    rows, sentences = _sample_sentences(snapshot, recipe)
    encoder = SparseEncoder.load(snapshot.folder(question_encoder_path(representation)))
    return SparseQuerySet(encoder.encode_questions(sentences), min(recipe.k, snapshot.n), np.array(rows, np.int64))


def sample_text_queries(snapshot: Snapshot, recipe: GateRecipe, representation: str) -> TextQuerySet:
    """Return the texts of queries sampled from the corpus."""
    rows, sentences = _sample_sentences(snapshot, recipe)
    return TextQuerySet(sentences, min(recipe.k, snapshot.n), np.array(rows, np.int64))


# by the kind of a representation
_SAMPLERS: dict[str, Callable[[Snapshot, GateRecipe, str], AnyTrial]] = {
    "vectors": sample_vector_queries,
    "tokens": sample_token_queries,
    "sparse": sample_sparse_queries,
    "text": sample_text_queries,
}


def _sample_sentences(snapshot: Snapshot, recipe: GateRecipe) -> tuple[list[int], list[str]]:
    """Return sampled rows, and a sentence from the passage of each."""
    rows = sample_rows(snapshot.n, recipe.queries, recipe.seed)
    return rows, sample_sentences(snapshot.passages(rows), recipe.seed)


def _count_repaired(merges: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    key = "unreachable_repaired"
    return {name: stats[key] for name, stats in merges.items() if key in stats}


CODE = 1  # increase it when the same index and queries would give other search parameters
# Folders with the inputs of the queries and of their exact neighbours.
_INPUT_FOLDERS = ("passages", "encoder", "embeddings")


@dataclass(frozen=True, slots=True)
class TuneTask:
    """An index whose search parameters are to reach a recall target."""

    index: str
    blob: BlobRef  # the index file
    target: float
    k: int  # depth of recall
    queries: int  # number of sampled queries
    seed: int  # of the sample; differs from the gate's

    @property
    def recipe(self) -> GateRecipe:
        """The sample of queries, as the samplers take it."""
        return GateRecipe(k=self.k, queries=self.queries, seed=self.seed)


# A function that tunes indexes of a snapshot, perhaps on other machines, and returns the results of
# `tune_index` in order.
TuneIndexes = Callable[[Snapshot, Sequence[TuneTask]], Sequence[Mapping[str, Any]]]


def tune_searches(
    store: Store,
    draft: Content,
    built: Sequence[BuiltIndex],
    recipe: GateRecipe,
    tune_indexes: TuneIndexes | None = None,
) -> list[BuiltIndex]:
    """Return the indexes with search parameters that reach their recall target.

    An index without a target is unchanged. Queries are sampled like the gate's but with another
    seed, so that the gate judges the parameters on other queries. A target that cannot be reached
    becomes a note of the index.

    Args:
        store: the store with the files of the draft.
        draft: the content before tuning.
        built: the indexes of the draft.
        recipe: the gate's depth k and number of queries.
        tune_indexes: tunes the indexes, perhaps on other machines; None: tune them in this process.

    Raises:
        InputError: an index or its vectors are damaged.
    """
    with Snapshot.from_manifest(store, Manifest(draft)) as snapshot:
        tasks = [
            TuneTask(index.name, index.blob, index.plan.recall_target, recipe.k, recipe.queries, recipe.seed + 1)
            for index in built
            if index.plan.recall_target is not None and snapshot.n
        ]
        if tune_indexes is None:
            get_query_set = cache_query_sets(snapshot, replace(recipe, seed=recipe.seed + 1))
            results: Sequence[Mapping[str, Any]] = [tune_index(store, snapshot, task, get_query_set) for task in tasks]
        else:
            results = tune_indexes(snapshot, tasks) if tasks else []
    stats_by_index = {task.index: stats for task, stats in zip(tasks, results, strict=True)}
    return [
        _with_tuning(index, stats_by_index[index.name]) if index.name in stats_by_index else index for index in built
    ]


def _with_tuning(index: BuiltIndex, stats: Mapping[str, Any]) -> BuiltIndex:
    notes = (*index.plan.notes, stats["note"]) if stats["note"] else index.plan.notes
    return replace(index, plan=replace(index.plan, search=stats["search"], notes=notes))


def tune_index(
    store: Store, snapshot: Snapshot, task: TuneTask, get_query_set: Callable[[str], AnyTrial]
) -> dict[str, Any]:
    """Return the search parameters of one index, and a note if they miss the target.

    The result is recorded, so an index is tuned once.

    Args:
        store: the store with the memo.
        snapshot: the draft.
        task: the index, its target and the sample of queries.
        get_query_set: returns the queries of a representation; not called for a recorded result.

    Raises:
        InputError: the index or its vectors are damaged.
    """
    content = snapshot.manifest.content

    def produce(workdir: Path) -> StageResult:
        entry, query_set = content.indexes[task.index], get_query_set(content.representation_of(task.index))
        tuning = get_kind_of_entry(entry).tune(index_files(snapshot, task.index), entry, query_set, task.target)
        return StageResult({}, {"search": dict(tuning.search), "note": tuning.note})

    return dict(store.memo.get_or_create("tune", _build_memo_inputs(content, task), produce)[0].stats)


def _build_memo_inputs(draft: Content, task: TuneTask) -> dict[str, object]:
    over = draft.representation_of(task.index)
    files = {path: ref.id for path, ref in sorted(draft.files.items()) if path.partition("/")[0] in _INPUT_FOLDERS}
    return {
        "index": task.blob.id,
        "target": task.target,
        "files": files,
        "questions": [task.k, task.queries, task.seed],
        "code": CODE,
        # The representation decides the question encoder, even if the vectors are equal.
        **({} if over == EMBEDDINGS else {"over": over}),
    }
