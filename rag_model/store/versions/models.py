"""Models in the store: store a folder as a model with a ref, or export it.

`pull` copies models, like snapshots, to a folder with several versions; `export_model` writes a
folder with the files of one model.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rag_model.errors import RefConflictError, UsageError
from rag_model.store.pulling.export import Destination, export_files
from rag_model.store.store import Store
from rag_model.store.upkeep.verify import protect_files
from rag_model.store.versions.model_manifest import SUFFIXES, ModelContent, ModelManifest
from rag_model.store.versions.refs import RefMove, check_ref_name

_MAX_RACES = 100  # maximum number of consecutive lost races; each takes a few small reads


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """The description of a model, without its files."""

    kind: str  # the name of the training objective
    space: Mapping[str, Any] | None  # the encoder space of queries, as JSON
    lineage: Mapping[str, Any]  # data, recipe and initial weights of the training; part of the id
    metrics: Mapping[str, Any] = field(default_factory=dict)  # not part of the id
    # Time and versions of the training; not part of the id.
    provenance: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in the store, and the current move of its ref."""

    model: str  # full id
    move: RefMove


def put_model(store: Store, folder: Path, metadata: ModelMetadata, ref: str, note: str = "") -> StoredModel:
    """Store the files below `folder` as a model, and move `ref`, a ref of models, to this model.

    The blobs are written first, then the manifest, then the ref. A ref that already names the model
    is not moved, so a rerun adds nothing to its history. If two writers move the ref, the later
    move is current, and the log has both moves.

    Raises:
        UsageError: `ref` is not a valid name, `folder` has no file, or a file has a suffix that is
            not allowed in a model.
        RefConflictError: other writers moved the ref first in each of a hundred attempts.
        StoreError: the store does not support exclusive creation, is full, or cannot be written.
    """
    check_ref_name(ref)
    paths = _list_files(folder)
    store.models.refs.require_exclusive_creation()
    # `gc` deletes no blob before the manifest exists.
    with store.intents.hold(f"model-{secrets.token_hex(8)}"):
        files = {name: store.blobs.put_file(path) for name, path in paths.items()}
        content = ModelContent(metadata.kind, files, metadata.space, metadata.lineage)
        return _publish(store, ModelManifest(content, metadata.metrics, metadata.provenance), ref, note)


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """The result of exporting a model."""

    model: str  # full id
    path: Destination
    kind: str  # the name of the training objective
    bytes: int


def export_model(store: Store, name: str, out: Destination) -> ExportedModel:
    """Write a model's files, each verified, to the new folder `out`, which appears complete or not
    at all.

    `out` may be a repository of the Hugging Face Hub (`hf://USER/NAME`), or a folder in one. `name`
    is an id, a prefix of an id, a ref or ref@number. The files are those that the training saved,
    including safetensors and a model card, so `from_pretrained` of transformers opens the folder or
    its subfolders.

    Raises:
        StoreError: there is no such model, one of its files is missing or damaged, or `out` cannot
            be written.
        UsageError: `out` exists already.
    """
    identity = store.models.resolve_trusted(name)
    content = store.models.get(identity).content
    return ExportedModel(identity, out, content.kind, export_files(store, content.files, out, "model"))


def _list_files(folder: Path) -> dict[str, Path]:
    """Return a folder's files by relative path, sorted."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    if not files:
        raise UsageError(f"{folder} has no files, so it is not a model: give the folder that a training saved")
    if unsupported := [name for name, path in files.items() if path.suffix not in SUFFIXES]:
        raise UsageError(
            f"{folder / unsupported[0]} is not a file of a model ({', '.join(SUFFIXES)}): save the "
            "weights as safetensors, and leave out what loading does not need"
        )
    return files


def _publish(store: Store, manifest: ModelManifest, ref: str, note: str) -> StoredModel:
    manifest_path = store.models.manifest_path(manifest.id)
    with protect_files(store, f"model {manifest.id[:12]}", manifest_path, manifest.content):
        return StoredModel(store.models.publish(manifest), _move_ref(store, manifest.id, ref, note))


def _move_ref(store: Store, model: str, ref: str, note: str) -> RefMove:
    refs = store.models.refs
    for _ in range(_MAX_RACES):
        current_move = refs.find_current(ref)
        if current_move is not None and current_move.snapshot == model:
            return current_move
        try:
            return refs.move(ref, model, current_move.number if current_move else 0, note)
        except RefConflictError:
            continue
    raise RefConflictError(f"ref model:{ref} in {store.url} was moved by others {_MAX_RACES} times in a row: try again")
