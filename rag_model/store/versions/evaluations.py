"""Evaluations in the store: record, find, list and export them.

An evaluation has no refs: its name is `evaluation:` with its id, or a unique prefix of the id.
`expire` deletes an evaluation together with its snapshot, or with its model if the store has the
model. The rows of an evaluation contain passages. So a takedown deletes the evaluations of the
snapshots that it replaces, and no evaluation of such a snapshot can be recorded afterwards.
"""

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_model.digest import digest_file
from rag_model.errors import RefusedError
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.pulling.export import Destination, export_files
from rag_model.store.store import Store
from rag_model.store.upkeep.verify import find_missing, find_missing_files
from rag_model.store.versions.evaluation_manifest import (
    EvaluationContent,
    EvaluationManifest,
    EvaluationMetrics,
    EvaluationSubject,
)
from rag_model.store.versions.signatures import has_signing_key

# key in the provenance: the number of provisional answers, which the next run generates again
PROVISIONAL_KEY = "provisional_answers"


@dataclass(frozen=True, slots=True)
class RecordedEvaluation:
    """An evaluation in the store."""

    evaluation: str  # full id
    is_new: bool  # False if the store already had it, so that nothing was written


def record_evaluation(
    store: Store,
    subject: EvaluationSubject,
    metrics: EvaluationMetrics,
    files: Mapping[str, Path],
    provenance: Mapping[str, Any],
) -> RecordedEvaluation:
    """Store and sign an evaluation and its files, unless `is_recorded` says that the store has it.

    Raises:
        StoreError: the store cannot be written, or the snapshot or the model was deleted or taken
            down in the meantime.
    """
    blobs = {name: BlobRef(digest_file(path), path.stat().st_size) for name, path in files.items()}
    manifest = EvaluationManifest(EvaluationContent(subject, metrics, blobs), provenance)
    needed_paths = {
        store.evaluations.manifest_path(manifest.id),
        *subject_paths(store, subject),
        *(blob_ref.path for blob_ref in blobs.values()),
    }
    with store.intents.hold(f"evaluation-{secrets.token_hex(8)}", needed_paths):
        _check_subject(store, subject)
        if is_recorded(store, subject):
            return RecordedEvaluation(manifest.id, is_new=False)
        for path in files.values():
            store.blobs.put_file(path)
        if find_missing(store, store.evaluations, manifest.id) or _has_provisional_answers(store, manifest.id):
            store.files.remove(store.evaluations.manifest_path(manifest.id))
        is_new = store.evaluations.create_or_overwrite(manifest)
        _check_not_taken_down(store, manifest.id, subject)
    return RecordedEvaluation(manifest.id, is_new)


def is_recorded(store: Store, subject: EvaluationSubject) -> bool:
    """Return whether the store has an evaluation with all its files, and no writer has to replace
    it.

    An evaluation with provisional answers is replaced by the next run, which generates these
    answers again. A writer with a signing key replaces an evaluation without a trusted signature,
    since a stranger may have written its metrics. Trusted are the keys of the trust file or, if
    there is no file, the writer's own key.

    Raises:
        StoreError: the evaluation is damaged, or of a newer format.
    """
    return find_evaluation(store, subject) is not None and (
        not has_signing_key() or store.evaluations.has_trusted_signature(subject.id)
    )


def find_evaluation(store: Store, subject: EvaluationSubject) -> EvaluationManifest | None:
    """Return the evaluation of a subject; None if a file or a required signature is missing, or if
    answers are provisional.

    A signature is required if a trust file is given.

    Raises:
        StoreError: the evaluation is damaged.
    """
    if store.files.find(store.evaluations.manifest_path(subject.id)) is None:
        return None
    try:
        manifest = store.evaluations.get(store.evaluations.resolve_trusted(subject.id))
    except RefusedError:
        return None
    is_replaceable = manifest.provenance.get(PROVISIONAL_KEY) or find_missing_files(store, manifest.content)
    return None if is_replaceable else manifest


def list_evaluations(store: Store, identity: str) -> list[EvaluationManifest]:
    """Return the evaluations of a snapshot or model (a full id), oldest first.

    Raises:
        StoreError: an evaluation is damaged.
    """
    manifests = (
        manifest
        for manifest in iter_evaluations(store)
        if identity in {manifest.content.subject.snapshot, manifest.content.subject.model}
    )
    return sorted(manifests, key=lambda evaluation: (str(evaluation.provenance.get("created_at", "")), evaluation.id))


def iter_evaluations(store: Store) -> Iterator[EvaluationManifest]:
    """Yield all evaluations of a store.

    Raises:
        StoreError: an evaluation is damaged.
    """
    yield from filter(None, store.files.map_concurrently(store.evaluations.find, store.evaluations.list_ids()))


@dataclass(frozen=True, slots=True)
class ExportedEvaluation:
    """The result of exporting an evaluation."""

    evaluation: str  # full id
    path: Destination
    bytes: int


def export_evaluation(store: Store, name: str, out: Destination) -> ExportedEvaluation:
    """Write an evaluation (an id, or a prefix of it) to the new folder `out`, each file verified.

    Raises:
        StoreError: there is no such evaluation, one of its files is missing or damaged, or `out`
            cannot be written.
        UsageError: `out` exists already.
    """
    identity = store.evaluations.resolve_trusted(name)
    return ExportedEvaluation(identity, out, export_files(store, store.evaluations.get(identity).content.files, out))


def subject_paths(store: Store, subject: EvaluationSubject) -> list[str]:
    """Return the manifest paths of an evaluation's snapshot and, if the store has it, its model.

    The evaluation expires as soon as the snapshot or the model expires.
    """
    model_id = subject.stored_model
    return [
        store.snapshots.manifest_path(subject.snapshot),
        *([store.models.manifest_path(model_id)] if model_id else []),
    ]


def _check_subject(store: Store, subject: EvaluationSubject) -> None:
    store.snapshots.get(subject.snapshot)  # raises an error if the snapshot does not exist
    if subject.stored_model:
        store.models.get(subject.stored_model)


def _has_provisional_answers(store: Store, identity: str) -> bool:
    manifest = store.evaluations.find(identity)
    return manifest is not None and bool(manifest.provenance.get(PROVISIONAL_KEY))


def _check_not_taken_down(store: Store, identity: str, subject: EvaluationSubject) -> None:
    """Delete the evaluation if its snapshot was taken down before the evaluation existed."""
    if store.takedowns.find_replacement(subject.snapshot) is not None:
        store.files.remove(store.evaluations.manifest_path(identity))
        store.snapshots.resolve(subject.snapshot)  # raises an error that names the replacement
