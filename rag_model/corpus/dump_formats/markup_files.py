"""Read Markdown and HTML files: a section per heading; tables become rows, code stays unchanged."""

import codecs
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from html import unescape
from typing import TYPE_CHECKING, Any

from rag_model.corpus.dump_formats.document_files import (
    DocumentFiles,
    DroppedFileError,
    ParsedFile,
    SectionBuilder,
    clean_text,
    decode_text,
)
from rag_model.corpus.metadata import build_metadata, metadata_to_dict
from rag_model.corpus.records import UnparsablePageError, parse_seconds
from rag_model.extras import format_versions, require

if TYPE_CHECKING:
    from markdown_it.token import Token

_FRONT_MATTER = re.compile(r"(---|\+\+\+)[ \t]*\n(.{0,65536}?)^\1[ \t]*$", re.DOTALL | re.MULTILINE)
_DATE_FIELDS = ("lastmod", "updated", "date")
_METADATA_FIELDS = {"language": "lang", "categories": "tags", "aliases": "aliases"}
# HTML in a Markdown file that readers do not see: comments, scripts, styles, and tags.
_INVISIBLE_HTML = re.compile(
    r"<!--.*?(?:-->|\Z)|<(script|style)(?=[\s/>]).*?(?:</\1\s*>|\Z)|</?[A-Za-z][^<>]*>", re.DOTALL | re.IGNORECASE
)
_LINE_BREAK = re.compile(r"<br\b", re.IGNORECASE)
_HIDDEN_TAG = re.compile(r"<(/?)(?:script|style)\b", re.IGNORECASE)

# The encoding in an HTTP header, its declaration in a page, and the number of first bytes that are
# searched for the declaration.
_CHARSET = re.compile(r"""charset\s*=\s*["']?([\w:.-]{1,40})""", re.IGNORECASE)
_DECLARED_CHARSET = re.compile(
    rb"""<(?:meta\b[^<>]{0,200}\bcharset|\?xml\s[^<>]{0,100}\bencoding)\s*=\s*["']?([\w:.-]{1,40})""", re.IGNORECASE
)
_COMMENT = re.compile(rb"<!--.*?-->", re.DOTALL)
_HEAD_BYTES = 1024
_UTF_16_MARKS = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE
# Encodings of Python that no browser knows.
_PYTHON_ENCODINGS = frozenset({"idna", "punycode", "raw-unicode-escape", "unicode-escape", "utf-7"})
# Encodings that browsers replace by another one, mostly a superset
# (https://encoding.spec.whatwg.org/#names-and-labels). A key is Python's name of the encoding or, if
# Python has none, the label.
_BROWSER_ENCODINGS = {
    "ascii": "cp1252", "iso8859-1": "cp1252", "iso8859-9": "cp1254", "iso8859-11": "cp874", "tis-620": "cp874",
    "gb2312": "gb18030", "gbk": "gb18030", "big5": "big5hkscs", "shift_jis": "cp932", "euc_kr": "cp949",
    "windows-31j": "cp932", "windows-874": "cp874", "iso-8859-8-i": "iso8859-8",
    "utf-16": "utf-8", "utf-16-be": "utf-8", "utf-16-le": "utf-8",
}  # fmt: skip
_BLANKS = re.compile(r"\s+")
_HEADING_TAGS = frozenset({"h1", "h2", "h3", "h4", "h5", "h6"})
_BLOCK_TAG_NAMES = (
    "address article aside blockquote body caption center dd details div dl dt fieldset figcaption figure "
    "form header hr html li main p section summary table tbody td tfoot th thead tr"
)
_BLOCK_TAGS = frozenset(_BLOCK_TAG_NAMES.split())
# A table that contains one of these elements is for layout, not for data.
_LAYOUT_TAGS = "table", "pre", "ul", "ol", *sorted(_HEADING_TAGS)
# The controls of a form are skipped, not the form, which contains the whole page on some sites.
_SKIPPED_TAG_NAMES = "aside button datalist footer head iframe nav noscript script select style svg template textarea"
_SKIPPED_TAGS = frozenset(_SKIPPED_TAG_NAMES.split())
_SKIPPED_ROLES = frozenset({"navigation", "banner", "contentinfo", "search"})


