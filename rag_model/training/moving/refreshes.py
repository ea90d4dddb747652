"""The rebuilds of one training, as files in its folder, so that a run that resumes finds what was begun and finished.

`refreshes/step-<n>/` has the encoders of step n until the training has moved past it; `refreshes/step-<n>.json` is the
finished rebuild.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rag_model.errors import InputError
from rag_model.json_text import parse_json
from rag_model.landing import landing
from rag_model.training.loop.checkpoint import new_folder
from rag_model.training.moving.rebuild import Order, Rebuilt

_FOLDER = re.compile(r"step-(\d{8,})")


class Refreshes:
    """The begun and the finished rebuilds of one training."""

    def __init__(self, work: Path, snapshot: str) -> None:
        """Use `work`, the training's folder; `snapshot`: full id of the one whose passages are encoded."""
        self._root, self._snapshot = work / "refreshes", snapshot

    def order(self, step: int, save: Callable[[Path], Any]) -> Order:
        """Keep the encoders that `save` writes, and return the order of their rebuild."""
        order = Order(step, self._snapshot, self._folder(step))
        with new_folder(order.encoders) as folder:
            save(folder)
        return order

    def record(self, made: Rebuilt) -> None:
        """Note a finished rebuild."""
        with landing(self._record(made.step)) as temporary:
            temporary.write_text(json.dumps(made.to_json()) + "\n", encoding="utf-8")

    def forget(self, step: int) -> None:
        """Delete the encoders of a step and of all before it."""
        for known in self._begun():
            if known <= step:
                shutil.rmtree(self._folder(known), ignore_errors=True)

    def of(self, snapshot: str) -> Rebuilt | None:
        """Return the last rebuild that gave a snapshot; None: none did, as of the first snapshot.

        Raises:
            InputError: a record is corrupt.
        """
        return next((made for made in self._finished() if made.snapshot == snapshot), None)

    def begun_between(self, after: int, until: int) -> Order | Rebuilt | None:
        """Return the last rebuild of a step with `after` < step <= `until`: finished, or to be done; None: no such one.

        Raises:
            InputError: a record is corrupt.
        """
        orders = (Order(step, self._snapshot, self._folder(step)) for step in self._begun())
        found: list[Order | Rebuilt] = [*self._finished()]  # of one step, the finished one counts
        found += [order for order in orders if order.encoders.is_dir()]
        return max((one for one in found if after < one.step <= until), key=lambda one: one.step, default=None)

    def _folder(self, step: int) -> Path:
        return self._root / f"step-{step:08d}"

    def _record(self, step: int) -> Path:
        return self._root / f"step-{step:08d}.json"

    def _begun(self) -> list[int]:
        return [int(found[1]) for path in self._root.glob("step-*/") if (found := _FOLDER.fullmatch(path.name))]

    def _finished(self) -> list[Rebuilt]:
        """Return the finished ones, newest first."""
        found = [path for path in self._root.glob("step-*.json") if _FOLDER.fullmatch(path.stem)]
        return [_read(path) for path in sorted(found, reverse=True)]


def _read(path: Path) -> Rebuilt:
    try:
        return Rebuilt.from_json(parse_json(path.read_bytes()))
    except (OSError, ValueError, TypeError) as broken:
        raise InputError(f"{path} is corrupt ({broken}): delete it, and the rebuild is made again") from broken
