"""Read wiki dumps with one JSON page per line: Wikimedia Enterprise and CirrusSearch.

The pages of these dumps are in no particular order. Planning sorts them by page id on disk, in
bounded memory, and stages them as the elements of an export. Therefore a worker reads only the
pages of its part, and later builds reuse unchanged pages.
"""

import heapq
import re
import secrets
import struct
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa

from rag_model.corpus.articles import get_namespace_aliases, has_disambiguation_template
from rag_model.corpus.dump_formats import mediawiki
from rag_model.corpus.dump_formats.dump_format import PlanRequest
from rag_model.corpus.dump_formats.jsonl import LINES_ENDING, iter_objects
from rag_model.corpus.dump_formats.mediawiki import (
    CANONICAL_NAMESPACES,
    RenderedPages,
    XmlRun,
    format_page,
    stage_runs,
)
from rag_model.corpus.dump_formats.page_format import get_recency
from rag_model.corpus.metadata import build_metadata
from rag_model.corpus.parts import PageRun, translate_write_errors
from rag_model.corpus.records import (
    HTML_MODEL,
    MAX_TITLE,
    PLAIN_MODEL,
    Page,
    Siteinfo,
    parse_seconds,
)
from rag_model.corpus.source import basename
from rag_model.errors import InputError

MAX_SORTED_BYTES = 64 << 20  # maximum bytes of pages that are sorted in memory
MAX_MERGED_FILES = 64  # maximum files merged at once; each needs memory for a decoder and a page
_MAX_NUMBER = (1 << 63) - 1
_DISAMBIGUATION = "__DISAMBIG__"  # MediaWiki's mark; replaces the text of a disambiguation page
Row = dict[str, Any]
# Fields of an article; documents from other sources rarely have several of them.
_ENTERPRISE_FIELD = re.compile(
    rb'"(article_body|date_modified|in_language|is_part_of|main_entity|namespace|version)"\s*:'
)
_MIN_ENTERPRISE_FIELDS = 3
_WIKI_ADDRESS = re.compile(r"https?://[\w.:-]+/wiki/")
_CIRRUS_ACTION = re.compile(rb'\s*\{\s*"index"\s*:\s*\{')
_WIKIMEDIA_NAME = re.compile(
    "([a-z]{2,3}(?:_[a-z_]+)?|simple)(wiki|wiktionary|wikibooks|wikinews|wikiquote|wikisource|wikiversity|wikivoyage)"
)
_CIRRUS_NAME = re.compile(r"([a-z][a-z_]+)-\d{8}-cirrus")
# header of a page in a sorted file: id, age (two numbers), byte length
_HEADER = struct.Struct("<qqqQ")


class PageLines(RenderedPages):
    """Files with one JSON object per page; subclasses read its fields."""

    description: ClassVar[str]  # name of the kind of dump in messages

    @abstractmethod
    def build_siteinfo(self, row: Row, location: str) -> Siteinfo:
        """Build the siteinfo of a dump from its first page.

        Raises:
            InputError: The page does not name its wiki; the message starts with `location`.
        """

    @abstractmethod
    def build_page(self, row: Row, siteinfo: Siteinfo, location: str) -> Page:
        """Build the page of a JSON object.

        Raises:
            InputError: A field is missing or has another type; the message starts with `location`.
        """

    def iter_rows(self, url: str) -> Iterator[tuple[str, Row]]:
        """Yield (location for messages, JSON object) for each page."""
        yield from iter_objects(url)

    def is_companion(self, name: str) -> bool:
        """Return False: there are no companion files."""
        return False

    def can_plan_fast(self, url: str) -> bool:
        """Return False: planning reads the whole file."""
        return False

    def read_siteinfo(self, url: str) -> Siteinfo:
        """Return the siteinfo of a dump from its first page.

        Raises:
            InputError: The file is unreadable or empty, or its first page does not name its wiki.
        """
        for location, row in self.iter_rows(url):
            return self.build_siteinfo(row, location)
        raise InputError(f"{basename(url)} contains no pages: check that it is the right dump")

    def split(self, url: str, request: PlanRequest) -> Iterator[PageRun]:
        """Yield the staged runs of the pages, in the order of their ids.

        Raises:
            InputError: The file is damaged, or a line is not a page of this wiki.
        """
        siteinfo = self.read_siteinfo(url)
        rows = self.iter_rows(url)
        pages: Iterator[Page] = (self.build_page(row, siteinfo, location) for location, row in rows)
        if request.limit is not None:
            pages = self._limit_articles(pages, request.limit, siteinfo)
        runs = _group_into_runs(sort_pages(pages, request.workdir))
        yield from stage_runs(runs, request.workdir, request.stage)

    def _limit_articles(self, pages: Iterable[Page], limit: int, siteinfo: Siteinfo) -> Iterator[Page]:
        """Yield pages until `limit` different articles have been yielded."""
        article_ids: set[int] = set()
        for page in pages:
            if self.classify(page, siteinfo) is page:
                article_ids.add(page.page_id)
            yield page
            if len(article_ids) == limit:
                return


