"""Rows of variable length in memory-mapped Arrow files: token vectors and weighted terms.

Row i of a file belongs to passage i of the part. A file has one column, a list of values per row.
Arrow stores the offsets of the rows next to the values, so rows are contiguous without padding. A
record batch has at most `BATCH_ROWS` rows.

* `TokenFile`: column `tokens`, a list of vectors per passage.
* `SparseFile`: column `terms`, a list of (term, weight) per passage, terms ascending. A term is a
  number in the encoder's vocabulary. A weight is stored as 1 to 255 units; `scale` units are a
  weight of 1. The scale belongs to the encoder, not to the corpus, so equal passages have
  equal rows in every part and build. The size of the vocabulary (`dim`) and the scale are stored
  in the metadata of the file.

A file in an object store is read by byte ranges: the footer, the offsets, and the values of the
requested rows. These values are not verified by the digest of the file.
"""

import io
import struct
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rag_model.arrays import RowPartition
from rag_model.errors import InputError

BATCH_ROWS = 1_024  # passages per record batch: 30 MB of float16 at 120 tokens of 128 dimensions
_MAGIC = b"ARROW1"
_MAX_GAP_BYTES = 64 << 10  # maximum gap between rows that one request reads
# The position of a record batch, as the footer stores it: the struct `Block` of Arrow's `File.fbs`.
_BLOCK = np.dtype([("offset", "<i8"), ("metadata", "<i4"), ("padding", "<i4"), ("body", "<i8")])

Offsets = npt.NDArray[np.int64]
Values = npt.NDArray[Any]
MAX_TERMS = 1 << 24  # maximum number of terms of a vocabulary
MAX_WEIGHT = 255
QUERY_UNITS = 4096  # units for a query weight of 1; a unit is finer than the rounding of encoders
_TERMS_COLUMN = "terms"
# Steele, Lea, Flood. Fast splittable pseudorandom number generators. OOPSLA 2014: `splitmix64`.
_DIGEST_ROUNDS = tuple(
    (np.uint64(shift), np.uint64(factor)) for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
)
_TOKENS_COLUMN = "tokens"
_DTYPES = {pa.float16(): np.float16, pa.float32(): np.float32}


class RaggedBatch:
    """The values of m passages; those of passage i are at offsets[i] <= k < offsets[i + 1].

    A subclass is a dataclass with columns of values, followed by `offsets`.
    """

    __slots__ = ()
    offsets: Offsets  # (m + 1,) int64, ascending from 0 to the number of values

    @abstractmethod
    def __init__(self, *columns: Values) -> None:
        """Store the columns of values, followed by the offsets."""

    @abstractmethod
    def columns(self) -> tuple[Values, ...]:
        """Return the columns of values."""

    @classmethod
    @abstractmethod
    def empty(cls) -> Self:
        """Return an instance without passages."""

    @classmethod
    def concatenate(cls, batches: Sequence[Self]) -> Self:
        """Concatenate the passages of all batches."""
        input_batches = batches or [cls.empty()]
        columns = zip(*(batch.columns() for batch in input_batches), strict=True)
        lengths = np.concatenate([np.diff(batch.offsets) for batch in input_batches])
        return cls(*map(np.concatenate, columns), compute_offsets(lengths))

    def __len__(self) -> int:
        """Return the number of passages."""
        return len(self.offsets) - 1

    def take(self, rows: npt.NDArray[np.int64]) -> Self:
        """Return the passages at `rows`, (m,) in any order."""
        lengths = self.offsets[rows + 1] - self.offsets[rows]
        value_positions = expand_positions(self.offsets[rows], lengths)
        return type(self)(*(column[value_positions] for column in self.columns()), compute_offsets(lengths))


RowsT = TypeVar("RowsT", bound=RaggedBatch)