class Markdown(DocumentFiles):
    """CommonMark files with tables; their front matter may have a title, description and date."""

    version = f"3, {format_versions('markdown-it-py')}"
    endings = frozenset({".md", ".markdown"})
    max_bytes = 2 << 20

    def parse(self, data: bytes, name: str) -> ParsedFile:
        """Return a section for each heading of a file.

        Raises:
            DroppedFileError: The file is binary, or not UTF-8.
            MissingExtraError: markdown-it-py is not installed.
        """
        markdown_it = require("markdown_it", extra="markdown")
        front_matter, text = _split_front_matter(decode_text(data))
        builder = SectionBuilder()
        if title := _get_text_field(front_matter, "title"):
            builder.start_section(0, title)
        builder.add_block(_get_text_field(front_matter, "description"))
        parser = markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table")
        _TokenReader(builder).read(parser.parse(text))
        revised = next(filter(None, map(_parse_time, map(front_matter.get, _DATE_FIELDS))), None)
        metadata = {name: front_matter.get(field) for name, field in _METADATA_FIELDS.items()}
        return ParsedFile(builder.finish(), revised, metadata_to_dict(build_metadata(metadata)))


def _split_front_matter(text: str) -> tuple[Mapping[str, Any], str]:
    """Return the front matter (YAML or TOML; empty if it is invalid) and the rest of a text."""
    match = _FRONT_MATTER.match(text)
    if match is None:
        return {}, text
    try:
        front_matter = _parse_yaml(match[2]) if match[1] == "---" else tomllib.loads(match[2])
    except (ValueError, RecursionError):
        front_matter = {}
    return front_matter if isinstance(front_matter, dict) else {}, text[match.end() :]


def _parse_yaml(text: str) -> Any:
    """Parse YAML. Aliases share one object, so a file of nested aliases cannot fill the memory."""
    yaml = require("yaml", extra="markdown")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def _get_text_field(fields: Mapping[str, Any], name: str) -> str:
    field_text = fields.get(name)
    return field_text if isinstance(field_text, str) else ""


def _parse_time(value: object) -> int | None:
    try:
        return parse_seconds(value.isoformat() if isinstance(value, date) else str(value))
    except ValueError:
        return None


class _TokenReader:
    """Add the blocks of a Markdown document to a builder; a list or a table is one block."""

    def __init__(self, builder: SectionBuilder) -> None:
        self._builder = builder
        self._lists: list[str] = []  # item marker of each enclosing list; empty if numbered
        self._lines: list[str] = []  # lines of the outermost list or of the table
        self._cells: list[str] = []
        self._mark = ""  # marker of the list item that has no text yet
        self._heading_level = 0  # level of the heading whose text is the next token
        self._is_in_table = False

    def read(self, tokens: "Iterable[Token]") -> None:
        for token in tokens:
            token_type = token.type
            if token_type == "heading_open" and not self._lists:
                self._heading_level = int(token.tag[1:])
            elif token_type in {"bullet_list_open", "ordered_list_open"}:
                self._lists.append("- " if token_type.startswith("bullet") else "")
            elif token_type == "list_item_open":
                self._mark = "  " * (len(self._lists) - 1) + (self._lists[-1] or f"{token.info}. ")
            elif token_type == "table_open":
                self._is_in_table = True
            elif token_type == "tr_close":
                self._lines.append(" | ".join(self._cells))
                self._cells.clear()
            elif token_type in {"bullet_list_close", "ordered_list_close", "table_close"}:
                self._close_list_or_table()
            elif token_type in {"inline", "fence", "code_block", "html_block"}:
                self._add_text(_render_text(token))

    def _close_list_or_table(self) -> None:
        is_table, self._is_in_table = self._is_in_table, False
        if not is_table:
            self._lists.pop()
        if not self._lists:
            n_headers = 1 if is_table else 0
            self._builder.add_table(self._lines[:n_headers], self._lines[n_headers:])
            self._lines.clear()

    def _add_text(self, text: str) -> None:
        if self._is_in_table:
            self._cells.append(" ".join(text.split()))
        elif self._heading_level:
            self._builder.start_section(self._heading_level, text)
            self._heading_level = 0
        elif self._lists:
            indent = "  " * len(self._lists)
            for line in filter(None, text.splitlines()):
                self._lines.append((self._mark or indent) + line)
                self._mark = ""
        else:
            self._builder.add_block(text)


def _render_text(token: "Token") -> str:
    if token.type == "html_block":
        return unescape(_INVISIBLE_HTML.sub(" ", token.content))
    return _render_inline(token) if token.type == "inline" else token.content


