"""The learning rate of each step: a function of the step alone, so it has no state to save."""

import math

from rag_model.training.loop.loop_settings import LoopSettings


def learning_rate(settings: LoopSettings, step: int, steps: int) -> float:
    """Return the learning rate of step `step`, from 1 to `steps`.

    It rises linearly from 0 over the warm-up, w steps, to `learning_rate`, which step w has. Then `linear` falls to 0,
    and `cosine` falls as (1 + cos(pi t)) / 2, t from 0 to 1, both such that the step after the last one would have 0;
    `constant` does not change.
    """
    warmup = round(settings.warmup_share * steps)
    if step <= warmup:
        return settings.learning_rate * (step / warmup)
    gone = (step - 1 - warmup) / max(1, steps - warmup)
    share = {"linear": 1 - gone, "cosine": (1 + math.cos(math.pi * gone)) / 2, "constant": 1.0}
    return settings.learning_rate * share[settings.schedule]
