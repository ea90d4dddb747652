"""The row formats of a representation: one vector per passage, many vectors, or weighted terms.

Token vectors and weighted terms are ragged: a passage has any number of entries. Row i of a file
belongs to passage i. As in `embed`, the rows of passages that a previous build encoded are reused,
and only the other passages are encoded. One batch of passages and rows is in memory at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from rag_model.corpus.passages import PassageFile, read_hashes
from rag_model.corpus.ragged_file import (
    BATCH_ROWS,
    RaggedBatch,
    RaggedFile,
    RaggedWriter,
    SparseFile,
    SparseVectors,
    SparseWriter,
    TokenFile,
    TokenVectors,
    TokenWriter,
    is_sparse_file,
    is_token_file,
)
from rag_model.encoders.embed import Dtype, EmbedStats, PreviousParts, VectorFormat, get_device_and_dtype

_NOT_KNOWN = -1
IntArray = npt.NDArray[np.int64]
RowFormatName = Literal["vectors", "tokens", "sparse"]


R = TypeVar("R", bound=RaggedBatch)
R_co = TypeVar("R_co", bound=RaggedBatch, covariant=True)


class RaggedEncoder(Protocol[R_co]):
    """Interface that ragged formats require of an encoder."""

    @property
    def model(self) -> Any:
        """The model, with the attributes `device` and `dtype`."""
        ...

    def encode_passages(self, titles: Sequence[str], texts: Sequence[str]) -> R_co:
        """Return the rows of passages, in order; a row does not depend on the other passages."""
        ...

    def count_truncated(self, titles: Sequence[str], texts: Sequence[str]) -> int:
        """Return the number of passages that are longer than the encoder's limit."""
        ...


class RaggedFormat(ABC, Generic[R]):
    """A file format of ragged rows; a `RowFormat`."""

    __slots__ = ()
    dim: int  # dimension of a vector, or size of the vocabulary

    @abstractmethod
    def open(self, path: Path) -> RaggedFile[R] | None:
        """Open the rows of a part; None if their format differs, so that they cannot be reused."""

    @abstractmethod
    def create(self, path: Path) -> RaggedWriter[R]:
        """Create the file for the rows of a part."""

    def embed(
        self, passages: Path, out: Path, encoder: Callable[[], Any], previous_parts: PreviousParts = ()
    ) -> EmbedStats:
        """Write the rows of a part; see `RowFormat`.

        Raises:
            InputError: a file is missing or corrupt, or a value is not finite.
        """
        known_rows, load_encoder = _find_known_rows(passages, previous_parts, self), cache(encoder)
        n_encoded = n_entries = n_truncated = 0
        with self.create(out) as writer:
            for first_row, titles, texts in _iter_passages(passages):
                rows = slice(first_row, first_row + len(titles))
                batch, encoded_rows = _build_batch(known_rows, rows, titles, texts, load_encoder)
                writer.write(batch)
                n_encoded += len(encoded_rows)
                if len(encoded_rows):
                    columns = ([column[row] for row in encoded_rows.tolist()] for column in (titles, texts))
                    n_truncated += load_encoder().count_truncated(*columns)
                n_entries += int(np.diff(batch.offsets)[encoded_rows].sum())
        device, dtype = get_device_and_dtype(load_encoder()) if n_encoded else ("", "")
        return EmbedStats(len(known_rows.file_numbers), self.dim, n_encoded, n_entries, device, dtype, n_truncated)

    def count_reusable(self, passages: Path, previous_parts: PreviousParts) -> int:
        """Count reusable rows; see `RowFormat`."""
        return int((_find_known_rows(passages, previous_parts, self).file_numbers != _NOT_KNOWN).sum())


@dataclass(frozen=True, slots=True)
class _KnownRows(Generic[R]):
    """The locations of rows that a previous build encoded."""

    files: Sequence[RaggedFile[R]]
    file_numbers: IntArray  # (n,) index into `files` for each passage; -1 if no file has its row
    file_rows: IntArray  # (n,) row of each passage in its file


