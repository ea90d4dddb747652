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
from tests.fixtures.toy_task import LineTask, learn_until, settings


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_metrics(folder) if row["kind"] == "train"]


def test_it_learns_and_keeps_the_best(tmp_path: Path) -> None:
    messages: list[tuple[str, int, int]] = []
    task = LineTask()
    done = train(task, settings(), tmp_path, lambda kind, step, steps, _: messages.append((kind, step, steps)))
    assert done.steps == 30
    assert done.best_measures["error"] < 0.5 * done.initial_measures["error"]
    rows = read_metrics(tmp_path)
    dev = {row["step"]: row["error"] for row in rows if row["kind"] == "dev"}
    assert list(dev) == [0, 8, 16, 24, 30]
    assert done.best_step == min(dev, key=lambda step: dev[step])
    assert [(row["kind"], row["step"], 30) for row in rows] == [one for one in messages if one[0] != "evaluate"]
    assert [step for kind, step, _ in messages if kind == "evaluate"] == list(dev)
    task.module.load_state_dict(load_file(done.best_folder / "model.safetensors"))
    task.module.eval()
    with torch.no_grad():
        assert task.evaluate()["error"] == done.best_measures["error"]
    # the checkpoint of step 28 names the best weights before the last step's: both stay
    assert {path.name for path in tmp_path.glob("best-*")} == {"best-00000024", "best-00000030"}
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000030", "step-00000028"]


def test_what_never_gets_better_is_kept_as_it_was(tmp_path: Path) -> None:
    task = LineTask(goal=Goal("error", larger=True))
    first = {name: tensor.clone() for name, tensor in task.module.state_dict().items()}
    done = train(task, settings(), tmp_path)
    assert (done.best_step, done.best_measures) == (0, done.initial_measures)
    kept = load_file(done.best_folder / "model.safetensors")
    assert all(torch.equal(kept[name], first[name]) for name in first)


@SHARED
@pytest.mark.parametrize("kill_at", [1, 13])
def test_a_killed_run_goes_on_to_the_same_losses(tmp_path: Path, kill_at: int) -> None:
    train(LineTask(), settings(accumulation=2), tmp_path / "whole")
    check_killed(learn_until, kill_at, tmp_path / "killed", torch.get_num_threads())
    assert losses(tmp_path / "killed")[-1][0] == kill_at
    done = train(LineTask(), settings(accumulation=2), tmp_path / "killed")
    assert read_metrics(tmp_path / "killed") == read_metrics(tmp_path / "whole")
    assert len(losses(tmp_path / "killed")) == 30
    whole = tmp_path / "whole" / done.best_folder.name / "model.safetensors"
    assert (done.best_folder / "model.safetensors").read_bytes() == whole.read_bytes()


def test_a_run_that_is_done_is_only_told_again(tmp_path: Path) -> None:
    done = train(LineTask(), settings(), tmp_path)
    task = LineTask()
    assert train(task, settings(), tmp_path) == done
    assert task.seen == []


def test_steps_take_batches_over_epochs_without_a_seam(tmp_path: Path) -> None:
    task = LineTask(size=8)
    train(task, settings(max_steps=4, accumulation=4, evaluate_every=100), tmp_path)
    expected = [task.ids(batch) for epoch in range(3) for batch in task.batches(epoch)]
    assert task.seen == expected[:16]


def test_accumulated_batches_are_one_larger_batch(tmp_path: Path) -> None:
    small, large = LineTask(size=4), LineTask(size=8)
    for task in (small, large):
        task.module[2].p = 0.0  # type: ignore[index, union-attr]
    quiet = {"max_steps": 6, "evaluate_every": 100}
    train(small, settings(accumulation=2, **quiet), tmp_path / "small")
    train(large, settings(accumulation=1, **quiet), tmp_path / "large")
    for first, second in zip(losses(tmp_path / "small"), losses(tmp_path / "large"), strict=True):
        assert first == pytest.approx(second, rel=1e-4)


