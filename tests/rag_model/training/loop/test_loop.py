import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rag_model.errors import InputError, RefusedError, UsageError
from rag_model.training.loop.checkpoint import list_checkpoints, read_metrics
from rag_model.training.loop.loop import choose_frozen_dtype, resolve_precision, train
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.loop.task import Goal
from tests.fixtures.forked_processes import SHARED, check_killed
from tests.fixtures.toy_task import LineTask, make_settings, train_line_task


def read_losses(folder: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_metrics(folder) if row["kind"] == "train"]


def test_training_learns_and_keeps_the_best_weights(tmp_path: Path) -> None:
    messages: list[tuple[str, int, int]] = []
    task = LineTask()
    result = train(task, make_settings(), tmp_path, lambda kind, step, steps, _: messages.append((kind, step, steps)))
    assert result.steps == 30
    assert result.best_measures["error"] < 0.5 * result.initial_measures["error"]
    rows = read_metrics(tmp_path)
    dev = {row["step"]: row["error"] for row in rows if row["kind"] == "dev"}
    assert list(dev) == [0, 8, 16, 24, 30]
    assert result.best_step == min(dev, key=lambda step: dev[step])
    assert [(row["kind"], row["step"], 30) for row in rows] == [line for line in messages if line[0] != "evaluate"]
    assert [step for kind, step, _ in messages if kind == "evaluate"] == list(dev)
    task.module.load_state_dict(load_file(result.best_folder / "model.safetensors"))
    task.module.eval()
    with torch.no_grad():
        assert task.evaluate()["error"] == result.best_measures["error"]
    # The checkpoint of step 28 refers to the best weights before the last step, so both files stay.
    assert {path.name for path in tmp_path.glob("best-*")} == {"best-00000024", "best-00000030"}
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000030", "step-00000028"]


def test_weights_that_never_improve_leave_the_initial_weights_as_best(tmp_path: Path) -> None:
    task = LineTask(goal=Goal("error", larger=True))
    initial_weights = {name: tensor.clone() for name, tensor in task.module.state_dict().items()}
    result = train(task, make_settings(), tmp_path)
    assert (result.best_step, result.best_measures) == (0, result.initial_measures)
    best_weights = load_file(result.best_folder / "model.safetensors")
    assert all(torch.equal(best_weights[name], initial_weights[name]) for name in initial_weights)


def test_goal_that_is_not_measured_is_refused_before_the_first_step(tmp_path: Path) -> None:
    for _ in range(2):  # A second run resumes the first one.
        with pytest.raises(UsageError, match="the goal is rank, but the dev set gives only error: choose another"):
            train(LineTask(goal=Goal("rank")), make_settings(), tmp_path)
    assert [row["kind"] for row in read_metrics(tmp_path)] == ["dev"]


@SHARED
@pytest.mark.parametrize("kill_at", [1, 13])
def test_killed_run_resumes_to_the_same_losses(tmp_path: Path, kill_at: int) -> None:
    train(LineTask(), make_settings(accumulation=2), tmp_path / "whole")
    check_killed(train_line_task, kill_at, tmp_path / "killed", torch.get_num_threads())
    assert read_losses(tmp_path / "killed")[-1][0] == kill_at
    result = train(LineTask(), make_settings(accumulation=2), tmp_path / "killed")
    assert read_metrics(tmp_path / "killed") == read_metrics(tmp_path / "whole")
    assert len(read_losses(tmp_path / "killed")) == 30
    expected_weights = tmp_path / "whole" / result.best_folder.name / "model.safetensors"
    assert (result.best_folder / "model.safetensors").read_bytes() == expected_weights.read_bytes()


def test_finished_run_returns_its_result_again(tmp_path: Path) -> None:
    result = train(LineTask(), make_settings(), tmp_path)
    task = LineTask()
    assert train(task, make_settings(), tmp_path) == result
    assert task.batch_ids == []


