"""The training loop: one, explicit, and short enough to copy. It does not depend on the objective.

Every step is a function of the weights before it and of its number: batches are addressed by (epoch, place), dropout is
seeded by (seed, step, process), the learning rate is computed from the step. So a run that was killed resumes to the
same losses, on a CPU bit for bit, and a checkpoint holds no state of a random generator. For several GPUs, start it
with `accelerate launch` or `torchrun`. Each of P processes takes every P-th batch, gradients are averaged, all
processes evaluate, and the first writes.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object
from torch import Tensor, nn

from rag_model.allocator import release_freed
from rag_model.digest import digest_json
from rag_model.errors import RefusedError, UsageError
from rag_model.training.loop.checkpoint import Asked, Best, Standing, checkpoints, new_folder
from rag_model.training.loop.folder import TrainingFolder
from rag_model.training.loop.journal import Journal
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.loop.optimizer import adamw
from rag_model.training.loop.schedule import learning_rate
from rag_model.training.loop.task import AskingTask, Batch, Measures, Task

Report = Callable[[str, int, int, Measures], None]  # kind, step, number of steps, values; see `train`
_NEVER = 1e30  # a gradient norm that clips nothing


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of a training; `after` are the measures of the best weights, which are in `best`."""

    steps: int
    before: Measures  # the measures of step 0
    after: Measures
    best: Path  # the folder that `Task.save` wrote
    best_step: int  # 0 if no step improved the goal
    asked: tuple[Asked, ...] = ()  # searched snapshots, by step, if the task searches any


def train(
    task: Task[Batch],
    settings: LoopSettings,
    workdir: Path,
    report: Report | None = None,
    kept: Callable[[int, int], None] | None = None,
) -> Trained:
    """Train to the last step, or resume the training in `workdir`; `report` is called with every row.

    `kept` is called after every checkpoint, by the first process, with its step and the number of steps.

    Kinds of reports: `train` after a step; `evaluate`, without values, before an evaluation; `dev` after it; `move`,
    without values, before a step at which a task that searches a snapshot may move to another one.

    This process gives freed memory back at once from now on (`allocator.release_freed`).

    `workdir` gets `training.json`, `metrics.jsonl`, `tensorboard/`, `checkpoints/step-<n>/` and `best-<n>/`.

    Raises:
        InputError: there are checkpoints, and all are damaged.
        RefusedError: a loss or a gradient is not finite; the message names the examples and the last checkpoint, or the
            weights that were not finite from the start.
        UsageError: `workdir` holds another training, an epoch has no batch, or this machine does not support the
        precision.
    """
    release_freed()
    run = _Run(task, settings, TrainingFolder(workdir), _accelerator(settings), kept or (lambda _, __: None))
    standing = run.resume()
    with run.journal(-1 if standing is None else standing.step) as journal:

        def write(kind: str, step: int, values: Measures) -> None:
            if journal is not None:
                journal.write(kind, step, values, run.asked[-1].snapshot if run.asked else None)
            if report is not None and run.first:
                report(kind, step, run.steps, values)

        def evaluate(step: int) -> Measures:
            if report is not None and run.first:
                report("evaluate", step, run.steps, {})
            measures = run.evaluate()
            write("dev", step, measures)
            return measures

        if standing is None:
            before = evaluate(0)
            standing = run.keep(Standing(0, before, run.save_best(0, before), asked=run.asked))
        for step in range(standing.step + 1, run.steps + 1):
            if report is not None and run.first and run.asked:
                report("move", step, run.steps, {})
            moved = run.move(step)
            write("train", step, {**run.step(step), **moved})
            best = standing.best
            if evaluates := step % settings.evaluate_every == 0 or step == run.steps:
                measures = evaluate(step)
                if task.goal.is_better(measures, best.measures):
                    best = run.save_best(step, measures)
            if evaluates or step % settings.checkpoint_every == 0:
                standing = run.keep(Standing(step, standing.before, best, asked=run.asked))
    best = standing.best
    return Trained(standing.step, standing.before, best.measures, workdir / best.folder, best.step, standing.asked)


class _Learner(nn.Module):
    """The task as one module, so that accelerate's wrappers (precision, several GPUs) cover the whole loss."""

    def __init__(self, task: Task[Any]) -> None:
        super().__init__()
        self.module = task.module
        self._loss = task.loss

    def forward(self, batch: Any) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        return self._loss(batch)


