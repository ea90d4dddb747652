"""The identity of an encoder's weights: a digest of its tensors, not of its files.

Two folders with equal tensors have equal digests, even if file names, shards, order, dtype (fp16 or
bf16 values that equal the fp32 values) or the class that saved them differ. This module needs
numpy, but not torch.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_model.digest import digest_chunks, digest_json
from rag_model.encoders.files import find_hub_name, read_json_object
from rag_model.errors import InputError
from rag_model.untrusted_text import parse_json

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
_VALUES_PER_CHUNK = 1 << 22  # number of values that are cast and hashed at a time
_FLOAT_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_INTEGER_TYPES = {"I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
_MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors itself
# Name parts of tensors that do not affect a vector: heads of other tasks, BERT's pooler (a tanh
# layer), and saved buffers.
_UNUSED_PARTS = frozenset({"pooler", "cls", "lm_head", "classifier", "qa_outputs", "position_ids", "inv_freq"})
_LEGACY_SUFFIXES = {"gamma": "weight", "beta": "bias"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of a tensor in a safetensors file."""

    path: Path  # path of the safetensors file
    dtype: str  # name of the dtype in safetensors, such as F32
    shape: tuple[int, ...]  # shape of the tensor
    offset: int  # position of the values in the file, in bytes

    def has_float_shape(self, shape: tuple[int, ...]) -> bool:
        """Return whether the tensor has this shape and a float dtype (quantized models do not)."""
        return self.shape == shape and self.dtype in _FLOAT_TYPES

    def digest(self) -> str:
        """Return the digest of the values as little-endian fp32, casting a few megabytes at a time.

        Raises:
            InputError: the dtype is not a float, as in a quantized model.
        """
        return digest_chunks(self._iter_chunks())

    def read(self) -> npt.NDArray[np.float32]:
        """Return the values as float32 in the tensor's shape.

        Raises:
            InputError: as for `digest`.
        """
        return np.frombuffer(b"".join(self._iter_chunks()), "<f4").reshape(self.shape).copy()

    def memory_map(self) -> npt.NDArray[Any]:
        """Memory-map the stored values, bf16 as unsigned integers; writes go to a private copy.

        Raises:
            InputError: as for `digest`.
        """
        return np.memmap(self.path, self._numpy_type, "c", self.offset, self.shape)

    @property
    def is_integer(self) -> bool:
        """Whether the dtype is a signed integer, as it is for quantized codes and row numbers."""
        return self.dtype in _INTEGER_TYPES

    def memory_map_integers(self) -> npt.NDArray[Any]:
        """Memory-map the stored integers; writes go to a private copy.

        Raises:
            InputError: the dtype is not a signed integer.
        """
        if not self.is_integer:
            raise InputError(f"model file {self.path} has {self.dtype} values instead of whole numbers: fetch it again")
        if not math.prod(self.shape):
            return np.empty(self.shape, _INTEGER_TYPES[self.dtype])
        return np.memmap(self.path, _INTEGER_TYPES[self.dtype], "c", self.offset, self.shape)

    def as_float32(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Cast values of `memory_map` or `memory_map_integers` to float32."""
        if self.dtype == "BF16":  # a bf16 is the upper half of an fp32
            return (values.astype("<u4") << 16).view("<f4")
        return values.astype("<f4")

    @property
    def _numpy_type(self) -> str:
        if self.dtype not in _FLOAT_TYPES:
            raise InputError(f"model file {self.path} has {self.dtype} tensors: save the model as fp32, fp16 or bf16")
        return _FLOAT_TYPES[self.dtype]

    def _iter_chunks(self) -> Iterator[bytes]:
        numpy_type, values_left = self._numpy_type, math.prod(self.shape)
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while values_left:
                chunk = np.fromfile(file, numpy_type, min(values_left, _VALUES_PER_CHUNK))
                if not len(chunk):  # the file was truncated after its header was read
                    raise InputError(f"model file {self.path} is truncated: fetch it again")
                yield self.as_float32(chunk).tobytes()
                values_left -= len(chunk)


def digest_weights(folder: Path) -> str:
    """Return the digest of the tensors of `folder` that determine its vectors.

    The canonical form has fp32 values by name, without the prefix of the wrapping class (`bert.`,
    `ctx_encoder.bert_model.`), and without task heads, pooler and buffers.

    Raises:
        InputError: there are no safetensors weights, or a file is truncated or corrupt.
    """
    return digest_tensors(read_tensor_headers(folder))


def digest_tensors(stored_tensors: Mapping[str, StoredTensor]) -> str:
    """Return the digest of named tensors, in the canonical form of `digest_weights`."""
    tensors = canonicalize_names(stored_tensors)
    return digest_json({name: [list(tensor.shape), tensor.digest()] for name, tensor in tensors.items()})


def list_weight_files(folder: Path) -> list[Path]:
    """List the weight files of `folder`; for a sharded model first the index, then the shards by
    name.

    Raises:
        InputError: there are no weight files; the message says how to convert pickled weights.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / WEIGHTS_INDEX).is_file():
        shards = read_shard_names(folder / WEIGHTS_INDEX)
        return [folder / WEIGHTS_INDEX, *(folder / Path(shard).name for shard in sorted(shards))]
    if hub_name := find_hub_name(folder):
        repository = hub_name.partition("@")[0]
        raise InputError(
            f"model {hub_name} has no {WEIGHTS}, and pickled weights are not read, since they can "
            f"execute code: name a revision that has safetensors, such as {repository}@refs/pr/3, "
            f"or convert its weights with `bookwheel convert-weights {repository} FOLDER`"
        )
    if any(folder.glob("*.bin")):
        raise InputError(
            f"model {folder} has only pickled weights, which can execute code when read: convert "
            f"them with `bookwheel convert-weights {folder} NEW_FOLDER`, or name a revision of the "
            "hub that has safetensors, such as NAME@refs/pr/3"
        )
    raise InputError(f"model {folder} has no {WEIGHTS}: give the folder of a Hugging Face model")


