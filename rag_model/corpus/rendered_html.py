"""Convert the HTML that MediaWiki renders to plain text by section, as a reader sees it.

The counterpart of `wikitext`: templates and Lua modules are rendered already. The same is dropped:
tables, infoboxes, boxes of navigation, pictures with captions, references, notices that point
elsewhere, blocks of code, and what is no sentence in sections of references and links. Both parsers
are known, the old one of `action=parse` and Parsoid, whose `typeof` says what an element was
(https://www.mediawiki.org/wiki/Specs/HTML).
"""

import re
from collections.abc import Iterator
from typing import Any

from lxml import etree

from rag_model.corpus.markup.blocks import RawSection
from rag_model.corpus.markup.literal import GAP, LINK_END, LINK_START, protect, remove_noncharacters
from rag_model.corpus.markup.tex import render_tex
from rag_model.corpus.records import Section, Siteinfo, UnparsablePageError
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


def clean_html(text: str, siteinfo: Siteinfo, *, anchors: bool = False) -> tuple[Section, ...]:
    """Return the sections of a rendered page that contain text, as `wikitext.clean_wikitext` does.

    Raises:
        UnparsablePageError: The page exceeds `MAX_CHARS`.
    """
    if len(text) > MAX_CHARS:
        raise UnparsablePageError(f"the page has more than {MAX_CHARS} characters of HTML")
    marks = (LINK_START, LINK_END) if anchors else ("", "")
    return clean_sections(_split_sections(text, marks), lambda raw: raw, siteinfo.language, anchors=anchors)


def _split_sections(text: str, marks: tuple[str, str]) -> Iterator[RawSection]:
    """Yield the sections, whose text is protected and whose markup is blanks, line ends and gaps."""
    level, heading, pieces = 0, "", list[str]()
    for kind, value in _walk(text):
        if kind == "text":
            pieces.append(protect(remove_noncharacters(value)).replace("\n", " "))
        elif kind == "heading":
            yield RawSection(level, heading, "".join(pieces))
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


def _walk(text: str) -> Iterator[tuple[str, str]]:
    """Yield text, headings, links and literal pieces in the order of the page."""
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
            if skipped is None:
                yield "text", element.tail or ""


def _check_attributes(text: str) -> None:
    """Refuse a tag with so many attributes that the parser, which compares all pairs, takes long."""
    for tag in _TAG.finditer(text):
        # an attribute has a character and a separator
        if len(tag[1]) > 2 * _MAX_ATTRIBUTES and len(_ATTRIBUTE.findall(tag[1])) > _MAX_ATTRIBUTES:
            raise UnparsablePageError(f"a tag of the page has more than {_MAX_ATTRIBUTES} attributes")


def _mark(element: Any, end: str = "") -> tuple[str, str]:
    """Return what the start of an element is in the text, or its end if `end` is a slash."""
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


def _replace(element: Any) -> str:
    """Return the text in place of a dropped element or a formula; empty if the element is kept."""
    if element.tag == "math" or (element.tag == "img" and "mwe-math" in element.get("class", "")):
        tex = element.get("alttext") or element.get("alt") or ""
        return protect(remove_noncharacters(render_tex(tex))) or GAP
    if (
        element.tag in _DROPPED_TAGS
        or not _DROPPED_CLASSES.isdisjoint(element.get("class", "").split())
        or element.get("role") in _ROLES
        or any(kind.startswith(_DROPPED_TYPES) for kind in element.get("typeof", "").split())
        or "display:none" in element.get("style", "").replace(" ", "")
    ):
        return GAP
    return ""
