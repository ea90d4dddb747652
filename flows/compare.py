"""Measure retrievers of a snapshot, and each of their stages, on the same questions.

Purpose: `bookwheel evaluate` without a model, and the step of `flows.release` that measures
retrieval after each rebuild.
Caching: none, since a search is cheap compared with an answer. The result is recorded in the store
as an evaluation, once for the same snapshot, questions and settings. If the store cannot be
written, nothing is recorded, and the outcome says so.
Requires: the extra `model` if an index is searched by vectors.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from beam_jobs import corpus
from beam_jobs.job_settings import JobSettings, OnProgress
from flows import artifacts
from flows.evaluation_records import REPORT, ROWS, NewEvaluation, store_evaluation, to_metric_values
from flows.outcome import CompareOutcome
from flows.parameters import Url
from flows.stage import StageClock, deployment_flow, stage
from rag_model.errors import UsageError
from rag_model.evaluation.measures.measure import JudgedBy
from rag_model.evaluation.questions import QuestionSet, read_questions
from rag_model.evaluation.records import MeasureValues
from rag_model.evaluation.reports.retrieval import RetrievalReport, render_retrieval_report
from rag_model.evaluation.reports.run_files import check_paths, write_dpr, write_jsonl, write_report, write_trec
from rag_model.evaluation.retrieval import comparison
from rag_model.evaluation.retrieval.comparison import (
    QuestionGroups,
    RetrieverComparison,
    advise_retriever,
    group_questions,
)
from rag_model.evaluation.retrieval.judging import RetrievalJudge
from rag_model.evaluation.retrieval.staged import (
    DEFAULT_TIMING,
    QueryBatches,
    RetrieverMetrics,
    StageRankings,
    combine_metrics,
    measure_stages,
    time_stages,
)
from rag_model.evaluation.subject import describe_retrieval_subject
from rag_model.retrieve.factory import open_retrievers
from rag_model.retrieve.retriever import SnapshotRetriever
from rag_model.store.store import Store
from rag_model.store.versions.evaluation_manifest import EvaluationSubject
from rag_model.store.versions.snapshot import Snapshot

DEFAULT_DEPTH = 20  # passages per question that are measured
_MAX_SLUG_CHARACTERS = 60  # maximum characters of an expression in a file name


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Paths of the files to write the results to.

    If there are several retrievers, each retriever's file has its number and name in the file name.
    """

    trec: str | None = None  # TREC run
    dpr: str | None = None  # DPR's retrieval JSON
    rows: str | None = None  # one JSON line per question


@deployment_flow("compare")
def compare(
    store: Url,
    questions: Url,
    retrievers: Sequence[str] = (),
    ref: str = "latest",
    k: int | None = None,
    judged_by: JudgedBy | None = None,
    patterns: bool = False,
    encoder: Url | None = None,
    report: str | None = None,
    files: RunFiles | None = None,
    timing_seconds: float = DEFAULT_TIMING.seconds,
) -> CompareOutcome:
    """Search every question with each retriever, and measure the stages of each retriever.

    Args:
        store: URL or folder of the store.
        questions: DPR's CSV, JSONL with `question` and `answers` or `passages`, KILT's JSONL, or a
            BEIR folder.
        retrievers: expressions, such as rrf(hnsw, ivfpq); the others are compared with the first.
            By default the snapshot's default retriever.
        ref: a ref, ref@number, an id or a unique prefix of a snapshot.
        k: number of passages per question that are measured; by default 20, or fewer if a retriever
            returns fewer.
        judged_by: how relevance is judged; by default by pages for a BEIR folder, by passages if
            every question names one, otherwise by answers.
        patterns: whether the answers are regular expressions.
        encoder: question encoder in place of the snapshot's: a folder or a hub name.
        report: write the HTML report to this file.
        files: files to write the results to; by default none.
        timing_seconds: time in seconds to spend on timing the stages of one retriever.

    Raises:
        BookwheelError: a stage failed.
    """
    clock, run_files = StageClock("compare"), files or RunFiles()
    check_paths(report, run_files.trec, run_files.dpr, run_files.rows, questions=questions)
    with clock("open"):
        run = open_retrievers_on_questions(store, questions, retrievers, ref, k, judged_by, patterns, encoder)
    for name, retriever in zip(run.expressions, run.retrievers, strict=True):
        with clock(name) as on_progress:
            measure_retriever(run, name, retriever, run_files, on_progress)
    with clock("time"):
        timed_metrics = time_questions(run, timing_seconds)
    with clock("compare"):
        outcome = compare_and_report(run, timed_metrics, clock, report)
    with clock("record"):
        outcome = record_comparison(run, outcome, questions)
    artifacts.show_retrievers(outcome)
    return outcome


