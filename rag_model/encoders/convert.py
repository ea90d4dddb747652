"""Convert pickled weights to safetensors, in a child process with bounded time and memory.

A pickle can run code when it is read. The child, which cannot open connections, reads it with
torch's `weights_only` unpickler, which accepts only tensors, and writes the same values as
safetensors. No other module reads pickles.

This module converts every folder with `pytorch_model.bin`, or with shards and
`pytorch_model.bin.index.json`, and its subfolders. Such folders are written by transformers,
sentence-transformers (whose `2_Dense/` has weights too), PyLate and Stanford's ColBERT. Tensor
names do not change, so that transformers' rules for old names such as `LayerNorm.gamma` still
apply.
"""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_model.encoders.files import (
    DOWNLOAD_PATTERNS,
    HubName,
    download,
    find_hub_name,
    read_json_object,
    resolve_folder,
)
from rag_model.encoders.spec import RECORD_FILE, find_known_settings, read_encoder_spec
from rag_model.encoders.weights import WEIGHTS, WEIGHTS_INDEX, read_shard_names, read_tensor_headers
from rag_model.errors import InputError, ResourceError, UsageError, format_error
from rag_model.extras import require
from rag_model.process import ChildDiedError, ChildWorker, block_sockets, serve_calls

PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_HUB_PATTERNS = (*DOWNLOAD_PATTERNS, "*.md", "pytorch_model*.bin", "*/pytorch_model*.bin")
_COPIED_SUFFIXES = {".json", ".jsonl", ".txt", ".model", ".md", ".jinja", ".metadata"}
_COPIED_SUFFIXES |= {".safetensors"}  # weights of subfolders that have no pickled weights
_RUNTIME_FOLDERS = {"onnx", "openvino"}  # exports for other runtimes, which are not copied
_MEMORY_BYTES = 3 << 29  # bytes that the child may allocate for torch and Python
_TENSOR_COPIES = 2  # copies of a file's tensors in memory, one for reading and one for writing
# CPU time limit per file: a constant, plus the time to read the file at a tenth of a disk's speed.
_SECONDS, _BYTES_PER_SECOND = 120.0, 10_000_000
# maximum tensor bytes per byte of the file, which stores memory that tensors share only once
_MAX_EXPANSION = 4
_REFUSED_NAME = re.compile(r"GLOBAL (\S+)")  # class or function in an error of the unpickler
_OUT_OF_MEMORY_TEXTS = ("can't allocate memory", "not enough memory")
_DISK_FULL_TEXTS = ("No space left", "Disk quota", "File too large")


@dataclass(frozen=True, slots=True)
class ConvertedWeights:
    """Source, new weight files and tensor counts of a conversion."""

    source: str  # the converted model: NAME@COMMIT on the hub, or a folder
    files: tuple[str, ...]  # paths of the weight files in the new folder
    tensors: int  # number of tensors
    bytes: int  # bytes of all tensors
    # If a tensor has several names: each omitted name -> the name under which it was written.
    shared: Mapping[str, str]


def fetch_pickles(source: str) -> Path:
    """Return the local folder of the model `source`, which has pickled weights.

    Raises:
        InputError: `source` is neither an existing folder nor the name of a model on the hub.
        UsageError: the model has safetensors, or the source is empty.
    """
    if not source:  # the path "" is the working directory
        raise UsageError("the source is empty: give a folder or hub name with pickled weights")
    folder = resolve_folder(source)
    hub_name = HubName.parse(find_hub_name(folder))
    if hub_name is not None and not _has_safetensors(folder):
        folder = download(hub_name, _HUB_PATTERNS)
    if any(_iter_pickle_folders(folder)):
        return folder
    if any(folder.rglob("*.safetensors")):
        raise UsageError(f"{source} has safetensors, which need no conversion: use it as it is")
    raise InputError(f"{source} has no {PICKLE}: give a folder or hub name with pickled weights")


