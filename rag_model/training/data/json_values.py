r"""Read JSON values one at a time, from JSON lines or from one large array, each with its first line number.

DPR's training sets are arrays of several gigabytes: only one value and one chunk are held in memory. ijson 3.6 is not
used because it does not report the line of a value, silently replaces half of a character (`\ud83d`) by `?`, and has no
memory limit for brackets nested 100,000 deep.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

from rag_model.errors import InputError
from rag_model.json_text import parse_json

_CHUNK = 1 << 20  # characters read at a time
_LONGEST = 1 << 26  # most characters of one value
_DECODER = json.JSONDecoder()
_BLANKS = re.compile(r"\s*")


def values(file: TextIO, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the place (`train.json, line 12`) and value of each item; an array is detected by its first character.

    Raises:
        InputError: a value is malformed or longer than 64 million characters; its line is named.
    """
    head = ""
    while not head.strip() and (character := file.read(1)):
        head += character
    if head.endswith("["):
        return _Array(file, name, 1 + head.count("\n")).values()
    return _lines(file, name, head)


def _lines(file: TextIO, name: str, head: str) -> Iterator[tuple[str, Any]]:
    number, head = head.count("\n"), head.lstrip()
    while line := head + file.readline(_LONGEST):
        number, head = number + 1, ""
        if line.strip():
            try:
                value = parse_json(line)
            except ValueError as broken:
                raise InputError(f"{name}, line {number}: no JSON value: {broken}") from broken
            yield f"{name}, line {number}", value


class _Array:
    """The values of an array whose opening bracket has been read."""

    def __init__(self, file: TextIO, name: str, line: int) -> None:
        self._file, self._name, self._line = file, name, line
        self._text, self._at = "", 0  # the current text, and the position up to which it is used

    def values(self) -> Iterator[tuple[str, Any]]:
        wanted = ""  # before the next value
        while self._next() != "]":
            if wanted and self._next() != wanted:
                raise InputError(f"{self._where()}: there is no comma and no end of the array here; correct the file")
            self._use(self._at + len(wanted))
            self._next()
            where = self._where()
            yield where, self._value(where)
            wanted = ","

    def _value(self, where: str) -> Any:
        """Decode the next value; read more text until it is complete."""
        size = _CHUNK
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                if end < len(self._text) or not self._read(size):  # a number at the end of the text may continue
                    self._use(end)
                    return value
            except (ValueError, RecursionError) as broken:
                if len(self._text) - self._at > _LONGEST or not self._read(size):
                    raise InputError(f"{where}: no JSON value: {broken}") from broken
            size *= 2  # so that a long value is not decoded many times

    def _next(self) -> str:
        """Return the next non-blank character."""
        while True:
            self._use(_BLANKS.match(self._text, self._at).end())  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read(_CHUNK):
                raise InputError(f"{self._where()}: the array has no end: fetch the file again")

    def _read(self, size: int) -> bool:
        if more := self._file.read(size):
            self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)

    def _use(self, end: int) -> None:
        self._line += self._text.count("\n", self._at, end)
        self._at = end

    def _where(self) -> str:
        return f"{self._name}, line {self._line}"
