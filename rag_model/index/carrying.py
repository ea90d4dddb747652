"""What a kind of index over vectors can add to its protocol: a part's piece is made of earlier pieces.

A month changes nearly every part, but few of its vectors. As long as the trained file is the same, what a kind makes of
a vector by itself, such as its list and its code, is the same too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rag_model.index.files.engine import Rows
from rag_model.index.files.pieces import Opener
from rag_model.index.files.vectors import map_vectors
from rag_model.index.plan import Facts, IndexPlan


@dataclass(frozen=True, slots=True)
class EarlierPiece:
    """The piece of a part of an earlier snapshot, which was made with the same trained file."""

    rows: Path  # the vectors of that part, `.npy`
    piece: Opener
    number: int  # of that part


@runtime_checkable
class CarryingKind(Protocol):
    """A kind whose pieces hold, for each vector, something that depends on the vector and the trained file alone."""

    def carries(self, plan: IndexPlan) -> bool:
        """Whether it takes less time to read an earlier piece than to make the new one."""
        ...

    def carry(
        self, plan: IndexPlan, trained: Path, rows: Path, number: int, earlier: Sequence[EarlierPiece], out: Path
    ) -> Facts:
        """Write the piece of part `number` as `scatter` does, with what `earlier` pieces hold of equal vectors.

        The bytes are those that `scatter` writes.

        Raises:
            InputError: as `scatter`, or an earlier piece is missing or damaged.
            ResourceError: as `scatter`.
        """
        ...


def equal_rows(rows: Path, earlier: Path) -> Rows:
    """Return (m,) int64: for each row of a `.npy` matrix, (m, d), the first equal row of an earlier one; -1: none.

    Rows are equal if all their bytes are; matrices of other types or widths have no equal rows.

    Raises:
        InputError: a file is missing or damaged.
    """
    now, before = map_vectors(rows), map_vectors(earlier)
    if now.dtype != before.dtype or now.shape[1:] != before.shape[1:]:
        return np.full(len(now), -1)
    found: Rows = pc.index_in(_binary(now), value_set=_binary(before)).fill_null(-1).to_numpy().astype(np.int64)
    return found


def _binary(matrix: npt.NDArray[Any]) -> pa.Array:
    """Return each row of a matrix as one binary value."""
    width = matrix.shape[1] * matrix.dtype.itemsize
    data = pa.py_buffer(np.ascontiguousarray(matrix))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(matrix), [None, data])
