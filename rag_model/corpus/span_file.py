"""The salient spans of a part's passages, in one `.npy` file that is read where it lies.

(m, 4) int32, 16 bytes a span: the passage's row in the part, the first character, the one after the last, and the kind
(`salient.LINK`, `salient.DATE`); ascending. text[start:end] of the passage is what was linked, or the date.
"""

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rag_model.corpus.salient import Salient
from rag_model.errors import InputError
from rag_model.landing import landing
from rag_model.npy import map_array

_FIELDS = 4


class SpanWriter:
    """Collect the spans of a part's passages, in row order."""

    def __init__(self) -> None:
        self._values, self._rows = array("i"), 0

    def write(self, spans: Iterable[Salient]) -> None:
        """Append the spans of the next passage; there may be none."""
        for start, end, kind in spans:
            self._values.extend((self._rows, start, end, kind))
        self._rows += 1

    def save(self, path: Path) -> None:
        """Write the file."""
        _save(np.asarray(self._values, np.int32).reshape(-1, _FIELDS), path)


class SpanFile:
    """Read the spans of passages by their rows in the part."""

    def __init__(self, path: Path) -> None:
        """Map the file.

        Raises:
            InputError: it is no such file.
        """
        try:
            self._spans = map_array(path)
        except (ValueError, OSError) as broken:
            raise InputError(f"{path} is no file of spans ({broken}): build or pull it again") from broken
        if self._spans.ndim != 2 or self._spans.shape[1] != _FIELDS or self._spans.dtype != np.int32:
            raise InputError(f"{path} is no file of spans ({self._spans.shape}): build or pull it again")

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The rows of the passages that have a span, ascending."""
        return np.unique(self._spans[:, 0]).astype(np.int64)

    def of(self, row: int) -> list[Salient]:
        """Return the spans of the passage of a row, ascending."""
        return self.between(row, row + 1)[0]

    def between(self, first: int, last: int) -> list[list[Salient]]:
        """Return the spans of the passages of rows `first` to `last` (exclusive), one list a passage."""
        start, end = np.searchsorted(self._spans[:, 0], [first, last])
        found: list[list[Salient]] = [[] for _ in range(first, last)]
        for row, *span in self._spans[start:end].tolist():
            if first <= row < last:  # rows of a damaged file may be in no order
                found[row - first].append(Salient(*span))
        return found

    def keep(self, rows: Sequence[int], out: Path) -> None:
        """Write a copy with the spans of these rows alone, ascending, which count from 0 there."""
        kept = np.asarray(rows, np.int64)
        spans = self._spans[np.isin(self._spans[:, 0], kept)]
        spans[:, 0] = np.searchsorted(kept, spans[:, 0])
        _save(spans, out)


def _save(spans: npt.NDArray[np.int32], path: Path) -> None:
    with landing(path) as temporary, temporary.open("wb") as file:
        np.save(file, spans, allow_pickle=False)
