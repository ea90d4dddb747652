"""The training loop: one explicit loop for all objectives, short enough to copy.

The result of a step depends only on the previous weights and on the number of the step: batches are
selected by (epoch, position), dropout is seeded by (seed, step, process), and the learning rate is
computed from the step. Therefore a run that was killed and resumed has the same losses, on a CPU
bit for bit, and a checkpoint contains no state of a random generator.

For several GPUs, start it with `accelerate launch` or `torchrun`. Each of P processes takes every
P-th batch, gradients are averaged, all processes evaluate, and the first process writes files. If a
step does not fit into the memory of one process, all processes repeat it in smaller parts.

`ForwardSplitter` splits a forward pass into parts, so that a step fits into memory. Only the
outputs of a part are kept; the backward pass computes the part again, with the same dropout. The
loss is computed from all rows together, as in GradCache (Gao et al. 2021). Therefore the gradient
of a contrastive loss equals that of the whole batch, except for rounding.
"""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from math import ceil
from pathlib import Path
from typing import Any, Generic

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rag_model.digest import digest_json
from rag_model.errors import RefusedError, ResourceError, UsageError
from rag_model.process import release_freed_memory
from rag_model.training.loop.checkpoint import (
    BestWeights,
    SearchedSnapshot,
    TrainerState,
    TrainingFolder,
    TrainingJournal,
    atomic_folder,
    list_checkpoints,
)
from rag_model.training.loop.loop_settings import LoopSettings, compute_learning_rate
from rag_model.training.loop.processes import (
    StepAbandonedError,
    abandon_step,
    average_gradients,
    copy_weights_of_first,
    exchange_counts,
    is_launched_together,
    join_processes,
)
from rag_model.training.loop.task import Batch, Measures, SearchingTask, Task

# The arguments are kind, step, number of steps and measures.
ReportCallback = Callable[[str, int, int, Measures], None]
_NO_CLIPPING = 1e30  # maximum gradient norm that is never reached, so that nothing is clipped


def _is_transformers_model(model: nn.Module) -> bool:
    """Return whether a module is a model of the library transformers.

    The library is not imported here, because this takes seconds. If it has not been imported
    before, the module cannot be from it.
    """
    modeling_utils = sys.modules.get("transformers.modeling_utils")
    return modeling_utils is not None and isinstance(model, modeling_utils.PreTrainedModel)


