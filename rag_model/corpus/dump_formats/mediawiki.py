"""MediaWiki export XML (schemas 0.3 to 0.11), with or without an offset index.

**Parsing.** The parser is expat from the standard library. Expat was faster than lxml (362 versus
297 MB/s on an extract of a real dump), builds no tree, and has no limit for text nodes, whereas
libxml2 accepts more than 10 MB only without its protection against hostile files. Constructs that
an export never contains are rejected at once: a document type (and with it every entity), deep
nesting, very long tokens.

**Splitting.** A multistream dump consists of bz2 streams of about 100 pages, and an index with one
line `offset:page id:title` per page. Memory holds only one entry per stream, which takes tens of
megabytes for English Wikipedia. A dump without an offset index is read once from start to end. Runs
of pages are written as gzip members of about 256 KiB of XML, many per file, and `stage` puts each
file where workers can read it. Plain XML can be read at any offset, so its runs are byte ranges of
the dump itself. At most one gzip file is on disk at a time, and at most one run in memory.
"""

import gzip
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from html import unescape
from itertools import chain, groupby, pairwise
from operator import itemgetter
from pathlib import Path
from xml.parsers import expat
from xml.sax.saxutils import escape

from rag_model.corpus.articles import DropReason, get_namespace_aliases
from rag_model.corpus.dump_formats.dump_format import PlanRequest
from rag_model.corpus.dump_formats.page_format import IdentifyPage, PageFormat, get_recency
from rag_model.corpus.markup.template_table import NAMESPACES as TEMPLATE_NAMESPACES
from rag_model.corpus.markup.template_table import defines_templates
from rag_model.corpus.metadata import format_metadata, parse_metadata
from rag_model.corpus.parts import COMPRESSION_RATIO, PageRun, StageFile, stage_file, translate_write_errors
from rag_model.corpus.records import (
    HTML_MODEL,
    MAX_TITLE,
    NO_METADATA,
    PLAIN_MODEL,
    Compression,
    Page,
    Part,
    Section,
    Siteinfo,
    Slice,
    StructureName,
    format_iso,
    parse_seconds,
)
from rag_model.corpus.source import (
    COMPRESSED_ENDING,
    basename,
    decode,
    describe_slice,
    file_exists,
    get_size,
    is_compressed,
    read_bytes,
    read_decoded,
    read_lines,
    read_slice,
    refuse_utf16,
)
from rag_model.corpus.wikitext import clean_wikitext
from rag_model.errors import InputError

MAX_DEPTH = 16  # maximum depth of nested elements; an export has at most six levels
MAX_TEXT = 64 << 20  # characters in one element; MediaWiki's own limit for a page is 2 MiB
MAX_TOKEN = 16 << 20  # bytes of one tag or comment

