"""Put what a flow measured into the store as an evaluation: figures, rows, report and predictions."""

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rag_model.errors import StoreError
from rag_model.evaluation.records.values import FILE, Values
from rag_model.store.store import Store
from rag_model.store.versions.evaluation_manifest import Figure, Figures, Subject
from rag_model.store.versions.evaluations import record, stands

OUTCOME, ROWS, REPORT, KILT = "outcome.json", "rows.jsonl", "report.html", "kilt.jsonl"


@dataclass(frozen=True, slots=True)
class Kept:
    """Where an evaluation was kept."""

    evaluation: str | None  # full id; None: it is not in the store
    why: str = ""  # one sentence that says why it is not


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured."""

    figures: Figures
    values: Values
    outcome: Mapping[str, Any]  # as the command prints it
    write: Callable[[Path], None]  # writes rows, report and predictions into a folder


def keep(store: Store, subject: Subject, found: Found, questions: str, seconds: Mapping[str, float]) -> Kept:
    """Record an evaluation, unless it stands in the store. In one that cannot be written the result says why not.

    `questions` names their file, for people; `seconds` are those of the stages.
    """
    if stands(store, subject):
        return Kept(subject.id)
    made = {
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "questions": Path(questions).name,
        "n": len(found.values.questions),
        "seconds": dict(seconds),
        "version": version("bookwheel"),
    }
    with tempfile.TemporaryDirectory(prefix="bookwheel-evaluation-") as folder:
        work = Path(folder)
        found.write(work)
        found.values.write(work / FILE)
        (work / OUTCOME).write_text(json.dumps(dict(found.outcome), ensure_ascii=False, indent=1), encoding="utf-8")
        try:
            return Kept(
                record(store, subject, found.figures, {path.name: path for path in work.iterdir()}, made).evaluation
            )
        except StoreError as unwritable:
            return Kept(None, str(unwritable))


def figures(metrics: Mapping[str, float], intervals: Mapping[str, tuple[float, float]]) -> dict[str, Figure]:
    """Return measures as an evaluation keeps them, with their intervals as far as there are any."""
    return {name: Figure(value, *intervals.get(name, (None, None))) for name, value in metrics.items()}
