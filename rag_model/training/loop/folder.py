"""The folder of one training: its record, its checkpoints, and the best weights so far.

`training.json` (settings and recipe), `checkpoints/step-<n>/`, `best-<n>/`, `metrics.jsonl`, `tensorboard/`. Weights
that a kept checkpoint names stay until no kept one names them, so that the training can resume from any kept
checkpoint.
"""

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rag_model.errors import InputError, UsageError
from rag_model.json_text import parse_json
from rag_model.landing import TEMPORARY, landing
from rag_model.training.loop.checkpoint import Standing, checkpoints, load_checkpoint, save_checkpoint, standing_of

RECORD = "training.json"
_log = logging.getLogger(__name__)


class TrainingFolder:
    """The folder of exactly one training."""

    def __init__(self, path: Path) -> None:
        """Set the folder; it is not created yet."""
        self.path = path
        self.checkpoints = path / "checkpoints"

    def claim(self, settings: Mapping[str, Any], recipe: Mapping[str, Any]) -> None:
        """Record the training of this folder; do nothing if it is already recorded.

        Raises:
            InputError: the record is corrupt.
            UsageError: the folder has another training; the message names the first field that differs.
        """
        ours = {"settings": dict(settings), "recipe": dict(recipe)}
        ours = json.loads(json.dumps(ours))  # as it will be read: tuples become lists
        record = self.path / RECORD
        if not record.exists():
            with landing(record) as temporary:
                temporary.write_text(json.dumps(ours, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            return
        try:
            theirs = parse_json(record.read_bytes())
        except (OSError, ValueError) as broken:
            raise InputError(f"{record} is corrupt ({broken}): train in another folder") from broken
        if changed := next(_differing(theirs, ours), None):
            raise UsageError(f"{self.path} holds another training, whose {changed}: train in another folder")

    def resume(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> Standing | None:
        """Load the newest undamaged checkpoint, and log damaged ones; None if there are no checkpoints.

        Raises:
            InputError: there are checkpoints, and none is sound.
        """
        found = checkpoints(self.checkpoints)
        for path in found:
            try:
                return load_checkpoint(path, module, optimizer)
            except InputError as broken:
                _log.warning("%s", broken)
        if found:
            raise InputError(f"no checkpoint in {self.checkpoints} is undamaged: train again in another folder")
        return None

    def keep(self, module: nn.Module, optimizer: torch.optim.Optimizer, standing: Standing, count: int) -> None:
        """Write a checkpoint, then delete all but the last `count`, and weights that none of those names."""
        save_checkpoint(self.checkpoints, module, optimizer, standing)
        found = checkpoints(self.checkpoints)
        halves = [path for folder in (self.path, self.checkpoints) for path in folder.glob(f"{TEMPORARY}*/")]
        for path in [*found[count:], *halves]:  # also incomplete folders of a killed process
            shutil.rmtree(path)
        named = {name for path in found[:count] for name in _best_of(path)}
        for path in self.path.glob("best-*"):
            if path.name not in named:
                shutil.rmtree(path)


def _best_of(checkpoint: Path) -> list[str]:
    try:
        return [standing_of(checkpoint).best.folder]
    except InputError:  # `resume` reports it
        return []


def _differing(theirs: Any, ours: Any, path: str = "") -> Iterator[str]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in [*theirs, *(key for key in ours if key not in theirs)]:
            yield from _differing(theirs.get(key), ours.get(key), f"{path}.{key}" if path else key)
    elif theirs != ours:
        yield f"{path} is {theirs!r}, not {ours!r}"