_REVISION = "/page/revision"
_REVISION_FIELDS = [f"{_REVISION}/{name}" for name in ("id", "timestamp", "model", "text")]
_NAMESPACE = "/siteinfo/namespaces/namespace"
_CAPTURED_PATHS = {  # paths of the elements whose text is stored
    *("/siteinfo/dbname", "/siteinfo/base", "/siteinfo/case", _NAMESPACE),
    # Exports have no `metadata`; it is in the staged pages of other dump formats.
    *("/page/title", "/page/ns", "/page/id", *_REVISION_FIELDS, "/page/metadata"),
}
_NAMESPACE_HEAD = 4096  # first bytes of a page, which contain its title and namespace
_NON_XML_CHARACTER = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ROOT = b"<mediawiki>"
_PAGE_END = b"</page>"
_NON_ELEMENT = re.compile(rb"<[!?]")  # a comment, a CDATA section or an instruction
_MAX_ELEMENT_BYTES = 16 << 20  # bytes of a page that is buffered before it is parsed
# Numbers in an export are at least -2 (the Media namespace) and fit into an int64 column.
_MIN_NUMBER, _MAX_NUMBER = -2, (1 << 63) - 1
_TIME_LIMIT = parse_seconds("2200-01-01")
_MAX_HEAD_BYTES = 1 << 16  # maximum bytes of white space before the first element
_EXPORT_ADVICE = "give a MediaWiki export as dumps.wikimedia.org has them"
# English namespace names, which every wiki accepts in addition to its own. They have the keys 0, 2,
# 4, …, and the namespaces of their talk pages have the keys in between.
_SUBJECT_NAMESPACES = ("", "user", "project", "file", "mediawiki", "template", "help", "category")
CANONICAL_NAMESPACES: dict[str, int] = {
    **{"media": -2, "special": -1, "image": 6, "image talk": 7},
    **{name: 2 * i for i, name in enumerate(_SUBJECT_NAMESPACES)},
    **{f"{name} talk".strip(): 2 * i + 1 for i, name in enumerate(_SUBJECT_NAMESPACES)},
}
_DUMP_NAME = re.compile(r"(?P<stem>.*?)(?P<number>\d*)\.xml(?P<range>-p\d+p\d+)?\.bz2")
_INDEX_NAME = re.compile(r".*-index\d*\.txt(-p\d+p\d+)?\.bz2")
_STREAM_MAGIC = re.compile(rb"BZh[1-9]1AY&SY")
_ADVICE = "download the dump and its index again, both with the same date"
_IndexEntry = tuple[int, int, bool]  # offset of the stream, page id, whether it defines a template
_PROPERTIES_NAME = re.compile(r".*-page_props\.sql(\.gz)?")
MIN_RUN_BYTES = 256 << 10  # minimum bytes of XML in a run; four runs make the smallest part
MIN_FILE_BYTES = 8 << 20  # minimum compressed bytes in a staged file
_ENDING = re.compile(r"\.xml\b.*$|\.(bz2|gz|xz|zst|7z)$", re.IGNORECASE)
_OTHER_ENDING = re.compile(rf"\.(zip|tar|tgz|json|csv|txt|sql){COMPRESSED_ENDING}", re.IGNORECASE)
_ROOT_TAG = b"<mediawiki"


def parse_pages(chunks: Iterable[bytes], location: str) -> Iterator[Page]:
    """Yield the pages of an export, or of a run of its `<page>` elements, in order.

    If a page has several revisions, the newest is used: the revision with the latest time, and if
    several have this time, the one with the highest id.

    Raises:
        InputError: The bytes are not well-formed, not a MediaWiki export, or hostile; the message
            starts with `location`.
    """
    parser = PageParser(location)
    for chunk in chunks:
        for _, page in parser.feed(chunk):
            yield page
    parser.close()


def parse_unlogged_pages(chunks: Iterable[bytes], location: str, identify: IdentifyPage) -> Iterator[Page]:
    """Yield the pages of a run of `<page>` elements; pages in an article log are not parsed.

    An element ends at the first `</page>`, because in XML without comments, CDATA sections and
    instructions every `<` begins a tag. If a piece is not one `<page>` element, for example the end
    of an export, that piece and all data after it are parsed.

    Raises:
        InputError: As for `parse_pages`.
    """
    parser, is_regular = PageParser(location), True
    for element_bytes in _split_elements(chunks):
        page_element, page_key = element_bytes.lstrip(b" \t\r\n"), b""
        if is_regular:
            page_key, logged_page = identify(page_element)
            if logged_page is not None:
                parser.begin_fragment()
                yield logged_page
                continue
        pages = parser.feed(element_bytes)
        is_regular = is_regular and _is_plain_element(page_element) and len(pages) == 1 and parser.is_between_pages
        for _, page in pages:
            yield replace(page, key=page_key) if is_regular else page
    parser.close()


def parse_namespace_pages(
    chunks: Iterable[bytes], location: str, namespaces: Collection[int], *, redirects: bool = False
) -> Iterator[Page]:
    """Yield the pages of the given namespaces and, if `redirects` is set, all redirects.

    Other pages are not parsed, and damaged pages are left out.
    """
    # `<redirect` is not closed, because the pages of a mirror have `<redirect/>` without a target.
    wanted_tags = [b"<ns>%d</ns>" % key for key in namespaces] + [b"<redirect"] * redirects
    for element_bytes in _split_elements(chunks):
        page_start = max(element_bytes.find(b"<page>"), 0)
        element_head = element_bytes[page_start : page_start + _NAMESPACE_HEAD]
        if any(tag in element_head for tag in wanted_tags) and element_bytes.endswith(_PAGE_END):
            parser = PageParser(location)
            parser.begin_fragment()
            with suppress(InputError):  # the worker that chunks the page reports the error
                pages = [page for _, page in parser.feed(element_bytes[page_start:])]
                yield from (page for page in pages if page.namespace in namespaces or (redirects and page.redirect))


