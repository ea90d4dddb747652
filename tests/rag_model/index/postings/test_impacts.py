"""Impact search equals a dense integer product, with and without skipping, however the corpus is divided."""

import struct
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.corpus.ragged_file import QUERY_UNITS, SparseVectors
from rag_model.errors import InputError, UsageError
from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.kind import IndexFiles, SparseQuerySet, get_kind_for_factory
from rag_model.index.postings import decoded_search
from rag_model.index.postings import merge as merging
from rag_model.index.postings.analyzer import Analyzer
from rag_model.index.postings.file import LENGTHS_OFFSET, PostingsFile
from rag_model.index.postings.impact import KIND
from rag_model.index.postings.search import Bm25Index, ImpactIndex
from rag_model.index.recipe import IndexRecipe
from rag_model.training.data.examples import build_passage
from tests.fixtures.bm25_index import build_bm25
from tests.fixtures.impact_index import SCALE, build_impact_index, draw_passages, draw_queries, write_rows

DIM = 1_000
BITS = {"Impact": 8, "Impact1": 1}


@cache
def corpus() -> SparseVectors:
    return draw_passages(6_000, DIM, 40)


@pytest.fixture(scope="module", params=BITS)
def index(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ImpactIndex:
    return build_impact_index(corpus(), tmp_path_factory.mktemp("i"), DIM, [700, 1, 0, 900], request.param)


def to_dense(rows: SparseVectors, dim: int, *, bag: bool = False) -> np.ndarray:
    """Return the rows as (n, dim) integers."""
    table = np.zeros((len(rows), dim), np.int64)
    owners = np.repeat(np.arange(len(rows)), np.diff(rows.offsets))
    table[owners, rows.terms] = 1 if bag else rows.weights
    return table


def search_exactly(index: ImpactIndex, queries: Vectors, k: int) -> tuple[np.ndarray, Rows]:
    """Return the scores of all rows as (q, n) integers, and the k best rows; ties by row."""
    bag = index.file.layout.scale == 1
    table = to_dense(corpus(), DIM, bag=bag)
    units = np.zeros((len(queries), DIM), np.int64)
    weights = np.rint(queries[..., 1] * QUERY_UNITS).astype(np.int64)
    np.put_along_axis(units, queries[..., 0].astype(np.int64), weights, 1)
    sums = units @ table.T
    return sums, np.argsort(-sums, axis=1, kind="stable")[:, :k]


@pytest.mark.parametrize("terms", [1, 3, 30, 768])
@pytest.mark.parametrize("cached", ["all", "some", "none"])
def test_scores_are_a_dense_product_with_and_without_skipping(
    index: ImpactIndex, terms: int, cached: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoded_search, "MAX_CACHED_ROWS", 0 if cached == "none" else 1 << 22)
    monkeypatch.setattr(decoded_search, "MAX_CACHED_POSTINGS", 30_000 if cached == "some" else 1 << 23)
    reopened, queries = ImpactIndex(PostingsFile(index.file.path), {}), draw_queries(8, DIM, terms)
    sums, expected_rows = search_exactly(index, queries, 20)
    scores, rows = reopened.search(queries, 20)
    expected_sums = np.take_along_axis(sums, expected_rows, 1)
    assert np.array_equal(np.where(expected_sums > 0, expected_rows, -1), rows)
    expected_scores = (expected_sums / (QUERY_UNITS * index.file.layout.scale)).astype(np.float32)
    assert np.array_equal(expected_scores[expected_sums > 0], scores[rows >= 0])
    all_scores, all_rows = reopened.search(queries, 20, skip=False)
    assert np.array_equal(all_scores, scores)
    assert np.array_equal(all_rows, rows)


def test_results_across_windows_of_rows_do_not_depend_on_skipping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build_impact_index(draw_passages(30_000, 4_000, 8), tmp_path, 4_000).file.path
    for max_words in (0.25, 0.0):  # with and without bits of rows
        monkeypatch.setattr(decoded_search, "_MAX_WORDS_PER_POSTING", max_words)
        index = ImpactIndex(PostingsFile(path), {})
        assert index.n > 3 * decoded_search.WINDOW_ROWS
        for terms, k in ((2, 1), (6, 10), (30, 100), (100, 5_000)):
            queries = draw_queries(12, 4_000, terms)
            scores, rows = index.search(queries, k)
            all_scores, all_rows = index.search(queries, k, skip=False)
            assert np.array_equal(scores, all_scores)
            assert np.array_equal(rows, all_rows)


def test_a_bag_counts_shared_terms(tmp_path: Path) -> None:
    bag = build_impact_index(corpus(), tmp_path, DIM, factory="Impact1")
    queries = draw_queries(5, DIM, 60)
    queries[..., 1] = 1
    scores, rows = bag.search(queries, 10)
    for query, query_scores, query_rows in zip(queries, scores, rows, strict=True):
        terms = set(query[:, 0].astype(int).tolist())
        for score, row in zip(query_scores.tolist(), query_rows.tolist(), strict=True):
            assert score == len(terms & set(corpus().take(np.array([row])).terms.tolist()))


def test_parameter_terms_keeps_only_the_heaviest_terms(index: ImpactIndex) -> None:
    queries = draw_queries(6, DIM, 50)
    limited = index.search(queries, 10, terms=5)
    np.testing.assert_array_equal(limited, index.search(queries[:, :5], 10))
    default = ImpactIndex(PostingsFile(index.file.path), {"terms": 5}).search(queries, 10)
    np.testing.assert_array_equal(default[1], limited[1])


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 300), max_size=4), st.sampled_from(sorted(BITS)), st.integers(0, 3))
def test_division_into_parts_does_not_change_bytes(tmp_path: Path, sizes: list[int], factory: str, seed: int) -> None:
    rows = draw_passages(300, 200, 30, seed)
    undivided = build_impact_index(rows, tmp_path / "whole", 200, factory=factory).file.path.read_bytes()
    assert build_impact_index(rows, tmp_path / "parts", 200, sizes, factory).file.path.read_bytes() == undivided


