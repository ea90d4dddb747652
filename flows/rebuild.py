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

from beam_jobs.lease import exit_with_holder
from flows.reencode import reencode
from flows.stage import run_flow
from rag_model.atomic_write import atomic_write
from rag_model.encoders.space import read_declared_space
from rag_model.errors import BookwheelError, error_to_dict
from rag_model.store.store import MODEL_PREFIX, Store
from rag_model.store.versions.model_manifest import QUESTION
from rag_model.store.versions.models import ModelMetadata, put_model
from rag_model.training.rebuilds import RebuildResult
from rag_model.untrusted_text import parse_json

ORDER, OUTCOME = "order.json", "outcome.json"
_NICE = 10  # a rebuild yields to the training beside it


@dataclass(frozen=True, slots=True)
class RebuildTask:
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
    task = RebuildTask(**parse_json((folder / ORDER).read_bytes()))
    exit_with_holder(Path(task.lease))
    os.nice(_NICE)
    try:
        outcome: Mapping[str, Any] = {"made": rebuild_index(task).to_json()}
    except BookwheelError as error:
        outcome = error_to_dict(error)
    except Exception as error:
        outcome = {"error": "BookwheelError", "message": f"unexpected {type(error).__name__}: {error}"}
    with atomic_write(folder / OUTCOME) as temporary:
        temporary.write_text(json.dumps(outcome), encoding="utf-8")


def rebuild_index(task: RebuildTask) -> RebuildResult:
    """Publish the encoders, and a snapshot with their vectors.

    Raises:
        BookwheelError: a stage failed, or the gate refused the snapshot.
    """
    started = time.monotonic()
    model = publish_encoders(task)
    outcome = run_flow(reencode, task.snapshot, task.store, f"{MODEL_PREFIX}{model}", task.ref, task.beam_options)
    assert outcome.snapshot is not None  # only a rehearsal has none
    return RebuildResult(task.step, outcome.snapshot, outcome.seconds["embed"], round(time.monotonic() - started, 3))


def publish_encoders(task: RebuildTask) -> str:
    """Put the pair of encoders into the store as a model; return its id."""
    folder = Path(task.encoders)
    space = read_declared_space(folder / QUESTION)
    metadata = ModelMetadata(
        "encoders", space.to_json() if space else None, {"snapshot": task.snapshot, "step": task.step}
    )
    return put_model(Store.open(task.store), folder, metadata, task.ref).model


if __name__ == "__main__":
    main(Path(sys.argv[1]))
