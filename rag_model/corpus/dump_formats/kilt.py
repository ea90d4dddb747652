"""The dump format of KILT's knowledge source: a JSON object per page, with a list of paragraphs."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from rag_model.corpus.dump_formats.jsonl import JsonLines, iter_objects
from rag_model.corpus.dump_formats.record_format import Record, parse_document
from rag_model.corpus.source import basename
from rag_model.errors import InputError

_TITLE_KEY = b'"wikipedia_title"'
_HEADING = "Section::::"
_ITEM = re.compile(r"^(BULLET|NUMBERED)::::(-|\d+\.)?\s*")


class KiltPages(JsonLines):
    """Files with one page per line, as in `kilt_knowledgesource.json`."""

    def recognize(self, name: str, read_head: Callable[[], bytes]) -> bool:
        """Return whether the file is JSONL whose first object has a `wikipedia_title`."""
        return super().recognize(name, read_head) and _TITLE_KEY in read_head()

    def read_records(self, url: str) -> Iterator[Record]:
        """Yield a record per line: `wikipedia_id`, `wikipedia_title`, and `text`.

        `text` is a list of paragraphs. The first one repeats the title, `Section::::` starts a
        heading, and `BULLET::::-` starts a list item.

        Raises:
            InputError: A line is not such a JSON object.
        """
        for number, row in iter_objects(url):
            where = f"line {number} of {basename(url)}"
            paragraphs = row.get("text")
            if not isinstance(paragraphs, list) or not all(isinstance(text, str) for text in paragraphs):
                raise InputError(f"{where} has no list of paragraphs as its `text`: give KILT's pages unchanged")
            title = row.get("wikipedia_title")
            page_id = row.get("wikipedia_id") or row.get("_id")
            sections = _split_sections(title, paragraphs)
            yield parse_document({"id": page_id, "title": title, "sections": sections}, where)


def _split_sections(title: Any, paragraphs: list[str]) -> list[dict[str, str]]:
    """Return the sections with text; a heading such as `Section::::History.:Origin.` is `Origin`."""
    sections: list[tuple[str, list[str]]] = [("", [])]
    for i, paragraph in enumerate(paragraphs):
        text = paragraph.strip()
        if text.startswith(_HEADING):
            heading = text.removeprefix(_HEADING).removesuffix(".").rpartition(".:")[2]
            sections.append((heading, []))
        elif text and not (i == 0 and text == title):
            sections[-1][1].append(_ITEM.sub("", text))
    return [{"heading": heading, "text": "\n".join(texts)} for heading, texts in sections if texts]


FORMAT = KiltPages()
