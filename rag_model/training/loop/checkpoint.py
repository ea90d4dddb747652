"""Checkpoints of a training: weights, Adam's moments and measures so far, without pickle.

A checkpoint is a folder that appears complete or not at all, because it is written under another
name, synced and renamed. It contains the digests of its files. Therefore a damaged checkpoint is
detected before it is loaded, and the previous checkpoint is loaded instead.

`TrainingFolder` is the folder of one training: `training.json` (settings and recipe),
`checkpoints/step-<n>/`, `best-<n>/`, `metrics.jsonl`, `tensorboard/`. The best weights to which a
checkpoint refers are kept as long as the checkpoint, so that the training can resume from any kept
checkpoint.

`TrainingJournal` is the log of a training: `metrics.jsonl` with a row per step or evaluation, and
TensorBoard. A run that resumes from a checkpoint first removes all later rows, because it will
write them again with equal values.
"""

import errno
import json
import logging
import math
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from rag_model.atomic_write import TEMPORARY_PREFIX, atomic_write, fsync
from rag_model.digest import digest_file
from rag_model.errors import InputError, ResourceError, UsageError
from rag_model.untrusted_text import parse_json

_WEIGHTS, _OPTIMIZER, _STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
_STEP_NAME = re.compile(r"step-(\d{8,})")
_BEST_NAME = re.compile(r"best-\d{1,12}")
_MAX_STEPS = 10**12  # all step numbers are below this
_DISK_FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
RECORD = "training.json"  # settings and recipe of a training
METRICS = "metrics.jsonl"  # log of a training
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BestWeights:
    """The weights that have been the best on the dev set so far."""

    step: int
    folder: str  # folder of the weights, relative to the training's folder
    measures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SearchedSnapshot:
    """A snapshot that a training searched."""

    step: int  # first step that searched the snapshot; 0 means the evaluation before the training
    snapshot: str  # full id


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The state of a training after a step.

    Learning rate, batches and dropout depend only on the step, so they are not part of the state.
    """

    step: int  # the last completed step
    initial_measures: Mapping[str, float]  # measures of the initial weights (step 0)
    best: BestWeights
    scaler: Mapping[str, Any] = field(default_factory=dict)  # state of the loss scaler of fp16
    # in the order of their first steps; the last one is searched now
    searched_snapshots: tuple[SearchedSnapshot, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "step": self.step,
            "before": dict(self.initial_measures),
            "best": asdict(self.best),
            "scaler": dict(self.scaler),
            "asked": [asdict(searched_snapshot) for searched_snapshot in self.searched_snapshots],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Create a state from a result of `to_json`, which another machine may have written.

        Raises:
            ValueError: a step is not a valid number, or the folder of the best weights is not next
                to the checkpoints.
        """
        # Checkpoints of version 0.1 do not have this field.
        searched_snapshots = tuple(SearchedSnapshot(**fields) for fields in value.get("asked", ()))
        best = BestWeights(**value["best"])
        if not all(type(step) is int and 0 <= step < _MAX_STEPS for step in (value["step"], best.step)):
            raise ValueError("its step is not a valid number")
        if not _BEST_NAME.fullmatch(best.folder):
            raise ValueError(f"its best weights are in {best.folder!r}")
        return cls(value["step"], value["before"], best, value["scaler"], searched_snapshots)


def save_checkpoint(root: Path, module: nn.Module, optimizer: torch.optim.Optimizer, state: TrainerState) -> Path:
    """Write a checkpoint into a folder in `root`, and return the folder.

    An existing checkpoint of the same step is replaced.
    """
    root.mkdir(parents=True, exist_ok=True)
    dest = root / _get_folder_name(state.step)
    with atomic_folder(dest) as folder:
        save_file(_make_contiguous(_get_trained_tensors(module)), str(folder / _WEIGHTS))
        save_file(_make_contiguous(_list_moment_tensors(module, optimizer)), str(folder / _OPTIMIZER))
        digests = {name: digest_file(folder / name) for name in (_WEIGHTS, _OPTIMIZER)}
        (folder / _STATE).write_text(json.dumps({"files": digests, "standing": state.to_json()}, indent=2))
    return dest


