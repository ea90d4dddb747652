"""Show the present step of a training, and how long it will take, in plain sentences."""

import time
from collections.abc import Mapping

from flows.command.console import ProgressReporter, format_seconds
from rag_model.training.rebuilds import MovingSettings


class TrainingWatch:
    """The `Report` of a training: shows its steps, evaluations and index rebuilds."""

    def __init__(self, shown: ProgressReporter, dev: int, every: int, moving: MovingSettings | None = None) -> None:
        """Set the reporter, the number of dev examples, the evaluation interval, the moving index.

        `dev` is 0 for a training that creates its own examples.
        """
        self._shown, self._dev, self._every, self._moving = shown, dev, every, moving
        # rebuilds started, rebuilds in use, age of the index
        self._due, self._made, self._age = 0, 0, -1.0
        self._began = time.monotonic()
        self._scores = False

    def __call__(self, kind: str, step: int, steps: int, values: Mapping[str, float]) -> None:
        """Show a report of the training."""
        name, _, stage = kind.partition(" ")
        if name == "stage":
            self._every = int(values["evaluate_every"])
            self._shown.say(f"stage {stage} begins")
            return
        if kind == "score" and not self._scores:
            self._scores = True
            self._shown.say(f"a generator scores the passages of the examples, in {steps:,} blocks …")
        elif kind == "evaluate":
            self._began = time.monotonic()
            weights = f"the weights of step {step:,}" if step else "the initial weights"
            self._shown.say(f"evaluates {weights}{f' on {self._dev:,} dev examples' if self._dev else ''} …")
        elif kind == "dev":
            self._shown.say(
                f"evaluated in {format_seconds(time.monotonic() - self._began)}{self._format_remaining(step, steps)}"
            )
            if step == steps and self._due and not self._made:
                self._shown.say("searched its first index at every step: no rebuild was finished in time")
        elif kind == "move":
            self._report_rebuild_start(step - 1)
            return
        elif kind == "train" and "snapshot_age" in values:
            self._report_index_change(step - 1, values)
        self._shown(step, steps)

    def _report_rebuild_start(self, done: int) -> None:
        if self._moving is not None and self._moving.is_due(done):
            self._due += 1
            waits = ", and waits for it" if self._moving.mode == "synchronous" else ""
            self._shown.say(f"rebuilds the index with the encoders of step {done:,}{waits} …")

    def _report_index_change(self, done: int, values: Mapping[str, float]) -> None:
        age, previous_age = values["snapshot_age"], self._age
        self._age = age
        if age <= previous_age:
            self._made += 1
            seconds = format_seconds(values["rebuild_seconds"])
            self._shown.say(f"searches the index of step {done - int(age):,} now; its rebuild took {seconds}")

    def _format_remaining(self, step: int, steps: int) -> str:
        remaining = -(-steps // self._every) - -(-step // self._every)
        if not remaining:
            return ""
        remaining_time = format_seconds(remaining * (time.monotonic() - self._began))
        hint = " (fewer `dev_examples` make them shorter)" if self._dev else ""
        return f"; {remaining} more{hint}: about {remaining_time}"
