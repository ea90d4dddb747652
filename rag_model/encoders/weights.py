"""The identity of an encoder's weights: a digest of its tensors, not its files.

Two folders that hold equal tensors have one digest, whatever the file names, shards, order, dtype (fp16 or
bf16 values that equal the fp32 ones) or the class that saved them. Pure numpy: no torch is needed to check.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_model.digest import digest_chunks, digest_json
from rag_model.encoders.files import read_object
from rag_model.errors import InputError
from rag_model.json_text import parse_json

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
_CHUNK = 1 << 22  # values cast and hashed at a time
_STORED_AS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_INTEGERS = {"I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
_MAX_HEADER = 100_000_000  # bytes; safetensors' own bound
# Tensors that do not affect a vector: other tasks' heads, BERT's pooler (its tanh layer), saved buffers.
_UNUSED = frozenset({"pooler", "cls", "lm_head", "classifier", "qa_outputs", "position_ids", "inv_freq"})
_OLD_NAMES = {"gamma": "weight", "beta": "bias"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place of one tensor in a safetensors file."""

    path: Path
    dtype: str  # safetensors' name: F32
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether it holds numbers of a shape, which are no codes of a quantised model."""
        return self.shape == shape and self.dtype in _STORED_AS

    def digest(self) -> str:
        """Return the digest of the values as little-endian fp32, cast some megabytes at a time.

        Raises:
            InputError: the dtype is not a float, as in a quantised model.
        """
        return digest_chunks(self._chunks())

    def read(self) -> npt.NDArray[np.float32]:
        """Return the values as an array of the tensor's shape.

        Raises:
            InputError: as `digest`.
        """
        return np.frombuffer(b"".join(self._chunks()), "<f4").reshape(self.shape).copy()

    def mapped(self) -> npt.NDArray[Any]:
        """Return the values as they are stored, bf16 as its bits, mapped from the file; writing changes a copy.

        Raises:
            InputError: as `digest`.
        """
        return np.memmap(self.path, self._type, "c", self.offset, self.shape)

    @property
    def is_integer(self) -> bool:
        """Return whether its values are whole numbers, as codes and places are."""
        return self.dtype in _INTEGERS

    def integers(self) -> npt.NDArray[Any]:
        """Return whole numbers as they are stored, mapped from the file; writing changes a copy.

        Raises:
            InputError: the dtype is no signed integer.
        """
        if not self.is_integer:
            raise InputError(f"model file {self.path} holds {self.dtype} where whole numbers must be: fetch it again")
        if not math.prod(self.shape):
            return np.empty(self.shape, _INTEGERS[self.dtype])
        return np.memmap(self.path, _INTEGERS[self.dtype], "c", self.offset, self.shape)

    def as_float32(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return some of the values that `mapped` or `integers` gave as float32."""
        return _as_float32(values, self.dtype)

    @property
    def _type(self) -> str:
        if self.dtype not in _STORED_AS:
            raise InputError(f"model file {self.path} holds {self.dtype} tensors: save the model as fp32, fp16 or bf16")
        return _STORED_AS[self.dtype]

    def _chunks(self) -> Iterator[bytes]:
        kind, left = self._type, math.prod(self.shape)
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while left:
                values = np.fromfile(file, kind, min(left, _CHUNK))
                if not len(values):  # it was cut off after its header was read
                    raise InputError(f"model file {self.path} is truncated: fetch it again")
                yield _as_float32(values, self.dtype).tobytes()
                left -= len(values)


def digest_weights(folder: Path) -> str:
    """Return the digest of the tensors of `folder` that determine its vectors.

    Canonical form: fp32 values by name, names without the prefix of the wrapping class (`bert.`,
    `ctx_encoder.bert_model.`), without task heads, pooler and buffers.

    Raises:
        InputError: there are no safetensors weights, or a file is truncated or corrupt.
    """
    return digest_tensors(stored_tensors(folder))


def digest_tensors(stored: Mapping[str, StoredTensor]) -> str:
    """Return the digest of tensors by name, as `digest_weights` does."""
    tensors = canonical_names(stored)
    return digest_json({name: [list(tensor.shape), tensor.digest()] for name, tensor in tensors.items()})


def weight_files(folder: Path) -> list[Path]:
    """List the weight files of `folder`; for a sharded model first the index, then the shards by name.

    Raises:
        InputError: there are none; for pickled ones the message says what to do.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / WEIGHTS_INDEX).is_file():
        shards = _shards(folder / WEIGHTS_INDEX)
        return [folder / WEIGHTS_INDEX, *(folder / Path(shard).name for shard in sorted(shards))]
    if any(folder.glob("*.bin")):
        raise InputError(
            f"model {folder} has only pickled weights, which can execute code when read: write {WEIGHTS} with "
            "`model.save_pretrained(folder)` on a machine where you trust them"
        )
    raise InputError(f"model {folder} has no {WEIGHTS}: give the folder of a Hugging Face model")


def _shards(index: Path) -> set[str]:
    named = read_object(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(shard, str) for shard in named.values()):
        raise InputError(f"model file {index} is corrupt (its weight_map names no files): fetch the model again")
    return set(named.values())


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the place of every tensor of `folder`, by its name in the files; reads only headers.

    Raises:
        InputError: a weight file is missing, truncated or corrupt.
    """
    found: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        if path.suffix == ".safetensors":
            found.update(_read_header(path))
    return found


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = parse_json(file.read(min(length, _MAX_HEADER)))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max(entry["data_offsets"][1] for entry in entries.values())
        missing = 8 + length + end - path.stat().st_size
        tensors = {name: _placed(path, entry, 8 + length) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as broken:
        raise InputError(f"model file {path} is missing or corrupt: fetch the model again") from broken
    if missing > 0:
        raise InputError(f"model file {path} is truncated ({missing} bytes are missing): fetch it again")
    return tensors


def _placed(path: Path, entry: Mapping[str, Any], start: int) -> StoredTensor:
    """Return the place of a tensor.

    Raises:
        ValueError: its shape is not that of its bytes.
    """
    (first, end), dtype, shape = entry["data_offsets"], str(entry["dtype"]), tuple(entry["shape"])
    if not all(type(number) is int and number >= 0 for number in (first, end, *shape)):
        raise ValueError("a tensor without a shape or a place")
    known = _STORED_AS.get(dtype, _INTEGERS.get(dtype))
    width = None if known is None else np.dtype(known).itemsize
    if end < first or (width is not None and end - first != width * math.prod(shape)):
        raise ValueError("a tensor that does not fit its place")
    return StoredTensor(path, dtype, shape, start + first)


def canonical_names(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors that determine a vector by their names in BERT's own class, as `digest_weights` has them."""
    named = {tuple(name.split(".")): tensor for name, tensor in tensors.items()}
    used = {parts: tensor for parts, tensor in named.items() if not _UNUSED & set(parts)}
    skip = 0
    for column in zip(*(parts[:-1] for parts in used), strict=False):
        if len(set(column)) > 1:
            break
        skip += 1
    return {_modern(parts[skip:]): tensor for parts, tensor in used.items()}


def _modern(parts: tuple[str, ...]) -> str:
    return ".".join([*parts[:-1], _OLD_NAMES.get(parts[-1], parts[-1])])


def _as_float32(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "BF16":  # the upper half of an fp32
        return (values.astype("<u4") << 16).view("<f4")
    return values.astype("<f4")
