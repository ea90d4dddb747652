"""One mutation of a file: the same bytes for the same number."""

import json
import random
import struct
from copy import deepcopy
from typing import Any

_NUMBERS = [0, 1, 2, 7, 127, 128, 255, 256, 65_535, 65_536, 1 << 20, 60_000_000, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
_NUMBERS += [1 << 40, (1 << 62) + 1, (1 << 63) - 1, (1 << 64) - 1]
_WORDS = [b"NaN", b"1e999", b"-1", b"null", b"[" * 2000, b'{"a":' * 300, b'"\\ud800"', b"\x00", b"\xff\xfe", b"\x1b[2J"]
_WORDS += [b"ilod", b"IxMp", b"IwFl", b"../../x", b"9" * 5000, b"true", b"<page>", b"&x;", b"{{" * 500, b"(a+)+$"]
_VALUES = [
    None,
    True,
    0,
    -1,
    1.5,
    1 << 70,
    "",
    "x",
    "../../x",
    "\ud800",
    "\x1b[2J",
    [],
    ["x"],
    {},
    {"a": 1},
    [[]],
    "9" * 3000,
]
_VALUES += [float("nan"), float("inf"), 1e308, 10**9, "sha256:" + "0" * 64, "f" * 64]
_HEAD = 512  # bytes: where most files say what they are


def mutate(data: bytes, number: int) -> bytes:
    """Return `data` with one to four changes that `number` alone decides."""
    chance, content = random.Random(number), bytearray(data)
    if data[:1] == b"{" and chance.random() < 0.5:
        return _change_json(data, chance)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        if content:
            chance.choice([_flip, _flip, _number, _number, _number, _word, _cut, _repeat, _remove])(content, chance)
    return bytes(content)


def _change_json(data: bytes, chance: random.Random) -> bytes:
    """Replace, remove or add values of a JSON document, which stays one."""
    lines = data.split(b"\n")
    line_number = chance.randrange(len(lines))
    try:
        value = json.loads(lines[line_number] if len(lines) > 1 else data)
    except ValueError:
        return data
    for _ in range(chance.choice([1, 1, 2])):
        value = _change_value(value, chance)
    lines[line_number] = json.dumps(value).encode()
    return b"\n".join(lines)


def _change_value(value: Any, chance: random.Random) -> Any:
    if not isinstance(value, dict | list) or not value or chance.random() < 0.15:
        return deepcopy(chance.choice(_VALUES))
    key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
    what = chance.random()
    if what < 0.15:
        del value[key]
    elif what < 0.25 and isinstance(value, dict):
        value[chance.choice(["x", "", "../x", "\ud800"])] = value.pop(key)
    else:
        value[key] = _change_value(value[key], chance)
    return value


def _choose_offset(data: bytearray, chance: random.Random) -> int:
    """Choose a place: often near the beginning or the end, where headers and footers are."""
    span = chance.choice([len(data), len(data), _HEAD, -_HEAD])
    offset = chance.randrange(max(1, min(abs(span), len(data))))
    return offset if span > 0 else len(data) - 1 - offset


def _flip(data: bytearray, chance: random.Random) -> None:
    data[_choose_offset(data, chance)] ^= 1 << chance.randrange(8)


def _number(data: bytearray, chance: random.Random) -> None:
    value, width = chance.choice(_NUMBERS), chance.choice("BHIQ")
    size = struct.calcsize(f"<{width}")
    offset = _choose_offset(data, chance)
    offset = chance.choice([offset, offset // 4 * 4])
    data[offset : offset + size] = struct.pack(f"<{width}", value & ((1 << 8 * size) - 1))


def _word(data: bytearray, chance: random.Random) -> None:
    word, offset = chance.choice(_WORDS), _choose_offset(data, chance)
    data[offset : offset + chance.choice([0, len(word)])] = word


def _cut(data: bytearray, chance: random.Random) -> None:
    del data[_choose_offset(data, chance) :]


def _repeat(data: bytearray, chance: random.Random) -> None:
    offset, size = _choose_offset(data, chance), chance.randrange(1, 200)
    data[offset:offset] = data[offset : offset + size] * chance.choice([1, 1, 50])


def _remove(data: bytearray, chance: random.Random) -> None:
    offset = _choose_offset(data, chance)
    del data[offset : offset + chance.randrange(1, 40)]