def _render_inline(token: "Token") -> str:
    """Return the visible text of a paragraph, with wrapped lines joined."""
    pieces: list[str] = []
    is_hidden = False  # whether the text is inside <script> or <style>
    for child in token.children or ():
        if child.type == "html_inline":
            if hidden_tag := _HIDDEN_TAG.match(child.content):
                is_hidden = not hidden_tag[1]
            pieces.append("\n" if _LINE_BREAK.match(child.content) else "")
        elif is_hidden:
            continue
        elif child.type == "image":
            pieces.append(_render_inline(child))
        else:
            pieces.append({"softbreak": " ", "hardbreak": "\n"}.get(child.type, child.content))
    return "".join(pieces)


class HtmlPages(DocumentFiles):
    """HTML pages: headings, paragraphs, lists, tables and code of the main part of each page."""

    version = f"4, {format_versions('lxml')}"
    endings = frozenset({".html", ".htm", ".xhtml"})
    max_bytes = 8 << 20

    def parse(self, data: bytes, name: str) -> ParsedFile:
        """Return a section for each heading of a page.

        Raises:
            DroppedFileError: The page is binary, has an unknown encoding, or cannot be parsed.
        """
        from lxml import etree  # noqa: PLC0415 - takes long to import

        from rag_model.corpus.rendered_html import check_attributes  # noqa: PLC0415 - imports lxml

        text = _decode_html(data)
        parser = etree.HTMLParser(encoding="utf-8", remove_comments=True, remove_pis=True, no_network=True)
        try:
            check_attributes(text)
            root = etree.fromstring(text.encode(), parser)
        except (etree.ParseError, UnparsablePageError) as error:
            raise DroppedFileError("damaged") from error
        if any("depth" in log_entry.message for log_entry in parser.error_log.filter_from_fatals()):
            # the parser left out elements that are nested too deeply
            raise DroppedFileError("damaged")
        builder = SectionBuilder()
        if root is not None:
            if title := root.findtext("head/title"):
                builder.start_section(0, title)
            articles = root.findall(".//article")
            main_candidates = [root.find(".//main"), root.find(".//*[@role='main']"), *articles[: len(articles) == 1]]
            main_element = next((candidate for candidate in main_candidates if candidate is not None), root)
            _ElementReader(builder).read(etree.iterwalk(main_element, events=("start", "end")))
        return ParsedFile(builder.finish())


def _decode_html(html_bytes: bytes) -> str:
    """Decode a page from UTF-8, from UTF-16 with a byte order mark, or from the encoding that it
    declares.
    """
    if html_bytes.startswith(_UTF_16_MARKS):
        return clean_text(html_bytes.decode("utf-16", "replace"))
    try:
        return decode_text(html_bytes)
    except DroppedFileError:
        if charset_match := _DECLARED_CHARSET.search(_COMMENT.sub(b"", html_bytes[:_HEAD_BYTES])):
            return decode_charset(html_bytes, charset_match[1].decode())
        raise


def find_charset(content_type: str) -> str:
    """Return the encoding in the value of an HTTP header; empty if there is none."""
    charset_match = _CHARSET.search(content_type)
    return charset_match[1] if charset_match else ""


def decode_charset(html_bytes: bytes, charset: str) -> str:
    """Decode a page from the encoding that it declares, as browsers do.

    Raises:
        DroppedFileError: The encoding is unknown, or the page cannot be decoded from it.
    """
    label = charset.lower().removeprefix("x-")
    if label.replace("_", "-") in _PYTHON_ENCODINGS:
        raise DroppedFileError("not_utf8")
    try:
        codec_name = codecs.lookup(_BROWSER_ENCODINGS.get(label, label)).name
        encoding = _BROWSER_ENCODINGS.get(codec_name, codec_name)
        # Browsers show nothing for the few bytes that have no character in these encodings.
        errors = "ignore" if encoding in {"cp1252", "cp1254"} else "strict"
        return clean_text(html_bytes.decode(encoding, errors))
    except (LookupError, ValueError) as error:
        raise DroppedFileError("not_utf8") from error


