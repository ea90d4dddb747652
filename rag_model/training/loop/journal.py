"""The log of a training: `metrics.jsonl` with a row per step or evaluation, and TensorBoard.

A run that resumes from a checkpoint first removes the rows after it: they will be written again
with equal values.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from torch.utils.tensorboard import SummaryWriter

from rag_model.atomic_write import atomic_write
from rag_model.errors import InputError
from rag_model.untrusted_text import parse_json

METRICS = "metrics.jsonl"


class Journal:
    """The rows of one training folder, open for writing."""

    def __init__(self, folder: Path, step: int) -> None:
        """Open the journal of `folder` and drop the rows after `step`; -1 drops all rows."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS
        rows = [row for row in read_metrics(folder) if row["step"] <= step]
        with atomic_write(path) as temporary:
            temporary.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")
        board = folder / "tensorboard"
        undrawn_rows = [] if board.exists() else rows  # another machine drew them
        self._board = SummaryWriter(str(board), purge_step=step + 1)
        for row in undrawn_rows:
            values = {name: value for name, value in row.items() if isinstance(value, int | float) and name != "step"}
            self._add_scalars(row["kind"], row["step"], values)

    def write(self, kind: str, step: int, values: Mapping[str, float], snapshot: str | None = None) -> None:
        """Append a row; `kind` (`train`, `dev`) groups curves, `snapshot` is the searched one."""
        # JSON has no NaN
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        searched = {"snapshot": snapshot} if snapshot else {}
        self._file.write(json.dumps({"kind": kind, "step": step, **searched, **finite}) + "\n")
        self._file.flush()  # a killed process loses nothing
        self._add_scalars(kind, step, values)

    def _add_scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._board.add_scalar(f"{kind}/{name}", value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._board.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the rows of a training folder, in order; skip an incomplete last line after a crash.

    Raises:
        InputError: a line is not a valid row.
    """
    path = folder / METRICS
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    return [_parse_row(line, path, number) for number, line in enumerate(lines, start=1) if line.endswith(b"\n")]


def _parse_row(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        row = parse_json(line)
        if type(row["kind"]) is str and type(row["step"]) is int:
            return dict(row)
    except (ValueError, KeyError, TypeError):
        pass
    raise InputError(f"{path} is corrupt in line {number}: delete it, and the curves begin with the next step")
