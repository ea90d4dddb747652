"""Named arrays in one safetensors file, written as a stream and read memory-mapped.

    header length (u64) | header (JSON: name -> dtype, shape, offsets; `__metadata__`) | arrays,
    concatenated

Source: github.com/huggingface/safetensors, `README.md`, section Format. Any safetensors reader can
read it.
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
from rag_model.untrusted_text import parse_json

_NAMES = {"F32": "<f4", "I64": "<i8", "U8": "<u1", "U16": "<u2", "U32": "<u4"}
_CODES = {np.dtype(code): name for name, code in _NAMES.items()}
_MAX_HEADER = 1 << 20  # bytes; ours take a few hundred
_ALIGNMENT = 8

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class TensorStream:
    """One array whose values arrive in blocks of complete rows."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    blocks: Iterable[Array]


def write_tensors(path: Path, arrays: Sequence[TensorStream], metadata: Mapping[str, str]) -> None:
    """Write arrays one after another, each block as it arrives.

    Raises:
        ResourceError: the file cannot be written.
        ValueError: the blocks of an array do not fill its shape.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for array in arrays:
        start, end = end, end + array.dtype.itemsize * math.prod(array.shape)
        header[array.name] = {"dtype": _CODES[array.dtype], "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    try:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for array in arrays:
                for block in array.blocks:
                    file.write(np.ascontiguousarray(block, array.dtype).data)
                if file.tell() != 8 + len(text) + header[array.name]["data_offsets"][1]:
                    raise ValueError(f"the blocks of {array.name} do not fill its shape {array.shape}")
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror}") from error


def read_tensors(path: Path, *, mmap: bool = True) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the arrays of a file by name, mapped or loaded, and its metadata.

    Raises:
        InputError: the file is missing, truncated or damaged.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(min(size, _MAX_HEADER)))
        metadata = header.pop("__metadata__", {})
        arrays = {name: _map_tensor(path, 8 + size, entry) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise InputError(f"{path} is truncated or damaged: fetch or build it again") from error
    return {name: array if mmap else np.array(array) for name, array in arrays.items()}, metadata


def _map_tensor(path: Path, start: int, entry: Mapping[str, Any]) -> Array:
    first, end = entry["data_offsets"]
    dtype, shape = np.dtype(_NAMES[entry["dtype"]]), tuple(entry["shape"])
    if not 0 <= first <= end or end - first != dtype.itemsize * math.prod(shape) or min(shape, default=0) < 0:
        raise ValueError("an array does not match its offsets")
    if path.stat().st_size < start + end:
        raise ValueError("an array ends beyond the file")
    if first == end:
        return np.zeros(shape, dtype)
    mapped: Array = np.memmap(path, dtype, "r", start + first, shape)
    return mapped
