"""Build and open retrievers from expressions.

| expression | retrieves |
| --- | --- |
| `hnsw` | with an index of the snapshot; `exact` compares every vector |
| `bm25(k1=1.2, b=.75)` | with an index and search parameters instead of the snapshot's |
| `hnsw:100` | with an index at a depth of 100 passages, even if fewer are returned |
| `rrf(A, B, …, k=60, weights=[…])` | by the ranks of several lists (`fusion`) |
| `interpolate(A, B, alpha)` | by the scores of A plus alpha times those of B (`fusion`) |
| `rerank(A, MODEL, 50)` | by a model that reads the first 50 hits of A (`rerank`) |
| `where(A, kind=table)` | the hits of A whose passages are of a kind (`where`) |
| `maxsim(A, INDEX, 500)` | by the token vectors of up to 500 hits of A and neighbours (`rerank`) |

A new kind of retriever is a file with a function `build(call, factory)`, and a line in `CALLS`.
Packages register their builders by entry points of the group `bookwheel.retrievers`. A builder
gets its child retrievers (`leg`) and its resource handles from the factory, which records the
resources that the retriever needs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rag_model.encoders.encoder import load_question_encoder
from rag_model.errors import BookwheelError, InputError, UsageError
from rag_model.plugins import Registry
from rag_model.retrieve.context import (
    IndexLinks,
    IndexTokens,
    NamedScorer,
    PassageVectors,
    QueryEncoder,
    RetrieverContext,
    RetrieverNeeds,
)
from rag_model.retrieve.dense import IndexRetriever, ProductRetriever
from rag_model.retrieve.expression import Call, Node, Word, parse
from rag_model.retrieve.indexes import check_search_parameters, describe_unknown_index, get_index_kind, list_index_names
from rag_model.retrieve.models import PairScorerCache
from rag_model.retrieve.retriever import (
    ChildRetriever,
    DeepRetriever,
    Queries,
    QuestionEncoder,
    RankedRows,
    SnapshotRetriever,
)
from rag_model.store.store import Store
from rag_model.store.versions.manifest import EMBEDDINGS
from rag_model.store.versions.snapshot import Snapshot

RetrieverBuilder = Callable[[Call, "RetrieverFactory"], SnapshotRetriever]
CALLS: Registry[RetrieverBuilder] = Registry(
    "retriever",
    "bookwheel.retrievers",
    {
        "interpolate": "rag_model.retrieve.fusion:build_interpolation",
        "maxsim": "rag_model.retrieve.rerank:build_maxsim",
        "rerank": "rag_model.retrieve.rerank:build_rerank",
        "rrf": "rag_model.retrieve.fusion:build_rrf",
        "where": "rag_model.retrieve.where:build_where",
    },
)
MAX_SEARCHED_INDEXES = 16  # per expression


def open_retriever(
    snapshot: Snapshot,
    expression: str | None = None,
    *,
    encoder: QuestionEncoder | str | None = None,
    embeddings_encoder: QuestionEncoder | None = None,
    store: Store | None = None,
    products: bool = False,
) -> SnapshotRetriever:
    """Open the retriever of an expression, after checking the expression.

    # doctest: +SKIP
    >>> open_retriever(snapshot, "rrf(hnsw, ivfpq)").search(["who wrote animal farm?"], 5)

    Args:
        snapshot: the snapshot to search.
        expression: the name of an index, or a call; None: the snapshot's default retriever.
        encoder: the encoder of the queries, or its name, for all indexes in its space. For other
            indexes, and if it is None, the snapshot's encoders are loaded when they are needed.
        embeddings_encoder: the encoder of the queries for the representation `embeddings` only,
            such as that of a reading model; ignored if the retriever does not need it.
        store: the store that contains `model:NAME`; None: the store that the snapshot was opened
            from.
        products: compute the `inner_product` of each hit, which readers need; this reads the
            snapshot's vectors unless the index computes it.

    Raises:
        InputError: an encoder or a model is incomplete, or a model is not a cross-encoder.
        MissingExtraError: queries must be encoded, and the model extra is not installed.
        RefusedError: the encoder's space differs from the snapshot's.
        StoreError: a file is missing or damaged.
        UsageError: the expression is invalid, and the message gives the position and the
            alternatives; or `encoder` is a name, but the retriever encodes no queries.
    """
    return open_retrievers(
        snapshot,
        None if expression is None else [expression],
        encoder=encoder,
        embeddings_encoder=embeddings_encoder,
        store=store,
        products=products,
    )[0]


def open_retrievers(
    snapshot: Snapshot,
    expressions: Sequence[str] | None = None,
    *,
    encoder: QuestionEncoder | str | None = None,
    embeddings_encoder: QuestionEncoder | None = None,
    store: Store | None = None,
    products: bool = False,
) -> tuple[SnapshotRetriever, ...]:
    """Open several retrievers, which share their indexes and models; see `open_retriever`.

    All expressions are checked first. If `expressions` is None, the snapshot's default retriever is
    opened.

    Raises:
        BookwheelError: as for `open_retriever`.
    """
    texts = [snapshot.manifest.content.default_retriever] if expressions is None else expressions
    store_url = snapshot.location if isinstance(snapshot.location, str) else None
    load_encoder = None if embeddings_encoder is None else lambda: embeddings_encoder
    context = RetrieverContext(snapshot, load_encoder, PairScorerCache(store or store_url))
    built_retrievers = [build_retriever(context, text, products=products) for text in texts]
    if encoder is not None:
        _use_encoder(context, encoder, RetrieverNeeds.merge(retriever.needs for retriever in built_retrievers))
    try:
        for retriever in built_retrievers:
            context.open(retriever.needs)
    except BookwheelError as error:
        if expressions is not None:
            raise
        message = f"the snapshot's default retriever {texts[0]} cannot be opened: {error}"
        raise type(error)(message) from error
    return tuple(retriever.retriever for retriever in built_retrievers)


def _use_encoder(context: RetrieverContext, encoder: QuestionEncoder | str, retriever_needs: RetrieverNeeds) -> None:
    representations = retriever_needs.list_encoded_representations(context.snapshot)
    if isinstance(encoder, str):
        if not representations:
            raise UsageError("the retriever searches no index by vectors or terms: omit the question encoder")
        encoder = load_question_encoder(encoder)
    if representations:
        context.use_encoder(encoder, representations)


def plan_retriever(snapshot: Snapshot, expression: str | None, *, products: bool = False) -> RetrieverNeeds:
    """Check an expression, and list the resources of its retriever.

    If `expression` is None, the snapshot's default retriever is used. Nothing is opened, so the
    files of the snapshot need not be on this machine.

    Raises:
        UsageError: the expression is invalid; the message gives the position and the alternatives.
    """
    text = snapshot.manifest.content.default_retriever if expression is None else expression
    return build_retriever(RetrieverContext(snapshot), text, products=products).needs


@dataclass(frozen=True, slots=True)
class BuiltRetriever:
    """A retriever, and the resources that must be opened before it is used."""

    retriever: SnapshotRetriever
    needs: RetrieverNeeds


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Restrictions of an expression in a request: no models, no plugin calls, and only the indexes
    that are served.
    """

    indexes: tuple[str, ...]  # names of the indexes that an expression may contain
    max_depth: int | None = None  # maximum of depths and of search parameters; None: unlimited