class ForwardSplitter:
    """Splits the forward passes of the transformers models in a module into parts."""

    def __init__(self, module: nn.Module) -> None:
        """Store the module; its models are unchanged until `double_parts` is called."""
        self._module, self._n_parts, self._largest_batch = module, 1, 0
        self._is_running_part = False

    def double_parts(self) -> bool:
        """Run each forward pass in twice as many parts; return False if parts cannot be smaller."""
        if self._n_parts == 1:
            # The size of the batch that did not fit is not known yet; two parts need two rows.
            self._largest_batch = 2
            for model in self._module.modules():
                if _is_transformers_model(model):
                    model.forward = self._wrap_forward(model.forward)
        elif self._n_parts >= self._largest_batch:
            return False
        self._n_parts *= 2
        return any(map(_is_transformers_model, self._module.modules()))

    @property
    def n_parts(self) -> int:
        """The number of parts of a forward pass."""
        return self._n_parts

    def _wrap_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run_split(*args: Any, **kwargs: Any) -> Any:
            n_rows = next((len(tensor) for tensor in _iter_tensors((args, kwargs))), 1)
            # Nested models are not split again in a part, even when the part is recomputed.
            if n_rows == 1 or self._is_running_part or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            self._largest_batch = max(self._largest_batch, n_rows)
            n_part_rows = ceil(n_rows / self._n_parts)
            run_part = partial(self._run_part, forward)
            part_slices = [slice(i, i + n_part_rows) for i in range(0, n_rows, n_part_rows)]
            part_outputs = [
                checkpoint(run_part, *_take_rows((args, kwargs), n_rows, part), use_reentrant=False)
                for part in part_slices
            ]
            return _concatenate(part_outputs)

        return run_split

    def _run_part(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        was_running, self._is_running_part = self._is_running_part, True
        try:
            return forward(*args, **kwargs)
        finally:
            self._is_running_part = was_running


def _iter_tensors(argument: Any) -> Any:
    """Yield the tensors in nested arguments, except scalars."""
    if isinstance(argument, Tensor):
        if argument.ndim:
            yield argument
    elif isinstance(argument, Mapping):
        yield from _iter_tensors(tuple(argument.values()))
    elif isinstance(argument, tuple | list):
        for element in argument:
            yield from _iter_tensors(element)


def _take_rows(argument: Any, n_rows: int, row_range: slice) -> Any:
    """Return nested arguments with only the rows of a part. Tensors of another length than `n_rows`
    are unchanged.
    """
    if isinstance(argument, Tensor):
        return argument[row_range] if argument.ndim and len(argument) == n_rows else argument
    if isinstance(argument, dict):
        return {name: _take_rows(element, n_rows, row_range) for name, element in argument.items()}
    if isinstance(argument, tuple | list):
        return type(argument)(_take_rows(element, n_rows, row_range) for element in argument)
    return argument


def _concatenate(outputs: list[Any]) -> Any:
    """Concatenate the outputs of parts by rows; outputs that are no tensors are dropped."""
    first_output = outputs[0]
    if isinstance(first_output, Tensor):
        return torch.cat(outputs)
    if isinstance(first_output, Mapping):  # a transformers `ModelOutput`
        fields = {name: _concatenate([output[name] for output in outputs]) for name in first_output}
        return type(first_output)(**fields)
    if isinstance(first_output, tuple):
        return tuple(_concatenate(list(elements)) for elements in zip(*outputs, strict=True))
    return None


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The result of a training."""

    steps: int
    initial_measures: Measures  # measures on the dev set at step 0
    best_measures: Measures
    best_folder: Path  # folder into which `Task.save` wrote the best weights
    best_step: int  # step of the best weights; 0 if no step improved the goal
    # in the order of their first steps; empty if the task searches no snapshot
    searched_snapshots: tuple[SearchedSnapshot, ...] = ()


def train(
    task: Task[Batch],
    settings: LoopSettings,
    workdir: Path,
    report: ReportCallback | None = None,
    on_checkpoint: Callable[[int, int], None] | None = None,
) -> TrainingResult:
    """Train to the last step, or resume the training in `workdir`; call `report` with every row.

    The first process calls `on_checkpoint` after every checkpoint, with its step and the number of
    steps.

    `report` is called with one of these kinds: `train` after a step; `evaluate`, without measures,
    before an evaluation; `dev` after an evaluation; `move`, without measures, before a step at
    which a task that searches a snapshot may switch to another snapshot.

    From this call on, the process returns freed memory at once (`process.release_freed_memory`).

    The function writes `training.json`, `metrics.jsonl`, `tensorboard/`, `checkpoints/step-<n>/`
    and `best-<n>/` to `workdir`.

    Raises:
        InputError: there are checkpoints, but all of them are damaged.
        ResourceError: a step does not fit into the GPU's memory, even in the smallest parts.
        RefusedError: a loss or a gradient is not finite; the message names the examples and the
            last checkpoint, or the weights that were not finite from the start.
        UsageError: `workdir` contains another training, an epoch has no batch, `Task.evaluate` does
            not measure the goal, or this machine does not support the precision.
    """
    release_freed_memory()
    settings = resolve_precision(settings)
    trainer = _Trainer(
        task, settings, TrainingFolder(workdir), _build_accelerator(settings), on_checkpoint or (lambda _, __: None)
    )
    state = trainer.resume()
    with trainer.open_journal(-1 if state is None else state.step) as journal:

        def write(kind: str, step: int, values: Measures) -> None:
            if journal is not None:
                journal.write(
                    kind, step, values, trainer.searched_snapshots[-1].snapshot if trainer.searched_snapshots else None
                )
            if report is not None and trainer.is_main_process:
                report(kind, step, trainer.n_steps, values)

        def evaluate(step: int) -> Measures:
            if report is not None and trainer.is_main_process:
                report("evaluate", step, trainer.n_steps, {})
            measures = trainer.evaluate()
            write("dev", step, measures)
            return measures

        if state is None:
            initial_measures = evaluate(0)
            state = trainer.save_checkpoint(
                TrainerState(
                    0,
                    initial_measures,
                    trainer.save_best(0, initial_measures),
                    searched_snapshots=trainer.searched_snapshots,
                )
            )
        if task.goal.measure not in state.initial_measures:
            raise UsageError(
                f"the goal is {task.goal.measure}, but the dev set gives only {', '.join(state.initial_measures)}: "
                "choose another goal, or give other dev examples"
            )
        for step in range(state.step + 1, trainer.n_steps + 1):
            if report is not None and trainer.is_main_process and trainer.searched_snapshots:
                report("move", step, trainer.n_steps, {})
            move_measures = trainer.move_index(step)
            write("train", step, {**trainer.run_step(step), **move_measures})
            best = state.best
            if is_evaluation_step := step % settings.evaluate_every == 0 or step == trainer.n_steps:
                measures = evaluate(step)
                if task.goal.is_better(measures, best.measures):
                    best = trainer.save_best(step, measures)
            if is_evaluation_step or step % settings.checkpoint_every == 0:
                state = trainer.save_checkpoint(
                    TrainerState(step, state.initial_measures, best, searched_snapshots=trainer.searched_snapshots)
                )
    best = state.best
    return TrainingResult(
        state.step, state.initial_measures, best.measures, workdir / best.folder, best.step, state.searched_snapshots
    )


class _LossModule(nn.Module):
    """The loss of a task as a module, so that accelerate sets the precision for all of it."""

    def __init__(self, task: Task[Any]) -> None:
        super().__init__()
        self.module = task.module
        self._loss = task.loss

    def forward(self, batch: Any) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        return self._loss(batch)


@dataclass
class _Trainer(Generic[Batch]):
    """Runs the training in one process."""

    task: Task[Batch]
    settings: LoopSettings
    folder: TrainingFolder
    accelerator: Accelerator
    on_checkpoint: Callable[[int, int], None]  # function to call after every checkpoint
    n_steps: int = field(init=False)
    is_main_process: bool = field(init=False)  # whether this process is the first and writes files
    searched_snapshots: tuple[SearchedSnapshot, ...] = ()  # in the order of their first steps

    def __post_init__(self) -> None:
        n_processes = self.accelerator.num_processes
        self.is_main_process = self.accelerator.is_main_process
        self.optimizer = build_adamw(self.task.module, self.settings, self.accelerator.device)
        # In evaluation mode accelerate sets the device and the precision, but does not average
        # gradients, because `average_gradients` does.
        self.loss_module = self.accelerator.prepare_model(_LossModule(self.task), evaluation_mode=True)
        self.prepared_optimizer = self.accelerator.prepare_optimizer(self.optimizer)
        copy_weights_of_first(self.task.module)
        self.splitter = ForwardSplitter(self.task.module)
        self.epoch = (0, self.task.batches(0))  # (epoch number, batches of this epoch)
        if not self.epoch[1]:
            raise UsageError(
                "there is nothing to train on: an epoch has no batch; give more examples or smaller batches"
            )
        self.n_steps = self.settings.count_steps(len(self.epoch[1]), n_processes)
        with self.accelerator.main_process_first():
            self.folder.claim({**self.settings.list_loss_settings(), "processes": n_processes}, self.task.recipe())
        self.searched_snapshots = self.list_searched_snapshots(0)

    def move_index(self, step: int) -> Measures:
        """Let a task that searches a snapshot switch to another snapshot; return its measures."""
        if not isinstance(self.task, SearchingTask):
            return {}
        measures = self.task.move_index(step)
        self.searched_snapshots = self.list_searched_snapshots(step)
        return measures

    def list_searched_snapshots(self, step: int) -> tuple[SearchedSnapshot, ...]:
        """Return the snapshots searched so far; a new one is added, as searched from `step` on."""
        snapshot = self.task.searched_snapshot if isinstance(self.task, SearchingTask) else None
        if snapshot is None or (self.searched_snapshots and self.searched_snapshots[-1].snapshot == snapshot):
            return self.searched_snapshots
        return (*self.searched_snapshots, SearchedSnapshot(step, snapshot))

    def run_step(self, step: int) -> Measures:
        """Run one optimizer step and return its measures."""
        learning_rate = compute_learning_rate(self.settings, step, self.n_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        batches = self.list_batches(step)
        while (measures_and_names := self.try_compute_gradients(step, batches)) is None:
            # Memory is freed outside of the exception handler, because the exception refers to
            # tensors.
            self.prepared_optimizer.zero_grad()
            torch.cuda.empty_cache()
        own_measures, measure_names = measures_and_names
        max_norm = self.settings.max_gradient_norm or _NO_CLIPPING
        gradient_norm = self.accelerator.clip_grad_norm_(self.task.module.parameters(), max_norm)
        # (number of batches of all processes, 1 + number of measures)
        gathered_measures = self.accelerator.gather(own_measures)
        self.check_finite_step(step, batches, gathered_measures[:, 0], gradient_norm)
        self.prepared_optimizer.step()
        self.prepared_optimizer.zero_grad()
        means = dict(zip(measure_names, gathered_measures.mean(0).tolist(), strict=True))
        return {**means, "gradient_norm": float(gradient_norm), "learning_rate": learning_rate}

    def try_compute_gradients(self, step: int, batches: Sequence[Batch]) -> tuple[Tensor, list[str]] | None:
        """Compute the gradients of a step; return the measures of the batches, and their names.

        The gradients are means over all processes. Return None if the memory of a process was too
        small; the process computes in smaller parts when it is called again.

        Raises:
            ResourceError: the parts of a process cannot be smaller.
        """
        torch.manual_seed(_mix_seed(self.settings.seed, step, self.accelerator.process_index))
        self.loss_module.train()
        measure_rows, measure_names = list[Tensor](), list[str]()
        can_repeat, n_parts = None, self.splitter.n_parts
        try:
            for batch in batches:
                loss, measures = self.loss_module(batch)
                self.accelerator.backward(loss / len(batches))
                measure_names = ["loss", *measures]
                # (1 + number of measures,)
                step_measures = [torch.as_tensor(measure).to(loss).detach() for measure in (loss, *measures.values())]
                measure_rows.append(torch.stack(step_measures))
            exchange_counts()
        except torch.OutOfMemoryError:
            can_repeat = abandon_step(can_repeat=self.splitter.double_parts())
        except StepAbandonedError as error:
            can_repeat = error.can_repeat
        if can_repeat is None:
            average_gradients(self.task.module)
            return torch.stack(measure_rows), measure_names
        if not can_repeat:
            raise ResourceError(
                f"the GPU's memory does not hold step {step}: use a smaller batch_size with a larger "
                "accumulation, or end other programs on this GPU"
            )
        if self.splitter.n_parts > n_parts:
            _log.warning(
                "step %d does not fit into the GPU's memory: forward passes run in %d parts from now on",
                step,
                self.splitter.n_parts,
            )
        return None

    def list_batches(self, step: int) -> list[Batch]:
        """Return the batches of a step for this process; they may be from two epochs."""
        n_batches, n_processes = self.settings.accumulation, self.accelerator.num_processes
        first_position = (step - 1) * n_batches * n_processes + self.accelerator.process_index
        return [self.get_batch(first_position + i * n_processes) for i in range(n_batches)]

    def get_batch(self, position: int) -> Batch:
        epoch, batch_index = divmod(position, len(self.epoch[1]))
        if epoch != self.epoch[0]:
            self.epoch = (epoch, self.task.batches(epoch))
        return self.epoch[1][batch_index]

    def check_finite_step(self, step: int, batches: Sequence[Batch], losses: Tensor, norm: Tensor) -> None:
        """Check, before the weights change, that losses and gradients are finite.

        With fp16, gradients may overflow until the loss scaler has found a scale.
        """
        nonfinite_mask = ~losses.isfinite()
        if not nonfinite_mask.any() and (norm.isfinite() or self.accelerator.scaler is not None):
            return
        batch_ids = gather_object([list(self.task.ids(batch)) for batch in batches])
        if (weight_name := _find_nonfinite_weight(self.task.module)) is not None:
            raise RefusedError(
                f"step {step} has no loss, because {weight_name} of the model is not finite: fetch "
                "the model again, and train in another folder"
            )
        reported_ids = [
            ids for ids, is_nonfinite in zip(batch_ids, nonfinite_mask.tolist(), strict=True) if is_nonfinite
        ] or batch_ids
        loss_text = (
            f"loss of step {step} is {losses[nonfinite_mask][0]:g}"
            if nonfinite_mask.any()
            else f"gradient of step {step} is {norm:g}"
        )
        example_ids = [example_id for ids in reported_ids for example_id in ids]
        last_checkpoint = next(iter(list_checkpoints(self.folder.checkpoints)))
        raise RefusedError(
            f"the {loss_text}, of examples {', '.join(example_ids)}: nothing was overwritten, "
            f"the last good checkpoint is {last_checkpoint}; leave these examples out or lower the "
            "learning rate, and train in another folder"
        )

    def evaluate(self) -> Measures:
        self.loss_module.eval()
        with torch.no_grad(), self.accelerator.autocast():
            return dict(self.task.evaluate())

    def save_best(self, step: int, measures: Measures) -> BestWeights:
        best = BestWeights(step, f"best-{step:08d}", measures)
        if self.is_main_process:
            with atomic_folder(self.folder.path / best.folder) as folder:
                self.task.save(folder)
        return best

    def save_checkpoint(self, state: TrainerState) -> TrainerState:
        if self.is_main_process:
            scaler = self.accelerator.scaler
            scaler_state = {} if scaler is None else scaler.state_dict()
            self.folder.save_and_prune(
                self.task.module, self.optimizer, replace(state, scaler=scaler_state), self.settings.keep
            )
            self.on_checkpoint(state.step, self.n_steps)
        self.accelerator.wait_for_everyone()
        return state

    def resume(self) -> TrainerState | None:
        state = self.folder.resume(self.task.module, self.optimizer)
        if state is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(dict(state.scaler))
        if state is not None and state.searched_snapshots and isinstance(self.task, SearchingTask):
            self.task.search_snapshot(state.searched_snapshots[-1].snapshot)
            self.searched_snapshots = state.searched_snapshots
        self.accelerator.wait_for_everyone()
        return state

    def open_journal(self, step: int) -> AbstractContextManager[TrainingJournal | None]:
        return TrainingJournal(self.folder.path, step) if self.is_main_process else nullcontext()


def build_adamw(module: nn.Module, settings: LoopSettings, device: torch.device) -> torch.optim.Optimizer:
    """Return AdamW for a module that trains on `device`; biases and norms have no weight decay.

    The optimizer is `fused`: it updates each parameter in one pass. On a CPU, torch's default makes
    two temporary copies of each parameter and takes five times as long, and its copies of the word
    embeddings determine the peak memory of a step. On an H200 it takes 15 ms for BART-large instead
    of 9. Torch's default is used for fp16, because the gradient scaler was tested only with it. It
    is also used if a parameter is not contiguous, because `fused` reads parameters and moments in
    memory order, whereas a checkpoint restores the moments in row order.
    """
    trained_parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained_parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in trained_parameters if parameter.ndim <= 1]
    can_fuse = device.type in ("cpu", "cuda") and settings.precision != "fp16"
    is_fused = can_fuse and all(parameter.is_contiguous() for parameter in trained_parameters)
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        weight_decay=settings.weight_decay,
        fused=is_fused or None,
    )


def resolve_precision(settings: LoopSettings) -> LoopSettings:
    """Return the settings, with `auto` replaced by the precision that it means in this process.

    The precision is bf16 on a GPU that supports it, else float32. On a CPU, bf16 is never chosen,
    because it is slower on most processors.
    """
    if settings.precision != "auto":
        return settings
    has_bf16 = not settings.cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported(False)
    return replace(settings, precision="bf16" if has_bf16 else "no")


def choose_frozen_dtype(settings: LoopSettings) -> str:
    """Return the dtype for a frozen model that judges or scores the data of a training.

    It is bfloat16 if the training computes in bf16 on a GPU, else float32.
    """
    uses_gpu = not settings.cpu and torch.cuda.is_available()
    return "bfloat16" if uses_gpu and resolve_precision(settings).precision == "bf16" else "float32"


def _build_accelerator(settings: LoopSettings) -> Accelerator:
    join_processes()
    # A previous training in this process may have used another precision.
    AcceleratorState._reset_state(reset_partial_state=True)
    # Without a GPU, accelerate would let each of several processes train alone.
    cpu = settings.cpu or (is_launched_together() and not torch.cuda.is_available())
    accelerator = Accelerator(mixed_precision=settings.precision, cpu=cpu)
    # Without this check accelerate would silently train in float32.
    if settings.precision == "fp16" and accelerator.scaler is None:
        raise UsageError("precision fp16 needs a GPU: use auto, bf16 or no")
    return accelerator


def _mix_seed(*numbers: int) -> int:
    """Derive one seed from several numbers, so that every step has another seed."""
    return int(digest_json(numbers).rpartition(":")[2][:15], 16)


def _find_nonfinite_weight(module: nn.Module) -> str | None:
    """Return the name of a parameter that contains NaN or infinity; None if all are finite."""
    return next((name for name, weights in module.named_parameters() if not weights.isfinite().all()), None)
