import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from rag_model.atomic_write import TEMPORARY_PREFIX
from rag_model.errors import InputError, ResourceError
from rag_model.training.loop.checkpoint import (
    BestWeights,
    SearchedSnapshot,
    TrainerState,
    TrainingFolder,
    atomic_folder,
    list_checkpoints,
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from rag_model.training.loop.loop import build_adamw
from rag_model.training.loop.loop_settings import LoopSettings

STATE = TrainerState(3, {"loss": 2.0}, BestWeights(2, "best-00000002", {"loss": 1.0}), {"scale": 4.0})


def test_searched_snapshots_are_restored_and_optional() -> None:
    state = replace(STATE, searched_snapshots=(SearchedSnapshot(0, "a" * 64), SearchedSnapshot(3, "b" * 64)))
    serialized = json.loads(json.dumps(state.to_json()))
    assert TrainerState.from_json(serialized) == state
    del serialized["asked"]
    assert TrainerState.from_json(serialized) == STATE


class TiedModule(nn.Module):
    """Has tied, frozen and transposed weights, and buffers."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.second = nn.Linear(width, width, bias=False)
        self.second.weight = self.first.weight
        self.across = nn.Parameter(torch.randn(width, 3).T)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.norm(self.second(self.first(x)))) @ self.across.T


def train_steps(seed: int) -> tuple[TiedModule, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = TiedModule()
    optimizer = build_adamw(module, LoopSettings(learning_rate=1e-3), torch.device("cpu"))
    for _ in range(3):
        step(module, optimizer)
    return module, optimizer


def step(module: TiedModule, optimizer: torch.optim.Optimizer) -> None:
    module(torch.arange(20.0).reshape(5, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_checkpoint_restores_weights_optimizer_and_state(tmp_path: Path) -> None:
    module, optimizer = train_steps(1)
    frozen = module.frozen.state_dict()
    path = save_checkpoint(tmp_path, module, optimizer, STATE)
    assert path.name == "step-00000003"
    restored, restored_optimizer = train_steps(2)
    restored.frozen.load_state_dict(frozen)
    assert load_checkpoint(path, restored, restored_optimizer) == STATE == read_checkpoint(path)
    for _ in range(2):
        step(module, optimizer)
        step(restored, restored_optimizer)
    assert all(torch.equal(tensor, restored.state_dict()[name]) for name, tensor in module.state_dict().items())
    assert restored.second.weight is restored.first.weight


def test_frozen_weights_are_not_written(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, *train_steps(1), STATE)
    assert b"frozen" not in (path / "weights.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "missing", "flipped"])
def test_damaged_checkpoint_is_refused_and_changes_no_weights(tmp_path: Path, name: str, damage: str) -> None:
    path = save_checkpoint(tmp_path, *train_steps(1), STATE)
    content = (path / name).read_bytes()
    if damage == "missing":
        (path / name).unlink()
    else:
        (path / name).write_bytes(content[:-9] if damage == "cut" else bytes([content[0] ^ 255]) + content[1:])
    module, optimizer = train_steps(2)
    initial = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    with pytest.raises(InputError, match=r"checkpoint .*step-00000003 is corrupt \(.*\): delete it and start again"):
        load_checkpoint(path, module, optimizer)
    assert all(torch.equal(tensor, initial[key]) for key, tensor in module.state_dict().items())


@pytest.mark.parametrize("files", [{}, {"weights.safetensors": ""}, {"/dev/zero": "0" * 64}, [[1, 2]]])
def test_checkpoint_with_digests_of_other_files_is_refused(tmp_path: Path, files: object) -> None:
    path = save_checkpoint(tmp_path, *train_steps(1), STATE)
    state = json.loads((path / "state.json").read_bytes())
    (path / "state.json").write_text(json.dumps(state | {"files": files}))
    with pytest.raises(InputError, match=r"is corrupt \(it has digests of "):
        read_checkpoint(path)


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, *train_steps(1), STATE)
    wide = TiedModule(5)
    with pytest.raises(InputError, match="belongs to another model: train in another folder"):
        load_checkpoint(path, wide, torch.optim.AdamW(wide.parameters()))


def test_failed_write_of_a_folder_keeps_the_previous_one(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "kept") as folder:
        (folder / "file").write_text("old")
    with suppress(FileNotFoundError), atomic_folder(tmp_path / "kept") as folder:
        (folder / "file").write_text("new")
        (folder / "nowhere" / "file").write_text("fails")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept" / "file").read_text() == "old"


def test_next_checkpoint_deletes_temporary_files_of_a_killed_run(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "checkpoints"):
        (folder / f"{TEMPORARY_PREFIX}half").mkdir(parents=True)
        (folder / f"{TEMPORARY_PREFIX}half" / "weights.safetensors").write_bytes(b"half")
    TrainingFolder(tmp_path).save_and_prune(*train_steps(1), STATE, 1)
    assert [path.name for path in tmp_path.rglob(f"{TEMPORARY_PREFIX}*")] == []
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000003"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left")])
def test_full_disk_is_refused_and_keeps_the_previous_folder(tmp_path: Path, error: Exception) -> None:
    with atomic_folder(tmp_path / "best") as folder:
        (folder / "weights").write_text("old")
    with (
        pytest.raises(ResourceError, match=r"best cannot be written .*No space left.*: free space"),
        atomic_folder(tmp_path / "best"),
    ):
        raise error
    assert (tmp_path / "best" / "weights").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
