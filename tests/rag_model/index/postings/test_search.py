"""BM25 scores equal those of bm25s, with and without skipping, however the corpus is divided into parts."""

import random
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import IO

import bm25s
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.corpus.records import Passage
from rag_model.errors import InputError, UsageError
from rag_model.index.files.pieces import Array
from rag_model.index.postings import decoded_search, maxscore, search, selective_search
from rag_model.index.postings import merge as merging
from rag_model.index.postings.analyzer import Analyzer
from rag_model.index.postings.base_kind import estimate_decoded_bytes
from rag_model.index.postings.file import PostingsFile, TermBatch, write_index
from rag_model.index.postings.lucene_analyzer import LuceneAnalyzer
from rag_model.index.postings.part import PartReader
from rag_model.index.postings.search import Bm25Index
from rag_model.ranges import BlockLayout, CachedFile, RangeCache, digest_blocks
from rag_model.training.data.examples import build_passage
from tests.fixtures.bm25_index import build_bm25
from tests.fixtures.work_counters import measure_peaks

WORDS = [f"w{number}" for number in range(400)]
COMMON = ["the", "of", "a"]


def zipfian(count: int, seed: int = 0) -> list[Passage]:
    """Return passages of words whose frequencies fall as 1 / rank; most passages have two of three common words."""
    rng = random.Random(seed)
    weights = [1 / rank for rank in range(1, len(WORDS) + 1)]
    passages = []
    for number in range(count):
        words = rng.choices(WORDS, weights, k=rng.randint(1, 40)) + rng.sample(COMMON, 2) * rng.randint(0, 2)
        passages.append(build_passage(f"t{number % 7}", " ".join(words)))
    return passages


def draw_questions(count: int) -> list[str]:
    rng = random.Random(count)
    return [" ".join(rng.choices([*WORDS, *COMMON, "unheard"], k=rng.randint(1, 9))) for _ in range(count)]


@cache
def corpus() -> list[Passage]:
    return zipfian(3_000)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Bm25Index:
    return build_bm25(corpus(), tmp_path_factory.mktemp("words"), [700, 1, 0, 900])


def bm25s_scores(
    passages: Sequence[Passage], questions: Sequence[str], k1: float, b: float, analyzer: Analyzer
) -> np.ndarray:

    def terms(text: str) -> list[str]:
        return [term.decode() for term in analyzer.terms(text)]

    oracle = bm25s.BM25(method="lucene", k1=k1, b=b)
    oracle.index([terms(f"{passage.title} {passage.text}") for passage in passages], show_progress=False)
    vocabulary = set(oracle.vocab_dict)
    known_terms = [[term for term in terms(question) if term in vocabulary] for question in questions]
    return np.array([oracle.get_scores(question_terms) for question_terms in known_terms])


@pytest.mark.parametrize(("k1", "b"), [(0.9, 0.4), (1.5, 0.75), (0.0, 0.0), (2.0, 1.0)])
def test_scores_are_those_of_bm25s(index: Bm25Index, k1: float, b: float) -> None:
    questions = draw_questions(60)
    all_expected = bm25s_scores(corpus(), questions, k1, b, Analyzer())
    scores, rows = index.search(questions, 25, k1=k1, b=b)
    for expected, hit_rows, hit_scores in zip(all_expected, rows, scores, strict=True):
        is_hit = hit_rows >= 0
        np.testing.assert_allclose(hit_scores[is_hit], expected[hit_rows[is_hit]], rtol=1e-5)
        best = np.sort(expected)[::-1][: len(hit_rows)]
        np.testing.assert_allclose(hit_scores[is_hit], best[best > 0], rtol=1e-5)


def test_scores_of_the_analyzer_lucene_are_those_of_bm25s(tmp_path: Path) -> None:
    """bm25s's `lucene` is Lucene's equation, with exact lengths."""
    inflected = [replace(passage, text=f"{passage.text} It isn't running.") for passage in corpus()[:500]]
    lucene = build_bm25(inflected, tmp_path, [200], analyzer="lucene")
    questions = [*draw_questions(40), "Is it run?", "it's"]
    all_expected = bm25s_scores(inflected, questions[:-1], 0.9, 0.4, LuceneAnalyzer())
    scores, rows = lucene.search(questions, 25)
    for expected, hit_rows, hit_scores in zip(all_expected, rows[:-1], scores[:-1], strict=True):
        best = np.sort(expected)[::-1][: len(hit_rows)]
        np.testing.assert_allclose(hit_scores[hit_rows >= 0], best[best > 0], rtol=1e-5)
    assert (rows[-1] == -1).all(), "a stop word finds nothing"


