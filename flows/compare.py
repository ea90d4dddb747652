"""Measure one retriever or several of a snapshot on the same questions, stage by stage.

Purpose: `bookwheel evaluate` without a model, and the step of `flows.release` that measures retrieval after each
rebuild.
Caching: none: a search is cheap beside an answer. What was measured is put into the store as an evaluation, once for
the same snapshot, questions and settings. In a store that cannot be written nothing is recorded, and the outcome says
so.
Requires: the extra model where an index is searched by vectors.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from beam_jobs.launch import OnProgress
from flows import artifacts
from flows.admission import Url
from flows.outcome import Compared
from flows.progress import StageClock
from flows.recording import REPORT, ROWS, Found, Kept, figures, keep
from flows.stage import deployed, stage
from rag_model.errors import UsageError
from rag_model.evaluation.questions.files import QuestionSet, read_questions
from rag_model.evaluation.records.subject import retrieval_subject
from rag_model.evaluation.records.values import Values
from rag_model.evaluation.reports.retrieval import RetrievalReport, render
from rag_model.evaluation.reports.run_files import check_paths, write_dpr, write_jsonl, write_page, write_trec
from rag_model.evaluation.retrieval import comparison
from rag_model.evaluation.retrieval.advice import advice
from rag_model.evaluation.retrieval.comparison import Groups, Standing, groups_of
from rag_model.evaluation.retrieval.judging import Judge, JudgedBy
from rag_model.evaluation.retrieval.staged import Batches, Lists, Staged, measure_lists, staged
from rag_model.evaluation.retrieval.timing import time_stages
from rag_model.retrieve.factory import open_retrievers
from rag_model.retrieve.found import SnapshotRetriever
from rag_model.store.store import Store
from rag_model.store.versions.evaluation_manifest import Subject
from rag_model.store.versions.snapshot import Snapshot

_SLUG = 60  # characters of an expression in a file's name


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Where to write what was found; with several retrievers each has files of its own, with its number and name."""

    trec: str | None = None  # TREC run
    dpr: str | None = None  # DPR's retrieval JSON
    rows: str | None = None  # one JSON line a question


@deployed("compare")
def compare(
    store: Url,
    questions: Url,
    retrievers: Sequence[str] = (),
    ref: str = "latest",
    k: int = 20,
    judged_by: JudgedBy | None = None,
    patterns: bool = False,
    encoder: Url | None = None,
    report: str | None = None,
    files: RunFiles | None = None,
) -> Compared:
    """Search every question with each retriever, and measure each of its stages.

    Args:
        store: URL or folder of the store.
        questions: DPR's CSV, JSONL with `question` and `answers` or `passages`, KILT's JSONL, or a BEIR folder.
        retrievers: expressions, such as rrf(hnsw, ivfpq); the others are compared with the first. None: the snapshot's.
        ref: a ref, ref@number, an id or a unique prefix of a snapshot.
        k: passages to which retrieval is measured.
        judged_by: what is relevant; None: pages of a BEIR folder, passages if every question names one, else answers.
        patterns: the answers are regular expressions.
        encoder: of the questions, in place of the snapshot's: a folder or a hub name.
        report: write the HTML report to this file.
        files: where to write what was found.

    Raises:
        BookwheelError: a stage failed.
    """
    clock, written = StageClock("compare"), files or RunFiles()
    check_paths(report, written.trec, written.dpr, written.rows, questions=questions)
    with clock("open"):
        work = prepare(store, questions, retrievers, ref, k, judged_by, patterns, encoder)
    for name, opened in zip(work.names, work.retrievers, strict=True):
        with clock(name) as tell:
            search(work, Asked(name, opened), written, tell)
    with clock("time"):
        measured = time_questions(work)
    with clock("compare"):
        outcome = conclude(work, measured, clock, report)
    with clock("record"):
        kept = record(work, outcome, questions)
    outcome = replace(outcome, evaluation=kept.evaluation, unrecorded=kept.why)
    artifacts.show_retrievers(outcome)
    return outcome


class Work:
    """The pinned inputs of a run, and its results; not a record, so that Prefect does not look for futures in it."""

    def __init__(
        self, store: Store, snapshot: Snapshot, names: Sequence[str], retrievers: Sequence[SnapshotRetriever], k: int
    ) -> None:
        """Hold a snapshot, known by its id, and its retrievers."""
        self.store, self.snapshot, self.names, self.retrievers, self.k = store, snapshot, names, retrievers, k
        self.subject: Subject | None = None
        self.lists: list[Lists] = []
        self.standings: list[Standing] = []
        self.asked = QuestionSet(())
        self.batches = Batches(())
        self.judge = Judge("answers")
        self.groups = Groups()


class Asked:
    """A retriever and its expression, wrapped for the same reason."""

    def __init__(self, name: str, retriever: SnapshotRetriever) -> None:
        """Hold them."""
        self.name, self.retriever = name, retriever


