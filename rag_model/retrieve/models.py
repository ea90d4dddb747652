"""Resolve the name of a model: a folder, a name on the hub, or `model:NAME`, a model of the store.

A model of the store has one folder per part: the question encoder, the generator, and so on.
`PairScorerCache` loads the cross-encoders that expressions name.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from rag_model.encoders.files import derive_question_encoder_name, resolve_folder
from rag_model.errors import UsageError
from rag_model.index.files.engine import Vectors
from rag_model.store.store import MODEL_PREFIX, Store
from rag_model.store.versions.model_manifest import COLBERT, CROSS_ENCODER, GENERATOR, MASKED_LM, PASSAGE, QUESTION


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """The names of a question encoder and of its passage encoder, as `Encoder.load` accepts
    them.
    """

    question: str
    passage: str | None  # None: the model was trained with frozen passage vectors


def resolve_encoders(store: Store, name: str, question_encoder: str = "") -> EncoderNames:
    """Return the encoder names of a model: a folder, a hub name, or `model:` with a ref,
    ref@number, id or prefix of an id.

    A DPR model has both encoders; a RAG model has only the question encoder. Give
    `question_encoder` to replace the question encoder of the model `name`.

    Raises:
        StoreError: the store has no such model, or one of its files is damaged.
        UsageError: the model has no question encoder in a folder of its own, or the name of a
            passage encoder does not determine that of its question encoder.
    """
    if not name.startswith(MODEL_PREFIX):
        return EncoderNames(question_encoder or derive_question_encoder_name(name), name)
    folder = store.get_model_folder(name.removeprefix(MODEL_PREFIX))
    question_folder, passage_folder = folder / QUESTION, folder / PASSAGE
    if not question_folder.is_dir():
        raise UsageError(f"{name} has no encoder in a folder {QUESTION}/: name a model that `finetune dpr` trained")
    passage_encoder = str(passage_folder) if passage_folder.is_dir() else None
    return EncoderNames(question_encoder or str(question_folder), passage_encoder)


_PART_ERRORS = {  # by part: (error for a model without the part, kind of model that has the part)
    GENERATOR: (f"has no generator in a folder {GENERATOR}/", "model that answers questions"),
    COLBERT: ("is not a ColBERT", "model that `finetune colbert` trained"),
    MASKED_LM: ("has no masked language model", "model that `finetune realm` trained"),
    CROSS_ENCODER: ("is not a cross-encoder", "model that `finetune cross-encoder` trained"),
}


def resolve_part(store: Store | None, name: str, part: str) -> str:
    """Return the folder or the hub name of a generator, ColBERT, masked language model or
    cross-encoder.

    `model:NAME` gives the folder `part` of the store's model; other names are returned unchanged.

    Raises:
        StoreError: the store has no such model, or one of its files is damaged.
        UsageError: the model of the store has no such part, or no store is given.
    """
    if not name.startswith(MODEL_PREFIX):
        return name
    if store is None:
        raise UsageError(f"{name} is a model of a store, but no store is given: give the model's folder")
    folder = store.get_model_folder(name.removeprefix(MODEL_PREFIX)) / part
    if not folder.is_dir():
        problem, advice = _PART_ERRORS[part]
        raise UsageError(f"{name} {problem}: name a {advice}")
    return str(folder)


def resolve_part_folder(store: Store | None, name: str, part: str) -> Path:
    """Return the folder of a model as `resolve_part` does, and download it if it is on the hub.

    Raises:
        InputError: there is no such folder, and the hub has no such model or cannot be reached.
        BookwheelError: as for `resolve_part`.
    """
    return resolve_folder(resolve_part(store, name, part))


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
    """Return the size in bytes of each file of a model; empty if it was not loaded from a
    folder.
    """
    if not isinstance(model, HasFolder) or model.folder is None:
        return {}
    return {str(path): path.stat().st_size for path in sorted(model.folder.rglob("*")) if path.is_file()}


class PairScorerCache:
    """Loads each cross-encoder once, for all retrievers that use it. Thread-safe."""

    def __init__(self, store: Store | str | None = None) -> None:
        """Create an empty cache that resolves `model:NAME` in `store`, a store or its URL.

        Without a store, only folders and hub names are resolved.
        """
        self._store = store
        self._scorers: dict[str, PairScorer] = {}
        self._lock = threading.Lock()

    def load(self, name: str) -> PairScorer:
        """Return the cross-encoder of a folder, a hub name, or `model:NAME`.

        Raises:
            InputError: the folder is missing, incomplete, or not a cross-encoder.
            MissingExtraError: the extra that runs the model is not installed.
            StoreError: the store has no such model.
            UsageError: the model of the store is not a cross-encoder, or no store is given.
        """
        with self._lock:
            if name not in self._scorers:
                from rag_model.encoders.cross_encoder import CrossEncoder  # noqa: PLC0415 - rarely used

                folder = resolve_part_folder(self._open_store(name), name, CROSS_ENCODER)
                self._scorers[name] = CrossEncoder.load(folder)
            return self._scorers[name]

    def _open_store(self, name: str) -> Store | None:
        if isinstance(self._store, str) and name.startswith(MODEL_PREFIX):
            self._store = Store.open(self._store)
        return self._store if isinstance(self._store, Store) else None
