"""The base class of all retrievers, which turns queries into ranked rows, and ranked rows into
hits.

A retriever returns rows and scores (`RankedRows`) to an outer retriever. Passages are read once,
for the rows that are returned to the caller.
"""

import time
import unicodedata
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from rag_model.corpus.records import Passage
from rag_model.encoders.space import Space
from rag_model.errors import UsageError, format_count
from rag_model.index.files.engine import Rows, Vectors
from rag_model.retrieve.attribution import Attribution
from rag_model.retrieve.hits import Hit, LegHit
from rag_model.store.versions.snapshot import Snapshot

DEFAULT_K = 5  # passages per query
Scores = npt.NDArray[np.floating]
# First letters of the Unicode categories of visible characters: letters, marks, numbers,
# punctuation and symbols.
_VISIBLE_CATEGORIES = frozenset("LMNPS")


class QuestionEncoder(Protocol):
    """Interface of a query encoder; `Encoder` implements it."""

    def space(self) -> Space:
        """Return the space of its question vectors."""
        ...

    def encode_questions(self, questions: Sequence[str]) -> Vectors:
        """Return the float32 vectors of n texts, in order.

        The shape is (n, d) for a dense encoder, (n, l, d) for a ColBERT, and (n, l, 2), pairs of
        term and weight, for a sparse encoder.
        """
        ...


class Queries:
    """A batch of query texts, and their vectors.

    Each encoder encodes the whole batch once, when a retriever first requests its vectors.
    """

    def __init__(self, texts: Sequence[str], timer: "StageTimer | None" = None) -> None:
        """Create a batch of `texts`, in order; `timer` runs and measures every stage of their
        search.
        """
        self.texts = texts
        self.timer = timer
        self.encoding_seconds = 0.0  # sum of the seconds of all encoders
        self.reading_seconds = 0.0  # time to read the hits' passages, also those of subsets
        self.used_encoders: list[QuestionEncoder] = []  # the encoder of each call of `vectors`
        self._seconds_by_encoder: dict[int, float] = {}  # key: `id()` of the encoder
        self._vectors: list[tuple[QuestionEncoder, Vectors]] = []
        # for a subset: the whole batch, and the positions of the subset's queries in it
        self._parent: tuple[Queries, Sequence[int]] | None = None

    @classmethod
    def from_vectors(cls, texts: Sequence[str], encoder: QuestionEncoder, vectors: Vectors) -> Self:
        """Create a batch of `texts` whose (n, d) vectors `encoder` has already computed."""
        queries = cls(texts)
        queries._vectors.append((encoder, vectors))
        return queries

    def __len__(self) -> int:
        """Return the number of queries."""
        return len(self.texts)

    def vectors(self, encoder: QuestionEncoder) -> Vectors:
        """Return the float32 vectors of the queries by `encoder`, in order (see
        `QuestionEncoder`).
        """
        self.used_encoders.append(encoder)
        vectors = self.find_vectors(encoder)
        if vectors is None:
            vectors = self._encode(encoder)
            self._vectors.append((encoder, vectors))
        return vectors

    def find_vectors(self, encoder: QuestionEncoder | None) -> Vectors | None:
        """Return the vectors that `encoder` has already computed; None if there are none."""
        return next((vectors for owner, vectors in self._vectors if owner is encoder), None)

    def get_encoding_seconds(self, encoder: QuestionEncoder) -> float:
        """Return the seconds that `encoder` took; 0 if its vectors were given."""
        return self._seconds_by_encoder.get(id(encoder), 0.0)

    def subset(self, positions: Sequence[int]) -> "Queries":
        """Return the queries at `positions`; encoding one of them encodes the whole batch."""
        subset = Queries([self.texts[position] for position in positions], self.timer)
        subset._parent = self, positions
        return subset

    def record_reading(self, seconds: float) -> None:
        """Add seconds in which the passages of hits were read."""
        self.reading_seconds += seconds
        if self._parent is not None:
            self._parent[0].record_reading(seconds)

    def _encode(self, encoder: QuestionEncoder) -> Vectors:
        if self._parent is not None:
            parent, positions = self._parent
            seconds_before = parent.get_encoding_seconds(encoder)
            subset_vectors: Vectors = parent.vectors(encoder)[list(positions)]
            self._record_seconds(encoder, parent.get_encoding_seconds(encoder) - seconds_before)
            return subset_vectors
        start_time = time.perf_counter()
        vectors = encoder.encode_questions(self.texts)
        self._record_seconds(encoder, time.perf_counter() - start_time)
        return vectors

    def _record_seconds(self, encoder: QuestionEncoder, seconds: float) -> None:
        self.encoding_seconds += seconds
        self._seconds_by_encoder[id(encoder)] = self.get_encoding_seconds(encoder) + seconds


