"""Every setting of the loop, with the value that the paper's authors used and its source.

The defaults are DPR's: "DPR" is Karpukhin et al. 2020 (section 5), "DPR code" its repository's
`conf/train/biencoder_default.yaml`, which the published checkpoints were trained with. A recipe replaces the values
that differ in its own paper.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from rag_model.errors import UsageError

ScheduleKind = Literal["linear", "cosine", "constant"]
Precision = Literal["no", "bf16", "fp16"]


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """How a task is trained; one step is one update of the weights."""

    epochs: int = 40  # passes over the examples; DPR: 40, and 100 for small sets
    max_steps: int = 0  # steps; 0: computed from the epochs
    accumulation: int = 1  # batches per process and step; DPR code: gradient_accumulation_steps 1
    learning_rate: float = 2e-5  # the highest; DPR code: 2e-5 (the paper says 1e-5)
    schedule: ScheduleKind = "linear"  # of the learning rate after its warm-up; DPR: linear
    warmup_share: float = 0.067  # of all steps; DPR code: 1,237 of about 18,400 steps
    adam_beta1: float = 0.9  # DPR code: 0.9
    adam_beta2: float = 0.999  # DPR code: 0.999
    adam_epsilon: float = 1e-8  # DPR code: 1e-8
    weight_decay: float = 0.0  # of matrices, not of biases and norms; DPR code: 0.0
    max_gradient_norm: float = 2.0  # 0: no clipping; DPR code: max_grad_norm 2.0
    precision: Precision = "no"  # of the forward pass; weights and moments stay float32; DPR code: fp16
    seed: int = 12345  # of dropout; DPR code: 12345
    cpu: bool = False  # use the CPU even if there is a GPU
    evaluate_every: int = 500  # steps; the last step is always evaluated
    dev_examples: int = 0  # draw so many of the dev examples, by the seed; 0: all of them
    checkpoint_every: int = 500  # steps; there is also one after each evaluation
    keep: int = 2  # checkpoints; older ones are deleted
    stored: bool = True  # the newest is in the store too, for another machine; on the same disk it takes no more space

    def __post_init__(self) -> None:
        for name in ("epochs", "accumulation", "evaluate_every", "checkpoint_every", "keep"):
            _check(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        for name in ("max_steps", "dev_examples", "warmup_share", "weight_decay", "max_gradient_norm"):
            _check(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        _check(self.learning_rate > 0, "learning_rate", self.learning_rate, "more than 0")
        _check(self.warmup_share <= 1, "warmup_share", self.warmup_share, "1 or less")
        for name, choices in (("schedule", get_args(ScheduleKind)), ("precision", get_args(Precision))):
            _check(getattr(self, name) in choices, name, getattr(self, name), f"one of {', '.join(choices)}")

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return asdict(self)

    def deciding(self) -> dict[str, Any]:
        """Return the settings that determine the losses: a run resumes only with the same ones.

        `dev_examples` is not one of them: which examples were drawn is in the examples' own digest.
        """
        others = {"checkpoint_every", "keep", "stored", "dev_examples"}
        return {name: value for name, value in self.to_json().items() if name not in others}

    def steps(self, batches: int, processes: int) -> int:
        """Return the number of steps for `batches` batches per epoch, shared by `processes` processes."""
        return self.max_steps or max(1, -(-self.epochs * batches // (self.accumulation * processes)))


def _check(fits: bool, name: str, value: object, wanted: str) -> None:
    if not fits:
        raise UsageError(f"{name} of a training is {value!r}: use {wanted}")
