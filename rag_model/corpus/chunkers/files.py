"""The files that a chunker's settings name: which of them are read, and their identity in a memo key.

A setting of type `Path` names a file or a folder. Of a folder, and the folders in it, the files are used that the
field's metadata names, `field(metadata={"files": ("tokenizer.json", "*.safetensors")})`, otherwise all; workers get no
others. The first of these names must be in the folder itself: so a folder that is named by mistake is not copied to the
store. In keys and in the recipe of a snapshot, the path is replaced by a digest of the bytes.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rag_model.corpus.chunkers.chunker import Chunker
from rag_model.digest import ALGORITHM, digest_file, digest_json
from rag_model.errors import InputError

_DIGEST = re.compile(rf"{ALGORITHM}:[0-9a-f]{{64}}")
_ITSELF = ""  # the file name of a setting that names a single file, not a folder


def settings_of(chunker: Chunker) -> dict[str, Any]:
    """Return a chunker's settings as JSON values; a path is replaced by the digest of its files, which are read.

    Raises:
        InputError: there is no such file.
    """
    values: dict[str, Any] = asdict(chunker)  # type: ignore[call-overload]
    return values | {name: _digest(chunker, name, path) for name, path in _paths(chunker).items()}


def named_files(chunker: Chunker) -> dict[str, dict[str, Path]]:
    """Return the files of each setting that names files, by their names in its folder.

    Raises:
        InputError: there is no such file, or no file in the folder matches.
    """
    return {name: _files(chunker, name, path) for name, path in _paths(chunker).items()}


def digest_of(files: Mapping[str, str]) -> str:
    """Return the digest of a setting's files; `files` maps their names to the digests of their bytes."""
    return files[_ITSELF] if [*files] == [_ITSELF] else digest_json(dict(files))


def is_file(files: Mapping[str, Any]) -> bool:
    """Whether these are the single file of a setting, and not the files of a folder."""
    return [*files] == [_ITSELF]


def _paths(chunker: Chunker) -> dict[str, Path]:
    values = {field.name: getattr(chunker, field.name) for field in fields(chunker)}  # type: ignore[arg-type]
    return {name: value for name, value in values.items() if isinstance(value, Path)}


def _digest(chunker: Chunker, setting: str, path: Path) -> str:
    if _DIGEST.fullmatch(str(path)):
        return str(path)
    return digest_of({name: digest_file(file) for name, file in _files(chunker, setting, path).items()})


def _files(chunker: Chunker, setting: str, path: Path) -> dict[str, Path]:
    if _DIGEST.fullmatch(str(path)):
        raise InputError(f"the recipe names {setting} by its digest {path}: give the path of the file or folder")
    if path.is_file():
        return {_ITSELF: path}
    (patterns,) = (field.metadata.get("files", ("*",)) for field in fields(chunker) if field.name == setting)  # type: ignore[arg-type]
    if not any(path.glob(patterns[0])):
        wanted = "a file" if patterns[0] == "*" else patterns[0]
        raise InputError(
            f"the recipe's chunker wants as {setting} a folder with {wanted}, and {path} is none: correct it"
        )
    places = (f"{folder}{pattern}" for pattern in patterns for folder in ("", "*/"))
    found = {file.relative_to(path).as_posix(): file for place in places for file in path.glob(place)}
    return {name: found[name] for name in sorted(found) if found[name].is_file()}