def test_steps_take_batches_across_epochs(tmp_path: Path) -> None:
    task = LineTask(size=8)
    train(task, make_settings(max_steps=4, accumulation=4, evaluate_every=100), tmp_path)
    expected = [task.ids(batch) for epoch in range(3) for batch in task.batches(epoch)]
    assert task.batch_ids == expected[:16]


def test_accumulated_batches_equal_one_larger_batch(tmp_path: Path) -> None:
    small, large = LineTask(size=4), LineTask(size=8)
    for task in (small, large):
        task.module[2].p = 0.0  # type: ignore[index, union-attr]
    step_settings = {"max_steps": 6, "evaluate_every": 100}
    train(small, make_settings(accumulation=2, **step_settings), tmp_path / "small")
    train(large, make_settings(accumulation=1, **step_settings), tmp_path / "large")
    for first, second in zip(read_losses(tmp_path / "small"), read_losses(tmp_path / "large"), strict=True):
        assert first == pytest.approx(second, rel=1e-4)


def test_gradient_is_clipped_to_the_limit(tmp_path: Path) -> None:
    distances = []
    for limit in (0.0, 1e-6):  # with a large epsilon, Adam's step is proportional to the gradient
        task = LineTask()
        initial = torch.nn.utils.parameters_to_vector(task.module.parameters()).detach().clone()
        limit_settings = make_settings(max_steps=1, max_gradient_norm=limit, adam_epsilon=1.0)
        train(task, limit_settings, tmp_path / str(limit))
        distances.append((torch.nn.utils.parameters_to_vector(task.module.parameters()) - initial).norm().item())
        (row,) = [row for row in read_metrics(tmp_path / str(limit)) if row["kind"] == "train"]
        assert row["gradient_norm"] > 0.1  # the norm before clipping
    assert distances[0] > 1e-3
    assert distances[1] == pytest.approx(1e-6 * make_settings().learning_rate, rel=0.5)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_weights_stay_in_float32_at_every_precision(tmp_path: Path, precision: str) -> None:
    task = LineTask()
    result = train(task, make_settings(precision=precision), tmp_path)
    assert {parameter.dtype for parameter in task.module.parameters()} == {torch.float32}
    assert result.best_measures["error"] < result.initial_measures["error"]