def _is_plain_element(element_bytes: bytes) -> bool:
    is_page_element = element_bytes.startswith(b"<page>") and element_bytes.endswith(_PAGE_END)
    return is_page_element and _NON_ELEMENT.search(element_bytes) is None


def _split_elements(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Join the chunks, and yield pieces of bounded size that end with `</page>` if possible."""
    buffer = b""
    for chunk in chunks:
        buffer += chunk
        start = 0
        while (end := buffer.find(_PAGE_END, start) + len(_PAGE_END)) >= len(_PAGE_END):
            yield buffer[start:end]
            start = end
        buffer = buffer[start:]
        if len(buffer) > _MAX_ELEMENT_BYTES:
            yield buffer
            buffer = b""
    if buffer.strip():
        yield buffer


class PageParser:
    """Parses an export incrementally into pages; `siteinfo` is None until it was parsed."""

    def __init__(self, location: str) -> None:
        self.siteinfo: Siteinfo | None = None
        self._location = location
        # All exports are UTF-8, whatever their XML declaration says.
        self._expat = expat.ParserCreate("UTF-8")
        self._expat.buffer_text = True
        self._expat.buffer_size = 1 << 20
        self._expat.StartElementHandler = self._start_element
        self._expat.EndElementHandler = self._end_element
        self._expat.StartDoctypeDeclHandler = self._reject_doctype
        # The first bytes, until it is known whether they start with <page>; then None.
        self._head_bytes: bytes | None = b""
        self._root_bytes = 0  # length of the root element that was added to a fragment
        self._fed_bytes = 0
        self._paths: list[str] = []  # paths of the open elements; the path of the root is empty
        self._text: list[str] = []  # text of the open captured element
        self._text_length = 0
        self._fields: dict[str, str] = {}  # texts in the open siteinfo or page, by path
        self._language = ""
        self._namespace_key = 0  # key of the open namespace
        self._namespaces: dict[str, int] = {}
        self._page_offset = 0  # byte offset of the open page
        self._newest_revision: dict[str, str] = {}  # fields of the open page's newest revision
        self._finished_pages: list[tuple[int, Page]] = []

    def feed(self, data: bytes) -> list[tuple[int, Page]]:
        """Parse more bytes; return (byte offset of `<page`, page) for each completed page."""
        if self._head_bytes is not None:
            self._head_bytes += data
            stripped_head = self._head_bytes.lstrip()
            if len(stripped_head) < len(b"<page") and len(self._head_bytes) < _MAX_HEAD_BYTES:
                return []
            data, self._head_bytes = self._head_bytes, None
            refuse_utf16(data, self._location)
            if stripped_head.startswith(b"<page"):
                self._parse_root()
        self._parse(data)
        pages, self._finished_pages = self._finished_pages, []
        return pages

    @property
    def is_between_pages(self) -> bool:
        """Whether the bytes parsed so far end between two pages."""
        return len(self._paths) == 1

    def begin_fragment(self) -> None:
        """Expect `<page>` elements without a root element; has no effect after the first bytes."""
        if self._head_bytes is not None:
            self._head_bytes = None
            self._parse_root()

    def _parse_root(self) -> None:
        self._root_bytes = len(_ROOT)
        self._parse(_ROOT)

    def close(self) -> None:
        """Finish parsing.

        Raises:
            InputError: The export is empty or incomplete.
        """
        if self._head_bytes is not None:
            raise self._new_error("is empty", "download it again")
        if self._root_bytes and len(self._paths) == 1:
            self._parse(b"</mediawiki>")
        if self._paths:
            raise self._new_error("ends before its XML is complete", "it is truncated, download it again")
        self._parse(b"", is_last=True)
        # This frees megabytes in a reference cycle without waiting for the garbage collector.
        del self._expat

    def _parse(self, xml_bytes: bytes, *, is_last: bool = False) -> None:
        try:
            self._expat.Parse(xml_bytes, is_last)
        except expat.ExpatError as error:
            raise self._new_error(f"is not well-formed XML ({error})", _EXPORT_ADVICE) from error
        self._fed_bytes += len(xml_bytes)
        if self._fed_bytes - self._expat.CurrentByteIndex > MAX_TOKEN and self._expat.CurrentByteIndex >= 0:
            raise self._new_error(f"has an XML tag of more than {MAX_TOKEN >> 20} MiB", _EXPORT_ADVICE)

    def _start_element(self, tag: str, attributes: dict[str, str]) -> None:
        if not self._paths:
            if tag != "mediawiki":
                raise self._new_error(f"is XML, but its root is <{tag[:40]}> and not <mediawiki>", _EXPORT_ADVICE)
            self._language = attributes.get("xml:lang", "")
            self._paths.append("")
            return
        element_path = f"{self._paths[-1]}/{tag}"
        if len(self._paths) == MAX_DEPTH:
            raise self._new_error(f"nests XML elements more than {MAX_DEPTH} deep", _EXPORT_ADVICE)
        self._paths.append(element_path)
        if element_path in _CAPTURED_PATHS:
            self._namespace_key = self._parse_number(attributes.get("key", "0"))
            self._text, self._text_length = [], 0
            self._expat.CharacterDataHandler = self._add_text
        elif element_path == "/page":
            self._page_offset = self._expat.CurrentByteIndex - self._root_bytes
            self._fields, self._newest_revision = {}, {}
        elif element_path == "/page/redirect":
            self._fields[element_path] = attributes.get("title", "")

    def _add_text(self, text: str) -> None:
        self._text_length += len(text)
        if self._text_length > MAX_TEXT:
            raise self._new_error(f"has an element with more than {MAX_TEXT >> 20} MiB of text", _EXPORT_ADVICE)
        self._text.append(text)

    def _end_element(self, tag: str) -> None:
        path = self._paths.pop()
        if path in _CAPTURED_PATHS:
            self._expat.CharacterDataHandler = None
            self._fields[path] = "".join(self._text)
        if path == _NAMESPACE:
            self._namespaces[self._fields[path].lower()] = self._namespace_key
        elif path == "/siteinfo":
            self.siteinfo = self._build_siteinfo()
        elif path == _REVISION:
            self._keep_newest_revision()
        elif path == "/page":
            self._finished_pages.append((self._page_offset, self._build_page()))

    def _keep_newest_revision(self) -> None:
        """Keep the revision if it is the newest of the page so far."""
        revision = {name: self._fields.pop(name) for name in _REVISION_FIELDS if name in self._fields}
        newest = self._newest_revision
        if not newest or self._get_revision_recency(revision) >= self._get_revision_recency(newest):
            self._newest_revision = revision

    def _get_revision_recency(self, revision: dict[str, str]) -> tuple[int, int]:
        """Return the sort key of a revision: its time, then its id.

        The id alone is not sufficient, because imported old revisions get new ids.
        """
        revised = self._parse_time(revision.get(f"{_REVISION}/timestamp", ""))
        return get_recency(revised, self._parse_number(revision.get(f"{_REVISION}/id", "0")))

    def _build_page(self) -> Page:
        fields, revision = self._fields, self._newest_revision
        metadata_text = fields.get("/page/metadata")
        if "/page/id" not in fields or "/page/title" not in fields:
            raise self._new_error("has a <page> without <id> or <title>", _EXPORT_ADVICE)
        if len(fields["/page/title"]) > MAX_TITLE:
            raise self._new_error(f"has a <title> of more than {MAX_TITLE:,} characters", _EXPORT_ADVICE)
        return Page(
            page_id=self._parse_number(fields["/page/id"]),
            rev_id=self._parse_number(revision.get(f"{_REVISION}/id", "0")),
            revised=self._parse_time(revision.get(f"{_REVISION}/timestamp", "")),
            namespace=self._parse_number(fields.get("/page/ns", "0")),
            title=fields["/page/title"],
            redirect="/page/redirect" in fields,
            target=fields.get("/page/redirect", ""),
            model=revision.get(f"{_REVISION}/model", "wikitext"),
            text=revision.get(f"{_REVISION}/text", ""),
            metadata=NO_METADATA if metadata_text is None else parse_metadata(metadata_text),
        )

    def _build_siteinfo(self) -> Siteinfo:
        namespace_aliases = get_namespace_aliases(self._language)
        return Siteinfo(
            dbname=self._fields.get("/siteinfo/dbname", ""),
            language=self._language,
            base=self._fields.get("/siteinfo/base", ""),
            namespaces={**CANONICAL_NAMESPACES, **namespace_aliases, **self._namespaces},
            case=self._fields.get("/siteinfo/case", "first-letter"),
        )

    def _parse_number(self, text: str) -> int:
        try:
            number = int(text)
        except ValueError as error:
            raise self._new_error(f"has {text[:40]!r} instead of a number", _EXPORT_ADVICE) from error
        if not _MIN_NUMBER <= number <= _MAX_NUMBER:
            raise self._new_error(f"has the number {text[:40]}, which is out of range", _EXPORT_ADVICE)
        return number

    def _parse_time(self, text: str) -> int | None:
        """Return a revision's time in seconds since 1970; None if the dump does not state it."""
        if not text.strip():
            return None
        try:
            seconds = parse_seconds(text.strip())
        except ValueError as error:
            raise self._new_error(f"has {text[:40]!r} instead of a revision's time", _EXPORT_ADVICE) from error
        if seconds >= _TIME_LIMIT:  # such a time would make all later dumps look outdated
            raise self._new_error(f"has the time {text[:40]}, which is too far in the future", _EXPORT_ADVICE)
        return seconds

    def _reject_doctype(self, *_: object) -> None:
        raise self._new_error("declares a document type, which could hide an entity bomb", _EXPORT_ADVICE)

    def _new_error(self, problem: str, advice: str) -> InputError:
        return InputError(f"{self._location} {problem}: {advice}")


def format_page(page: Page) -> bytes:
    """Return a page as the `<page>` element of an export; equal pages give equal bytes.

    Characters that XML cannot represent are replaced.
    """
    timestamp_element = f"<timestamp>{format_iso(page.revised)}</timestamp>" if page.revised is not None else ""
    has_metadata = page.metadata != NO_METADATA
    metadata_text = escape(_replace_non_xml(format_metadata(page.metadata))) if has_metadata else ""
    metadata_element = f"<metadata>{metadata_text}</metadata>" if has_metadata else ""
    text = escape(_replace_non_xml(page.text), {"\r": "&#13;"})
    return (
        f"<page><title>{escape(_replace_non_xml(page.title))}</title><ns>{page.namespace}</ns><id>{page.page_id}</id>"
        f"{'<redirect/>' if page.redirect else ''}{metadata_element}<revision><id>{page.rev_id}</id>{timestamp_element}"
        f"<model>{escape(_replace_non_xml(page.model))}</model><text>{text}</text></revision></page>\n"
    ).encode()


def _replace_non_xml(text: str) -> str:
    return _NON_XML_CHARACTER.sub("\ufffd", text)


def read_siteinfo(url: str) -> Siteinfo:
    """Return the siteinfo of an export; reads only up to the end of its `<siteinfo>` element.

    Raises:
        InputError: The file is unreadable, empty, without this element, or no MediaWiki export.
    """
    location = basename(url)
    parser = PageParser(location)
    for chunk in read_decoded(url):
        pages = parser.feed(chunk)
        if parser.siteinfo is not None:
            return parser.siteinfo
        if pages:
            break
    else:
        parser.close()
    raise InputError(f"{location} has no <siteinfo>, which names its wiki and language: export it with its siteinfo")


def is_offset_index(url: str) -> bool:
    """Return whether a file is an offset index, by its name."""
    return _INDEX_NAME.fullmatch(basename(url)) is not None


def find_offset_index(url: str) -> str | None:
    """Return the URL of the offset index next to a dump, or None.

    `x-multistream.xml.bz2` has `x-multistream-index.txt.bz2`; `x-multistream1.xml-p1p41242.bz2` has
    `x-multistream-index1.txt-p1p41242.bz2`.
    """
    name_match = _DUMP_NAME.fullmatch(basename(url))
    if name_match is None:
        return None
    stem, number, page_range = name_match["stem"], name_match["number"], name_match["range"] or ""
    folder = url.removesuffix(basename(url))
    index_names = f"{stem}-index{number}.txt{page_range}.bz2", f"{stem}{number}-index.txt{page_range}.bz2"
    return next((folder + index_name for index_name in index_names if file_exists(folder + index_name)), None)


def find_properties_file(url: str) -> str | None:
    """Return the URL of the table of page properties next to a dump, or None.

    `enwiki-20240101-pages-articles1.xml-p1p41242.bz2` has `enwiki-20240101-page_props.sql.gz`.
    """
    name = basename(url)
    stem, separator, _ = name.partition("-pages-")
    prefix = url.removesuffix(name) + stem
    candidates = [f"{prefix}-page_props.sql.gz", f"{prefix}-page_props.sql"] if separator else []
    return next(filter(file_exists, candidates), None)


def read_stream_runs(url: str, index_url: str, namespaces: Mapping[str, int]) -> Iterator[PageRun]:
    """Yield the streams that a dump's index lists, in file order; check the first and the last.

    The titles in the index show which streams have templates; `namespaces` are the dump's
    namespaces.

    Raises:
        InputError: The index is malformed, incomplete, or belongs to another dump.
    """
    stream_groups = groupby(_read_entries(index_url, namespaces), itemgetter(0))
    file_bytes = get_size(url)
    run: PageRun | None = None
    stream_entries = ((offset, list(entries)) for offset, entries in stream_groups)
    for (run_start, entries), (run_end, _) in pairwise(chain(stream_entries, [(file_bytes, list[_IndexEntry]())])):
        if not run_start < run_end <= file_bytes:
            raise InputError(
                f"{basename(index_url)} places a stream at byte {run_start} of {basename(url)}, "
                f"past its end or its next stream: {_ADVICE}"
            )
        is_first, run = run is None, _build_run(url, run_start, run_end, entries)
        if is_first:
            _check_stream(run, index_url)
            _check_dump_header(run, index_url)
        yield run
    if run is None:
        raise InputError(f"{basename(index_url)} is empty: {_ADVICE}")
    _check_stream(run, index_url)


def _build_run(url: str, run_start: int, run_end: int, entries: Sequence[_IndexEntry]) -> PageRun:
    _, page_ids, template_flags = zip(*entries, strict=True)
    byte_slice = Slice(url, run_start, run_end - run_start, "bz2", min(page_ids), max(page_ids))
    return PageRun(byte_slice, run_end - run_start, _is_increasing(page_ids), any(template_flags))


def _is_increasing(page_ids: Sequence[int]) -> bool:
    return all(first_id < second_id for first_id, second_id in pairwise(page_ids))


def _read_entries(index_url: str, namespaces: Mapping[str, int]) -> Iterator[_IndexEntry]:
    for line_number, line in enumerate(read_lines(index_url), start=1):
        offset, _, id_and_title = line.partition(b":")
        page_id, _, title = id_and_title.partition(b":")
        try:
            yield int(offset), int(page_id), _is_template_title(title, namespaces)
        except ValueError as error:
            raise InputError(
                f"line {line_number} of {basename(index_url)} is not `offset:page id:title`: {_ADVICE}"
            ) from error


def _is_template_title(title: bytes, namespaces: Mapping[str, int]) -> bool:
    """Return whether the title in a line of the index names a template; True if the line has none."""
    if not title or b":" not in title:
        return not title
    text = unescape(title.decode(errors="replace")).replace("_", " ")
    return defines_templates(text, namespaces.get(text.partition(":")[0].strip().lower()))


def _check_dump_header(run: PageRun, index_url: str) -> None:
    """Check that no page is stored before the first stream; otherwise the index is incomplete."""
    location = basename(run.slice.url)
    header = decode(read_bytes(run.slice.url, 0, run.slice.offset), "bz2", location)
    if next(parse_pages(chain(header, [b"</mediawiki>"]), location), None) is not None:
        raise InputError(f"{basename(index_url)} does not name the first pages of {location}: {_ADVICE}")


def _check_stream(run: PageRun, index_url: str) -> None:
    """Check that a stream starts at the offset in the index and contains the listed pages."""
    byte_slice = run.slice
    magic = b"".join(read_bytes(byte_slice.url, byte_slice.offset, min(10, byte_slice.length)))
    if not _STREAM_MAGIC.match(magic):
        raise InputError(
            f"{basename(index_url)} places a stream at byte {byte_slice.offset} of "
            f"{basename(byte_slice.url)}, but no bz2 stream begins there: {_ADVICE}"
        )
    for _ in FORMAT.read_slice(byte_slice):
        pass


@dataclass(frozen=True, slots=True)
class XmlRun:
    """The XML of a run of pages."""

    data_offset: int  # offset in the decoded dump
    data: bytes
    page_ids: list[int]
    has_templates: bool = True  # whether a page defines a template; True if unknown

    def to_page_run(self, url: str, offset: int, length: int, codec: Compression) -> PageRun:
        """Return the `PageRun` for a run that is stored as `length` bytes of a file at `offset`."""
        byte_slice = Slice(url, offset, length, codec, min(self.page_ids), max(self.page_ids))
        weight = max(1, len(self.data) // COMPRESSION_RATIO)
        return PageRun(byte_slice, weight, _is_increasing(self.page_ids), self.has_templates)


def split_dump(url: str, workdir: Path, stage: StageFile) -> Iterator[PageRun]:
    """Yield the runs of pages of an export, plain or compressed, in file order.

    Raises:
        InputError: The dump is unreadable, truncated, corrupt, or no MediaWiki export.
    """
    runs = _iter_runs(url)
    if not is_compressed(url):
        return (run.to_page_run(url, run.data_offset, len(run.data), "none") for run in runs)
    return stage_runs(runs, workdir, stage)


def stage_runs(runs: Iterator[XmlRun], workdir: Path, stage: StageFile) -> Iterator[PageRun]:
    """Write runs as gzip members to files; yield the runs of each file once it is staged."""
    while True:
        page_runs: list[PageRun] = []
        with (
            translate_write_errors(workdir),
            tempfile.NamedTemporaryFile(dir=workdir, prefix="split-", suffix=".gz", delete=False) as file,
        ):
            for run in runs:
                gzip_member = gzip.compress(run.data, 1, mtime=0)
                page_runs.append(run.to_page_run(file.name, file.tell(), len(gzip_member), "gzip"))
                file.write(gzip_member)
                if file.tell() >= MIN_FILE_BYTES:
                    break
        url = stage_file(stage, Path(file.name)) if page_runs else ""
        yield from (replace(page_run, slice=replace(page_run.slice, url=url)) for page_run in page_runs)
        if not page_runs:
            Path(file.name).unlink()
            return


def _iter_runs(url: str) -> Iterator[XmlRun]:
    """Split a dump into runs of pages; the last run includes the end of the dump."""
    parser = PageParser(basename(url))
    buffer, buffer_offset, page_ids, has_templates = bytearray(), 0, list[int](), False
    for chunk in read_decoded(url):
        buffer += chunk
        for page_start, page in parser.feed(chunk):
            if page_ids and page_start - buffer_offset >= MIN_RUN_BYTES:
                yield XmlRun(buffer_offset, bytes(buffer[: page_start - buffer_offset]), page_ids, has_templates)
                page_ids, has_templates = [], False
            if not page_ids:
                del buffer[: page_start - buffer_offset]
                buffer_offset = page_start
            page_ids.append(page.page_id)
            has_templates = has_templates or defines_templates(page.title, page.namespace)
    parser.close()
    if page_ids:
        yield XmlRun(buffer_offset, bytes(buffer), page_ids, has_templates)


class MediaWiki(PageFormat):
    """MediaWiki exports: multistream dumps with an index, or XML, also compressed."""

    has_templates = True
    extracts_structures = True

    def recognize(self, name: str, read_head: Callable[[], bytes]) -> bool:
        """Return whether a file ends in .xml, .bz2 or .gz, or is XML without an ending."""
        if _OTHER_ENDING.search(name):
            return False
        return _ENDING.search(name) is not None or ("." not in name and _ROOT_TAG in read_head())

    def is_companion(self, name: str) -> bool:
        """Return whether a file is an offset index, or the page properties of a dump."""
        return is_offset_index(name) or _PROPERTIES_NAME.fullmatch(name) is not None

    def can_plan_fast(self, url: str) -> bool:
        """Return whether the dump has an offset index."""
        return find_offset_index(url) is not None

    def read_siteinfo(self, url: str) -> Siteinfo:
        """Return the siteinfo of an export; see `read_siteinfo`."""
        return read_siteinfo(url)

    def split(self, url: str, request: PlanRequest) -> Iterator[PageRun]:
        """Yield the streams of a multistream dump, or the runs of pages of another export."""
        index_url = find_offset_index(url)
        if index_url is None:
            return split_dump(url, request.workdir, request.stage)
        return read_stream_runs(url, index_url, self.read_siteinfo(url).namespaces)

    def parse_slice(self, byte_slice: Slice) -> Iterator[Page]:
        """Yield the pages of a slice."""
        return parse_pages(read_slice(byte_slice), describe_slice(byte_slice))

    def parse_unlogged(self, byte_slice: Slice, identify: IdentifyPage) -> Iterator[Page]:
        """Yield the pages of a slice with their keys; pages in an article log are not parsed."""
        # a subclass may have other elements
        if type(self).parse_slice is not MediaWiki.parse_slice:
            return self.parse_slice(byte_slice)
        return parse_unlogged_pages(read_slice(byte_slice), describe_slice(byte_slice), identify)

    def read_templates(self, part: Part, *, redirects: bool = False) -> Iterator[Page]:
        """Yield the pages of a part that define templates or list disambiguation templates.

        If `redirects` is set, also yield all redirects.
        """
        if type(self).parse_slice is not MediaWiki.parse_slice:
            return
        for byte_slice in part.slices:
            chunks, location = read_slice(byte_slice), describe_slice(byte_slice)
            pages = parse_namespace_pages(chunks, location, TEMPLATE_NAMESPACES, redirects=redirects)
            yield from (page for page in pages if part.first_page <= page.page_id <= part.last_page)

    def clean(
        self, page: Page, siteinfo: Siteinfo, *, anchors: bool, structures: Collection[StructureName] = ()
    ) -> tuple[Section, ...]:
        """Convert the wikitext of a page to plain text and structures by section."""
        return clean_wikitext(page.text, siteinfo, page.title, anchors=anchors, structures=structures)


class RenderedPages(MediaWiki):
    """A format of wiki pages whose text may already be rendered, as HTML or as plain text.

    The pages are staged as the elements of an export; `Page.model` names the format of the text.
    """

    has_templates = False

    def classify(self, page: Page, siteinfo: Siteinfo) -> Page | DropReason:
        """Return the page if it is an article, otherwise the reason to drop it."""
        if page.model not in {HTML_MODEL, PLAIN_MODEL}:
            return super().classify(page, siteinfo)
        text = "rendered" if page.text.strip() else ""
        page_or_reason = super().classify(replace(page, text=text, model="wikitext"), siteinfo)
        return page_or_reason if isinstance(page_or_reason, str) else page

    def clean(
        self, page: Page, siteinfo: Siteinfo, *, anchors: bool, structures: Collection[StructureName] = ()
    ) -> tuple[Section, ...]:
        """Return the text of a page by section, from wikitext, from HTML or from plain text."""
        if page.model == PLAIN_MODEL:
            return (Section("", page.text.strip()),)
        if page.model != HTML_MODEL:
            return super().clean(page, siteinfo, anchors=anchors, structures=structures)
        from rag_model.corpus.rendered_html import clean_html  # noqa: PLC0415 - imports lxml

        return clean_html(page.text, siteinfo, anchors=anchors, structures=structures)


FORMAT = MediaWiki()
