"""Files of Markdown: a section per heading, with blocks of code and tables as they are."""

import re
import tomllib
from collections.abc import Iterable, Mapping
from datetime import date
from html import unescape
from typing import TYPE_CHECKING, Any

from rag_model.corpus.dump_formats.document_files import (
    DocumentFiles,
    ParsedFile,
    SectionBuilder,
    decode_text,
)
from rag_model.corpus.records import parse_seconds
from rag_model.extras import format_versions, require

if TYPE_CHECKING:
    from markdown_it.token import Token

_FRONT_MATTER = re.compile(r"(---|\+\+\+)[ \t]*\n(.{0,65536}?)^\1[ \t]*$", re.DOTALL | re.MULTILINE)
_DATES = ("lastmod", "updated", "date")
_TAG = re.compile(r"<!--.*?(?:-->|\Z)|</?[A-Za-z][^<>]*>", re.DOTALL)


class Markdown(DocumentFiles):
    """Files of CommonMark with tables, whose front matter gives a title, a description and a date."""

    version = f"1, {format_versions('markdown-it-py')}"
    endings = frozenset({".md", ".markdown"})
    max_bytes = 2 << 20

    def parse(self, data: bytes, name: str) -> ParsedFile:
        """Return the sections of a file, by headings.

        Raises:
            DroppedFileError: The file is binary, or not UTF-8.
            MissingExtraError: markdown-it-py is not installed.
        """
        markdown_it = require("markdown_it", extra="markdown")
        values, text = _split_front_matter(decode_text(data))
        builder = SectionBuilder()
        if title := _get_text(values, "title"):
            builder.start_section(0, title)
        builder.add_block(_get_text(values, "description"))
        parser = markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table")
        _TokenReader(builder).read(parser.parse(text))
        return ParsedFile(builder.finish(), next(filter(None, map(_to_seconds, map(values.get, _DATES))), None))


def _split_front_matter(text: str) -> tuple[Mapping[str, Any], str]:
    """Return the values of YAML or TOML at the start of a text, and the rest; none if they are invalid."""
    matter = _FRONT_MATTER.match(text)
    if matter is None:
        return {}, text
    try:
        values = _parse_yaml(matter[2]) if matter[1] == "---" else tomllib.loads(matter[2])
    except (ValueError, RecursionError):
        values = {}
    return values if isinstance(values, dict) else {}, text[matter.end() :]


def _parse_yaml(text: str) -> Any:
    """Return the values of YAML; aliases share their value, and are not copied."""
    yaml = require("yaml", extra="markdown")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def _get_text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    return value if isinstance(value, str) else ""


def _to_seconds(value: object) -> int | None:
    try:
        return parse_seconds(value.isoformat() if isinstance(value, date) else str(value))
    except ValueError:
        return None


class _TokenReader:
    """Add the blocks of a document to a builder in their order; a list is one block, as a table is."""

    def __init__(self, builder: SectionBuilder) -> None:
        self._builder = builder
        self._lists: list[str] = []  # marks of the enclosing lists
        self._lines: list[str] = []  # of the outermost list, or of a table
        self._cells: list[str] = []
        self._mark = ""  # of the item that has no text yet
        self._level = 0  # of the heading whose text comes next
        self._is_in_table = False

    def read(self, tokens: "Iterable[Token]") -> None:
        for token in tokens:
            kind = token.type
            if kind == "heading_open" and not self._lists:
                self._level = int(token.tag[1:])
            elif kind in {"bullet_list_open", "ordered_list_open"}:
                self._lists.append("- " if kind.startswith("bullet") else "")
            elif kind == "list_item_open":
                self._mark = "  " * (len(self._lists) - 1) + (self._lists[-1] or f"{token.info}. ")
            elif kind == "table_open":
                self._is_in_table = True
            elif kind == "tr_close":
                self._lines.append(" | ".join(self._cells))
                self._cells.clear()
            elif kind in {"bullet_list_close", "ordered_list_close", "table_close"}:
                self._close_block()
            elif kind in {"inline", "fence", "code_block", "html_block"}:
                self._add_text(_render_text(token))

    def _close_block(self) -> None:
        if not self._is_in_table:
            self._lists.pop()
        self._is_in_table = False
        if not self._lists:
            self._builder.add_block("\n".join(self._lines))
            self._lines.clear()

    def _add_text(self, text: str) -> None:
        if self._is_in_table:
            self._cells.append(" ".join(text.split()))
        elif self._level:
            self._builder.start_section(self._level, text)
            self._level = 0
        elif self._lists:
            indent = "  " * len(self._lists)
            for line in filter(None, text.splitlines()):
                self._lines.append((self._mark or indent) + line)
                self._mark = ""
        else:
            self._builder.add_block(text)


def _render_text(token: "Token") -> str:
    if token.type == "html_block":
        return unescape(_TAG.sub(" ", token.content))
    return _render_inline(token) if token.type == "inline" else token.content


def _render_inline(token: "Token") -> str:
    """Return the words of a paragraph that a reader sees, with wrapped lines joined."""
    return "".join(
        _render_inline(child)
        if child.type == "image"
        else {"softbreak": " ", "hardbreak": "\n", "html_inline": ""}.get(child.type, child.content)
        for child in token.children or ()
    )


MARKDOWN = Markdown()
