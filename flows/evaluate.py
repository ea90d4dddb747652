"""Let a model answer questions from passages of a snapshot, and measure the answers.

Purpose: `bookwheel evaluate --model`, and the step of `flows.release` that measures a model after
each rebuild.
Caching: the store's memo, keyed by the exact inputs; answers of an earlier run are reused. The
result is recorded in the store as an evaluation, once for the same snapshot, model, questions and
settings.
Requires: the extras `model` and `train`; a store that this machine can write to, for the answers.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flows import artifacts
from flows.evaluation_records import KILT, REPORT, ROWS, NewEvaluation, store_evaluation, to_metric_values
from flows.outcome import CollapseRefusedError, EvaluateOutcome
from flows.parameters import Url
from flows.stage import StageClock, deployment_flow, stage
from rag_model.digest import digest_folder
from rag_model.encoders.model import list_dtype_memo_inputs
from rag_model.evaluation.answers.abstaining import describe_abstention
from rag_model.evaluation.answers.examination import (
    AnswerCache,
    AnswerEvaluation,
    WholeCorpus,
    open_other_retrievers,
    prepare_whole_corpus,
)
from rag_model.evaluation.answers.routing import ConditionAnswerer, RoutedAnswers
from rag_model.evaluation.answers.scores import check_gold_answers
from rag_model.evaluation.answers.settings import EvaluationSettings
from rag_model.evaluation.questions import read_questions
from rag_model.evaluation.records import MeasureValues
from rag_model.evaluation.reports.answers import AnswerReport, render_answer_report
from rag_model.evaluation.reports.run_files import check_paths, write_answers, write_kilt, write_report
from rag_model.evaluation.reports.training import TrainingCurves, read_training_curves
from rag_model.evaluation.retrieval.judging import RetrievalJudge
from rag_model.evaluation.subject import describe_answers_subject
from rag_model.reading.marginal import MarginalReader
from rag_model.reading.model import (
    ReadingModel,
    check_route,
    find_model_folder,
    open_reading_model,
    resolve_model_id,
)
from rag_model.reading.reader import Reader, ReaderName
from rag_model.reading.routing import Route, identify_model
from rag_model.retrieve.retriever import SnapshotRetriever
from rag_model.store.store import Store
from rag_model.store.versions.evaluation_manifest import EvaluationSubject
from rag_model.store.versions.snapshot import Snapshot


@deployment_flow("evaluate")
def evaluate(
    store: Url,
    model: str,
    questions: Url,
    ref: str = "latest",
    settings: EvaluationSettings | None = None,
    rows: str | None = None,
    kilt: str | None = None,
    report: str | None = None,
    asks: str | None = None,
) -> EvaluateOutcome:
    """Answer `questions` with `model` from the snapshot that `ref` names, and measure the answers.

    Args:
        store: URL or folder of the store, which also stores the answers.
        model: a RAG model of the store (a ref, ref@number, an id, a unique prefix), or a folder of
            one; for the reader `concat` also a folder of a generator, or `openai:MODEL`.
        questions: DPR's CSV, JSONL with `question` and `answers`, or KILT's JSONL; a path or URL.
        ref: a ref, ref@number, an id or a unique prefix of a snapshot. Snapshot and model are
            pinned by id before the first search.
        settings: all other settings, such as the retriever; by default the default settings.
        rows: write one JSON object per question to this file.
        kilt: write KILT's prediction file to this path.
        report: write the HTML report to this path.
        asks: the passage encoder that belongs to the model's question encoder, if the model does
            not name it: a folder or a hub name.

    Raises:
        CollapseRefusedError: all results are written, but retrieval has collapsed or the model does
            not use its passages.
        BookwheelError: a stage failed; finished answers are kept.
    """
    settings, clock = settings or EvaluationSettings(), StageClock("evaluate")
    check_paths(rows, kilt, report, questions=questions)
    opened_store = Store.open(store)
    # keeps `gc` from deleting this run's answers
    with opened_store.intents.hold(f"evaluate-{secrets.token_hex(8)}"):
        with clock("open"):
            run = prepare_answer_run(opened_store, model, questions, ref, settings, asks)
        with clock("retrieve") as on_progress:
            retrieve_passages(run.evaluation, on_progress)
        for evaluation_condition in run.evaluation.list_conditions():
            with clock(evaluation_condition.name) as on_progress:
                answer_under_condition(run.evaluation, evaluation_condition, on_progress)
        outcome = run.build_outcome(clock.seconds, report)
        write_files(run, outcome, rows, kilt)
        outcome = record_answers(run, outcome, questions)
    artifacts.show_answers(outcome)
    if outcome.refusal:
        raise CollapseRefusedError(outcome.refusal, outcome)
    return outcome


@dataclass(frozen=True, slots=True)
class AnswerRun:
    """Inputs of an evaluation, pinned by their ids, and the results."""

    store: Store
    snapshot: Snapshot
    model: str  # full id, or the folder
    reader: str
    model_folder: Path | None  # None: the model has no folder
    evaluation: AnswerEvaluation
    subject: EvaluationSubject

    @property
    def retriever(self) -> str:
        """The retriever's expression."""
        settings = self.evaluation.settings
        return settings.expression or self.snapshot.manifest.content.default_retriever

    def build_outcome(self, seconds: dict[str, float], report: str | None) -> EvaluateOutcome:
        """Return the results as plain values."""
        evaluation, open_book = self.evaluation, self.evaluation.results[0]
        abstention = evaluation.abstention
        answer_metrics = {name: estimate.value for name, estimate in open_book.metrics.items()}
        return EvaluateOutcome(
            snapshot=self.snapshot.id,
            model=self.model,
            retriever=self.retriever,
            reader=self.reader,
            costs=open_book.costs,
            n=len(open_book.scored_answers),
            k=evaluation.k,
            metrics={**evaluation.retrieval, **answer_metrics},
            intervals={
                name: (estimate.low, estimate.high)
                for name, estimate in {**evaluation.intervals, **open_book.metrics}.items()
            },
            ranks=evaluation.ranks,
            collapse=evaluation.collapse.metrics(),
            judged_by=evaluation.judge.judged_by,
            refusal=evaluation.collapse.describe_collapse(evaluation.settings.limits),
            ablations=[row.to_json() for row in evaluation.results] if len(evaluation.results) > 1 else [],
            search=evaluation.search_milliseconds,
            stages=evaluation.stages,
            abstaining=None if abstention is None else abstention.to_json(),
            abstained="" if abstention is None else describe_abstention(abstention),
            worth=evaluation.retrieval_worth,
            routing=None if evaluation.routing is None else evaluation.routing.to_json(),
            notes=evaluation.notes,
            seconds=seconds,
            report=report,
        )


