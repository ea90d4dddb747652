"""Convert the HTML that MediaWiki renders to plain text by section, as a reader sees it.

The counterpart of `wikitext`: templates and Lua modules are rendered already. The same is dropped:
tables and infoboxes unless they are requested, boxes of navigation, pictures with captions,
references, notices that point elsewhere, blocks of code, and what is no sentence in sections of
references and links. Both parsers are known, the old one of `action=parse` and Parsoid, whose
`typeof` says what an element was (https://www.mediawiki.org/wiki/Specs/HTML).
"""

import re
from collections.abc import Collection, Iterator
from typing import Any

from lxml import etree

from rag_model.corpus.markup.blocks import RawSection
from rag_model.corpus.markup.literal import GAP, LINK_END, LINK_START, protect, remove_noncharacters
from rag_model.corpus.markup.prose import to_plain_text
from rag_model.corpus.markup.structures import Grid, GridBuilder, is_requested
from rag_model.corpus.markup.tex import render_tex
from rag_model.corpus.records import Section, Siteinfo, Structure, StructureName, UnparsablePageError
from rag_model.corpus.wikitext import clean_sections

MAX_CHARS = 32 << 20  # characters of a page: attributes of Parsoid repeat the wikitext of templates

_MAX_DEPTH = 1_000  # nested elements; the parser drops what is deeper than twice as many
_MAX_ATTRIBUTES = 1_000  # of a tag
_ATTRIBUTE = re.compile(r"""[\s/=]*+[^\s=>/]++(?:\s*+=\s*+(?:"[^"]*+"?+|'[^']*+'?+|[^\s>"']*+))?+""")
_TAG = re.compile(rf"<[A-Za-z][^\s=/>]*+((?:{_ATTRIBUTE.pattern})*+)")

_TAGS = "audio figure head map object pre script style svg table title video"
_CLASSES = (
    "ambox authority-control catlinks dablink error gallery hatnote infobox mbox mbox-small metadata "
    "mw-editsection mw-empty-elt mw-highlight mw-references-wrap navbox navbox-styles "
    "navigation-not-searchable noprint portal-bar portalbox reference references reflist rellink "
    "shortdescription side-box sidebar sistersitebox stub succession-box thumb toc vertical-navbox"
)
_TYPES = "File Image Video Extension/ref Extension/gallery Extension/timeline Extension/templatestyles"
_BLOCK = "blockquote br caption center dd div dl dt hr li ol p section td th tr ul"
_DROPPED_TAGS, _DROPPED_CLASSES = frozenset(_TAGS.split()), frozenset(_CLASSES.split())
_DROPPED_TYPES = tuple(f"mw:{name}" for name in _TYPES.split())
_ROLES = frozenset({"navigation", "note"})
_BLOCKS, _ITEMS = frozenset(_BLOCK.split()), frozenset({"li", "dd", "dt"})
_HEADINGS = frozenset({"h1", "h2", "h3", "h4", "h5", "h6"})


def clean_html(
    text: str, siteinfo: Siteinfo, *, anchors: bool = False, structures: Collection[StructureName] = ()
) -> tuple[Section, ...]:
    """Return the sections of a rendered page, as `wikitext.clean_wikitext` does; lists stay text.

    Raises:
        UnparsablePageError: The page exceeds `MAX_CHARS`.
    """
    if len(text) > MAX_CHARS:
        raise UnparsablePageError(f"the page has more than {MAX_CHARS} characters of HTML")
    marks = (LINK_START, LINK_END) if anchors else ("", "")
    grids: list[Grid] | None = [] if structures else None  # tables of the last yielded section

    def extract(section: RawSection) -> tuple[str, list[Structure]]:
        requested = (grid for grid in grids or () if is_requested(grid, structures))
        found = (grid.to_structure(to_plain_text) for grid in requested)
        return section.body, [structure for structure in found if structure is not None]

    raw_sections = _split_sections(text, marks, grids)
    language = siteinfo.language
    return clean_sections(
        raw_sections, lambda raw: raw, language, anchors=anchors, extract=extract if structures else None
    )


def _split_sections(text: str, marks: tuple[str, str], grids: list[Grid] | None) -> Iterator[RawSection]:
    """Yield the sections, whose text is protected and whose markup is blanks, line ends and gaps.

    After each section, `grids` has the tables of that section, unless it is None.
    """
    level, heading, pieces = 0, "", list[str]()
    for kind, value in _walk(text, grids):
        if kind == "text":
            pieces.append(_protect_text(value))
        elif kind == "heading":
            yield RawSection(level, heading, "".join(pieces))
            if grids is not None:
                grids.clear()
            level, heading, pieces = int(value[1]), "", []
        elif kind == "/heading":
            heading, pieces = "".join(pieces), []
        elif kind == "link":
            pieces.append(marks[0])
        elif kind == "/link":
            pieces.append(marks[1])
        else:
            pieces.append(value)
    yield RawSection(level, heading, "".join(pieces))


