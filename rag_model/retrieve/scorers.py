"""The models that score pairs of question and passage, by their names in expressions."""

import threading
from importlib import import_module
from pathlib import Path

from rag_model.encoders.resolve import resolve_folder
from rag_model.errors import UsageError
from rag_model.retrieve.rerank import PairScorer
from rag_model.store.store import MODEL, Store
from rag_model.store.versions.models import model_folder


class Scorers:
    """Loads each model once, for all retrievers that read with it. Safe among threads."""

    def __init__(self, store: Store | str | None = None) -> None:
        """Look `model:NAME` up in `store`, which may be a URL; None: only folders and hub names are known."""
        self._store = store
        self._loaded: dict[str, PairScorer] = {}
        self._lock = threading.Lock()

    def load(self, name: str) -> PairScorer:
        """Return the model in folder `name`, of that hub name, or `model:` and its name in the store.

        Raises:
            InputError: it is missing, incomplete, or not a cross-encoder.
            MissingExtraError: the model extra is not installed.
            StoreError: the store has no such model.
            UsageError: there is no store to look it up in.
        """
        with self._lock:
            if name not in self._loaded:
                folder = self._folder(name)
                self._loaded[name] = import_module("rag_model.encoders.crossencoder").CrossEncoder.load(folder)
            return self._loaded[name]

    def _folder(self, name: str) -> Path:
        if not name.startswith(MODEL):
            return resolve_folder(name)
        if self._store is None:
            raise UsageError(f"{name} is a model of a store, but no store is given: give the model's folder")
        if isinstance(self._store, str):
            self._store = Store.open(self._store)
        return model_folder(self._store, name.removeprefix(MODEL))
