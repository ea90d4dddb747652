"""Token vectors of a part: row i of the file belongs to row i of the passages.

As in `embed`, a passage that an earlier build encoded keeps its vectors, and only the others are encoded. One batch of
passages and vectors is held in memory.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rag_model.corpus.token_file import ROWS, TokenFile, TokenVectors, TokenWriter, is_token_file
from rag_model.corpus.passages import hashes_of, unreadable
from rag_model.encoders.embed import Dtype, EmbedFacts, open_passages

if TYPE_CHECKING:
    from rag_model.encoders.token_encoder import TokenEncoder

_NONE = -1
Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Known:
    """Where the vectors of passages lie that were encoded before."""

    files: Sequence[TokenFile]
    file: Places  # (n,) number of the file; -1: none has the passage
    row: Places  # (n,) row in it


def embed_tokens(
    passages: Path,
    out: Path,
    encoder: "Callable[[], TokenEncoder]",
    dim: int,
    dtype: Dtype,
    earlier: Sequence[tuple[Path, Path]] = (),
) -> EmbedFacts:
    """Write the token vectors of the passages in Parquet file `passages` to `out`.

    `earlier` are pairs of passages and their token vectors, of the same encoder space; those of another `dtype` are
    ignored. `encoder` is called only if there is something to encode.

    Raises:
        InputError: a file is missing or corrupt, or a vector is not finite.
    """
    known, loaded = _known(passages, earlier, dim, dtype), cache(encoder)
    encoded = tokens = 0
    with TokenWriter(out, dim, dtype) as writer:
        for first, titles, texts in _batches(passages):
            batch, new = _batch(known, slice(first, first + len(titles)), titles, texts, loaded)
            writer.write(batch)
            encoded += len(new)
            tokens += int(np.diff(batch.offsets)[new].sum())
    device, arithmetic = loaded().arithmetic if encoded else ("", "")
    return EmbedFacts(len(known.file), dim, encoded, tokens, device, arithmetic)


def count_known_tokens(passages: Path, earlier: Sequence[tuple[Path, Path]], dim: int, dtype: Dtype) -> int:
    """Return how many passages would keep the token vectors of `earlier`.

    Raises:
        InputError: a file cannot be read.
    """
    return int((_known(passages, earlier, dim, dtype).file != _NONE).sum())


def _known(passages: Path, earlier: Sequence[tuple[Path, Path]], dim: int, dtype: Dtype) -> _Known:
    hashes = hashes_of(passages)
    found = _Known([], np.full(len(hashes), _NONE), np.zeros(len(hashes), np.int64))
    files: list[TokenFile] = []
    for before, path in earlier:
        file = TokenFile(path) if is_token_file(path) else None
        if file is None or (file.dim, file.dtype) != (dim, np.dtype(dtype)):
            continue
        place = pc.index_in(hashes, value_set=hashes_of(before)).fill_null(file.n).to_numpy()
        there = (place < file.n) & (found.file == _NONE)
        found.file[there], found.row[there] = len(files), place[there]
        files.append(file)
    return _Known(files, found.file, found.row)


def _batch(
    known: _Known,
    rows: slice,
    titles: Sequence[str],
    texts: Sequence[str],
    encoder: "Callable[[], TokenEncoder]",
) -> tuple[TokenVectors, Places]:
    """Return the vectors of a batch of passages, and which of them were encoded."""
    source, place = known.file[rows], known.row[rows]
    pieces, owners = list[TokenVectors](), list[Places]()
    for number, file in enumerate(known.files):
        own = np.flatnonzero(source == number)
        own = own[np.argsort(place[own], kind="stable")]
        pieces.append(file.take(place[own]))
        owners.append(own)
    new = np.flatnonzero(source == _NONE)
    if len(new):
        some = new.tolist()
        pieces.append(encoder().encode_passages([titles[row] for row in some], [texts[row] for row in some]))
        owners.append(new)
    order = np.argsort(np.concatenate(owners), kind="stable")
    return TokenVectors.joined(pieces).take(order), new


def _batches(passages: Path) -> Iterator[tuple[int, list[str], list[str]]]:
    """Yield (first row, titles, texts)."""
    first = 0
    with open_passages(passages) as source:
        try:
            for batch in source.iter_batches(ROWS, columns=["title", "text"], use_threads=False):
                yield first, batch.column("title").to_pylist(), batch.column("text").to_pylist()
                first += len(batch)
        except (OSError, KeyError, pa.ArrowException) as broken:
            raise unreadable(passages, broken) from broken