class _ElementReader:
    """Add the blocks of an HTML page to a builder; a list is one block."""

    def __init__(self, builder: SectionBuilder) -> None:
        self._builder = builder
        self._pieces: list[str] = []  # text of the current block
        self._list_depth = 0  # number of enclosing lists

    def read(self, walker: Any) -> None:
        is_skipped = False  # whether the next event is the end of a skipped element
        for event, element in walker:
            if event == "end":
                if not is_skipped:
                    self._end_element(element.tag)
                is_skipped = False
                self._add_text(element.tail)
            elif self._handle_whole_element(element):
                is_skipped = True
                walker.skip_subtree()
            else:
                self._start_element(element.tag)
                self._add_text(element.text)

    def _handle_whole_element(self, element: Any) -> bool:
        """Add a code block or data table; return whether the rest of the element is skipped."""
        name = element.tag
        if name == "pre":
            self._add_block("".join(element.itertext()))
            return True
        if name == "table" and all(element.find(f".//{tag}") is None for tag in _LAYOUT_TAGS):
            self._add_table(element)
            return True
        return _is_skipped(element)

    def _start_element(self, name: str) -> None:
        if name in {"ul", "ol"}:
            self._end_block()
            self._list_depth += 1
        elif name == "li":
            self._pieces.append("\n" + "  " * (self._list_depth - 1) + "- ")
        elif name == "br":
            self._pieces.append("\n")
        elif name in _BLOCK_TAGS or name in _HEADING_TAGS:
            self._end_block()

    def _end_element(self, name: str) -> None:
        if name in _HEADING_TAGS and not self._list_depth:
            heading, self._pieces = "".join(self._pieces), []
            self._builder.start_section(int(name[1]), heading)
        elif name in {"ul", "ol"}:
            self._list_depth -= 1
            self._end_block()
        elif name in _BLOCK_TAGS:
            self._end_block()

    def _end_block(self) -> None:
        if not self._list_depth:
            self._builder.add_block("".join(self._pieces))
            self._pieces = []
        elif self._pieces and not self._pieces[-1].endswith("- "):
            self._pieces.append("\n" + "  " * self._list_depth)

    def _add_block(self, text: str) -> None:
        if self._list_depth:
            self._pieces.append("".join(f"\n{'  ' * self._list_depth}{line}" for line in text.split("\n")))
        else:
            self._end_block()
            self._builder.add_block(text)

    def _add_table(self, element: Any) -> None:
        caption = " ".join("".join(element.xpath("caption//text()")).split())
        lines = [caption] if caption else []
        n_headers = len(lines)
        for row in element.iter("tr"):
            cells = [cell for cell in row if cell.tag in {"td", "th"}]
            texts = [" ".join("".join(_iter_cell_text(cell)).split()) for cell in cells]
            if any(texts):
                n_headers += n_headers == len(lines) and all(cell.tag == "th" for cell in cells)
                lines.append(" | ".join(texts))
        if self._list_depth:
            self._add_block("\n".join(lines))
        else:
            self._end_block()
            self._builder.add_table(lines[:n_headers], lines[n_headers:])

    def _add_text(self, text: str | None) -> None:
        inline_text = _BLANKS.sub(" ", text or "")
        is_after_space = not self._pieces or self._pieces[-1][-1].isspace()
        if inline_text := inline_text.lstrip() if is_after_space else inline_text:
            self._pieces.append(inline_text)


def _is_skipped(element: Any) -> bool:
    """Return whether an element is hidden, a control of a form, or not in the main part of a page."""
    is_hidden = "hidden" in element.attrib or element.get("aria-hidden") == "true"
    if element.tag in _SKIPPED_TAGS or element.get("role") in _SKIPPED_ROLES or is_hidden:
        return True
    if element.tag == "header":  # the header of an article contains its heading
        return not any(ancestor.tag in {"article", "main"} for ancestor in element.iterancestors())
    return element.tag in {"label", "legend"} and next(element.iterancestors("form"), None) is not None


def _iter_cell_text(cell: Any) -> Iterator[str]:
    """Yield the text of a cell, with a space at each line break and around each block."""
    from lxml import etree  # noqa: PLC0415 - takes long to import

    walker = etree.iterwalk(cell, events=("start", "end"))
    for event, element in walker:
        if element.tag == "br" or element.tag in _BLOCK_TAGS:
            yield " "
        if event == "start" and _is_skipped(element):
            walker.skip_subtree()
        else:
            yield (element.text if event == "start" else element.tail if element is not cell else None) or ""


MARKDOWN = Markdown()
HTML = HtmlPages()
