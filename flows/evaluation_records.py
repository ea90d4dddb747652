"""Record the results of an evaluation flow in the store: metrics, rows, report and predictions."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from flows.outcome import CompareOutcome, EvaluateOutcome, ReproduceOutcome
from rag_model.errors import StoreError
from rag_model.evaluation.records import VALUES_FILE, MeasureValues
from rag_model.evaluation.reports.run_files import store_report
from rag_model.process import temporary_folder
from rag_model.store.store import Store
from rag_model.store.versions.evaluation_manifest import EvaluationMetrics, EvaluationSubject, MetricValue
from rag_model.store.versions.evaluations import PROVISIONAL_KEY, is_recorded, record_evaluation

OUTCOME, ROWS, REPORT, KILT = "outcome.json", "rows.jsonl", "report.html", "kilt.jsonl"


RecordedOutcome = TypeVar("RecordedOutcome", EvaluateOutcome, CompareOutcome, ReproduceOutcome)


@dataclass(frozen=True, slots=True)
class NewEvaluation:
    """The results of an evaluation that is not recorded yet."""

    metrics: EvaluationMetrics
    values: MeasureValues
    outcome: Mapping[str, Any]  # the outcome as the command prints it with --json
    write_files: Callable[[Path], None]  # writes rows, report and predictions into a folder
    n_provisional_answers: int = 0  # see `AnswerEvaluation.n_provisional_answers`


def store_evaluation(
    store: Store,
    subject: EvaluationSubject,
    new_evaluation: NewEvaluation,
    questions: str,
    outcome: RecordedOutcome,
) -> RecordedOutcome:
    """Record an evaluation in the store if it is not recorded yet; return the outcome with its id.

    A recorded evaluation with provisional answers is replaced. The outcome also gets the URL of the
    evaluation's page, unless a report was written elsewhere. If the store cannot be written, the
    outcome says why. `questions` is the path of the question file, whose name is recorded.
    """
    if not is_recorded(store, subject):
        provenance = {
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "questions": Path(questions).name,
            "n": len(new_evaluation.values.questions),
            "seconds": dict(outcome.seconds),
            "version": version("bookwheel"),
            PROVISIONAL_KEY: new_evaluation.n_provisional_answers,
        }
        with temporary_folder("evaluation") as work_folder:
            new_evaluation.write_files(work_folder)
            new_evaluation.values.write(work_folder / VALUES_FILE)
            (work_folder / OUTCOME).write_text(
                json.dumps(dict(new_evaluation.outcome), ensure_ascii=False, indent=1), encoding="utf-8"
            )
            files = {path.name: path for path in work_folder.iterdir()}
            try:
                record_evaluation(store, subject, new_evaluation.metrics, files, provenance)
            except StoreError as error:
                return replace(outcome, unrecorded=str(error))
    report_page = _publish_page(store, subject.id)
    return replace(outcome, evaluation=subject.id, report=outcome.report or report_page)


def _publish_page(store: Store, evaluation: str) -> str | None:
    """Write the report of a recorded evaluation as a page; return its URL, or None on failure."""
    # The page is only a copy of the recorded report, so a failure to write it is ignored.
    with suppress(StoreError, KeyError, ValueError):
        report_html = store.blobs.read(store.evaluations.get(evaluation).content.files[REPORT])
        return store_report(store, evaluation, report_html.decode())
    return None


def to_metric_values(
    metrics: Mapping[str, float], intervals: Mapping[str, tuple[float, float]]
) -> dict[str, MetricValue]:
    """Convert metrics, with their confidence intervals if they have any, to those of a manifest."""
    return {name: MetricValue(metric, *intervals.get(name, (None, None))) for name, metric in metrics.items()}
