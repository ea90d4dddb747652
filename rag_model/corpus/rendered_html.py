"""Convert the HTML that MediaWiki renders to plain text by section, as a reader sees it.

In this HTML, unlike in `wikitext`, templates and Lua modules are rendered already. This module and
`wikitext` drop the same content: tables and infoboxes unless they are requested, navigation boxes,
pictures with captions, references, notices that point elsewhere, blocks of code, and, in sections
of references and links, everything except sentences. The HTML may come from the old parser
(`action=parse`) or from Parsoid, whose attribute `typeof` has the kind of an element
(https://www.mediawiki.org/wiki/Specs/HTML).
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

MAX_CHARS = 32 << 20  # maximum characters; Parsoid's attributes repeat the wikitext of templates

_MAX_DEPTH = 1_000  # maximum depth; the parser drops elements at more than twice this depth
_MAX_ATTRIBUTES = 1_000  # maximum attributes of a tag
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
_BLOCKS = "blockquote br caption center dd div dl dt hr li ol p section td th tr ul"
_DROPPED_TAGS, _DROPPED_CLASSES = frozenset(_TAGS.split()), frozenset(_CLASSES.split())
_DROPPED_TYPES = tuple(f"mw:{name}" for name in _TYPES.split())
_DROPPED_ROLES = frozenset({"navigation", "note"})
_BLOCK_TAGS, _ITEM_TAGS = frozenset(_BLOCKS.split()), frozenset({"li", "dd", "dt"})
_HEADING_TAGS = frozenset({"h1", "h2", "h3", "h4", "h5", "h6"})
# Noncharacters that represent markup until the joined text of a section is protected.
_LINE, _ITEM, _SUPERSCRIPT, _SUPERSCRIPT_END = "\ufde8", "\ufde9", "\ufdea", "\ufdeb"
_MARKUP = {_LINE: "\n", _ITEM: "\n* ", _SUPERSCRIPT: "<sup>", _SUPERSCRIPT_END: "</sup>"}
_START_MARKS = {name: _ITEM if name in _ITEM_TAGS else _LINE for name in _BLOCK_TAGS} | {"sup": _SUPERSCRIPT}
_END_MARKS = dict.fromkeys(_BLOCK_TAGS, _LINE) | {"sup": _SUPERSCRIPT_END}


def clean_html(
    text: str, siteinfo: Siteinfo, *, anchors: bool = False, structures: Collection[StructureName] = ()
) -> tuple[Section, ...]:
    """Return the sections of a rendered page, as `wikitext.clean_wikitext` does; lists stay text.

    Raises:
        UnparsablePageError: The page exceeds `MAX_CHARS`.
    """
    if len(text) > MAX_CHARS:
        raise UnparsablePageError(f"the page has more than {MAX_CHARS} characters of HTML")
    link_marks = (LINK_START, LINK_END) if anchors else ("", "")
    grids: list[Grid] | None = [] if structures else None  # tables of the last yielded section

    def extract_structures(section: RawSection) -> tuple[str, list[Structure]]:
        requested_grids = (grid for grid in grids or () if is_requested(grid, structures))
        results = (grid.to_structure(to_plain_text) for grid in requested_grids)
        return section.body, [structure for structure in results if structure is not None]

    raw_sections = _split_sections(text, link_marks, grids)
    language = siteinfo.language
    return clean_sections(
        raw_sections, lambda raw: raw, language, anchors=anchors, extract=extract_structures if structures else None
    )


def _split_sections(text: str, link_marks: tuple[str, str], grids: list[Grid] | None) -> Iterator[RawSection]:
    """Yield the sections as protected text; its only markup is `_MARKUP`, `link_marks` and gaps.

    If `grids` is a list, it contains the tables of the section that was yielded last.
    """
    level, heading, section_texts = 0, "", list[str]()
    skipped_element: Any = None  # the dropped element whose end is the next event
    depth = 0
    events = _iter_elements(text)
    for event, element in events:
        name = element.tag
        if event == "start":
            depth += 1
            if depth > _MAX_DEPTH:
                raise _create_nesting_error()
            if replacement := _get_replacement(element):
                section_texts.append(replacement)
                skipped_element = element
                events.skip_subtree()
                continue
            if name in _HEADING_TAGS:
                yield RawSection(level, heading, _protect_text("".join(section_texts)))
                if grids is not None:
                    grids.clear()
                level, heading, section_texts = int(name[1]), "", []
            is_link = name == "a" and _is_link(element)
            section_texts.append(link_marks[0] if is_link else _START_MARKS.get(name, ""))
            section_texts.append(_remove_codes(element.text))
            continue
        depth -= 1
        if skipped_element is not None:
            skipped_element = None
            if grids is not None and name == "table":
                grids.append(_read_table(element))
        elif name in _HEADING_TAGS:
            heading, section_texts = _protect_text("".join(section_texts)), []
        else:
            is_link = name == "a" and _is_link(element)
            section_texts.append(link_marks[1] if is_link else _END_MARKS.get(name, ""))
        section_texts.append(_remove_codes(element.tail))
    yield RawSection(level, heading, _protect_text("".join(section_texts)))


def _remove_codes(text: str | None) -> str:
    """Return the text of an element without noncharacters, because these represent markup here."""
    return text if text and text.isascii() else remove_noncharacters(text or "")


def _protect_text(text: str) -> str:
    """Protect the joined text of elements, and replace the keys of `_MARKUP` by their markup."""
    text = protect(text.replace("\n", " "))
    for code, markup in _MARKUP.items():
        text = text.replace(code, markup)
    return text


def _iter_elements(text: str) -> Any:
    """Return an iterator over the starts and ends of the elements of a page."""
    check_attributes(text)
    parser = etree.HTMLParser(
        encoding="utf-8",
        remove_comments=True,
        remove_pis=True,
        no_network=True,
        huge_tree=True,
    )
    text = text.replace("\x00", "")  # the parser would stop at a NUL
    try:
        root = etree.fromstring(text.encode("utf-8", "replace"), parser)
    except etree.ParseError:  # the text has no element and no words
        root = None
    if any("depth" in log_entry.message for log_entry in parser.error_log.filter_from_fatals()):
        raise _create_nesting_error()
    return iter(()) if root is None else etree.iterwalk(root, events=("start", "end"))


def _create_nesting_error() -> UnparsablePageError:
    return UnparsablePageError(f"the page nests more than {_MAX_DEPTH} elements of HTML")


def _read_table(table: Any) -> Grid:
    """Return the cells of a table; a table in a cell becomes lines of that cell."""
    grid = Grid(table.get("class", "") + (" noprint" if table.get("role") in _DROPPED_ROLES else ""))
    builder = GridBuilder(grid)
    skipped_element: Any = None
    depth = 0  # nested tables
    events = etree.iterwalk(table, events=("start", "end"))
    for event, element in events:
        name, is_start = element.tag, event == "start"
        if skipped_element is not None:
            skipped_element = None
            builder.add_text(_protect_text(_remove_codes(element.tail)))
            continue
        if is_start and element is not table and (replacement := _get_replacement(element, in_table=True)):
            builder.add_text(replacement)
            skipped_element = element
            events.skip_subtree()
            continue
        depth += (name == "table") * (1 if is_start else -1)
        if depth == 1 and name in {"tr", "td", "th", "caption"}:
            attributes = " ".join(f'{key}="{value}"' for key, value in element.attrib.items())
            builder.handle_tag(name, attributes, is_end=not is_start)
        elif element is not table:
            cell_mark = (_START_MARKS if is_start else _END_MARKS).get(name)
            builder.add_text(_MARKUP[cell_mark] if cell_mark else "")
        if is_start or element is not table:
            text = element.text if is_start else element.tail
            builder.add_text(_protect_text(_remove_codes(text)))
    builder.end_cell()
    return grid


def check_attributes(text: str) -> None:
    """Refuse a tag with too many attributes, because the parser compares all pairs of them."""
    for tag in _TAG.finditer(text):
        # An attribute has at least one character and a separator.
        if len(tag[1]) > 2 * _MAX_ATTRIBUTES and len(_ATTRIBUTE.findall(tag[1])) > _MAX_ATTRIBUTES:
            raise UnparsablePageError(f"a tag of the page has more than {_MAX_ATTRIBUTES} attributes")


def _is_link(element: Any) -> bool:
    """Return whether an element `a` leads to a page of the wiki."""
    return "external" not in element.get("class", "") and "mw:ExtLink" not in element.get("rel", "")


def _get_replacement(element: Any, *, in_table: bool = False) -> str:
    """Return the text that replaces a dropped element or formula; empty if the element is kept."""
    if element.tag == "math" or (element.tag == "img" and "mwe-math" in element.get("class", "")):
        tex_source = element.get("alttext") or element.get("alt") or ""
        return protect(remove_noncharacters(render_tex(tex_source))) or GAP
    if (
        (element.tag in _DROPPED_TAGS and not (in_table and element.tag == "table"))
        or not _DROPPED_CLASSES.isdisjoint(element.get("class", "").split())
        or element.get("role") in _DROPPED_ROLES
        or any(kind.startswith(_DROPPED_TYPES) for kind in element.get("typeof", "").split())
        or "display:none" in element.get("style", "").replace(" ", "")
    ):
        return GAP
    return ""
