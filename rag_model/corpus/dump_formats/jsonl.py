"""Documents as JSONL: one JSON object per line."""

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


class JsonLines(RecordFormat):
    """Files with one document per line."""

    def recognize(self, name: str, read_head: Callable[[], bytes]) -> bool:
        """Return whether the name ends in .jsonl or .ndjson, also compressed."""
        return _ENDING.search(name) is not None

    def read_records(self, url: str) -> Iterator[Record]:
        """Yield a record per line: an object with `id` or `_id`, `title`, and `text` or `sections`.

        `sections` is a list of `{"heading": …, "text": …}` or of strings. Alternatively, `contents`
        has the title, a line break and the text, as in Pyserini and FlashRAG; a single line is
        text. The optional `revised`, the time of the last change, is an ISO 8601 date or time, or
        whole seconds since 1970.

        Raises:
            InputError: A line is not such an object.
        """
        for number, row in iter_objects(url):
            yield parse_document(row, f"line {number} of {basename(url)}")


def iter_objects(url: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the JSON object of each line that is not blank.

    Raises:
        InputError: The file is unreadable or has too many blank lines, or a line is not a JSON
            object.
    """
    for number, line in enumerate(limit_blank_lines(read_lines(url), basename(url)), start=1):
        if line.strip():
            yield number, _parse_line(line, url, number)


def _parse_line(line: bytes, url: str, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = describe_json_error(line, error)
        raise InputError(f"line {number} of {basename(url)} is not JSON ({reason}): give one object a line") from error
    if not isinstance(value, dict):
        raise InputError(f"line {number} of {basename(url)} is not a JSON object: give one object a line")
    return value


FORMAT = JsonLines()