@stage
def prepare_answer_run(
    store: Store, model: str, questions: str, ref: str, settings: EvaluationSettings, asks: str | None = None
) -> AnswerRun:
    """Read the questions; pin the snapshot and the model, and load the model."""
    question_set = read_questions(questions)
    # Invalid answers are reported before the model is fetched and loaded, which may take minutes.
    check_gold_answers(question_set.questions, settings.kind)
    RetrievalJudge.for_questions(question_set, settings.judged_by)
    snapshot = Snapshot.from_store(store, ref)
    model_id, reader_settings = resolve_model_id(store, model), settings.build_reader_settings(model)
    for settings_of_reader in reader_settings.values():
        check_route(settings_of_reader, model_id)
    reading_model, retriever = open_reading_model(
        snapshot, store, model_id, settings.expression, [name for name in reader_settings if name != "auto"], asks
    )
    cache_key_inputs: dict[str, Any] = {
        "snapshot": snapshot.id,
        "model": _get_model_identity(model_id),
        "retriever": settings.expression or snapshot.manifest.content.default_retriever,
        "versions": {name: version(name) for name in ("torch", "transformers")},
        **list_dtype_memo_inputs(),
    }
    reader_by_name: dict[ReaderName, Reader] = {
        name: reading_model.open_reader(retriever, settings_of_reader)
        for name, settings_of_reader in reader_settings.items()
        if name != "auto"
    }
    answer_cache_by_reader: dict[ReaderName, ConditionAnswerer] = {
        name: AnswerCache(store, reader, {**cache_key_inputs, "reader": name, **reader.decides})
        for name, reader in reader_by_name.items()
    }
    if auto_settings := reader_settings.get("auto"):
        passage_reader = auto_settings.reader_for(model_id)
        route = None if settings.choose_route else settings.route or Route()
        route_subject = identify_model(model_id), passage_reader
        answer_cache_by_reader["auto"] = RoutedAnswers(
            answer_cache_by_reader[passage_reader], route, route_subject, settings.kind, settings.resampling
        )
    first_reader_entry, *other_reader_entries = ((name, answer_cache_by_reader[name]) for name in reader_settings)
    k = settings.k or reading_model.k
    question_texts = [question.text for question in question_set.questions]
    other_retrievers, whole_corpus = _prepare_ablations(
        store, reading_model, retriever, reader_by_name, settings, question_texts
    )
    evaluation = AnswerEvaluation(
        retriever,
        first_reader_entry[1],
        question_set,
        k,
        snapshot.n,
        settings,
        dict(other_reader_entries),
        other_retrievers,
        whole_corpus,
    )
    subject = describe_answers_subject(store, snapshot, model_id, question_set, settings, asks)
    folder = find_model_folder(store, model_id)
    return AnswerRun(store, snapshot, model_id, next(iter(reader_settings)), folder, evaluation, subject)


