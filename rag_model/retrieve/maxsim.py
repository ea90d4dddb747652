"""Late interaction: in `maxsim(A, INDEX, 500)` up to 500 passages are ordered by MaxSim over an index of token vectors.

The candidates are what A finds and, for one round or two, the neighbours of the best of them in the bottom layer of a
graph: a passage near a good one is often good, and A need not have found it (MacAvaney and Tonellotto 2024, "A
Reproducibility Study of PLAID", arXiv 2404.14989: better than PLAID at every cost). Each candidate is scored once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from rag_model.index.exact.scan import best_of
from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.kind import TokenIndex
from rag_model.retrieve.found import Found, SnapshotRetriever
from rag_model.retrieve.indexes import sizes_of
from rag_model.retrieve.leg import Leg
from rag_model.retrieve.nodes import Call
from rag_model.retrieve.questions import QuestionEncoder, Questions
from rag_model.store.versions.snapshot import Snapshot

if TYPE_CHECKING:
    from rag_model.retrieve.composer import Composer

DEPTH = 500  # passages that are scored: 60,000 tokens
_MOST = 10_000
_ROUNDS = 1  # of neighbours; the second finds little that the first does not
_MOST_ROUNDS = 4


class Neighbours(Protocol):
    """The bottom layer of a graph over the passages; node = row."""

    def bottom(self, nodes: Rows) -> npt.NDArray[np.int32]:
        """Return the (m, w) neighbours of `nodes`, (m,); -1 where there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph whose neighbours become candidates."""

    name: str  # of its index
    links: Neighbours


@dataclass(frozen=True, slots=True)
class Tokens:
    """An index over token vectors, and the encoder of its questions."""

    encoder: QuestionEncoder
    index: TokenIndex


class TokenRetriever(SnapshotRetriever):
    """A `Retriever` that scores every passage by MaxSim: exact, and for small snapshots only."""

    def __init__(self, snapshot: Snapshot, name: str, tokens: Tokens) -> None:
        """Search the index `name` of token vectors."""
        super().__init__(snapshot, name)
        self._tokens = tokens

    @property
    def files(self) -> Mapping[str, int]:
        """The index's file."""
        return sizes_of(self.snapshot, self.name)

    def find(self, asked: Questions, k: int) -> Found:
        """Search all passages."""
        scores, rows = self._tokens.index.search(asked.vectors(self._tokens.encoder), k)
        return Found(self.name, rows, scores)


class MaxSimRetriever(SnapshotRetriever):
    """A `Retriever` that orders the candidates of a leg, and their neighbours, by MaxSim."""

    def __init__(
        self,
        leg: Leg,
        index: str,
        tokens: Tokens,
        graph: Graph | None = None,
        depth: int = DEPTH,
        rounds: int = _ROUNDS,
    ) -> None:
        """Score at most `depth` passages a question.

        Args:
            leg: gives the first candidates: as many as its own depth says, else half of `depth`.
            index: how an expression calls the index.
            tokens: the index, opened.
            graph: adds candidates; None: only what the leg finds.
            depth: passages that are scored.
            rounds: how often neighbours of the best are added; they share what the leg leaves of `depth`.
        """
        super().__init__(leg.retriever.snapshot, f"maxsim({leg.name}, {index})")
        self._leg, self._tokens, self._depth = leg, tokens, depth
        self._graph, self._rounds = graph, rounds if graph is not None else 0
        self._read = (index,) if graph is None else (index, graph.name)

    @property
    def most(self) -> int:
        """As many as are scored."""
        found = self.snapshot.n if self._rounds else self._leg.most
        return min(self._depth, found)

    @property
    def files(self) -> Mapping[str, int]:
        """The files of the index, and of the graph whose links are read."""
        return {file: size for name in self._read for file, size in sizes_of(self.snapshot, name).items()}

    def find(self, asked: Questions, k: int) -> Found:
        """Find candidates with the leg, add neighbours, and order all by MaxSim; of equal scores by row."""
        below = self._leg.find(asked, max(1, self._depth // 2) if self._rounds else self._depth)
        first = below.cut(self._depth)
        vectors = asked.vectors(self._tokens.encoder)  # (q, l, d)
        found = [self._scored(question, rows[rows >= 0]) for question, rows in zip(vectors, first.rows, strict=True)]
        if self._graph is not None:
            counts = (first.rows >= 0).sum(axis=1).tolist()
            new = [(known[count:], told[count:]) for (known, told), count in zip(found, counts, strict=True)]
            near = _ordered(f"neighbours({self._graph.name})", new)
            return _ordered(self.name, found, (below, near)).cut(k)
        return _ordered(self.name, found, (below,)).cut(k)

    def _scored(self, question: Vectors, known: Rows) -> tuple[Rows, Vectors]:
        """Return the candidates of a question, the leg's first, and their scores."""
        scores = self._tokens.index.score(question, known)
        for left in range(self._rounds, 0, -1):
            room = (self._depth - len(known)) // left
            near = self._near(known[np.lexsort((known, -scores))], known, room)
            if not len(near):
                break
            scores = np.concatenate([scores, self._tokens.index.score(question, near)])
            known = np.concatenate([known, near])
        return known, scores

    def _near(self, ranked: Rows, known: Rows, room: int) -> Rows:
        """Return up to `room` neighbours that are not known: those of the best passage first."""
        if self._graph is None or room < 1:
            return np.empty(0, np.int64)
        links = self._graph.links.bottom(ranked[:room]).reshape(-1).astype(np.int64)  # (m, w) -> (m w,)
        links = links[(links >= 0) & (links < self.snapshot.n)]
        links = links[~np.isin(links, known)]
        _, first = np.unique(links, return_index=True)
        return links[np.sort(first)][:room]


def _ordered(name: str, scored: Sequence[tuple[Rows, Vectors]], below: tuple[Found, ...] = ()) -> Found:
    """Return each question's rows by score, best first; of equal scores the smaller row first."""
    width = max(len(rows) for rows, _ in scored)
    rows, scores = np.full((len(scored), width), -1, np.int64), np.full((len(scored), width), -np.inf, np.float32)
    for number, (own, told) in enumerate(scored):
        rows[number, : len(own)], scores[number, : len(own)] = own, told
    rows[scores == -np.inf] = -1  # a passage without tokens
    scores, rows = best_of(scores, rows, width)
    passages = {row: passage for found in below for row, passage in found.passages.items()}
    return Found(name, rows, scores, below=below, passages=passages)


def build(call: Call, composer: "Composer") -> SnapshotRetriever:
    """Build `maxsim(A, INDEX, 500, graph=GRAPH, rounds=1)`.

    INDEX is an index over token vectors. GRAPH is the HNSW index whose bottom layer gives neighbours: by default the
    first that A searches, else the snapshot's first; `rounds=0` adds none.

    Raises:
        UsageError: an argument is missing or wrong.
    """
    call.check_options("graph", "rounds")
    if len(call.arguments) not in {2, 3}:
        raise call.wrong(
            "maxsim takes a retriever, an index over token vectors and how many passages it scores: maxsim(hnsw:100, "
            "tokens, 500)"
        )
    leg = composer.leg(call.arguments[0])
    index, tokens = composer.tokens(call.arguments[1])
    depth = call.whole(2, min(DEPTH, composer.most_depth or DEPTH), 1, composer.most_depth or _MOST)
    rounds = call.whole("rounds", _ROUNDS, 0, _MOST_ROUNDS)
    graph = composer.graph(call.options.get("graph")) if rounds else None
    return MaxSimRetriever(leg, index, tokens, graph, depth, rounds)
