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


def mutated(data: bytes, number: int) -> bytes:
    """Return `data` with one to four changes that `number` alone decides."""
    chance, found = random.Random(number), bytearray(data)
    if data[:1] == b"{" and chance.random() < 0.5:
        return _reworded(data, chance)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        if found:
            chance.choice([_flip, _flip, _number, _number, _number, _word, _cut, _repeat, _remove])(found, chance)
    return bytes(found)


def _reworded(data: bytes, chance: random.Random) -> bytes:
    """Replace, remove or add values of a JSON document, which stays one."""
    lines = data.split(b"\n")
    at = chance.randrange(len(lines))
    try:
        value = json.loads(lines[at] if len(lines) > 1 else data)
    except ValueError:
        return data
    for _ in range(chance.choice([1, 1, 2])):
        value = _changed(value, chance)
    lines[at] = json.dumps(value).encode()
    return b"\n".join(lines)


def _changed(value: Any, chance: random.Random) -> Any:
    if not isinstance(value, dict | list) or not value or chance.random() < 0.15:
        return deepcopy(chance.choice(_VALUES))
    key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
    what = chance.random()
    if what < 0.15:
        del value[key]
    elif what < 0.25 and isinstance(value, dict):
        value[chance.choice(["x", "", "../x", "\ud800"])] = value.pop(key)
    else:
        value[key] = _changed(value[key], chance)
    return value


def _place(data: bytearray, chance: random.Random) -> int:
    """Choose a place: often near the beginning or the end, where headers and footers are."""
    some = chance.choice([len(data), len(data), _HEAD, -_HEAD])
    at = chance.randrange(max(1, min(abs(some), len(data))))
    return at if some > 0 else len(data) - 1 - at


def _flip(data: bytearray, chance: random.Random) -> None:
    data[_place(data, chance)] ^= 1 << chance.randrange(8)


def _number(data: bytearray, chance: random.Random) -> None:
    value, width = chance.choice(_NUMBERS), chance.choice("BHIQ")
    size = struct.calcsize(f"<{width}")
    at = _place(data, chance)
    at = chance.choice([at, at // 4 * 4])
    data[at : at + size] = struct.pack(f"<{width}", value & ((1 << 8 * size) - 1))


def _word(data: bytearray, chance: random.Random) -> None:
    word, at = chance.choice(_WORDS), _place(data, chance)
    data[at : at + chance.choice([0, len(word)])] = word


def _cut(data: bytearray, chance: random.Random) -> None:
    del data[_place(data, chance) :]


def _repeat(data: bytearray, chance: random.Random) -> None:
    at, size = _place(data, chance), chance.randrange(1, 200)
    data[at:at] = data[at : at + size] * chance.choice([1, 1, 50])


def _remove(data: bytearray, chance: random.Random) -> None:
    at = _place(data, chance)
    del data[at : at + chance.randrange(1, 40)]
