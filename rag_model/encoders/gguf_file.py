"""Check the header of a GGUF file before a library builds a model from it.

Libraries that read GGUF trust the header: they loop over its arrays in Python, build as many layers
as it says, and dequantise every tensor, even if all of them share the same bytes. This module
checks every length against the size of the file, and the numbers of the header against the same
limits as for a safetensors folder (`pretrained.check_config`).
"""

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from rag_model.errors import InputError

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_STRING, _ARRAY = 8, 9  # types of values
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_ENTRIES = 100_000  # keys, or tensors
_MAX_TEXT = 1 << 24  # bytes; the longest is a chat template
_MAX_ITEMS = 1 << 23  # items of all arrays; a vocabulary of 256,000 tokens has three arrays
_MAX_SQUARES = 1 << 31  # sum of squared token lengths, since readers split a token everywhere
_MAX_DIMENSIONS = 8
_MAX_COUNT = 10_000  # heads, experts or groups, each of which becomes an object
_MAX_SIZE = 1 << 24  # maximum dimension, context length or vocabulary size
_MAX_VALUES_PER_BYTE = 6  # of all tensors; the densest quantisation has 1.56 bits a value
_LAYERS = re.compile(r"(block|layer)s?(_count)?$")
_COUNTS = re.compile(r"(head|expert|group|label)\w*count\w*$")
_SIZES = re.compile(r"(length|size|rank)$")


def check_gguf_file(path: Path) -> None:
    """Check the header of a GGUF file; reads no tensor.

    Raises:
        InputError: the file is corrupt, or describes more layers, heads, tokens or values than it
            can hold.
    """
    try:
        with path.open("rb") as file:
            _Header(file, path.stat().st_size).check()
    except (OSError, ValueError, struct.error, RecursionError) as error:
        raise InputError(f"model file {path} is corrupt ({error}): fetch the model again") from error


class _Header:
    """Reads the header of a file, and counts the items of its arrays."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self._items = self._squares = 0

    def check(self) -> None:
        if self._read_bytes(4) != _MAGIC or self._read_number("I") not in _VERSIONS:
            raise ValueError("it is not a GGUF file of version 2 or 3")
        n_tensors, n_keys = self._read_number("Q"), self._read_number("Q")
        if max(n_tensors, n_keys) > _MAX_ENTRIES:
            raise ValueError(f"it has {n_tensors:,} tensors and {n_keys:,} keys")
        _check_values({self._read_text(): self._read_value() for _ in range(n_keys)}, n_tensors)
        n_values = sum(self._read_tensor() for _ in range(n_tensors))
        if n_values > _MAX_VALUES_PER_BYTE * self._size:
            raise ValueError(f"its tensors have {n_values:,} values in {self._size:,} bytes")

    def _read_tensor(self) -> int:
        """Return the number of values of the next tensor."""
        self._read_text()
        n_dimensions, n_values = self._read_number("I"), 1
        if n_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {n_dimensions:,} dimensions")
        for _ in range(n_dimensions):
            n_values *= self._read_number("Q")
        self._read_bytes(12)  # type and offset
        return n_values

    def _read_value(self) -> Any:
        """Return the next value; None for an array."""
        kind = self._read_number("I")
        if kind == _STRING:
            return self._read_text()
        if kind != _ARRAY:
            return self._read_number(_find_format(kind))
        item_kind, n_items = self._read_number("I"), self._read_number("Q")
        self._items += n_items
        if self._items > _MAX_ITEMS:
            raise ValueError(f"its arrays have more than {_MAX_ITEMS:,} items")
        if item_kind == _STRING:
            for _ in range(n_items):
                self._squares += len(self._read_text()) ** 2
            if self._squares > _MAX_SQUARES:
                raise ValueError("its tokens are too long")
        else:
            self._read_bytes(n_items * struct.calcsize(_find_format(item_kind)))
        return None

    def _read_text(self) -> str:
        length = self._read_number("Q")
        if length > _MAX_TEXT:
            raise ValueError(f"a text has {length:,} bytes")
        return self._read_bytes(length).decode("utf-8", "replace")

    def _read_number(self, number_format: str) -> Any:
        packed = self._read_bytes(struct.calcsize(f"<{number_format}"))
        return struct.unpack(f"<{number_format}", packed)[0]

    def _read_bytes(self, length: int) -> bytes:
        if length > self._size - self._file.tell():
            raise ValueError("it ends inside its header")
        return self._file.read(length)


def _find_format(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"a value has the unknown type {kind}")
    return _NUMBERS[kind]


def _check_values(values: Mapping[str, Any], n_tensors: int) -> None:
    limits = ((_LAYERS, n_tensors), (_COUNTS, _MAX_COUNT), (_SIZES, _MAX_SIZE))
    for name, value in values.items():
        limit = next((limit for pattern, limit in limits if pattern.search(name)), None)
        if limit is not None and isinstance(value, int) and value > limit:
            raise ValueError(f"its {ascii(name)[:60]} is {value:,}; at most {limit:,} are possible")
