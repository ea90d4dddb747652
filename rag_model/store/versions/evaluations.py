"""Evaluations in the store: `record` puts one there, `known` finds it again, `evaluations_of` lists them.

An evaluation has no refs: it is named by its id or a unique prefix, with `evaluation:` before it.
It is kept as long as its snapshot, and its model if that is one of the store, are kept: `expire` deletes it with them.
Its rows hold passages. So a takedown deletes the evaluations of the snapshots that it replaces, and nothing can be
recorded of such a snapshot afterwards.
"""

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_model.digest import digest_file
from rag_model.errors import RefusedError, StoreError
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.pulling.destination import Destination, write_files
from rag_model.store.store import Store
from rag_model.store.upkeep.verify import absent, lacking
from rag_model.store.versions.evaluation_manifest import EvaluationContent, EvaluationManifest, Figures, Subject
from rag_model.store.versions.signatures import signs


@dataclass(frozen=True, slots=True)
class Recorded:
    """An evaluation in the store."""

    evaluation: str  # full id
    new: bool  # False: it was there before, and nothing was written


def record(
    store: Store, subject: Subject, figures: Figures, files: Mapping[str, Path], provenance: Mapping[str, Any]
) -> Recorded:
    """Put an evaluation and its files into the store, unless one `stands` there: then nothing is written.

    Signed as other manifests are.

    Raises:
        StoreError: the store cannot be written, or the snapshot or the model was deleted or taken down meanwhile.
    """
    blobs = {name: BlobRef(digest_file(path), path.stat().st_size) for name, path in files.items()}
    made = EvaluationManifest(EvaluationContent(subject, figures, blobs), provenance)
    needs = {store.evaluations.path(made.id), *subjects(store, subject), *(blob.path for blob in blobs.values())}
    with store.intents.held(f"evaluation-{secrets.token_hex(8)}", needs):
        _check_subject(store, subject)
        if stands(store, subject):
            return Recorded(made.id, new=False)
        for path in files.values():
            store.blobs.put_file(path)
        if lacking(store, store.evaluations, made.id):
            store.files.remove(store.evaluations.path(made.id))
        fresh = store.evaluations.add(made)
        _check_still(store, made.id, subject)
    return Recorded(made.id, fresh)


def stands(store: Store, subject: Subject) -> bool:
    """Return whether an evaluation is in the store that a writer leaves as it is: it has all its files.

    For a writer who signs it must be signed by a key of the trust file, without one by the own key: the figures of
    another one may be a stranger's.

    Raises:
        StoreError: it is damaged, or of a newer format.
    """
    return known(store, subject) is not None and (not signs() or store.evaluations.vouched(subject.id))


def known(store: Store, subject: Subject) -> EvaluationManifest | None:
    """Return the evaluation of a subject, if it is in the store with all its files and, with a trust file, signed.

    Raises:
        StoreError: it is damaged.
    """
    if store.files.find(store.evaluations.path(subject.id)) is None:
        return None
    try:
        found = store.evaluations.get(store.evaluations.trusted(subject.id))
    except RefusedError:
        return None
    return None if absent(store, found.content) else found


def evaluations_of(store: Store, identity: str) -> list[EvaluationManifest]:
    """Return the evaluations of a snapshot or of a model, by its full id, oldest first; reads all manifests of them.

    Raises:
        StoreError: one is damaged.
    """
    found = (one for one in every(store) if identity in {one.content.subject.snapshot, one.content.subject.model})
    return sorted(found, key=lambda one: (str(one.provenance.get("created_at", "")), one.id))


def every(store: Store) -> Iterator[EvaluationManifest]:
    """Yield all evaluations of a store.

    Raises:
        StoreError: one is damaged.
    """
    for found in store.files.ask(lambda identity: _read(store, identity), store.evaluations.list()):
        yield from found


def _read(store: Store, identity: str) -> list[EvaluationManifest]:
    try:
        return [store.evaluations.get(identity)]
    except StoreError:
        if store.files.find(store.evaluations.path(identity)) is not None:
            raise
        return []  # it has just expired


@dataclass(frozen=True, slots=True)
class ExportedEvaluation:
    """The result of exporting an evaluation."""

    evaluation: str  # full id
    path: Destination
    bytes: int


def export_evaluation(store: Store, name: str, out: Destination) -> ExportedEvaluation:
    """Write an evaluation's files, each verified, to the new folder `out`; `name` is an id or a prefix.

    Raises:
        StoreError: there is no such evaluation, a file of it is missing or damaged, or `out` cannot be written.
        UsageError: `out` exists already.
    """
    identity = store.evaluations.trusted(name)
    return ExportedEvaluation(identity, out, write_files(store, store.evaluations.get(identity).content.files, out))


def subjects(store: Store, subject: Subject) -> list[str]:
    """Return the paths of the manifests that an evaluation lives as long as: of its snapshot, and of its model."""
    model = subject.stored_model
    return [store.snapshots.path(subject.snapshot), *([store.models.path(model)] if model else [])]


def _check_subject(store: Store, subject: Subject) -> None:
    store.snapshots.get(subject.snapshot)  # refuses one that was taken down
    if subject.stored_model:
        store.models.get(subject.stored_model)


def _check_still(store: Store, identity: str, subject: Subject) -> None:
    """Delete what was recorded of a snapshot that was taken down meanwhile: its takedown may have looked before."""
    if store.takedowns.in_place_of(subject.snapshot) is not None:
        store.files.remove(store.evaluations.path(identity))
        store.snapshots.resolve(subject.snapshot)  # says what replaces it
