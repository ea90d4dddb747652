"""One part's passages to its vectors: Parquet in, `.npy` out, row i of one is row i of the other.

Nothing is held but a window of rows, so a worker's memory does not grow with its part.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import pyarrow.parquet as pq

from rag_model.encoders.encoder import WINDOW, Encoder
from rag_model.errors import InputError

Dtype = Literal["float16", "float32"]


@dataclass(frozen=True, slots=True)
class EmbedFacts:
    """What came of one part."""

    rows: int
    dim: int


def embed_part(passages: Path, out: Path, encoder: Encoder, dtype: Dtype = "float16") -> EmbedFacts:
    """Write the vectors of the passages in Parquet file `passages` to `out`, an (n, d) `.npy` of `dtype`, C order.

    Raises:
        InputError: `passages` is no Parquet file of passages, or its rows are not as many as its footer says.
    """
    try:
        source = pq.ParquetFile(passages)
        rows, done = source.metadata.num_rows, 0
        with out.open("wb") as file:
            _write_header(file, (rows, encoder.dim), np.dtype(dtype))
            for batch in source.iter_batches(WINDOW, columns=["title", "text"]):
                columns = batch.to_pydict()
                vectors = encoder.encode_passages(columns["title"], columns["text"])
                file.write(vectors.astype(dtype).tobytes())
                done += len(vectors)
    except (OSError, ValueError, KeyError) as broken:
        raise InputError(f"passages file {passages} can not be read ({broken}): make it again") from broken
    if done != rows:
        raise InputError(f"passages file {passages} has {done} rows, its footer says {rows}: make it again")
    return EmbedFacts(rows, encoder.dim)


def _write_header(file: BinaryIO, shape: tuple[int, int], dtype: np.dtype[Any]) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