@pytest.mark.parametrize("cached", ["all", "some", "none"])
@pytest.mark.parametrize("k", [1, 10, 300, 3_000])
def test_skipping_changes_nothing(index: Bm25Index, k: int, cached: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoded_search, "MAX_CACHED_ROWS", 0 if cached == "none" else 1 << 22)
    monkeypatch.setattr(decoded_search, "MAX_CACHED_POSTINGS", 3_000 if cached == "some" else 1 << 23)
    reopened, questions = Bm25Index(PostingsFile(index.file.path), Analyzer(), {}), draw_questions(40)
    for parameters in ({}, {"k1": 3.0, "b": 0.9}, {"k1": 1000.0, "b": 1.0}):
        hits = reopened.search(questions, k, **parameters)
        exhaustive = reopened.search(questions, k, skip=False, **parameters)
        np.testing.assert_array_equal(hits[1], exhaustive[1])
        np.testing.assert_array_equal(hits[0], exhaustive[0])


def test_the_memory_of_decoded_lists_is_the_estimated_memory() -> None:
    arrays = decoded_search.DecodedLists(maxscore.IMPACT, 1 << 16).arrays
    assert sum(array.nbytes for array in arrays) == pytest.approx(estimate_decoded_bytes(1, 1 << 30, 1 << 16), rel=0.01)


@cache
def open_with_cache(path: Path, small_cache: bool, results: Path) -> Bm25Index:
    """Open the index that is searched for `results`, before the memory of the search is measured."""
    search.SMALL_CACHE_POSTINGS = 3_000
    index = Bm25Index(PostingsFile(path), Analyzer(), {})
    if small_cache:
        index.use_small_cache()
    return index


def search_with_cache(path: Path, small_cache: bool, results: Path) -> None:
    index = open_with_cache(path, small_cache, results)
    np.save(results, [index.search([question], 10) for question in draw_questions(60)])


def test_small_cache_gives_the_same_hits_in_less_memory(index: Bm25Index, tmp_path: Path) -> None:
    names = {"warm-up.npy": False, "default.npy": False, "small.npy": True}
    cases = [(index.file.path, small_cache, tmp_path / name) for name, small_cache in names.items()]
    *_, default_peak, small_peak = measure_peaks(*(partial(call, *case) for call in (open_with_cache, search_with_cache)
                                     for case in cases))  # fmt: skip
    np.testing.assert_array_equal(np.load(tmp_path / "small.npy"), np.load(tmp_path / "default.npy"))
    assert small_peak < 0.8 * default_peak, (small_peak, default_peak)


def test_threads_share_cached_lists(index: Bm25Index) -> None:
    shared_index, questions = Bm25Index(PostingsFile(index.file.path), Analyzer(), {}), draw_questions(60)
    expected = index.search(questions, 10)
    with ThreadPoolExecutor(4) as pool:
        for hits in pool.map(lambda number: shared_index.search(questions[number % 7 :], 10), range(40)):
            first = len(questions) - len(hits[0])
            np.testing.assert_array_equal(hits[1], expected[1][first:])


def test_equal_scores_are_in_the_order_of_rows(tmp_path: Path) -> None:
    index = build_bm25(
        [build_passage("", "pig farm"), build_passage("", "x"), *[build_passage("", "farm pig")] * 400], tmp_path
    )
    rows = index.search(["farm pig farm"], 300)[1][0]
    assert rows.tolist() == [0, *range(2, 301)]


def test_repeated_word_counts_twice(index: Bm25Index) -> None:
    once, twice = index.search(["w300", "w300 w300"], 3)[0]
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-6)


@given(sizes=st.lists(st.integers(0, 60), max_size=5), seed=st.integers(0, 3))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_division_into_parts_gives_the_same_bytes(sizes: list[int], seed: int, tmp_path: Path) -> None:
    passages = zipfian(120, seed)
    undivided, divided = build_bm25(passages, tmp_path / "one"), build_bm25(passages, tmp_path / "many", sizes)
    assert undivided.file.path.read_bytes() == divided.file.path.read_bytes()


def test_batch_size_of_the_merge_does_not_change_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passages = zipfian(900)
    undivided = build_bm25(passages, tmp_path / "one")
    for name in ("_BATCH_POSTINGS", "_READ_AHEAD"):
        monkeypatch.setattr(merging, name, 200)
    for name in ("_BATCH_POSTINGS_PER_PART", "_MIN_READ_AHEAD", "_FULL_TERMS_PER_BATCH"):
        monkeypatch.setattr(merging, name, 1)
    monkeypatch.setattr(merging, "_WINDOW_TERMS", 7)
    steps = build_bm25(passages, tmp_path / "many", [300, 5, 400])
    assert undivided.file.path.read_bytes() == steps.file.path.read_bytes()