def build_retriever(
    context: RetrieverContext, expression: str, *, products: bool = False, limits: RequestLimits | None = None
) -> BuiltRetriever:
    """Build the retriever of an expression, but open no files or models yet.

    Args:
        context: the context that opens the resources.
        expression: the expression, in any spelling.
        products: compute the inner product of each hit.
        limits: restrictions of a request; None: no restrictions.

    Raises:
        UsageError: the expression is invalid; the message gives the position and the alternatives.
    """
    factory = RetrieverFactory(context, limits)
    retriever = factory.retriever(parse(expression))
    if products and not retriever.exact_products:
        retriever = ProductRetriever(retriever, factory.encoder(), factory.vectors())
    elif products:
        factory.encoder()  # records that the encoder is needed: a reader uses the query vectors
    return BuiltRetriever(retriever, factory.needs)


class InstalledRetriever(SnapshotRetriever):
    """Wraps a retriever of an installed package: checks its results, and names it in errors."""

    def __init__(self, call_name: str, inner: SnapshotRetriever) -> None:
        """Wrap `inner`, which the call named `call_name` has built."""
        super().__init__(inner.snapshot, inner.name)
        self.exact_products, self.is_stage, self.depth_advice = inner.exact_products, inner.is_stage, inner.depth_advice
        self._call_name, self._inner = call_name, inner

    @property
    def most(self) -> int:
        """The maximum depth of the inner retriever."""
        most = CALLS.call(self._call_name, lambda: self._inner.most)
        if type(most) is not int or most < 1:
            raise self._create_wrong_result_error(f"has `most` {most!r:.60}", "return a whole number of at least 1")
        return most

    @property
    def files(self) -> Mapping[str, int]:
        """The files of the inner retriever."""
        return CALLS.call(self._call_name, lambda: self._inner.files)

    def find(self, queries: Queries, k: int) -> RankedRows:
        """Return the rows of the inner retriever after checking them."""
        ranking: Any = CALLS.call(self._call_name, self._inner.find, queries, k)
        if not isinstance(ranking, RankedRows):
            raise self._create_wrong_result_error(f"returned {ranking!r:.60}", "return RankedRows")
        if problem := _find_row_problem(ranking, len(queries), k, self.snapshot.n):
            raise self._create_wrong_result_error(
                f"returned {problem}", f"return up to {k} rows and scores for each query"
            )
        return ranking

    def _create_wrong_result_error(self, problem: str, expected: str) -> InputError:
        return CALLS.wrong_plugin_error(self._call_name, problem, expected)