@pytest.mark.parametrize(
    ("has_gpu", "has_bf16", "cpu", "precision", "expected"),
    [
        (True, True, False, "auto", ("bf16", "bfloat16")),
        (True, False, False, "auto", ("no", "float32")),
        (True, True, True, "auto", ("no", "float32")),
        (False, False, False, "auto", ("no", "float32")),
        (True, True, False, "no", ("no", "float32")),
        (False, False, False, "bf16", ("bf16", "float32")),
    ],
)
def test_precision_depends_on_the_device_unless_set(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, has_bf16: bool, cpu: bool, precision: Any, expected: tuple[str, str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    loop_settings = LoopSettings(precision=precision, cpu=cpu)
    assert (resolve_precision(loop_settings).precision, choose_frozen_dtype(loop_settings)) == expected


def test_auto_precision_is_float32_on_a_cpu(tmp_path: Path) -> None:
    for precision in ("auto", "no"):
        train(LineTask(), make_settings(precision=precision, max_steps=4), tmp_path / precision)
    assert read_losses(tmp_path / "auto") == read_losses(tmp_path / "no")
    records = [(tmp_path / name / "training.json").read_text() for name in ("auto", "no")]
    assert records[0] == records[1], "the record is equal, so that a training begun by an older version resumes"


def test_nan_loss_stops_the_training_and_names_the_examples(tmp_path: Path) -> None:
    task = LineTask(poison="p5")
    with pytest.raises(RefusedError) as error:
        train(task, make_settings(evaluate_every=2, checkpoint_every=2), tmp_path)
    step = len(task.batch_ids)
    assert f"the loss of step {step} is nan, of examples {', '.join(task.batch_ids[-1])}:" in str(error.value)
    assert "p5" in task.batch_ids[-1]
    (last, *_) = list_checkpoints(tmp_path / "checkpoints")
    assert f"the last good checkpoint is {last};" in str(error.value)
    assert all(parameter.isfinite().all() for parameter in task.module.parameters())
    assert [number for number, _ in read_losses(tmp_path)] == list(range(1, step))


def test_nan_gradient_stops_the_training(tmp_path: Path) -> None:
    task = LineTask()
    weight = task.module[0].weight  # type: ignore[index, union-attr]
    weight.register_hook(lambda gradient: gradient * torch.nan)  # type: ignore[union-attr, operator]
    with pytest.raises(RefusedError, match=r"the gradient of step 1 is nan, of examples p\d+, p\d+"):
        train(task, make_settings(), tmp_path)


def test_damaged_checkpoint_is_logged_and_the_previous_one_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(LineTask(), make_settings(), tmp_path / "whole")
    train(LineTask(), make_settings(), tmp_path / "damaged")
    newest, older = list_checkpoints(tmp_path / "damaged" / "checkpoints")
    weights = bytearray((newest / "weights.safetensors").read_bytes())
    weights[-3] ^= 1
    (newest / "weights.safetensors").write_bytes(weights)
    task = LineTask()
    train(task, make_settings(), tmp_path / "damaged")
    assert "step-00000030 is corrupt (weights.safetensors is damaged)" in caplog.text
    assert len(task.batch_ids) == 2  # the two batches after step 28
    assert read_metrics(tmp_path / "damaged") == read_metrics(tmp_path / "whole")
    for path in (newest, older):
        (path / "state.json").write_text("{")
    with pytest.raises(InputError, match=r"every checkpoint in .* is damaged: train again in another folder"):
        train(LineTask(), make_settings(), tmp_path / "damaged")


def test_folder_of_another_training_is_refused(tmp_path: Path) -> None:
    train(LineTask(), make_settings(max_steps=2), tmp_path)
    with pytest.raises(UsageError, match=r"whose settings.learning_rate is 0.02, not 0.1: train in another folder"):
        train(LineTask(), make_settings(max_steps=2, learning_rate=0.1), tmp_path)
    with pytest.raises(UsageError, match=r"whose recipe.size is 4, not 8"):
        train(LineTask(size=8), make_settings(max_steps=2), tmp_path)
    train(LineTask(), make_settings(max_steps=2, keep=5, checkpoint_every=1), tmp_path)


def test_training_without_batches_is_refused(tmp_path: Path) -> None:
    task = LineTask()
    task.points = []
    task.batches = lambda epoch: []  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="an epoch has no batch; give more examples"):
        train(task, make_settings(), tmp_path)


def test_tensorboard_shows_the_losses_of_the_metrics_file(tmp_path: Path) -> None:
    train(LineTask(), make_settings(max_steps=5), tmp_path)
    board = EventAccumulator(str(tmp_path / "tensorboard"))  # type: ignore[no-untyped-call]
    board.Reload()  # type: ignore[no-untyped-call]
    events = [(event.step, pytest.approx(event.value)) for event in board.Scalars("train/loss")]  # type: ignore[no-untyped-call]
    assert read_losses(tmp_path) == events
    assert json.loads((tmp_path / "training.json").read_text())["recipe"] == {"size": 4, "points": 48}


def test_training_writes_no_pickle(tmp_path: Path) -> None:
    train(LineTask(), make_settings(max_steps=2), tmp_path)
    kinds = {path.suffix for path in tmp_path.rglob("*") if path.is_file() and "tensorboard" not in path.parts}
    assert kinds == {".json", ".jsonl", ".safetensors"}


def test_fp16_is_refused_on_a_cpu(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="precision fp16 needs a GPU: use auto, bf16 or no"):
        train(LineTask(), make_settings(precision="fp16"), tmp_path)
