"""Log the result of each article of a part, so that the build of the next dump can reuse it.

The key of an article is a digest of everything in a build that its passages depend on: its revision
with time, title and wikitext, the recipe, and the siteinfo. The text is part of the key because it
can change under the same `rev_id`: dumps are edited by hand, and revisions are suppressed. Hashing
a page takes a hundredth of the time of parsing it. A change of the recipe changes the keys, whereas
the folder, the store and the number of workers do not. A build does not use the logs of a snapshot
that another version of the chunking code built (`Parent.find_chunked_parts`).

The key of a wiki page is a hash of the page's XML element in the dump. A page that the log already
has is therefore not even parsed as XML. The log also contains dropped pages, such as redirects, for
the same reason.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import compress, repeat
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rag_model.atomic_write import atomic_write
from rag_model.corpus.markup.template_table import NO_TEMPLATES, TemplateTable
from rag_model.corpus.metadata import format_metadata
from rag_model.corpus.passages import ARTICLE_DIGEST_BYTES, PassageFile, to_passages
from rag_model.corpus.records import NO_METADATA, Article, Metadata, Page, Passage, Siteinfo
from rag_model.corpus.salient_spans import SalientSpan, SpanFile
from rag_model.digest import canonical_json, digest_json
from rag_model.errors import InputError
from rag_model.parquet_pages import ParquetError, check_row_groups

# Increase it when the columns or the keys of logs change; earlier logs can still be read.
ARTICLE_LOG_VERSION = 4
_KEY_BYTES = 16  # first bytes of the SHA-256 digest
_FIRST_COLUMNS = [
    ("page_id", pa.string()),
    ("key", pa.binary(_KEY_BYTES)),
    ("passages", pa.int32()),
    ("reason", pa.string()),  # why the page could not be parsed; empty if it could
]
_LATER_COLUMNS = [  # columns that may be missing in logs of earlier versions
    ("digest", pa.binary(ARTICLE_DIGEST_BYTES)),  # digest of the article's passages
    ("dropped", pa.string()),  # why the page is not an article
    ("revised", pa.int64()),  # seconds since 1970, UTC
    ("templates", pa.string()),  # names of the page's unknown templates, joined by `|`
    ("template_digest", pa.binary()),  # digest of the wiki's definitions of these templates
]
# `compute_key_basis` adds the first two by themselves; the other two do not affect passages.
_EXCLUDED_SETTINGS = {"chunker", "words", "quarantine_share", "quarantine_floor"}
ARTICLE_SCHEMA = pa.schema(
    [pa.field(name, kind, nullable=name == "revised") for name, kind in [*_FIRST_COLUMNS, *_LATER_COLUMNS]]
)


# Frozen instances take ten times as long to create, and there is one instance per page.
@dataclass(slots=True)
class StoredArticle:
    """The passages of an article as consecutive rows of a passage file, with their digest."""

    file: PassageFile
    first_row: int
    n_rows: int
    digest: bytes


@dataclass(slots=True)
class ArticleResult:
    """The passages of an article, or the reason why the page was dropped or could not be parsed."""

    passages: Sequence[Passage] = ()
    reason: str = ""  # why the page could not be parsed
    dropped: str = ""  # why the page is not an article
    spans: Sequence[Sequence[SalientSpan]] = ()  # spans of each passage, if the recipe stores them
    stored: StoredArticle | None = None  # the passages as rows of an earlier file
    templates: tuple[str, ...] = ()  # names of unknown templates that the page uses

    @property
    def n_passages(self) -> int:
        """The number of passages."""
        return len(self.passages) if self.stored is None else self.stored.n_rows


def compute_key_basis(siteinfo: Siteinfo, recipe_identity: Mapping[str, Any], version: int) -> bytes:
    """Return the digest of a part's settings and siteinfo, which enters the key of each article.

    `recipe_identity` is the identity of a chunk recipe. The recipe's quarantine limits are excluded
    because they do not affect passages.
    """
    key_settings = {name: value for name, value in recipe_identity.items() if name not in _EXCLUDED_SETTINGS}
    # If there are no other settings, nothing is added for them: keys of earlier logs stay valid.
    extra_settings = [key_settings] if key_settings else []
    return digest_json(
        [asdict(siteinfo), recipe_identity["chunker"], recipe_identity.get("words"), version, *extra_settings]
    ).encode()


def compute_article_key(key_basis: bytes, article: Page | Article, *, with_metadata: bool = False) -> bytes:
    """Return the 16-byte key of a document, or of a page whose XML element is unknown.

    The metadata of a document are part of the key only if `with_metadata` is set. The metadata of a
    page are always part of the key, because only pages staged by `page_lines` have metadata.
    """
    hasher = hashlib.sha256(key_basis)
    for field in (str(article.page_id), str(article.rev_id), str(article.revised), article.title):
        # A NUL in a document's id or title must not be mistaken for the end of the field.
        hasher.update(field.replace("\0", "\0\1").encode() + b"\0")
    if isinstance(article, Page):
        hasher.update(article.text.encode())
    else:
        sections = [(section.heading, section.text, section.links) for section in article.sections]
        hasher.update(canonical_json([sections, "lines"] if article.keeps_lines else sections))
    if (with_metadata or isinstance(article, Page)) and article.metadata != NO_METADATA:
        hasher.update(format_metadata(article.metadata).encode())
    return hasher.digest()[:_KEY_BYTES]


def compute_element_key(key_basis: bytes, element: bytes, metadata: Metadata = NO_METADATA) -> bytes:
    """Return the 16-byte key of a page, given its XML element and its page-table metadata."""
    hasher = hashlib.sha256(key_basis)
    hasher.update(element)
    if metadata is not NO_METADATA and metadata != NO_METADATA:
        hasher.update(format_metadata(metadata).encode())
    return hasher.digest()[:_KEY_BYTES]


class ArticleLog:
    """Collect one row of about 60 bytes for each article of a part, in order."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, bytes, int, str, bytes, str, int | None, str, bytes]] = []

    def record(
        self,
        page_id: str,
        key: bytes,
        result: ArticleResult,
        digest: bytes,
        revised: int | None = None,
        template_digest: bytes = b"",
    ) -> None:
        """Append one article or dropped page, with the digests of its passages and templates."""
        templates = "|".join(result.templates), template_digest
        self._rows.append((page_id, key, result.n_passages, result.reason, digest, result.dropped, revised, *templates))

    def save(self, path: Path) -> None:
        """Write the log to a Parquet file."""
        columns = zip(*self._rows, strict=True) if self._rows else [()] * len(ARTICLE_SCHEMA)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, ARTICLE_SCHEMA, strict=True)]
        _write_log(pa.Table.from_arrays(arrays, schema=ARTICLE_SCHEMA), path)


