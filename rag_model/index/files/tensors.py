"""Named arrays in one safetensors file, written as a stream and read memory-mapped.

    header length (u64) | header (JSON: name -> dtype, shape, offsets; `__metadata__`) | arrays,
    concatenated

Source: github.com/huggingface/safetensors, `README.md`, section Format. Any safetensors reader can
read such a file.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_model.arrays import Rows, find_runs
from rag_model.errors import InputError, ResourceError
from rag_model.untrusted_text import parse_json

_DTYPES_BY_NAME = {"F32": "<f4", "I64": "<i8", "U8": "<u1", "U16": "<u2", "U32": "<u4"}
_NAMES_BY_DTYPE = {np.dtype(code): name for name, code in _DTYPES_BY_NAME.items()}
_MAX_HEADER = 1 << 20  # maximum bytes of a header; bookwheel writes a few hundred
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
    """Write arrays one after another; each block is written when it arrives.

    Raises:
        ResourceError: the file cannot be written.
        ValueError: the blocks of an array do not fill its shape.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for array in arrays:
        start, end = end, end + array.dtype.itemsize * math.prod(array.shape)
        dtype_name = _NAMES_BY_DTYPE[array.dtype]
        header[array.name] = {"dtype": dtype_name, "shape": list(array.shape), "data_offsets": [start, end]}
    header_bytes = json.dumps(header, separators=(",", ":")).encode()
    header_bytes += b" " * (-len(header_bytes) % _ALIGNMENT)
    try:
        with path.open("wb") as file:
            file.write(len(header_bytes).to_bytes(8, "little") + header_bytes)
            for array in arrays:
                for block in array.blocks:
                    file.write(np.ascontiguousarray(block, array.dtype).data)
                if file.tell() != 8 + len(header_bytes) + header[array.name]["data_offsets"][1]:
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
            json_bytes = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(min(json_bytes, _MAX_HEADER)))
        metadata = header.pop("__metadata__", {})
        arrays = {name: _map_tensor(path, 8 + json_bytes, entry) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise InputError(f"{path} is truncated or damaged: fetch or build it again") from error
    return {name: array if mmap else np.array(array) for name, array in arrays.items()}, metadata


def _map_tensor(path: Path, start: int, entry: Mapping[str, Any]) -> Array:
    first, stop = entry["data_offsets"]
    dtype, shape = np.dtype(_DTYPES_BY_NAME[entry["dtype"]]), tuple(entry["shape"])
    if not 0 <= first <= stop or stop - first != dtype.itemsize * math.prod(shape) or min(shape, default=0) < 0:
        raise ValueError("an array does not match its offsets")
    if path.stat().st_size < start + stop:
        raise ValueError("an array ends beyond the file")
    if first == stop:
        return np.zeros(shape, dtype)
    tensor: Array = np.memmap(path, dtype, "r", start + first, shape)
    return tensor


def find_common_ranges(
    base: Path, target: Path, find_base_rows: Callable[[], Rows]
) -> list[tuple[int, int, int]] | None:
    """Return the byte ranges that two files with ragged rows may have in common.

    Each range is (offset in the target, offset in the base, length). The ranges ascend in the target.
    A file with ragged rows has an array `offsets`, (n + 1,), and arrays with `offsets[-1]` values.

    Args:
        base: the base file.
        target: the target file.
        find_base_rows: returns the row in `base` of each row of `target`, (n,), ascending, or -1.

    Returns:
        The ranges; None if one of the files has no ragged rows.
    """
    try:
        base_arrays, target_arrays = read_tensors(base)[0], read_tensors(target)[0]
        base_offsets, offsets = base_arrays["offsets"], target_arrays["offsets"]
    except (InputError, KeyError):
        return None
    base_rows = find_base_rows()
    if len(base_rows) + 1 != len(offsets) or base_rows.max(initial=-1) + 1 >= len(base_offsets):
        return None
    starts, counts = find_runs(base_rows)
    starts, counts = starts[base_rows[starts] >= 0], counts[base_rows[starts] >= 0]
    value_ranges = offsets[starts], base_offsets[base_rows[starts]], offsets[starts + counts] - offsets[starts]
    tensor_ranges = []
    for name, array in target_arrays.items():
        base_array = base_arrays.get(name, array[:0])
        if array.nbytes and base_array.nbytes and array.shape[1:] == base_array.shape[1:]:
            array_offsets, value_bytes = (array.offset, base_array.offset), array.nbytes // len(array)  # type: ignore[attr-defined]
            if name != "offsets" and len(array) == offsets[-1]:
                first, base_first, length = (values * value_bytes for values in value_ranges)
                columns = (first + array_offsets[0], base_first + array_offsets[1], length)
                tensor_ranges += list(zip(*(column.tolist() for column in columns), strict=True))
            else:
                tensor_ranges.append((*array_offsets, min(array.nbytes, base_array.nbytes)))
    return tensor_ranges
