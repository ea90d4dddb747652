"""Convert wikitext to plain text by section, as a reader sees it.

**The parser is `markup.scanner`, chosen by measurement.** `tests/benchmarks/bench_chunking.py`
reads the real extract (96 articles, 5.7 MB) and 190 template cases. The columns are MB of wikitext
per second on one core, residues of markup in the text, and template cases with missing words:

| | MB/s | residue | holes |
| --- | --- | --- | --- |
| this module | 19.3 | 4 (of 96 pages; blanks before commas, as typed) | 0 |
| WikiExtractor 3.1 | 11.6 | 342 (of 96 pages) | 171 |
| wikitextparser 3.0, `remove_markup` | 3.6 | 84 (of 32 pages) | 175 |
| mwparserfromhell 0.7.2, `strip_code` | 2.1 | 444 (of 32 pages) | 176 |

The last two libraries build a tree for editing and do not render templates by default;
mwparserfromhell needs 26 s for 8,000 unclosed `{{a|`, and four times as long for twice as many.
Each pass of this module is a regular expression or a stack, linear in the length of the text. The
passes are extension tags, comments, tables and headings (`blocks`), and for each section templates
and links (`scanner`, `templates`, `Links`) and the remaining markup (`prose`).

**Kept and dropped content.** Words, numbers, quotations, lists (one line per item),
pronunciations and short formulas are kept, because sentences need them. Tables and infoboxes,
unless they are requested (`structures`), pictures with their captions, references, notices that
point elsewhere ("Main article: …"), blocks of code, and everything except sentences in sections of
references and links (`blocks.is_apparatus`) are dropped, as in DPR.

**Positions of links.** To locate the words of links, the scanner puts marks around them
(`LINK_START`, `LINK_END`), and the section is cleaned with and without the marks.
"""

import html
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from urllib.parse import unquote

from rag_model.corpus.markup.blocks import (
    RawSection,
    cut_tables,
    is_apparatus,
    is_link_list,
    may_have_prose,
    split_sections,
    strip_extensions,
)
from rag_model.corpus.markup.literal import (
    GAP,
    LINK_END,
    LINK_START,
    protect,
    protect_character,
    remove_marks,
    remove_noncharacters,
)
from rag_model.corpus.markup.prose import render_apostrophes, resolve_variants, to_plain_text, to_running_text
from rag_model.corpus.markup.scanner import Scanner
from rag_model.corpus.markup.structures import StructureParser
from rag_model.corpus.markup.templates import Templates, is_dropped
from rag_model.corpus.records import Section, Siteinfo, Structure, StructureName, UnparsablePageError

_FILE, _CATEGORY = 6, 14
# Every wiki accepts the English names in addition to its own.
_ENGLISH_NAMES = {"file": _FILE, "image": _FILE, "category": _CATEGORY}
# `[[de:Haus]]` is shown in the margin, not in the text.
_LANGUAGE = re.compile(r"(?:[a-z]{2,3}(?:-[a-z]+)*|simple)")
_NOT_LANGUAGES = frozenset({"doi", "rfc", "isbn", "cia", "ims", "orig"})
# Only titles with one of these characters need a slower test.
_UNUSUAL_CHARACTER = re.compile(r"[\[\]{}<>\n&%:/]")
_ADDRESS = r"(?:(?:(?:https?|ftp):)?//|(?:bitcoin|geo|magnet|mailto|matrix|news|sips?|sms|tel|urn|xmpp):)"
# Text that no title contains. MediaWiki shows a link to such a title as text; in the text,
# `[https://a.org b]` of `[[https://a.org b]]` is an external link.
_INVALID_TITLE = re.compile(rf"[\[\]{{}}<>|\n\0\ufffd]|^::|^:?$|^{_ADDRESS}|&#?\w+;|%[\da-f]{{2}}", re.IGNORECASE)
_BARE_ADDRESS = re.compile(rf"{_ADDRESS}\S*", re.IGNORECASE)  # `[[https://a.org]]`
_QUALIFIER = re.compile(r"(?<!\s)\s*+\([^()]*+\)$|,.*$", re.DOTALL)
_MARKS = re.compile(f"([{LINK_START}{LINK_END}])")
MAX_CHARS = 8 << 20  # maximum characters of a page; MediaWiki refuses to save more than 2 MiB
_TEMPLATE = 10  # number of the template namespace
_NO_LEVEL = 7  # a level below all headings
# Returns the markup of a section without its structures, and the structures.
ExtractStructures = Callable[[RawSection], tuple[str, Sequence[Structure]]]