def _find_row_problem(ranked_rows: RankedRows, n_queries: int, k: int, n: int) -> str:
    """Return a description of the first problem in the rows and scores, or an empty string."""
    arrays = {"rows": (ranked_rows.rows, np.integer), "scores": (ranked_rows.scores, np.floating)}
    if ranked_rows.products is not None:
        arrays["products"] = (ranked_rows.products, np.floating)
    for name, (array, number_type) in arrays.items():
        if not isinstance(array, np.ndarray) or not np.issubdtype(array.dtype, number_type):
            return f"{name} that are not an array of {number_type.__name__} numbers"
        if array.ndim != 2 or len(array) != n_queries or array.shape[1] > k or array.shape != ranked_rows.rows.shape:
            return f"{name} of shape {array.shape} for {n_queries} queries"
    is_hit = ranked_rows.rows >= 0
    if (ranked_rows.rows < -1).any() or (ranked_rows.rows >= n).any():
        return f"a row outside the {n:,} rows of the snapshot"
    if (is_hit[:, 1:] & ~is_hit[:, :-1]).any():
        return "a row after -1, although -1 ends the rows of a query"
    if any(len(np.unique(rows[hits])) < hits.sum() for rows, hits in zip(ranked_rows.rows, is_hit, strict=True)):
        return "a row twice for one query"
    return "" if np.isfinite(ranked_rows.scores[is_hit]).all() else "a score that is not finite"


