r"""Read JSON values one at a time, from JSON lines or from one large array, with line numbers.

DPR's training sets are arrays of several gigabytes, so only one value and one chunk are in memory.
ijson 3.6 is not used because it does not report the line of a value, silently replaces half of a
surrogate pair (`\ud83d`) by `?`, and has no memory limit for brackets nested 100,000 deep.
"""

import json
import re
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any, TextIO

from rag_model.errors import InputError
from rag_model.untrusted_text import limit_blank_lines, parse_json

_CHUNK = 1 << 20  # characters read at a time
_MAX_VALUE_LENGTH = 1 << 26  # characters of one value
_DECODER = json.JSONDecoder()
_BLANKS = re.compile(r"\s*")


def iter_json_values(file: TextIO, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the location (`train.json, line 12`) and the value of each item.

    An array is detected by its first character.

    Raises:
        InputError: a value is malformed or longer than 64 million characters (the message names its
            line), or the file has too many blank lines.
    """
    n_blank_lines, character = 0, " "
    for character in limit_blank_lines(iter(partial(file.read, 1), ""), name):
        n_blank_lines += character == "\n"
        if not character.isspace():
            break
    if character == "[":
        return _Array(file, name, 1 + n_blank_lines).iter_values()
    return _iter_lines(file, name, n_blank_lines, character.strip())


def _iter_lines(file: TextIO, name: str, n_blank_lines: int, head: str) -> Iterator[tuple[str, Any]]:
    first_line = [head + file.readline(_MAX_VALUE_LENGTH)]
    lines = chain(filter(None, first_line), iter(partial(file.readline, _MAX_VALUE_LENGTH), ""))
    for number, line in enumerate(limit_blank_lines(lines, name), start=1 + n_blank_lines):
        if line.strip():
            try:
                value = parse_json(line)
            except ValueError as error:
                raise InputError(f"{name}, line {number}: not a JSON value: {error}") from error
            yield f"{name}, line {number}", value


class _Array:
    """The values of an array whose opening bracket has been read."""

    def __init__(self, file: TextIO, name: str, line: int) -> None:
        self._file, self._name, self._line = file, name, line
        # the current text, and the position up to which it is parsed
        self._text, self._position = "", 0

    def iter_values(self) -> Iterator[tuple[str, Any]]:
        separator = ""  # before the next value
        while self._peek() != "]":
            if separator and self._peek() != separator:
                raise InputError(
                    f"{self._describe_location()}: expected a comma or the end of the array; correct the file"
                )
            self._advance(self._position + len(separator))
            self._peek()
            location = self._describe_location()
            yield location, self._decode_value(location)
            separator = ","

    def _decode_value(self, location: str) -> Any:
        """Decode the next value; read more text until it is complete."""
        size = _CHUNK
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._position)
                # a number at the end of the text may continue
                if end < len(self._text) or not self._read_more(size):
                    self._advance(end)
                    return value
            except (ValueError, RecursionError) as error:
                if len(self._text) - self._position > _MAX_VALUE_LENGTH or not self._read_more(size):
                    raise InputError(f"{location}: not a JSON value: {error}") from error
            size *= 2  # a long value is then decoded only a few times

    def _peek(self) -> str:
        """Return the next non-blank character."""
        while True:
            self._advance(_BLANKS.match(self._text, self._position).end())  # type: ignore[union-attr]
            if self._position < len(self._text):
                return self._text[self._position]
            if not self._read_more(_CHUNK):
                raise InputError(f"{self._describe_location()}: the array has no end: fetch the file again")

    def _read_more(self, size: int) -> bool:
        if chunk := self._file.read(size):
            self._text, self._position = self._text[self._position :] + chunk, 0
        return bool(chunk)

    def _advance(self, end: int) -> None:
        self._line += self._text.count("\n", self._position, end)
        self._position = end

    def _describe_location(self) -> str:
        return f"{self._name}, line {self._line}"
