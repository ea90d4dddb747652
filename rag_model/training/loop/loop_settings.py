"""Settings of the training loop with their sources, and the learning rate schedule.

The defaults are those of DPR. "DPR" means Karpukhin et al. 2020 (section 5). "DPR code" means
`conf/train/biencoder_default.yaml` of its repository, with which the published checkpoints were
trained. An objective replaces the values that differ in its paper. The learning rate depends only
on the step, so a checkpoint has no scheduler state.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rag_model.encoders.spec import check_choices
from rag_model.errors import UsageError

ScheduleKind = Literal["linear", "cosine", "constant"]
Precision = Literal["auto", "no", "bf16", "fp16"]


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Settings of the training loop; one step is one update of the weights."""

    epochs: int = 40  # number of passes over the examples; DPR: 40, and 100 for small sets
    max_steps: int = 0  # number of steps; 0 means that `epochs` determines it
    # number of batches per process and step; DPR code: gradient_accumulation_steps 1
    accumulation: int = 1
    learning_rate: float = 2e-5  # peak learning rate; DPR code: 2e-5 (the paper says 1e-5)
    schedule: ScheduleKind = "linear"  # course of the learning rate after the warm-up; DPR: linear
    # share of the steps that are warm-up; DPR code: 1,237 of about 18,400 steps; a share instead of
    # a number of steps, because a number suits only one data set
    warmup_share: float = 0.067
    adam_beta1: float = 0.9  # decay rate of Adam's mean of gradients; DPR code: 0.9
    adam_beta2: float = 0.999  # decay rate of Adam's mean of squared gradients; DPR code: 0.999
    adam_epsilon: float = 1e-8  # term added to Adam's denominator; DPR code: 1e-8
    weight_decay: float = 0.0  # weight decay, but not for biases and norms; DPR code: 0.0
    # gradient norm above which gradients are clipped; 0 disables clipping; DPR code: 2.0
    max_gradient_norm: float = 2.0
    # precision of the forward pass (weights and Adam's moments are always float32); auto means bf16
    # on a GPU that supports it, else no (float32), instead of fp16, because bf16 needs no loss
    # scaling, and half precision is slower on most CPUs
    precision: Precision = "auto"
    seed: int = 12345  # random seed of dropout; DPR code: 12345
    cpu: bool = False  # whether to train on the CPU even if there is a GPU
    # number of steps between evaluations; the last step is always evaluated
    evaluate_every: int = 500
    dev_examples: int = 0  # number of dev examples, drawn with the seed; 0 means all
    # number of steps between checkpoints; each evaluation also writes one
    checkpoint_every: int = 500
    keep: int = 2  # number of newest checkpoints to keep; older ones are deleted
    # whether to upload the newest checkpoint to the store, so that another machine can resume
    stored: bool = True

    def __post_init__(self) -> None:
        at_least_1 = ("epochs", "accumulation", "evaluate_every", "checkpoint_every", "keep")
        at_least_0 = ("max_steps", "dev_examples", "warmup_share", "weight_decay", "max_gradient_norm")
        minimums = {**dict.fromkeys(at_least_1, 1), **dict.fromkeys(at_least_0, 0)}
        check_bounds(self, "a training", minimums, ["learning_rate"])
        if self.warmup_share > 1:
            raise UsageError(f"warmup_share of a training is {self.warmup_share}: use 1 or less")

    def list_loss_settings(self) -> dict[str, Any]:
        """Return the settings that determine the losses; with other settings, a run cannot resume.

        `dev_examples` is left out, because the digest of the examples depends on it.
        """
        excluded_names = {"checkpoint_every", "keep", "stored", "dev_examples"}
        return {name: value for name, value in asdict(self).items() if name not in excluded_names}

    def count_steps(self, n_batches: int, n_processes: int) -> int:
        """Return the number of steps; all processes share the `n_batches` batches of an epoch."""
        return self.max_steps or max(1, -(-self.epochs * n_batches // (self.accumulation * n_processes)))


def compute_learning_rate(settings: LoopSettings, step: int, n_steps: int) -> float:
    """Return the learning rate of step `step`, which counts from 1 to `n_steps`.

    During the warm-up, the rate rises linearly from 0 to `learning_rate`, which it reaches in the
    last step of the warm-up. After that, the schedule `linear` decreases it linearly to 0, `cosine`
    multiplies it by (1 + cos(pi t)) / 2 for t from 0 to 1, and `constant` does not change it. The
    rate is above 0 in the last step, and would be 0 in the step after it.
    """
    n_warmup_steps = round(settings.warmup_share * n_steps)
    if step <= n_warmup_steps:
        return settings.learning_rate * (step / n_warmup_steps)
    progress = (step - 1 - n_warmup_steps) / max(1, n_steps - n_warmup_steps)
    decay_factors = {"linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2, "constant": 1.0}
    return settings.learning_rate * decay_factors[settings.schedule]


def check_bounds(settings: object, owner: str, minimums: Mapping[str, int], above_zero: Sequence[str] = ()) -> None:
    """Check the choices and lower bounds of settings; errors name `owner`, such as `[dpr]`.

    Raises:
        UsageError: a setting is not an allowed choice, below its minimum, or not above 0.
    """
    check_choices(settings, owner)
    for name, minimum in minimums.items():
        if getattr(settings, name) < minimum:
            raise UsageError(f"{name} of {owner} is {getattr(settings, name)}: use {minimum} or more")
    for name in above_zero:
        if not getattr(settings, name) > 0:
            raise UsageError(f"{name} of {owner} is {getattr(settings, name)}: use more than 0")
