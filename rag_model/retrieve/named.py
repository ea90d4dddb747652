"""The models that a name means: a folder's, a hub's, or those of a model in the store (`model:NAME`)."""

from dataclasses import dataclass
from pathlib import Path

from rag_model.encoders.resolve import question_sibling, resolve_folder
from rag_model.errors import UsageError
from rag_model.store.store import MODEL, Store
from rag_model.store.versions.model_parts import COLBERT, CROSS_ENCODER, GENERATOR, MASKED_LM, PASSAGE, QUESTION
from rag_model.store.versions.models import model_folder


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """A question encoder and the passage encoder that it belongs to, as `Encoder.load` takes them."""

    question: str
    passage: str | None  # None: of a model that was trained against passages as they were


def encoder_names(store: Store, name: str) -> EncoderNames:
    """Return the encoders of `name`: a folder, a hub name, or `model:` and a model's ref, ref@number, id or prefix.

    A DPR model has a pair. A RAG model has only the question encoder.

    Raises:
        StoreError: the store has no such model, or a file of it is damaged.
        UsageError: the model has no question encoder in a folder of its own.
    """
    if not name.startswith(MODEL):
        return EncoderNames(question_sibling(name), name)
    folder = model_folder(store, name.removeprefix(MODEL))
    question, passage = folder / QUESTION, folder / PASSAGE
    if not question.is_dir():
        raise UsageError(f"{name} has no encoder in a folder {QUESTION}/: name a model that `finetune dpr` made")
    return EncoderNames(str(question), str(passage) if passage.is_dir() else None)


def generator_name(store: Store, name: str) -> str:
    """Return what `load_generator` takes for `name`: a folder, a hub name, or `model:` and a model of the store.

    Raises:
        StoreError: the store has no such model, or a file of it is damaged.
        UsageError: the model of the store has no generator in a folder of its own.
    """
    if not name.startswith(MODEL):
        return name
    folder = model_folder(store, name.removeprefix(MODEL)) / GENERATOR
    if not folder.is_dir():
        raise UsageError(f"{name} has no generator in a folder {GENERATOR}/: name a model that answers questions")
    return str(folder)


def colbert_folder(store: Store, name: str) -> Path:
    """Return the folder of the ColBERT `name`: a folder, a hub name, or `model:` and a model of the store.

    Raises:
        InputError: there is no such folder, and the hub has no such model or cannot be reached.
        StoreError: the store has no such model, or a file of it is damaged.
        UsageError: the model of the store is no ColBERT.
    """
    if not name.startswith(MODEL):
        return resolve_folder(name)
    folder = model_folder(store, name.removeprefix(MODEL)) / COLBERT
    if not folder.is_dir():
        raise UsageError(f"{name} makes no token vectors: name a model that `finetune colbert` made")
    return folder


def masked_folder(store: Store, name: str) -> str:
    """Return the name or folder of the masked language model `name`, which may be `model:` and a model of the store.

    Raises:
        StoreError: the store has no such model, or a file of it is damaged.
        UsageError: the model of the store has no masked language model.
    """
    if not name.startswith(MODEL):
        return name
    folder = model_folder(store, name.removeprefix(MODEL)) / MASKED_LM
    if not folder.is_dir():
        raise UsageError(f"{name} has no masked language model: name a model that `finetune realm` made")
    return str(folder)


def cross_encoder_folder(store: Store | None, name: str) -> Path:
    """Return the folder of the cross-encoder `name`: a folder, a hub name, or `model:` and a model of the store.

    Raises:
        InputError: there is no such folder, and the hub has no such model or cannot be reached.
        StoreError: the store has no such model, or a file of it is damaged.
        UsageError: the model of the store is no cross-encoder, or there is no store to look it up in.
    """
    if not name.startswith(MODEL):
        return resolve_folder(name)
    if store is None:
        raise UsageError(f"{name} is a model of a store, but no store is given: give the model's folder")
    folder = model_folder(store, name.removeprefix(MODEL)) / CROSS_ENCODER
    if not folder.is_dir():
        raise UsageError(f"{name} scores no pairs: name a model that `finetune cross-encoder` made")
    return folder