@dataclass
class _Run(Generic[Batch]):
    """One process's part of a training."""

    task: Task[Batch]
    settings: LoopSettings
    folder: TrainingFolder
    accelerator: Accelerator
    kept: Callable[[int, int], None]  # called after every checkpoint
    steps: int = field(init=False)
    first: bool = field(init=False)  # whether this is the first process, which writes
    asked: tuple[Asked, ...] = ()  # snapshots, by step

    def __post_init__(self) -> None:
        processes = self.accelerator.num_processes
        self.first = self.accelerator.is_main_process
        self.optimizer = adamw(self.task.module, self.settings, self.accelerator.device)
        self.learner, self.stepper = self.accelerator.prepare(_Learner(self.task), self.optimizer)
        self.epoch = (0, self.task.batches(0))
        if not self.epoch[1]:
            raise UsageError(
                "there is nothing to train on: an epoch has no batch; give more examples or smaller batches"
            )
        self.steps = self.settings.steps(len(self.epoch[1]), processes)
        with self.accelerator.main_process_first():
            self.folder.claim({**self.settings.deciding(), "processes": processes}, self.task.recipe())
        self.asked = self.now_asked(0)

    def move(self, step: int) -> Measures:
        """Let a task that searches a snapshot move to another one before a step; return its measures."""
        if not isinstance(self.task, AskingTask):
            return {}
        said = self.task.move(step)
        self.asked = self.now_asked(step)
        return said

    def now_asked(self, step: int) -> tuple[Asked, ...]:
        """Return the snapshots searched so far; add the current one, from `step` on, if it is new."""
        now = self.task.asked if isinstance(self.task, AskingTask) else None
        if now is None or (self.asked and self.asked[-1].snapshot == now):
            return self.asked
        return (*self.asked, Asked(step, now))

    def step(self, step: int) -> Measures:
        """Do one optimizer step; return its measures."""
        rate = learning_rate(self.settings, step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        torch.manual_seed(_mixed(self.settings.seed, step, self.accelerator.process_index))
        self.learner.train()
        batches = self.batches(step)
        rows = []
        for number, batch in enumerate(batches, start=1):
            with nullcontext() if number == len(batches) else self.accelerator.no_sync(self.learner):
                loss, measures = self.learner(batch)
                self.accelerator.backward(loss / len(batches))
            # (1 + measures,)
            rows.append(torch.stack([torch.as_tensor(value).to(loss).detach() for value in (loss, *measures.values())]))
        limit = self.settings.max_gradient_norm or _NEVER
        norm = self.accelerator.clip_grad_norm_(self.task.module.parameters(), limit)
        values = self.accelerator.gather(torch.stack(rows))  # (batches of all processes, 1 + measures)
        self.refuse_what_is_not_finite(step, batches, values[:, 0], norm)
        self.stepper.step()
        self.stepper.zero_grad()
        named = dict(zip(["loss", *measures], values.mean(0).tolist(), strict=True))
        return {**named, "gradient_norm": float(norm), "learning_rate": rate}

    def batches(self, step: int) -> list[Batch]:
        """Return this process's batches of a step; a step may span two epochs."""
        each, processes = self.settings.accumulation, self.accelerator.num_processes
        start = (step - 1) * each * processes + self.accelerator.process_index
        return [self.batch(start + number * processes) for number in range(each)]

    def batch(self, place: int) -> Batch:
        epoch, number = divmod(place, len(self.epoch[1]))
        if epoch != self.epoch[0]:
            self.epoch = (epoch, self.task.batches(epoch))
        return self.epoch[1][number]

    def refuse_what_is_not_finite(self, step: int, batches: Sequence[Batch], losses: Tensor, norm: Tensor) -> None:
        """Stop before the weights change; but with fp16, gradients may overflow while the loss scale is searched."""
        broken = ~losses.isfinite()
        if not broken.any() and (norm.isfinite() or self.accelerator.scaler is not None):
            return
        every = gather_object([list(self.task.ids(batch)) for batch in batches])
        if (spoilt := _not_finite(self.task.module)) is not None:
            raise RefusedError(
                f"step {step} has no loss, since {spoilt} of the model is not finite, whatever the examples: fetch the "
                "model again, and train in another folder"
            )
        named = [ids for ids, bad in zip(every, broken.tolist(), strict=True) if bad] or every
        value = (
            f"loss of step {step} is {losses[broken][0]:g}" if broken.any() else f"gradient of step {step} is {norm:g}"
        )
        last = next(iter(checkpoints(self.folder.checkpoints)))
        raise RefusedError(
            f"the {value}, of examples {', '.join(one for ids in named for one in ids)}: nothing was overwritten, the "
            f"last good checkpoint is {last}; leave them out or lower the learning rate, and train in another folder"
        )

    def evaluate(self) -> Measures:
        self.learner.eval()
        with torch.no_grad(), self.accelerator.autocast():
            return dict(self.task.evaluate())

    def save_best(self, step: int, measures: Measures) -> Best:
        best = Best(step, f"best-{step:08d}", measures)
        if self.first:
            with new_folder(self.folder.path / best.folder) as folder:
                self.task.save(folder)
        return best

    def keep(self, standing: Standing) -> Standing:
        if self.first:
            scaler = self.accelerator.scaler
            state = {} if scaler is None else scaler.state_dict()
            self.folder.keep(self.task.module, self.optimizer, replace(standing, scaler=state), self.settings.keep)
            self.kept(standing.step, self.steps)
        self.accelerator.wait_for_everyone()
        return standing

    def resume(self) -> Standing | None:
        standing = self.folder.resume(self.task.module, self.optimizer)
        if standing is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(dict(standing.scaler))
        if standing is not None and standing.asked and isinstance(self.task, AskingTask):
            self.task.ask(standing.asked[-1].snapshot)
            self.asked = standing.asked
        self.accelerator.wait_for_everyone()
        return standing

    def journal(self, step: int) -> AbstractContextManager[Journal | None]:
        return Journal(self.folder.path, step) if self.first else nullcontext()


def _accelerator(settings: LoopSettings) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier training may have used another precision
    accelerator = Accelerator(mixed_precision=settings.precision, cpu=settings.cpu)
    if settings.precision == "fp16" and accelerator.scaler is None:  # accelerate would silently train in float32
        raise UsageError("precision fp16 needs a GPU: use bf16 or no")
    return accelerator


def _mixed(*numbers: int) -> int:
    """Return a seed that is different for every step."""
    return int(digest_json(numbers).rpartition(":")[2][:15], 16)


def _not_finite(module: nn.Module) -> str | None:
    """Return the name of a weight that holds NaN or infinity."""
    return next((name for name, weights in module.named_parameters() if not weights.isfinite().all()), None)
