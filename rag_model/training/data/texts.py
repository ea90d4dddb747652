"""The passages of a snapshot as texts to learn from: some held out, the others in batches by epoch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]  # of passages in the snapshot


@dataclass(frozen=True, slots=True)
class Split:
    """The rows of texts to learn from, and of those that are held out, ascending."""

    train: Rows
    dev: Rows

    @classmethod
    def of(cls, rows: Rows, dev: int) -> "Split":
        """Hold out `dev` of the rows, evenly spaced, at most half of them; one row alone is in both."""
        count = min(dev, len(rows) // 2)
        if not count:
            return cls(rows, rows)
        held = np.unique(np.linspace(0, len(rows) - 1, count, dtype=np.int64))
        return cls(np.delete(rows, held), rows[held])


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Some texts of one epoch, which decides what is drawn for them."""

    epoch: int
    rows: tuple[int, ...]


class Epoch(Sequence[TextBatch]):
    """The batches of an epoch: its rows in an order that seed and epoch decide; 8 bytes a row.

    An incomplete last batch is left out, unless it is the only one.
    """

    def __init__(self, rows: Rows, size: int, seed: int, epoch: int) -> None:
        self._order = np.random.default_rng([seed, epoch]).permutation(rows)
        self._size, self._epoch = min(size, len(rows)), epoch

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._order) // self._size if self._size else 0

    def __getitem__(self, place: Any) -> Any:
        """Return the batch at a place from 0."""
        if not 0 <= place < len(self):
            raise IndexError(place)
        return TextBatch(self._epoch, tuple(self._order[place * self._size : (place + 1) * self._size].tolist()))