class RaggedWriter(Generic[RowsT]):
    """Write a part's rows, batch by batch in row order."""

    def __init__(self, path: Path, column: str, dtype: pa.DataType, metadata: Mapping[str, str] | None = None) -> None:
        """Create the file with a single column, which has this name and lists of `dtype`."""
        self._schema = pa.schema([pa.field(column, pa.list_(dtype))], metadata=metadata)
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._sink, self._schema)

    @abstractmethod
    def to_arrow(self, rows: RowsT, start: int, end: int) -> pa.Array:
        """Return the values in [start, end) as an Arrow array."""

    def write(self, rows: RowsT) -> None:
        """Append passages."""
        for first_row in range(0, len(rows), BATCH_ROWS):
            offsets = rows.offsets[first_row : first_row + BATCH_ROWS + 1]
            values = self.to_arrow(rows, offsets[0], offsets[-1])
            lists = pa.ListArray.from_arrays(pa.array(offsets - offsets[0], pa.int32()), values)
            self._writer.write_batch(pa.record_batch([lists], schema=self._schema))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Finish the file."""
        self._writer.close()
        self._sink.close()


class _RemoteBatch(Generic[RowsT]):
    """A record batch of a remote file, which reads only metadata, offsets and requested rows."""

    def __init__(
        self, source: IO[bytes], block: Any, schema: pa.Schema, build_rows: Callable[[pa.Array, Offsets], RowsT]
    ) -> None:
        """Read the metadata and the offsets of the batch whose position is `block`."""
        self._source, self._schema, self._build_rows = source, schema, build_rows
        self._start, self._size = int(block["offset"]), int(block["metadata"]) + int(block["body"])
        if block["metadata"] < 0 or block["body"] < 0 or self._start + self._size > source.seek(0, io.SEEK_END):
            raise ValueError("a record batch outside of the file")
        self._metadata = _read_range(source, self._start, int(block["metadata"]))
        batch_bytes, lists = self._map_lists()
        self._read_into(batch_bytes, lists.buffers()[1], 0, 4 * (len(lists) + 1))
        self.offsets: Offsets = lists.offsets.to_numpy().astype(np.int64)
        if self.offsets[0] or (np.diff(self.offsets) < 0).any() or self.offsets[-1] > len(lists.values):
            raise ValueError("offsets out of order")

    def __len__(self) -> int:
        """Return the number of passages."""
        return len(self.offsets) - 1

    def take(self, rows: npt.NDArray[np.int64]) -> RowsT:
        """Return the passages at ascending `rows`; rows near each other share one request."""
        data, lists = self._map_lists()
        offsets_buffer = lists.buffers()[1]
        offsets_start = offsets_buffer.address - data.ctypes.data
        data[offsets_start : offsets_start + 4 * len(self.offsets)] = self.offsets.astype("<i4").view(np.uint8)
        value_starts, value_ends = self.offsets[rows], self.offsets[rows + 1]
        for buffer, width in _list_value_buffers(lists.values):
            is_far = (value_starts[1:] - value_ends[:-1]) * width > _MAX_GAP_BYTES
            for run in np.split(np.arange(len(rows)), np.flatnonzero(is_far) + 1):
                if len(run):
                    self._read_into(data, buffer, int(value_starts[run[0]]) * width, int(value_ends[run[-1]]) * width)
        batch = pa.record_batch([lists.take(pa.array(rows))], schema=self._schema)
        return self._build_rows(*_read_values(batch))

    def _map_lists(self) -> tuple[npt.NDArray[np.uint8], pa.ListArray]:
        """Return the batch's bytes, which are zero after the metadata, and a view of its lists."""
        batch_bytes = np.zeros(self._size, np.uint8)  # memory is used only where bytes are written
        batch_bytes[: len(self._metadata)] = np.frombuffer(self._metadata, np.uint8)
        message = pa.ipc.read_message(pa.py_buffer(batch_bytes))
        return batch_bytes, pa.ipc.read_record_batch(message, self._schema).column(0)

    def _read_into(self, batch_bytes: npt.NDArray[np.uint8], buffer: pa.Buffer, start_byte: int, end_byte: int) -> None:
        """Read the bytes [start_byte, end_byte) of a buffer in `batch_bytes` from the file."""
        if end_byte > buffer.size:
            raise ValueError("a row outside of its buffer")
        if start_byte == end_byte:
            return  # the address of an empty buffer has no meaning
        offset = buffer.address - batch_bytes.ctypes.data + start_byte
        file_bytes = _read_range(self._source, self._start + offset, end_byte - start_byte)
        batch_bytes[offset : offset + len(file_bytes)] = np.frombuffer(file_bytes, np.uint8)


