"""Tasks with which commands read a whole corpus or run a model; the memo records their results.

A command creates one task for each part of the corpus, or for each block of its own data.
`run_tasks` runs them, on workers if there are any, and the command combines their results, which it
reads one at a time. Each result is recorded, so a resumed run repeats no task.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.memo import TARGET_KEY, StageResult
from rag_model.store.store import Store

OnProgress = Callable[[int, int], None]  # called with the finished and the total number of tasks
_PROCESS_BYTES = 512 << 20  # memory of Python, Arrow, and the result of a part
_SCANNED_BYTES_PER_SECOND = 1.2e7  # compressed bytes of passages that one core scans per second


class RecordedTask(ABC):
    """A small description of a task; a subclass is a frozen dataclass of an installed module."""

    __slots__ = ()
    stage: ClassVar[str]  # name of the job and of the records
    output: ClassVar[str] = "result"  # name of the result in the record and in the report

    @abstractmethod
    def inputs(self) -> dict[str, Any]:
        """Return all inputs that determine the result, as JSON values."""

    @abstractmethod
    def compute(self, store: Store) -> Any:
        """Return the result, as JSON values.

        Raises:
            BookwheelError: an input is missing or damaged; nothing is recorded then.
        """

    @abstractmethod
    def estimate_seconds(self) -> float:
        """Return the estimated seconds on one core."""

    @property
    def memory_bytes(self) -> int:
        """The memory in bytes of a process that computes the result."""
        return _PROCESS_BYTES

    @property
    def target(self) -> BlobRef | None:
        """The file that decides how long `gc` keeps the result: as long as it keeps this file.
        Without one (None), it keeps only recent results.
        """
        return None

    @property
    def uses_gpu(self) -> bool:
        """Whether the task uses a GPU if there is one."""
        return False


@dataclass(frozen=True, slots=True)
class PartTask(RecordedTask):
    """A task that reads one file of a part."""

    file: BlobRef

    code: ClassVar[int]  # increase it when the same inputs would give another result

    def inputs(self) -> dict[str, Any]:
        """Return all fields, each file by its id, and the version of the code."""
        field_values = {field.name: getattr(self, field.name) for field in fields(self)}
        ids = {name: value.id if isinstance(value, BlobRef) else value for name, value in field_values.items()}
        return {**ids, "code": self.code}

    def estimate_seconds(self) -> float:
        """Return the seconds to read the file."""
        return self.file.size / _SCANNED_BYTES_PER_SECOND


TaskRunner = Callable[[Sequence[RecordedTask], OnProgress], Sequence[Mapping[str, Any]]]
"""Runs `compute_once` on all tasks of one stage, and returns the reports in order."""


def compute_once(task: RecordedTask, store: Store) -> dict[str, Any]:
    """Compute a task unless its result is recorded; return a report with the blob of the result.

    Raises:
        BookwheelError: see `RecordedTask.compute`.
    """

    def produce(workdir: Path) -> StageResult:
        (result_path := workdir / f"{task.output}.json").write_text(json.dumps(task.compute(store)))
        return StageResult({task.output: result_path}, {TARGET_KEY: task.target.id} if task.target else {})

    record, _ = store.memo.get_or_create(task.stage, task.inputs(), produce)
    return {task.output: record.outputs[task.output].to_json()}


def run_tasks(
    store: Store,
    tasks: Sequence[RecordedTask],
    runner: TaskRunner | None = None,
    on_progress: OnProgress = lambda _, __: None,
) -> Iterator[Any]:
    """Run the tasks of one stage, then yield their results in order.

    Args:
        store: the store with the inputs of the tasks, to which their records are written.
        tasks: any number of tasks.
        runner: runs the tasks; without one, this process runs them.
        on_progress: called with the number of finished tasks and of all tasks.

    Raises:
        BookwheelError: see `RecordedTask.compute`.
    """
    reports = (runner or partial(_run_here, store))(tasks, on_progress) if tasks else []
    blobs = [BlobRef.from_json(report[tasks[0].output]) for report in reports]
    return (json.loads(data) for data in store.files.map_concurrently(store.blobs.read, blobs))


def _run_here(store: Store, tasks: Sequence[RecordedTask], on_progress: OnProgress) -> list[dict[str, Any]]:
    reports = list[dict[str, Any]]()
    for task in tasks:
        reports.append(compute_once(task, store))
        on_progress(len(reports), len(tasks))
    return reports