class EnterprisePages(PageLines):
    """Articles of Wikimedia Enterprise with Parsoid's HTML.

    The fields are described at https://enterprise.wikimedia.com/docs/data-dictionary/.
    """

    description = "a dump of Wikimedia Enterprise"

    def recognize(self, name: str, read_head: Callable[[], bytes]) -> bool:
        """Return whether the first line has several of the fields of an Enterprise article."""
        if not LINES_ENDING.search(name):
            return False
        head = read_head().lstrip()
        return head.startswith(b"{") and len({*_ENTERPRISE_FIELD.findall(head)}) >= _MIN_ENTERPRISE_FIELDS

    def build_siteinfo(self, row: Row, location: str) -> Siteinfo:
        """Return the siteinfo from `is_part_of`, `in_language` and the address of the page."""
        address_match = _WIKI_ADDRESS.match(self._read_text(row, "url", location))
        if address_match is None:
            raise InputError(
                f"{location} has no `url` such as https://en.wikipedia.org/wiki/Ada: give {self.description}"
            )
        dbname = self._read_text(row, "is_part_of.identifier", location)
        language = self._read_text(row, "in_language.identifier", location)
        return _build_siteinfo(dbname, language, address_match[0])

    def build_page(self, row: Row, siteinfo: Siteinfo, location: str) -> Page:
        """Return the page with its HTML."""
        if (dbname := self._read_text(row, "is_part_of.identifier", location)) != siteinfo.dbname:
            raise InputError(
                f"{location} is of {dbname[:80]!r}, but the first page of {siteinfo.dbname!r}: give one wiki at a time"
            )
        templates = _read_names(row, "templates")
        is_article = not has_disambiguation_template(templates, siteinfo.language)
        html = self._read_text(row, "article_body.html", location) if is_article else _DISAMBIGUATION
        return Page(
            page_id=_read_number(row, "identifier", location),
            rev_id=_read_number(row, "version.identifier", location),
            revised=_read_time(row, "date_modified", location),
            namespace=_read_number(row, "namespace.identifier", location, default=0),
            title=_read_title(row, "name", location),
            redirect=False,
            model=HTML_MODEL if is_article else "wikitext",
            text=html,
            metadata=build_metadata(
                {
                    "language": _get_value(row, "in_language.identifier"),
                    "wikidata": _get_value(row, "main_entity.identifier"),
                    "categories": list(map(_remove_namespace, _read_names(row, "categories"))),
                    "aliases": _read_names(row, "redirects"),
                }
            ),
        )

    def _read_text(self, row: Row, path: str, location: str) -> str:
        text = _get_value(row, path)
        if not isinstance(text, str):
            raise InputError(f"{location} has no string `{path}`: give {self.description}")
        return text