def test_batch_size_of_the_merge_does_not_change_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = draw_passages(2_000, 50, 30)
    undivided = build_impact_index(rows, tmp_path / "whole", 50).file.path.read_bytes()
    for name in ("_BATCH_POSTINGS", "_READ_AHEAD"):
        monkeypatch.setattr(merging, name, 200)
    for name in ("_BATCH_POSTINGS_PER_PART", "_MIN_READ_AHEAD", "_FULL_TERMS_PER_BATCH"):
        monkeypatch.setattr(merging, name, 1)
    monkeypatch.setattr(merging, "_WINDOW_TERMS", 7)
    assert build_impact_index(rows, tmp_path / "parts", 50, [3, 999]).file.path.read_bytes() == undivided


def test_questions_without_a_known_term_find_nothing(index: ImpactIndex) -> None:
    queries = np.array([[[DIM + 5, 2.0], [0, 0.0]]], np.float32)
    scores, rows = index.search(queries, 3)
    assert (rows.tolist(), scores.tolist()) == ([[-1] * 3], [[-np.inf] * 3])
    assert index.search(np.empty((0, 4, 2), np.float32), 3)[1].shape == (0, 3)


@pytest.mark.parametrize(
    ("queries", "parameters", "message"),
    [
        (np.ones((1, 2), np.float32), {}, r"questions of shape \(1, 2\) are not weighted terms: use a sparse"),
        (np.array([[[1.5, 1]]], np.float32), {}, "question 1 has a term or a weight out of range: encode it again"),
        (np.array([[[1, 1]], [[1, np.nan]]], np.float32), {}, "question 2 has a term or a weight out of range"),
        (np.ones((1, 10_001, 2), np.float32), {}, "question 1 has 10,001 terms: ask with up to 10,000"),
        (draw_queries(1, DIM, 2), {"terms": 0}, "terms is 0: give a whole number from 1 to 10,000"),
        (draw_queries(1, DIM, 2), {"k1": 1}, "k1 is not a search parameter of this index: it takes terms"),
    ],
)
def test_wrong_questions_are_refused(
    index: ImpactIndex, queries: Vectors, parameters: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        index.search(queries, 3, **parameters)
    with pytest.raises(UsageError, match="k is 0 but the index holds 6,000 passages"):
        index.search(queries, 0)


def test_words_and_impacts_are_not_mistaken_for_each_other(index: ImpactIndex, tmp_path: Path) -> None:
    words = build_bm25([build_passage("", "pigs fly")] * 3, tmp_path)
    assert struct.unpack_from("<q", words.file.path.read_bytes(), LENGTHS_OFFSET - 8) == (0,), (
        "older releases wrote 0 too"
    )
    with pytest.raises(InputError, match="is an index of words, and not of weighted terms: fetch or build it again"):
        ImpactIndex(PostingsFile(words.file.path), {})
    with pytest.raises(InputError, match="is an index of weighted terms, and not of words: fetch or build it again"):
        Bm25Index(PostingsFile(index.file.path), Analyzer(), {})


def test_damaged_file_is_refused_or_gives_valid_rows(index: ImpactIndex, tmp_path: Path) -> None:
    data, rng, queries = index.file.path.read_bytes(), np.random.default_rng(3), draw_queries(4, DIM, 40)
    path, n_refused = tmp_path / "bad.postings", 0
    for _ in range(40):
        damaged = bytearray(data)
        for offset in rng.integers(LENGTHS_OFFSET, len(data), 30):
            damaged[offset] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            assert ImpactIndex(PostingsFile(path), {}).search(queries, 10)[1].max() < len(corpus())
        except InputError:
            n_refused += 1
    assert n_refused


@pytest.mark.parametrize("factory", BITS)
def test_the_gate_compares_with_the_passages_own_weights(factory: str, tmp_path: Path) -> None:
    rows = draw_passages(300, 200, 30)
    index = build_impact_index(rows, tmp_path, 200, [100], factory)
    entry = KIND.plan(IndexRecipe(factory, search={"terms": 12}), 300, 200).entry()
    query_set = SparseQuerySet(draw_queries(6, 200, 20), 5, np.arange(6))

    def get_index_files(vectors: SparseVectors) -> IndexFiles:
        return IndexFiles(index.file.path, lambda: write_rows(vectors, [7], tmp_path / "others", 200), 300)

    result = KIND.measure(get_index_files(rows), entry, query_set)
    assert result.recalls.tolist() == [1] * 6
    assert result.metrics["terms_a_passage"] == round(len(rows.terms) / 300, 1)
    with pytest.raises(InputError, match="differ from those of the passages: build it again"):
        KIND.measure(get_index_files(draw_passages(300, 200, 30, seed=4)), entry, query_set)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"settings": {"bits": 2}}, "settings do not apply to Impact: leave them out"),
        ({"search": {"terms": "many"}}, "terms is 'many': give a whole number"),
        ({"recall_target": 0.9}, "recall_target does not apply to Impact"),
    ],
)
def test_wrong_settings_are_refused(recipe: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        IndexRecipe("Impact", **recipe)  # type: ignore[arg-type]


def test_parts_of_several_scales_are_refused(tmp_path: Path) -> None:
    rows = draw_passages(10, 50, 5)
    mixed = [*write_rows(rows, [], tmp_path / "a", 50), *write_rows(rows, [], tmp_path / "b", 50, SCALE * 2)]
    with pytest.raises(InputError, match=r"the parts' weights have the scales \[64, 128\]: encode all parts with one"):
        KIND.scale(KIND.plan(IndexRecipe("Impact"), 20, 50), mixed)
    assert get_kind_for_factory("Impact") is KIND
