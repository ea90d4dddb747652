"""The identity of an encoder's weights: its tensors, not its files.

Two folders that hold equal tensors have one digest, whatever the file names, shards, order, dtype (fp16 or bf16 that
equal the fp32 ones) or the class that saved them. Pure numpy: a service checks spaces without torch.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_model.digest import ALGORITHM, digest_json
from rag_model.encoders.spec import read_json
from rag_model.errors import InputError

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
_CHUNK = 1 << 22  # values cast and hashed at a time
_DTYPES = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_MAX_HEADER = 100_000_000  # bytes; safetensors' own bound
# Tensors that never reach a vector: heads of other tasks, BERT's pooler (its tanh layer), saved buffers.
_UNUSED_PARTS = frozenset(
    {"pooler", "cls", "lm_head", "classifier", "qa_outputs", "position_ids", "inv_freq"}
)
_OLD_NAMES = {"gamma": "weight", "beta": "bias"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where one tensor lies in a safetensors file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    def digest(self) -> str:
        """Return the digest of the values as little-endian fp32, cast a few megabytes at a time."""
        if self.dtype not in _DTYPES:
            raise InputError(
                f"encoder file {self.path} holds {self.dtype} tensors: convert the model to fp32, fp16 or bf16"
            )
        running = hashlib.sha256()
        stored = np.memmap(self.path, _DTYPES[self.dtype], "r", self.offset, shape=(math.prod(self.shape),))
        for start in range(0, stored.size, _CHUNK):
            running.update(_as_float32(stored[start : start + _CHUNK], self.dtype).tobytes())
        return f"{ALGORITHM}:{running.hexdigest()}"


def digest_weights(folder: Path) -> str:
    """Return the digest of the tensors of `folder` that decide its vectors.

    Canonical form: fp32 values by name, names without the prefix of the wrapping class (`bert.`,
    `ctx_encoder.bert_model.`), without task heads, pooler and buffers.

    Raises:
        InputError: there are no safetensors weights, or a file is truncated or corrupt.
    """
    tensors = _canonical_names(_tensors(folder))
    return digest_json({name: [list(t.shape), t.digest()] for name, t in tensors.items()})


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of `folder`, the index of a sharded model first.

    Raises:
        InputError: there are none; the sentence says what to do when there are pickled ones.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / WEIGHTS_INDEX).is_file():
        shards = sorted(set(read_json(folder / WEIGHTS_INDEX)["weight_map"].values()))
        return [folder / WEIGHTS_INDEX, *(folder / Path(shard).name for shard in shards)]
    if any(folder.glob("*.bin")):
        raise InputError(
            f"encoder {folder} has only pickled weights, which can run code when read: save it again with "
            "`model.save_pretrained(folder)`, which writes model.safetensors"
        )
    raise InputError(
        f"encoder {folder} has no {WEIGHTS}: give the folder of a Hugging Face model, or fetch it again"
    )


def _tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in weight_files(folder):
        if path.suffix == ".safetensors":
            found.update(_read_header(path))
    return found


def _read_header(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        header, start = _header(path)
        size = path.stat().st_size
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            if start + end > size:
                raise ValueError(f"tensor {name} ends at byte {start + end} of {size}")
            yield name, Tensor(path, entry["dtype"], tuple(entry["shape"]), start + begin)
    except (OSError, ValueError, KeyError, TypeError) as broken:
        raise InputError(
            f"encoder file {path} is missing or corrupt ({broken}): fetch the model again"
        ) from broken


def _header(path: Path) -> tuple[Mapping[str, Any], int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= _MAX_HEADER:
            raise ValueError(f"a header of {length} bytes")
        return json.loads(file.read(length)), 8 + length


def _canonical_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    used = {tuple(name.split(".")): tensor for name, tensor in tensors.items()}
    used = {parts: tensor for parts, tensor in used.items() if not _UNUSED_PARTS & set(parts)}
    skip = len(os.path.commonprefix([parts[:-1] for parts in used]))
    return {_modern(parts[skip:]): tensor for parts, tensor in used.items()}


def _modern(parts: tuple[str, ...]) -> str:
    return ".".join([*parts[:-1], _OLD_NAMES.get(parts[-1], parts[-1])])


def _as_float32(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "BF16":  # the upper half of an fp32
        return (values.astype("<u4") << 16).view("<f4")
    return values.astype("<f4")
