"""Models in the store: a folder goes in, is named by a ref as snapshots are, and comes out as a folder again.

`pull` keeps a folder of versions up to date, as of snapshots; `export_model` writes one plain folder.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rag_model.errors import RefConflictError, StoreError, UsageError
from rag_model.store.objects.trees import linked_tree
from rag_model.store.pulling.export import new_folder
from rag_model.store.store import Store
from rag_model.store.upkeep.verify import absent
from rag_model.store.versions.model_manifest import SUFFIXES, ModelContent, ModelManifest
from rag_model.store.versions.refs import RefMove, checked_name

_TRIES = 100  # races lost in a row before giving up; each costs a few small reads


@dataclass(frozen=True, slots=True)
class Made:
    """What a model is beside its files."""

    kind: str  # the name of the objective that made it
    space: Mapping[str, Any] | None  # the encoder space that its questions ask into, as JSON
    lineage: Mapping[str, Any]  # what it was trained on, by what recipe, and what it began as: part of its id
    metrics: Mapping[str, Any] = field(default_factory=dict)  # outside the id, as is
    provenance: Mapping[str, Any] = field(default_factory=dict)  # when, by which versions


@dataclass(frozen=True, slots=True)
class PutModel:
    """A model in the store, and where its ref stands."""

    model: str  # full id
    move: RefMove


def put_model(store: Store, folder: Path, made: Made, ref: str, note: str = "") -> PutModel:
    """Store the files below `folder` as a model and move `ref`, a name among models, to it.

    Blobs first, then the manifest, then the ref. A ref that names the model already is left alone, so a rerun adds
    nothing to its history. Of two writers the later stands, and the earlier in the history.

    Raises:
        UsageError: the ref cannot be a name, or `folder` holds no file or one that no model needs, such as a pickle.
        RefConflictError: other writers won every one of many races.
        StoreError: the store cannot exclude a second writer, is full, or cannot be written.
    """
    checked_name(ref)
    paths = _files_of(folder)
    store.models.refs.require_exclusion()
    with store.intents.held(f"model-{secrets.token_hex(8)}"):  # no `gc` takes a blob before the manifest is there
        files = {name: store.blobs.put_file(path) for name, path in paths.items()}
        content = ModelContent(made.kind, files, made.space, made.lineage)
        return _publish(store, ModelManifest(content, made.metrics, made.provenance), ref, note)


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """What an export of a model wrote."""

    model: str  # full id
    path: Path
    kind: str  # the name of the objective that made it
    bytes: int


def export_model(store: Store, name: str, out: Path) -> ExportedModel:
    """Write a model's files, each verified, to the new folder `out`, which appears whole or not at all.

    `name` is an id, a prefix, a ref or ref@number. The files are those that the training saved, safetensors and a card
    among them: transformers' `from_pretrained` opens the folder, or the folders in it.

    Raises:
        StoreError: there is no such model, a file of it is missing or damaged, or `out` cannot be written.
        UsageError: there is something at `out` already.
    """
    identity = store.models.resolve(name)
    content = store.models.get(identity).content
    try:
        with new_folder(out) as building:
            for path, ref in content.files.items():
                store.blobs.fetch(ref, building / path)
    except OSError as error:
        raise StoreError(f"cannot write {out}: {error.strerror or error}") from error
    return ExportedModel(identity, out, content.kind, sum(ref.size for ref in content.files.values()))


def model_folder(store: Store, name: str) -> Path:
    """Return a local folder that holds a model's files, each verified; `name` is an id, a prefix, a ref or ref@number.

    The same folder for the same model, in the cache; its files are links and not to be written to.

    Raises:
        StoreError: there is no such model, or a file of it is missing or damaged.
    """
    files = store.models.get(store.models.resolve(name)).content.files
    return linked_tree({path: store.blobs.local(ref) for path, ref in files.items()})


def _files_of(folder: Path) -> dict[str, Path]:
    """Return a folder's files by their relative paths, sorted."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    if not found:
        raise UsageError(f"{folder} holds no file, so it is no model: give the folder that a training saved")
    if strange := [name for name, path in found.items() if path.suffix not in SUFFIXES]:
        raise UsageError(
            f"{folder / strange[0]} is no file of a model ({', '.join(SUFFIXES)}): save the weights as safetensors, "
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
