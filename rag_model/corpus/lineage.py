"""Record the outcome of each article of a part, so that the next dump's build need not parse it again.

An article is found by a key of all that decides its passages: its revision with its time, title and wikitext, and the
recipe, siteinfo and code of the chunker. The text is part of the key, because it can change under one `rev_id`: dumps
are edited by hand and revisions are suppressed. Hashing costs a hundredth of parsing. So no invalidation is necessary:
another recipe gives other keys; another folder, store or number of workers gives the same keys.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rag_model.corpus.passages import ROW_GROUP, PassageFile
from rag_model.corpus.records import Page, Passage, Siteinfo
from rag_model.corpus.salient import Salient
from rag_model.corpus.span_file import SpanFile
from rag_model.digest import digest_json
from rag_model.errors import InputError
from rag_model.landing import landing
from rag_model.parquet_pages import PagesError, check_groups

_KEY = 16  # bytes of SHA-256: a key is only compared within one page id
_FIELDS = [("page_id", pa.int64()), ("key", pa.binary(_KEY)), ("passages", pa.int32()), ("reason", pa.string())]
_ELSEWHERE = {"chunker", "words", "quarantine_share", "quarantine_floor"}  # are in the key elsewhere, or must not be
ARTICLE_SCHEMA = pa.schema([pa.field(name, kind, nullable=False) for name, kind in _FIELDS])


@dataclass(frozen=True, slots=True)
class ArticleOutcome:
    """The outcome of an article: its passages (none if it has no text), or the reason why it could not be parsed."""

    passages: Sequence[Passage]
    reason: str = ""
    spans: Sequence[Sequence[Salient]] = ()  # of each passage, where the recipe keeps them


def cutting_basis(siteinfo: Siteinfo, cut_by: Mapping[str, Any], version: int) -> bytes:
    """Return the settings that all articles of a part are chunked by, as the first bytes of every key.

    `cut_by` is the identity of a chunk recipe. Its quarantine bounds decide no passage and are left out.
    """
    rest = {name: value for name, value in cut_by.items() if name not in _ELSEWHERE}
    others = [rest] if rest else []  # empty adds nothing, so that keys of earlier logs are still valid
    return digest_json([asdict(siteinfo), cut_by["chunker"], cut_by.get("words"), version, *others]).encode()


def article_key(basis: bytes, page: Page) -> bytes:
    """Return the 16-byte key of all that decides an article's passages."""
    running = hashlib.sha256(basis)
    for field in (str(page.page_id), str(page.rev_id), str(page.revised), page.title):
        running.update(field.encode() + b"\0")
    running.update(page.text.encode())
    return running.digest()[:_KEY]


class ArticleLog:
    """Write the outcomes of the articles of a part, in their order: about 30 bytes each."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, bytes, int, str]] = []

    def note(self, page: Page, key: bytes, outcome: ArticleOutcome) -> None:
        """Append one article."""
        self._rows.append((page.page_id, key, len(outcome.passages), outcome.reason))

    def save(self, path: Path) -> None:
        """Write the Parquet file."""
        columns = zip(*self._rows, strict=True) if self._rows else [()] * len(ARTICLE_SCHEMA)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, ARTICLE_SCHEMA, strict=True)]
        _write(pa.Table.from_arrays(arrays, schema=ARTICLE_SCHEMA), path)


def redact_log(articles: Path, pages: Collection[str], out: Path) -> None:
    """Write a copy of an article log without some pages.

    Raises:
        InputError: the log is damaged.
    """
    log = _read(articles)
    kept = [str(page) not in pages for page in log["page_id"].to_pylist()]
    _write(log.filter(pa.array(kept, pa.bool_())).cast(ARTICLE_SCHEMA).combine_chunks(), out)


@dataclass(frozen=True, slots=True)
class _Place:
    key: bytes
    file: PassageFile
    start: int  # row
    count: int
    reason: str
    spans: SpanFile | None = None


class Inheritance:
    """The outcomes of earlier parts' articles, which are inherited by articles with the same key."""

    def __init__(self, parts: Sequence[tuple[Path, ...]] = ()) -> None:
        """Open the passages and the article log of each part, and its spans if there are any; what does not match is
        left out.

        Raises:
            InputError: a file is not Parquet, or lacks a column.
        """
        self._files: list[PassageFile] = []
        self._places: dict[int, _Place] = {}
        self._held: tuple[PassageFile, int, list[Passage]] | None = None
        for passages, articles, *spans in parts:
            self._index(PassageFile(passages), _read(articles), SpanFile(spans[0]) if spans else None)

    def get(self, page: Page, key: bytes) -> ArticleOutcome | None:
        """Return the earlier outcome of an article, or None if there is none with this key."""
        place = self._places.get(page.page_id)
        if place is None or place.key != key:
            return None
        rows = self._rows(place)
        fits = all(passage.page_id == str(page.page_id) for passage in rows)
        spans = place.spans.between(place.start, place.start + place.count) if place.spans else ()
        return ArticleOutcome(rows, place.reason, spans) if fits else None

    def _index(self, file: PassageFile, log: pa.Table, spans: SpanFile | None) -> None:
        self._files.append(file)
        counts = log["passages"].to_numpy()
        # A page was removed from the passages since; or an earlier bookwheel did that, and wrote them without dates.
        if counts.sum() != file.n_rows or not file.dated:
            return
        starts = (np.cumsum(counts) - counts).tolist()
        pages, keys, reasons = (log[name].to_pylist() for name in ("page_id", "key", "reason"))
        for page, key, start, count, reason in zip(pages, keys, starts, counts.tolist(), reasons, strict=True):
            self._places[page] = _Place(key, file, start, count, reason, spans)

    def _rows(self, place: _Place) -> list[Passage]:
        rows: list[Passage] = []
        for block in range(place.start // ROW_GROUP, -(-(place.start + place.count) // ROW_GROUP)):
            first = block * ROW_GROUP
            rows += self._block(place.file, first)[max(0, place.start - first) : place.start + place.count - first]
        return rows

    def _block(self, file: PassageFile, first: int) -> list[Passage]:
        """Return the passages of a row group; the last group is cached, since articles come in row order."""
        if self._held is None or self._held[:2] != (file, first):
            rows = range(first, min(first + ROW_GROUP, file.n_rows))
            self._held = (file, first, file.rows(rows))
        return self._held[2]

    def __enter__(self) -> Self:
        """Close on leaving."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


def _write(log: pa.Table, path: Path) -> None:
    with landing(path) as temporary:
        pq.write_table(
            log, temporary, compression="zstd", store_schema=False, use_dictionary=False, write_statistics=False
        )


def _read(articles: Path) -> pa.Table:
    try:
        with pq.ParquetFile(articles) as file:
            check_groups(articles, file, ARTICLE_SCHEMA.names, articles.stat().st_size)
            return file.read(ARTICLE_SCHEMA.names, use_threads=False)
    except (PagesError, OSError, KeyError, pa.ArrowException) as broken:
        raise InputError(f"{articles} is not a readable article log ({broken}): build without it") from broken