def read_shard_names(index: Path) -> set[str]:
    """Return the names of the files that contain the tensors of an index.

    Raises:
        InputError: the index is corrupt.
    """
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise InputError(f"model file {index} is corrupt (its weight_map has no file names): fetch the model again")
    return set(weight_map.values())


def read_tensor_headers(folder: Path) -> dict[str, StoredTensor]:
    """Return the location of every tensor of `folder` by its name in the files; only headers
    are read.

    Raises:
        InputError: a weight file is missing, truncated or corrupt.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in list_weight_files(folder):
        if path.suffix == ".safetensors":
            tensors.update(_read_header(path))
    return tensors


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = parse_json(file.read(min(header_bytes, _MAX_HEADER_BYTES)))
        tensor_entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        data_end = max(entry["data_offsets"][1] for entry in tensor_entries.values())
        missing_bytes = 8 + header_bytes + data_end - path.stat().st_size
        tensors = {name: _parse_tensor_entry(path, entry, 8 + header_bytes) for name, entry in tensor_entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(f"model file {path} is missing or corrupt: fetch it again") from error
    if missing_bytes > 0:
        raise InputError(f"model file {path} is truncated ({missing_bytes} bytes are missing): fetch it again")
    return tensors


def _parse_tensor_entry(path: Path, entry: Mapping[str, Any], values_start: int) -> StoredTensor:
    """Parse the header entry of a tensor.

    Raises:
        ValueError: shape and number of bytes do not match.
    """
    (data_start, data_end), dtype, shape = entry["data_offsets"], str(entry["dtype"]), tuple(entry["shape"])
    if not all(type(integer) is int and integer >= 0 for integer in (data_start, data_end, *shape)):
        raise ValueError("a tensor without a shape or offsets")
    numpy_type = _FLOAT_TYPES.get(dtype, _INTEGER_TYPES.get(dtype))
    value_bytes = None if numpy_type is None else np.dtype(numpy_type).itemsize
    if data_end < data_start or (value_bytes is not None and data_end - data_start != value_bytes * math.prod(shape)):
        raise ValueError("a tensor whose shape does not match its bytes")
    return StoredTensor(path, dtype, shape, values_start + data_start)


def canonicalize_names(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors that `digest_weights` reads, by their names in the base class."""
    tensor_by_name_parts = {tuple(name.split(".")): tensor for name, tensor in tensors.items()}
    used_tensors = {parts: tensor for parts, tensor in tensor_by_name_parts.items() if not _UNUSED_PARTS & set(parts)}
    n_common_parts = 0
    for name_level in zip(*(parts[:-1] for parts in used_tensors), strict=False):
        if len(set(name_level)) > 1:
            break
        n_common_parts += 1
    return {_modernize_name(parts[n_common_parts:]): tensor for parts, tensor in used_tensors.items()}


def _modernize_name(name_parts: tuple[str, ...]) -> str:
    return ".".join([*name_parts[:-1], _LEGACY_SUFFIXES.get(name_parts[-1], name_parts[-1])])
