"""Models in the store: `put_model` stores a folder as a model and names it by a ref; `export_model` writes it back.

`pull` maintains a folder of versions, as for snapshots; `export_model` writes one plain folder.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rag_model.errors import RefConflictError, StoreError, UsageError
from rag_model.store.objects.trees import linked_tree
from rag_model.store.pulling.destination import Destination, write_files
from rag_model.store.store import Store
from rag_model.store.upkeep.verify import absent
from rag_model.store.versions.model_manifest import SUFFIXES, ModelContent, ModelManifest
from rag_model.store.versions.refs import RefMove, checked_name

_TRIES = 100  # races lost in a row before giving up; each costs a few small reads


@dataclass(frozen=True, slots=True)
class Made:
    """The description of a model, without its files."""

    kind: str  # the name of the objective that made it
    space: Mapping[str, Any] | None  # the encoder space of its queries, as JSON
    lineage: Mapping[str, Any]  # data, recipe and initial weights of the training: part of its id
    metrics: Mapping[str, Any] = field(default_factory=dict)  # not part of its id
    provenance: Mapping[str, Any] = field(default_factory=dict)  # when, by which versions; not part of its id


@dataclass(frozen=True, slots=True)
class PutModel:
    """A model in the store, and the current move of its ref."""

    model: str  # full id
    move: RefMove


def put_model(store: Store, folder: Path, made: Made, ref: str, note: str = "") -> PutModel:
    """Store the files below `folder` as a model and move `ref`, a ref of models, to it.

    The blobs are written first, then the manifest, then the ref. A ref that names the model already is not moved, so a
    rerun adds nothing to its history. If two writers move the ref, the later move is current and both are in the log.

    Raises:
        UsageError: `ref` is not a valid name, or `folder` has no file, or one with a suffix that models may not have.
        RefConflictError: other writers moved the ref first in each of many attempts.
        StoreError: the store cannot exclude a second writer, is full, or cannot be written.
    """
    checked_name(ref)
    paths = _files_of(folder)
    store.models.refs.require_exclusion()
    with store.intents.held(f"model-{secrets.token_hex(8)}"):  # `gc` deletes no blob before the manifest exists
        files = {name: store.blobs.put_file(path) for name, path in paths.items()}
        content = ModelContent(made.kind, files, made.space, made.lineage)
        return _publish(store, ModelManifest(content, made.metrics, made.provenance), ref, note)


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """The result of exporting a model."""

    model: str  # full id
    path: Destination
    kind: str  # the name of the objective that made it
    bytes: int


def export_model(store: Store, name: str, out: Destination) -> ExportedModel:
    """Write a model's files, each verified, to the new folder `out`, which appears complete or not at all.

    `out` may be a repository of the Hugging Face Hub (`hf://USER/NAME`), or a folder in one. `name` is an id, a prefix,
    a ref or ref@number. The files are those that the training saved, including safetensors and a model card:
    transformers' `from_pretrained` opens the folder, or the folders in it.

    Raises:
        StoreError: there is no such model, a file of it is missing or damaged, or `out` cannot be written.
        UsageError: `out` exists already.
    """
    identity = store.models.trusted(name)
    content = store.models.get(identity).content
    return ExportedModel(identity, out, content.kind, write_files(store, content.files, out, "model"))


def model_folder(store: Store, name: str) -> Path:
    """Return a local folder that holds a model's files, each verified; `name` is an id, a prefix, a ref or ref@number.

    The folder is in the cache, the same one for the same model; its files are links: do not write to them.

    Raises:
        StoreError: there is no such model, or a file of it is missing or damaged.
    """
    files = store.models.get(store.models.trusted(name)).content.files
    return linked_tree({path: store.blobs.local(ref) for path, ref in files.items()})


def _files_of(folder: Path) -> dict[str, Path]:
    """Return a folder's files by their relative paths, sorted."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    if not found:
        raise UsageError(f"{folder} has no files, so it is not a model: give the folder that a training saved")
    if strange := [name for name, path in found.items() if path.suffix not in SUFFIXES]:
        raise UsageError(
            f"{folder / strange[0]} is not a file of a model ({', '.join(SUFFIXES)}): save the weights as safetensors, "
            "and leave out what loading does not need"
        )
    return found


def _publish(store: Store, manifest: ModelManifest, ref: str, note: str) -> PutModel:
    needs = {store.models.path(manifest.id), *(blob.path for blob in manifest.content.files.values())}
    with store.intents.held(f"publish-{secrets.token_hex(8)}", needs):
        if problems := absent(store, manifest.content):
            raise StoreError(
                f"model {manifest.id[:12]} cannot be published in {store.url}: {len(problems)} of its files were "
                f"deleted meanwhile (first {problems[0].path}): run the same command again"
            )
        return PutModel(store.models.put(manifest), _moved(store, manifest.id, ref, note))


def _moved(store: Store, model: str, ref: str, note: str) -> RefMove:
    refs = store.models.refs
    for _ in range(_TRIES):
        now = refs.current(ref)
        if now is not None and now.snapshot == model:
            return now
        try:
            return refs.move(ref, model, now.number if now else 0, note)
        except RefConflictError:
            continue
    raise RefConflictError(f"ref model:{ref} in {store.url} was moved by others {_TRIES} times in a row: try again")
