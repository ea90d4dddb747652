"""Answer a set of questions with a model of the store from a snapshot of it, and measure the answers.

Purpose: `bookwheel evaluate --model`, and the step of `flows.release` that measures a model after each rebuild.
Caching: the store's memo, keyed by the exact inputs: answers of an earlier run are reused. What was measured is put
into the store as an evaluation, once for the same snapshot, model, questions and settings.
Requires: the extras model and train; a store that this machine can write to, since answers are kept there.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from beam_jobs.launch import OnProgress
from flows import artifacts
from flows.admission import Url
from flows.outcome import CollapseRefusedError, Evaluated
from flows.progress import StageClock
from flows.recording import KILT, REPORT, ROWS, Found, Kept, figures, keep
from flows.stage import deployed, stage
from rag_model.evaluation.answers.ablation import Condition
from rag_model.evaluation.answers.abstaining import abstention_words
from rag_model.evaluation.answers.answering import Answering
from rag_model.evaluation.answers.examination import Examination
from rag_model.evaluation.answers.rivals import Whole, open_rivals, whole_of
from rag_model.evaluation.answers.scores import check_golds
from rag_model.evaluation.answers.settings import Evaluation
from rag_model.evaluation.questions.files import read_questions
from rag_model.evaluation.records.subject import answers_subject, digest_folder
from rag_model.evaluation.records.values import Values
from rag_model.evaluation.reports.answers import AnswerReport, render
from rag_model.evaluation.reports.run_files import check_paths, write_answers, write_kilt, write_page
from rag_model.evaluation.reports.training import Curves, read_curves
from rag_model.evaluation.retrieval.judging import Judge
from rag_model.reading.marginal import MarginalReader
from rag_model.reading.model import ReadingModel, model_folder_of, model_id
from rag_model.reading.opening import open_model
from rag_model.reading.reader import Reader
from rag_model.retrieve.found import SnapshotRetriever
from rag_model.store.store import Store
from rag_model.store.versions.evaluation_manifest import Subject
from rag_model.store.versions.snapshot import Snapshot


@deployed("evaluate")
def evaluate(
    store: Url,
    model: str,
    questions: Url,
    ref: str = "latest",
    settings: Evaluation | None = None,
    rows: str | None = None,
    kilt: str | None = None,
    report: str | None = None,
    asks: str | None = None,
) -> Evaluated:
    """Answer `questions` with `model` from the snapshot that `ref` names, and measure the answers.

    Args:
        store: URL or folder of the store; answers are kept in its memo.
        model: a RAG model of the store (a ref, ref@number, an id, a unique prefix), or a folder of one; for the reader
            `concat` also a folder of a generator, or `openai:MODEL`.
        questions: DPR's CSV, JSONL with `question` and `answers`, or KILT's JSONL; a path or URL.
        ref: a ref, ref@number, an id or a unique prefix of a snapshot. Both are pinned by id before anything is asked.
        settings: everything else, the retriever among it; the default settings if none are given.
        rows: write one JSON object a question to this file.
        kilt: write KILT's prediction file to this one.
        report: write the HTML report to this one.
        asks: if the model does not name it, the encoder of the passages that it searches: a folder or a hub name.

    Raises:
        CollapseRefusedError: everything is measured and written, but retrieval has collapsed or passages are not read.
        BookwheelError: a stage failed; answers that were made are kept.
    """
    settings, clock = settings or Evaluation(), StageClock("evaluate")
    check_paths(rows, kilt, report, questions=questions)
    target = Store.open(store)
    with target.intents.held(f"evaluate-{secrets.token_hex(8)}"):  # so that `gc` keeps this run's answers
        with clock("open"):
            work = prepare(target, model, questions, ref, settings, asks)
        with clock("retrieve") as tell:
            retrieve(work, tell)
        for condition in work.examination.conditions():
            with clock(condition.name) as tell:
                answer(work, NamedCondition(condition), tell)
        outcome = work.outcome(clock.seconds, report)
        write_files(work, outcome, rows, kilt)
        kept = record(work, outcome, questions)
    outcome = replace(outcome, evaluation=kept.evaluation, unrecorded=kept.why)
    artifacts.show_answers(outcome)
    if outcome.refusal:
        raise CollapseRefusedError(outcome)
    return outcome


class NamedCondition:
    """Wraps a condition, so that Prefect does not look for futures in every passage of the record."""

    def __init__(self, condition: Condition) -> None:
        """Hold `condition`."""
        self.condition = condition


class Work:
    """The pinned inputs of a run, and its results; not a record, for the same reason."""

    def __init__(
        self,
        store: Store,
        snapshot: Snapshot,
        model: str,
        reader: str,
        folder: Path | None,
        examination: Examination,
        subject: Subject,
    ) -> None:
        """Hold a snapshot and a model, each known by its id, the model's folder, and the questions put to them."""
        self.store, self.snapshot, self.model, self.reader, self.folder = store, snapshot, model, reader, folder
        self.examination, self.subject = examination, subject

    @property
    def retriever(self) -> str:
        """The retriever's expression."""
        settings = self.examination.settings
        return settings.expression or self.snapshot.manifest.content.default_retriever

    def outcome(self, seconds: dict[str, float], report: str | None) -> Evaluated:
        """Return what was found, as plain values."""
        examined, book = self.examination, self.examination.rows[0]
        abstaining = examined.abstaining
        answered = {name: one.value for name, one in book.figures.items()}
        return Evaluated(
            snapshot=self.snapshot.id,
            model=self.model,
            retriever=self.retriever,
            reader=self.reader,
            costs=book.costs,
            n=len(book.scored),
            k=examined.k,
            metrics={**examined.retrieval, **answered},
            intervals={name: (one.low, one.high) for name, one in {**examined.intervals, **book.figures}.items()},
            ranks=examined.ranks,
            collapse=examined.collapse.metrics(),
            judged_by=examined.judge.by,
            refusal=examined.collapse.reason(examined.settings.limits),
            ablations=[row.to_json() for row in examined.rows] if len(examined.rows) > 1 else [],
            search=examined.search,
            stages=examined.stages,
            abstaining=None if abstaining is None else abstaining.to_json(),
            abstained="" if abstaining is None else abstention_words(abstaining),
            worth=examined.worth,
            notes=examined.notes,
            seconds=seconds,
            report=report,
        )