def _protect_text(text: str) -> str:
    return protect(remove_noncharacters(text)).replace("\n", " ")


def _walk(text: str, tables: list[Grid] | None) -> Iterator[tuple[str, str]]:
    """Yield text, headings, links and literal pieces in the order of the page, and append the
    tables, which are left out, to `tables`.
    """
    parser = etree.HTMLPullParser(
        events=("start", "end"), remove_comments=True, remove_pis=True, no_network=True, huge_tree=True
    )
    _check_attributes(text)
    parser.feed(text.replace("\x00", ""))  # the parser would stop there
    parser.close()
    skipped: Any = None  # the dropped element whose end is awaited
    depth = 0
    for event, element in parser.read_events():
        depth += 1 if event == "start" else -1
        if depth > _MAX_DEPTH:
            raise UnparsablePageError(f"the page nests more than {_MAX_DEPTH} elements of HTML")
        if event == "start" and skipped is None:
            if replacement := _replace(element):
                yield "piece", replacement
                skipped = element
            else:
                yield _mark(element)
                yield "text", element.text or ""
        elif event == "end":
            if skipped is None:
                yield _mark(element, "/")
            elif skipped is element:
                skipped = None
                if tables is not None and element.tag == "table":
                    tables.append(_read_table(element))
            if skipped is None:
                yield "text", element.tail or ""


def _read_table(table: Any) -> Grid:
    """Return the cells of a table; those of a table in a cell are lines of the cell."""
    grid = Grid(table.get("class", "") + (" noprint" if table.get("role") in _ROLES else ""))
    builder = GridBuilder(grid)
    skipped: Any = None
    depth = 0  # nested tables
    for event, element in etree.iterwalk(table, events=("start", "end")):
        name, is_start = element.tag, event == "start"
        if skipped is not None:
            if element is skipped and not is_start:
                skipped = None
                builder.add_text(_protect_text(element.tail or ""))
            continue
        if is_start and element is not table and (replacement := _replace(element, in_table=True)):
            builder.add_text(replacement)
            skipped = element
            continue
        depth += (name == "table") * (1 if is_start else -1)
        if depth == 1 and name in {"tr", "td", "th", "caption"}:
            attributes = " ".join(f'{key}="{value}"' for key, value in element.attrib.items())
            builder.handle_tag(name, attributes, is_end=not is_start)
        elif element is not table:
            mark = _mark(element, "" if is_start else "/")
            builder.add_text(mark[1] if mark[0] == "piece" else "")
        if is_start or element is not table:
            builder.add_text(_protect_text((element.text if is_start else element.tail) or ""))
    builder.end_cell()
    return grid


def _check_attributes(text: str) -> None:
    """Refuse a tag with so many attributes that the parser, which compares all pairs, takes long."""
    for tag in _TAG.finditer(text):
        # an attribute has a character and a separator
        if len(tag[1]) > 2 * _MAX_ATTRIBUTES and len(_ATTRIBUTE.findall(tag[1])) > _MAX_ATTRIBUTES:
            raise UnparsablePageError(f"a tag of the page has more than {_MAX_ATTRIBUTES} attributes")


def _mark(element: Any, end: str = "") -> tuple[str, str]:
    """Return the mark of an element's start in the text, or of its end if `end` is a slash."""
    name = element.tag
    if name in _HEADINGS:
        return f"{end}heading", name
    if name == "a" and "external" not in element.get("class", "") and "mw:ExtLink" not in element.get("rel", ""):
        return f"{end}link", ""
    if name == "sup":
        return "piece", f"<{end}sup>"
    if name in _BLOCKS:
        return "piece", "\n* " if name in _ITEMS and not end else "\n"
    return "piece", ""


def _replace(element: Any, *, in_table: bool = False) -> str:
    """Return the text in place of a dropped element or a formula; empty if the element is kept."""
    if element.tag == "math" or (element.tag == "img" and "mwe-math" in element.get("class", "")):
        tex = element.get("alttext") or element.get("alt") or ""
        return protect(remove_noncharacters(render_tex(tex))) or GAP
    if (
        (element.tag in _DROPPED_TAGS and not (in_table and element.tag == "table"))
        or not _DROPPED_CLASSES.isdisjoint(element.get("class", "").split())
        or element.get("role") in _ROLES
        or any(kind.startswith(_DROPPED_TYPES) for kind in element.get("typeof", "").split())
        or "display:none" in element.get("style", "").replace(" ", "")
    ):
        return GAP
    return ""
