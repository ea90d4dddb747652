"""Measure a snapshot before it is published.

Each index is compared with exact search on queries sampled from the corpus. The file of each index
is examined for links, lists and codes, which explain its recall. If the gate requires a minimum
score on the user's own questions, the retriever is scored on them.

The search parameters of each index are tuned for its recall target before the manifest is written.
Readers search with these parameters, so they are a part of the snapshot's content. They are
recorded in the memo under their exact inputs: a rerun gets the same parameters and the same
snapshot, even on a machine that rounds differently.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from rag_model.corpus.passages import read_hashes
from rag_model.digest import digest_json
from rag_model.encoders.encoder import load_any_encoder
from rag_model.errors import InputError
from rag_model.evaluation.bootstrap import estimate_mean
from rag_model.evaluation.gate import GateRecipe, IndexRecalls, QuestionFloor, RetrieverScore
from rag_model.evaluation.questions import read_questions, sample_rows, sample_sentences
from rag_model.evaluation.retrieval.judging import RetrievalJudge, retrieve
from rag_model.index.factory import with_refinement
from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.kind import IndexMeasurement, SparseQuerySet, TextQuerySet, TokenQuerySet, get_kind_of_entry
from rag_model.index.quality.results import compute_p5
from rag_model.index.quality.sweep import VectorQuerySet
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.indexes import get_index_files
from rag_model.snapshots.content import BuiltIndex
from rag_model.store.objects.memo import StageResult
from rag_model.store.store import Store
from rag_model.store.versions.manifest import EMBEDDINGS, TEXT, TOKENS, Content, question_encoder_path
from rag_model.store.versions.snapshot import Snapshot

AnyQuerySet = VectorQuerySet | TokenQuerySet | SparseQuerySet | TextQuerySet
# Token vectors are measured on few queries, because MaxSim takes a hundred times as long as an
# exact search of vectors.
_TOKEN_QUERIES, _TOKEN_PASSAGES = 64, 2_000
_KEY_DIGITS = 16  # a passage's sampling key is computed from this many hex digits of its hash
# Maps the names of a merge's statistics to those of metrics.
_BUILD_METRICS = {"unreachable_repaired": "repaired"} | {
    name: name for name in ("built_cells", "updated_cells", "reused_cells", "generation", "replaced")
}
CODE = 3  # increase it when the same index and queries would give other search parameters
# Folders of a snapshot from which the queries and their exact neighbours are computed.
_INPUT_FOLDERS = ("passages", "encoder", "embeddings")


@dataclass(frozen=True, slots=True)
class SnapshotMetrics:
    """The metrics of a snapshot's indexes, by the index's name."""

    k: int  # depth of recall
    measurements: Mapping[str, IndexMeasurement]
    factories: Mapping[str, str]  # factory strings, such as IVF1024,PQ48np,Refine(vectors)
    # metrics of the build, such as how many nodes the merge linked, and how many cells were reused
    build_metrics: Mapping[str, Mapping[str, float | int]]
    # Scores of retrievers, by the name of the floor (minimum score) that the gate requires.
    retriever_scores: Mapping[str, RetrieverScore]

    @property
    def recalls(self) -> dict[str, IndexRecalls]:
        """Each query's recall@k with the index's own parameters, for the gate."""
        return {name: IndexRecalls(self.factories[name], m.recalls) for name, m in self.measurements.items()}

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of each index for the manifest: mean and 5th percentile of recall@k,
        cost, and health.

        `distances` is the number of distance computations per query. `repaired` counts the graph
        nodes that were unreachable before the repair, `unreachable` those that still are.
        """
        return {name: self._collect_index_metrics(name, m) for name, m in self.measurements.items()}

    def _collect_index_metrics(self, index_name: str, measurement: IndexMeasurement) -> dict[str, Any]:
        metrics: dict[str, Any] = {
            f"recall@{self.k}": round(float(measurement.recalls.mean()), 4),
            f"recall@{self.k}_p5": round(compute_p5(measurement.recalls), 4),
        }
        if measurement.setting is not None:
            metrics["distances"] = round(measurement.setting.distances, 1)
        if measurement.health is not None:
            metrics |= measurement.health.metrics()
        return metrics | dict(self.build_metrics.get(index_name, {})) | dict(measurement.metrics)


def measure_snapshot(
    snapshot: Snapshot,
    recipe: GateRecipe,
    measurements: Mapping[str, IndexMeasurement],
    merge_stats: Mapping[str, Mapping[str, Any]],
) -> SnapshotMetrics:
    """Return the metrics of a snapshot's measured indexes, with the scores of retrievers on the
    gate's questions.

    Args:
        snapshot: a snapshot, published or not.
        recipe: the depth k of recall, and the floors.
        measurements: the measurement of each index, by name.
        merge_stats: statistics of each index's merge, by name, with the number of repaired nodes.

    Raises:
        InputError: questions or a model cannot be read.
    """
    indexes = snapshot.manifest.content.indexes
    return SnapshotMetrics(
        min(recipe.k, snapshot.n),
        measurements,
        {name: with_refinement(indexes[name]["factory"], indexes[name].get("refine")) for name in measurements},
        _select_build_metrics(merge_stats),
        {name: score_retriever(snapshot, floor) for name, floor in recipe.questions.items()},
    )


