"""Write the file of an index of terms: what makes the lists says what they are, batch by batch."""

import mmap
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import numpy as np
import numpy.typing as npt

from rag_model.errors import ResourceError
from rag_model.index.files.pieces import Array
from rag_model.index.plan import Facts
from rag_model.index.postings.dictionary import DictionaryWriter
from rag_model.index.postings.file import AT_LENGTHS, Layout
from rag_model.index.postings.packing import PADDING

Ints = npt.NDArray[np.int64]
Written = tuple[npt.NDArray[np.uint8], Ints, Ints, Ints]  # terms end to end; of each its end, postings, bytes of list


def write_index(
    out: Path, lengths: Iterable[Array], lists: Callable[[Array, IO[bytes]], Iterator[Written]], scale: int = 0
) -> Facts:
    """Write an index file.

    Args:
        out: the file.
        lengths: uint16 lengths of all passages, in row order.
        lists: given the (n,) lengths of all passages, mapped, and a file, writes there the lists of all terms, in
            order, and yields the terms of what it has written.
        scale: as of `file.Layout`.

    Raises:
        ResourceError: the file cannot be written.
    """
    try:
        with out.open("w+b") as file:
            layout = replace(_written(file, lengths, lists), scale=scale)
            file.seek(0)
            file.write(layout.pack())
    except OSError as failed:
        raise ResourceError(f"cannot write {out}: {failed.strerror}") from failed
    return {"rows": layout.n, "terms": layout.terms, "postings": layout.postings, "bytes": layout.size}


def _written(
    file: IO[bytes], lengths: Iterable[Array], lists: Callable[[Array, IO[bytes]], Iterator[Written]]
) -> Layout:
    file.seek(AT_LENGTHS)
    n, total, postings, words = 0, 0, 0, DictionaryWriter()
    for some in lengths:
        n, total = n + len(some), total + int(some.sum(dtype=np.int64))
        file.write(some.tobytes())
    _pad(file)
    file.flush()
    at_lists = file.tell()
    mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), "<u2", n, AT_LENGTHS)
    with ExitStack() as stack:
        terms, groups = (stack.enter_context(TemporaryFile(dir=Path(file.name).parent)) for _ in range(2))
        for text, ends, counts, sizes in lists(mapped, file):
            told = words.put(text, ends, counts, sizes)
            terms.write(told[0])
            groups.write(told[1])
            postings += int(counts.sum())
        size = file.tell() - at_lists
        file.write(bytes(PADDING))
        sizes_written = [_append(file, kept) for kept in (terms, groups)]
    return Layout(n, words.terms, postings, total, size, sizes_written[0], sizes_written[1] // 16)


def _append(file: IO[bytes], kept: IO[bytes]) -> int:
    """Append a temporary file at a multiple of 8; return its bytes."""
    _pad(file)
    size = kept.tell()
    kept.seek(0)
    shutil.copyfileobj(kept, file)
    return size


def _pad(file: IO[bytes]) -> None:
    file.write(bytes(-file.tell() % 8))
