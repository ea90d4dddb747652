"""Block structure of wikitext: extension tags, comments, tables, and headings.

Extension tags and comments are removed first, because their contents must not be parsed as markup,
for example a reference with half a template or a formula with many braces. As in MediaWiki, a tag
extends to the first closing tag of its name; if there is none, only the tag itself is removed. An
unclosed comment hides the rest of the page.

Tables (`{| … |}`, `<table>`) are removed before templates are parsed. DPR's corpus has no tables,
and a passage of cells without headers answers no question. Without tables, the template scanner
also has far fewer `|` to parse.

Under the headings of references and links (`articles.Language.apparatus_headings`) and in their
subsections only running text is kept, as in DPR: lists of references, links and books answer no
question, but would make a tenth of all passages. The heading alone is not enough to drop a section,
because "Literature", "Sources" and "Notes" can also be subjects of an article.
"""

import html
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from rag_model.corpus.articles import get_language
from rag_model.corpus.markup.literal import GAP, protect
from rag_model.corpus.markup.prose import SENTENCE_ENDS
from rag_model.corpus.markup.tex import render_tex

# These tags contain references, media or settings instead of running text. Blocks of code and
# preformatted text are dropped as in DPR: they are listings and diagrams, not prose. Code inside a
# sentence is kept.
_DROPPED_TAGS = (
    "ref references gallery timeline score imagemap hiero includeonly templatedata templatestyles "
    "graph mapframe maplink inputbox categorytree indicator section labeledsectiontransclusion rss "
    "pre infobox"
)


def _render_literal(attributes: str, body: str) -> str:
    return protect(html.unescape(body)) or GAP


def _drop_tag(attributes: str, body: str) -> str:
    return GAP


def _render_listing(attributes: str, body: str) -> str:
    return protect(html.unescape(body)) if "inline" in attributes or "none" in attributes else GAP


def _render_tabs(attributes: str, body: str) -> str:
    """Render `<tabber>Title=content|-|…</tabber>` as titles and contents, which may have markup."""
    tabs = (tab.strip().partition("=") for tab in body.split("|-|") if tab.strip())
    return "\n" + "\n".join(f"{title.strip()}\n{content.strip()}" for title, _, content in tabs) + "\n"


_TAG_RENDERERS: dict[str, Callable[[str, str], str]] = {
    **dict.fromkeys(_DROPPED_TAGS.split(), _drop_tag),
    "syntaxhighlight": _render_listing,
    "source": _render_listing,
    "nowiki": _render_literal,
    "tabber": _render_tabs,
    "langconvert": lambda _, body: body,
    "math": lambda _, body: protect(render_tex(body)),
    "chem": lambda _, body: protect(render_tex(body)),
    "ce": lambda _, body: protect(render_tex(body)),
}
_INCLUDE = re.compile(r"</?(?:no|only)include\s*/?>", re.IGNORECASE)
_OPENING_TAG = re.compile(rf"<!--|<({'|'.join(_TAG_RENDERERS)})(?=[\s/>])([^<>]*)>", re.IGNORECASE)
_CLOSING_TAGS = {name: re.compile(rf"</{name}\s*>", re.IGNORECASE) for name in _TAG_RENDERERS}


def strip_extensions(text: str) -> str:
    """Remove comments and extension tags; their visible text is kept as literal text.

    The time is linear: each position is searched once, and a closing tag that was not found is not
    searched again.
    """
    if "include" in text or "INCLUDE" in text:
        text = _INCLUDE.sub("", text)
    text_parts: list[str] = []
    unclosed_names: set[str] = set()
    offset = 0
    while opening := _OPENING_TAG.search(text, offset):
        text_parts.append(text[offset : opening.start()])
        replacement, offset = _render_tag(text, opening, unclosed_names)
        text_parts.append(replacement)
    text_parts.append(text[offset:])
    return "".join(text_parts)


def _render_tag(text: str, opening: re.Match[str], unclosed_names: set[str]) -> tuple[str, int]:
    """Return (replacement, end) of the tag or comment that starts with `opening`."""
    if opening[1] is None:
        comment_end = text.find("-->", opening.end())
        return "", len(text) if comment_end < 0 else comment_end + 3
    name, attributes = opening[1].lower(), opening[2]
    if attributes.endswith("/"):
        return _TAG_RENDERERS[name](attributes, ""), opening.end()
    closing = None if name in unclosed_names else _CLOSING_TAGS[name].search(text, opening.end())
    if closing is None:
        unclosed_names.add(name)
        return protect(opening[0]) if name == "nowiki" else "", opening.end()
    return _TAG_RENDERERS[name](attributes, text[opening.end() : closing.start()]), closing.end()


# A table opens and closes at the start of a line; `|}}` ends a template with an empty last
# argument.
_WIKI_MARK = re.compile(r"^[ \t:*#]*(?:(\{\|)|\|\}(?!\}))", re.MULTILINE)
_HTML_MARK = re.compile(r"<(?:(table)\b|/table)[^<>]*>", re.IGNORECASE)