def measure_index(snapshot: Snapshot, name: str, query_set: AnyQuerySet) -> IndexMeasurement:
    """Search one index with queries of its representation, and examine its file.

    Raises:
        InputError: the index or its vectors are damaged.
    """
    entry = snapshot.manifest.content.indexes[name]
    return get_kind_of_entry(entry).measure(get_index_files(snapshot, name), entry, query_set)


def score_retriever(snapshot: Snapshot, floor: QuestionFloor) -> RetrieverScore:
    """Score a retriever on questions for which the gate requires a minimum score.

    The retriever returns as many hits as the measure needs, or its maximum if that is less.

    Raises:
        InputError: the questions or a model cannot be read.
        UsageError: the questions lack the judgements that the measure needs, or the expression is
            wrong.
    """
    question_set = read_questions(floor.file)
    judge = RetrievalJudge.for_questions(question_set, floor.judged_by, patterns=floor.patterns)
    expression = floor.retriever or snapshot.manifest.content.default_retriever
    retriever = open_retriever(snapshot, expression)
    depth = min(judge.get_cutoff(floor.measure), retriever.most)
    outcomes = list(retrieve(retriever, question_set.questions, depth, patterns=floor.patterns))
    return RetrieverScore(expression, estimate_mean(judge.compute_values(outcomes, [floor.measure])[floor.measure]))


@dataclass(frozen=True, slots=True)
class QuerySample:
    """Sentences of sampled passages, from which the queries of each representation are computed."""

    rows: tuple[int, ...]  # row numbers of the passages
    sentences: tuple[str, ...]
    keys: tuple[int, ...]  # sampling keys of the passages, as `rank_passages` returns them

    def take_first(self, n: int) -> "QuerySample":
        """Return the sample of the first `n` sentences."""
        return QuerySample(self.rows[:n], self.sentences[:n], self.keys[:n])


def rank_passages(passages: Path, n: int, seed: int) -> tuple[npt.NDArray[np.uint64], Rows]:
    """Return the `n` passages of a part that have the smallest sampling keys: their ascending keys
    and their rows, (m,) each.

    A passage's key is computed from its hash and the seed. So a passage keeps its key as long as
    its text stays the same, and a later snapshot's sample differs only in changed passages. Equal
    passages have equal keys, and only the first of them can be sampled.

    Raises:
        InputError: the passages are damaged.
    """
    hex_digits = pc.utf8_slice_codeunits(read_hashes(passages), 0, _KEY_DIGITS).to_pylist()
    seed_mask = np.uint64(int(digest_json(["sample", seed]).partition(":")[2][:_KEY_DIGITS], 16))
    try:
        passage_hashes = np.frombuffer(bytes.fromhex("".join(hex_digits)), ">u8").astype(np.uint64)
    except ValueError as error:
        raise InputError(f"{passages} has a hash that is not hexadecimal: build its part again") from error
    if len(passage_hashes) != len(hex_digits):
        raise InputError(f"{passages} has a hash of less than {_KEY_DIGITS} digits: build its part again")
    sample_keys, first_rows = np.unique(passage_hashes ^ seed_mask, return_index=True)
    return sample_keys[:n], first_rows[:n].astype(np.int64)