def redact_log(log_path: Path, page_ids: Collection[str], out: Path) -> None:
    """Write a copy of an article log without the pages with these ids.

    Raises:
        InputError: The log is damaged.
    """
    log_table = _read_log(log_path)
    keep_mask = [page_id not in page_ids for page_id in log_table["page_id"].to_pylist()]
    schema = pa.schema([field for field in ARTICLE_SCHEMA if field.name in log_table.column_names])
    _write_log(log_table.filter(pa.array(keep_mask, pa.bool_())).cast(schema).combine_chunks(), out)


@dataclass(slots=True)
class _LoggedArticle:
    page_id: str
    first_row: int  # of its passages
    n_rows: int  # number of its passages
    reason: str  # why the page could not be parsed
    digest: bytes  # digest of its passages; empty in logs of earlier versions
    dropped: str  # why the page is not an article
    revised: int | None
    templates: str
    template_digest: bytes
    file: PassageFile
    spans: SpanFile | None


class ReusableArticles:
    """Results of articles that an earlier build chunked, looked up by the key of the article."""

    def __init__(self, parts: Sequence[tuple[Path, ...]] = (), template_table: TemplateTable = NO_TEMPLATES) -> None:
        """Open the passages, the article log and the optional spans of each part.

        A part is skipped if its log does not match its passages. An article is not reused if
        `template_table` has a different entry for one of its templates.

        Raises:
            InputError: A file is not Parquet, or a column is missing.
        """
        self._table = template_table
        self._files: list[PassageFile] = []
        self._articles: dict[bytes, _LoggedArticle] = {}  # by key
        for passages, log, *spans in parts:
            self._add_part(PassageFile(passages), _read_log(log), SpanFile(spans[0]) if spans else None)

    def find(self, key: bytes, *, with_spans: bool = False) -> ArticleResult | None:
        """Return the earlier result of an article, or None if there is none with this key.

        If `with_spans` is set, only articles with stored spans are returned.
        """
        article = self._find_article(key, with_spans=with_spans)
        if article is None:
            return None
        names = _split_names(article.templates)
        end_row = article.first_row + article.n_rows
        spans = article.spans.get_range(article.first_row, end_row) if article.spans else ()
        if article.digest:
            stored = StoredArticle(article.file, article.first_row, article.n_rows, article.digest)
            return ArticleResult((), article.reason, article.dropped, spans, stored, names)
        passages = to_passages(article.file.iter_tables(article.first_row, end_row))
        return ArticleResult(passages, article.reason, article.dropped, spans, templates=names)

    def find_page(self, key: bytes, *, with_spans: bool = False) -> Page | None:
        """Return a logged page with only its id, time and key; `find` returns its passages.

        Return None for a page that could not be parsed, because the log does not contain its title.
        """
        article = self._find_article(key, with_spans=with_spans)
        if article is None or article.reason:
            return None
        return Page(int(article.page_id), 0, article.revised, 0, "", False, "", "", key)

    def _find_article(self, key: bytes, *, with_spans: bool) -> _LoggedArticle | None:
        article = self._articles.get(key)
        if article is None or (with_spans and article.spans is None):
            return None
        digest = self._table.compute_digest(_split_names(article.templates)) if article.templates else b""
        return article if digest == article.template_digest else None

    def _add_part(self, file: PassageFile, log: pa.Table, spans: SpanFile | None) -> None:
        self._files.append(file)
        passage_counts = log["passages"].to_numpy()
        # Skip the part if the log counts more passages than the file has, because a page was
        # removed from it, or if the file has no dates, because an earlier version wrote it.
        if passage_counts.sum() != file.n_rows or not file.has_dates:
            return
        start_rows = np.cumsum(passage_counts) - passage_counts
        page_ids = log["page_id"].to_pylist()
        consistent_mask = _find_consistent_articles(file, page_ids, start_rows, passage_counts)
        keys, reasons = (log[name].to_pylist() for name in ("key", "reason"))
        later_columns: list[list[Any]] = [
            log[name].to_pylist() if name in log.column_names else [default] * len(page_ids)
            for (name, _), default in zip(_LATER_COLUMNS, (b"", "", None, "", b""), strict=True)
        ]
        columns = page_ids, start_rows.tolist(), passage_counts.tolist(), reasons, *later_columns
        articles = map(_LoggedArticle, *columns, repeat(file), repeat(spans))
        self._articles.update(compress(zip(keys, articles, strict=True), consistent_mask.tolist()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


def _split_names(names: str) -> tuple[str, ...]:
    return tuple(names.split("|")) if names else ()


def _find_consistent_articles(
    file: PassageFile, page_ids: Sequence[Any], start_rows: npt.NDArray[Any], row_counts: npt.NDArray[Any]
) -> npt.NDArray[np.bool_]:
    """Return (n,) booleans: for each article, whether all passages in its rows have its page id."""
    id_columns = [batch.column(0) for batch in file.iter_batches(["page_id"])]
    page_index = pc.index_in(pa.chunked_array(id_columns, pa.string()), value_set=pa.array(page_ids, pa.string()))
    is_own_row = page_index.fill_null(-1).to_numpy() == np.repeat(np.arange(len(page_ids)), row_counts)
    n_own_before = np.concatenate([[0], np.cumsum(is_own_row)])
    is_complete: npt.NDArray[np.bool_] = n_own_before[start_rows + row_counts] - n_own_before[start_rows] == row_counts
    return is_complete


def _write_log(log: pa.Table, path: Path) -> None:
    """Write a log from the first to the last article with passages, without the rows outside.

    A part without passages is left out of a snapshot, and the next build adds its page range to the
    neighbouring parts. Its dropped pages must not change the logs of the neighbours.
    """
    rows = np.flatnonzero(log["passages"].to_numpy())
    log = log.slice(rows[0], rows[-1] + 1 - rows[0]) if len(rows) else log.slice(0, 0)
    with atomic_write(path) as temporary:
        pq.write_table(
            log, temporary, compression="zstd", store_schema=False, use_dictionary=False, write_statistics=False
        )


def _read_log(path: Path) -> pa.Table:
    try:
        with pq.ParquetFile(path) as file:
            later_columns = [name for name, _ in _LATER_COLUMNS if name in file.schema_arrow.names]
            column_names = [name for name, _ in _FIRST_COLUMNS] + later_columns
            check_row_groups(path, file, column_names, path.stat().st_size)
            log = file.read(column_names, use_threads=False)
            # Earlier versions stored page ids as numbers.
            return log.set_column(0, "page_id", log["page_id"].cast(pa.string()))
    except (ParquetError, OSError, KeyError, pa.ArrowException) as error:
        raise InputError(f"{path} is not a readable article log ({error}): build without it") from error