class Links:
    """Renders links with the namespaces of one wiki."""

    def __init__(self, namespaces: Mapping[str, int]) -> None:
        self._names = {*namespaces, *_ENGLISH_NAMES}
        self._hidden = {prefix for prefix, key in {**_ENGLISH_NAMES, **namespaces}.items() if key in (_FILE, _CATEGORY)}

    def render(self, arguments: list[str]) -> str:
        """Return the visible text of a link; `arguments` are the strings between its `|`."""
        target = arguments[0].strip()
        prefix, colon, title = target.removeprefix(":").partition(":")
        name = prefix.strip().lower().replace("_", " ") if colon else ""
        if name and target[0] != ":" and self._is_hidden(name, is_unlabelled=len(arguments) == 1):
            return GAP
        is_namespace = name and name in self._names and not title.partition("#")[0].strip()
        if is_namespace or ((_UNUSUAL_CHARACTER.search(target) or not target) and not _is_title(target)):
            text = "|".join(arguments)
            return GAP if _BARE_ADDRESS.fullmatch(text) else f"[[{text}]]"
        return self._get_shown_text(target.removeprefix(":"), arguments)

    def _is_hidden(self, prefix: str, is_unlabelled: bool) -> bool:
        if prefix in self._hidden:
            return True
        return is_unlabelled and prefix not in _NOT_LANGUAGES and _LANGUAGE.fullmatch(prefix) is not None

    @staticmethod
    def _get_shown_text(target: str, arguments: list[str]) -> str:
        if len(arguments) == 1:
            title = _decode_title(target) if "%" in target else target
            visible_text = protect_character(title.replace("_", " "), "'")
        elif visible_text := protect_character("|".join(arguments[1:]), "|"):
            visible_text = render_apostrophes(visible_text)
        else:
            visible_text = _QUALIFIER.sub("", target.rpartition(":")[2])
        return protect_character(visible_text, ":") if ":" in visible_text else visible_text


def _is_title(target: str) -> bool:
    """Return whether the target of a link can be a title; if not, MediaWiki shows the brackets."""
    invalid_match = _INVALID_TITLE.search(target)
    if invalid_match is None or invalid_match[0][:1] not in ("%", "&"):
        return invalid_match is None
    title, fragment, _ = html.unescape(unquote(target)).partition("#")
    return _INVALID_TITLE.search(title or fragment) is None


def _decode_title(target: str) -> str:
    """Decode a percent-encoded title, and protect its characters, which may look like markup."""
    return protect(" ".join(remove_noncharacters(html.unescape(unquote(target))).replace("_", " ").split()))


def find_link_spans(prose: str, expanded_text: str, clean: Callable[[str], str]) -> tuple[tuple[int, int], ...]:
    """Return the (start, end) characters of the words of links in `prose`, ascending and disjoint.

    `prose` is what `clean` returns for `expanded_text` without marks. The section is cleaned again
    with the marks. The marks can change the result (a space before and a space after a mark are not
    merged), so links in changed lines are skipped, as are links in templates. In real articles, the
    marks change hardly any line.
    """
    if LINK_START not in expanded_text:
        return ()
    try:
        marked_lines = clean(expanded_text).split("\n")
    except UnparsablePageError:
        return ()
    lines = prose.split("\n")
    if len(lines) != len(marked_lines):
        return ()
    spans: list[tuple[int, int]] = []
    offset = 0
    for line, marked_line in zip(lines, marked_lines, strict=True):
        if remove_marks(marked_line) == line:
            spans += ((offset + start, offset + end) for start, end in _iter_spans(marked_line))
        offset += len(line) + 1
    return tuple(spans)