@stage
def prepare(store: Store, model: str, questions: str, ref: str, settings: Evaluation, asks: str | None = None) -> Work:
    """Read the questions; pin the snapshot and the model, and load the model."""
    asked = read_questions(questions)
    check_golds(asked.questions, settings.kind)  # before a model is fetched and loaded
    Judge.of(asked, settings.judged_by)
    snapshot = Snapshot.from_store(store, ref)
    named, ways = model_id(store, model), settings.reading(model)
    loaded, found = open_model(snapshot, store, named, settings.expression, [*ways], asks)
    inputs: dict[str, Any] = {
        "snapshot": snapshot.id,
        "model": _weights(named),
        "retriever": settings.expression or snapshot.manifest.content.default_retriever,
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }
    readers = {name: loaded.reader(found, way) for name, way in ways.items()}
    first, *others = (
        (name, Answering(store, partial(_same, reader), {**inputs, "reader": name, **reader.decides}))
        for name, reader in readers.items()
    )
    k = settings.k or loaded.k
    texts = [question.text for question in asked.questions]
    rivals, whole = _ablated(store, loaded, found, readers, settings, texts)
    examination = Examination(found, first[1], asked, k, snapshot.n, settings, dict(others), rivals, whole)
    subject = answers_subject(store, snapshot, named, asked, settings, asks)
    folder = model_folder_of(store, named)
    return Work(store, snapshot, named, next(iter(ways)), folder, examination, subject)


def _same(reader: Reader) -> Reader:
    return reader


def _ablated(
    store: Store,
    loaded: ReadingModel,
    found: SnapshotRetriever,
    readers: Mapping[str, Reader],
    settings: Evaluation,
    texts: Sequence[str],
) -> tuple[dict[str, SnapshotRetriever], Whole]:
    """Return the other retrievers that the first reader is measured with, and all passages where they fit."""
    if settings.ablations is None:
        return {}, Whole()
    first, whole = next(iter(readers.values())), whole_of(readers, found, texts)
    encoder = None
    if isinstance(first, MarginalReader):
        if first.rag.settings.weighed_by == "scores":
            return {}, whole  # p(z|x) is made of the scores of its own retriever
        encoder = loaded.question
    return open_rivals(found.snapshot, store, settings.expression, encoder), whole


def _weights(named: str) -> object:
    """Return a model's id; of a folder, which may change, the digest of every file."""
    return digest_folder(Path(named)) if Path(named).is_dir() else named


@stage
def retrieve(work: Work, tell: OnProgress) -> None:
    """Search every question as deep as its conditions need."""
    work.examination.retrieve(tell)


@stage
def answer(work: Work, named: NamedCondition, tell: OnProgress) -> None:
    """Answer the questions under one condition, but for those answered before, and measure the answers."""
    work.examination.answer(named.condition, tell)


@stage
def write_files(work: Work, outcome: Evaluated, rows: str | None, kilt: str | None) -> None:
    """Write what was asked for: rows, predictions, the report."""
    scored = work.examination.rows[0].scored
    if rows:
        write_answers(scored, Path(rows))
    if kilt:
        write_kilt(scored, Path(kilt))
    if outcome.report:
        write_page(render(_page(work, outcome)), Path(outcome.report))


@stage
def record(work: Work, outcome: Evaluated, questions: str) -> Kept:
    """Put the evaluation into the store, unless it is there."""
    examined = work.examination
    values = Values(tuple(question.id for question in examined.asked.questions), {work.retriever: examined.values()})
    measured = {work.retriever: figures({**outcome.metrics, **outcome.ranks}, outcome.intervals)}
    told = replace(outcome, report=None).to_json()
    found = Found(measured, values, told, partial(_write_all, work, outcome))
    return keep(work.store, work.subject, found, questions, outcome.seconds)


def _write_all(work: Work, outcome: Evaluated, folder: Path) -> None:
    page = replace(outcome, report=str(folder / REPORT))
    write_files(work, page, str(folder / ROWS), str(folder / KILT))


def _page(work: Work, outcome: Evaluated) -> AnswerReport:
    examined = work.examination
    decoding = ", ".join(f"{name} {value}" for name, value in asdict(examined.settings.decoding).items())
    return AnswerReport(
        model=outcome.model,
        snapshot=outcome.snapshot,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        kind=examined.settings.kind,
        rows=examined.rows,
        retrieval={**examined.retrieval, **examined.ranks},
        intervals=examined.intervals,
        collapse=examined.collapse,
        collapsed=outcome.refusal,
        search=examined.search,
        worth=outcome.worth,
        notes=outcome.notes,
        abstaining=examined.abstaining,
        curves=read_curves(work.folder / "metrics.jsonl") if work.folder else Curves(),
        lineage={
            "model": outcome.model,
            "snapshot": outcome.snapshot,
            "judged by": outcome.judged_by,
            "reader": outcome.reader,
            "decoding": decoding,
        },
    )