def load_checkpoint(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> TrainerState:
    """Load the weights and moments of a checkpoint into module and optimizer; return its state.

    Raises:
        InputError: a file is missing or damaged, or the checkpoint belongs to another model. Then
            module and optimizer are unchanged.
    """
    state = read_checkpoint(folder)
    try:
        weights, moments = load_file(folder / _WEIGHTS), load_file(folder / _OPTIMIZER)
    except (OSError, SafetensorError) as error:
        raise _create_corrupt_error(folder, str(error)) from error
    trained_tensors = _get_trained_tensors(module)
    if {name: tensor.shape for name, tensor in weights.items()} != {
        name: parameter.shape for name, parameter in trained_tensors.items()
    }:
        raise InputError(f"checkpoint {folder} belongs to another model: train in another folder")
    with torch.no_grad():
        for name, tensor in weights.items():
            trained_tensors[name].copy_(tensor)
    _load_moments(moments, module, optimizer)
    return state


def read_checkpoint(folder: Path) -> TrainerState:
    """Check the files of a checkpoint against their digests, and return its state.

    Raises:
        InputError: a file is missing or damaged.
    """
    digests, state = read_state(folder)
    try:
        damaged_files = [name for name, digest in digests.items() if digest_file(folder / name) != digest]
    except (OSError, ValueError, TypeError) as error:
        raise _create_corrupt_error(folder, str(error)) from error
    if damaged_files:
        raise _create_corrupt_error(folder, f"{damaged_files[0]} is damaged")
    return state


def read_state(folder: Path) -> tuple[Mapping[str, str], TrainerState]:
    """Return the digests of a checkpoint's files by name, and its state.

    The files are not compared with the digests, because they may be large.

    Raises:
        InputError: the state is missing or damaged.
    """
    try:
        record = parse_json((folder / _STATE).read_bytes(), finite=False)
        digests, state = dict(record["files"]), TrainerState.from_json(record["standing"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _create_corrupt_error(folder, str(error)) from error
    if digests.keys() != {_WEIGHTS, _OPTIMIZER}:  # A file without a digest could not be checked.
        raise _create_corrupt_error(folder, f"it has digests of {', '.join(map(str, digests)) or 'no file'}")
    if folder.name != _get_folder_name(state.step):
        raise _create_corrupt_error(folder, f"its state is that of step {state.step}")
    return digests, state


def _get_folder_name(step: int) -> str:
    return f"step-{step:08d}"


def _create_corrupt_error(folder: Path, reason: str) -> InputError:
    return InputError(f"checkpoint {folder} is corrupt ({reason}): delete it and start again")


def list_checkpoints(root: Path) -> list[Path]:
    """List the checkpoints in `root`, newest first, damaged ones included."""
    folder_by_step = {int(match[1]): path for path in root.glob("step-*") if (match := _STEP_NAME.fullmatch(path.name))}
    return [folder_by_step[step] for step in sorted(folder_by_step, reverse=True)]


@contextmanager
def atomic_folder(dest: Path) -> Iterator[Path]:
    """Yield an empty folder; at the end sync it and rename it to `dest`, which it replaces.

    Raises:
        ResourceError: the folder cannot be written, for example because the disk is full. Then
            `dest` is unchanged.
    """
    folder = dest.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
    folder.mkdir(parents=True)
    try:
        yield folder
        for path in folder.rglob("*"):
            fsync(path)
        fsync(folder)
        shutil.rmtree(dest, ignore_errors=True)
        folder.rename(dest)
        fsync(dest.parent)
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk.
        if isinstance(error, OSError) and error.errno not in _DISK_FULL_ERRORS:
            raise
        raise ResourceError(f"{dest} cannot be written ({error}): free space and run the same command again") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _get_trained_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return trained parameters and saved buffers by name; tied parameters occur only once."""
    saved_names = module.state_dict().keys()
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters() if parameter.requires_grad}
    return parameters | {name: buffer for name, buffer in module.named_buffers() if name in saved_names}


def _make_contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _list_parameter_names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters, in the optimizer's order."""
    name_by_parameter = {id(parameter): name for name, parameter in module.named_parameters()}
    return [name_by_parameter[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _list_moment_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state, names = optimizer.state_dict()["state"], _list_parameter_names(module, optimizer)
    return {f"{names[index]}/{key}": tensor for index, tensors in state.items() for key, tensor in tensors.items()}


def _load_moments(moments: Mapping[str, Tensor], module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    index_by_name = {name: index for index, name in enumerate(_list_parameter_names(module, optimizer))}
    state: dict[int, dict[str, Tensor]] = {}
    for path, tensor in moments.items():
        name, _, moment_name = path.rpartition("/")
        state.setdefault(index_by_name[name], {})[moment_name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


class TrainingFolder:
    """The folder of exactly one training."""

    def __init__(self, path: Path) -> None:
        """Set the path; the folder is not created yet."""
        self.path = path
        self.checkpoints = path / "checkpoints"

    def claim(self, settings: Mapping[str, Any], recipe: Mapping[str, Any]) -> None:
        """Record the settings and the recipe of the training in this folder.

        If the folder already has a record, check that it is equal.

        Raises:
            InputError: the record is corrupt.
            UsageError: the folder contains another training; the message names the first field that
                differs.
        """
        training_record = {"settings": dict(settings), "recipe": dict(recipe)}
        # JSON turns tuples into lists, so the record must be converted before it is compared.
        training_record = json.loads(json.dumps(training_record))
        record_path = self.path / RECORD
        if not record_path.exists():
            with atomic_write(record_path) as temp_path:
                temp_path.write_text(json.dumps(training_record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            return
        try:
            recorded_training = parse_json(record_path.read_bytes())
        except (OSError, ValueError) as error:
            raise InputError(f"{record_path} is corrupt ({error}): train in another folder") from error
        if difference := next(_iter_differences(recorded_training, training_record), None):
            raise UsageError(f"{self.path} holds another training, whose {difference}: train in another folder")

    def resume(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> TrainerState | None:
        """Load the newest undamaged checkpoint; None if there are no checkpoints.

        A warning is logged for every damaged checkpoint.

        Raises:
            InputError: there are checkpoints, but all of them are damaged.
        """
        paths = list_checkpoints(self.checkpoints)
        for path in paths:
            try:
                return load_checkpoint(path, module, optimizer)
            except InputError as error:
                _log.warning("%s", error)
        if paths:
            raise InputError(f"every checkpoint in {self.checkpoints} is damaged: train again in another folder")
        return None

    def save_and_prune(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, state: TrainerState, n_kept: int
    ) -> None:
        """Write a checkpoint, and delete all but the last `n_kept` checkpoints.

        Best weights are deleted if no kept checkpoint refers to them.
        """
        save_checkpoint(self.checkpoints, module, optimizer, state)
        paths = list_checkpoints(self.checkpoints)
        incomplete_folders = [
            path for folder in (self.path, self.checkpoints) for path in folder.glob(f"{TEMPORARY_PREFIX}*/")
        ]
        # A process that was killed may have left incomplete folders.
        for path in [*paths[n_kept:], *incomplete_folders]:
            shutil.rmtree(path)
        referenced_names = {name for path in paths[:n_kept] for name in _list_best_folders(path)}
        for path in self.path.glob("best-*"):
            if path.name not in referenced_names:
                shutil.rmtree(path)


def _list_best_folders(checkpoint: Path) -> list[str]:
    """Return the folder of a checkpoint's best weights; nothing for a damaged checkpoint."""
    try:
        return [read_state(checkpoint)[1].best.folder]
    except InputError:  # `resume` reports damaged checkpoints.
        return []


def _iter_differences(recorded: Any, current: Any, path: str = "") -> Iterator[str]:
    if isinstance(recorded, dict) and isinstance(current, dict):
        for key in [*recorded, *(key for key in current if key not in recorded)]:
            yield from _iter_differences(recorded.get(key), current.get(key), f"{path}.{key}" if path else key)
    elif recorded != current:
        yield f"{path} is {recorded!r}, not {current!r}"


class TrainingJournal:
    """The log of a training, open for writing: `metrics.jsonl` and TensorBoard in its folder."""

    def __init__(self, folder: Path, step: int) -> None:
        """Open the log in `folder`, and remove the rows after `step`; -1 removes all rows."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS
        rows = [row for row in read_metrics(folder) if row["step"] <= step]
        with atomic_write(path) as temp_path:
            temp_path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")
        tensorboard_folder = folder / "tensorboard"
        # If there is no TensorBoard folder, another machine wrote the rows, so TensorBoard lacks
        # them.
        missing_rows = [] if tensorboard_folder.exists() else rows
        self._board = SummaryWriter(str(tensorboard_folder), purge_step=step + 1)
        for row in missing_rows:
            scalars = {name: value for name, value in row.items() if isinstance(value, int | float) and name != "step"}
            self._add_scalars(row["kind"], row["step"], scalars)

    def write(self, kind: str, step: int, values: Mapping[str, float], snapshot: str | None = None) -> None:
        """Append a row of a kind such as `train` or `dev`; `snapshot` is the searched snapshot."""
        # JSON cannot represent NaN and infinity, which become null.
        finite_values = {name: measure if math.isfinite(measure) else None for name, measure in values.items()}
        snapshot_field = {"snapshot": snapshot} if snapshot else {}
        self._file.write(json.dumps({"kind": kind, "step": step, **snapshot_field, **finite_values}) + "\n")
        self._file.flush()  # A flushed row is not lost if the process is killed.
        self._add_scalars(kind, step, values)

    def _add_scalars(self, kind: str, step: int, scalars: Mapping[str, float]) -> None:
        for name, scalar in scalars.items():
            self._board.add_scalar(f"{kind}/{name}", scalar, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._board.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the rows of `metrics.jsonl` in order; an incomplete last line after a crash is skipped.

    Raises:
        InputError: a line is not a valid row.
    """
    path = folder / METRICS
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    return [_parse_row(line, path, i) for i, line in enumerate(lines, start=1) if line.endswith(b"\n")]


def _parse_row(line: bytes, path: Path, line_number: int) -> dict[str, Any]:
    try:
        row = parse_json(line)
        if type(row["kind"]) is str and type(row["step"]) is int:
            return dict(row)
    except (ValueError, KeyError, TypeError):
        pass
    raise InputError(f"{path} is corrupt in line {line_number}: delete it; the curves then begin with the next step")