@dataclass(slots=True)
class ComparisonRun:
    """Inputs of a comparison, pinned by their ids, and the results."""

    store: Store
    snapshot: Snapshot
    expressions: Sequence[str]  # of the retrievers
    retrievers: Sequence[SnapshotRetriever]
    k: int  # cutoff: the number of passages per question that are measured
    subject: EvaluationSubject
    question_set: QuestionSet
    batches: QueryBatches
    judge: RetrievalJudge
    groups: QuestionGroups
    rankings: list[StageRankings] = field(default_factory=list)
    comparisons: list[RetrieverComparison] = field(default_factory=list)


@stage
def open_retrievers_on_questions(
    store: str,
    questions: str,
    retrievers: Sequence[str],
    ref: str,
    k: int | None,
    judged_by: JudgedBy | None,
    patterns: bool,
    encoder: str | None,
) -> ComparisonRun:
    """Read the questions, pin the snapshot, and open the retrievers."""
    question_set = read_questions(questions)
    judge = RetrievalJudge.for_questions(question_set, judged_by, patterns=patterns)
    if k is not None and k < 1:
        raise UsageError(f"k is {k}: measure at least 1 passage")
    opened_store = Store.open(store)
    snapshot = Snapshot.from_store(opened_store, ref)
    expressions = list(retrievers) or [snapshot.manifest.content.default_retriever]
    if duplicate_name := next((name for name in expressions if expressions.count(name) > 1), None):
        raise UsageError(f"the retriever {duplicate_name} is given twice: leave one out")
    opened_retrievers = open_retrievers(snapshot, list(retrievers) or None, encoder=encoder)
    depth = min(retriever.choose_depth(k, DEFAULT_DEPTH) for retriever in opened_retrievers)
    for retriever in opened_retrievers:
        retriever.check_depth(depth)  # before the first search, so that an error costs no time
    run_tasks = partial(corpus.run, job_settings=JobSettings.new(opened_store.url))
    groups = group_questions(snapshot, question_set, judge, run_tasks)
    subject = describe_retrieval_subject(opened_store, snapshot, question_set, retrievers, depth, judge, encoder)
    batches = QueryBatches(question_set.questions)
    return ComparisonRun(
        opened_store, snapshot, expressions, opened_retrievers, depth, subject, question_set, batches, judge, groups
    )


@stage
def measure_retriever(
    run: ComparisonRun, name: str, retriever: SnapshotRetriever, files: RunFiles, on_progress: OnProgress
) -> None:
    """Search every question with one retriever, measure its stages, and write its hits."""
    rankings = measure_stages(retriever, name, run.batches, run.judge, run.k, on_progress)
    run.rankings.append(rankings)
    name_infix = _build_name_infix(run, len(run.rankings))
    for output_path, write_file in ((files.dpr, write_dpr), (files.rows, write_jsonl)):
        if output_path:
            write_file(rankings.results, insert_name(Path(output_path), name_infix))
    if files.trec:
        write_trec(rankings.results, insert_name(Path(files.trec), name_infix), name_infix or "bookwheel")