def _iter_spans(line: str) -> Iterator[tuple[int, int]]:
    """Yield the spans of marked words, without surrounding spaces, in the line without marks."""
    offset, link_text = 0, ""
    for piece in _MARKS.split(line):
        if piece == LINK_END and (words := link_text.strip()):
            words_end = offset - (len(link_text) - len(link_text.rstrip()))
            yield words_end - len(words), words_end
        link_text = "" if piece in (LINK_START, LINK_END) else piece
        offset += len(link_text)


def clean_wikitext(
    text: str,
    siteinfo: Siteinfo,
    title: str = "",
    *,
    anchors: bool = False,
    structures: Collection[StructureName] = (),
) -> tuple[Section, ...]:
    """Return the sections of a page that contain text, in order; the lead is first (heading `""`).

    In sections of references and links (`blocks.is_apparatus`) and in their subsections, only
    sentences are kept, not list items, links and references. With `anchors`, each section also has
    the spans of its links (`find_link_spans`), and the text is the same. With `structures`, each
    section also has its tables, infoboxes or long lists, and extracted lists are not in the text; a
    section that has only structures has no text. Time and memory are linear in the length of the
    page.

    Raises:
        UnparsablePageError: The page exceeds `MAX_CHARS`.
    """
    if len(text) > MAX_CHARS:
        raise UnparsablePageError(f"the page has more than {MAX_CHARS} characters")
    link_marks = (LINK_START, LINK_END) if anchors else ("", "")
    render_link = Links(siteinfo.namespaces).render
    template_prefixes = {name for name, key in siteinfo.namespaces.items() if key == _TEMPLATE}
    templates = Templates(title, siteinfo.language, render_link, template_prefixes)
    scanner = Scanner(templates.render, render_link, is_dropped, marks=link_marks)
    cut_text = cut_tables(resolve_variants(strip_extensions(remove_noncharacters(text)), siteinfo.language))
    extract = StructureParser(templates, render_link, cut_text, structures).extract if structures else None
    return clean_sections(
        split_sections(cut_text.text), scanner.expand, siteinfo.language, anchors=anchors, extract=extract
    )


def clean_sections(
    raw_sections: Iterable[RawSection],
    expand: Callable[[str], str],
    language: str,
    *,
    anchors: bool,
    extract: ExtractStructures | None = None,
) -> tuple[Section, ...]:
    """Return the sections with text or structures.

    `expand` resolves the templates and links of a raw section.
    """
    sections: list[Section] = []
    # level of the section of references or links that contains this one
    apparatus_level = _NO_LEVEL
    for section in raw_sections:
        level, heading, raw_text, _ = section
        if level > apparatus_level and not may_have_prose(raw_text):
            continue
        heading_text = _clean_heading(expand(f" {heading}")) if heading else ""
        if level <= apparatus_level:
            apparatus_level = level if is_apparatus(heading_text, language) else _NO_LEVEL
            if apparatus_level == level and not may_have_prose(raw_text):
                continue
        if heading and is_link_list(raw_text):
            continue
        clean_text = to_plain_text if apparatus_level == _NO_LEVEL else to_running_text
        structures: Sequence[Structure] = ()
        if extract is not None and apparatus_level == _NO_LEVEL:
            raw_text, structures = extract(section)
        expanded_text = expand(raw_text)
        text = clean_text(remove_marks(expanded_text))
        if text or structures:
            links = find_link_spans(text, expanded_text, clean_text) if anchors else ()
            sections.append(Section(heading_text, text, links, tuple(structures)))
    return tuple(sections)


def _clean_heading(expanded_text: str) -> str:
    """Return the text of a heading in one line; empty if it has no letter or digit."""
    words = " ".join(to_plain_text(remove_marks(expanded_text)).split()).rstrip(" ,;")
    return words if any(map(str.isalnum, words)) else ""
