"""Many vectors a passage: the token vectors of a part, row i for passage i, in one Arrow file that is memory-mapped.

The file has one column, `tokens`: a list of vectors a row. Arrow keeps the offsets of the rows beside the vectors, so
rows of any length lie end to end without padding. A record batch holds at most `ROWS` rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rag_model.errors import InputError
from rag_model.partition import Partition

ROWS = 1_024  # passages of a record batch: 30 MB of float16 at 120 tokens of 128 dimensions
_COLUMN = "tokens"
_MAGIC = b"ARROW1"
_DTYPES = {pa.float16(): np.float16, pa.float32(): np.float32}

Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenVectors:
    """The vectors of m passages, end to end: those of passage i are `vectors[offsets[i]:offsets[i + 1]]`."""

    vectors: npt.NDArray[Any]  # (t, d) float16 or float32
    offsets: Offsets  # (m + 1,) int64, ascending from 0 to t

    @classmethod
    def joined(cls, pieces: Sequence["TokenVectors"]) -> Self:
        """Return the passages of all pieces, one piece after another."""
        lengths = np.concatenate([np.diff(piece.offsets) for piece in pieces])
        return cls(np.concatenate([piece.vectors for piece in pieces]), offsets_of(lengths))

    def __len__(self) -> int:
        """Return the number of passages."""
        return len(self.offsets) - 1

    def take(self, rows: npt.NDArray[np.int64]) -> "TokenVectors":
        """Return the passages at `rows`, (m,) in any order."""
        lengths = self.offsets[rows + 1] - self.offsets[rows]
        return TokenVectors(self.vectors[spread(self.offsets[rows], lengths)], offsets_of(lengths))


def offsets_of(lengths: npt.NDArray[np.int64]) -> Offsets:
    """Return (m + 1,) offsets of rows of these (m,) lengths."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def spread(starts: Offsets, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the places of all tokens of rows that begin at `starts`, (m,), row by row."""
    before = offsets_of(lengths)
    return np.arange(before[-1]) + np.repeat(starts - before[:-1], lengths)


class TokenWriter:
    """Write a part's token vectors, batch by batch in row order."""

    def __init__(self, path: Path, dim: int, dtype: str) -> None:
        """Begin the file; its vectors have `dim` components of `dtype`, float16 or float32."""
        self._dim, self._dtype = dim, np.dtype(dtype)
        component = pa.from_numpy_dtype(self._dtype)
        self._schema = pa.schema([pa.field(_COLUMN, pa.list_(pa.list_(component, dim)))])
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._sink, self._schema)

    def write(self, tokens: TokenVectors) -> None:
        """Append passages."""
        for first in range(0, len(tokens), ROWS):
            offsets = tokens.offsets[first : first + ROWS + 1]
            flat = tokens.vectors[offsets[0] : offsets[-1]].astype(self._dtype, copy=False)
            vectors = pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), self._dim)  # (t, d) -> (t d,)
            rows = pa.ListArray.from_arrays(pa.array(offsets - offsets[0], pa.int32()), vectors)
            self._writer.write_batch(pa.record_batch([rows], schema=self._schema))

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Finish the file."""
        self._writer.close()
        self._sink.close()


class TokenFile:
    """A part's token vectors, memory-mapped."""

    def __init__(self, path: Path) -> None:
        """Map the file and read where its batches begin.

        Raises:
            InputError: it is missing, damaged, or holds something else.
        """
        self.path = path
        try:
            self._reader = pa.ipc.open_file(pa.memory_map(str(path)))
            kind = self._reader.schema.field(_COLUMN).type
            self.dim, self.dtype = int(kind.value_type.list_size), np.dtype(_DTYPES[kind.value_type.value_type])
            self._batches = [self._read(number) for number in range(self._reader.num_record_batches)]
        except (OSError, LookupError, AttributeError, ValueError, pa.ArrowException) as broken:
            raise InputError(f"{path} is no complete file of token vectors: encode its part again") from broken
        self._partition = Partition(map(len, self._batches))
        self.n = self._partition.n  # passages
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
        for batch in self._batches:
            yield self._checked(batch)

    def take(self, rows: npt.NDArray[np.int64]) -> TokenVectors:
        """Return the passages at ascending `rows`, float32.

        Raises:
            InputError: as `blocks`.
        """
        pieces = [self._batches[number].take(local) for number, _, local in self._partition.split(rows)]
        empty = TokenVectors(np.zeros((0, self.dim), np.float32), np.zeros(1, np.int64))
        return self._checked(TokenVectors.joined(pieces) if pieces else empty)

    def _checked(self, tokens: TokenVectors) -> TokenVectors:
        vectors = np.ascontiguousarray(tokens.vectors, dtype=np.float32)
        if not np.isfinite(vectors).all():
            raise InputError(f"{self.path} holds a NaN or an infinity: encode its part again")
        return TokenVectors(vectors, tokens.offsets)

    def _read(self, number: int) -> TokenVectors:
        batch = self._reader.get_batch(number)
        batch.validate(full=True)  # offsets ascend and lie inside
        column = batch.column(0)
        if column.null_count or column.values.null_count:
            raise ValueError("a row without vectors")
        flat = column.flatten().flatten().to_numpy(zero_copy_only=True)
        offsets = column.offsets.to_numpy().astype(np.int64)
        return TokenVectors(flat.reshape(-1, self.dim), offsets - offsets[0])  # (t d,) -> (t, d)


def is_token_file(path: Path) -> bool:
    """Whether a file holds token vectors.

    Raises:
        InputError: it is damaged.
    """
    return column_of(path) == _COLUMN


def column_of(path: Path) -> str:
    """Return the name of the column of an Arrow file; empty: it is no Arrow file.

    Raises:
        InputError: it is one, and damaged.
    """
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            return ""
    try:
        return str(pa.ipc.open_file(pa.memory_map(str(path))).schema.names[0])
    except (OSError, IndexError, pa.ArrowException) as broken:
        raise InputError(f"{path} is damaged: encode its part again") from broken
