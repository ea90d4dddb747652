"""Find a RAG model by name, in the store or in a folder, and load it."""

from pathlib import Path
from typing import Any

from rag_model.encoders.encoder import passage_space
from rag_model.encoders.space import check_same_space
from rag_model.errors import InputError, UsageError
from rag_model.generate.folder import load_rag
from rag_model.generate.rag import Rag
from rag_model.store.store import MODEL, Store
from rag_model.store.versions.model_parts import GENERATOR, parts_of
from rag_model.store.versions.models import model_folder


def rag_id(store: Store, model: str) -> str:
    """Return the current id of a named RAG model in the store, or the full path if `model` is a folder.

    Raises:
        InputError: the name is that of a folder, and there is none.
        StoreError: the store has no such model.
        UsageError: the model has no generator.
    """
    if model and Path(model).is_dir():
        return str(Path(model).resolve())
    if "/" in model:  # which no name in a store has
        raise InputError(f"there is no model folder {model}: give a folder, or the name of a model of the store")
    found = store.models.trusted(model.removeprefix(MODEL))
    content = store.models.get(found).content
    if GENERATOR not in parts_of(content.files):
        raise UsageError(f"model {model} is a {content.kind}, which generates no answers: give a RAG model")
    return found


def rag_folder(store: Store | None, identity: str) -> Path:
    """Return the folder of the model that `rag_id` found: its own, or a copy of the store's.

    Raises:
        StoreError: a file of the model is missing or damaged.
    """
    return Path(identity) if store is None or Path(identity).is_dir() else model_folder(store, identity)


def load_named(store: Store | None, identity: str, asks: str | None = None) -> Rag:
    """Load the model that `rag_id` found; a folder needs no store.

    `asks` names the passage encoder that the model's question encoder was trained with. A model that was trained
    elsewhere does not record it, and its weights do not show it: DPR's encoders for other data look alike. If the model
    records it, both must agree.

    Raises:
        StoreError: a file of the model is missing or damaged.
        InputError: the model is incomplete or corrupt.
        RefusedError: the model records another passage space than `asks`.
    """
    rag = load_rag(rag_folder(store, identity))
    if asks is not None:
        encoder: Any = rag.question
        encoder.asks = passage_space(asks)
        check_same_space(encoder.space(), encoder.asks)
    return rag