@stage
def prepare(
    store: str,
    questions: str,
    retrievers: Sequence[str],
    ref: str,
    k: int,
    judged_by: JudgedBy | None,
    patterns: bool,
    encoder: str | None,
) -> Work:
    """Read the questions, pin the snapshot, and open the retrievers."""
    asked = read_questions(questions)
    judge = Judge.of(asked, judged_by, patterns=patterns)
    if k < 1:
        raise UsageError(f"k is {k}: measure at least 1 passage")
    target = Store.open(store)
    snapshot = Snapshot.from_store(target, ref)
    names = list(retrievers) or [snapshot.manifest.content.default_retriever]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"the retriever {twice} is given twice: leave one out")
    work = Work(target, snapshot, names, open_retrievers(snapshot, list(retrievers) or None, encoder=encoder), k)
    for opened in work.retrievers:
        opened.check_depth(k)  # of all, before the first is asked
    work.asked, work.judge, work.groups = asked, judge, groups_of(snapshot, asked, judge)
    work.batches = Batches(asked.questions)
    work.subject = retrieval_subject(target, snapshot, asked, retrievers, k, judge, encoder)
    return work


@stage
def search(work: Work, asked: Asked, files: RunFiles, tell: OnProgress) -> None:
    """Ask one retriever every question, measure its stages, and write what it found."""
    found = measure_lists(asked.retriever, asked.name, work.batches, work.judge, work.k, tell)
    work.lists.append(found)
    name = _file_name(work, len(work.lists))
    for path, write in ((files.dpr, write_dpr), (files.rows, write_jsonl)):
        if path:
            write(found.outcomes, named(Path(path), name))
    if files.trec:
        write_trec(found.outcomes, named(Path(files.trec), name), name or "bookwheel")


def named(path: Path, name: str) -> Path:
    """Return a path with a name before its ending: `run.trec` and `1-hnsw` give `run.1-hnsw.trec`.

    >>> named(Path("run.trec"), "1-hnsw").name, named(Path("run.trec"), "").name
    ('run.1-hnsw.trec', 'run.trec')
    """
    return path.with_name(f"{path.stem}.{name}{path.suffix}") if name else path


def _file_name(work: Work, number: int) -> str:
    """Return what the files of a retriever, by its number from 1, are called; empty where there is one retriever."""
    return "" if len(work.names) == 1 else f"{number}-{_slug(work.names[number - 1])}"


def _slug(expression: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", expression).strip("-")[:_SLUG]


class Measured:
    """The figures of each retriever, wrapped as well."""

    def __init__(self, figures: Sequence[Staged]) -> None:
        """Hold them."""
        self.figures = figures


@stage
def time_questions(work: Work) -> Measured:
    """Ask some questions one by one, and time every stage."""
    costs = time_stages(work.retrievers, work.batches.texts, work.k)
    return Measured([staged(lists, its) for lists, its in zip(work.lists, costs, strict=True)])


@stage
def conclude(work: Work, measured: Measured, clock: StageClock, report: str | None) -> Compared:
    """Compare the retrievers, say which one the corpus wants, and write the report."""
    work.standings = standings = comparison.compare(measured.figures, work.judge, work.k, work.groups)
    measure = work.judge.headline(work.k)
    said = advice(work.snapshot, measured.figures, measure)
    if report:
        write_page(render(_page(work, standings, said)), Path(report))
    return Compared(
        snapshot=work.snapshot.id,
        k=work.k,
        n=len(work.asked.questions),
        judged_by=work.judge.by,
        measure=measure,
        standings={one.expression: one.to_json() for one in standings},
        advice=said,
        notes=work.groups.notes,
        seconds=clock.seconds,
        report=report,
    )


@stage
def record(work: Work, outcome: Compared, questions: str) -> Kept:
    """Put the evaluation into the store, unless it is there."""
    assert work.subject is not None
    ids = tuple(question.id for question in work.asked.questions)
    values = Values(ids, {one.expression: one.staged.whole.values for one in work.standings})
    measured = {
        name: figures({**its["metrics"], **its["ranks"]}, its["intervals"]) for name, its in outcome.standings.items()
    }
    told = replace(outcome, report=None).to_json()
    found = Found(measured, values, told, partial(_write_all, work, outcome.advice))
    return keep(work.store, work.subject, found, questions, outcome.seconds)


def _write_all(work: Work, said: str, folder: Path) -> None:
    for number, found in enumerate(work.lists, start=1):
        write_jsonl(found.outcomes, named(folder / ROWS, _file_name(work, number)))
    write_page(render(_page(work, work.standings, said)), folder / REPORT)


def _page(work: Work, standings: Sequence[Standing], said: str) -> RetrievalReport:
    return RetrievalReport(
        snapshot=work.snapshot.id,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        questions=len(work.asked.questions),
        k=work.k,
        judged_by=work.judge.by,
        measure=work.judge.headline(work.k),
        standings=standings,
        advice=said,
        notes=work.groups.notes,
        lineage={"snapshot": work.snapshot.id, **{f"retriever {i}": one for i, one in enumerate(work.names, start=1)}},
    )