class CirrusPages(PageLines):
    """Pages of a CirrusSearch index as plain text; each page follows a line with its action."""

    description = "a dump of CirrusSearch"
    extracts_structures = False  # plain text has no tables or infoboxes

    def recognize(self, name: str, read_head: Callable[[], bytes]) -> bool:
        """Return whether the first line is an `index` action."""
        return LINES_ENDING.search(name) is not None and _CIRRUS_ACTION.match(read_head()) is not None

    def iter_rows(self, url: str) -> Iterator[tuple[str, Row]]:
        """Yield each page with the page id of the action line before it.

        Raises:
            InputError: A page has no action before it, or an action has no page after it.
        """
        page_id: Any = None
        location = ""
        for location, row in super().iter_rows(url):
            if isinstance(row.get("index"), dict) and len(row) == 1:
                page_id = row["index"].get("_id")
                continue
            if page_id is None:
                raise InputError(f"{location} has no action `index` before it: give {self.description}")
            is_numeric_id = isinstance(page_id, str) and page_id.isdecimal() and len(page_id) < len(str(_MAX_NUMBER))
            yield location, {"page_id": int(page_id) if is_numeric_id else page_id, **row}
            page_id = None
        if page_id is not None:
            raise InputError(f"{basename(url)} ends after an action, without its page: download it again")

    def read_siteinfo(self, url: str) -> Siteinfo:
        """Return the siteinfo of a dump from its first page, or else from the name of the file."""
        siteinfo = super().read_siteinfo(url)
        name_match = _CIRRUS_NAME.match(basename(url))
        dbname = siteinfo.dbname or (name_match[1] if name_match else "")
        return _build_siteinfo(dbname, siteinfo.language, _build_base_url(dbname))

    def build_siteinfo(self, row: Row, location: str) -> Siteinfo:
        """Return the siteinfo from the fields `wiki` and `language`."""
        language = row.get("language")
        if not isinstance(language, str):
            raise InputError(f"{location} has no string `language`: give {self.description}")
        dbname = row.get("wiki")
        return _build_siteinfo(dbname if isinstance(dbname, str) else "", language, "")

    def build_page(self, row: Row, siteinfo: Siteinfo, location: str) -> Page:
        """Return the page with its plain text."""
        if not isinstance(text := row.get("text", ""), str):
            raise InputError(f"{location} has no string `text`: give {self.description}")
        content_model = row.get("content_model", "wikitext")
        if has_disambiguation_template(_read_names(row, "template"), siteinfo.language):
            text = _DISAMBIGUATION
        elif content_model == "wikitext":
            content_model = PLAIN_MODEL
        return Page(
            page_id=_read_number(row, "page_id", location),
            rev_id=_read_number(row, "version", location, default=0),
            revised=_read_time(row, "timestamp", location),
            namespace=_read_number(row, "namespace", location, default=0),
            title=_read_title(row, "title", location),
            redirect=False,
            model=str(content_model)[:100],
            text=text,
            metadata=build_metadata(
                {
                    "language": row.get("language"),
                    "wikidata": row.get("wikibase_item"),
                    "categories": row.get("category"),
                    "aliases": _read_names(row, "redirect"),
                }
            ),
        )


def _build_base_url(dbname: str) -> str:
    """Return the base URL of a Wikimedia wiki in one language, or "" for another wiki.

    >>> _build_base_url("zh_min_nanwiki"), _build_base_url("commonswiki")
    ('https://zh-min-nan.wikipedia.org/wiki/', '')
    """
    name_match = _WIKIMEDIA_NAME.fullmatch(dbname)
    if name_match is None:
        return ""
    project = "wikipedia" if name_match[2] == "wiki" else name_match[2]
    return f"https://{name_match[1].replace('_', '-')}.{project}.org/wiki/"


def _build_siteinfo(dbname: str, language: str, base: str) -> Siteinfo:
    namespaces = {**CANONICAL_NAMESPACES, **get_namespace_aliases(language)}
    return Siteinfo(dbname, language, base, namespaces)


def _get_value(row: Row, path: str) -> Any:
    """Return the value at a path of keys, such as `version.identifier`, or None."""
    field_value: Any = row
    for key in path.split("."):
        field_value = field_value.get(key) if isinstance(field_value, dict) else None
    return field_value


def _read_names(row: Row, field: str) -> list[str]:
    """Return the names in a list of strings, or of objects with a `name` or `title`."""
    field_value = row.get(field)
    entries = field_value if isinstance(field_value, list) else []
    names = (entry.get("name", entry.get("title")) if isinstance(entry, dict) else entry for entry in entries)
    return [name for name in names if isinstance(name, str)]


def _remove_namespace(name: str) -> str:
    return name.partition(":")[2] or name


def _read_number(row: Row, path: str, location: str, default: int | None = None) -> int:
    field_number = _get_value(row, path)
    field_number = default if field_number is None else field_number
    if type(field_number) is not int or not 0 <= field_number <= _MAX_NUMBER:
        raise InputError(f"{location} has {field_number!r:.40} as its `{path}`: give a whole number from 0")
    return field_number


