"""Search an inverted index: by the words of queries (BM25), or by the weighted terms of an encoder
(impacts).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_model.corpus.ragged_file import MAX_TERMS as VOCABULARY
from rag_model.corpus.ragged_file import QUERY_UNITS
from rag_model.errors import UsageError
from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.postings import maxscore
from rag_model.index.postings.analyzer import Analyzer
from rag_model.index.postings.base_kind import (
    K1,
    MAX_TERMS,
    SMALL_CACHE_POSTINGS,
    B,
    check_bm25_parameters,
    check_impact_parameters,
)
from rag_model.index.postings.decoded_search import DecodedListCache
from rag_model.index.postings.file import PostingsFile
from rag_model.index.postings.maxscore import IMPACT, Weighting, create_bm25_weighting
from rag_model.index.postings.part import encode_term_ids
from rag_model.index.postings.selective_search import SelectiveSearch
from rag_model.index.recipe import check_depth

Ints = npt.NDArray[np.int64]
_MAX_CACHED_TERMS = 100_000  # maximum number of terms whose lists' locations an index caches
_SCORE_UNITS = float(1 << 32)  # score units in a BM25 score of 1
_MAX_QUERY_WEIGHT = 1e6  # maximum weight of a query's term, so that sums fit into 63 bits


@dataclass(frozen=True, slots=True)
class QueryTerms:
    """The terms of a batch of queries, concatenated."""

    # (t, 3) number of postings, start and end of each term's list; 0 if no passage has the term
    lists: Ints
    # (t,) factor of each term, above 0, in score units; it is multiplied by a contribution
    factors: npt.NDArray[np.float64]
    ends: Ints  # (q,) end of each query's terms

    def slice_queries(self, first: int, last: int) -> "QueryTerms":
        """Return the terms of the queries [first, last)."""
        begin, end = int(self.ends[first - 1]) if first else 0, int(self.ends[last - 1])
        return QueryTerms(self.lists[begin:end], self.factors[begin:end], self.ends[first:last] - begin)


class PostingsIndex:
    """Exact search of an inverted index. A subclass defines the terms of queries and their
    weighting.
    """

    def __init__(self, file: PostingsFile) -> None:
        """Create a searcher of an open index file."""
        self.file = file
        self._list_cache = DecodedListCache(self.file)
        self._term_cache: dict[bytes, list[int]] = {}  # term -> its row of `find_lists`
        self._completed_ends: dict[int, int] = {}  # `completed_ends` of every `SelectiveSearch`
        self.n = self.file.layout.n

    def rank(
        self, query_terms: QueryTerms, k: int, weighting: Weighting, units_per_score: float, *, skip: bool = True
    ) -> tuple[Vectors, Rows]:
        """Return the k best rows of each query, best first: (q, k) float32 scores, (q, k) int64
        rows.

        A hit has at least one term of the query. If there are fewer than k hits, the remaining rows
        are -1 with score -inf. Equal scores are ordered by row.

        Args:
            query_terms: the terms of all queries.
            k: 1 <= k <= n.
            weighting: the weighting of the postings.
            units_per_score: number of score units, as in `factors`, in a score of 1.
            skip: False reads every posting, with the same result.

        Raises:
            InputError: the file is damaged.
        """
        shape = len(query_terms.ends), k
        scores, hit_rows = np.full(shape, -np.inf, np.float32), np.full(shape, -1, np.int64)
        if len(query_terms.ends):
            units, best_rows = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
            with self.file.hold_ranges():
                hit_counts = self._search_ranges(query_terms, weighting, skip, units, best_rows)
            is_hit = np.arange(k) < hit_counts[:, None]  # (q, k)
            scores[is_hit], hit_rows[is_hit] = units[is_hit] / units_per_score, best_rows[is_hit]
        return scores, hit_rows

    def use_small_cache(self) -> None:
        """Cache fewer decoded lists, for a few hundred queries. The results are the same."""
        self._list_cache = DecodedListCache(self.file, SMALL_CACHE_POSTINGS)

    def find_lists(self, terms: list[bytes]) -> Ints:
        """Return (t, 3): the number of postings, the start and the end of each term's list.

        The number of postings is 0 if no passage has the term.

        Raises:
            InputError: the file is damaged.
        """
        term_cache = self._term_cache
        new_terms = [term for term in terms if term not in term_cache]
        if len(term_cache) + len(new_terms) > _MAX_CACHED_TERMS:
            term_cache, new_terms = {}, terms
            self._term_cache = term_cache  # not cleared, because running searches use the old one
        if new_terms:
            term_cache |= zip(new_terms, self.file.find_terms(new_terms).tolist(), strict=True)
        list_entries = np.array([term_cache[term] for term in terms], np.int64).reshape(-1, 3)
        if list_entries.min(initial=0) < 0 or list_entries[:, 0].max(initial=0) > self.n:
            raise self.file.create_damage_error()
        return list_entries

    def _search_ranges(
        self, query_terms: QueryTerms, weighting: Weighting, skip: bool, scores: Ints, rows: Ints
    ) -> Ints:
        """Load the ranges that the queries read, in up to two rounds of requests; then search like
        `_fill_best`.
        """
        if self.file.is_whole or not skip:
            self.file.load_lists(query_terms.lists[query_terms.lists[:, 0] > 0, 1:])
            return self._fill_best(query_terms, weighting, skip, scores, rows)
        decoded_arguments = query_terms.lists, query_terms.factors, query_terms.ends, weighting, scores, rows
        decoded_sizes = self._list_cache.search(*decoded_arguments, may_decode=False)
        if decoded_sizes is not None:
            return decoded_sizes
        terms_by_query = [query_terms.slice_queries(i, i + 1) for i in range(len(query_terms.ends))]
        searches = [
            SelectiveSearch(self.file, terms.lists, terms.factors, scores.shape[1], self._completed_ends)
            for terms in terms_by_query
        ]
        self.file.load_lists([span for search in searches for span in search.list_first_ranges()])
        selective_searches = [search for search in searches if search.is_optional.any()]
        if not selective_searches:
            return self._fill_best(query_terms, weighting, skip, scores, rows)
        self.file.load_lists([span for search in selective_searches for span in search.find_candidates(weighting)])
        hit_counts = np.empty(len(searches), np.int64)
        for i, (search, terms) in enumerate(zip(searches, terms_by_query, strict=True)):
            n_hits = search.rank(weighting, scores[i], rows[i])
            query = slice(i, i + 1)
            hit_counts[query] = (
                self._fill_best(terms, weighting, skip, scores[query], rows[query]) if n_hits is None else n_hits
            )
        return hit_counts

    def _fill_best(self, query_terms: QueryTerms, weighting: Weighting, skip: bool, scores: Ints, rows: Ints) -> Ints:
        """Fill in the best scores, in score units, and rows of each query.

        Return the number of hits of each query.
        """
        if skip and self._list_cache.has_capacity(query_terms.lists):
            hit_counts = self._list_cache.search(
                query_terms.lists, query_terms.factors, query_terms.ends, weighting, scores, rows
            )
            if hit_counts is None:
                raise self.file.create_damage_error()
            return hit_counts
        if len(query_terms.ends) > 1:  # the lists of half of the queries may fit into the cache
            n_half = len(query_terms.ends) // 2
            halves = (
                (query_terms.slice_queries(0, n_half), slice(n_half)),
                (query_terms.slice_queries(n_half, len(query_terms.ends)), slice(n_half, None)),
            )
            return np.concatenate(
                [
                    self._fill_best(half_terms, weighting, skip, scores[queries], rows[queries])
                    for half_terms, queries in halves
                ]
            )
        has_postings, file = query_terms.lists[:, 0] > 0, self.file
        lists, factors = query_terms.lists[has_postings], query_terms.factors[has_postings]
        if not len(lists):
            return np.zeros(1, np.int64)
        n_hits: int = maxscore.search(
            file.lists,
            file.layout.lists_bytes,
            file.lengths,
            lists,
            factors,
            weighting,
            scores.shape[1],
            skip,
            scores[0],
            rows[0],
        )
        if n_hits == maxscore.DAMAGED:
            raise file.create_damage_error()
        return np.array([n_hits])


class Bm25Index(PostingsIndex):
    """A `TextIndex` that ranks by BM25.

        score(q, d) = Σ_t c(t, q) · idf(t) · tf / (tf + k1 (1 - b + b · dl / avgdl))
        idf(t) = ln(1 + (N - df + .5) / (df + .5))

    over the terms t of the query, which contains t c(t, q) times: Robertson and Zaragoza 2009
    without the constant factor k1 + 1, and with the idf of Lucene, which is never negative. N, df
    and avgdl refer to the whole corpus.
    """

    def __init__(self, file: PostingsFile, analyzer: Analyzer, defaults: Mapping[str, float]) -> None:
        """Create a searcher of an open index file.

        Args:
            file: the file of the index.
            analyzer: the analyzer that the passages were indexed with.
            defaults: `k1` and `b` of searches without these parameters.

        Raises:
            InputError: the file is an index of weighted terms.
        """
        super().__init__(file)
        if self.file.layout.scale:
            raise self.file.create_content_error("weighted terms, and not of words")
        self._analyzer = analyzer
        self.defaults = {"k1": K1, "b": B, **defaults}

    def search(self, queries: Sequence[str], k: int, **parameters: Any) -> tuple[Vectors, Rows]:
        """Return the k best rows of each query, best first: (q, k) float32 scores, (q, k) int64
        rows.

        A hit has at least one term of the query. If there are fewer than k hits, the remaining rows
        are -1 with score -inf. Equal scores are ordered by row.

        Args:
            queries: texts.
            k: 1 <= k <= n.
            parameters: `k1` >= 0 and 0 <= `b` <= 1; and `skip`: False reads every posting, with the
                same result.

        Raises:
            InputError: the file is damaged.
            UsageError: `k` or a parameter is wrong, or a query has too many terms.
        """
        check_depth(k, self.n)
        skip = bool(parameters.pop("skip", True))
        check_bm25_parameters(parameters)
        settings = self.defaults | parameters
        weighting = create_bm25_weighting(settings["k1"], settings["b"], self.file.mean_length)
        return self.rank(self._analyze_queries(queries), k, weighting, _SCORE_UNITS, skip=skip)

    def search_exhaustively(self, queries: Sequence[str], k: int, **parameters: Any) -> Rows:
        """Return the rows of `search` without skipping postings, (q, k) int64."""
        return self.search(queries, k, skip=False, **parameters)[1]

    def find_missing_terms(self, text: str) -> list[str]:
        """Return those terms of a text that occur in no passage."""
        terms = list(dict.fromkeys(self._analyzer.terms(text)))
        return [term.decode() for term, n in zip(terms, self.find_lists(terms)[:, 0], strict=True) if n < 1]

    def _analyze_queries(self, queries: Sequence[str]) -> QueryTerms:
        term_counts_by_query = [Counter(self._analyzer.terms(query)) for query in queries]
        for query_number, term_counts in enumerate(term_counts_by_query, start=1):
            if len(term_counts) > MAX_TERMS:
                raise UsageError(
                    f"question {query_number} has {len(term_counts):,} different words: ask with up to {MAX_TERMS:,}"
                )
        ends = np.cumsum([len(term_counts) for term_counts in term_counts_by_query], dtype=np.int64)
        term_lists = self.find_lists([term for term_counts in term_counts_by_query for term in term_counts])
        term_frequencies = np.fromiter(
            (n for term_counts in term_counts_by_query for n in term_counts.values()), np.float64, len(term_lists)
        )
        idf = np.log1p((self.n - term_lists[:, 0] + 0.5) / (term_lists[:, 0] + 0.5))
        return QueryTerms(term_lists, idf * term_frequencies * _SCORE_UNITS, ends)


class ImpactIndex(PostingsIndex):
    """A `SparseIndex`: score(q, d) = Σ_t w(t, q) · w(t, d) over the terms that query and passage
    share.

    The weights are integers: one byte for passages, and multiples of 1/4096 for queries. So
    scores are integers too, and skipping postings does not change them.
    """

    def __init__(self, file: PostingsFile, defaults: Mapping[str, int]) -> None:
        """Create a searcher of an open file; `defaults` apply to searches without parameters.

        Raises:
            InputError: the file is a BM25 index.
        """
        super().__init__(file)
        if not self.file.layout.scale:
            raise self.file.create_content_error("words, and not of weighted terms")
        self.defaults = dict(defaults)

    def search(self, queries: Vectors, k: int, **parameters: Any) -> tuple[Vectors, Rows]:
        """Return the k best rows of each query, best first: (q, k) float32 scores, (q, k) int64
        rows.

        A hit has at least one term of the query. If there are fewer than k hits, the remaining rows
        are -1 with score -inf. Equal scores are ordered by row.

        Args:
            queries: (q, l, 2) float32 terms and weights, as a `SparseEncoder` returns them; terms
                with weight 0 are padding.
            k: 1 <= k <= n.
            parameters: `terms`, the number of terms with the largest weights that are looked up;
                and `skip`: False reads every posting, with the same result.

        Raises:
            InputError: the file is damaged.
            UsageError: `k` or a parameter is wrong, or a query has invalid terms or weights.
        """
        check_depth(k, self.n)
        skip = bool(parameters.pop("skip", True))
        check_impact_parameters(parameters)
        query_terms = self._look_up_queries(queries, parameters.get("terms"))
        return self.rank(query_terms, k, IMPACT, QUERY_UNITS * self.file.layout.scale, skip=skip)

    def select_terms(self, queries: Vectors, max_terms: int | None = None) -> tuple[Ints, Ints]:
        """Return the terms to look up and their weights in multiples of 1/4096, both (q, l) int64.

        Padding has weight 0.

        Raises:
            UsageError: a query has invalid terms or weights.
        """
        terms, query_units = quantize_queries(queries)
        max_terms = max_terms or self.defaults.get("terms")
        if max_terms is None:
            return terms, query_units
        order = np.lexsort((terms, -query_units))[:, :max_terms]
        return np.take_along_axis(terms, order, 1), np.take_along_axis(query_units, order, 1)

    def _look_up_queries(self, queries: Vectors, max_terms: int | None) -> QueryTerms:
        terms, units = self.select_terms(queries, max_terms)
        has_weight = units > 0  # (q, l)
        counts = has_weight.sum(axis=1, dtype=np.int64)
        if counts.max(initial=0) > MAX_TERMS:
            raise UsageError(f"question {counts.argmax() + 1} has {counts.max():,} terms: ask with up to {MAX_TERMS:,}")
        return QueryTerms(
            self.find_lists(encode_term_ids(terms[has_weight])), units[has_weight].astype(np.float64), np.cumsum(counts)
        )


def quantize_queries(queries: Vectors) -> tuple[Ints, Ints]:
    """Return the terms of queries and their weights in multiples of 1/4096, both (q, l) int64.

    Padding has weight 0.

    Raises:
        UsageError: a term is not the number of a vocabulary entry, or a weight is negative, not
            finite or too large.
    """
    if queries.ndim != 3 or queries.shape[2] != 2:
        raise UsageError(f"questions of shape {queries.shape} are not weighted terms: use a sparse encoder")
    terms, weights = queries[..., 0].astype(np.float64), queries[..., 1].astype(np.float64)
    is_valid = (
        (terms >= 0)
        & (terms < VOCABULARY)
        & (terms == np.floor(terms))
        & (weights >= 0)
        & (weights < _MAX_QUERY_WEIGHT)
    )
    if not is_valid.all():
        raise UsageError(
            f"question {int((~is_valid).any(axis=1).argmax()) + 1} has a term or a weight out of range: encode it again"
        )
    weight_units = np.where(weights > 0, np.maximum(1, np.rint(weights * QUERY_UNITS)), 0)
    return terms.astype(np.int64), weight_units.astype(np.int64)
