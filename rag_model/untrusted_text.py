"""Text from untrusted sources: parse JSON strictly, and escape control characters for terminals."""

import json
import math
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, TypeVar

from rag_model.errors import InputError, UsageError

# Levels of nested arrays and objects; files of bookwheel and of model hubs have fewer than 20.
MAX_DEPTH = 64
_CONTAINERS = dict, list
_ESCAPED_SURROGATE = b"\\ud"  # beginning of an escaped surrogate; surrogates must come in pairs


def parse_json(data: bytes | str, *, finite: bool = True) -> Any:
    """Parse a JSON text; every problem is a `ValueError`.

    Bytes are UTF-8, with or without a byte order mark. NaN, infinities, lone surrogates and more
    than `MAX_DEPTH` levels are rejected, because they would cause errors later, when they are
    written, hashed or printed. With `finite=False`, for metrics in our own records, NaN and
    infinities are accepted.

    Raises:
        ValueError: The text is invalid; the message says why.
    """
    if isinstance(data, bytes):
        data = data.decode("utf-8-sig")  # the decoder of `json` accepts lone surrogates
    try:
        json_value = (
            json.loads(data, parse_constant=_refuse_constant, parse_float=_parse_finite) if finite else json.loads(data)
        )
    except RecursionError as error:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        # Python's message advises to call sys.set_int_max_str_digits, which a user cannot do.
        if "int_max_str_digits" not in str(error):
            raise
        raise ValueError(f"a whole number has more than {sys.get_int_max_str_digits():,} digits") from error
    _check_depth(json_value)
    if _ESCAPED_SURROGATE in data.encode().lower():
        _check_characters(json_value)
    return json_value


Line = TypeVar("Line", str, bytes)
_MAX_BLANK_LINES = 1 << 16
_BLANK_LINES_PER_LINE = 16  # additional blank lines that are accepted per line with text


def limit_blank_lines(lines: Iterable[Line], name: str) -> Iterator[Line]:
    """Yield the lines of a file; refuse a file that consists mostly of blank lines.

    A compressed file of a few kilobytes may contain hundreds of millions of blank lines.

    Raises:
        InputError: There are more blank lines than 65,536 plus 16 for each line with text.
    """
    blank_lines_left = _MAX_BLANK_LINES
    for line in lines:
        blank_lines_left += _BLANK_LINES_PER_LINE if line.strip() else -1
        if blank_lines_left < 0:
            raise InputError(f"{name} has more than {_MAX_BLANK_LINES:,} blank lines: remove them")
        yield line


def describe_json_error(data: bytes | str, error: Exception) -> str:
    """Return the message of `parse_json` for data with which `json.loads` raised `error`."""
    try:
        parse_json(data)
    except ValueError as reason:
        return str(reason)
    return str(error)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _parse_finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:20]} is too large for a number")
    return number


def _check_depth(json_value: Any) -> None:
    containers = [json_value] if isinstance(json_value, _CONTAINERS) else []
    for _ in range(MAX_DEPTH + 1):
        children = chain.from_iterable(
            container.values() if isinstance(container, dict) else container for container in containers
        )
        containers = [child for child in children if isinstance(child, _CONTAINERS)]
        if not containers:
            return
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


def _check_characters(json_value: Any) -> None:
    try:
        json.dumps(json_value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it contains half of a character (a lone surrogate)") from error


_ALLOWED_CONTROLS = "\n\t"
_INVISIBLE = {"Cc", "Cs"}  # Unicode categories: control characters and surrogates
# separators of lines and paragraphs, and controls of the writing direction
_REORDERING = frozenset("\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def escape_controls(text: str) -> str:
    r"""Escape control characters except line breaks and tabs, as JSON does, for a terminal.

    >>> escape_controls("a\x1b[31m red\n")
    'a\\u001b[31m red\n'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(character if _is_harmless(character) else f"\\u{ord(character):04x}" for character in text)


def check_printable(text: str, description: str) -> None:
    """Check that a text contains no control characters, since others will see it in a terminal.

    Raises:
        UsageError: It contains one; the message starts with `description`.
    """
    control_character = next((character for character in text if not _is_harmless(character)), None)
    if control_character is not None:
        raise UsageError(f"{description} contains the control character {control_character!r}: remove it")


def _is_harmless(character: str) -> bool:
    return character in _ALLOWED_CONTROLS or (
        unicodedata.category(character) not in _INVISIBLE and character not in _REORDERING
    )