def has_visible_text(query: str) -> bool:
    """Return whether a query has a visible character."""
    return any(unicodedata.category(character)[0] in _VISIBLE_CATEGORIES for character in query)


def check_queries(queries: Sequence[str]) -> None:
    """Check that every query has visible text and is valid UTF-8.

    Raises:
        UsageError: a query is empty or is not valid UTF-8; the message gives its number, from 1.
    """
    for number, query in enumerate(queries, start=1):
        if not has_visible_text(query):
            raise UsageError(f"question {number} is empty: write at least one visible character")
        try:
            query.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"question {number} is not UTF-8 text ({error.reason}): check the terminal") from error


@dataclass(frozen=True, slots=True)
class RankedRows:
    """The result of a retriever for q queries: up to k rows each, best first."""

    name: str  # spelling of the retriever in the expression
    rows: Rows  # (q, k) int64 global rows, each at most once per query; -1 after the last
    scores: Scores  # (q, k), larger is better; undefined where the row is -1
    products: Scores | None = None  # (q, k) inner products of query and passage; None: not computed
    legs: tuple["RankedRows", ...] = ()  # lists of the child retrievers, in the expression's order
    # passages that have been read, by row
    passages: Mapping[int, Passage] = field(default_factory=dict)

    def truncate(self, k: int) -> "RankedRows":
        """Return the first `k` rows of each query."""
        if self.rows.shape[1] <= k:
            return self
        products = None if self.products is None else self.products[:, :k]
        return replace(self, rows=self.rows[:, :k], scores=self.scores[:, :k], products=products)

    def iter_lists(self) -> Iterator["RankedRows"]:
        """Yield the lists from which this one was computed, at every level, inner lists first.

        The result of an index is computed from no other list; yield only this result.
        """
        if not self.legs:
            yield self
        for child_list in self.legs:
            yield from child_list.iter_lists()
            if child_list.legs:
                yield child_list


