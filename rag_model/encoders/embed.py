"""Vectors for a part: row i of the array is the vector of row i of the passages.

A passage that an earlier build embedded keeps its vector: what lies in the array is decided by title and text, which
its `hash` names, and by the encoder. Only the others are encoded, a window at a time, over the whole part, in batches
that decide no bit of a vector: what a month adds is what a full build would have made. No more than a window of texts
and vectors is held in memory, however long the part.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rag_model.encoders.encoder import Encoder
from rag_model.encoders.spec import TextInput
from rag_model.errors import InputError

VERSION = 1  # raise it when the same passages would give other vectors: none is then taken over
Dtype = Literal["float16", "float32"]
_BLOCK = 8192  # vectors copied at a time


@dataclass(frozen=True, slots=True)
class EmbedFacts:
    """What became of one part; how it was computed is recorded, and compared by nobody."""

    rows: int
    dim: int
    encoded: int  # rows that went through the encoder; the others were taken over
    tokens: int  # real ones that were encoded, padding apart
    device: str  # cpu, cuda:0; empty where nothing was encoded
    arithmetic: str  # bfloat16


def embed_part(passages: Path, out: Path, encoder: Encoder, dtype: Dtype = "float16") -> EmbedFacts:
    """Write the vectors of the passages in Parquet file `passages` to `out`: an (n, d) `.npy` of `dtype`.

    Raises:
        InputError: `passages` is missing, corrupt or short of rows, or a vector is not finite.
    """
    return embed_changes(passages, out, lambda: encoder, encoder.dim, dtype, ())


def embed_changes(
    passages: Path,
    out: Path,
    encoder: Callable[[], Encoder],
    dim: int,
    dtype: Dtype,
    earlier: Sequence[tuple[Path, Path]],
) -> EmbedFacts:
    """Do as `embed_part`, but take over the vectors of passages whose hash `earlier` holds.

    `earlier` are pairs of passages and their vectors, of the same encoder space; vectors of another `dtype` are left
    aside. `encoder` is asked for only if there is something to encode.

    Raises:
        InputError: as `embed_part`.
    """
    with _open(passages) as source, out.open("wb") as file:
        table = _Rows(file, source.metadata.num_rows, dim, np.dtype(dtype))
        missing = _take_over(passages, earlier, table) if earlier else np.arange(table.rows)
        if not len(missing):
            return EmbedFacts(table.rows, dim, 0, 0, "", "")
        loaded, done, tokens = encoder(), 0, 0
        for vectors, count in loaded.stream(_inputs(source, missing, loaded, passages), steady=True):
            table.write(missing[done : done + len(vectors)], vectors)
            done += len(vectors)
            tokens += count
    if done != len(missing):
        raise InputError(f"passages file {passages} has {done} rows and promises {len(missing)}: make it again")
    arithmetic = str(loaded.model.dtype).removeprefix("torch.")
    return EmbedFacts(table.rows, dim, done, tokens, str(loaded.model.device), arithmetic)


class _Rows:
    """A `.npy` file that is filled row by row; each takes its place as soon as it is known."""

    def __init__(self, file: BinaryIO, rows: int, dim: int, dtype: np.dtype[Any]) -> None:
        self.rows, self.dim, self.dtype, self._file = rows, dim, dtype, file
        descr = np.lib.format.dtype_to_descr(dtype)
        np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": (rows, dim)})
        self._start = file.tell()

    def write(self, rows: NDArray[np.int64], vectors: NDArray[Any]) -> None:
        """Write the vectors of ascending rows, those of rows that follow each other in one go."""
        data = vectors.astype(self.dtype, copy=False)
        bounds = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        for first, end in pairwise(bounds):
            self._file.seek(self._start + int(rows[first]) * self.dim * self.dtype.itemsize)
            self._file.write(data[first:end].tobytes())


def count_known(passages: Path, earlier: Sequence[tuple[Path, Path]], dim: int, dtype: Dtype) -> int:
    """Return how many passages would keep a vector of `earlier`.

    Raises:
        InputError: a file cannot be read.
    """
    return sum(len(rows) for _, rows, _ in _known(passages, earlier, dim, dtype))


def _take_over(passages: Path, earlier: Sequence[tuple[Path, Path]], table: _Rows) -> NDArray[np.int64]:
    """Write the vectors that are known, and return the rows of the others."""
    missing = np.ones(table.rows, dtype=bool)
    for vectors, rows, places in _known(passages, earlier, table.dim, table.dtype):
        missing[rows] = False
        for start in range(0, len(rows), _BLOCK):
            table.write(rows[start : start + _BLOCK], vectors[places[start : start + _BLOCK]])
    return np.flatnonzero(missing)


def _known(
    passages: Path, earlier: Sequence[tuple[Path, Path]], dim: int, dtype: np.dtype[Any] | Dtype
) -> Iterator[tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]]:
    """Yield arrays of vectors, the rows of `passages` that are in each, and where; no row comes twice."""
    hashes = _hashes(passages)
    missing = np.arange(len(hashes))
    for known, file in earlier:
        vectors = _vectors(file)
        if vectors.ndim != 2 or vectors.shape[1] != dim or vectors.dtype != dtype:
            continue
        found = pc.index_in(hashes.take(missing), value_set=_hashes(known)).fill_null(len(vectors)).to_numpy()
        there = found < len(vectors)
        yield vectors, missing[there], found[there]
        missing = missing[~there]


def _open(passages: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(passages)
    except (OSError, pa.ArrowException) as broken:
        raise _unreadable(passages, broken) from broken


def _hashes(passages: Path) -> pa.Array:
    try:
        return pq.read_table(passages, columns=["hash"], use_threads=False)["hash"].combine_chunks()
    except (OSError, KeyError, pa.ArrowException) as broken:
        raise _unreadable(passages, broken) from broken


def _vectors(file: Path) -> NDArray[Any]:
    try:
        vectors: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as broken:
        raise InputError(f"vectors {file} can not be read ({broken}): make them again") from broken
    return vectors


def _inputs(
    source: pq.ParquetFile, rows: NDArray[np.int64], encoder: Encoder, passages: Path
) -> Iterator[list[TextInput]]:
    """Yield what the encoder reads of `rows`, which ascend: a window at a time, the last as long as it is."""
    held, start = list[TextInput](), 0
    try:
        for batch in source.iter_batches(encoder.window, columns=["title", "text"], use_threads=False):
            first, end = np.searchsorted(rows, [start, start + len(batch)])
            chosen = batch.take(pa.array(rows[first:end] - start))
            titles, texts = (chosen.column(name).to_pylist() for name in ("title", "text"))
            held += [encoder.spec.passage(title, text) for title, text in zip(titles, texts, strict=True)]
            start += len(batch)
            while len(held) >= encoder.window:
                yield held[: encoder.window]
                held = held[encoder.window :]
    except (OSError, KeyError, pa.ArrowException) as broken:
        raise _unreadable(passages, broken) from broken
    if held:
        yield held


def _unreadable(passages: Path, broken: Exception) -> InputError:
    return InputError(f"passages file {passages} can not be read ({broken}): make it again")