def _read_title(row: Row, name: str, location: str) -> str:
    title = row.get(name)
    if not isinstance(title, str) or not 0 < len(title) <= MAX_TITLE:
        raise InputError(f"{location} has {title!r:.40} as its `{name}`: give a title of 1 to {MAX_TITLE:,} characters")
    return title


def _read_time(row: Row, name: str, location: str) -> int | None:
    time_text = row.get(name)
    if time_text is None or time_text == "":
        return None
    try:
        return parse_seconds(time_text)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{location} has {time_text!r:.40} as its `{name}`: give a time such as 2026-11-01T12:00:00Z"
        ) from error


class _SortedPage(NamedTuple):
    """A page as XML; the sort order is by page id, then from the newest to the oldest revision."""

    page_id: int
    age: tuple[int, int]  # `get_recency` with both numbers negated: the newest is first
    xml: bytes


def sort_pages(pages: Iterable[Page], workdir: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the id and the `<page>` element of each page, in the order of ids, each id once.

    If a page has several revisions, the newest is used. If all pages together exceed
    `MAX_SORTED_BYTES`, they are sorted in batches, which are written to `workdir` and merged.

    Raises:
        ResourceError: `workdir` cannot be written to.
    """
    with (
        tempfile.TemporaryDirectory(dir=workdir, prefix="sort-") as folder,
        translate_write_errors(workdir),
    ):
        batches = (sorted(batch) for batch in _batch_pages(pages))
        last_batch, batch_files = list[_SortedPage](), list[Path]()
        for batch in batches:
            batch_files += [_write_pages(last_batch, Path(folder))] if last_batch else []
            last_batch = batch
        while len(batch_files) > MAX_MERGED_FILES:
            batch_files = [
                _write_pages(_merge_and_delete(batch_files[first_file : first_file + MAX_MERGED_FILES]), Path(folder))
                for first_file in range(0, len(batch_files), MAX_MERGED_FILES)
            ]
        merged_pages = heapq.merge(_merge_and_delete(batch_files), last_batch)
        for page_id, revisions in groupby(merged_pages, key=lambda page: page.page_id):
            yield page_id, next(revisions).xml


def _batch_pages(pages: Iterable[Page]) -> Iterator[list[_SortedPage]]:
    batch, n_bytes = list[_SortedPage](), 0
    for page in pages:
        seconds, rev_id = get_recency(page.revised, page.rev_id)
        batch.append(_SortedPage(page.page_id, (-seconds, -rev_id), format_page(page)))
        n_bytes += len(batch[-1].xml)
        if n_bytes >= MAX_SORTED_BYTES:
            yield batch
            batch, n_bytes = [], 0
    if batch:
        yield batch


def _write_pages(pages: Iterable[_SortedPage], folder: Path) -> Path:
    path = folder / f"{secrets.token_hex(8)}.lz4"  # lz4 takes a tenth of the time of gzip
    with pa.CompressedOutputStream(pa.OSFile(str(path), "wb"), "lz4") as batch_file:
        for page in pages:
            batch_file.write(_HEADER.pack(page.page_id, *page.age, len(page.xml)))
            batch_file.write(page.xml)
    return path


def _merge_and_delete(files: Sequence[Path]) -> Iterator[_SortedPage]:
    yield from heapq.merge(*map(_read_pages, files))
    for batch_file in files:
        batch_file.unlink()


def _read_pages(path: Path) -> Iterator[_SortedPage]:
    with pa.CompressedInputStream(pa.OSFile(str(path)), "lz4") as file:
        while header := file.read(_HEADER.size):
            page_id, negated_time, negated_rev_id, xml_bytes = _HEADER.unpack(header)
            yield _SortedPage(page_id, (negated_time, negated_rev_id), file.read(xml_bytes))


def _group_into_runs(pages: Iterable[tuple[int, bytes]]) -> Iterator[XmlRun]:
    """Yield runs of pages of at least `mediawiki.MIN_RUN_BYTES`; the last may be smaller."""
    run_xml, page_ids = bytearray(), list[int]()
    for page_id, page_xml in pages:
        run_xml += page_xml
        page_ids.append(page_id)
        if len(run_xml) >= mediawiki.MIN_RUN_BYTES:
            yield XmlRun(0, bytes(run_xml), page_ids)
            run_xml, page_ids = bytearray(), []
    if page_ids:
        yield XmlRun(0, bytes(run_xml), page_ids)


ENTERPRISE, CIRRUS = EnterprisePages(), CirrusPages()
