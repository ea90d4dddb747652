"""The identity of an evaluation: all inputs and settings that determine its metrics.

Refs are replaced by ids, because a ref can move.
"""

from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rag_model.digest import digest_json
from rag_model.encoders.files import ENDPOINT_PREFIX, pin_hub_name
from rag_model.evaluation.answers.settings import EvaluationSettings
from rag_model.evaluation.measures.measure import list_measure_versions
from rag_model.evaluation.questions import QuestionSet, digest_questions
from rag_model.evaluation.retrieval.judging import RetrievalJudge
from rag_model.reading.routing import identify_model
from rag_model.retrieve.factory import plan_retriever
from rag_model.store.store import MODEL_PREFIX, Store
from rag_model.store.versions.evaluation_manifest import EvaluationSubject
from rag_model.store.versions.snapshot import Snapshot

# Versions of the code that computes the metrics of retrieval, and of answers. A new number gives
# evaluations new ids.
_RETRIEVAL_VERSION, _ANSWERS_VERSION = 2, 4
_ROUTE_SETTINGS = ("route", "choose_route")
# Other releases of these libraries round numbers differently, so that answers may change.
_LIBRARIES = ("torch", "transformers")


def describe_retrieval_subject(
    store: Store,
    snapshot: Snapshot,
    question_set: QuestionSet,
    retrievers: Sequence[str],
    k: int,
    judge: RetrievalJudge,
    encoder: str | None = None,
) -> EvaluationSubject:
    """Return all inputs and settings of an evaluation of retrievers.

    Args:
        store: Store of the models that retriever expressions name.
        snapshot: The snapshot to search.
        question_set: The questions.
        retrievers: Retriever expressions; empty means the snapshot's default.
        k: Depth of the search.
        judge: Decides which hits are relevant.
        encoder: Name of the question encoder; None means the snapshot's own.

    Raises:
        StoreError: The store does not have a model that an expression names.
        UsageError: An expression is invalid.
    """
    expressions = list(retrievers) or [snapshot.manifest.content.default_retriever]
    settings_json = {
        "retrievers": expressions,
        "k": k,
        "judged_by": judge.judged_by,
        "patterns": judge.patterns,
        "encoder": encoder,
        "models": resolve_retriever_models(store, snapshot, expressions, encoder),
        "version": _RETRIEVAL_VERSION,
        **_describe_measures(),
    }
    return EvaluationSubject(snapshot.id, "", digest_questions(question_set), settings_json)


def describe_answers_subject(
    store: Store,
    snapshot: Snapshot,
    model: str,
    question_set: QuestionSet,
    settings: EvaluationSettings,
    encoder: str | None = None,
) -> EvaluationSubject:
    """Return all inputs and settings of an evaluation of a model's answers.

    `model` is the id of a model, its folder, or `openai:MODEL`. The model of an endpoint is
    identified by the endpoint's address, the model's name and the settings, although the endpoint
    may replace the model under this name. The settings determine `Reader.decides`, so the id of the
    evaluation is known before a model is loaded.

    Raises:
        StoreError: The store does not have a model that the retriever names.
        UsageError: The questions cannot be judged by `settings.judged_by`, or the retriever is
            invalid.
    """
    retriever = settings.expression or snapshot.manifest.content.default_retriever
    settings_json: dict[str, Any] = {
        **asdict(settings),
        "index": None,
        "retriever": retriever,
        "judged_by": RetrievalJudge.for_questions(
            question_set, settings.judged_by, patterns=settings.kind == "patterns"
        ).judged_by,
        "asks": encoder,
        "models": resolve_retriever_models(store, snapshot, [retriever], encoder),
        "libraries": {name: version(name) for name in _LIBRARIES},
        "version": _ANSWERS_VERSION,
        **_describe_measures(),
    }
    if "auto" not in settings.readers:
        # Settings that do not apply are left out, so that the ids of older evaluations stay valid.
        settings_json = {name: setting for name, setting in settings_json.items() if name not in _ROUTE_SETTINGS}
    model_id = identify_model(model)
    if model.startswith(ENDPOINT_PREFIX):
        settings_json["endpoint"] = _describe_endpoint(model)
        model_id = digest_json(settings_json["endpoint"])
    return EvaluationSubject(snapshot.id, model_id, digest_questions(question_set), settings_json)


def _describe_measures() -> dict[str, Any]:
    """Return the versions of measures of installed packages.

    Without such measures, return {}, so that the ids of evaluations do not change.
    """
    version_by_measure = list_measure_versions()
    return {"measures": version_by_measure} if version_by_measure else {}


def _describe_endpoint(model: str) -> dict[str, Any]:
    # Imported only here, because this module imports an HTTP client, which only endpoints need.
    endpoint_module: Any = import_module("rag_model.reading.writers.endpoint")
    name = model.removeprefix(ENDPOINT_PREFIX)
    endpoint_settings: dict[str, Any] = endpoint_module.describe_endpoint(
        name, endpoint_module.ChatSettings.from_environment(), endpoint_module.Endpoint.from_environment()
    )
    return endpoint_settings


def resolve_retriever_models(
    store: Store, snapshot: Snapshot, retrievers: Sequence[str | None], encoder: str | None = None
) -> dict[str, str]:
    """Return the identity of each model that a retriever expression or `encoder` names, by name.

    The identity is the id of a model in the store, the digest of a folder, or the commit of a model
    of the hub.
    """
    model_names = dict.fromkeys(
        model for expression in retrievers for model in plan_retriever(snapshot, expression).models
    )
    return {name: _pin_model(store, name) for name in [*model_names, *([encoder] if encoder else [])]}


def _pin_model(store: Store, name: str) -> str:
    """Return an immutable name of a model: an id, a digest of a folder, or a revision on the Hub."""
    if name.startswith(MODEL_PREFIX):
        return store.models.resolve_trusted(name.removeprefix(MODEL_PREFIX))
    return identify_model(name) if Path(name).is_dir() else pin_hub_name(name)
