"""Compare retrievers on the same questions, for all questions and by group, and recommend one.

Each retriever is compared with the first one question by question, which gives the narrowest
intervals. There is a group for each source of questions, and a group of the questions that share
few words with their relevant passages. On all other questions BM25 has an advantage, because people
who write a question while they look at a passage repeat its words.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rag_model.corpus.passages import PassageFile
from rag_model.errors import InputError, MissingExtraError, StoreError
from rag_model.evaluation.bootstrap import Estimate, estimate_difference, estimate_means
from rag_model.evaluation.questions import Question, QuestionSet
from rag_model.evaluation.retrieval.judging import Qrels, RetrievalJudge, compute_rank_metrics
from rag_model.evaluation.retrieval.staged import RetrieverMetrics, StageMetrics
from rag_model.index.postings.analyzer import Analyzer
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.recorded_tasks import PartTask, TaskRunner, run_tasks
from rag_model.store.store import Store
from rag_model.store.versions.manifest import passages_path
from rag_model.store.versions.snapshot import Snapshot

MAX_SHARED_STEMS = 2  # maximum stems that a question with low overlap shares with its passage
# Lucene's English stop words and question words. They do not count as shared words.
_QUESTION_STOP_WORDS = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then "
    "there these they this to was will with did do does from had has have how many much s were "
    "what when where which who whom whose why"
)
# name of the group of questions with low overlap
LOW_OVERLAP = f"at most {MAX_SHARED_STEMS} shared stems"
_STEMMED_LANGUAGES = ("", "en")  # languages with stemming; "" if the corpus names no language
# Maximum tokens of the passages in a prompt of 128k tokens. Question and answer need the other 28k.
PROMPT_TOKENS = 100_000
_TOKENS_PER_WORD = 1.4  # tokens per English word, with the tokenizers of current generators
_COST_TOLERANCE = 1.2  # ratio of two durations up to which they may differ only by noise
_MAX_PASSAGES = 20_000  # a larger corpus never fits into a prompt


@dataclass(frozen=True, slots=True)
class GoldTextTask(PartTask):
    """A task that looks for relevant passages in one part of a snapshot."""

    ids: BlobRef  # sorted JSON list of the ids of relevant passages or pages
    column: str  # column of these ids, `id` or `page_id`

    stage: ClassVar[str] = "gold"
    code: ClassVar[int] = 1

    def compute(self, store: Store) -> list[tuple[str, str]]:
        """Return the id and the text of each relevant passage, in row order."""
        ids = json.loads(store.blobs.read(self.ids))
        return _find_texts(store.blobs.get_local_path(self.file), self.column, ids)


def _find_texts(passages: Path, column: str, ids: Sequence[str]) -> list[tuple[str, str]]:
    """Return the id, and the title with the text, of each passage with one of `ids`."""
    relevant_ids, rows, first_row = pa.array(ids, pa.string()), list[int](), 0
    with PassageFile(passages) as file:
        for batch in file.iter_batches([column]):
            rows += (np.flatnonzero(pc.is_in(batch[column], relevant_ids)) + first_row).tolist()
            first_row += batch.num_rows
        return [
            (doc_id, f"{title} {text}")
            for batch in file.iter_selected(rows, [column, "title", "text"])
            for doc_id, title, text in zip(*(values.to_pylist() for values in batch.columns), strict=True)
        ]


def read_gold_texts(
    snapshot: Snapshot, judge: RetrievalJudge, runner: TaskRunner | None = None
) -> dict[str, list[str]]:
    """Return the titles and texts of the relevant passages, by passage id or by page id.

    `runner` reads the parts on workers. Without a runner, or if the store is read-only, this
    process reads them. Ids that the snapshot does not have are left out.

    Raises:
        InputError: The snapshot has none of the ids.
        StoreError: A passage file is damaged.
    """
    relevant_ids = {doc_id for grades in judge.qrels.values() for doc_id, grade in grades.items() if grade > 0}
    column = "page_id" if judge.judged_by == "pages" else "id"
    ids, files = sorted(relevant_ids), snapshot.manifest.content.files
    blobs = [files[passages_path(part.name)] for part in snapshot.parts if part.rows]
    store = snapshot.store
    try:
        ids_blob = store.blobs.put_bytes(json.dumps(ids).encode())
        id_texts = [*run_tasks(store, [GoldTextTask(blob, ids_blob, column) for blob in blobs], runner)]
    except StoreError:
        id_texts = [_find_texts(store.blobs.get_local_path(blob), column, ids) for blob in blobs]
    text_by_document: dict[str, list[str]] = {}
    for doc_id, text in chain.from_iterable(id_texts):
        text_by_document.setdefault(doc_id, []).append(text)
    if relevant_ids and not text_by_document:
        example_id = getattr(snapshot.passages([snapshot.n - 1])[0], column) if snapshot.n else ""
        raise InputError(
            f"snapshot {snapshot.id[:12]} has none of the {len(relevant_ids):,} {judge.judged_by} "
            f"that the questions name, such as {min(relevant_ids)!r}: use ids of this corpus, such "
            f"as {example_id!r}, or judge by answers"
        )
    return text_by_document


def count_unknown_questions(judge: RetrievalJudge, texts_by_id: dict[str, list[str]]) -> int:
    """Return the number of questions whose relevant ids are all missing from the snapshot."""
    return sum(not any(doc_id in texts_by_id for doc_id in grades) for grades in judge.qrels.values())


def find_low_overlap(questions: Sequence[Question], grades: Qrels, texts_by_id: dict[str, list[str]]) -> list[int]:
    """Return the positions of questions that share at most two stems with each relevant passage.

    Stems are the terms of an English BM25 index (`Analyzer`) without stop words. The title of a
    passage counts as part of its text. Passages that are not in
    `texts_by_id` are ignored.

    Raises:
        MissingExtraError: PyStemmer is not installed.
    """
    extract_stems = _build_stemmer()
    stems_by_id: dict[str, list[set[bytes]]] = {}
    low_overlap_positions = []
    for position, question in enumerate(questions):
        question_stems = extract_stems(question.text)
        relevant_ids = [doc_id for doc_id, grade in grades[question.id].items() if grade > 0 and doc_id in texts_by_id]
        for doc_id in relevant_ids:
            if doc_id not in stems_by_id:
                stems_by_id[doc_id] = [extract_stems(text) for text in texts_by_id[doc_id]]
        if relevant_ids and all(
            len(question_stems & text_stems) <= MAX_SHARED_STEMS
            for doc_id in relevant_ids
            for text_stems in stems_by_id[doc_id]
        ):
            low_overlap_positions.append(position)
    return low_overlap_positions


def _build_stemmer() -> Callable[[str], set[bytes]]:
    analyzer = Analyzer("english")
    stop_stems = set(analyzer.terms(_QUESTION_STOP_WORDS))
    return lambda text: set(analyzer.terms(text)) - stop_stems


@dataclass(frozen=True, slots=True)
class QuestionGroups:
    """Groups of the questions, with notes for the report."""

    # positions of the questions, by the name of their group
    positions: Mapping[str, Sequence[int]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def group_questions(
    snapshot: Snapshot, question_set: QuestionSet, judge: RetrievalJudge, runner: TaskRunner | None = None
) -> QuestionGroups:
    """Group questions by source. If passages or pages are judged, also return a group of the
    questions that share few words with these.

    Raises:
        InputError: The snapshot has none of the passages or pages that the questions name.
    """
    positions_by_group: dict[str, list[int]] = {}
    for position, question in enumerate(question_set.questions):
        if question.source:
            positions_by_group.setdefault(f"source {question.source}", []).append(position)
    if judge.judged_by == "answers":
        return QuestionGroups(positions_by_group)
    texts_by_id, notes = read_gold_texts(snapshot, judge, runner), []
    if n_unknown := count_unknown_questions(judge, texts_by_id):
        share = f"{n_unknown:,} of {len(question_set.questions):,} questions"
        notes.append(f"{share} name no {judge.judged_by} of this snapshot; they count as missed")
    if str(snapshot.manifest.content.corpus.get("language") or "") in _STEMMED_LANGUAGES:
        try:
            positions_by_group[LOW_OVERLAP] = find_low_overlap(question_set.questions, judge.qrels, texts_by_id)
        except MissingExtraError as error:
            notes.append(f"questions with {LOW_OVERLAP} are not reported separately: {error}")
    return QuestionGroups(
        {name: group_positions for name, group_positions in positions_by_group.items() if group_positions}, tuple(notes)
    )


@dataclass(frozen=True, slots=True)
class GroupMetrics:
    """The metrics of a retriever on a group of questions."""

    n: int  # number of questions
    metrics: Mapping[str, Estimate]
    # differences from the first retriever; empty for the first retriever itself
    differences: Mapping[str, Estimate]

    def to_json(self) -> dict[str, Any]:
        """Return the metrics as JSON values."""
        differences = {name: asdict(estimate) for name, estimate in self.differences.items()}
        return {
            "n": self.n,
            **_convert_estimates_to_json(self.metrics),
            **({"differences": differences} if differences else {}),
        }


@dataclass(frozen=True, slots=True)
class RetrieverComparison:
    """The metrics of one retriever, and their differences from the first retriever."""

    retriever_metrics: RetrieverMetrics  # quality and costs of the retriever itself
    overall: GroupMetrics  # metrics over all questions
    ranks: Mapping[str, float]  # RR@k and page measures; see `compute_rank_metrics`
    # for each stage of the retriever, the mean of each measure with its interval
    stages: Sequence[Mapping[str, Estimate]]
    groups: Mapping[str, GroupMetrics] = field(default_factory=dict)
    # Share of questions by the kind of the first relevant hit; empty if all hits are prose.
    kinds: Mapping[str, float] = field(default_factory=dict)

    @property
    def expression(self) -> str:
        """The expression of the retriever."""
        return self.retriever_metrics.expression

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics over all questions, without those in `ranks`."""
        return {name: estimate.value for name, estimate in self.overall.metrics.items() if name not in self.ranks}

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values: metrics, intervals, ranks, stages, groups and costs."""
        final_stage = self.retriever_metrics.final_stage
        stages_json = [
            _stage_to_json(stage, estimates)
            for stage, estimates in zip(self.retriever_metrics.stages, self.stages, strict=True)
        ]
        overall_json = self.overall.to_json()
        return {
            "metrics": self.metrics,
            "intervals": overall_json["intervals"],
            "ranks": dict(self.ranks),
            **({"differences": overall_json["differences"]} if "differences" in overall_json else {}),
            "milliseconds": final_stage.total_milliseconds,
            "bytes": final_stage.total_bytes,
            "timed": self.retriever_metrics.n_timed_queries,
            "encoder": {
                "milliseconds": self.retriever_metrics.encoder_milliseconds,
                "bytes": self.retriever_metrics.encoder_bytes,
            },
            "stages": stages_json,
            "groups": {name: group.to_json() for name, group in self.groups.items()},
            **({"kinds": dict(self.kinds)} if self.kinds else {}),
        }


def _stage_to_json(stage: StageMetrics, estimates: Mapping[str, Estimate]) -> dict[str, Any]:
    cost_names = ("milliseconds", "total_milliseconds", "bytes", "total_bytes")
    return {
        "stage": stage.name,
        **_convert_estimates_to_json(estimates),
        **{name: getattr(stage, name) for name in cost_names},
    }


def _convert_estimates_to_json(estimates: Mapping[str, Estimate]) -> dict[str, Any]:
    return {
        "metrics": {name: estimate.value for name, estimate in estimates.items()},
        "intervals": {name: (estimate.low, estimate.high) for name, estimate in estimates.items()},
    }


def compare_retrievers(
    retriever_metrics: Sequence[RetrieverMetrics],
    judge: RetrievalJudge,
    k: int,
    groups: QuestionGroups,
) -> list[RetrieverComparison]:
    """Compare each retriever with the first one, on the same questions and with the same `k`."""
    first_values = retriever_metrics[0].final_stage.values
    all_positions = range(len(retriever_metrics[0].results))
    comparisons = []
    for position, metrics in enumerate(retriever_metrics):
        baseline_values = first_values if position else None
        values_by_measure = metrics.final_stage.values
        values_by_stage_measure = {
            f"{i} {name}": column for i, stage in enumerate(metrics.stages) for name, column in stage.values.items()
        }
        estimates = estimate_means(values_by_stage_measure)
        comparisons.append(
            RetrieverComparison(
                metrics,
                _estimate_group(values_by_measure, baseline_values, all_positions),
                compute_rank_metrics(metrics.results, k) if judge.judged_by == "answers" else {},
                [{name: estimates[f"{i} {name}"] for name in stage.values} for i, stage in enumerate(metrics.stages)],
                {
                    name: _estimate_group(values_by_measure, baseline_values, group_positions)
                    for name, group_positions in groups.positions.items()
                },
                judge.compute_shares_by_kind(metrics.results, k),
            )
        )
    return comparisons


def _estimate_group(
    values_by_measure: Mapping[str, Sequence[float]],
    first_values: Mapping[str, Sequence[float]] | None,
    positions: Sequence[int],
) -> GroupMetrics:
    group_values = {name: [column[position] for position in positions] for name, column in values_by_measure.items()}
    estimates = estimate_means(group_values)
    if first_values is None:
        return GroupMetrics(len(positions), estimates, {})
    value_differences = {
        name: [value - first_values[name][position] for value, position in zip(column, positions, strict=True)]
        for name, column in group_values.items()
    }
    return GroupMetrics(len(positions), estimates, estimate_means(value_differences))


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A retriever, or a stage of one, that can be recommended."""

    name: str
    milliseconds: float
    values: Sequence[float]
    quality: float  # mean of the values


