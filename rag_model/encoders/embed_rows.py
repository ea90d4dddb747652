"""Rows of any length of a part: token vectors, or weighted terms. Row i of the file belongs to row i of the passages.

As in `embed`, a passage that an earlier build encoded keeps its row, and only the others are encoded. One batch of
passages and rows is held in memory.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from rag_model.corpus.passages import PassageFile, hashes_of
from rag_model.corpus.ragged_file import ROWS
from rag_model.encoders.embed import EmbedFacts

_NONE = -1
Places = npt.NDArray[np.int64]


class Rows(Protocol):
    """The rows of m passages, end to end."""

    @property
    def offsets(self) -> Places:
        """Where each row begins, and the last one ends: (m + 1,)."""
        ...

    def __len__(self) -> int:
        """Return the number of passages."""
        ...

    def take(self, rows: Places) -> Self:
        """Return the passages at `rows`, (m,) in any order."""
        ...


R = TypeVar("R", bound=Rows)
R_co = TypeVar("R_co", bound=Rows, covariant=True)
R_contra = TypeVar("R_contra", bound=Rows, contravariant=True)


class RowFile(Protocol[R_co]):
    """A part's rows, open."""

    @property
    def n(self) -> int:
        """The number of passages."""
        ...

    def take(self, rows: Places) -> R_co:
        """Return the passages at ascending `rows`."""
        ...


class RowWriter(Protocol[R_contra]):
    """A part's rows, while they are written in row order."""

    def write(self, rows: R_contra) -> None:
        """Append passages."""
        ...


class RowEncoder(Protocol[R_co]):
    """What is needed of an encoder."""

    @property
    def arithmetic(self) -> tuple[str, str]:
        """The device and the arithmetic."""
        ...

    def encode_passages(self, titles: Sequence[str], texts: Sequence[str]) -> R_co:
        """Return the rows of passages, in order; they do not depend on one another."""
        ...


class RowForm(Protocol[R]):
    """How rows lie in files."""

    @property
    def dim(self) -> int:
        """Components of a vector, or terms of a vocabulary."""
        ...

    def open(self, path: Path) -> RowFile[R] | None:
        """Open a part's rows; None: they are of another form, and cannot be kept."""
        ...

    def writer(self, path: Path) -> AbstractContextManager[RowWriter[R]]:
        """Begin a part's file."""
        ...

    def joined(self, pieces: Sequence[R]) -> R:
        """Return the passages of all pieces, one piece after another."""
        ...


@dataclass(frozen=True, slots=True)
class _Known(Generic[R]):
    """Where the rows of passages lie that were encoded before."""

    files: Sequence[RowFile[R]]
    file: Places  # (n,) number of the file; -1: none has the passage
    row: Places  # (n,) row in it


def embed_rows(
    passages: Path,
    out: Path,
    encoder: Callable[[], RowEncoder[R]],
    form: RowForm[R],
    earlier: Sequence[tuple[Path, Path]] = (),
) -> EmbedFacts:
    """Write the rows of the passages in Parquet file `passages` to `out`.

    `earlier` are pairs of passages and their rows, of the same encoder space; those of another form are ignored.
    `encoder` is called only if there is something to encode.

    Raises:
        InputError: a file is missing or corrupt, or a number is not finite.
    """
    known, loaded = _known(passages, earlier, form), cache(encoder)
    encoded = made = 0
    with form.writer(out) as writer:
        for first, titles, texts in _batches(passages):
            batch, new = _batch(known, form, slice(first, first + len(titles)), titles, texts, loaded)
            writer.write(batch)
            encoded += len(new)
            made += int(np.diff(batch.offsets)[new].sum())
    device, arithmetic = loaded().arithmetic if encoded else ("", "")
    return EmbedFacts(len(known.file), form.dim, encoded, made, device, arithmetic)


def count_known_rows(passages: Path, earlier: Sequence[tuple[Path, Path]], form: RowForm[Any]) -> int:
    """Return how many passages would keep a row of `earlier`.

    Raises:
        InputError: a file cannot be read.
    """
    return int((_known(passages, earlier, form).file != _NONE).sum())


def _known(passages: Path, earlier: Sequence[tuple[Path, Path]], form: RowForm[R]) -> _Known[R]:
    hashes = hashes_of(passages)
    files, number, row = list[RowFile[R]](), np.full(len(hashes), _NONE), np.zeros(len(hashes), np.int64)
    for before, path in earlier:
        file = form.open(path)
        if file is None:
            continue
        place = pc.index_in(hashes, value_set=hashes_of(before)).fill_null(file.n).to_numpy()
        there = (place < file.n) & (number == _NONE)
        number[there], row[there] = len(files), place[there]
        files.append(file)
    return _Known(files, number, row)


def _batch(
    known: _Known[R],
    form: RowForm[R],
    rows: slice,
    titles: Sequence[str],
    texts: Sequence[str],
    encoder: Callable[[], RowEncoder[R]],
) -> tuple[R, Places]:
    """Return the rows of a batch of passages, and which of them were encoded."""
    source, place = known.file[rows], known.row[rows]
    pieces, owners = list[R](), list[Places]()
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
    return form.joined(pieces).take(order), new


def _batches(passages: Path) -> Iterator[tuple[int, list[str], list[str]]]:
    """Yield (first row, titles, texts)."""
    first = 0
    columns = ("title", "text")
    with PassageFile(passages, columns) as source:
        for batch in source.iter_batches(columns, ROWS):
            yield first, batch.column("title").to_pylist(), batch.column("text").to_pylist()
            first += len(batch)
