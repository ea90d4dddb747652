"""What a training does at the moment, and how long that will take, in sentences for people."""

import time
from collections.abc import Mapping

from flows.command.console import Shown, span


class TrainingWatch:
    """The `Report` of a training: shows its steps, and says before and after each evaluation what it costs."""

    def __init__(self, shown: Shown, dev: int, every: int) -> None:
        """Set where to show it, the number of dev examples, and the steps between two evaluations."""
        self._shown, self._dev, self._every = shown, dev, every
        self._began = time.monotonic()
        self._scores = False

    def __call__(self, kind: str, step: int, steps: int, values: Mapping[str, float]) -> None:
        """Tell what a report says."""
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
            self._shown.say(f"evaluates {weights} on {self._dev:,} dev examples …")
        elif kind == "dev":
            self._shown.say(f"evaluated in {span(time.monotonic() - self._began)}{self._more(step, steps)}")
        self._shown(step, steps)

    def _more(self, step: int, steps: int) -> str:
        left = -(-steps // self._every) - -(-step // self._every)
        if not left:
            return ""
        took = span(left * (time.monotonic() - self._began))
        return f"; {left} more (fewer `dev_examples` make them shorter): about {took}"
