"""Answer a set of questions with a model of the store from a snapshot of it, and measure the answers.

Purpose: the scheduled evaluation of a model after each rebuild, and `bookwheel evaluate --model`.
Caching: the store's memo, keyed by the exact inputs: answers of an earlier run are reused.
Requires: the extras model and train; a store that this machine can write to, since answers are kept there.
"""

import secrets
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from beam_jobs.launch import OnProgress
from flows import artifacts
from flows.admission import Url
from flows.outcome import CollapseRefusedError, Evaluated
from flows.progress import StageClock
from flows.stage import deployed, stage
from rag_model.digest import digest_file
from rag_model.errors import InputError
from rag_model.evaluation.answers.ablation import Condition
from rag_model.evaluation.answers.answering import Answering
from rag_model.evaluation.answers.examination import Examination
from rag_model.evaluation.answers.scores import check_golds
from rag_model.evaluation.answers.settings import Evaluation
from rag_model.evaluation.questions.files import read_questions
from rag_model.evaluation.reports.answers import AnswerReport, render
from rag_model.evaluation.reports.run_files import check_paths, write_answers, write_kilt, write_page
from rag_model.evaluation.reports.training import read_curves
from rag_model.evaluation.retrieval.judging import Judge
from rag_model.generate.named import open_reader, rag_folder
from rag_model.store.store import Store
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
        model: a RAG model of the store (a ref, ref@number, an id, a unique prefix), or a folder of one.
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

    def __init__(self, snapshot: Snapshot, model: str, folder: Path, retriever: str, examination: Examination) -> None:
        """Hold a snapshot and a model, each known by its id, the model's folder, and the questions put to them."""
        self.snapshot, self.model, self.folder, self.examination = snapshot, model, folder, examination
        self.retriever = retriever  # an expression

    def outcome(self, seconds: dict[str, float], report: str | None) -> Evaluated:
        """Return what was found, as plain values."""
        examined, book = self.examination, self.examination.rows[0]
        answered = {name: one.value for name, one in book.figures.items()}
        return Evaluated(
            snapshot=self.snapshot.id,
            model=self.model,
            retriever=self.retriever,
            n=len(book.scored),
            k=examined.k,
            metrics={**examined.retrieval, **answered},
            intervals={name: (one.low, one.high) for name, one in {**examined.intervals, **book.figures}.items()},
            ranks=examined.ranks,
            collapse=examined.collapse.metrics(),
            judged_by=examined.judge.by,
            refusal=examined.collapse.reason(examined.settings.limits),
            ablations=[row.to_json() for row in examined.rows] if len(examined.rows) > 1 else [],
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
    named, reader = open_reader(snapshot, store.url, model, settings.expression, settings.decoding, asks)
    if reader.retriever is None:
        raise InputError(f"model {model} finds no passages: give a RAG model with its question encoder")
    inputs: dict[str, Any] = {
        "snapshot": snapshot.id,
        "model": _weights(named),
        "retriever": settings.expression or snapshot.manifest.content.default_retriever,
        "decoding": asdict(settings.decoding),
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }
    answering = Answering(store, lambda: reader, inputs)
    examination = Examination(
        reader.retriever, answering, asked, settings.k or reader.rag.settings.k, snapshot.n, settings
    )
    return Work(snapshot, named, rag_folder(store, named), inputs["retriever"], examination)


def _weights(named: str) -> object:
    """Return a model's id; of a folder, which may change, the digest of every file."""
    folder = Path(named)
    if not folder.is_dir():
        return named
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): digest_file(path) for path in files}


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
        curves=read_curves(work.folder / "metrics.jsonl"),
        lineage={
            "model": outcome.model,
            "snapshot": outcome.snapshot,
            "judged by": outcome.judged_by,
            "decoding": decoding,
        },
    )
