"""One part's passages to vectors: Parquet in, `.npy` out, row i of one is row i of the other.

A window of rows is held at a time, so a worker's memory does not grow with its part.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rag_model.encoders.encoder import Encoder
from rag_model.encoders.spec import TextInput
from rag_model.errors import InputError

Dtype = Literal["float16", "float32"]


@dataclass(frozen=True, slots=True)
class EmbedFacts:
    """What became of one part; how it was computed is recorded, and compared by nobody."""

    rows: int
    dim: int
    tokens: int  # real ones, padding apart
    device: str  # cpu, cuda:0
    arithmetic: str  # bfloat16


def embed_part(passages: Path, out: Path, encoder: Encoder, dtype: Dtype = "float16") -> EmbedFacts:
    """Write the vectors of the passages in Parquet file `passages` to `out`: an (n, d) `.npy` of `dtype`.

    Raises:
        InputError: `passages` is missing, corrupt or short of rows, or a vector is not finite.
    """
    with _open(passages) as source, out.open("wb") as file:
        rows, done, tokens = source.metadata.num_rows, 0, 0
        descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
        header = {"descr": descr, "fortran_order": False, "shape": (rows, encoder.dim)}
        np.lib.format.write_array_header_1_0(file, header)
        for vectors, count in encoder.stream(_inputs(source, encoder, passages)):
            file.write(vectors.astype(dtype).tobytes())
            done += len(vectors)
            tokens += count
    if done != rows:
        raise InputError(f"passages file {passages} has {done} rows and promises {rows}: make it again")
    arithmetic = str(encoder.model.dtype).removeprefix("torch.")
    return EmbedFacts(rows, encoder.dim, tokens, str(encoder.model.device), arithmetic)


def _open(passages: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(passages)
    except (OSError, pa.ArrowException) as broken:
        raise InputError(f"passages file {passages} can not be read ({broken}): make it again") from broken


def _inputs(source: pq.ParquetFile, encoder: Encoder, passages: Path) -> Iterator[list[TextInput]]:
    try:
        for batch in source.iter_batches(encoder.window, columns=["title", "text"], use_threads=False):
            titles, texts = (batch.column(name).to_pylist() for name in ("title", "text"))
            yield [encoder.spec.passage(title, text) for title, text in zip(titles, texts, strict=True)]
    except (OSError, KeyError, pa.ArrowException) as broken:
        raise InputError(f"passages file {passages} can not be read ({broken}): make it again") from broken
