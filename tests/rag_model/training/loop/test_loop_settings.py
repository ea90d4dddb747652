import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from rag_model.errors import UsageError
from rag_model.training.loop.loop_settings import LoopSettings, compute_learning_rate
from rag_model.training.loop.task import Goal

NAMES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize(("steps", "share"), [(20, 0.25), (20, 0.0), (7, 0.9), (1, 0.5)])
def test_schedules_equal_transformers_except_in_the_first_step(kind: Any, steps: int, share: float) -> None:
    settings = LoopSettings(schedule=kind, warmup_share=share, learning_rate=3.0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3.0)
    warmup = round(share * steps)
    peer = get_scheduler(NAMES[kind], optimizer, num_warmup_steps=warmup, num_training_steps=steps)
    reference = []
    for _ in range(steps + 1):
        reference.append(peer.get_last_lr()[0])
        optimizer.step()
        peer.step()
    actual = [compute_learning_rate(settings, step, steps) for step in range(1, steps + 1)]
    assert actual[:warmup] == pytest.approx(reference[1 : warmup + 1])  # transformers has a rate of 0 in the first step
    assert actual[warmup:] == pytest.approx(reference[warmup:steps])
    assert all(rate > 0 for rate in actual)


@given(st.integers(1, 500), st.floats(0, 1), st.sampled_from(list(NAMES)))
def test_learning_rate_stays_within_its_maximum(steps: int, share: float, kind: Any) -> None:
    settings = LoopSettings(schedule=kind, warmup_share=share)
    rates = [compute_learning_rate(settings, step, steps) for step in range(1, steps + 1)]
    assert all(0 < rate <= settings.learning_rate for rate in rates)


def test_number_of_steps_follows_from_epochs_and_batches() -> None:
    assert (
        LoopSettings(epochs=40).count_steps(n_batches=460, n_processes=1) == 18_400
    )  # DPR has 58,880 questions and 128 in a batch
    assert LoopSettings(epochs=3, accumulation=4).count_steps(n_batches=5, n_processes=2) == 2
    assert LoopSettings(epochs=1, accumulation=8).count_steps(n_batches=1, n_processes=1) == 1
    assert LoopSettings(max_steps=7).count_steps(n_batches=460, n_processes=1) == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs of a training is 0: use 1 or more"),
        ({"learning_rate": 0.0}, "learning_rate of a training is 0.0: use more than 0"),
        ({"warmup_share": 2.0}, "warmup_share of a training is 2.0: use 1 or less"),
    ],
)
def test_setting_out_of_range_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        LoopSettings(**changes)
    assert str(error.value) == message


def test_nan_is_never_better_and_any_number_is_better_than_nan() -> None:
    for larger in (True, False):
        goal = Goal("x", larger)
        assert not goal.is_better({"x": math.nan}, {"x": 1.0})
        assert goal.is_better({"x": 1.0}, {"x": math.nan})
        assert goal.is_better({"x": 2.0}, {"x": 1.0}) == larger
        assert not goal.is_better({"x": 1.0}, {"x": 1.0})
