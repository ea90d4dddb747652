"""The one place that opens retrievers: a name or an expression in, a `Retriever` out.

| expression | finds |
| --- | --- |
| `hnsw` | by an index of the snapshot; `exact` compares every vector |
| `bm25(k1=1.2, b=.75)` | by an index, searched with these parameters instead of the snapshot's |
| `hnsw:100` | the same, asked for 100 passages also if fewer are returned |
| `rrf(A, B, …, k=60, weights=[…])` | by the ranks of several lists (`fusion`) |
| `rerank(A, MODEL, 50)` | by a model that reads the first 50 of A (`rerank`) |
| `maxsim(A, INDEX, 500)` | by the token vectors of up to 500 candidates: A's, and their neighbours (`maxsim`) |
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rag_model.encoders.carried import load_asking
from rag_model.encoders.space import Space
from rag_model.errors import BookwheelError, UsageError
from rag_model.retrieve.composer import Build, Composer, builder_of
from rag_model.retrieve.dense import DenseRetriever, carried_encoder, check_asks
from rag_model.retrieve.expression import parse
from rag_model.retrieve.found import SnapshotRetriever
from rag_model.retrieve.indexes import (
    check_search,
    graph_of,
    kind_name,
    known_indexes,
    open_index_of,
    represents,
    unknown_index,
)
from rag_model.retrieve.lexical import TextRetriever
from rag_model.retrieve.maxsim import Neighbours, TokenRetriever, Tokens
from rag_model.retrieve.nodes import Call, Word
from rag_model.retrieve.products import with_products
from rag_model.retrieve.questions import QuestionEncoder
from rag_model.retrieve.rerank import PairScorer
from rag_model.retrieve.scorers import Scorers
from rag_model.retrieve.sparse import SparseRetriever
from rag_model.retrieve.survey import Survey
from rag_model.store.store import Store
from rag_model.store.versions.paths import EMBEDDINGS
from rag_model.store.versions.snapshot import Snapshot


def open_retriever(
    snapshot: Snapshot,
    expression: str | None = None,
    *,
    encoder: QuestionEncoder | str | None = None,
    store: Store | None = None,
    products: bool = False,
) -> SnapshotRetriever:
    """Open what an expression says; the whole of it is checked before an encoder or a model is loaded.

    >>> open_retriever(snapshot, "rrf(hnsw, ivfpq)").search(["who wrote animal farm?"], 5)  # doctest: +SKIP

    Args:
        snapshot: that is searched.
        expression: a name or a composition; None: the snapshot's default retriever.
        encoder: of the questions, or its name; None: what the snapshot carries, loaded if a leg wants vectors.
        store: where `model:NAME` is looked up; None: where the snapshot was opened from.
        products: give each hit its `inner_product`, which readers need; reads the snapshot's vectors where the index
            does not give it.

    Raises:
        InputError: an encoder or a model is incomplete, or a model is no cross-encoder.
        MissingExtraError: the model extra is not installed, and something is to be encoded.
        RefusedError: the encoder's space is not the snapshot's.
        StoreError: a file is missing or damaged.
        UsageError: the expression is wrong; the sentence says what, where, and what is known.
    """
    given = None if expression is None else [expression]
    return open_retrievers(snapshot, given, encoder=encoder, store=store, products=products)[0]


def open_retrievers(
    snapshot: Snapshot,
    expressions: Sequence[str] | None = None,
    *,
    encoder: QuestionEncoder | str | None = None,
    store: Store | None = None,
    products: bool = False,
) -> tuple[SnapshotRetriever, ...]:
    """Open several expressions as `open_retriever` does one: all are checked first, and share what they open.

    None is the snapshot's default retriever alone.

    Raises:
        BookwheelError: what `open_retriever` raises.
    """
    named = [snapshot.manifest.content.default_retriever] if expressions is None else list(expressions)
    needed = Survey(snapshot)
    for one in named:
        needed.add(one)
    where = snapshot.where if isinstance(snapshot.where, str) else None
    opened = Opened(snapshot, _loading(snapshot, encoder), Scorers(store or where))
    if isinstance(encoder, str):
        opened.use(load_asking(encoder), needed.indexes)
    try:
        return tuple(opened.retriever(one, products=products) for one in named)
    except BookwheelError as failed:
        if expressions is not None:
            raise
        raise type(failed)(f"the snapshot's default retriever {named[0]} cannot be opened: {failed}") from failed


class Opened:
    """Indexes, encoder and models of one snapshot, each opened once and shared by all that is composed of them."""

    def __init__(
        self, snapshot: Snapshot, encoder: Callable[[], QuestionEncoder], scorers: Scorers, *, mmap: bool = True
    ) -> None:
        """Open nothing yet.

        Args:
            snapshot: whose they are.
            encoder: called once, when a leg wants vectors.
            scorers: where models are loaded.
            mmap: map index files, instead of loading them.
        """
        self.snapshot, self.scorers = snapshot, scorers
        self._load, self._encoder, self._mmap = encoder, list[QuestionEncoder](), mmap
        self._indexes: dict[str, Any] = {}  # a `SearchIndex`, or a `TokenIndex`, `SparseIndex` or `TextIndex`, by name
        self._graphs: dict[str, Neighbours] = {}  # by name of the index
        self._others: dict[str, QuestionEncoder] = {}  # encoders of further representations, by name

    @property
    def encoder(self) -> QuestionEncoder:
        """The encoder of the questions."""
        if not self._encoder:
            self._encoder.append(self._load())
        return self._encoder[0]

    def encoder_of(self, representation: str) -> QuestionEncoder:
        """Return the question encoder of a representation; the snapshot's own, except for `embeddings`."""
        if representation == EMBEDDINGS:
            return self.encoder
        if representation not in self._others:
            self._others[representation] = carried_encoder(self.snapshot, representation)
        return self._others[representation]

    def use(self, encoder: QuestionEncoder, indexes: Sequence[str]) -> None:
        """Encode questions with `encoder` for those of `indexes` that are in its space.

        Raises:
            RefusedError: none of them is in its space.
            UsageError: none of them is searched by vectors.
        """
        content = self.snapshot.manifest.content
        over = dict.fromkeys(content.over(name) for name in indexes if represents(self.snapshot, name) in _ENCODED)
        if not over:
            raise UsageError("the retriever searches no index by vectors or terms: leave the question encoder out")
        asks = encoder.space()
        spaces = {name: content.space_of(name) for name in over}
        same = [name for name, space in spaces.items() if space and Space.from_json(space).admits(asks)]
        if not same:
            check_asks(encoder, self.snapshot, next(iter(over)))
        for name in same:
            if name == EMBEDDINGS:
                self._encoder = [encoder]
            else:
                self._others[name] = encoder

    @property
    def known_encoder(self) -> QuestionEncoder | None:
        """The encoder of the questions, if a leg has needed it."""
        return self._encoder[0] if self._encoder else None

    @property
    def indexes(self) -> tuple[str, ...]:
        """The names of the indexes that are open."""
        return tuple(self._indexes)

    def asked_by(self, encoder: QuestionEncoder) -> "Opened":
        """Return the same indexes and models, asked by another encoder."""
        other = Opened(self.snapshot, lambda: encoder, self.scorers, mmap=self._mmap)
        other._indexes, other._graphs, other._others = self._indexes, self._graphs, self._others
        return other

    def retriever(self, expression: str, *, products: bool = False) -> SnapshotRetriever:
        """Open what an expression says, as `open_retriever` does."""
        found = Composer(self).retriever(parse(expression))
        return with_products(found, self.encoder) if products else found

    def close(self) -> None:
        """Free what is open."""
        self._indexes.clear()
        self._graphs.clear()
        self._others.clear()
        self._encoder.clear()

    def names(self) -> tuple[str, ...]:
        """Return the snapshot's indexes."""
        return known_indexes(self.snapshot)

    def unknown(self, name: str) -> str:
        """Return the sentence that refuses another name."""
        return unknown_index(self.snapshot, name)

    def leg(self, name: str, parameters: Mapping[str, Any]) -> SnapshotRetriever:
        """Return what searches an index."""
        return _leg(self, name, parameters)

    def index(self, name: str) -> Any:
        """Open an index, or return it where it is open."""
        if name not in self._indexes:
            self._indexes[name] = open_index_of(self.snapshot, name, mmap=self._mmap)
        return self._indexes[name]

    def kind(self, name: str) -> str:
        """Return the kind of an index."""
        return kind_name(self.snapshot, name)

    def tokens(self, name: str) -> Tokens:
        """Return an index over token vectors, with the encoder of its questions."""
        index = self.index(name)
        return Tokens(self.encoder_of(self.snapshot.manifest.content.over(name)), index)

    def graph(self, name: str) -> Neighbours:
        """Map the bottom layer of a graph, or return it where it is mapped."""
        if name not in self._graphs:
            self._graphs[name] = graph_of(self.snapshot, name)
        return self._graphs[name]

    def scorer(self, model: Word) -> PairScorer:
        """Load a model, or return it where it is loaded."""
        return self.scorers.load(model.text)

    def build(self, call: Call) -> Build | None:
        """Return what builds a call."""
        return builder_of(call)


