"""Embed the passages of a corpus part: row i of the array is the vector of passage i.

A vector depends only on the encoder and on the passage's title and text. The column `hash` is a
hash of both, so a passage that a previous build embedded keeps its vector. All other passages are
encoded one window at a time, in batch-invariant batches, so that an incremental build gives the
same vectors as a full one. Memory holds at most one window of texts and vectors.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rag_model.corpus.passages import PassageFile, read_hashes
from rag_model.encoders.encoder import Vectors
from rag_model.encoders.spec import TextInput
from rag_model.encoders.tokens import TokenCounts
from rag_model.errors import InputError

# Version of this module's computation. Increase it if the vectors of unchanged passages change, so
# that no previous vectors are reused.
VERSION = 1
Dtype = Literal["float16", "float32"]
# For each previous part: the file of its passages, and the file of their vectors or other rows.
PreviousParts = Sequence[tuple[Path, ...]]
_COLUMNS = ("title", "text")  # columns of the passages that are encoded
_ROWS_PER_COPY = 8192  # number of vectors that are copied at a time


@dataclass(frozen=True, slots=True)
class EmbedStats:
    """Statistics of one embedded part."""

    rows: int  # number of passages of the part
    dim: int  # dimension of a vector
    encoded: int  # number of encoded rows; the others were reused
    tokens: int  # number of encoded tokens, without padding
    device: str  # device such as cpu or cuda:0; empty if no row was encoded
    arithmetic: str  # dtype of the computation, such as bfloat16; empty if no row was encoded
    truncated: int = 0  # number of encoded rows whose passage is longer than the encoder's limit


@dataclass(frozen=True, slots=True)
class Precision:
    """The device and the dtype of an encoder that has no model in memory."""

    device: str
    dtype: str


class PassageEncoder(Protocol):
    """Interface that embedding requires of an encoder; `Encoder` and `MuveraEncoder` implement
    it.
    """

    @property
    def window(self) -> int:
        """Number of inputs that are encoded together."""
        ...

    @property
    def spec(self) -> Any:
        """The settings, whose `format_passage` turns title and text into an input."""
        ...

    @property
    def model(self) -> Any:
        """The model, with the attributes `device` and `dtype`."""
        ...

    def stream(
        self, windows: Iterable[Sequence[TextInput]], *, batch_invariant: bool = False
    ) -> Iterator[tuple[Vectors, TokenCounts]]:
        """Yield the (n, d) float32 vectors and the token counts of each window."""
        ...


@dataclass(frozen=True, slots=True)
class VectorFormat:
    """The row format with one vector per passage: an (n, d) `.npy`; see `row_formats.RowFormat`."""

    dim: int
    dtype: Dtype

    def embed(
        self, passages: Path, out: Path, encoder: Callable[[], PassageEncoder], previous_parts: PreviousParts = ()
    ) -> EmbedStats:
        """Write the vectors of a part; ignore `previous_parts` with another dimension or dtype.

        Raises:
            InputError: `passages` is missing, corrupt or has too few rows, or a vector is not
                finite.
        """
        with PassageFile(passages, _COLUMNS) as source, out.open("wb") as file:
            vector_file = _NpyVectorFile(file, source.n_rows, self.dim, np.dtype(self.dtype))
            if previous_parts:
                missing_rows = _copy_known_vectors(passages, previous_parts, vector_file)
            else:
                missing_rows = np.arange(vector_file.rows)
            if not len(missing_rows):
                return EmbedStats(vector_file.rows, self.dim, 0, 0, "", "")
            loaded_encoder, n_embedded, n_tokens, n_truncated = encoder(), 0, 0, 0
            for vectors, token_counts in loaded_encoder.stream(
                _iter_inputs(source, missing_rows, loaded_encoder), batch_invariant=True
            ):
                vector_file.write(missing_rows[n_embedded : n_embedded + len(vectors)], vectors)
                n_embedded += len(vectors)
                n_tokens += token_counts.tokens
                n_truncated += token_counts.truncated
        if n_embedded != len(missing_rows):
            raise InputError(
                f"passages file {passages} has {n_embedded} rows to encode, not {len(missing_rows)}: write it again"
            )
        device, dtype = get_device_and_dtype(loaded_encoder)
        return EmbedStats(vector_file.rows, self.dim, n_embedded, n_tokens, device, dtype, n_truncated)

    def count_reusable(self, passages: Path, previous_parts: PreviousParts) -> int:
        """Count the passages whose vector can be reused.

        Raises:
            InputError: a file cannot be read.
        """
        vector_batches = _iter_known_vectors(passages, previous_parts, self.dim, self.dtype)
        return sum(len(batch_rows) for _, batch_rows, _ in vector_batches)


def get_device_and_dtype(encoder: Any) -> tuple[str, str]:
    """Return the device and the dtype of an encoder of any row format: `cuda:0`, `bfloat16`."""
    return str(encoder.model.device), str(encoder.model.dtype).removeprefix("torch.")


def describe_precision(encoder: Any) -> str:
    """Return the device type and the dtype of an encoder, such as `cuda bfloat16`."""
    device, dtype = get_device_and_dtype(encoder)
    return f"{device.partition(':')[0]} {dtype}"


class _NpyVectorFile:
    """A `.npy` file that is written row by row, in any order."""

    def __init__(self, file: BinaryIO, n_rows: int, dim: int, dtype: np.dtype[Any]) -> None:
        self.rows, self.dim, self.dtype, self._file = n_rows, dim, dtype, file
        descr = np.lib.format.dtype_to_descr(dtype)
        np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": (n_rows, dim)})
        self._start = file.tell()

    def write(self, rows: NDArray[np.int64], vectors: NDArray[Any]) -> None:
        """Write the vectors of ascending rows, with one write for each run of consecutive rows."""
        stored_vectors = vectors.astype(self.dtype, copy=False)
        run_bounds = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        for first_row, end_row in pairwise(run_bounds):
            self._file.seek(self._start + int(rows[first_row]) * self.dim * self.dtype.itemsize)
            self._file.write(stored_vectors[first_row:end_row].tobytes())


def _copy_known_vectors(
    passages: Path, previous_parts: PreviousParts, vector_file: _NpyVectorFile
) -> NDArray[np.int64]:
    """Copy the reusable vectors; return the rows of the passages that must be encoded."""
    is_row_missing = np.ones(vector_file.rows, dtype=bool)
    vector_batches = _iter_known_vectors(passages, previous_parts, vector_file.dim, vector_file.dtype)
    for vectors, known_rows, source_rows in vector_batches:
        is_row_missing[known_rows] = False
        for i in range(0, len(known_rows), _ROWS_PER_COPY):
            batch = slice(i, i + _ROWS_PER_COPY)
            vector_file.write(known_rows[batch], vectors[source_rows[batch]])
    return np.flatnonzero(is_row_missing)


def _iter_known_vectors(
    passages: Path, previous_parts: PreviousParts, dim: int, dtype: np.dtype[Any] | Dtype
) -> Iterator[tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]]:
    """Yield for each previous part: (its vectors, the rows of `passages` whose vector is among
    them, the positions of these vectors).

    Each row of `passages` occurs at most once in all parts.
    """
    passage_hashes = read_hashes(passages)
    missing_rows = np.arange(len(passage_hashes))
    for previous_passages, vectors_path in previous_parts:
        vectors = _open_vectors(vectors_path)
        if vectors.ndim != 2 or vectors.shape[1] != dim or vectors.dtype != dtype:
            continue
        positions = (
            pc.index_in(passage_hashes.take(missing_rows), value_set=read_hashes(previous_passages))
            .fill_null(len(vectors))
            .to_numpy()
        )
        is_in_previous = positions < len(vectors)
        yield vectors, missing_rows[is_in_previous], positions[is_in_previous]
        missing_rows = missing_rows[~is_in_previous]


def _open_vectors(path: Path) -> NDArray[Any]:
    try:
        vectors: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"vectors {path} cannot be read ({error}): compute them again") from error
    return vectors


def _iter_inputs(source: PassageFile, rows: NDArray[np.int64], encoder: PassageEncoder) -> Iterator[list[TextInput]]:
    """Yield the encoder inputs of ascending `rows` in windows; the last one may be shorter."""
    pending_inputs, batch_start = list[TextInput](), 0
    for batch in source.iter_batches(_COLUMNS, encoder.window):
        start, end = np.searchsorted(rows, [batch_start, batch_start + len(batch)])
        selected_rows = batch.take(pa.array(rows[start:end] - batch_start))
        titles, texts = (selected_rows.column(name).to_pylist() for name in ("title", "text"))
        pending_inputs += [encoder.spec.format_passage(title, text) for title, text in zip(titles, texts, strict=True)]
        batch_start += len(batch)
        while len(pending_inputs) >= encoder.window:
            yield pending_inputs[: encoder.window]
            pending_inputs = pending_inputs[encoder.window :]
    if pending_inputs:
        yield pending_inputs
