"""Named arrays in one file that are written as a stream and read memory-mapped, in the layout of safetensors.

    the header's length, u64 | the header, JSON: name -> dtype, shape, offsets; `__metadata__` | the arrays, end to end

Source: github.com/huggingface/safetensors, `README.md`, section Format. Any program that reads safetensors reads it.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_model.errors import InputError, ResourceError
from rag_model.json_text import parse_json

_NAMES = {"F32": "<f4", "I64": "<i8", "U8": "<u1", "U16": "<u2", "U32": "<u4"}
_CODES = {np.dtype(code): name for name, code in _NAMES.items()}
_MAX_HEADER = 1 << 20  # bytes; ours take some hundred
_ALIGNED = 8

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Stream:
    """One array whose values come in blocks of whole rows."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    blocks: Iterable[Array]


def write_tensors(path: Path, arrays: Sequence[Stream], metadata: Mapping[str, str]) -> None:
    """Write arrays, one after another, each block as it comes.

    Raises:
        ResourceError: the file cannot be written.
        ValueError: the blocks of an array do not fill its shape.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for one in arrays:
        start, end = end, end + one.dtype.itemsize * math.prod(one.shape)
        header[one.name] = {"dtype": _CODES[one.dtype], "shape": list(one.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    try:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for one in arrays:
                for block in one.blocks:
                    file.write(np.ascontiguousarray(block, one.dtype).data)
                if file.tell() != 8 + len(text) + header[one.name]["data_offsets"][1]:
                    raise ValueError(f"the blocks of {one.name} do not fill its shape {one.shape}")
    except OSError as failed:
        raise ResourceError(f"cannot write {path}: {failed.strerror}") from failed


def read_tensors(path: Path, *, mmap: bool = True) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the arrays of a file by name, mapped or loaded, and its metadata.

    Raises:
        InputError: the file is missing, truncated or damaged.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(min(size, _MAX_HEADER)))
        told = header.pop("__metadata__", {})
        arrays = {name: _mapped(path, 8 + size, entry) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as broken:
        raise InputError(f"{path} is truncated or damaged: fetch or build it again") from broken
    return {name: array if mmap else np.array(array) for name, array in arrays.items()}, told


def _mapped(path: Path, start: int, entry: Mapping[str, Any]) -> Array:
    first, end = entry["data_offsets"]
    dtype, shape = np.dtype(_NAMES[entry["dtype"]]), tuple(entry["shape"])
    if not 0 <= first <= end or end - first != dtype.itemsize * math.prod(shape) or min(shape, default=0) < 0:
        raise ValueError("an array that does not fit its place")
    if path.stat().st_size < start + end:
        raise ValueError("an array behind the end")
    if first == end:
        return np.zeros(shape, dtype)
    mapped: Array = np.memmap(path, dtype, "r", start + first, shape)
    return mapped