class CutText(NamedTuple):
    """A text without its tables, and the removed tables with their offsets in this text."""

    text: str
    offsets: Sequence[int]  # ascending
    tables: Sequence[str]

    def select(self, start: int, end: int) -> Sequence[str]:
        """Return the tables removed from a range of the text, both ends included."""
        return self.tables[bisect_left(self.offsets, start) : bisect_right(self.offsets, end)]


def cut_tables(text: str) -> CutText:
    """Remove closed tables with their contents; `prose` removes the rows of unclosed tables.

    The time is linear: one pass pairs openings and closings, and only the outermost pairs are
    removed.
    """
    tables: list[tuple[int, str]] = []
    for mark_pattern in (_WIKI_MARK, _HTML_MARK):
        if not mark_pattern.search(text):
            continue
        spans = _find_outermost_spans(mark_pattern, text)
        span_starts = [start for start, _ in spans]
        # number of characters that are removed before each span
        removed_lengths = [0, *accumulate(end - start for start, end in spans)]
        for i, (offset, table) in enumerate(tables):  # shift offsets to the text without the spans
            n_spans_before = bisect_left(span_starts, offset)
            overlap = max(0, spans[n_spans_before - 1][1] - offset) if n_spans_before else 0
            tables[i] = offset - removed_lengths[n_spans_before] + overlap, table
        tables += [(start - removed_lengths[i], text[start:end]) for i, (start, end) in enumerate(spans)]
        text = _remove_spans(text, spans)
    tables.sort(key=itemgetter(0))
    return CutText(text, [offset for offset, _ in tables], [table for _, table in tables])


def _find_outermost_spans(mark_pattern: re.Pattern[str], text: str) -> list[tuple[int, int]]:
    open_starts: list[int] = []
    spans: list[tuple[int, int]] = []
    for table_mark in mark_pattern.finditer(text):
        if table_mark[1]:
            open_starts.append(table_mark.start())
        elif open_starts:
            span_start = open_starts.pop()
            while spans and spans[-1][0] > span_start:
                spans.pop()
            spans.append((span_start, table_mark.end()))
    return spans


def _remove_spans(text: str, spans: list[tuple[int, int]]) -> str:
    pieces: list[str] = []
    offset = 0
    for start, end in spans:
        pieces.append(text[offset:start])
        offset = end
    pieces.append(text[offset:])
    return "".join(pieces)


_HEADING = re.compile(r"^=.*=[ \t]*$", re.MULTILINE)


class RawSection(NamedTuple):
    """A heading in wikitext, and the markup below it up to the next heading."""

    level: int  # 1 to 6; the lead has 0
    heading: str
    body: str
    start: int = 0  # offset of the body in the text of the page


def split_sections(text: str) -> Iterator[RawSection]:
    """Yield the sections of a page in order; the lead is first, even if it is empty."""
    level, heading, body_start = 0, "", 0
    for line in _HEADING.finditer(text):
        heading_line = line[0].rstrip()
        n_equals = min(_count_equals(heading_line), _count_equals(heading_line[::-1]), (len(heading_line) - 1) // 2, 6)
        if n_equals:
            yield RawSection(level, heading, text[body_start : line.start()], body_start)
            level, heading, body_start = n_equals, heading_line[n_equals:-n_equals].strip(), line.end()
    yield RawSection(level, heading, text[body_start:], body_start)


def is_apparatus(heading: str, language: str) -> bool:
    """Return whether a section with this heading usually has only references or links."""
    return heading.strip(" :").replace(",", "").lower() in _list_apparatus_headings(language)


@cache
def _list_apparatus_headings(language: str) -> frozenset[str]:
    return frozenset(get_language(language).apparatus_headings)


# A line that contains the end of a sentence, and is not a list item, a table cell, or only a
# template or a link.
_SENTENCE = re.compile(
    r"^(?![ \t]*(?:[*#:;|!]|\{\{[^{}\n]*\}\}[ \t]*$|\[\[[^\[\]\n]*\]\][ \t]*$))"
    rf"[^{SENTENCE_ENDS}\n]+[{SENTENCE_ENDS}]",
    re.MULTILINE,
)


def may_have_prose(body: str) -> bool:
    """Return whether a section's wikitext may contain running text.

    This fast check may return True for other text, but never returns False for running text.
    """
    return _SENTENCE.search(body) is not None


_EXTERNAL_ITEM = re.compile(r"^[ \t]*[*#:;]+[ '«]*\[?(?:https?:)?//", re.MULTILINE)
_LINE = re.compile(r"^[ \t]*[^\s\ufdef]", re.MULTILINE)


def is_link_list(body: str) -> bool:
    """Return whether a section's wikitext has only list items with external links.

    >>> is_link_list("* [http://a.org Home] (in French)"), is_link_list("See [http://a.org A]")
    (True, False)
    """
    if "//" not in body:
        return False
    n_link_items = sum(1 for _ in _EXTERNAL_ITEM.finditer(body))
    return n_link_items > 0 and n_link_items == sum(1 for _ in _LINE.finditer(body))


def _count_equals(text: str) -> int:
    return len(text) - len(text.lstrip("="))
