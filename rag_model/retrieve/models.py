"""Resolve the name of a model: a folder, a name on the hub, or `model:NAME`, a model of the store.

A model of the store has parts in folders of their own: a question encoder, a generator, and so on.
`PairScorerCache` loads the cross-encoders that expressions name.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from rag_model.encoders.cross_encoder import CrossEncoder
from rag_model.encoders.files import derive_question_encoder_name, resolve_folder
from rag_model.errors import UsageError
from rag_model.index.files.engine import Vectors
from rag_model.store.store import MODEL_PREFIX, Store
from rag_model.store.versions.model_manifest import COLBERT, CROSS_ENCODER, GENERATOR, MASKED_LM, PASSAGE, QUESTION
from rag_model.store.versions.models import model_folder


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """A question encoder and its passage encoder, as `Encoder.load` takes them."""

    question: str
    passage: str | None  # None: the model was trained with the passage vectors frozen


def resolve_encoders(store: Store, name: str, question: str = "") -> EncoderNames:
    """Return the encoders of a model: a folder, a hub name, or `model:` and a ref, ref@number, id
    or prefix.

    A DPR model has both encoders; a RAG model has only the question encoder. `question` names the
    question encoder, if it is not the one that belongs to `name`.

    Raises:
        StoreError: the store has no such model, or one of its files is damaged.
        UsageError: the model has no question encoder in a folder of its own, or the revision of a
            passage encoder does not name its question encoder.
    """
    if not name.startswith(MODEL_PREFIX):
        return EncoderNames(question or derive_question_encoder_name(name), name)
    folder = model_folder(store, name.removeprefix(MODEL_PREFIX))
    question_folder, passage = folder / QUESTION, folder / PASSAGE
    if not question_folder.is_dir():
        raise UsageError(f"{name} has no encoder in a folder {QUESTION}/: name a model that `finetune dpr` trained")
    return EncoderNames(question or str(question_folder), str(passage) if passage.is_dir() else None)


def resolve_generator(store: Store, name: str) -> str:
    """Return the folder or the hub name of a generator, which `name` may give as `model:NAME`.

    Raises:
        StoreError: the store has no such model, or one of its files is damaged.
        UsageError: the model of the store has no generator in a folder of its own.
    """
    if not name.startswith(MODEL_PREFIX):
        return name
    folder = model_folder(store, name.removeprefix(MODEL_PREFIX)) / GENERATOR
    if not folder.is_dir():
        raise UsageError(f"{name} has no generator in a folder {GENERATOR}/: name a model that answers questions")
    return str(folder)


def resolve_colbert(store: Store, name: str) -> Path:
    """Return the folder of a ColBERT model: a folder, a hub name, or `model:NAME`.

    Raises:
        InputError: there is no such folder, and the hub has no such model or cannot be reached.
        StoreError: the store has no such model, or one of its files is damaged.
        UsageError: the model of the store is not a ColBERT.
    """
    if not name.startswith(MODEL_PREFIX):
        return resolve_folder(name)
    folder = model_folder(store, name.removeprefix(MODEL_PREFIX)) / COLBERT
    if not folder.is_dir():
        raise UsageError(f"{name} is not a ColBERT: name a model that `finetune colbert` trained")
    return folder


def resolve_masked_lm(store: Store, name: str) -> str:
    """Return the folder or the hub name of a masked language model, which `name` may give as
    `model:NAME`.

    Raises:
        StoreError: the store has no such model, or one of its files is damaged.
        UsageError: the model of the store has no masked language model.
    """
    if not name.startswith(MODEL_PREFIX):
        return name
    folder = model_folder(store, name.removeprefix(MODEL_PREFIX)) / MASKED_LM
    if not folder.is_dir():
        raise UsageError(f"{name} has no masked language model: name a model that `finetune realm` trained")
    return str(folder)


def resolve_cross_encoder(store: Store | None, name: str) -> Path:
    """Return the folder of a cross-encoder: a folder, a hub name, or `model:NAME`.

    Raises:
        InputError: there is no such folder, and the hub has no such model or cannot be reached.
        StoreError: the store has no such model, or one of its files is damaged.
        UsageError: the model of the store is not a cross-encoder, or no store is given.
    """
    if not name.startswith(MODEL_PREFIX):
        return resolve_folder(name)
    if store is None:
        raise UsageError(f"{name} is a model of a store, but no store is given: give the model's folder")
    folder = model_folder(store, name.removeprefix(MODEL_PREFIX)) / CROSS_ENCODER
    if not folder.is_dir():
        raise UsageError(f"{name} is not a cross-encoder: name a model that `finetune cross-encoder` trained")
    return folder


class PairScorer(Protocol):
    """A model that scores pairs of query and passage, such as a cross-encoder."""

    def scores(self, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> Vectors:
        """Return the (n,) float32 scores of n pairs, in order; finite, larger is better."""
        ...


@runtime_checkable
class HasFolder(Protocol):
    """A model that may have been loaded from a folder."""

    @property
    def folder(self) -> Path | None:
        """The folder; None if the model was not loaded from one."""
        ...


def list_model_files(model: object) -> dict[str, int]:
    """Return the files of a model, in bytes by path; none if it was not loaded from a folder."""
    if not isinstance(model, HasFolder) or model.folder is None:
        return {}
    return {str(path): path.stat().st_size for path in sorted(model.folder.rglob("*")) if path.is_file()}


class PairScorerCache:
    """Loads each cross-encoder once, for all retrievers that use it. Thread-safe."""

    def __init__(self, store: Store | str | None = None) -> None:
        """Resolve `model:NAME` in `store`, a store or its URL.

        Without a store only folders and hub names are resolved.
        """
        self._store = store
        self._loaded: dict[str, PairScorer] = {}
        self._lock = threading.Lock()

    def load(self, name: str) -> PairScorer:
        """Return the cross-encoder of a folder, a hub name, or `model:NAME`.

        Raises:
            InputError: it is missing, incomplete, or not a cross-encoder.
            MissingExtraError: the extra that runs the model is not installed.
            StoreError: the store has no such model.
            UsageError: the model of the store is not a cross-encoder, or no store is given.
        """
        with self._lock:
            if name not in self._loaded:
                self._loaded[name] = CrossEncoder.load(resolve_cross_encoder(self._open_store(name), name))
            return self._loaded[name]

    def _open_store(self, name: str) -> Store | None:
        if isinstance(self._store, str) and name.startswith(MODEL_PREFIX):
            self._store = Store.open(self._store)
        return self._store if isinstance(self._store, Store) else None
