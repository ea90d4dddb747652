"""The row formats of a representation: one vector per passage, many vectors, or weighted terms.

Token vectors and weighted terms are ragged: a passage has any number of entries. Row i of a file
belongs to passage i. As in `embed`, the rows of passages that a previous build encoded are reused,
and only the other passages are encoded. One batch of passages and rows is in memory at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from rag_model.corpus.passages import PassageFile, read_hashes
from rag_model.corpus.ragged_file import (
    BATCH_ROWS,
    SparseFile,
    SparseVectors,
    SparseWriter,
    TokenFile,
    TokenVectors,
    TokenWriter,
    is_sparse_file,
    is_token_file,
)
from rag_model.encoders.embed import Dtype, EmbedStats, count_reusable_vectors, embed_part_incrementally

_NOT_KNOWN = -1
IntArray = npt.NDArray[np.int64]
RowFormatName = Literal["vectors", "tokens", "sparse"]
# (passages file, file with its rows) of each previous part
PreviousParts = Sequence[tuple[Path, Path]]


class RaggedRows(Protocol):
    """The rows of m passages, concatenated."""

    @property
    def offsets(self) -> IntArray:
        """(m + 1,) offsets: the start of each row, and the end of the last one."""
        ...

    def __len__(self) -> int:
        """Return the number of passages."""
        ...

    def take(self, rows: IntArray) -> Self:
        """Return the passages with these row numbers, (m,) in any order."""
        ...


R = TypeVar("R", bound=RaggedRows)
R_co = TypeVar("R_co", bound=RaggedRows, covariant=True)
R_contra = TypeVar("R_contra", bound=RaggedRows, contravariant=True)


class RaggedRowFile(Protocol[R_co]):
    """An open file with the rows of a part."""

    @property
    def n(self) -> int:
        """The number of passages."""
        ...

    def take(self, rows: IntArray) -> R_co:
        """Return the passages at ascending `rows`."""
        ...


class RaggedRowWriter(Protocol[R_contra]):
    """A writer of the rows of a part, in order."""

    def write(self, rows: R_contra) -> None:
        """Append the rows of passages."""
        ...


class RaggedEncoder(Protocol[R_co]):
    """Interface that ragged formats require of an encoder."""

    @property
    def device_and_dtype(self) -> tuple[str, str]:
        """The names of the device and the dtype."""
        ...

    def encode_passages(self, titles: Sequence[str], texts: Sequence[str]) -> R_co:
        """Return the rows of passages, in order; a row does not depend on the other passages."""
        ...

    def count_truncated(self, titles: Sequence[str], texts: Sequence[str]) -> int:
        """Return the number of passages that are longer than the encoder's limit."""
        ...


class RaggedFormat(Protocol[R]):
    """A file format of ragged rows."""

    @property
    def dim(self) -> int:
        """Dimension of a vector, or size of the vocabulary."""
        ...

    def open(self, path: Path) -> RaggedRowFile[R] | None:
        """Open the rows of a part; None if their format differs, so that they cannot be reused."""
        ...

    def create(self, path: Path) -> AbstractContextManager[RaggedRowWriter[R]]:
        """Open a new file for the rows of a part."""
        ...

    def concatenate(self, batches: Sequence[R]) -> R:
        """Concatenate the rows of several batches of passages."""
        ...


@dataclass(frozen=True, slots=True)
class _KnownRows(Generic[R]):
    """The locations of rows that a previous build encoded."""

    files: Sequence[RaggedRowFile[R]]
    file_numbers: IntArray  # (n,) index into `files` of each passage; -1 if it is in none of them
    file_rows: IntArray  # (n,) row of each passage in that file