def convert_weights(folder: Path, destination: Path, name: str = "") -> ConvertedWeights:
    """Write a copy of a model into the existing folder `destination`, with weights as safetensors.

    A tensor whose memory several names share is written once, under its first name, as transformers
    does. `name` is the hub name of the model; if `find_known_settings` has settings for this name
    that are missing in its files, the copy records them.

    Raises:
        InputError: the pickle contains objects other than tensors, or is truncated or corrupt.
        ResourceError: the disk is full, or there is too little memory.
    """
    hub_name = find_hub_name(folder)
    _reject_outside_links(folder)
    pickle_folders = [*_iter_pickle_folders(folder)]
    pickle_sizes = [path.stat().st_size for pickle_folder in pickle_folders for path in pickle_folder.glob("*.bin")]
    memory_limit = _MEMORY_BYTES + _TENSOR_COPIES * max(pickle_sizes, default=0)
    # The new files may be published, so they must not contain the path of a local folder.
    converter = ChildWorker(__name__, hub_name or "", memory=memory_limit)
    reply_by_file = dict[str, dict[str, Any]]()
    for pickle_folder in pickle_folders:
        converted_folder = destination / pickle_folder.relative_to(folder)
        converted_folder.mkdir(parents=True, exist_ok=True)
        reply_by_file |= {
            (converted_folder / file).relative_to(destination).as_posix(): reply
            for file, reply in _convert_pickle_folder(pickle_folder, converted_folder, converter).items()
        }
    for path in _iter_copied_files(folder):
        copy_path = destination / path.relative_to(folder)
        copy_path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy_path)
    if (known_settings := find_known_settings(name)) and not (destination / RECORD_FILE).exists():
        spec = read_encoder_spec(destination, known_settings)
        _write_json(destination / RECORD_FILE, {"spec": spec.to_json()})
    return ConvertedWeights(
        hub_name or str(folder),
        tuple(reply_by_file),
        sum(len(reply["names"]) for reply in reply_by_file.values()),
        sum(reply["bytes"] for reply in reply_by_file.values()),
        {name: first_name for reply in reply_by_file.values() for name, first_name in reply["shared"].items()},
    )


def _reject_outside_links(folder: Path) -> None:
    """Refuse links to files outside the folder, because copies of them could be published.

    In the Hub's cache, the files of a model are links to the blobs of its repository.
    """
    allowed_roots = [folder.resolve()]
    if folder.absolute().parent.name == "snapshots":
        allowed_roots.append(folder.resolve().parents[1] / "blobs")
    for path in folder.rglob("*"):
        if path.is_symlink() and not any(path.resolve().is_relative_to(root) for root in allowed_roots):
            raise InputError(
                f"{path} is a link to {path.resolve()}, outside of the folder: replace it with a "
                "copy of the file, or remove it"
            )


def _iter_pickle_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders that have pickled weights and no safetensors."""
    for path in sorted([folder, *(path for path in folder.rglob("*") if path.is_dir())]):
        has_pickle = (path / PICKLE).is_file() or (path / PICKLE_INDEX).is_file()
        if has_pickle and not _has_safetensors(path):
            yield path


def _has_safetensors(folder: Path) -> bool:
    return (folder / WEIGHTS).is_file() or (folder / WEIGHTS_INDEX).is_file()


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _iter_copied_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        path_parts = path.relative_to(folder).parts
        is_skipped = any(path_part.startswith(".") or path_part in _RUNTIME_FOLDERS for path_part in path_parts)
        is_copied = path.suffix in _COPIED_SUFFIXES and path.name != PICKLE_INDEX
        if is_copied and not is_skipped and path.is_file():
            yield path


def _convert_pickle_folder(folder: Path, converted_folder: Path, converter: ChildWorker) -> dict[str, dict[str, Any]]:
    """Convert the weights of one folder; return the child's reply for each new file name."""
    if (folder / PICKLE).is_file():
        reply_by_file = {WEIGHTS: _convert_in_child(folder / PICKLE, converted_folder / WEIGHTS, converter)}
    else:
        shards = sorted(Path(shard).name for shard in read_shard_names(folder / PICKLE_INDEX))
        reply_by_file = {}
        for shard_number, shard in enumerate(shards, start=1):
            new_name = f"model-{shard_number:05d}-of-{len(shards):05d}.safetensors"
            reply_by_file[new_name] = _convert_in_child(folder / shard, converted_folder / new_name, converter)
        _write_index(folder / PICKLE_INDEX, converted_folder / WEIGHTS_INDEX, reply_by_file)
    read_tensor_headers(converted_folder)  # raises an error if a file is incomplete
    return reply_by_file


def _write_index(pickle_index: Path, new_index: Path, replies: Mapping[str, Mapping[str, Any]]) -> None:
    tensor_counts = Counter[str]()
    for reply in replies.values():
        tensor_counts.update([*reply["names"], *reply["shared"]])
    expected_tensors = set(read_json_object(pickle_index)["weight_map"])
    repeated_names = [name for name, tensor_count in tensor_counts.items() if tensor_count > 1]
    if inconsistent_names := sorted(expected_tensors ^ tensor_counts.keys()) or repeated_names:
        raise InputError(
            f"model file {pickle_index} does not match its shards (the first tensor that differs "
            f"is {inconsistent_names[0]!r}): fetch the model again"
        )
    weight_map = {name: file for file, reply in replies.items() for name in reply["names"]}
    metadata = {"total_size": sum(reply["bytes"] for reply in replies.values())}
    _write_json(new_index, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})


