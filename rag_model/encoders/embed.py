"""Vectors of a part: row i of the array is the vector of row i of the passages.

A passage that an earlier build embedded keeps its vector: a vector depends on title and text, which `hash` identifies,
and on the encoder. Only the other passages are encoded, one window at a time, in batches that do not change a vector:
an incremental build gives the same vectors as a full one. At most one window of texts and vectors is held in memory.
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

from rag_model.corpus.passages import PassageFile, hashes_of
from rag_model.encoders.encoder import Encoder, Vectors
from rag_model.encoders.spec import TextInput
from rag_model.errors import InputError

VERSION = 1  # increase it when the same passages would give other vectors: earlier vectors are then not reused
Dtype = Literal["float16", "float32"]
_READ = ("title", "text")  # columns of passages
_BLOCK = 8192  # vectors copied at a time


@dataclass(frozen=True, slots=True)
class EmbedFacts:
    """What was done for one part; device and arithmetic are recorded, but never compared."""

    rows: int
    dim: int
    encoded: int  # rows that were encoded; the others were reused
    tokens: int  # encoded tokens, without padding
    device: str  # cpu, cuda:0; empty if nothing was encoded
    arithmetic: str  # bfloat16


class PassageEncoder(Protocol):
    """What is needed of an encoder; `Encoder` is one."""

    @property
    def window(self) -> int:
        """How many inputs are encoded together."""
        ...

    @property
    def spec(self) -> Any:
        """Makes an input of title and text, by `passage`."""
        ...

    @property
    def model(self) -> Any:
        """Has a `device` and a `dtype`."""
        ...

    def stream(self, windows: Iterable[Sequence[TextInput]], *, steady: bool = False) -> Iterator[tuple[Vectors, int]]:
        """Yield each window's (n, d) float32 vectors and its number of tokens."""
        ...


def embed_part(passages: Path, out: Path, encoder: Encoder, dtype: Dtype = "float16") -> EmbedFacts:
    """Write the vectors of the passages in Parquet file `passages` to `out`: an (n, d) `.npy` of `dtype`.

    Raises:
        InputError: `passages` is missing, corrupt or has too few rows, or a vector is not finite.
    """
    return embed_changes(passages, out, lambda: encoder, encoder.dim, dtype, ())


def embed_changes(
    passages: Path,
    out: Path,
    encoder: Callable[[], PassageEncoder],
    dim: int,
    dtype: Dtype,
    earlier: Sequence[tuple[Path, Path]],
) -> EmbedFacts:
    """Do as `embed_part`, but reuse the vectors of passages whose hash is in `earlier`.

    `earlier` are pairs of passages and their vectors, of the same encoder space; vectors of another `dtype` are
    ignored. `encoder` is called only if there is something to encode.

    Raises:
        InputError: as `embed_part`.
    """
    with PassageFile(passages, _READ) as source, out.open("wb") as file:
        table = _Rows(file, source.n_rows, dim, np.dtype(dtype))
        missing = _take_over(passages, earlier, table) if earlier else np.arange(table.rows)
        if not len(missing):
            return EmbedFacts(table.rows, dim, 0, 0, "", "")
        loaded, done, tokens = encoder(), 0, 0
        for vectors, count in loaded.stream(_inputs(source, missing, loaded), steady=True):
            table.write(missing[done : done + len(vectors)], vectors)
            done += len(vectors)
            tokens += count
    if done != len(missing):
        raise InputError(f"passages file {passages} has {done} rows to encode, not {len(missing)}: make it again")
    arithmetic = str(loaded.model.dtype).removeprefix("torch.")
    return EmbedFacts(table.rows, dim, done, tokens, str(loaded.model.device), arithmetic)


class _Rows:
    """A `.npy` file that is filled row by row, in any order."""

    def __init__(self, file: BinaryIO, rows: int, dim: int, dtype: np.dtype[Any]) -> None:
        self.rows, self.dim, self.dtype, self._file = rows, dim, dtype, file
        descr = np.lib.format.dtype_to_descr(dtype)
        np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": (rows, dim)})
        self._start = file.tell()

    def write(self, rows: NDArray[np.int64], vectors: NDArray[Any]) -> None:
        """Write the vectors of ascending rows; consecutive rows in one write."""
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
    """Write the known vectors, and return the rows of the others."""
    missing = np.ones(table.rows, dtype=bool)
    for vectors, rows, places in _known(passages, earlier, table.dim, table.dtype):
        missing[rows] = False
        for start in range(0, len(rows), _BLOCK):
            table.write(rows[start : start + _BLOCK], vectors[places[start : start + _BLOCK]])
    return np.flatnonzero(missing)


def _known(
    passages: Path, earlier: Sequence[tuple[Path, Path]], dim: int, dtype: np.dtype[Any] | Dtype
) -> Iterator[tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]]:
    """Yield (vectors, rows of `passages` that they hold, positions of these rows in the vectors); no row twice."""
    hashes = hashes_of(passages)
    missing = np.arange(len(hashes))
    for known, file in earlier:
        vectors = _vectors(file)
        if vectors.ndim != 2 or vectors.shape[1] != dim or vectors.dtype != dtype:
            continue
        found = pc.index_in(hashes.take(missing), value_set=hashes_of(known)).fill_null(len(vectors)).to_numpy()
        there = found < len(vectors)
        yield vectors, missing[there], found[there]
        missing = missing[~there]


def _vectors(file: Path) -> NDArray[Any]:
    try:
        vectors: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as broken:
        raise InputError(f"vectors {file} cannot be read ({broken}): make them again") from broken
    return vectors


def _inputs(source: PassageFile, rows: NDArray[np.int64], encoder: PassageEncoder) -> Iterator[list[TextInput]]:
    """Yield the encoder inputs of ascending `rows`, one window at a time; the last may be shorter."""
    held, start = list[TextInput](), 0
    for batch in source.iter_batches(_READ, encoder.window):
        first, end = np.searchsorted(rows, [start, start + len(batch)])
        chosen = batch.take(pa.array(rows[first:end] - start))
        titles, texts = (chosen.column(name).to_pylist() for name in ("title", "text"))
        held += [encoder.spec.passage(title, text) for title, text in zip(titles, texts, strict=True)]
        start += len(batch)
        while len(held) >= encoder.window:
            yield held[: encoder.window]
            held = held[encoder.window :]
    if held:
        yield held