def embed_rows_incrementally(
    passages: Path,
    out: Path,
    encoder: Callable[[], RaggedEncoder[R]],
    row_format: RaggedFormat[R],
    previous_parts: Sequence[tuple[Path, Path]] = (),
) -> EmbedStats:
    """Write the rows of the passages in Parquet file `passages` to `out`.

    `previous_parts` are pairs of a passages file and a file with its rows in the same vector space;
    files in a different format are ignored. `encoder` is called only if there are passages to
    encode.

    Raises:
        InputError: a file is missing or corrupt, or a value is not finite.
    """
    known_rows, load_encoder = _find_known_rows(passages, previous_parts, row_format), cache(encoder)
    n_encoded = n_entries = n_truncated = 0
    with row_format.create(out) as writer:
        for first, titles, texts in _iter_passages(passages):
            batch, encoded_rows = _build_batch(
                known_rows, row_format, slice(first, first + len(titles)), titles, texts, load_encoder
            )
            writer.write(batch)
            n_encoded += len(encoded_rows)
            if len(encoded_rows):
                columns = ([column[row] for row in encoded_rows.tolist()] for column in (titles, texts))
                n_truncated += load_encoder().count_truncated(*columns)
            n_entries += int(np.diff(batch.offsets)[encoded_rows].sum())
    device, arithmetic = load_encoder().device_and_dtype if n_encoded else ("", "")
    return EmbedStats(
        len(known_rows.file_numbers), row_format.dim, n_encoded, n_entries, device, arithmetic, n_truncated
    )


def count_reusable_rows(
    passages: Path, previous_parts: Sequence[tuple[Path, Path]], row_format: RaggedFormat[Any]
) -> int:
    """Return the number of passages whose row can be reused from `previous_parts`.

    Raises:
        InputError: a file cannot be read.
    """
    return int((_find_known_rows(passages, previous_parts, row_format).file_numbers != _NOT_KNOWN).sum())


def _find_known_rows(
    passages: Path, previous_parts: Sequence[tuple[Path, Path]], row_format: RaggedFormat[R]
) -> _KnownRows[R]:
    hashes = read_hashes(passages)
    files, file_numbers, file_rows = (
        list[RaggedRowFile[R]](),
        np.full(len(hashes), _NOT_KNOWN),
        np.zeros(len(hashes), np.int64),
    )
    for previous_passages, rows_path in previous_parts:
        file = row_format.open(rows_path)
        if file is None:
            continue
        positions = pc.index_in(hashes, value_set=read_hashes(previous_passages)).fill_null(file.n).to_numpy()
        is_known = (positions < file.n) & (file_numbers == _NOT_KNOWN)
        file_numbers[is_known], file_rows[is_known] = len(files), positions[is_known]
        files.append(file)
    return _KnownRows(files, file_numbers, file_rows)


def _build_batch(
    known_rows: _KnownRows[R],
    row_format: RaggedFormat[R],
    rows: slice,
    titles: Sequence[str],
    texts: Sequence[str],
    load_encoder: Callable[[], RaggedEncoder[R]],
) -> tuple[R, IntArray]:
    """Return (rows of a batch of passages, positions of the passages that were encoded)."""
    file_numbers, file_rows = known_rows.file_numbers[rows], known_rows.file_rows[rows]
    batches, row_groups = list[R](), list[IntArray]()
    for number, file in enumerate(known_rows.files):
        batch_rows = np.flatnonzero(file_numbers == number)
        batch_rows = batch_rows[np.argsort(file_rows[batch_rows], kind="stable")]
        batches.append(file.take(file_rows[batch_rows]))
        row_groups.append(batch_rows)
    new_rows = np.flatnonzero(file_numbers == _NOT_KNOWN)
    if len(new_rows):
        new_list = new_rows.tolist()
        batches.append(
            load_encoder().encode_passages([titles[row] for row in new_list], [texts[row] for row in new_list])
        )
        row_groups.append(new_rows)
    order = np.argsort(np.concatenate(row_groups), kind="stable")
    return row_format.concatenate(batches).take(order), new_rows


def _iter_passages(passages: Path) -> Iterator[tuple[int, list[str], list[str]]]:
    """Yield (first row, titles, texts) of each batch of passages."""
    first = 0
    columns = ("title", "text")
    with PassageFile(passages, columns) as source:
        for batch in source.iter_batches(columns, BATCH_ROWS):
            yield first, batch.column("title").to_pylist(), batch.column("text").to_pylist()
            first += len(batch)