def _prepare_ablations(
    store: Store,
    reading_model: ReadingModel,
    retriever: SnapshotRetriever,
    readers: Mapping[ReaderName, Reader],
    settings: EvaluationSettings,
    question_texts: Sequence[str],
) -> tuple[dict[str, SnapshotRetriever], WholeCorpus]:
    """Return the other retrievers to compare, and the whole corpus if it fits into one prompt."""
    if settings.ablations is None:
        return {}, WholeCorpus()
    first_reader, whole_corpus = next(iter(readers.values())), prepare_whole_corpus(readers, retriever, question_texts)
    encoder = None
    if isinstance(first_reader, MarginalReader):
        if first_reader.rag.settings.weighed_by == "scores":
            return {}, whole_corpus  # p(z|x) uses the scores of the model's own retriever
        encoder = reading_model.question_encoder
    return open_other_retrievers(retriever.snapshot, store, settings.expression, encoder), whole_corpus


def _get_model_identity(model: str) -> object:
    """Return a model's id; for a folder, whose files may change, return the digest of its files."""
    return digest_folder(Path(model)) if Path(model).is_dir() else model


retrieve_passages = stage(AnswerEvaluation.retrieve, "retrieve_passages")
answer_under_condition = stage(AnswerEvaluation.answer_condition, "answer_under_condition")


@stage
def write_files(run: AnswerRun, outcome: EvaluateOutcome, rows: str | None, kilt: str | None) -> None:
    """Write the requested files: rows, predictions and the report."""
    scored_answers = run.evaluation.results[0].scored_answers
    if rows:
        write_answers(scored_answers, Path(rows))
    if kilt:
        write_kilt(scored_answers, Path(kilt))
    if outcome.report:
        write_report(render_answer_report(_build_report(run, outcome)), Path(outcome.report))


@stage
def record_answers(run: AnswerRun, outcome: EvaluateOutcome, questions: str) -> EvaluateOutcome:
    """Record the evaluation in the store if it is not recorded yet; see `store_evaluation`."""
    values = MeasureValues.for_questions(
        run.evaluation.question_set.questions, {run.retriever: run.evaluation.list_question_values()}
    )
    metrics_by_retriever = {run.retriever: to_metric_values({**outcome.metrics, **outcome.ranks}, outcome.intervals)}
    outcome_json = asdict(replace(outcome, report=None))
    new_evaluation = NewEvaluation(
        metrics_by_retriever,
        values,
        outcome_json,
        partial(_write_record_files, run, outcome),
        run.evaluation.n_provisional_answers,
    )
    return store_evaluation(run.store, run.subject, new_evaluation, questions, outcome)


def _write_record_files(run: AnswerRun, outcome: EvaluateOutcome, folder: Path) -> None:
    outcome_with_report = replace(outcome, report=str(folder / REPORT))
    write_files(run, outcome_with_report, str(folder / ROWS), str(folder / KILT))


def _build_report(run: AnswerRun, outcome: EvaluateOutcome) -> AnswerReport:
    evaluation = run.evaluation
    decoding = asdict(evaluation.settings.decoding)
    decoding_text = ", ".join(f"{name} {setting}" for name, setting in decoding.items() if setting is not None)
    return AnswerReport(
        model=outcome.model,
        snapshot=outcome.snapshot,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        kind=evaluation.settings.kind,
        results=evaluation.results,
        retrieval={**evaluation.retrieval, **evaluation.ranks},
        retrieval_intervals=evaluation.intervals,
        collapse=evaluation.collapse,
        collapse_reason=outcome.refusal,
        search_milliseconds=evaluation.search_milliseconds,
        retrieval_worth=outcome.worth,
        notes=outcome.notes,
        abstention=evaluation.abstention,
        curves=read_training_curves(run.model_folder / "metrics.jsonl") if run.model_folder else TrainingCurves(),
        lineage={
            "model": outcome.model,
            "snapshot": outcome.snapshot,
            "judged by": outcome.judged_by,
            "reader": outcome.reader,
            "decoding": decoding_text,
        },
    )