def _list_value_buffers(values: pa.Array) -> list[tuple[pa.Buffer, int]]:
    """Return (buffer, bytes per value) for each buffer that contains list values."""
    if isinstance(values, pa.StructArray):
        fields = map(values.field, range(values.type.num_fields))
        return [buffer for field in fields for buffer in _list_value_buffers(field)]
    if isinstance(values, pa.FixedSizeListArray):
        list_size = values.type.list_size
        return [(buffer, list_size * width) for buffer, width in _list_value_buffers(values.values)]
    return [(values.buffers()[1], values.type.bit_width // 8)]


def _read_schema(source: IO[bytes]) -> pa.Schema:
    """Return the schema of a file, which is the message after the first eight bytes."""
    header = _read_range(source, 0, 16)
    if header[: len(_MAGIC)] != _MAGIC:
        raise ValueError("no Arrow file")
    return pa.ipc.read_schema(pa.py_buffer(header[8:] + _read_range(source, 16, struct.unpack("<i", header[12:])[0])))


def _read_blocks(source: IO[bytes]) -> npt.NDArray[Any]:
    """Return the positions of the record batches in a file, from its footer.

    The footer is a FlatBuffers table, whose fourth field is the list of positions (Arrow's
    `File.fbs`). pyarrow does not expose it.
    """
    file_size = source.seek(0, io.SEEK_END)
    footer_end = file_size - len(_MAGIC) - 4
    (footer_size,) = struct.unpack("<i", _read_range(source, footer_end, 4))
    footer = _read_range(source, footer_end - footer_size, footer_size)
    (table_start,) = struct.unpack_from("<I", footer)
    vtable_start = table_start - struct.unpack_from("<i", footer, table_start)[0]
    (vtable_size,) = struct.unpack_from("<H", footer, vtable_start)
    field_offset = struct.unpack_from("<H", footer, vtable_start + 10)[0] if vtable_size > 10 else 0
    if not field_offset:
        return np.zeros(0, _BLOCK)
    list_start = table_start + field_offset + struct.unpack_from("<I", footer, table_start + field_offset)[0]
    return np.frombuffer(footer, _BLOCK, struct.unpack_from("<I", footer, list_start)[0], list_start + 4)


def _read_range(source: IO[bytes], start_byte: int, n_bytes: int) -> bytes:
    """Return `n_bytes` bytes of a file from `start_byte`; raise a ValueError if it has fewer."""
    if min(start_byte, n_bytes) < 0:
        raise ValueError("bytes outside of the file")
    source.seek(start_byte)
    range_bytes = source.read(n_bytes)
    if len(range_bytes) != n_bytes:
        raise ValueError("the file is cut short")
    return range_bytes


class RaggedFile(Generic[RowsT]):
    """A part's rows, memory-mapped, or read by byte ranges from an object store."""

    batch_class: type[RowsT]
    content_name: str  # name of a row's content in messages

    def __init__(self, source: Path | IO[bytes]) -> None:
        """Memory-map a local file, or read the offsets of the rows in an unbuffered remote file.

        Raises:
            InputError: The file is missing, damaged, or has other content.
        """
        self.path = source if isinstance(source, Path) else source.name
        self._batches: Sequence[RowsT | _RemoteBatch[RowsT]]
        try:
            if isinstance(source, Path):
                reader = pa.ipc.open_file(pa.memory_map(str(source)))
                self.read_schema(reader.schema)
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
                self._batches = [self.build_rows(*_read_values(batch)) for batch in batches]
            else:
                schema = _read_schema(source)
                self.read_schema(schema)
                blocks = _read_blocks(source)
                self._batches = [_RemoteBatch(source, block, schema, self.build_rows) for block in blocks]
        except (OSError, LookupError, AttributeError, ValueError, struct.error, pa.ArrowException) as error:
            raise self._create_incomplete_error() from error
        self._partition = RowPartition(map(len, self._batches))
        self.n = self._partition.n  # passages

    @abstractmethod
    def read_schema(self, schema: pa.Schema) -> None:
        """Set attributes from the schema; raise a ValueError or LookupError if it is invalid."""

    @abstractmethod
    def build_rows(self, values: pa.Array, offsets: Offsets) -> RowsT:
        """Return the rows of a record batch; raise a ValueError if they are invalid."""

    def iter_batches(self) -> Iterator[RowsT]:
        """Yield the passages in row order, one record batch at a time."""
        for batch in self._batches:
            yield batch.take(np.arange(len(batch))) if isinstance(batch, _RemoteBatch) else batch

    def take(self, rows: npt.NDArray[np.int64]) -> RowsT:
        """Return the passages at ascending `rows`.

        Raises:
            InputError: The file is damaged.
        """
        try:
            return self.batch_class.concatenate(
                [self._batches[i].take(batch_rows) for i, _, batch_rows in self._partition.split(rows)]
            )
        except (ValueError, pa.ArrowException) as error:
            raise self._create_incomplete_error() from error

    def _create_incomplete_error(self) -> InputError:
        return InputError(f"{self.path} is not a complete file of {self.content_name}: encode its part again")


def compute_offsets(lengths: npt.NDArray[np.int64]) -> Offsets:
    """Return the (m + 1,) offsets of rows with these (m,) lengths."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def expand_positions(starts: Offsets, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the positions of all values, row by row; the rows start at (m,) `starts`."""
    value_starts = compute_offsets(lengths)
    return np.arange(value_starts[-1]) + np.repeat(starts - value_starts[:-1], lengths)


def read_column_name(path: Path) -> str:
    """Return the column name of an Arrow file; empty if it is not an Arrow file.

    Raises:
        InputError: The Arrow file is damaged.
    """
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            return ""
    try:
        return str(pa.ipc.open_file(pa.memory_map(str(path))).schema.names[0])
    except (OSError, IndexError, pa.ArrowException) as error:
        raise InputError(f"{path} is damaged: encode its part again") from error


def _read_values(batch: pa.RecordBatch) -> tuple[pa.Array, Offsets]:
    """Return the values of a record batch and the offsets of its rows."""
    batch.validate(full=True)  # the offsets must ascend and be in bounds
    column = batch.column(0)
    if column.null_count or column.values.null_count:
        raise ValueError("a row without values")
    offsets = column.offsets.to_numpy().astype(np.int64)
    return column.flatten(), offsets - offsets[0]


@dataclass(frozen=True, slots=True)
class SparseVectors(RaggedBatch):
    """The weighted terms of m passages; passage i has terms[offsets[i]:offsets[i + 1]]."""

    terms: npt.NDArray[np.int32]  # (t,) ascending within a passage
    weights: npt.NDArray[np.uint8]  # (t,) in units of 1 / scale, at least 1
    offsets: Offsets  # (m + 1,) int64, ascending from 0 to t

    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        """Return the terms and their weights."""
        return self.terms, self.weights

    @classmethod
    def empty(cls) -> Self:
        """Return an instance without passages."""
        return cls(np.zeros(0, np.int32), np.zeros(0, np.uint8), np.zeros(1, np.int64))

    def compute_digests(self) -> npt.NDArray[np.uint64]:
        """Return the (m,) digests of passages, equal for equal terms and weights."""
        value_hashes = (self.terms.astype(np.uint64) << np.uint64(8) | self.weights) + np.uint64(1)
        for shift, factor in _DIGEST_ROUNDS:
            value_hashes = (value_hashes ^ (value_hashes >> shift)) * factor
        hash_sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(value_hashes ^ (value_hashes >> np.uint64(31)))])
        digests: npt.NDArray[np.uint64] = hash_sums[self.offsets[1:]] - hash_sums[self.offsets[:-1]]
        return digests