class SnapshotRetriever(ABC):
    """The base class of retrievers over one snapshot; a subclass implements `find`."""

    exact_products = False  # whether `find` fills in `RankedRows.products`
    is_stage = True  # whether `StageTimer` reports the retriever as a stage
    depth_advice = "or search deeper"  # ends the error message about a `k` above `most`

    def __init__(self, snapshot: Snapshot, name: str) -> None:
        """Create a retriever; `name` is its spelling in an expression, without its own depth."""
        self.snapshot, self.name = snapshot, name
        self._attribution = Attribution.from_corpus(snapshot.manifest.content.corpus)

    @abstractmethod
    def find(self, queries: Queries, k: int) -> RankedRows:
        """Return up to `k` rows for each of one or more queries, 1 <= k <= `most`. Thread-safe."""

    @property
    def most(self) -> int:
        """The maximum number of passages that this retriever returns for a query."""
        return self.snapshot.n

    @property
    def files(self) -> Mapping[str, int]:
        """The size in bytes, by path, of each file that this retriever reads, without the files of
        child retrievers.
        """
        return {}

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Return the best `k` passages of each query, best first, in the order of the queries.

        A list is shorter than `k` only if fewer passages were found, for example by an approximate
        index.

        Raises:
            UsageError: a query is empty or not valid UTF-8; or `k` is below 1, above the number of
                passages, or above `most`.
        """
        self.check_depth(k)
        check_queries(queries)
        return self.search_queries(Queries(queries), k)

    def search_queries(self, queries: Queries, k: int) -> list[list[Hit]]:
        """Search for queries that have been checked; see `search`.

        Raises:
            UsageError: `k` is out of range.
        """
        self.check_depth(k)
        if not len(queries):
            return []
        ranked_rows, start_time = self.find(queries, k), time.perf_counter()
        hits = self.build_hits(ranked_rows)
        queries.record_reading(time.perf_counter() - start_time)
        return hits

    def build_hits(self, ranked_rows: RankedRows) -> list[list[Hit]]:
        """Return the hits of ranked rows; each passage is read once, in row order."""
        passages = self.read_passages(ranked_rows.rows, ranked_rows.passages)
        credits_by_row = {
            row: (self._attribution.build_url(passage), self._attribution.build_credit_line(passage))
            for row, passage in passages.items()
        }
        child_ranks = [*map(_map_to_ranks, ranked_rows.iter_lists())] if ranked_rows.legs else None
        products = None if ranked_rows.products is None else ranked_rows.products.tolist()
        hits: list[list[Hit]] = []
        for i, (query_rows, scores) in enumerate(
            zip(ranked_rows.rows.tolist(), ranked_rows.scores.tolist(), strict=True)
        ):
            row_products = repeat(None) if products is None else products[i]
            scored_rows = [entry for entry in zip(query_rows, scores, row_products, strict=False) if entry[0] >= 0]
            hits.append(
                [
                    Hit(
                        rank,
                        score,
                        row,
                        passages[row],
                        *credits_by_row[row],
                        product,
                        (LegHit(ranked_rows.name, rank, score),)
                        if child_ranks is None
                        else _build_child_hits(child_ranks, i, row),
                    )
                    for rank, (row, score, product) in enumerate(scored_rows, start=1)
                ]
            )
        return hits

    def read_passages(self, rows: Rows, cached: Mapping[int, Passage]) -> dict[int, Passage]:
        """Return the passages of all rows but -1, by row; those in `cached` are not read again."""
        unread_rows = [row for row in np.unique(rows[rows >= 0]).tolist() if row not in cached]
        return {**cached, **dict(zip(unread_rows, self.snapshot.passages(unread_rows), strict=True))}

    def choose_depth(self, k: int | None, default: int = DEFAULT_K) -> int:
        """Return `k`; if it is None, return `default`, or `most` if that is less."""
        return max(1, min(default, self.most)) if k is None else k

    def check_depth(self, k: int) -> None:
        """Check that `k` passages can be returned for a query.

        Raises:
            UsageError: `k` is below 1 or above `most`.
        """
        if k < 1:
            raise UsageError(f"k is {k}: ask for at least 1 passage")
        if k > self.snapshot.n:
            raise UsageError(
                f"k is {k} but the snapshot holds {format_count(self.snapshot.n, 'passage')}: ask for fewer"
            )
        if k > self.most:
            passages_text = format_count(self.most, "passage")
            raise UsageError(f"k is {k} but {self.name} gives {passages_text}: ask for fewer, {self.depth_advice}")


# The name of a child retriever; and for each query, row -> (rank, score).
_ChildRanks = tuple[str, list[dict[int, tuple[int, float]]]]


def _map_to_ranks(ranked_rows: RankedRows) -> _ChildRanks:
    row_lists = zip(ranked_rows.rows.tolist(), ranked_rows.scores.tolist(), strict=True)
    return ranked_rows.name, [
        {row: (rank, score) for rank, (row, score) in enumerate(zip(*row_list, strict=True), start=1) if row >= 0}
        for row_list in row_lists
    ]


def _build_child_hits(child_ranks: Sequence[_ChildRanks], query_number: int, row: int) -> tuple[LegHit, ...]:
    ranks = ((child_name, rank_by_row[query_number].get(row)) for child_name, rank_by_row in child_ranks)
    return tuple(LegHit(child_name, *rank) for child_name, rank in ranks if rank is not None)


@dataclass(frozen=True, slots=True)
class ChildRetriever:
    """A child retriever of another retriever, with its depth in passages per query: `hnsw:100`."""

    retriever: SnapshotRetriever
    depth: int | None = None  # None: the depth that the outer retriever chooses

    @property
    def name(self) -> str:
        """The spelling of the retriever in an expression, without the depth."""
        return self.retriever.name

    @property
    def expression(self) -> str:
        """The spelling of the retriever in an expression, with the depth if one is set."""
        return self.name if self.depth is None else f"{self.name}:{self.depth}"

    @property
    def most(self) -> int:
        """The maximum number of passages that this child returns for a query."""
        return self.retriever.most if self.depth is None else min(self.depth, self.retriever.most)

    def find(self, queries: Queries, default_depth: int) -> RankedRows:
        """Search to `depth`, or to `default_depth` if `depth` is None, but at most to the
        retriever's `most`.
        """
        depth = min(self.depth or default_depth, self.retriever.most)
        if queries.timer is None:
            return self.retriever.find(queries, depth)
        return queries.timer.time_find(self.retriever, queries, depth)


class DeepRetriever(SnapshotRetriever):
    """A retriever that searches deeper than it returns, so that an approximate index finds better
    passages.
    """

    is_stage = False

    def __init__(self, child: ChildRetriever) -> None:
        """Create a retriever that searches `child` to the depth that `child` sets."""
        super().__init__(child.retriever.snapshot, child.name)
        self.exact_products = child.retriever.exact_products
        self._child = child

    @property
    def most(self) -> int:
        """The maximum number of passages of the child retriever."""
        return self._child.most

    def find(self, queries: Queries, k: int) -> RankedRows:
        """Search to the child retriever's depth and return the first `k` rows."""
        return self._child.find(queries, k).truncate(k)


