"""Rerank the hits of another retriever, with a model or with token vectors.

`rerank(A, MODEL, 50)` reorders the first 50 hits of A by the scores of a model. A model that reads
query and passage together (a cross-encoder) ranks similar passages better than vectors do, but it
costs one forward pass per pair. So a cross-encoder reads only the best hits of a cheaper retriever.

`maxsim(A, INDEX, 500)` is late interaction: it reranks up to 500 passages by MaxSim over token
vectors. The candidates are the hits of A and, added in one or more rounds, the neighbours of the
best candidates in the bottom layer of an HNSW graph: a neighbour of a relevant passage is often
relevant, even if A has missed it (MacAvaney and Tonellotto 2024, "A Reproducibility Study of
PLAID", arXiv 2404.14989: better than PLAID at every cost). Each candidate is scored once.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from rag_model.errors import InputError
from rag_model.index.exact_search import select_top_k
from rag_model.index.files.engine import Rows, Vectors
from rag_model.retrieve.context import IndexLinks, IndexTokens
from rag_model.retrieve.expression import Call
from rag_model.retrieve.factory import RetrieverFactory
from rag_model.retrieve.indexes import get_index_sizes
from rag_model.retrieve.models import PairScorer, list_model_files
from rag_model.retrieve.retriever import ChildRetriever, Queries, RankedRows, SnapshotRetriever

_DEFAULT_DEPTH = 50  # passages to score; beyond 100 the quality grows little
_MAX_RERANK_DEPTH = 1_000
DEFAULT_MAXSIM_DEPTH = 500  # passages to score, about 60,000 tokens
MAX_MAXSIM_DEPTH = 10_000
_DEFAULT_ROUNDS = 1  # rounds that add neighbours; a second round adds little
_MAX_ROUNDS = 4


class RerankedRetriever(SnapshotRetriever):
    """A `Retriever` that reranks the first `depth` hits of a child retriever with a model."""

    def __init__(self, name: str, child: ChildRetriever, scorer: PairScorer, depth: int = _DEFAULT_DEPTH) -> None:
        """Score the first `depth` hits of `child`; `name` is the spelling in an expression."""
        super().__init__(child.retriever.snapshot, name)
        self.depth_advice = "or increase its third argument, as in rerank(A, MODEL, 100)"
        self.exact_products = child.retriever.exact_products
        self._child, self._scorer, self._depth = child, scorer, depth

    @property
    def most(self) -> int:
        """The number of passages that are scored."""
        return min(self._depth, self._child.most)

    @property
    def files(self) -> Mapping[str, int]:
        """The files of the model."""
        return list_model_files(self._scorer)

    def find(self, queries: Queries, k: int) -> RankedRows:
        """Search the child retriever, and rank its hits by the model's scores; ties are ordered by
        row.

        All pairs of all queries are scored in one call, so that the model can batch them by length.

        Raises:
            InputError: a score is not finite.
        """
        child_ranking = self._child.find(queries, self._depth)
        candidates = child_ranking.truncate(self._depth)
        passages = self.read_passages(candidates.rows, candidates.passages)
        is_hit = candidates.rows >= 0  # (q, depth)
        hit_passages = [passages[row] for row in candidates.rows[is_hit].tolist()]
        pair_queries = np.repeat(np.arange(len(queries)), is_hit.sum(axis=1)).tolist()
        pair_scores = self._scorer.scores(
            [queries.texts[query] for query in pair_queries],
            [passage.title for passage in hit_passages],
            [passage.text for passage in hit_passages],
        )
        if not np.isfinite(pair_scores).all():
            raise InputError(
                f"{self.name} returned a score that is not finite: its model is damaged, so download it again"
            )
        scores = np.full(candidates.rows.shape, -np.inf, np.float32)
        scores[is_hit] = pair_scores
        order = np.lexsort((candidates.rows, -scores), axis=1)
        products = None if candidates.products is None else np.take_along_axis(candidates.products, order, 1)
        rows, scores = np.take_along_axis(candidates.rows, order, 1), np.take_along_axis(scores, order, 1)
        return RankedRows(self.name, rows, scores, products, (child_ranking,), passages).truncate(k)


def build_rerank(call: Call, factory: RetrieverFactory) -> SnapshotRetriever:
    """Build `rerank(A, MODEL, 50)`; MODEL is a folder, a hub name, or `model:NAME` of the store.

    Raises:
        UsageError: an argument is missing or wrong.
    """
    call.check_options()
    if len(call.arguments) not in {2, 3}:
        raise call.error(
            "rerank takes a retriever, a model and the number of passages to score: rerank(hnsw, MODEL, 50)"
        )
    child = factory.leg(call.arguments[0])
    depth = call.get_int(2, _DEFAULT_DEPTH, 1, _MAX_RERANK_DEPTH)
    scorer = factory.scorer(call.arguments[1])
    name = call.format_name([child.expression], {2: str(_DEFAULT_DEPTH)})
    return RerankedRetriever(name, child, scorer, depth)


class MaxSimRetriever(SnapshotRetriever):
    """A `Retriever` that reranks the hits of a child retriever, and their graph neighbours, by
    MaxSim.
    """

    def __init__(
        self,
        name: str,
        child: ChildRetriever,
        tokens: IndexTokens,
        graph: IndexLinks | None = None,
        depth: int = DEFAULT_MAXSIM_DEPTH,
        n_rounds: int = _DEFAULT_ROUNDS,
    ) -> None:
        """Create a retriever that scores at most `depth` passages per query.

        Args:
            name: spelling of this retriever in an expression, without its own depth.
            child: the retriever whose hits are reranked; it is searched to its own depth, or else
                to half of `depth`, but at least to `k`.
            tokens: the index of token vectors, with its question encoder.
            graph: the graph whose neighbours are added to the candidates; None: no neighbours are
                added.
            depth: passages scored per query.
            n_rounds: number of times that neighbours of the best candidates are added; all rounds
                together add as many as `depth` allows.
        """
        super().__init__(child.retriever.snapshot, name)
        self._child, self._tokens, self._depth = child, tokens, depth
        self._graph, self._rounds = graph, n_rounds if graph is not None else 0

    @property
    def most(self) -> int:
        """The number of passages that are scored."""
        n_candidates = self.snapshot.n if self._rounds else self._child.most
        return min(self._depth, n_candidates)

    @property
    def files(self) -> Mapping[str, int]:
        """The sizes in bytes, by path, of the files of the token index and of the graph."""
        size_by_path = get_index_sizes(self.snapshot, self._tokens.name)
        return size_by_path if self._graph is None else size_by_path | get_index_sizes(self.snapshot, self._graph.name)

    def find(self, queries: Queries, k: int) -> RankedRows:
        """Retrieve candidates, add their neighbours, and rank all of them by MaxSim; ties are
        ordered by row.
        """
        # The candidates may have few neighbours, so at least k candidates are retrieved.
        child_depth = max(self._depth // 2, min(k, self._depth)) if self._rounds else self._depth
        child_ranking = self._child.find(queries, child_depth)
        candidates = child_ranking.truncate(self._depth)
        vectors = self._tokens.encode(queries)  # (q, l, d)
        scored_candidates = [
            self._score_candidates(query, rows[rows >= 0]) for query, rows in zip(vectors, candidates.rows, strict=True)
        ]
        child_rankings = [child_ranking]
        if self._graph is not None:
            n_candidates = (candidates.rows >= 0).sum(axis=1).tolist()
            neighbours = [
                (rows[n:], scores[n:]) for (rows, scores), n in zip(scored_candidates, n_candidates, strict=True)
            ]
            child_rankings.append(_rank_rows(f"neighbours({self._graph.name})", neighbours))
        return _rank_rows(self.name, scored_candidates, tuple(child_rankings)).truncate(k)

    def _score_candidates(self, query: Vectors, candidates: Rows) -> tuple[Rows, Vectors]:
        """Return (rows, scores) for an (l, d) query: its candidates, and then added neighbours."""
        scores = self._tokens.score(query, candidates)
        for rounds_left in range(self._rounds, 0, -1):
            max_neighbours = (self._depth - len(candidates)) // rounds_left
            ranked_rows = candidates[np.lexsort((candidates, -scores))]
            neighbours = self._find_new_neighbours(ranked_rows, max_neighbours)
            if not len(neighbours):
                break
            scores = np.concatenate([scores, self._tokens.score(query, neighbours)])
            candidates = np.concatenate([candidates, neighbours])
        return candidates, scores

    def _find_new_neighbours(self, ranked_rows: Rows, max_neighbours: int) -> Rows:
        """Return up to `max_neighbours` neighbours of `ranked_rows` that are not among these rows.

        The neighbours of the best row come first.
        """
        if self._graph is None or max_neighbours < 1:
            return np.empty(0, np.int64)
        # (m, w) -> (m * w,)
        neighbour_rows = self._graph.read_links(ranked_rows[:max_neighbours]).reshape(-1).astype(np.int64)
        neighbour_rows = neighbour_rows[(neighbour_rows >= 0) & (neighbour_rows < self.snapshot.n)]
        neighbour_rows = neighbour_rows[~np.isin(neighbour_rows, ranked_rows)]
        _, first_positions = np.unique(neighbour_rows, return_index=True)
        return neighbour_rows[np.sort(first_positions)][:max_neighbours]


def _rank_rows(name: str, lists: Sequence[tuple[Rows, Vectors]], legs: tuple[RankedRows, ...] = ()) -> RankedRows:
    """Rank the scored rows of each query, best first; ties are ordered by row."""
    n_columns = max(len(query_rows) for query_rows, _ in lists)
    rows = np.full((len(lists), n_columns), -1, np.int64)
    scores = np.full(rows.shape, -np.inf, np.float32)
    for i, (query_rows, query_scores) in enumerate(lists):
        rows[i, : len(query_rows)], scores[i, : len(query_rows)] = query_rows, query_scores
    rows[scores == -np.inf] = -1  # passages without tokens have score -inf
    scores, rows = select_top_k(scores, rows, n_columns)
    passages = {row: passage for ranking in legs for row, passage in ranking.passages.items()}
    return RankedRows(name, rows, scores, legs=legs, passages=passages)


def build_maxsim(call: Call, factory: RetrieverFactory) -> SnapshotRetriever:
    """Build `maxsim(A, INDEX, 500, graph=GRAPH, rounds=1)`.

    INDEX is an index over token vectors. GRAPH is the HNSW index whose bottom layer gives the
    neighbours: by default the first one that A searches, or else the first of the snapshot.
    `rounds=0` adds no neighbours.

    Raises:
        UsageError: an argument is missing or wrong.
    """
    call.check_options("graph", "rounds")
    if len(call.arguments) not in {2, 3}:
        raise call.error(
            "maxsim takes a retriever, an index over token vectors and the number of passages to "
            "score: maxsim(hnsw:100, tokens, 500)"
        )
    child = factory.leg(call.arguments[0])
    tokens = factory.tokens(call.arguments[1])
    max_depth = factory.max_depth or MAX_MAXSIM_DEPTH
    default_depth = min(DEFAULT_MAXSIM_DEPTH, max_depth)
    depth = call.get_int(2, default_depth, 1, max_depth)
    n_rounds = call.get_int("rounds", _DEFAULT_ROUNDS, 0, _MAX_ROUNDS)
    graph = factory.graph(call.options.get("graph")) if n_rounds else None
    name = call.format_name([child.expression], {2: str(default_depth), "rounds": str(_DEFAULT_ROUNDS)})
    return MaxSimRetriever(name, child, tokens, graph, depth, n_rounds)
