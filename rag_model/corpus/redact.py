"""Remove pages from parts: find the parts that may contain a page, and write them without the page.

A redacted part has the same bytes as a part that was chunked without the pages
(`rag_model.corpus.chunk`), so a later build can reuse its files. A part that an earlier version
wrote without dates stays without dates, like the other parts of its snapshot.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rag_model.corpus.article_log import redact_log
from rag_model.corpus.passages import PassageFile, PassageWriter
from rag_model.corpus.ragged_file import (
    BATCH_ROWS,
    RaggedFile,
    RaggedWriter,
    RowsT,
    SparseFile,
    SparseWriter,
    TokenFile,
    TokenWriter,
    is_sparse_file,
    is_token_file,
)
from rag_model.corpus.records import hash_id
from rag_model.corpus.salient_spans import SpanFile


def may_contain(kind: str, first_page: int, last_page: int, page_id: str) -> bool:
    """Return whether a part with these bounds (inclusive) may contain the page with this id."""
    if kind == "wiki":
        return page_id.isascii() and page_id.isdecimal() and first_page <= int(page_id) <= last_page
    if kind == "documents":
        return first_page <= hash_id(page_id) <= last_page
    return True  # page ids of ready-made passages are titles, which do not determine the part


def select_pages(kind: str, first_page: int, last_page: int, page_ids: Iterable[str]) -> tuple[str, ...]:
    """Return the ids of those pages that a part may contain, sorted."""
    return tuple(sorted(page_id for page_id in page_ids if may_contain(kind, first_page, last_page, page_id)))


@dataclass(frozen=True, slots=True)
class PartFiles:
    """The local files of a part: passages and, if present, vectors, article log and spans."""

    passages: Path
    # Name of a representation -> its file of vectors, token vectors or weighted terms; row i
    # belongs to passage i.
    vectors: Mapping[str, Path] = field(default_factory=dict)
    articles: Path | None = None
    spans: Path | None = None


def redact_part(part: PartFiles, page_ids: Collection[str], folder: Path) -> tuple[PartFiles, int]:
    """Write a part's files without these pages; return the new files and their number of rows.

    Row i of the vectors still belongs to passage i. The vectors of one part are in memory.

    Raises:
        InputError: A file is damaged.
    """
    redacted_files = PartFiles(
        folder / "passages.parquet",
        {name: folder / f"{name}.vectors" for name in part.vectors},
        part.articles and folder / "articles.parquet",
        part.spans and folder / "spans.npy",
    )
    kept_rows = _redact_passages(part.passages, page_ids, redacted_files.passages)
    for name, path in part.vectors.items():
        _redact_vectors(path, np.array(kept_rows, np.int64), redacted_files.vectors[name])
    if part.articles and redacted_files.articles:
        redact_log(part.articles, page_ids, redacted_files.articles)
    if part.spans and redacted_files.spans:
        SpanFile(part.spans).write_rows(kept_rows, redacted_files.spans)
    return redacted_files, len(kept_rows)


def _redact_vectors(source: Path, kept_rows: NDArray[np.int64], out: Path) -> None:
    """Write the vectors, token vectors or weighted terms of the kept passages."""
    if is_token_file(source):
        token_file = TokenFile(source)
        _copy_rows(token_file, kept_rows, TokenWriter(out, token_file.dim, token_file.dtype.name))
    elif is_sparse_file(source):
        sparse_file = SparseFile(source)
        _copy_rows(sparse_file, kept_rows, SparseWriter(out, sparse_file.dim, sparse_file.scale))
    else:
        vectors = np.load(source, mmap_mode="r", allow_pickle=False)
        with out.open("wb") as file:
            np.save(file, vectors[kept_rows], allow_pickle=False)


def _copy_rows(source: RaggedFile[RowsT], row_numbers: NDArray[np.int64], writer: RaggedWriter[RowsT]) -> None:
    with writer:
        for first_row in range(0, len(row_numbers), BATCH_ROWS):
            writer.write(source.take(row_numbers[first_row : first_row + BATCH_ROWS]))


def _redact_passages(source: Path, page_ids: Collection[str], out: Path) -> list[int]:
    """Write the passages of all other pages, and return their rows."""
    kept_rows = []
    with PassageFile(source) as file, PassageWriter(out, file.schema) as writer:
        for row_number, passage in enumerate(file.iter_passages()):
            if passage.page_id not in page_ids:
                kept_rows.append(row_number)
                writer.write(passage)
    return kept_rows
