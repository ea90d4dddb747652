"""What an expression needs, known before a file is opened: it is composed from materials that open nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from rag_model.encoders.space import Space
from rag_model.errors import UsageError
from rag_model.index.files.engine import Rows, Vectors
from rag_model.retrieve.composer import Build, Composer, builder_of
from rag_model.retrieve.dense import gives_products
from rag_model.retrieve.expression import parse
from rag_model.retrieve.found import Found, SnapshotRetriever
from rag_model.retrieve.indexes import check_search, kind_name, known_indexes, unknown_index
from rag_model.retrieve.maxsim import Neighbours, Tokens
from rag_model.retrieve.nodes import Call, Word
from rag_model.retrieve.questions import Questions
from rag_model.retrieve.rerank import PairScorer
from rag_model.store.versions.snapshot import Snapshot


class Survey:
    """The indexes and models of one expression or several; `survey` takes one."""

    def __init__(self, snapshot: Snapshot) -> None:
        """Begin with nothing needed."""
        self.snapshot = snapshot
        self.indexes: list[str] = []  # once each, in the expressions' order
        self.models: list[str] = []
        self.needs_vectors = False  # so that hits carry inner products

    def add(self, expression: str) -> None:
        """Check an expression, and note what it needs.

        Raises:
            UsageError: it is wrong; the sentence says what, where, and what is known.
        """
        if not Composer(self).retriever(parse(expression)).exact_products:
            self.needs_vectors = True

    def names(self) -> tuple[str, ...]:
        """Return the snapshot's indexes."""
        return known_indexes(self.snapshot)

    def unknown(self, name: str) -> str:
        """Return the sentence that refuses another name."""
        return unknown_index(self.snapshot, name)

    def leg(self, name: str, parameters: Mapping[str, Any]) -> SnapshotRetriever:
        """Note an index."""
        check_search(self.snapshot, name, parameters)
        if name not in self.indexes:
            self.indexes.append(name)
        return _Unopened(self.snapshot, name)

    def kind(self, name: str) -> str:
        """Return the kind of an index."""
        return kind_name(self.snapshot, name)

    def tokens(self, name: str) -> Tokens:
        """Note an index over token vectors."""
        self.leg(name, {})
        return Tokens(_Unread(), _Unread())

    def graph(self, name: str) -> Neighbours:
        """Note a graph."""
        self.leg(name, {})
        return _Unread()

    def scorer(self, model: Word) -> PairScorer:
        """Note a model."""
        if model.text not in self.models:
            self.models.append(model.text)
        return _Unloaded()

    def build(self, call: Call) -> Build | None:
        """Return what builds a call."""
        return builder_of(call)


def survey(snapshot: Snapshot, expression: str | None) -> Survey:
    """Check an expression against a snapshot, and return what it needs; None is the snapshot's default retriever.

    Raises:
        UsageError: it is wrong; the sentence says what, where, and what is known.
    """
    seen = Survey(snapshot)
    seen.add(snapshot.manifest.content.default_retriever if expression is None else expression)
    return seen


class _Unopened(SnapshotRetriever):
    def __init__(self, snapshot: Snapshot, name: str) -> None:
        super().__init__(snapshot, name)
        self.exact_products = gives_products(snapshot.manifest.content.indexes, name)

    def find(self, asked: Questions, k: int) -> Found:
        raise UsageError(f"index {self.name} was not opened: use open_retriever")


class _Unread:
    """Token vectors, their questions' encoder and a graph that were not opened: each use is refused."""

    n, dim = 0, 0

    def space(self) -> Space:
        raise self._refused()

    def encode_questions(self, questions: Sequence[str]) -> Vectors:
        raise self._refused()

    def search(self, questions: Vectors, k: int, **parameters: Any) -> tuple[Vectors, Rows]:
        raise self._refused()

    def score(self, question: Vectors, rows: Rows) -> Vectors:
        raise self._refused()

    def bottom(self, nodes: Rows) -> Any:
        raise self._refused()

    def _refused(self) -> UsageError:
        return UsageError("the index was not opened: use open_retriever")


class _Unloaded:
    def scores(self, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> Vectors:
        raise UsageError("the model was not loaded: use open_retriever")
