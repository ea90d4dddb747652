"""The models that score pairs of question and passage, by their names in expressions."""

import threading

from rag_model.encoders.crossencoder import CrossEncoder
from rag_model.retrieve.named import cross_encoder_folder
from rag_model.retrieve.rerank import PairScorer
from rag_model.store.store import MODEL, Store


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
            MissingExtraError: what runs the model is not installed.
            StoreError: the store has no such model.
            UsageError: the model of the store is no cross-encoder, or there is no store to look it up in.
        """
        with self._lock:
            if name not in self._loaded:
                self._loaded[name] = CrossEncoder.load(cross_encoder_folder(self._opened(name), name))
            return self._loaded[name]

    def _opened(self, name: str) -> Store | None:
        if isinstance(self._store, str) and name.startswith(MODEL):
            self._store = Store.open(self._store)
        return self._store if isinstance(self._store, Store) else None