def _find_known_rows(passages: Path, previous_parts: PreviousParts, row_format: RaggedFormat[R]) -> _KnownRows[R]:
    passage_hashes = read_hashes(passages)
    files = list[RaggedFile[R]]()
    file_numbers, file_rows = np.full(len(passage_hashes), _NOT_KNOWN), np.zeros(len(passage_hashes), np.int64)
    for previous_passages, rows_path in previous_parts:
        file = row_format.open(rows_path)
        if file is None:
            continue
        positions = pc.index_in(passage_hashes, value_set=read_hashes(previous_passages)).fill_null(file.n).to_numpy()
        is_newly_known = (positions < file.n) & (file_numbers == _NOT_KNOWN)
        file_numbers[is_newly_known], file_rows[is_newly_known] = len(files), positions[is_newly_known]
        files.append(file)
    return _KnownRows(files, file_numbers, file_rows)


def _build_batch(
    known_rows: _KnownRows[R],
    row_range: slice,
    titles: Sequence[str],
    texts: Sequence[str],
    load_encoder: Callable[[], RaggedEncoder[R]],
) -> tuple[R, IntArray]:
    """Return (rows of a batch of passages, positions of the passages that were encoded)."""
    file_numbers, file_rows = known_rows.file_numbers[row_range], known_rows.file_rows[row_range]
    row_batches, row_groups = list[R](), list[IntArray]()
    for file_number, file in enumerate(known_rows.files):
        batch_rows = np.flatnonzero(file_numbers == file_number)
        batch_rows = batch_rows[np.argsort(file_rows[batch_rows], kind="stable")]
        row_batches.append(file.take(file_rows[batch_rows]))
        row_groups.append(batch_rows)
    new_rows = np.flatnonzero(file_numbers == _NOT_KNOWN)
    if len(new_rows):
        new_columns = ([column[row] for row in new_rows.tolist()] for column in (titles, texts))
        row_batches.append(load_encoder().encode_passages(*new_columns))
        row_groups.append(new_rows)
    row_order = np.argsort(np.concatenate(row_groups), kind="stable")
    return type(row_batches[0]).concatenate(row_batches).take(row_order), new_rows


def _iter_passages(passages: Path) -> Iterator[tuple[int, list[str], list[str]]]:
    """Yield (first row, titles, texts) of each batch of passages."""
    first_row = 0
    column_names = ("title", "text")
    with PassageFile(passages, column_names) as source:
        for batch in source.iter_batches(column_names, BATCH_ROWS):
            yield first_row, batch.column("title").to_pylist(), batch.column("text").to_pylist()
            first_row += len(batch)


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
class TokenFormat(RaggedFormat[TokenVectors]):
    """The row format with many vectors per passage, one per token."""

    dim: int
    dtype: Dtype

    def open(self, path: Path) -> TokenFile | None:
        """Open token vectors; None if dimension or dtype differ."""
        file = TokenFile(path) if is_token_file(path) else None
        return file if file and (file.dim, file.dtype) == (self.dim, np.dtype(self.dtype)) else None

    def create(self, path: Path) -> TokenWriter:
        """Create the file for the rows of a part."""
        return TokenWriter(path, self.dim, self.dtype)


@dataclass(frozen=True, slots=True)
class SparseFormat(RaggedFormat[SparseVectors]):
    """The row format with weighted vocabulary terms."""

    dim: int
    scale: int  # number of units that a weight of 1 has in the file

    def open(self, path: Path) -> SparseFile | None:
        """Open weighted terms; None if vocabulary size or scale differ."""
        file = SparseFile(path) if is_sparse_file(path) else None
        return file if file and (file.dim, file.scale) == (self.dim, self.scale) else None

    def create(self, path: Path) -> SparseWriter:
        """Create the file for the rows of a part."""
        return SparseWriter(path, self.dim, self.scale)


def get_row_format(name: RowFormatName, dim: int, dtype: Dtype, scale: int) -> RowFormat:
    """Return a row format by name; `dtype` applies to vectors, `scale` to term weights."""
    format_by_name: dict[RowFormatName, RowFormat] = {
        "vectors": VectorFormat(dim, dtype),
        "tokens": TokenFormat(dim, dtype),
        "sparse": SparseFormat(dim, scale),
    }
    return format_by_name[name]