def test_a_gradient_is_clipped_to_its_limit(tmp_path: Path) -> None:
    moved = []
    for limit in (0.0, 1e-6):  # with so large an epsilon Adam's step is in proportion to the gradient
        task = LineTask()
        before = torch.nn.utils.parameters_to_vector(task.module.parameters()).detach().clone()
        given = settings(max_steps=1, max_gradient_norm=limit, adam_epsilon=1.0)
        train(task, given, tmp_path / str(limit))
        moved.append((torch.nn.utils.parameters_to_vector(task.module.parameters()) - before).norm().item())
        (row,) = [row for row in read_metrics(tmp_path / str(limit)) if row["kind"] == "train"]
        assert row["gradient_norm"] > 0.1  # as it was before clipping
    assert moved[0] > 1e-3
    assert moved[1] == pytest.approx(1e-6 * settings().learning_rate, rel=0.5)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_weights_stay_in_float32_whatever_the_precision(tmp_path: Path, precision: str) -> None:
    task = LineTask()
    done = train(task, settings(precision=precision), tmp_path)
    assert {parameter.dtype for parameter in task.module.parameters()} == {torch.float32}
    assert done.best_measures["error"] < done.initial_measures["error"]


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
def test_precision_follows_the_device_unless_it_is_set(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, has_bf16: bool, cpu: bool, precision: Any, expected: tuple[str, str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    given = LoopSettings(precision=precision, cpu=cpu)
    assert (resolve_precision(given).precision, choose_frozen_dtype(given)) == expected


def test_auto_is_float32_on_a_cpu(tmp_path: Path) -> None:
    for precision in ("auto", "no"):
        train(LineTask(), settings(precision=precision, max_steps=4), tmp_path / precision)
    assert losses(tmp_path / "auto") == losses(tmp_path / "no")
    records = [(tmp_path / name / "training.json").read_text() for name in ("auto", "no")]
    assert records[0] == records[1], "an older training resumes"


def test_a_loss_that_is_no_number_stops_and_names_its_examples(tmp_path: Path) -> None:
    task = LineTask(poison="p5")
    with pytest.raises(RefusedError) as told:
        train(task, settings(evaluate_every=2, checkpoint_every=2), tmp_path)
    step = len(task.seen)
    assert f"the loss of step {step} is nan, of examples {', '.join(task.seen[-1])}:" in str(told.value)
    assert "p5" in task.seen[-1]
    (last, *_) = list_checkpoints(tmp_path / "checkpoints")
    assert f"the last good checkpoint is {last};" in str(told.value)
    assert all(parameter.isfinite().all() for parameter in task.module.parameters())
    assert [number for number, _ in losses(tmp_path)] == list(range(1, step))


def test_a_gradient_that_is_no_number_stops_as_well(tmp_path: Path) -> None:
    task = LineTask()
    weight = task.module[0].weight  # type: ignore[index, union-attr]
    weight.register_hook(lambda gradient: gradient * torch.nan)  # type: ignore[union-attr, operator]
    with pytest.raises(RefusedError, match=r"the gradient of step 1 is nan, of examples p\d+, p\d+"):
        train(task, settings(), tmp_path)


def test_a_damaged_checkpoint_is_told_and_the_one_before_it_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(LineTask(), settings(), tmp_path / "whole")
    train(LineTask(), settings(), tmp_path / "damaged")
    newest, older = list_checkpoints(tmp_path / "damaged" / "checkpoints")
    data = bytearray((newest / "weights.safetensors").read_bytes())
    data[-3] ^= 1
    (newest / "weights.safetensors").write_bytes(data)
    task = LineTask()
    train(task, settings(), tmp_path / "damaged")
    assert "step-00000030 is corrupt (weights.safetensors is damaged)" in caplog.text
    assert len(task.seen) == 2  # from step 28 on
    assert read_metrics(tmp_path / "damaged") == read_metrics(tmp_path / "whole")
    for path in (newest, older):
        (path / "state.json").write_text("{")
    with pytest.raises(InputError, match=r"every checkpoint in .* is damaged: train again in another folder"):
        train(LineTask(), settings(), tmp_path / "damaged")


def test_another_training_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    train(LineTask(), settings(max_steps=2), tmp_path)
    with pytest.raises(UsageError, match=r"whose settings.learning_rate is 0.02, not 0.1: train in another folder"):
        train(LineTask(), settings(max_steps=2, learning_rate=0.1), tmp_path)
    with pytest.raises(UsageError, match=r"whose recipe.size is 4, not 8"):
        train(LineTask(size=8), settings(max_steps=2), tmp_path)
    train(LineTask(), settings(max_steps=2, keep=5, checkpoint_every=1), tmp_path)


def test_nothing_to_train_on_is_one_sentence(tmp_path: Path) -> None:
    task = LineTask()
    task.points = []
    task.batches = lambda epoch: []  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="an epoch has no batch; give more examples"):
        train(task, settings(), tmp_path)


def test_tensorboard_shows_what_the_journal_holds(tmp_path: Path) -> None:
    train(LineTask(), settings(max_steps=5), tmp_path)
    board = EventAccumulator(str(tmp_path / "tensorboard"))  # type: ignore[no-untyped-call]
    board.Reload()  # type: ignore[no-untyped-call]
    shown = [(event.step, pytest.approx(event.value)) for event in board.Scalars("train/loss")]  # type: ignore[no-untyped-call]
    assert losses(tmp_path) == shown
    assert json.loads((tmp_path / "training.json").read_text())["recipe"] == {"size": 4, "points": 48}


def test_no_file_of_a_training_is_a_pickle(tmp_path: Path) -> None:
    train(LineTask(), settings(max_steps=2), tmp_path)
    kinds = {path.suffix for path in tmp_path.rglob("*") if path.is_file() and "tensorboard" not in path.parts}
    assert kinds == {".json", ".jsonl", ".safetensors"}


def test_fp16_where_it_would_silently_be_float32_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="precision fp16 needs a GPU: use auto, bf16 or no"):
        train(LineTask(), settings(precision="fp16"), tmp_path)
