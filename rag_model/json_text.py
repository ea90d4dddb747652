"""JSON of others: whatever is wrong with it is a `ValueError`, and what is read can be written again."""

import json
import math
from itertools import chain
from typing import Any

DEEPEST = 64  # arrays and objects within one another; what bookwheel and model hubs write has fewer than 20
_NESTED = dict, list
_ESCAPED_HALF = b"\\ud"  # of a character outside the first 65,536: halves come in pairs


def parse_json(data: bytes | str, *, finite: bool = True) -> Any:
    """Return the value of a JSON text.

    Bytes are UTF-8, with or without a byte order mark. Beyond JSON's grammar it has no NaN or infinity, no half of a
    surrogate pair, and at most `DEEPEST` levels: such values would fail later, where they are written, hashed or
    printed. Without `finite`, as for measures that our own records hold, NaN and infinities are read.

    Raises:
        ValueError: it is not such a text; the message says why.
    """
    if isinstance(data, bytes):
        data = data.decode("utf-8-sig")  # json's own decoding lets halves of characters pass
    try:
        value = json.loads(data, parse_constant=_refuse_constant, parse_float=_finite) if finite else json.loads(data)
    except RecursionError as deep:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels") from deep
    _check_depth(value)
    if _ESCAPED_HALF in data.encode().lower():
        _check_characters(value)
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:20]} is too large for a number")
    return number


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, _NESTED) else []
    for _ in range(DEEPEST + 1):
        inner = chain.from_iterable(outer.values() if isinstance(outer, dict) else outer for outer in level)
        level = [one for one in inner if isinstance(one, _NESTED)]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {DEEPEST} levels")


def _check_characters(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as half:
        raise ValueError("a text in it holds half of a character (a lone surrogate)") from half
