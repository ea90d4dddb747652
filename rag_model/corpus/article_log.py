"""Log the result of each article of a part, so that the build of the next dump can reuse it.

The key of an article covers everything that decides its passages: its revision with time, title and
wikitext, and the recipe, siteinfo and code of the chunker. The text is part of the key because it
can change under the same `rev_id`: dumps are edited by hand, and revisions are suppressed. Hashing
costs a hundredth of parsing. Invalidation is never necessary: another recipe gives other keys,
while another folder, store or number of workers gives the same keys.
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

from rag_model.atomic_write import atomic_write
from rag_model.corpus.passages import ROW_GROUP, PassageFile
from rag_model.corpus.records import Page, Passage, Siteinfo
from rag_model.corpus.salient_spans import SalientSpan, SpanFile
from rag_model.digest import digest_json
from rag_model.errors import InputError
from rag_model.parquet_pages import PagesError, check_groups

_KEY_BYTES = 16  # bytes of SHA-256; keys are only compared within one page id
_COLUMNS = [("page_id", pa.int64()), ("key", pa.binary(_KEY_BYTES)), ("passages", pa.int32()), ("reason", pa.string())]
_EXCLUDED_SETTINGS = {
    "chunker",
    "words",
    "quarantine_share",
    "quarantine_floor",
}  # separate entries of the key, or not part of it
ARTICLE_SCHEMA = pa.schema([pa.field(name, kind, nullable=False) for name, kind in _COLUMNS])


@dataclass(frozen=True, slots=True)
class ArticleResult:
    """The passages of an article (none if it has no text), or the reason why it is unparsable."""

    passages: Sequence[Passage]
    reason: str = ""
    spans: Sequence[Sequence[SalientSpan]] = ()  # of each passage, if the recipe stores them


def compute_key_basis(siteinfo: Siteinfo, recipe_identity: Mapping[str, Any], version: int) -> bytes:
    """Return the common start of all keys of a part: a digest of its settings and siteinfo.

    `recipe_identity` is the identity of a chunk recipe. Its quarantine limits are excluded because
    they do not affect passages.
    """
    settings = {name: value for name, value in recipe_identity.items() if name not in _EXCLUDED_SETTINGS}
    # Nothing is added if empty, so keys of earlier logs remain valid.
    extra_settings = [settings] if settings else []
    return digest_json(
        [asdict(siteinfo), recipe_identity["chunker"], recipe_identity.get("words"), version, *extra_settings]
    ).encode()


def compute_article_key(basis: bytes, page: Page) -> bytes:
    """Return the 16-byte key of an article."""
    hasher = hashlib.sha256(basis)
    for field in (str(page.page_id), str(page.rev_id), str(page.revised), page.title):
        hasher.update(field.encode() + b"\0")
    hasher.update(page.text.encode())
    return hasher.digest()[:_KEY_BYTES]


class ArticleLog:
    """Collect the results of the articles of a part in order, about 30 bytes each."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, bytes, int, str]] = []

    def record(self, page: Page, key: bytes, result: ArticleResult) -> None:
        """Append one article."""
        self._rows.append((page.page_id, key, len(result.passages), result.reason))

    def save(self, path: Path) -> None:
        """Write the Parquet file."""
        columns = zip(*self._rows, strict=True) if self._rows else [()] * len(ARTICLE_SCHEMA)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, ARTICLE_SCHEMA, strict=True)]
        _write_log(pa.Table.from_arrays(arrays, schema=ARTICLE_SCHEMA), path)


def redact_log(articles: Path, pages: Collection[str], out: Path) -> None:
    """Write a copy of an article log without the given pages.

    Raises:
        InputError: The log is damaged.
    """
    log = _read_log(articles)
    keep_mask = [str(page) not in pages for page in log["page_id"].to_pylist()]
    _write_log(log.filter(pa.array(keep_mask, pa.bool_())).cast(ARTICLE_SCHEMA).combine_chunks(), out)


@dataclass(frozen=True, slots=True)
class _LoggedArticle:
    key: bytes
    file: PassageFile
    start: int  # row
    count: int
    reason: str
    spans: SpanFile | None = None


class ReusableArticles:
    """The results of articles of earlier parts, for reuse by articles with the same key."""

    def __init__(self, parts: Sequence[tuple[Path, ...]] = ()) -> None:
        """Open passages, article log and optional spans of each part; skip files that do not match.

        Raises:
            InputError: A file is not Parquet, or lacks a column.
        """
        self._files: list[PassageFile] = []
        self._articles: dict[int, _LoggedArticle] = {}
        self._cached_group: tuple[PassageFile, int, list[Passage]] | None = None
        for passages, articles, *spans in parts:
            self._add_part(PassageFile(passages), _read_log(articles), SpanFile(spans[0]) if spans else None)

    def find(self, page: Page, key: bytes) -> ArticleResult | None:
        """Return the earlier result of an article, or None if there is none with this key."""
        article = self._articles.get(page.page_id)
        if article is None or article.key != key:
            return None
        rows = self._read_rows(article)
        matches = all(passage.page_id == str(page.page_id) for passage in rows)
        spans = article.spans.get_range(article.start, article.start + article.count) if article.spans else ()
        return ArticleResult(rows, article.reason, spans) if matches else None

    def _add_part(self, file: PassageFile, log: pa.Table, spans: SpanFile | None) -> None:
        self._files.append(file)
        counts = log["passages"].to_numpy()
        # A page was removed from the passages; or an earlier version removed it and wrote no dates.
        if counts.sum() != file.n_rows or not file.dated:
            return
        starts = (np.cumsum(counts) - counts).tolist()
        pages, keys, reasons = (log[name].to_pylist() for name in ("page_id", "key", "reason"))
        for page, key, start, count, reason in zip(pages, keys, starts, counts.tolist(), reasons, strict=True):
            self._articles[page] = _LoggedArticle(key, file, start, count, reason, spans)

    def _read_rows(self, article: _LoggedArticle) -> list[Passage]:
        rows: list[Passage] = []
        for group in range(article.start // ROW_GROUP, -(-(article.start + article.count) // ROW_GROUP)):
            first = group * ROW_GROUP
            rows += self._read_row_group(article.file, first)[
                max(0, article.start - first) : article.start + article.count - first
            ]
        return rows

    def _read_row_group(self, file: PassageFile, first: int) -> list[Passage]:
        """Return the passages of a row group; the last one is cached."""
        if self._cached_group is None or self._cached_group[:2] != (file, first):
            rows = range(first, min(first + ROW_GROUP, file.n_rows))
            self._cached_group = (file, first, file.read_rows(rows))
        return self._cached_group[2]

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


def _write_log(log: pa.Table, path: Path) -> None:
    with atomic_write(path) as temporary:
        pq.write_table(
            log, temporary, compression="zstd", store_schema=False, use_dictionary=False, write_statistics=False
        )


def _read_log(articles: Path) -> pa.Table:
    try:
        with pq.ParquetFile(articles) as file:
            check_groups(articles, file, ARTICLE_SCHEMA.names, articles.stat().st_size)
            return file.read(ARTICLE_SCHEMA.names, use_threads=False)
    except (PagesError, OSError, KeyError, pa.ArrowException) as error:
        raise InputError(f"{articles} is not a readable article log ({error}): build without it") from error
