"""The state of a training on disk: weights, Adam's moments, and measures so far. No pickle.

A checkpoint is a folder that appears complete or not at all: it is written under another name, synced, and renamed. It
holds the digests of its files, so a damaged one is detected before it is used, and the one before it is used instead.
"""

import errno
import json
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

from rag_model.digest import digest_file
from rag_model.errors import InputError, ResourceError
from rag_model.json_text import parse_json
from rag_model.landing import TEMPORARY, sync

_WEIGHTS, _OPTIMIZER, _STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
_NAME = re.compile(r"step-(\d{8,})")
_BEST = re.compile(r"best-\d{1,12}")
_MOST_STEPS = 10**12
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, slots=True)
class Best:
    """The best weights so far, by the dev set."""

    step: int
    folder: str  # in the training's folder
    measures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Asked:
    """A snapshot that a training searched."""

    step: int  # the first step that searched it; 0: the evaluation before training
    snapshot: str  # full id


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a training after a step; learning rate, batches and dropout are functions of the step."""

    step: int  # the last completed step
    before: Mapping[str, float]  # the measures of step 0
    best: Best
    scaler: Mapping[str, Any] = field(default_factory=dict)  # fp16's loss scale
    asked: tuple[Asked, ...] = ()  # snapshots, by step; the last one is the current one

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read back the result of `asdict`; it may come from another machine's store.

        Raises:
            ValueError: a step is no number of a step, or the best weights are elsewhere than beside the checkpoints.
        """
        asked = tuple(Asked(**one) for one in value.get("asked", ()))  # checkpoints of 0.1 have none
        best = Best(**value["best"])
        if not all(type(step) is int and 0 <= step < _MOST_STEPS for step in (value["step"], best.step)):
            raise ValueError("its step is no number of a step")
        if not _BEST.fullmatch(best.folder):
            raise ValueError(f"its best weights are in {best.folder!r}")
        return cls(value["step"], value["before"], best, value["scaler"], asked)


def save_checkpoint(root: Path, module: nn.Module, optimizer: torch.optim.Optimizer, standing: Standing) -> Path:
    """Write the checkpoint of a step into `root` and return its folder; one of the same step is replaced."""
    root.mkdir(parents=True, exist_ok=True)
    dest = root / _folder_of(standing.step)
    with new_folder(dest) as folder:
        save_file(_packed(_learned(module)), str(folder / _WEIGHTS))
        save_file(_packed(_moments(module, optimizer)), str(folder / _OPTIMIZER))
        digests = {name: digest_file(folder / name) for name in (_WEIGHTS, _OPTIMIZER)}
        (folder / _STATE).write_text(json.dumps({"files": digests, "standing": asdict(standing)}, indent=2))
    return dest


def load_checkpoint(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> Standing:
    """Load the weights and moments of a checkpoint into the module and optimizer, and return its state.

    Raises:
        InputError: a file is missing or damaged, or it belongs to another model; nothing is changed.
    """
    standing = read_checkpoint(folder)
    try:
        weights, moments = load_file(folder / _WEIGHTS), load_file(folder / _OPTIMIZER)
    except (OSError, SafetensorError) as broken:
        raise _corrupt(folder, str(broken)) from broken
    ours = _learned(module)
    if {name: tensor.shape for name, tensor in weights.items()} != {name: held.shape for name, held in ours.items()}:
        raise InputError(f"checkpoint {folder} belongs to another model: train in another folder")
    with torch.no_grad():
        for name, tensor in weights.items():
            ours[name].copy_(tensor)
    _put_moments(moments, module, optimizer)
    return standing


def read_checkpoint(folder: Path) -> Standing:
    """Check the files of a checkpoint against their digests; return its state.

    Raises:
        InputError: a file is missing or damaged.
    """
    digests, standing = _state(folder)
    try:
        damaged = [name for name, digest in digests.items() if digest_file(folder / name) != digest]
    except (OSError, ValueError, TypeError) as broken:
        raise _corrupt(folder, str(broken)) from broken
    if damaged:
        raise _corrupt(folder, f"{damaged[0]} is damaged")
    return standing


def standing_of(folder: Path) -> Standing:
    """Return the state of a checkpoint without checking its other files, which may be large.

    Raises:
        InputError: the state is missing or damaged.
    """
    return _state(folder)[1]


def digests_of(folder: Path) -> Mapping[str, str]:
    """Return the digests of a checkpoint's weights and moments, by file name, as they were written.

    Raises:
        InputError: the state is missing or damaged.
    """
    return _state(folder)[0]


def _state(folder: Path) -> tuple[Mapping[str, str], Standing]:
    try:
        state = parse_json((folder / _STATE).read_bytes(), finite=False)
        digests, standing = dict(state["files"]), Standing.from_json(state["standing"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as broken:
        raise _corrupt(folder, str(broken)) from broken
    if digests.keys() != {_WEIGHTS, _OPTIMIZER}:  # others would be left unchecked, or read although they are elsewhere
        raise _corrupt(folder, f"it has digests of {', '.join(map(str, digests)) or 'no file'}")
    if folder.name != _folder_of(standing.step):
        raise _corrupt(folder, f"it is of step {standing.step}")
    return digests, standing


def _folder_of(step: int) -> str:
    return f"step-{step:08d}"


def _corrupt(folder: Path, why: str) -> InputError:
    return InputError(f"checkpoint {folder} is corrupt ({why}): delete it and start again")


def checkpoints(root: Path) -> list[Path]:
    """List the checkpoints in `root`, newest first; undamaged or not."""
    found = {int(match[1]): path for path in root.glob("step-*") if (match := _NAME.fullmatch(path.name))}
    return [found[step] for step in sorted(found, reverse=True)]


@contextmanager
def new_folder(dest: Path) -> Iterator[Path]:
    """Yield a folder to fill; on success it is synced and becomes `dest`, replacing an existing one.

    Raises:
        ResourceError: it cannot be written, as on a full disk; `dest` stays as it was.
    """
    folder = dest.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
    folder.mkdir(parents=True)
    try:
        yield folder
        for path in folder.rglob("*"):
            sync(path)
        sync(folder)
        shutil.rmtree(dest, ignore_errors=True)
        folder.rename(dest)
        sync(dest.parent)
    except (OSError, SafetensorError) as refused:  # safetensors has an error of its own for a full disk
        if isinstance(refused, OSError) and refused.errno not in _FULL:
            raise
        raise ResourceError(
            f"{dest} cannot be written ({refused}): free space and run the same command again"
        ) from refused
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _learned(module: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters and the saved buffers; tied parameters are listed once, by their first name."""
    kept = module.state_dict().keys()
    found = {name: parameter.detach() for name, parameter in module.named_parameters() if parameter.requires_grad}
    return found | {name: buffer for name, buffer in module.named_buffers() if name in kept}


def _packed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _ordered(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the name of each parameter of the optimizer, in its own order."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _moments(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state, names = optimizer.state_dict()["state"], _ordered(module, optimizer)
    return {f"{names[place]}/{key}": value for place, held in state.items() for key, value in held.items()}


def _put_moments(moments: Mapping[str, Tensor], module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    places = {name: place for place, name in enumerate(_ordered(module, optimizer))}
    state: dict[int, dict[str, Tensor]] = {}
    for path, value in moments.items():
        name, _, key = path.rpartition("/")
        state.setdefault(places[name], {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
