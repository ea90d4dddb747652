"""Late interaction: `maxsim(A, INDEX, 500)` reranks up to 500 passages by MaxSim over token
vectors.

The candidates are the hits of A and, for one round or more, the neighbours of the best candidates
in the bottom layer of an HNSW graph: a passage near a good one is often good, even if A has missed
it (MacAvaney and Tonellotto 2024, "A Reproducibility Study of PLAID", arXiv 2404.14989: better than
PLAID at every cost). Each candidate is scored once.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from rag_model.index.exact_search import select_top_k
from rag_model.index.files.engine import Rows, Vectors
from rag_model.retrieve.context import CandidateGraph, TokenScorer
from rag_model.retrieve.expression import Call
from rag_model.retrieve.factory import RetrieverFactory
from rag_model.retrieve.indexes import index_file_sizes
from rag_model.retrieve.retriever import Leg, Queries, RankedRows, SnapshotRetriever

DEPTH = 500  # passages scored per query: 60,000 tokens
MAX_DEPTH = 10_000
_ROUNDS = 1  # of neighbours; a second round adds little
_MAX_ROUNDS = 4


class MaxSimRetriever(SnapshotRetriever):
    """A `Retriever` that reranks the candidates of a leg, and their graph neighbours, by MaxSim."""

    def __init__(
        self,
        leg: Leg,
        tokens: TokenScorer,
        graph: CandidateGraph | None = None,
        depth: int = DEPTH,
        rounds: int = _ROUNDS,
    ) -> None:
        """Score at most `depth` passages per query.

        Args:
            leg: retrieves the first candidates: to its own depth, or else to half of `depth` but at
                least as many passages as are returned.
            tokens: the index of token vectors, with its question encoder.
            graph: adds neighbours of the candidates; None: the leg's candidates only.
            depth: passages scored per query.
            rounds: number of times that neighbours of the best candidates are added; the rounds
                share the part of `depth` that the leg leaves.
        """
        super().__init__(leg.retriever.snapshot, f"maxsim({leg.name}, {tokens.name})")
        self._leg, self._tokens, self._depth = leg, tokens, depth
        self._graph, self._rounds = graph, rounds if graph is not None else 0
        self._index_names = (tokens.name,) if graph is None else (tokens.name, graph.name)

    @property
    def most(self) -> int:
        """The number of passages that are scored."""
        candidates = self.snapshot.n if self._rounds else self._leg.most
        return min(self._depth, candidates)

    @property
    def files(self) -> Mapping[str, int]:
        """The files of the index, and of the graph."""
        return {
            file: size for name in self._index_names for file, size in index_file_sizes(self.snapshot, name).items()
        }

    def find(self, queries: Queries, k: int) -> RankedRows:
        """Retrieve candidates, add their neighbours, and rank all by MaxSim; ties by row."""
        # The candidates may have few neighbours, so the leg retrieves at least k passages.
        leg_depth = max(self._depth // 2, min(k, self._depth)) if self._rounds else self._depth
        leg_rows = self._leg.find(queries, leg_depth)
        candidates = leg_rows.truncate(self._depth)
        vectors = self._tokens.encode(queries)  # (q, l, d)
        scored = [
            self._score_candidates(query, rows[rows >= 0]) for query, rows in zip(vectors, candidates.rows, strict=True)
        ]
        if self._graph is not None:
            counts = (candidates.rows >= 0).sum(axis=1).tolist()
            neighbours_scored = [
                (row_list[count:], scores[count:]) for (row_list, scores), count in zip(scored, counts, strict=True)
            ]
            neighbours = _rank(f"neighbours({self._graph.name})", neighbours_scored)
            return _rank(self.name, scored, (leg_rows, neighbours)).truncate(k)
        return _rank(self.name, scored, (leg_rows,)).truncate(k)

    def _score_candidates(self, query: Vectors, candidates: Rows) -> tuple[Rows, Vectors]:
        """Return all candidates of a query, (l, d), and their scores.

        Those of the leg come first.
        """
        scores = self._tokens.score(query, candidates)
        for rounds_left in range(self._rounds, 0, -1):
            capacity = (self._depth - len(candidates)) // rounds_left
            neighbours = self._find_neighbours(candidates[np.lexsort((candidates, -scores))], candidates, capacity)
            if not len(neighbours):
                break
            scores = np.concatenate([scores, self._tokens.score(query, neighbours)])
            candidates = np.concatenate([candidates, neighbours])
        return candidates, scores

    def _find_neighbours(self, ranked: Rows, candidates: Rows, capacity: int) -> Rows:
        """Return up to `capacity` new neighbours of the `ranked` rows.

        Those of the best row come first.
        """
        if self._graph is None or capacity < 1:
            return np.empty(0, np.int64)
        # (m, w) -> (m w,)
        links = self._graph.bottom(ranked[:capacity]).reshape(-1).astype(np.int64)
        links = links[(links >= 0) & (links < self.snapshot.n)]
        links = links[~np.isin(links, candidates)]
        _, positions = np.unique(links, return_index=True)
        return links[np.sort(positions)][:capacity]


def _rank(name: str, scored: Sequence[tuple[Rows, Vectors]], legs: tuple[RankedRows, ...] = ()) -> RankedRows:
    """Rank the scored rows of each query, best first; ties by row."""
    width = max(len(rows) for rows, _ in scored)
    rows, scores = np.full((len(scored), width), -1, np.int64), np.full((len(scored), width), -np.inf, np.float32)
    for query, (query_rows, query_scores) in enumerate(scored):
        rows[query, : len(query_rows)], scores[query, : len(query_rows)] = query_rows, query_scores
    rows[scores == -np.inf] = -1  # passages without tokens
    scores, rows = select_top_k(scores, rows, width)
    passages = {row: passage for ranked in legs for row, passage in ranked.passages.items()}
    return RankedRows(name, rows, scores, legs=legs, passages=passages)


def build(call: Call, factory: RetrieverFactory) -> SnapshotRetriever:
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
            "maxsim takes a retriever, an index over token vectors and how many passages it "
            "scores: maxsim(hnsw:100, tokens, 500)"
        )
    leg = factory.leg(call.arguments[0])
    tokens = factory.tokens(call.arguments[1])
    depth = call.get_int(2, min(DEPTH, factory.max_depth or DEPTH), 1, factory.max_depth or MAX_DEPTH)
    rounds = call.get_int("rounds", _ROUNDS, 0, _MAX_ROUNDS)
    graph = factory.graph(call.options.get("graph")) if rounds else None
    return MaxSimRetriever(leg, tokens, graph, depth, rounds)