def test_a_part_is_read_once_however_many_batches_ask_for_its_postings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch asks each part, so these requests must not read the file."""
    monkeypatch.setattr(merging, "_BATCH_POSTINGS", 200)
    monkeypatch.setattr(merging, "_BATCH_POSTINGS_PER_PART", 1)
    read_parts, batch_sizes = list[str](), list[int]()
    read_postings, concatenate = PartReader.read_postings, merging._concatenate

    def record_read(self: PartReader, first: int, last: int) -> tuple[Array, Array]:
        read_parts.extend([self._name] * (last > first))
        return read_postings(self, first, last)

    monkeypatch.setattr(PartReader, "read_postings", record_read)
    monkeypatch.setattr(merging, "_concatenate", lambda a: (batch_sizes.append(len(a)), concatenate(a))[1])
    build_bm25(zipfian(900), tmp_path, [300, 5, 400])
    assert len(read_parts) == len(set(read_parts)) == 4
    assert len(batch_sizes) > 20  # batches


def test_questions_without_known_words_find_nothing(index: Bm25Index) -> None:
    scores, rows = index.search(["unheard", "?!", "👩‍🚀", "w1"], 2)
    assert rows[:3].tolist() == [[-1, -1]] * 3
    assert (scores[:3] == -np.inf).all()
    assert (rows[3] >= 0).all()
    assert index.search(["?!"], 2)[1].tolist() == [[-1, -1]]
    assert index.search([], 2)[1].shape == (0, 2)


def test_long_questions_are_searched_up_to_a_bound(index: Bm25Index) -> None:
    assert (index.search([" ".join(WORDS * 250)], 5)[1] >= 0).all()  # 100,000 words
    with pytest.raises(UsageError, match="question 2 has 10,001 different words: ask with up to 10,000"):
        index.search(["w1", " ".join(f"v{number}" for number in range(10_001))], 5)


def test_wrong_parameters_are_refused(index: Bm25Index) -> None:
    with pytest.raises(UsageError, match=r"k1 of BM25 is -1: give a number from 0 to 1000"):
        index.search(["w1"], 1, k1=-1)
    with pytest.raises(UsageError, match="b of BM25 is True"):
        index.search(["w1"], 1, b=True)
    with pytest.raises(UsageError, match="z is not a search parameter of BM25: it takes k1 and b"):
        index.search(["w1"], 1, z=1)
    with pytest.raises(UsageError, match="ask for 1 to 3000"):
        index.search(["w1"], 3_001)


def test_damaged_file_is_refused_or_gives_valid_rows(index: Bm25Index, tmp_path: Path) -> None:
    """Damage gives an error or rows of the corpus; it never ends the process."""
    data, rng, questions = index.file.path.read_bytes(), random.Random(1), draw_questions(12)
    layout, n_refused = index.file.layout, 0
    for number in range(150):
        damaged = bytearray(data)
        offset = (
            rng.randrange(72 if number % 3 else 0, len(data))
            if number % 2
            else rng.randrange(layout.dictionary_offset, len(data))
        )
        damaged[offset : offset + 8] = rng.randbytes(8)[: len(damaged) - offset]
        path = tmp_path / "bad.postings"
        path.write_bytes(damaged)
        try:
            max_row = Bm25Index(PostingsFile(path), Analyzer(), {}).search(questions, 10)[1].max()
        except InputError:
            n_refused += 1
        else:
            assert max_row < index.n
    assert n_refused > 10


# A block of 3 postings: widths of 32 and 0 bits, then gaps minus 1. Its rows are 0, 2^32 - 2 and 2^32 + 2.
BEYOND = bytes([32, 0]) + struct.pack("<3I", 0, 2**32 - 3, 3)


@pytest.mark.parametrize(
    ("postings", "data"),
    [
        (3, BEYOND),
        (1, bytes([128] * 5 + [32])),  # row 2^39, of which four bytes are 0
        (1, bytes([3, *[255] * 8, 127])),  # a weight of more than 63 bits
        (1 << 62, BEYOND),
        ((1 << 63) - 1, BEYOND),
    ],
)
def test_rows_and_weights_beyond_four_bytes_are_damage(postings: int, data: bytes, tmp_path: Path) -> None:
    def lists(_: Array, out: IO[bytes]) -> Iterator[TermBatch]:
        out.write(data)
        yield np.frombuffer(b"alpha", np.uint8), np.array([5]), np.array([postings]), np.array([len(data)])

    path = tmp_path / "bad.postings"
    write_index(path, [np.full(10, 7, "<u2")], lists)
    with pytest.raises(InputError, match="is damaged: fetch or build it again"):
        Bm25Index(PostingsFile(path), Analyzer(), {}).search(["alpha"], 3)


@pytest.mark.parametrize("size", [0, 5, 72, 1_000, -1])
def test_a_truncated_file_is_refused(index: Bm25Index, tmp_path: Path, size: int) -> None:
    path = tmp_path / "cut.postings"
    path.write_bytes(index.file.path.read_bytes()[:size])
    with pytest.raises(InputError, match=r"cut\.postings is not a complete inverted index: fetch or build it again"):
        Bm25Index(PostingsFile(path), Analyzer(), {})


def open_by_ranges(path: Path, folder: Path) -> tuple[Bm25Index, RangeCache]:
    """Open an index of which only the lengths and the dictionary are on the disk."""
    data, layout = path.read_bytes(), PostingsFile(path).layout
    cache = RangeCache(folder, 1 << 30)
    layout_of_blocks, digests = BlockLayout(len(data), 64), digest_blocks(data, 64)
    ranges = cache.open("words", "words", layout_of_blocks, digests, lambda start, end: data[start:end])
    ranges.pin((0, layout.lists_offset), (layout.dictionary_offset, len(data)))
    return Bm25Index(PostingsFile(ranges.path, ranges=ranges), Analyzer(), {}), cache


@pytest.mark.parametrize("share", [0.3, 50.0])  # with 50, frequent terms decide most results
@pytest.mark.parametrize("k", [1, 20])
def test_reading_only_blocks_that_can_matter_changes_no_result(
    index: Bm25Index, share: float, k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selective_search, "_MIN_OPTIONAL_BYTES", 1)
    monkeypatch.setattr(selective_search, "_MAX_OPTIONAL_SHARE", share)
    for number, question in enumerate(f"{question} of the" for question in draw_questions(40)):
        ranged, cache = open_by_ranges(index.file.path, tmp_path / str(number))
        for result, expected in zip(ranged.search([question], k), index.search([question], k), strict=True):
            np.testing.assert_array_equal(result, expected, question)
        cache.close()


def test_blocks_of_frequent_terms_that_cannot_matter_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selective_search, "_MIN_OPTIONAL_BYTES", 1)
    index, fetched_bytes = build_frequent_and_rare(tmp_path / "words"), {}
    for skip in (True, False):
        ranged, cache = open_by_ranges(index.file.path, tmp_path / str(skip))
        pinned_bytes = cache.fetched_bytes
        assert sorted(ranged.search(["the rare"], 3, skip=skip)[1][0]) == [7, 2_007, 4_007]
        fetched_bytes[skip] = cache.fetched_bytes - pinned_bytes
        with monkeypatch.context() as patched:
            patched.setattr(CachedFile, "_read_remote", partial(_fail, OSError("the network is down")))
            assert sorted(ranged.search(["the rare"], 3, skip=skip)[1][0]) == [7, 2_007, 4_007]
            wait_for_background(cache)
        cache.close()
    assert fetched_bytes[True] < 0.8 * fetched_bytes[False], "only the headers and one block for each passage are read"


def build_frequent_and_rare(folder: Path) -> Bm25Index:
    """Index passages of which almost all have `the`, and three have `rare`."""
    rng = random.Random(1)
    texts = ["the " * rng.randint(0, 15) + ("rare" if number % 2_000 == 7 else "x") for number in range(6_000)]
    return build_bm25([build_passage("", text) for text in texts], folder)


def test_lists_of_repeated_questions_are_completed_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selective_search, "_MIN_OPTIONAL_BYTES", 1)
    ranged, cache = open_by_ranges(build_frequent_and_rare(tmp_path / "words").file.path, tmp_path / "cache")
    question = ["the rare"]
    (bounds,) = ranged.find_lists([b"the"])[:, 1:].tolist()
    hits = ranged.search(question, 3)
    assert ranged.file.count_missing_bytes(*bounds) > 0
    with monkeypatch.context() as patched:
        patched.setattr(CachedFile, "_read_remote", partial(_fail, OSError("the network is down")))
        np.testing.assert_array_equal(ranged.search(question, 3), hits)
        wait_for_background(cache)
    for _ in range(2):  # the first search finds out that the download failed
        np.testing.assert_array_equal(ranged.search(question, 3), hits)
    wait_for_background(cache)
    assert ranged.file.count_missing_bytes(*bounds) == 0
    np.testing.assert_array_equal(ranged.search(question, 3), hits)
    ranged.file._ranges = None  # the decoded lists are searched without the file
    np.testing.assert_array_equal(ranged.search(question, 3), hits)
    cache.close()


def wait_for_background(cache: RangeCache) -> None:
    cache._background.submit(int).result()


def _fail(error: Exception, *arguments: object) -> None:
    raise error
