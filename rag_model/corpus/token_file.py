"""Many vectors a passage: the token vectors of a part, row i for passage i, in one Arrow file that is memory-mapped.

The file has one column, `tokens`: a list of vectors a row (`ragged_file`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rag_model.corpus.ragged_file import Offsets, Ragged, RaggedFile, RaggedWriter, column_of
from rag_model.errors import InputError

_COLUMN = "tokens"
_DTYPES = {pa.float16(): np.float16, pa.float32(): np.float32}


@dataclass(frozen=True, slots=True)
class TokenVectors(Ragged):
    """The vectors of m passages, end to end: those of passage i are `vectors[offsets[i]:offsets[i + 1]]`."""

    vectors: npt.NDArray[Any]  # (t, d) float16 or float32
    offsets: Offsets  # (m + 1,) int64, ascending from 0 to t

    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        """Return the vectors."""
        return (self.vectors,)

    @classmethod
    def none(cls) -> Self:
        """Return no passages; their vectors have no components."""
        return cls(np.zeros((0, 0), np.float32), np.zeros(1, np.int64))


class TokenWriter(RaggedWriter[TokenVectors]):
    """Write a part's token vectors, batch by batch in row order."""

    def __init__(self, path: Path, dim: int, dtype: str) -> None:
        """Begin the file; its vectors have `dim` components of `dtype`, float16 or float32."""
        self._dim, self._dtype = dim, np.dtype(dtype)
        super().__init__(path, _COLUMN, pa.list_(pa.from_numpy_dtype(self._dtype), dim))

    def values(self, rows: TokenVectors, first: int, last: int) -> pa.Array:
        """Return vectors as Arrow has them."""
        flat = rows.vectors[first:last].astype(self._dtype, copy=False)
        return pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), self._dim)  # (t, d) -> (t d,)


class TokenFile(RaggedFile[TokenVectors]):
    """A part's token vectors, memory-mapped."""

    rows, holds = TokenVectors, "token vectors"

    def __init__(self, path: Path) -> None:
        """Map the file; as `RaggedFile`."""
        super().__init__(path)
        self.lengths = np.concatenate([np.zeros(0, np.int64), *(np.diff(one.offsets) for one in self._batches)])

    @property
    def tokens(self) -> int:
        """The number of vectors."""
        return int(self.lengths.sum())

    def blocks(self) -> Iterator[TokenVectors]:
        """Yield the passages in row order, float32, one record batch at a time.

        Raises:
            InputError: a vector holds a NaN or an infinity.
        """
        yield from map(self._checked, super().blocks())

    def take(self, rows: npt.NDArray[np.int64]) -> TokenVectors:
        """Return the passages at ascending `rows`, float32.

        Raises:
            InputError: as `blocks`.
        """
        return self._checked(super().take(rows))

    def describe(self, schema: pa.Schema) -> None:
        """Set the number of components and their dtype."""
        kind = schema.field(_COLUMN).type
        self.dim, self.dtype = int(kind.value_type.list_size), np.dtype(_DTYPES[kind.value_type.value_type])

    def of(self, values: pa.Array, offsets: Offsets) -> TokenVectors:
        """Return the vectors of a record batch."""
        flat = values.flatten().to_numpy(zero_copy_only=True)
        return TokenVectors(flat.reshape(-1, self.dim), offsets)  # (t d,) -> (t, d)

    def _checked(self, tokens: TokenVectors) -> TokenVectors:
        vectors = np.ascontiguousarray(tokens.vectors, dtype=np.float32).reshape(-1, self.dim)  # also of no passages
        if not np.isfinite(vectors).all():
            raise InputError(f"{self.path} holds a NaN or an infinity: encode its part again")
        return TokenVectors(vectors, tokens.offsets)


def is_token_file(path: Path) -> bool:
    """Whether a file holds token vectors.

    Raises:
        InputError: it is damaged.
    """
    return column_of(path) == _COLUMN
