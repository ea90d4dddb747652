"""The retrievers that a service offers for a snapshot, and the files that they need on this machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from rag_model.retrieve.composer import CALLS, Build
from rag_model.retrieve.factory import Opened
from rag_model.retrieve.found import SnapshotRetriever
from rag_model.retrieve.maxsim import Neighbours, Tokens
from rag_model.retrieve.nodes import Call, Word
from rag_model.retrieve.rerank import PairScorer
from rag_model.retrieve.survey import Survey
from rag_model.serving.service_settings import ServiceSettings
from rag_model.store.versions.paths import EXACT
from rag_model.store.versions.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Offer:
    """Retrievers of one snapshot, and what they are made of."""

    retrievers: tuple[str, ...]  # expressions; the first answers where a request names none
    indexes: tuple[str, ...]  # that are opened; requests may compose others of them
    embeddings: bool  # whether the vectors must be on this machine

    @classmethod
    def of(cls, snapshot: Snapshot, settings: ServiceSettings, *, weighs: bool) -> Self:
        """Return the offer that the settings ask for; `weighs`: a model weighs the hits by inner products.

        Raises:
            UsageError: a retriever is wrong, or the snapshot has no such index.
        """
        content = snapshot.manifest.content
        retrievers = settings.retrievers or (content.default_retriever,)
        needed = Survey(snapshot)
        for expression in retrievers:
            needed.add(expression)
        exact = EXACT in needed.indexes and EXACT not in content.indexes
        ranks = any(content.indexes.get(name, {}).get("refine") == "vectors" for name in needed.indexes)
        vectors = weighs and needed.needs_vectors
        return cls(retrievers, tuple(needed.indexes), settings.embeddings or exact or ranks or vectors)


class Composable:
    """What a request may compose: open indexes and built-in calls; no models, because they cost too much."""

    def __init__(self, opened: Opened) -> None:
        """Compose from `opened`."""
        self.snapshot, self._opened = opened.snapshot, opened

    def names(self) -> tuple[str, ...]:
        """Return the indexes that are open."""
        return self._opened.indexes

    def unknown(self, name: str) -> str:
        """Return the sentence that refuses another name."""
        return f"index {name!r} is not served here: choose one of {', '.join(self.names())}"

    def leg(self, name: str, parameters: Mapping[str, Any]) -> SnapshotRetriever:
        """Return what searches an index."""
        return self._opened.leg(name, parameters)

    def kind(self, name: str) -> str:
        """Return the kind of an index."""
        return self._opened.kind(name)

    def tokens(self, name: str) -> Tokens:
        """Return an index over token vectors."""
        return self._opened.tokens(name)

    def graph(self, name: str) -> Neighbours:
        """Return the bottom layer of a graph."""
        return self._opened.graph(name)

    def scorer(self, model: Word) -> PairScorer:
        """Refuse every model.

        Raises:
            UsageError: always.
        """
        raise model.wrong("a request may not name a model: ask for a retriever that the service was started with")

    def build(self, call: Call) -> Build | None:
        """Return what builds a call of this package."""
        return CALLS.find(call.name) if CALLS.is_built_in(call.name) else None