def count_candidates(n_queries: int, part_rows: int, n_passages: int) -> int:
    """Return how many passages of a part to rank for a sample of `n_queries` of all `n` passages.

    The result is at least four times the part's expected share of the sample, rounded up to a power
    of two, so that it stays the same for most later snapshots.
    """
    return min(n_queries, 1 << (15 + 4 * n_queries * part_rows // max(1, n_passages)).bit_length())


def choose_sample_rows(
    snapshot: Snapshot, n_queries: int, candidates: Sequence[tuple[npt.NDArray[np.uint64], Rows]]
) -> dict[int, int]:
    """Return the rows of a sample with their keys, in the order of the keys.

    `candidates` are the results of `rank_passages` for each part.
    """
    starts = np.cumsum([0, *(part.rows for part in snapshot.parts)])
    all_keys = np.concatenate([np.empty(0, np.uint64), *(part_keys for part_keys, _ in candidates)])
    rows = [part_rows + start for (_, part_rows), start in zip(candidates, starts, strict=False)]
    sample_positions = np.unique(all_keys, return_index=True)[1][:n_queries]
    chosen_rows = np.concatenate([np.empty(0, np.int64), *rows])[sample_positions]
    return dict(zip(chosen_rows.tolist(), all_keys[sample_positions].tolist(), strict=True))


def read_sample(
    snapshot: Snapshot, keys_by_row: Mapping[int, int], seed: int, previous: QuerySample | None = None
) -> QuerySample:
    """Return a sample: a sentence of each passage that `choose_sample_rows` chose.

    The sentences of the `previous` sample, which has the same seed, are not read again.

    Raises:
        StoreError: a passage file is missing or damaged.
    """
    sentence_by_key = dict(zip(previous.keys, previous.sentences, strict=True)) if previous else {}
    new_rows = [row for row, key in keys_by_row.items() if key not in sentence_by_key]
    new_sentences = sample_sentences(snapshot.passages(new_rows), seed)
    sentence_by_key.update(zip(map(keys_by_row.__getitem__, new_rows), new_sentences, strict=True))
    keys = tuple(keys_by_row.values())
    return QuerySample(tuple(keys_by_row), tuple(map(sentence_by_key.__getitem__, keys)), keys)


def encode_queries(snapshot: Snapshot, sentences: Sequence[str], representation: str) -> Vectors:
    """Return the question encoder's vectors of sentences: (q, d), (q, l, d) or (q, l, 2)
    float32.
    """
    encoder = load_any_encoder(snapshot.folder(question_encoder_path(representation)))
    return encoder.encode_questions(list(sentences))


def create_query_set(
    snapshot: Snapshot, recipe: GateRecipe, representation: str, sample: QuerySample
) -> TokenQuerySet | SparseQuerySet | TextQuerySet:
    """Return the queries of a sample for an index over token vectors, weighted terms or texts.

    For token vectors there are few queries. They search a sample of the passages, which includes
    the passages that the queries were made from.
    """
    kind, k = snapshot.manifest.content.kind_of(representation), min(recipe.k, snapshot.n)
    if kind == TOKENS:
        sample = sample.take_first(_TOKEN_QUERIES)
        sampled_rows = sample_rows(snapshot.n, _TOKEN_PASSAGES, recipe.seed)
        searched_rows = np.union1d(sample.rows, sampled_rows).astype(np.int64)
        return TokenQuerySet(encode_queries(snapshot, sample.sentences, representation), k, searched_rows)
    source_rows = np.array(sample.rows, np.int64)
    if kind == TEXT:
        return TextQuerySet([*sample.sentences], k, source_rows)
    return SparseQuerySet(encode_queries(snapshot, sample.sentences, representation), k, source_rows)


def _select_build_metrics(merge_stats: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float | int]]:
    return {
        name: {metric: stats[statistic] for statistic, metric in _BUILD_METRICS.items() if statistic in stats}
        for name, stats in merge_stats.items()
    }


def tune_index(
    store: Store,
    snapshot: Snapshot,
    name: str,
    target: float,
    recipe: GateRecipe,
    start_search: Mapping[str, int],
    get_query_set: Callable[[str], AnyQuerySet],
) -> dict[str, Any]:
    """Return the search parameters of one index, and a note if they miss the target.

    The result is recorded in the memo, so that an index is tuned only once.

    Args:
        store: the store with the memo.
        snapshot: the snapshot with the index, not published yet.
        name: the name of the index.
        target: the recall to reach.
        recipe: the gate's settings: the depth of recall, and the sample of queries.
        start_search: parameters from which tuning starts; they do not change its result.
        get_query_set: returns the queries of a representation; not called for a recorded result.

    Raises:
        InputError: the index or its vectors are damaged.
    """
    content = snapshot.manifest.content

    def produce(workdir: Path) -> StageResult:
        entry, query_set = content.indexes[name], get_query_set(content.representation_of(name))
        settings = {parameter: start_search.get(parameter, setting) for parameter, setting in entry["search"].items()}
        starting_entry = {**entry, "search": settings}
        tuning = get_kind_of_entry(entry).tune(get_index_files(snapshot, name), starting_entry, query_set, target)
        return StageResult({}, {"search": dict(tuning.search), "note": tuning.note})

    return dict(store.memo.get_or_create("tune", _list_tune_inputs(content, name, target, recipe), produce)[0].stats)


def _list_tune_inputs(content: Content, name: str, target: float, recipe: GateRecipe) -> dict[str, object]:
    representation = content.representation_of(name)
    files = {path: blob.id for path, blob in sorted(content.files.items()) if path.partition("/")[0] in _INPUT_FOLDERS}
    return {
        "index": content.files[content.index_file(name)].id,
        # The file is the same with and without `Refine(vectors)`, but its search parameters differ.
        "refine": content.indexes[name].get("refine"),
        "target": target,
        "files": files,
        "questions": [recipe.k, recipe.queries, recipe.seed],
        "code": CODE,
        # The representation decides the question encoder, even if the vectors are equal.
        **({} if representation == EMBEDDINGS else {"over": representation}),
    }


def with_tuning(index: BuiltIndex, result: Mapping[str, Any]) -> BuiltIndex:
    """Return an index with the search parameters and the note of `tune_index` in its plan."""
    plan_notes = (*index.plan.notes, result["note"]) if result["note"] else index.plan.notes
    return replace(index, plan=replace(index.plan, search=result["search"], notes=plan_notes))