class SparseWriter(RaggedWriter[SparseVectors]):
    """Write a part's weighted terms, batch by batch in row order."""

    def __init__(self, path: Path, dim: int, scale: int) -> None:
        """Create the file for a vocabulary of `dim` terms, with `scale` units for a weight of 1."""
        pair_type = pa.struct([("term", pa.int32()), ("weight", pa.uint8())])
        super().__init__(path, _TERMS_COLUMN, pair_type, {"dim": str(dim), "scale": str(scale)})

    def to_arrow(self, rows: SparseVectors, start: int, end: int) -> pa.Array:
        """Return pairs of term and weight as an Arrow array."""
        pair_columns = [pa.array(rows.terms[start:end]), pa.array(rows.weights[start:end])]
        return pa.StructArray.from_arrays(pair_columns, ["term", "weight"])


class SparseFile(RaggedFile[SparseVectors]):
    """A part's weighted terms; see `RaggedFile`."""

    batch_class, content_name = SparseVectors, "weighted terms"

    @property
    def n_postings(self) -> int:
        """The number of pairs of a passage and a term."""
        return sum(int(batch.offsets[-1]) for batch in self._batches)

    def read_schema(self, schema: pa.Schema) -> None:
        """Read the size of the vocabulary and the scale."""
        metadata = schema.metadata or {}
        self.dim, self.scale = int(metadata[b"dim"]), int(metadata[b"scale"])

    def build_rows(self, values: pa.Array, offsets: Offsets) -> SparseVectors:
        """Return the terms of a record batch."""
        vectors = SparseVectors(_to_numpy(values.field("term")), _to_numpy(values.field("weight")), offsets)
        _check_terms(vectors, self.dim)
        return vectors


def is_sparse_file(path: Path) -> bool:
    """Return whether a file contains weighted terms.

    Raises:
        InputError: The file is damaged.
    """
    return read_column_name(path) == _TERMS_COLUMN


