"""Convert wikitext to plain text by section, as a reader sees it.

**The parser is our own scanner, chosen by measurement.** `tests/benchmarks/bench_chunking.py` reads
the real extract (96 articles, 5.7 MB) and 190 template cases. One core; MB of wikitext per second,
residues of markup in the text, template cases with missing words:

| | MB/s | residue | holes |
| --- | --- | --- | --- |
| this module | 19.3 | 4 (of 96 pages; blanks before commas, as typed) | 0 |
| WikiExtractor 3.1 | 11.6 | 342 (of 96 pages) | 171 |
| wikitextparser 3.0, `remove_markup` | 3.6 | 84 (of 32 pages) | 175 |
| mwparserfromhell 0.7.2, `strip_code` | 2.1 | 444 (of 32 pages) | 176 |

Both libraries build a tree for editing and do not render templates by default; mwparserfromhell
needs 26 s for 8,000 unclosed `{{a|`, and four times as long for twice as many. Here each pass is a
regular expression or a stack over the text, linear in its length: extension tags, comments, tables
and headings (`blocks`), then for each section templates and links (`scanner`, `templates`, `links`)
and the remaining markup (`prose`).

**Kept and dropped content.** Words, numbers, quotations, lists (one line per item),
pronunciations and short formulas are kept, because sentences need them. Tables and infoboxes,
unless they are requested (`structures`), pictures with their captions, references, notices that
point elsewhere ("Main article: …"), blocks of code, and what is no sentence in sections of
references and links (`blocks.APPARATUS_HEADINGS`) are dropped, as in DPR.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from rag_model.corpus.markup.blocks import (
    RawSection,
    cut_tables,
    is_apparatus,
    is_link_list,
    may_have_prose,
    split_sections,
    strip_extensions,
)
from rag_model.corpus.markup.links import Links, find_link_spans
from rag_model.corpus.markup.literal import LINK_END, LINK_START, remove_marks, remove_noncharacters
from rag_model.corpus.markup.prose import to_plain_text, to_running_text
from rag_model.corpus.markup.scanner import Scanner
from rag_model.corpus.markup.structures import StructureParser
from rag_model.corpus.markup.templates import Templates, is_dropped
from rag_model.corpus.records import Section, Siteinfo, Structure, StructureName, UnparsablePageError

__all__ = ["MAX_CHARS", "UnparsablePageError", "clean_wikitext"]

MAX_CHARS = 8 << 20  # characters of a page; MediaWiki refuses to save more than 2 MiB
_TEMPLATE = 10  # the namespace of templates
_NO_LEVEL = 7  # deeper than any heading


# Returns the markup of a section without its structures, and the structures.
ExtractStructures = Callable[[RawSection], tuple[str, Sequence[Structure]]]


def clean_wikitext(
    text: str,
    siteinfo: Siteinfo,
    title: str = "",
    *,
    anchors: bool = False,
    structures: Collection[StructureName] = (),
) -> tuple[Section, ...]:
    """Return the sections of a page that contain text, in order; the lead is first (heading `""`).

    In sections of references and links (`blocks.APPARATUS_HEADINGS`) and in their subsections, only
    sentences are kept, not list items, links and references. With `anchors` each
    section also has the spans of its links (`find_link_spans`); its text is the same. With
    `structures` it also has its tables, infoboxes or long lists, and the text is without the long
    lists; a section that has only structures has no text. Time and memory are linear in the length
    of the page.

    Raises:
        UnparsablePageError: The page exceeds `MAX_CHARS`.
    """
    if len(text) > MAX_CHARS:
        raise UnparsablePageError(f"the page has more than {MAX_CHARS} characters")
    marks = (LINK_START, LINK_END) if anchors else ("", "")
    links = Links(siteinfo.namespaces).render
    prefixes = {name for name, key in siteinfo.namespaces.items() if key == _TEMPLATE}
    templates = Templates(title, siteinfo.language, links, prefixes)
    scanner = Scanner(templates.render, links, is_dropped, marks=marks)
    body = cut_tables(strip_extensions(remove_noncharacters(text)))
    extract = StructureParser(templates.render, links, body, structures).extract if structures else None
    return clean_sections(
        split_sections(body.text), scanner.expand, siteinfo.language, anchors=anchors, extract=extract
    )


def clean_sections(
    raw_sections: Iterable[RawSection],
    expand: Callable[[str], str],
    language: str,
    *,
    anchors: bool,
    extract: ExtractStructures | None = None,
) -> tuple[Section, ...]:
    """Return the sections with text or structures; `expand` resolves the templates and links of a
    raw section.
    """
    sections: list[Section] = []
    apparatus_level = _NO_LEVEL  # of the section of references or links that contains this one
    for section in raw_sections:
        level, heading, raw, _ = section
        if level > apparatus_level and not may_have_prose(raw):
            continue
        heading_text = _clean_heading(expand(f" {heading}")) if heading else ""
        if level <= apparatus_level:
            apparatus_level = level if is_apparatus(heading_text, language) else _NO_LEVEL
            if apparatus_level == level and not may_have_prose(raw):
                continue
        if heading and is_link_list(raw):
            continue
        clean = to_plain_text if apparatus_level == _NO_LEVEL else to_running_text
        structures: Sequence[Structure] = ()
        if extract is not None and apparatus_level == _NO_LEVEL:
            raw, structures = extract(section)
        expanded = expand(raw)
        text = clean(remove_marks(expanded))
        if text or structures:
            links = find_link_spans(text, expanded, clean) if anchors else ()
            sections.append(Section(heading_text, text, links, tuple(structures)))
    return tuple(sections)


def _clean_heading(expanded: str) -> str:
    """Return the text of a heading in one line; empty if it has no letter or digit."""
    words = " ".join(to_plain_text(remove_marks(expanded)).split()).rstrip(" ,;")
    return words if any(map(str.isalnum, words)) else ""