def _convert_in_child(path: Path, destination: Path, converter: ChildWorker) -> dict[str, Any]:
    try:
        file_bytes = path.stat().st_size
        timeout_seconds = _SECONDS + file_bytes / _BYTES_PER_SECOND
        reply: dict[str, Any] = converter.call([str(path), str(destination)], timeout_seconds)
    except OSError as error:
        raise InputError(f"weights {path} cannot be read ({error.strerror}): fetch the model again") from error
    except ChildDiedError as error:
        raise InputError(
            f"the conversion of pickled weights {path} {error}, which is more than tensors in "
            f"{file_bytes:,} bytes need: fetch the model again, or use another one"
        ) from error
    return reply


def _open_converter(source: str) -> Callable[[Any], Any]:
    """Block connections in this child process, and return the function that converts a file."""
    block_sockets()

    def convert(paths: Any) -> dict[str, Any]:
        path, destination = map(Path, paths)
        tensors, first_name_by_alias = read_pickle(path)
        metadata = {**first_name_by_alias, "format": "pt", **({"source": source} if source else {})}
        save_file = require("safetensors.torch", "model").save_file
        try:
            save_file(_copy_shared_memory(tensors), str(destination), metadata)
            _apply_umask(destination)
        except Exception as error:  # SafetensorError has no error number
            if any(disk_full_text in str(error) for disk_full_text in _DISK_FULL_TEXTS):
                raise ResourceError(
                    f"the disk of the new folder is full: {destination.name} cannot be written; free some space"
                ) from error
            _raise_if_out_of_memory(error)
            raise
        tensor_bytes = sum(map(_count_bytes, tensors.values()))
        return {"names": [*tensors], "bytes": tensor_bytes, "shared": first_name_by_alias}

    return convert


def _apply_umask(path: Path) -> None:
    """Give a file the usual mode of a new file, because safetensors makes it readable only by its
    owner.
    """
    umask = os.umask(0o077)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def read_pickle(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a pickle with an unpickler that accepts only tensors.

    Returns:
        (tensor by name, first name by alias). A tensor with several names is in the first mapping
        under its first name; the second mapping has its other names, the aliases, as keys.

    Raises:
        InputError: the pickle contains objects other than tensors, or is truncated or corrupt.
        MemoryError: the tensors need more memory than is available.
    """
    torch = require("torch", "model")
    try:
        state_dict = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a hostile file may raise any exception of the unpickler
        _raise_if_out_of_memory(error)
        if type(error).__name__ == "UnpicklingError":
            match = _REFUSED_NAME.search(str(error))
            found_contents = match[1] if match else "an unknown instruction"
            raise _create_contents_error(path, found_contents) from error
        raise InputError(
            f"pickled weights {path} are truncated or corrupt ({format_error(error)[:200]}): fetch the model again"
        ) from error
    if not isinstance(state_dict, dict):
        raise _create_contents_error(path, f"a {type(state_dict).__name__}")
    if not state_dict:
        raise _create_contents_error(path, "an empty table")
    first_name_by_key, tensors, first_name_by_alias = dict[Any, str](), dict[str, Any](), dict[str, str]()
    for name, tensor in state_dict.items():
        if not isinstance(name, str) or name == "__metadata__":
            raise _create_contents_error(path, f"the key {ascii(name)[:60]}")
        is_tensor = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        is_plain = is_tensor and tensor.layout == torch.strided
        if not is_plain or tensor.is_quantized or tensor.is_meta or tensor.is_complex():
            type_name = type(tensor).__name__
            raise _create_contents_error(path, f"{ascii(name)[:60]}, a {type_name} that is not a plain tensor")
        memory_key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        tensor_key = memory_key if tensor.numel() else name
        if (first_name := first_name_by_key.setdefault(tensor_key, name)) == name:
            tensors[name] = tensor.detach()
        else:
            first_name_by_alias[name] = first_name
    file_bytes, tensor_bytes = path.stat().st_size, sum(map(_count_bytes, tensors.values()))
    if tensor_bytes > _MAX_EXPANSION * file_bytes:
        raise _create_contents_error(path, f"tensors of {tensor_bytes:,} bytes in a file of {file_bytes:,}")
    return tensors, first_name_by_alias


def _count_bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _copy_shared_memory(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return contiguous tensors that share no memory, as safetensors requires."""
    storage_by_tensor = {name: tensor.untyped_storage().data_ptr() for name, tensor in tensors.items()}
    tensors_per_storage = Counter(storage_by_tensor.values())
    return {
        name: (tensor.clone() if tensors_per_storage[storage_by_tensor[name]] > 1 else tensor).contiguous()
        for name, tensor in tensors.items()
    }


def _raise_if_out_of_memory(error: Exception) -> None:
    if any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS):
        raise MemoryError from error


def _create_contents_error(path: Path, contents: str) -> InputError:
    return InputError(
        f"pickled weights {path} contain {contents}, but only a table of tensors is accepted, "
        "because other objects can execute code: use another copy, or a revision with safetensors"
    )


if __name__ == "__main__":
    serve_calls(_open_converter)