def insert_name(path: Path, name: str) -> Path:
    """Return a path with a name before its ending: `run.trec` and `1-hnsw` give `run.1-hnsw.trec`.

    >>> insert_name(Path("run.trec"), "1-hnsw").name, insert_name(Path("run.trec"), "").name
    ('run.1-hnsw.trec', 'run.trec')
    """
    return path.with_name(f"{path.stem}.{name}{path.suffix}") if name else path


def _build_name_infix(run: ComparisonRun, number: int) -> str:
    """Return the text to insert into a retriever's file names; its `number` counts from 1.

    Return an empty string if there is only one retriever.
    """
    return "" if len(run.expressions) == 1 else f"{number}-{_to_slug(run.expressions[number - 1])}"


def _to_slug(expression: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", expression).strip("-")[:_MAX_SLUG_CHARACTERS]


@stage
def time_questions(run: ComparisonRun, seconds: float) -> list[RetrieverMetrics]:
    """Search a sample of the questions one by one, and measure how long every stage takes."""
    timing = replace(DEFAULT_TIMING, seconds=seconds)
    stage_costs = time_stages(run.retrievers, run.batches.texts, run.k, timing)
    return [
        combine_metrics(stage_rankings, costs_of_stages)
        for stage_rankings, costs_of_stages in zip(run.rankings, stage_costs, strict=True)
    ]


@stage
def compare_and_report(
    run: ComparisonRun, timed_metrics: Sequence[RetrieverMetrics], clock: StageClock, report: str | None
) -> CompareOutcome:
    """Compare the retrievers, recommend one, and write the report."""
    run.comparisons = comparison.compare_retrievers(timed_metrics, run.judge, run.k, run.groups)
    headline_measure = run.judge.get_headline_measure(run.k)
    advice = advise_retriever(run.snapshot, timed_metrics, headline_measure)
    if report:
        write_report(render_retrieval_report(_build_report(run, advice)), Path(report))
    return CompareOutcome(
        snapshot=run.snapshot.id,
        k=run.k,
        n=len(run.question_set.questions),
        judged_by=run.judge.judged_by,
        measure=headline_measure,
        comparisons={comparison.expression: comparison.to_json() for comparison in run.comparisons},
        advice=advice,
        notes=run.groups.notes,
        seconds=clock.seconds,
        report=report,
    )


@stage
def record_comparison(run: ComparisonRun, outcome: CompareOutcome, questions: str) -> CompareOutcome:
    """Record the evaluation in the store if it is not recorded yet; see `store_evaluation`."""
    measure_values = MeasureValues.for_questions(
        run.question_set.questions,
        {comparison.expression: comparison.retriever_metrics.final_stage.values for comparison in run.comparisons},
    )
    metrics_by_retriever = {
        name: to_metric_values({**comparison["metrics"], **comparison["ranks"]}, comparison["intervals"])
        for name, comparison in outcome.comparisons.items()
    }
    outcome_json = replace(outcome, report=None).to_json()
    new_evaluation = NewEvaluation(
        metrics_by_retriever, measure_values, outcome_json, partial(_write_record_files, run, outcome.advice)
    )
    return store_evaluation(run.store, run.subject, new_evaluation, questions, outcome)


def _write_record_files(run: ComparisonRun, advice: str, folder: Path) -> None:
    for number, rankings in enumerate(run.rankings, start=1):
        write_jsonl(rankings.results, insert_name(folder / ROWS, _build_name_infix(run, number)))
    write_report(render_retrieval_report(_build_report(run, advice)), folder / REPORT)


def _build_report(run: ComparisonRun, advice: str) -> RetrievalReport:
    return RetrievalReport(
        snapshot=run.snapshot.id,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        questions=len(run.question_set.questions),
        k=run.k,
        judged_by=run.judge.judged_by,
        measure=run.judge.get_headline_measure(run.k),
        retrievers=run.comparisons,
        advice=advice,
        notes=run.groups.notes,
        lineage={
            "snapshot": run.snapshot.id,
            **{f"retriever {i}": name for i, name in enumerate(run.expressions, start=1)},
        },
    )
