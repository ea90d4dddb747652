"""Files with one JSON object per line: documents, and the Wikipedia pages of KILT and HotpotQA."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from rag_model.corpus.dump_formats.record_format import Record, RecordFormat, parse_document
from rag_model.corpus.source import COMPRESSED_ENDING, basename, read_lines
from rag_model.errors import InputError
from rag_model.untrusted_text import describe_json_error, limit_blank_lines

# File name endings of all formats with one JSON object per line.
LINES_ENDING = re.compile(rf"\.(?:jsonl?|ndjson|tar){COMPRESSED_ENDING}|\.tgz$", re.IGNORECASE)
_ENDING = re.compile(rf"\.(jsonl|ndjson){COMPRESSED_ENDING}", re.IGNORECASE)
_TITLE_KEY = b'"wikipedia_title"'
_HEADING = "Section::::"
_LIST_ITEM = re.compile(r"^(BULLET|NUMBERED)::::(-|\d+\.)?\s*")
_PAGE_ADDRESS = re.compile(rb'"url"\s*:\s*\[?\s*"https?://en\.wikipedia\.org/wiki\?curid=\d')
_SENTENCES = re.compile(rb'"text"\s*:\s*\[')


class JsonLines(RecordFormat):
    """Files with one document per line."""

    def recognize(self, name: str, read_head: Callable[[], bytes]) -> bool:
        """Return whether the name ends in .jsonl or .ndjson, also compressed."""
        return _ENDING.search(name) is not None

    def read_records(self, url: str) -> Iterator[Record]:
        """Yield a record per line: an object with `id` or `_id`, `title`, and `text` or `sections`.

        `sections` is a list of `{"heading": …, "text": …}` or of strings. Alternatively, `contents`
        has the title, a line break and the text, as in Pyserini and FlashRAG; if `contents` is a
        single line, it is the text. The optional `revised`, the time of the last change, is an ISO
        8601 date or time, or whole seconds since 1970.

        Raises:
            InputError: A line is not an object with these fields.
        """
        for location, row in iter_objects(url):
            yield parse_document(row, location)


def iter_objects(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location for messages, JSON object) for each line that is not blank.

    Raises:
        InputError: The file is unreadable or has too many blank lines, or a line is not a JSON
            object.
    """
    name = basename(url)
    for line_number, line in enumerate(limit_blank_lines(read_lines(url), name), start=1):
        if line.strip():
            location = f"line {line_number} of {name}"
            yield location, _parse_line(line, location)


def _parse_line(line: bytes, location: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = describe_json_error(line, error)
        raise InputError(f"{location} is not JSON ({reason}): give an object per line") from error
    if not isinstance(row, dict):
        raise InputError(f"{location} is not a JSON object: give an object per line")
    return row


class KiltPages(JsonLines):
    """Files with one page per line, as in `kilt_knowledgesource.json`."""

    def recognize(self, name: str, read_head: Callable[[], bytes]) -> bool:
        """Return whether the start of a JSON Lines file has a `wikipedia_title`."""
        return LINES_ENDING.search(name) is not None and _TITLE_KEY in read_head()

    def read_records(self, url: str) -> Iterator[Record]:
        """Yield a record per line: `wikipedia_id`, `wikipedia_title`, and `text`.

        `text` is a list of paragraphs. The first one repeats the title, `Section::::` starts a
        heading, and `BULLET::::-` starts a list item.

        Raises:
            InputError: A line is not a JSON object with these fields.
        """
        for location, row in iter_objects(url):
            paragraphs = row.get("text")
            if not isinstance(paragraphs, list) or not all(isinstance(text, str) for text in paragraphs):
                raise InputError(f"{location} has no list of paragraphs as its `text`: give KILT's pages unchanged")
            title = row.get("wikipedia_title")
            page_id = row.get("wikipedia_id") or row.get("_id")
            sections = _split_sections(title, paragraphs)
            yield parse_document({"id": page_id, "title": title, "sections": sections}, location)


def _split_sections(title: Any, paragraphs: list[str]) -> list[dict[str, str]]:
    """Return the sections with text; the heading `Section::::History.:Origin.` becomes `Origin`."""
    sections: list[tuple[str, list[str]]] = [("", [])]
    for i, paragraph in enumerate(paragraphs):
        text = paragraph.strip()
        if text.startswith(_HEADING):
            heading = text.removeprefix(_HEADING).removesuffix(".").rpartition(".:")[2]
            sections.append((heading, []))
        elif text and not (i == 0 and text == title):
            sections[-1][1].append(_LIST_ITEM.sub("", text))
    return [{"heading": heading, "text": "\n".join(texts)} for heading, texts in sections if texts]


class HotpotPages(JsonLines):
    """Files with one page per line, as in HotpotQA's `enwiki-20171001-*-withlinks-*.tar.bz2`."""

    def recognize(self, name: str, read_head: Callable[[], bytes]) -> bool:
        """Return whether a JSON Lines file starts with a page whose text is a list of sentences."""
        if not LINES_ENDING.search(name):
            return False
        head = read_head()
        return _PAGE_ADDRESS.search(head) is not None and _SENTENCES.search(head) is not None

    def read_records(self, url: str) -> Iterator[Record]:
        """Yield a record per line: `id`, `title`, and `text`.

        `text` has the sentences of the introduction, or a list of sentences per paragraph.

        Raises:
            InputError: A line is not a JSON object with these fields.
        """
        for location, row in iter_objects(url):
            text = row.get("text")
            paragraphs = [text] if _is_text_list(text) else text
            if not isinstance(paragraphs, list) or not all(map(_is_text_list, paragraphs)):
                raise InputError(f"{location} has no list of sentences as its `text`: give HotpotQA's pages unchanged")
            title = row.get("title")
            texts = ["".join(sentences).strip() for sentences in paragraphs]
            body = "\n".join(text for text in texts if text and text != title)
            yield parse_document({"id": row.get("id"), "title": title, "text": body}, location)


def _is_text_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


FORMAT, KILT, HOTPOT = JsonLines(), KiltPages(), HotpotPages()