def _leg(opened: Opened, name: str, parameters: Mapping[str, Any]) -> SnapshotRetriever:
    """Return what searches the index `name`: by vectors, token vectors, weighted terms or text."""
    check_search(opened.snapshot, name, parameters)
    index = opened.index(name)  # first, so that a wrong name is refused before an encoder is loaded
    return _LEGS[represents(opened.snapshot, name)](opened, name, index, parameters)


def _by_text(opened: Opened, name: str, index: Any, parameters: Mapping[str, Any]) -> SnapshotRetriever:
    return TextRetriever(opened.snapshot, name, index, parameters)


def _by_tokens(opened: Opened, name: str, index: Any, parameters: Mapping[str, Any]) -> SnapshotRetriever:
    return TokenRetriever(opened.snapshot, name, opened.tokens(name))


def _by_terms(opened: Opened, name: str, index: Any, parameters: Mapping[str, Any]) -> SnapshotRetriever:
    encoder = opened.encoder_of(opened.snapshot.manifest.content.over(name))
    return SparseRetriever(opened.snapshot, name, encoder, index, parameters)


def _by_vector(opened: Opened, name: str, index: Any, parameters: Mapping[str, Any]) -> SnapshotRetriever:
    encoder = opened.encoder_of(opened.snapshot.manifest.content.over(name))
    return DenseRetriever(opened.snapshot, encoder, name, index, parameters)


_LEGS = {"text": _by_text, "tokens": _by_tokens, "sparse": _by_terms, "vectors": _by_vector}
_ENCODED = ("vectors", "sparse")  # searched by what an encoder of the user's may make of questions


def _loading(snapshot: Snapshot, encoder: QuestionEncoder | str | None) -> Callable[[], QuestionEncoder]:
    if encoder is None:
        return lambda: carried_encoder(snapshot)
    return lambda: load_asking(encoder) if isinstance(encoder, str) else encoder
