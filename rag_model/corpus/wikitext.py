"""Turn wikitext into the text that a reader sees, by section.

**The parser is our own scanner, chosen by measurement.** `tests/benchmarks/bench_chunking.py` reads the real
extract (96 articles, 5.7 MB) and 190 template cases; one core, MB of wikitext a second, marks of markup
left in the text, cases with a hole:

| | MB/s | residue | holes |
| --- | --- | --- | --- |
| this module | 19.3 | 4 (of 96 pages; blanks before commas, as typed) | 0 |
| WikiExtractor 3.1 | 11.6 | 342 (of 96 pages) | 171 |
| wikitextparser 3.0, `remove_markup` | 3.6 | 84 (of 32 pages) | 175 |
| mwparserfromhell 0.7.2, `strip_code` | 2.1 | 444 (of 32 pages) | 176 |

Both libraries build a tree for editing, and do not render templates by default; mwparserfromhell needs 26 s for
8,000 unclosed `{{a|` and four times that for twice as many. Here each pass is a regular expression or a
stack over the text, linear in its length: extension tags and comments (`extension`), tables (`tables`),
sections (`headings`), then in each section templates and links (`scanner`, `templates`, `links`) and the
remaining markup (`prose`).

**What is kept, and what is dropped.** Words, numbers, quotations, lists (one line per item), pronunciations and
short formulas are kept: the reader sees them, and a sentence needs them. Tables, infoboxes, pictures with their
captions, references, notices that point elsewhere ("Main article: …"), blocks of code, and sections without
prose (`headings.APPARATUS`) are dropped, as in DPR.
"""

from rag_model.corpus.markup.anchors import links_in, unmarked
from rag_model.corpus.markup.extension import strip_extensions
from rag_model.corpus.markup.headings import is_apparatus, split_sections
from rag_model.corpus.markup.links import Links
from rag_model.corpus.markup.literal import CLOSED, OPENED, without_noncharacters
from rag_model.corpus.markup.prose import plain
from rag_model.corpus.markup.scanner import Scanner
from rag_model.corpus.markup.tables import strip_tables
from rag_model.corpus.markup.templates import Templates, is_dropped
from rag_model.corpus.markup.unparsable import Unparsable
from rag_model.corpus.records import Section, Siteinfo

__all__ = ["MAX_CHARS", "Unparsable", "clean"]

MAX_CHARS = 8 << 20  # characters of a page; MediaWiki refuses to save more than 2 MiB


def clean(text: str, siteinfo: Siteinfo, title: str = "", *, anchors: bool = False) -> tuple[Section, ...]:
    """Return the sections of a page that contain text, in order; the lead, if it has text, is first (heading `""`).

    Sections without prose (references, external links, see also) are left out, with their subsections. With `anchors`
    each has the spans of its links (`links_in`); its text is the same without.

    Raises:
        Unparsable: the page exceeds `MAX_CHARS`. Time and memory stay in proportion to its length.
    """
    if len(text) > MAX_CHARS:
        raise Unparsable(f"the page has more than {MAX_CHARS} characters")
    marks = (OPENED, CLOSED) if anchors else ("", "")
    scanner = Scanner(Templates(title).render, Links(siteinfo.namespaces).render, is_dropped, marks=marks)
    body = strip_tables(strip_extensions(without_noncharacters(text)))
    kept: list[Section] = []
    dropped_level = 7  # level of the current apparatus section; deeper headings belong to it
    for level, heading, raw in split_sections(body):
        if 0 < dropped_level < level:
            continue
        words = plain(unmarked(scanner.expand(heading))) if heading else ""
        dropped_level = level if is_apparatus(words, siteinfo.language) else 7
        if dropped_level == 7:
            expanded = scanner.expand(raw)
            if prose := plain(unmarked(expanded)):
                kept.append(Section(" ".join(words.split()), prose, links_in(prose, expanded) if anchors else ()))
    return tuple(kept)
