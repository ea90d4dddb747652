"""One rebuild of a moving index, in a process of its own: `python -m flows.rebuild FOLDER`.

`FOLDER` has `order.json`. The encoders of a training's step are published as a model, and `reencode` builds a snapshot
with them; `outcome.json` then says what was made, or why not. The process ends with the training.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from beam_jobs.lease import leave_with
from flows.reencode import reencode
from flows.stage import run_flow
from rag_model.encoders.space import asked_space
from rag_model.errors import BookwheelError, told
from rag_model.json_text import parse_json
from rag_model.landing import landing
from rag_model.store.store import MODEL, Store
from rag_model.store.versions.model_parts import QUESTION
from rag_model.store.versions.models import Made, put_model
from rag_model.training.moving.rebuild import Rebuilt

ORDER, OUTCOME = "order.json", "outcome.json"
_NICE = 10  # a rebuild yields to the training beside it


@dataclass(frozen=True, slots=True)
class Task:
    """What a rebuild is told, as JSON."""

    store: str
    snapshot: str  # full id
    encoders: str  # the folder of `question` and `passage`
    step: int
    ref: str  # of the snapshot and of the model
    beam_options: tuple[str, ...]
    lease: str  # ends with the training

    def write(self, folder: Path) -> None:
        """Write the task for `main`."""
        (folder / ORDER).write_text(json.dumps(asdict(self)), encoding="utf-8")


def main(folder: Path) -> None:
    """Do the task of a folder, and write its outcome there."""
    task = Task(**parse_json((folder / ORDER).read_bytes()))
    leave_with(Path(task.lease))
    os.nice(_NICE)
    try:
        outcome: Mapping[str, Any] = {"made": rebuilt(task).to_json()}
    except BookwheelError as failed:
        outcome = told(failed)
    except Exception as failed:
        outcome = {"error": "BookwheelError", "message": f"unexpected {type(failed).__name__}: {failed}"}
    with landing(folder / OUTCOME) as temporary:
        temporary.write_text(json.dumps(outcome), encoding="utf-8")


def rebuilt(task: Task) -> Rebuilt:
    """Publish the encoders, and a snapshot with their vectors.

    Raises:
        BookwheelError: a stage failed, or the gate refused the snapshot.
    """
    began = time.monotonic()
    model = publish_encoders(task)
    made = run_flow(reencode, task.snapshot, task.store, f"{MODEL}{model}", task.ref, task.beam_options)
    assert made.snapshot is not None  # only a rehearsal has none
    return Rebuilt(task.step, made.snapshot, made.seconds["embed"], round(time.monotonic() - began, 3))


def publish_encoders(task: Task) -> str:
    """Put the pair of encoders into the store as a model; return its id."""
    folder = Path(task.encoders)
    space = asked_space(folder / QUESTION)
    made = Made("encoders", space.to_json() if space else None, {"snapshot": task.snapshot, "step": task.step})
    return put_model(Store.open(task.store), folder, made, task.ref).model


if __name__ == "__main__":
    main(Path(sys.argv[1]))