def _to_numpy(column: Any) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = column.to_numpy(zero_copy_only=True)
    return array


def _check_terms(vectors: SparseVectors, dim: int) -> None:
    """Check that terms are in the vocabulary and ascend in each row, and that weights are >= 1."""
    if not len(vectors.terms):
        return
    is_ascending = np.diff(vectors.terms) > 0
    row_starts = vectors.offsets[1:-1]
    is_ascending[row_starts[(row_starts > 0) & (row_starts < len(vectors.terms))] - 1] = True
    if vectors.terms.min() < 0 or vectors.terms.max() >= dim or vectors.weights.min() < 1 or not is_ascending.all():
        raise ValueError("terms out of order")


@dataclass(frozen=True, slots=True)
class TokenVectors(RaggedBatch):
    """The vectors of m passages; passage i has `vectors[offsets[i]:offsets[i + 1]]`."""

    vectors: npt.NDArray[Any]  # (t, d) float16 or float32
    offsets: Offsets  # (m + 1,) int64, ascending from 0 to t

    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        """Return the vectors."""
        return (self.vectors,)

    @classmethod
    def empty(cls) -> Self:
        """Return an instance without passages, whose vectors have no components."""
        return cls(np.zeros((0, 0), np.float32), np.zeros(1, np.int64))


class TokenWriter(RaggedWriter[TokenVectors]):
    """Write a part's token vectors, batch by batch in row order."""

    def __init__(self, path: Path, dim: int, dtype: str) -> None:
        """Create the file for vectors of `dim` components of `dtype`, float16 or float32."""
        self._dim, self._dtype = dim, np.dtype(dtype)
        super().__init__(path, _TOKENS_COLUMN, pa.list_(pa.from_numpy_dtype(self._dtype), dim))

    def to_arrow(self, rows: TokenVectors, start: int, end: int) -> pa.Array:
        """Return vectors as an Arrow array."""
        flat_vectors = rows.vectors[start:end].astype(self._dtype, copy=False)
        # (t, d) -> (t d,).
        return pa.FixedSizeListArray.from_arrays(pa.array(flat_vectors.reshape(-1)), self._dim)


class TokenFile(RaggedFile[TokenVectors]):
    """A part's token vectors; see `RaggedFile`."""

    batch_class, content_name = TokenVectors, "token vectors"

    def __init__(self, source: Path | IO[bytes]) -> None:
        """Open the file as `RaggedFile` does, and compute the lengths of its rows."""
        super().__init__(source)
        self.lengths = np.concatenate([np.zeros(0, np.int64), *(np.diff(batch.offsets) for batch in self._batches)])

    @property
    def tokens(self) -> int:
        """The number of vectors."""
        return int(self.lengths.sum())

    def iter_batches(self) -> Iterator[TokenVectors]:
        """Yield the passages in row order, float32, one record batch at a time.

        Raises:
            InputError: A vector contains a NaN or an infinity.
        """
        yield from map(self._to_float32, super().iter_batches())

    def take(self, rows: npt.NDArray[np.int64]) -> TokenVectors:
        """Return the passages at ascending `rows`, float32.

        Raises:
            InputError: As for `iter_batches`.
        """
        return self._to_float32(super().take(rows))

    def read_schema(self, schema: pa.Schema) -> None:
        """Read the number of components and their dtype."""
        list_type = schema.field(_TOKENS_COLUMN).type
        self.dim, self.dtype = int(list_type.value_type.list_size), np.dtype(_DTYPES[list_type.value_type.value_type])

    def build_rows(self, values: pa.Array, offsets: Offsets) -> TokenVectors:
        """Return the vectors of a record batch."""
        flat_vectors = values.flatten().to_numpy(zero_copy_only=True)
        return TokenVectors(flat_vectors.reshape(-1, self.dim), offsets)  # (t d,) -> (t, d)

    def _to_float32(self, tokens: TokenVectors) -> TokenVectors:
        # Without passages, reshaping sets the number of columns.
        vectors = np.ascontiguousarray(tokens.vectors, dtype=np.float32).reshape(-1, self.dim)
        if not np.isfinite(vectors).all():
            raise InputError(f"{self.path} holds a NaN or an infinity: encode its part again")
        return TokenVectors(vectors, tokens.offsets)


def is_token_file(path: Path) -> bool:
    """Return whether a file contains token vectors.

    Raises:
        InputError: The file is damaged.
    """
    return read_column_name(path) == _TOKENS_COLUMN
