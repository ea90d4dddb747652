"""Mutates the bytes of a file; a number selects the mutation."""

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
_HEAD = 512  # bytes, in which most files have their header


def mutate(data: bytes, number: int) -> bytes:
    """Return `data` with one to four changes, which depend only on `number`."""
    rng, content = random.Random(number), bytearray(data)
    if data[:1] == b"{" and rng.random() < 0.5:
        return _change_json(data, rng)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        if content:
            rng.choice(_CHANGES)(content, rng)
    return bytes(content)


def _change_json(data: bytes, rng: random.Random) -> bytes:
    """Replace, remove or add values of a JSON document, which stays valid."""
    lines = data.split(b"\n")
    line_number = rng.randrange(len(lines))
    try:
        value = json.loads(lines[line_number] if len(lines) > 1 else data)
    except ValueError:
        return data
    for _ in range(rng.choice([1, 1, 2])):
        value = _change_value(value, rng)
    lines[line_number] = json.dumps(value).encode()
    return b"\n".join(lines)


def _change_value(value: Any, rng: random.Random) -> Any:
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return deepcopy(rng.choice(_VALUES))
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    action = rng.random()
    if action < 0.15:
        del value[key]
    elif action < 0.25 and isinstance(value, dict):
        value[rng.choice(["x", "", "../x", "\ud800"])] = value.pop(key)
    else:
        value[key] = _change_value(value[key], rng)
    return value


def _choose_offset(data: bytearray, rng: random.Random) -> int:
    """Choose an offset, often near the beginning or the end, where headers and footers are."""
    span = rng.choice([len(data), len(data), _HEAD, -_HEAD])
    offset = rng.randrange(max(1, min(abs(span), len(data))))
    return offset if span > 0 else len(data) - 1 - offset


def _flip_bit(data: bytearray, rng: random.Random) -> None:
    data[_choose_offset(data, rng)] ^= 1 << rng.randrange(8)


def _write_number(data: bytearray, rng: random.Random) -> None:
    value, width = rng.choice(_NUMBERS), rng.choice("BHIQ")
    size = struct.calcsize(f"<{width}")
    offset = _choose_offset(data, rng)
    offset = rng.choice([offset, offset // 4 * 4])
    data[offset : offset + size] = struct.pack(f"<{width}", value & ((1 << 8 * size) - 1))


def _write_word(data: bytearray, rng: random.Random) -> None:
    word, offset = rng.choice(_WORDS), _choose_offset(data, rng)
    data[offset : offset + rng.choice([0, len(word)])] = word


def _truncate(data: bytearray, rng: random.Random) -> None:
    del data[_choose_offset(data, rng) :]


def _repeat(data: bytearray, rng: random.Random) -> None:
    offset, size = _choose_offset(data, rng), rng.randrange(1, 200)
    data[offset:offset] = data[offset : offset + size] * rng.choice([1, 1, 50])


def _remove(data: bytearray, rng: random.Random) -> None:
    offset = _choose_offset(data, rng)
    del data[offset : offset + rng.randrange(1, 40)]


_CHANGES = [*[_flip_bit] * 2, *[_write_number] * 3, _write_word, _truncate, _repeat, _remove]
