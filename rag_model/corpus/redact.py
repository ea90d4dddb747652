"""Remove pages from parts: find the parts that may contain a page, and write them without it.

A redacted part has the same bytes as one that is chunked without the pages (`rag_model.corpus.chunk`), so that a
later build reuses its files. One from before passages had dates stays without them, as the other parts of its snapshot.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rag_model.corpus.documents import place_of
from rag_model.corpus.lineage import redact_log
from rag_model.corpus.passages import PassageFile, PassageWriter
from rag_model.corpus.ragged_file import ROWS
from rag_model.corpus.span_file import SpanFile
from rag_model.corpus.sparse_file import SparseFile, SparseWriter, is_sparse_file
from rag_model.corpus.token_file import TokenFile, TokenWriter, is_token_file


def may_hold(kind: str, first_page: int, last_page: int, page: str) -> bool:
    """Whether a part with these bounds (inclusive) of a corpus of that kind may contain a page, by its id."""
    if kind == "wiki":
        return page.isascii() and page.isdecimal() and first_page <= int(page) <= last_page
    if kind == "documents":
        return first_page <= place_of(page) <= last_page
    return True  # ready-made passages have titles as page ids, which do not determine the part


def pages_within(kind: str, first_page: int, last_page: int, pages: Iterable[str]) -> tuple[str, ...]:
    """Return the pages that a part may contain, sorted."""
    return tuple(sorted(page for page in pages if may_hold(kind, first_page, last_page, page)))


@dataclass(frozen=True, slots=True)
class PartFiles:
    """The local files of a part: its passages and, if there are any, its vectors, its article log and its spans."""

    passages: Path
    vectors: Mapping[str, Path] = field(
        default_factory=dict
    )  # by name, a vector a passage, many, or terms; row i: passage i
    articles: Path | None = None
    spans: Path | None = None


def redact_part(part: PartFiles, pages: Collection[str], folder: Path) -> tuple[PartFiles, int]:
    """Write a part's files without some pages into `folder`; return them, and the number of rows left.

    Row i of the vectors still belongs to passage i. One part's vectors are in memory.

    Raises:
        InputError: a file is damaged.
    """
    out = PartFiles(
        folder / "passages.parquet",
        {name: folder / f"{name}.vectors" for name in part.vectors},
        part.articles and folder / "articles.parquet",
        part.spans and folder / "spans.npy",
    )
    kept = _redact_passages(part.passages, pages, out.passages)
    for name, path in part.vectors.items():
        _redact_vectors(path, np.array(kept, np.int64), out.vectors[name])
    if part.articles and out.articles:
        redact_log(part.articles, pages, out.articles)
    if part.spans and out.spans:
        SpanFile(part.spans).keep(kept, out.spans)
    return out, len(kept)


def _redact_vectors(source: Path, kept: NDArray[np.int64], out: Path) -> None:
    """Write the rows of the passages that are kept: a vector each, many, or weighted terms."""
    if is_token_file(source):
        tokens = TokenFile(source)
        with TokenWriter(out, tokens.dim, tokens.dtype.name) as writer:
            for first in range(0, len(kept), ROWS):
                writer.write(tokens.take(kept[first : first + ROWS]))
    elif is_sparse_file(source):
        terms = SparseFile(source)
        with SparseWriter(out, terms.dim, terms.scale) as sparse:
            for first in range(0, len(kept), ROWS):
                sparse.write(terms.take(kept[first : first + ROWS]))
    else:
        vectors = np.load(source, mmap_mode="r", allow_pickle=False)
        with out.open("wb") as file:
            np.save(file, vectors[kept], allow_pickle=False)


def _redact_passages(source: Path, pages: Collection[str], out: Path) -> list[int]:
    """Write the passages that are kept, and return their rows."""
    kept = []
    with PassageFile(source) as file, PassageWriter(out, dated=file.dated) as writer:
        for row, passage in enumerate(file.passages()):
            if passage.page_id not in pages:
                kept.append(row)
                writer.write(passage)
    return kept