class RowFormat(Protocol):
    """A row format, which encodes the rows of a part and reuses rows of previous parts."""

    def embed(
        self, passages: Path, out: Path, encoder: Callable[[], Any], previous_parts: PreviousParts = ()
    ) -> EmbedStats:
        """Write the rows of a part; `encoder` is called only if a passage is not in
        `previous_parts`.
        """
        ...

    def count_reusable(self, passages: Path, previous_parts: PreviousParts) -> int:
        """Return the number of passages whose row can be reused from `previous_parts`."""
        ...


@dataclass(frozen=True, slots=True)
class VectorFormat:
    """The row format with one vector per passage."""

    dim: int
    dtype: Dtype

    def embed(
        self, passages: Path, out: Path, encoder: Callable[[], Any], previous_parts: PreviousParts = ()
    ) -> EmbedStats:
        """Write vectors; see `RowFormat`."""
        return embed_part_incrementally(passages, out, encoder, self.dim, self.dtype, previous_parts)

    def count_reusable(self, passages: Path, previous_parts: PreviousParts) -> int:
        """Count reusable vectors; see `RowFormat`."""
        return count_reusable_vectors(passages, previous_parts, self.dim, self.dtype)


class RaggedFormatBase:
    """Base class of the formats with ragged rows."""

    __slots__ = ()

    def embed(
        self: RaggedFormat[Any],
        passages: Path,
        out: Path,
        encoder: Callable[[], Any],
        previous_parts: PreviousParts = (),
    ) -> EmbedStats:
        """Write rows; see `RowFormat`."""
        return embed_rows_incrementally(passages, out, encoder, self, previous_parts)

    def count_reusable(self: RaggedFormat[Any], passages: Path, previous_parts: PreviousParts) -> int:
        """Count reusable rows; see `RowFormat`."""
        return count_reusable_rows(passages, previous_parts, self)


@dataclass(frozen=True, slots=True)
class TokenFormat(RaggedFormatBase):
    """The row format with many vectors per passage, one per token."""

    dim: int
    dtype: Dtype

    def open(self, path: Path) -> TokenFile | None:
        """Open token vectors; None if dimension or dtype differ."""
        file = TokenFile(path) if is_token_file(path) else None
        return file if file and (file.dim, file.dtype) == (self.dim, np.dtype(self.dtype)) else None

    def create(self, path: Path) -> TokenWriter:
        """Open a new file."""
        return TokenWriter(path, self.dim, self.dtype)

    def concatenate(self, batches: Sequence[TokenVectors]) -> TokenVectors:
        """Join token vectors."""
        return TokenVectors.concatenate(batches)


@dataclass(frozen=True, slots=True)
class SparseFormat(RaggedFormatBase):
    """The row format with weighted vocabulary terms."""

    dim: int
    scale: int

    def open(self, path: Path) -> SparseFile | None:
        """Open weighted terms; None if vocabulary size or scale differ."""
        file = SparseFile(path) if is_sparse_file(path) else None
        return file if file and (file.dim, file.scale) == (self.dim, self.scale) else None

    def create(self, path: Path) -> SparseWriter:
        """Open a new file."""
        return SparseWriter(path, self.dim, self.scale)

    def concatenate(self, batches: Sequence[SparseVectors]) -> SparseVectors:
        """Join weighted terms."""
        return SparseVectors.concatenate(batches)


def get_row_format(name: RowFormatName, dim: int, dtype: Dtype, scale: int) -> RowFormat:
    """Return a row format by name; `dtype` applies to vectors, `scale` to term weights."""
    formats: dict[RowFormatName, RowFormat] = {
        "vectors": VectorFormat(dim, dtype),
        "tokens": TokenFormat(dim, dtype),
        "sparse": SparseFormat(dim, scale),
    }
    return formats[name]