@dataclass(frozen=True, slots=True)
class RetrieverStage:
    """One stage of a search: the rows that a retriever returned, or a list that it computed, for a
    batch of queries.
    """

    name: str  # spelling in the expression, without its own depth
    ranked_rows: RankedRows  # ranked rows, cut to the requested depth
    seconds: float  # seconds of the stage, without those of its legs and of the question encoders
    # None: the outer retriever computed the list itself, as `maxsim` does its neighbours
    retriever: SnapshotRetriever | None = None
    # question encoders that the stage or its legs used
    encoders: tuple[QuestionEncoder, ...] = ()
    # stages whose results this stage fuses or reranks, in the order of the expression
    legs: tuple["RetrieverStage", ...] = ()

    @property
    def files(self) -> Mapping[str, int]:
        """The sizes in bytes, by path, of the files that the stage itself reads."""
        return {} if self.retriever is None else self.retriever.files

    def iter_stages(self) -> Iterator["RetrieverStage"]:
        """Yield the stages of the legs at every level, inner stages first, and then this stage."""
        for child_stage in self.legs:
            yield from child_stage.iter_stages()
        yield self


def label_stages(stages: Sequence[RetrieverStage]) -> list[str]:
    """Return a unique label for each stage: its name, numbered from the second occurrence on (`hnsw
    (2)`).
    """
    count_by_name: Counter[str] = Counter()
    labels = []
    for stage in stages:
        count_by_name[stage.name] += 1
        labels.append(stage.name if count_by_name[stage.name] == 1 else f"{stage.name} ({count_by_name[stage.name]})")
    return labels


class StageTimer:
    """Measures the rows and the time of every stage of a retriever, such as an index, a fusion or a
    reranker, for one batch of queries at a time. Not thread-safe.

    >>> timer = StageTimer()  # doctest: +SKIP
    >>> queries = Queries(["who wrote animal farm?"], timer)  # doctest: +SKIP
    >>> ranked = timer.time_batch(retriever, queries, 20)  # doctest: +SKIP
    >>> [(stage.name, stage.seconds) for stage in timer.stages]  # doctest: +SKIP
    """

    def __init__(self) -> None:
        """Create a timer without stages."""
        # finished stages: first those of the outermost level, then those within each running
        # stage, outermost first
        self._finished_stages: list[list[RetrieverStage]] = [[]]

    @property
    def stages(self) -> tuple[RetrieverStage, ...]:
        """The stages of the latest batch, inner stages first."""
        return tuple(stage for root in self._finished_stages[0] for stage in root.iter_stages())

    def time_batch(self, retriever: SnapshotRetriever, queries: Queries, k: int) -> RankedRows:
        """Measure a search by the outermost retriever.

        The stages of the previous batch are dropped.
        """
        self._finished_stages = [[]]
        return self.time_find(retriever, queries, k)

    def time_find(self, retriever: SnapshotRetriever, queries: Queries, k: int) -> RankedRows:
        """Return `retriever.find(queries, k)`, and record it as a stage of the running search."""
        child_stages: list[RetrieverStage] = []
        self._finished_stages.append(child_stages)
        seconds_before, n_encoders_before = queries.encoding_seconds, len(queries.used_encoders)
        start_time = time.perf_counter()
        try:
            ranked_rows = retriever.find(queries, k)
        finally:
            self._finished_stages.pop()
        elapsed = time.perf_counter() - start_time - (queries.encoding_seconds - seconds_before)
        if retriever.is_stage:
            own_seconds = elapsed - sum(stage.seconds for child in child_stages for stage in child.iter_stages())
            encoders = tuple({id(encoder): encoder for encoder in queries.used_encoders[n_encoders_before:]}.values())
            legs = (*child_stages, *_iter_extra_stages(ranked_rows, child_stages))
            stage = RetrieverStage(retriever.name, ranked_rows, max(own_seconds, 0.0), retriever, encoders, legs)
            self._finished_stages[-1].append(stage)
        else:
            self._finished_stages[-1].extend(child_stages)
        return ranked_rows


def _iter_extra_stages(ranked_rows: RankedRows, child_stages: Sequence[RetrieverStage]) -> Iterator[RetrieverStage]:
    """Yield a stage for each list that no child returned, such as the neighbours in `maxsim`."""
    child_names = {child_stage.name for child_stage in child_stages}
    yield from (
        RetrieverStage(ranked_list.name, ranked_list, 0.0)
        for ranked_list in ranked_rows.legs
        if ranked_list.name not in child_names
    )
