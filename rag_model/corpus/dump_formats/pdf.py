"""PDF files: one section per page, headed by its chapter, with the text in PDFium's reading order.

PDFium is native code, and a file can be crafted to crash it, so it runs in a child process.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, ClassVar

from rag_model.corpus.chunkers.article_words import ends_line
from rag_model.corpus.chunkers.chunker import MAX_HEADING
from rag_model.corpus.dump_formats.document_files import (
    MAX_HEADING_PART,
    IsolatedFiles,
    SectionBuilder,
    clean_text,
)
from rag_model.corpus.dump_formats.pdf_tables import split_page
from rag_model.corpus.records import parse_seconds
from rag_model.extras import format_versions, require
from rag_model.process import serve_call

_LINE_END_HYPHEN = re.compile("[\x02\xad\ufffe]\\s*")  # PDFium's mark for a hyphenated line end
_MAX_BOOKMARKS = 100_000
# Maximum objects and characters of a file that are examined for tables; each takes about 4 us.
_MAX_TABLE_ITEMS = 10_000_000
# the dots before the page numbers of a table of contents
_DOT_LEADERS = re.compile(r"\s?(?:[.·]\s?){5,}")
_DATE = re.compile(r"D:(\d{4})(\d\d)(\d\d)(\d\d)(\d\d)(\d\d)")


class Pdf(IsolatedFiles):
    """PDF files with text; pages without text, such as scanned pages, are left out."""

    version = f"3, {format_versions('pypdfium2')}"
    endings = frozenset({".pdf"})
    max_bytes = 256 << 20
    module = "rag_model.corpus.dump_formats.pdf"
    extra = "pdf"
    libraries: ClassVar = {".pdf": "pypdfium2"}


def _read_file(path: str) -> dict[str, Any]:
    """Return the pages of a file and the time of its last change, or the reason to drop it."""
    pdfium = require("pypdfium2", extra="pdf")
    try:
        with pdfium.PdfDocument(path) as document:
            page_sections = list(_iter_pages(document, _find_chapters(document), pdfium))
            date_match = _DATE.match(document.get_metadata_value("ModDate"))
    except pdfium.PdfiumError as error:
        return {"dropped": "encrypted" if "password" in str(error).lower() else "damaged"}
    return {"sections": page_sections, "revised": _parse_time(date_match)}


def _find_chapters(document: Any) -> dict[int, str]:
    """Map each page number to the outline path of the first chapter that starts on the page."""
    chapters: dict[int, str] = {}
    titles: list[str] = []
    for bookmark in islice(document.get_toc(), _MAX_BOOKMARKS):
        destination = bookmark.get_dest()
        titles[bookmark.level :] = [" ".join(clean_text(bookmark.get_title()).split())[:MAX_HEADING_PART]]
        page_number = destination.get_index() if destination else None
        if page_number is not None:
            chapters.setdefault(page_number, " > ".join(filter(None, titles))[: MAX_HEADING - 20])
    return chapters


def _iter_pages(document: Any, chapters: Mapping[int, str], pdfium: Any) -> Iterator[tuple[str, str]]:
    """Yield a heading (chapter and page number) and the text of each page with text."""
    chapter, table_budget = "", iter(range(_MAX_TABLE_ITEMS))
    for page_number in range(len(document)):
        chapter, builder = chapters.get(page_number, chapter), SectionBuilder()
        try:
            page = document[page_number]
            for block in split_page(pdfium.raw, page, page.get_textpage(), table_budget):
                if isinstance(block, str):
                    for paragraph in _join_lines(block):
                        builder.add_block(paragraph)
                else:
                    builder.add_rows([map(_remove_line_hyphens, row) for row in block])
        except pdfium.PdfiumError:  # a damaged page is skipped
            continue
        for _, text in builder.finish():
            yield f"{chapter} (page {page_number + 1})" if chapter else f"page {page_number + 1}", text


def _remove_line_hyphens(text: str) -> str:
    return _LINE_END_HYPHEN.sub("", text)


def _join_lines(text: str) -> Iterator[str]:
    """Yield the paragraphs of a text; join a line that ends within a sentence to the next line."""
    text = clean_text(_DOT_LEADERS.sub(" ", _remove_line_hyphens(text)))
    for paragraph in re.split(r"\n\s*\n", text):
        line_words: list[list[str]] = []
        for words in filter(None, map(str.split, paragraph.split("\n"))):
            if line_words and not ends_line(line_words[-1][-1], words[0]):
                line_words[-1] += words
            else:
                line_words.append(words)
        yield "\n".join(map(" ".join, line_words))


def _parse_time(date_match: re.Match[str] | None) -> int | None:
    try:
        return parse_seconds("{}-{}-{}T{}:{}:{}".format(*date_match.groups())) if date_match else None
    except ValueError:
        return None


PDF = Pdf()

if __name__ == "__main__":
    serve_call(_read_file)