class RetrieverFactory:
    """Builds the retriever of one expression.

    Builders get their child retrievers and their resource handles from the factory.
    """

    def __init__(self, context: RetrieverContext, limits: RequestLimits | None = None) -> None:
        """Create a factory whose retrievers read from `context`."""
        self.max_depth = None if limits is None else limits.max_depth
        self._context, self._limits = context, limits
        self._recorded_needs: list[RetrieverNeeds] = []
        # names of the indexes in the expression's order; a name may occur several times
        self._searched_indexes: list[str] = []

    @property
    def needs(self) -> RetrieverNeeds:
        """All resources that builders have requested so far."""
        return RetrieverNeeds.merge(self._recorded_needs)

    @property
    def default_expression(self) -> str:
        """The default retriever of the snapshot."""
        return self._context.snapshot.manifest.content.default_retriever

    def retriever(self, tree: Word | Call) -> SnapshotRetriever:
        """Return the retriever of a whole expression.

        Raises:
            UsageError: a name is unknown, or a builder rejects its call.
        """
        child = self.leg(tree)
        return child.retriever if child.depth is None else DeepRetriever(child)

    def leg(self, node: Node) -> ChildRetriever:
        """Return a child retriever, from an index or a call, with or without a depth.

        Raises:
            UsageError: the node is neither an index nor a call, or its name is unknown.
        """
        if isinstance(node, Call):
            return ChildRetriever(self._build_call(node), self._check_depth(node, node.depth))
        if not isinstance(node, Word):
            raise node.error(f"{node} is not a retriever: name an index, or a call")
        name, depth = node.split_depth()
        return ChildRetriever(self._build_index_retriever(node, name, {}), self._check_depth(node, depth))

    def tokens(self, node: Node) -> IndexTokens:
        """Return a handle of an index over token vectors, to score candidates.

        Raises:
            UsageError: the node is not an index over token vectors, or its name is unknown.
        """
        name = self._get_index_of_kind(node, "tokens", "an index over token vectors")
        self._recorded_needs.append(RetrieverNeeds(indexes=(name,)))
        return IndexTokens(self._context, name)

    def graph(self, node: Node | None) -> IndexLinks | None:
        """Return a handle of the links of the HNSW index that `node` names.

        If `node` is None, the handle is for the first HNSW index that the expression has named so
        far, or else for the first of the snapshot. Return None if the snapshot has no HNSW index.

        Raises:
            UsageError: the node is not an HNSW index, or its name is unknown.
        """
        if node is not None:
            name = self._get_index_of_kind(node, "hnsw", "a graph")
        else:
            names = (*self._searched_indexes, *self._get_index_names())
            name = next((name for name in names if get_index_kind(self._context.snapshot, name) == "hnsw"), "")
            if not name:
                return None
        self._recorded_needs.append(RetrieverNeeds(graphs=(name,)))
        return IndexLinks(self._context, name)

    def scorer(self, node: Node) -> NamedScorer:
        """Return a handle of a cross-encoder.

        Raises:
            UsageError: the argument is not a name, or models are not allowed.
        """
        if not isinstance(node, Word):
            raise node.error(f"{node} is not a model: give a folder, or model:NAME of the store")
        if self._limits is not None:
            raise node.error("a request may not name a model: use a retriever with which the service was started")
        self._recorded_needs.append(RetrieverNeeds(models=(node.text,)))
        return NamedScorer(self._context, node.text)

    def vectors(self, representation: str = EMBEDDINGS) -> PassageVectors:
        """Return a handle of the passages' vectors, which are read by row."""
        self._recorded_needs.append(RetrieverNeeds(vectors=(representation,)))
        return PassageVectors(self._context, representation)

    def encoder(self, representation: str = EMBEDDINGS) -> QueryEncoder:
        """Return a handle of a question encoder, for queries in the space of the passages'
        vectors.
        """
        self._recorded_needs.append(RetrieverNeeds(encoders=(representation,)))
        return QueryEncoder(self._context, representation)

    def _get_index_names(self) -> tuple[str, ...]:
        return list_index_names(self._context.snapshot) if self._limits is None else self._limits.indexes

    def _get_index_of_kind(self, node: Node, kind: str, description: str) -> str:
        if not isinstance(node, Word):
            raise node.error(f"{node} is not {description}: give the name of one")
        self._check_index(node, node.text)
        snapshot = self._context.snapshot
        if get_index_kind(snapshot, node.text) != kind:
            alternatives = [name for name in self._get_index_names() if get_index_kind(snapshot, name) == kind]
            advice = "the snapshot has none, add one to its recipe"
            if alternatives:
                advice = f"choose one of {', '.join(alternatives)}"
            raise node.error(f"{node} is not {description}: {advice}")
        return node.text

    def _check_index(self, node: Node, name: str) -> None:
        names, snapshot = self._get_index_names(), self._context.snapshot
        if name not in names:
            message = describe_unknown_index(snapshot, name)
            if self._limits is not None:
                advice = f", or start the service with --retriever {name}" if name in list_index_names(snapshot) else ""
                message = f"index {name!r} is not served here: choose one of {', '.join(names)}{advice}"
            raise node.error(message)
        self._searched_indexes.append(name)
        if len(self._searched_indexes) > MAX_SEARCHED_INDEXES:
            raise node.error(f"more than {MAX_SEARCHED_INDEXES} indexes are searched: remove some of them")

    def _build_call(self, call: Call) -> SnapshotRetriever:
        builder = None
        if self._limits is None or CALLS.is_built_in(call.name):
            builder = CALLS.find(call.name)
        if builder is None and call.name in self._get_index_names():
            return self._build_with_parameters(call)
        if builder is None:
            calls, indexes = ", ".join(CALLS.list_names()), ", ".join(self._get_index_names())
            raise call.error(f"there is no call {call.name!r}: choose one of {calls}, or name an index: {indexes}")
        return builder(call, self) if CALLS.is_built_in(call.name) else self._build_installed(call, builder)

    def _build_installed(self, call: Call, builder: Any) -> SnapshotRetriever:
        """Return the retriever of an installed package, whose results are checked.

        Raises:
            InputError: the registered object is not a function, fails, or returns something else.
            UsageError: the builder rejects the call.
        """
        if not callable(builder):
            raise CALLS.wrong_plugin_error(
                call.name, f"is {type(builder).__name__}", "register a function build(call, factory)"
            )
        retriever: Any = CALLS.call(call.name, builder, call, self)
        if not isinstance(retriever, SnapshotRetriever):
            raise CALLS.wrong_plugin_error(call.name, f"built {retriever!r:.60}", "return a SnapshotRetriever")
        return CALLS.call(call.name, InstalledRetriever, call.name, retriever)

    def _build_with_parameters(self, call: Call) -> SnapshotRetriever:
        """Return the retriever of an index with search parameters: `bm25(k1=1.2, b=.75)`."""
        if call.arguments:
            raise call.error(f"{call.name} is an index: it takes only search parameters, as in {call.name}(NAME=1)")
        parameters = {name: call.get_number(name) for name in call.options}
        for name, value in parameters.items():
            if self.max_depth is not None and value > self.max_depth:
                raise call.error(f"{name} is {value:,}: at most {self.max_depth:,} is allowed here")
        try:
            retriever = self._build_index_retriever(call, call.name, parameters)
        except UsageError as error:
            raise call.error(str(error)) from error
        retriever.name = str(replace(call, depth=None))
        return retriever

    def _build_index_retriever(self, node: Node, name: str, parameters: Mapping[str, Any]) -> IndexRetriever:
        self._check_index(node, name)
        check_search_parameters(self._context.snapshot, name, parameters)
        self._recorded_needs.append(RetrieverNeeds(indexes=(name,)))
        return IndexRetriever(self._context, name, parameters)

    def _check_depth(self, node: Node, depth: int | None) -> int | None:
        if depth is not None and self.max_depth is not None and depth > self.max_depth:
            raise node.error(f"{node} asks for {depth:,} passages: ask for at most {self.max_depth:,} here")
        return depth
