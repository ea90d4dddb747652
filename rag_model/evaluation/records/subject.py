"""What identifies an evaluation: everything that decides its figures, named so that a moved ref does not change it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rag_model.digest import digest_file, digest_json
from rag_model.evaluation.answers.settings import Evaluation
from rag_model.evaluation.questions.files import Question, QuestionSet
from rag_model.evaluation.retrieval.judging import Judge
from rag_model.reading.writers.writer import ENDPOINT
from rag_model.retrieve.survey import survey
from rag_model.store.store import MODEL, Store
from rag_model.store.versions.evaluation_manifest import Subject
from rag_model.store.versions.snapshot import Snapshot

VERSION = 2  # of the code that decides a figure; a new number makes evaluations new
_LIBRARIES = ("torch", "transformers")  # their releases round differently, and so may answer differently


def retrieval_subject(
    store: Store,
    snapshot: Snapshot,
    asked: QuestionSet,
    retrievers: Sequence[str],
    k: int,
    judge: Judge,
    encoder: str | None = None,
) -> Subject:
    """Return the subject of an evaluation of retrieval alone.

    `retrievers` are expressions, none: the snapshot's default; `encoder` is that of the questions, where one is named.

    Raises:
        StoreError: a model that is named is not in the store.
        UsageError: an expression is wrong.
    """
    names = list(retrievers) or [snapshot.manifest.content.default_retriever]
    settings = {
        "retrievers": names,
        "k": k,
        "judged_by": judge.by,
        "patterns": judge.patterns,
        "encoder": encoder,
        "models": _pinned(store, snapshot, names, encoder),
        "version": VERSION,
    }
    return Subject(snapshot.id, "", digest_questions(asked), settings)


def answers_subject(
    store: Store,
    snapshot: Snapshot,
    model: str,
    asked: QuestionSet,
    settings: Evaluation,
    asks: str | None = None,
) -> Subject:
    """Return the subject of an evaluation of a model: `model` is its id, its folder, or `openai:MODEL`.

    What an endpoint gives under a name may change: it is known by its address, its name and its settings.
    What a reader `decides` is in the settings, so that the id is known before a model is loaded.

    Raises:
        StoreError: a model that the retriever names is not in the store.
        UsageError: the questions cannot be judged so, or the retriever is wrong.
    """
    retriever = settings.expression or snapshot.manifest.content.default_retriever
    given: dict[str, Any] = {
        **asdict(settings),
        "index": None,
        "retriever": retriever,
        "judged_by": Judge.of(asked, settings.judged_by, patterns=settings.kind == "patterns").by,
        "asks": asks,
        "models": _pinned(store, snapshot, [retriever], asks),
        "libraries": {name: version(name) for name in _LIBRARIES},
        "version": VERSION,
    }
    if model.startswith(ENDPOINT):
        given["endpoint"] = _endpoint(model)
    return Subject(snapshot.id, _identity(model, given), digest_questions(asked), given)


def _identity(model: str, given: Mapping[str, Any]) -> str:
    """Return an id, or the digest of a folder or of what names an endpoint's model."""
    if "endpoint" in given:
        return digest_json(given["endpoint"])
    folder = Path(model)
    return digest_json(digest_folder(folder)) if folder.is_dir() else model


def _endpoint(model: str) -> dict[str, Any]:
    writing: Any = import_module("rag_model.reading.writers.endpoint")  # HTTP for an endpoint alone
    name = model.removeprefix(ENDPOINT)
    found: dict[str, Any] = writing.decided_by(name, writing.ChatSettings.of(), writing.Place.of())
    return found


def digest_questions(asked: QuestionSet) -> str:
    """Return the digest of the questions as they were read: another packing of the same questions has the same one."""
    return digest_json([[_plain(question) for question in asked.questions], asked.grades])


def digest_folder(folder: Path) -> dict[str, str]:
    """Return the digest of each file below a folder, by its relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): digest_file(path) for path in files}


def _plain(question: Question) -> dict[str, Any]:
    return {**asdict(question), "evidence": [sorted(pages) for pages in question.evidence]}


def _pinned(store: Store, snapshot: Snapshot, retrievers: Sequence[str], encoder: str | None) -> dict[str, str]:
    """Return the models that expressions name: of the store by their ids, folders by the digest of their files."""
    named = dict.fromkeys(model for one in retrievers for model in survey(snapshot, one).models)
    return {name: _pin(store, name) for name in [*named, *([encoder] if encoder else [])]}


def _pin(store: Store, name: str) -> str:
    if name.startswith(MODEL):
        return store.models.trusted(name.removeprefix(MODEL))
    return digest_json(digest_folder(Path(name))) if Path(name).is_dir() else name