def advise_retriever(snapshot: Snapshot, retriever_metrics: Sequence[RetrieverMetrics], measure: str) -> str:
    """Return one sentence: that the corpus fits into a prompt, or else which retriever to use.

    Every retriever and every stage of a retriever can be recommended.
    """
    n_words = count_prompt_words(snapshot)
    if n_words is not None:
        return (
            f"the whole corpus has about {n_words:,} words, {n_words * _TOKENS_PER_WORD:,.0f} tokens, "
            "and fits a prompt: answer from all of it first, and keep a retriever only if that is "
            "worse or too slow"
        )
    return recommend_retriever(retriever_metrics, measure)


def count_prompt_words(snapshot: Snapshot) -> int | None:
    """Return the number of words of the corpus, or None if it does not fit into a prompt."""
    if snapshot.n > _MAX_PASSAGES:
        return None
    n_words = sum(sum(snapshot.columns(part.name, ["n_words"])["n_words"].to_pylist()) for part in snapshot.parts)
    return n_words if n_words * _TOKENS_PER_WORD <= PROMPT_TOKENS else None


def recommend_retriever(retriever_metrics: Sequence[RetrieverMetrics], measure: str) -> str:
    """Return one sentence that recommends a cheap retriever that is not worse than the best one.

    A retriever is worse if the confidence interval of its mean difference from the best retriever
    is below 0. Of all retrievers that are not worse, the cheapest and those that take up to a fifth
    longer, which may be noise, are considered. The one with the best quality is recommended.
    """
    candidates = _build_candidates(retriever_metrics, measure)
    best = max(candidates, key=lambda candidate: candidate.quality)
    if len(candidates) == 1:
        return f"only {best.name} was measured: give --retriever again to compare it with another"
    differences = {candidate.name: estimate_difference(candidate.values, best.values) for candidate in candidates}
    acceptable_retrievers = [candidate for candidate in candidates if differences[candidate.name].high >= 0]
    milliseconds_limit = _COST_TOLERANCE * min(candidate.milliseconds for candidate in acceptable_retrievers)
    chosen_retriever = max(
        (candidate for candidate in acceptable_retrievers if candidate.milliseconds <= milliseconds_limit),
        key=lambda candidate: candidate.quality,
    )
    choice_text = (
        f"use {chosen_retriever.name} for this corpus: {measure} "
        f"{chosen_retriever.quality:.3f} at {chosen_retriever.milliseconds:.3g} ms"
    )
    if chosen_retriever.quality == best.quality:
        is_cheapest = all(
            _COST_TOLERANCE * candidate.milliseconds >= chosen_retriever.milliseconds for candidate in candidates
        )
        cheaper_note = (
            "no other retriever is a fifth cheaper" if is_cheapest else "every retriever a fifth cheaper is worse"
        )
        return f"{choice_text} per question is the best value, and {cheaper_note}"
    difference = differences[chosen_retriever.name]
    return (
        f"{choice_text} per question; the best retriever, {best.name}, has "
        f"{best.quality:.3f} at {best.milliseconds:.3g} ms, but the interval of the "
        f"difference, {difference.low:+z.3f} to {difference.high:+z.3f}, is not below 0"
    )


def _build_candidates(retriever_metrics: Sequence[RetrieverMetrics], measure: str) -> list[_Candidate]:
    stage_by_retriever = {metrics.expression: metrics.final_stage for metrics in retriever_metrics}
    for metrics in retriever_metrics:
        for stage in metrics.stages[:-1]:
            stage_by_retriever.setdefault(stage.name, stage)
    return [
        _Candidate(name, stage.total_milliseconds, stage.values[measure], fmean(stage.values[measure]))
        for name, stage in stage_by_retriever.items()
    ]
