"""The index file of a later snapshot made of an earlier one's, beside the file that a build makes: the same bytes."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.corpus.ragged_file import SparseVectors
from rag_model.corpus.records import Passage
from rag_model.errors import InputError
from rag_model.index.files.engine import Rows
from rag_model.index.kind import DerivingKind, IndexFiles
from rag_model.index.plan import IndexStats
from rag_model.index.postings import derive as derive_module
from rag_model.index.postings.analyzer import Analyzer
from rag_model.index.postings.counting import count_texts, gather_batches, iter_texts
from rag_model.index.postings.derive import derive_index, find_longest_rising_subsequence
from rag_model.index.postings.file import PostingsFile
from rag_model.index.postings.impact import KIND as IMPACT_KIND
from rag_model.index.postings.kind import KIND
from rag_model.index.postings.part import PartPostings
from rag_model.index.recipe import IndexRecipe
from rag_model.store.pulling.delta_files import read_new_terms, write_new_terms
from rag_model.training.data.examples import build_passage
from tests.fixtures import impact_index
from tests.fixtures.bm25_index import build_words
from tests.rag_model.index.postings.test_search import zipfian

BEFORE = zipfian(200)
ENTRY = KIND.plan(IndexRecipe("BM25"), 1, 0).entry()
NEW = [build_passage("", text) for text in ("alpha", "zulu w3 w3", "passage of ", "", "東京", "w1")]
EDIT = st.tuples(
    st.sampled_from(["change", "insert", "delete", "move", "repeat"]), st.integers(0, 79), st.integers(0, 79)
)


def edited(passages: list[Passage], edits: list[tuple[str, int, int]]) -> list[Passage]:
    """Return passages after some edits, each at a place and with another place."""
    after = list(passages)
    for what, place, other in edits:
        at, to = place % len(after), other % len(after)
        if what == "change":
            after[at] = NEW[other % len(NEW)]
        elif what == "insert":
            after.insert(at, NEW[other % len(NEW)])
        elif what == "delete" and len(after) > 1:
            del after[at]
        elif what == "move":
            after.insert(to, after.pop(at))
        elif what == "repeat":
            after.insert(to, after[at])
    return after


def get_index_files(path: Path, passages: Sequence[Passage]) -> IndexFiles:
    return IndexFiles(path, list, len(passages))


def kept(before: Sequence[Passage], after: Sequence[Passage]) -> Rows:
    """Return the earlier row of each passage, or -1."""
    rows = {one.hash: row for row, one in enumerate(before)}
    return np.array([rows.get(one.hash, -1) for one in after], np.int64)


def derive(
    before: Path, old: Sequence[Passage], new: Sequence[Passage], out: Path, analyzer: str = "english", most: int = 1000
) -> IndexStats | None:
    def texts(rows: Rows) -> list[pa.RecordBatch]:
        return [pa.RecordBatch.from_pylist([{"title": new[row].title, "text": new[row].text}]) for row in rows]

    def count(rows: Rows) -> PartPostings:
        return count_texts(iter_texts(gather_batches(texts(rows))), Analyzer(analyzer))

    return derive_index(before, kept(old, new), count, out, most)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_words(BEFORE, tmp_path_factory.mktemp("before"), [70]).file.path


@given(st.lists(EDIT, max_size=9))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_edit_gives_the_bytes_of_a_build(before: Path, tmp_path: Path, edits: list[tuple[str, int, int]]) -> None:
    after = edited(BEFORE, [(what, 2 * place, 2 * other) for what, place, other in edits])
    told = derive(before, BEFORE, after, tmp_path / "derived")
    assert told is not None
    assert told["postings"] == PostingsFile(tmp_path / "derived").layout.n_postings
    assert (tmp_path / "derived").read_bytes() == build_words(after, tmp_path / "after").file.path.read_bytes()


def test_long_lists_and_many_batches_give_the_bytes_of_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of several blocks lose and gain some; a batch with room for few terms is filled again and again."""
    rare = [
        build_passage("", f"common and {'again ' * (number % 5)} r{number} s{number // 2}") for number in range(900)
    ]
    new = [build_passage("", f"common new n{number}") for number in range(300)]
    after = [one for row, one in enumerate(rare) if row % 7] + new[:100]
    after[300:300] = new[100:]
    for name, few in (("_BATCH_TERMS", 3), ("_BATCH_LIST_BYTES", 1)):
        monkeypatch.setattr(derive_module, name, few)
    old = build_words(rare, tmp_path / "old").file.path
    assert derive(old, rare, after, tmp_path / "derived")
    assert (tmp_path / "derived").read_bytes() == build_words(after, tmp_path / "after").file.path.read_bytes()
    assert derive(old, rare, rare[::-1], tmp_path / "backwards") is None, "quicker counted afresh"


@pytest.mark.parametrize("count", [1, 2, 127, 128, 129, 256, 257])
def test_lists_at_the_limits_of_blocks_and_weights_give_the_bytes_of_a_build(count: int, tmp_path: Path) -> None:
    often = [1, 2, 254, 255, 256, 257]
    passages = [build_passage("", f"r{number} " + "a " * often[number % 6]) for number in range(count)]
    large = [build_passage("", "a " * times) for times in (65_534, 65_535, 65_536)]  # the most that is counted
    old = build_words(passages + large, tmp_path / "old").file.path
    for after in (passages + large[1:], passages[1:] + large, [NEW[1], *passages, *large], [*passages, *large, NEW[0]]):
        assert derive(old, passages + large, after, tmp_path / "derived")
        assert (tmp_path / "derived").read_bytes() == build_words(after, tmp_path / "after").file.path.read_bytes()


def test_only_new_passages_are_analysed(before: Path, tmp_path: Path) -> None:
    """Another analyzer than that of the file shows who made a term."""
    after = [*BEFORE[:50], build_passage("", "Walking"), BEFORE[60], BEFORE[55], *BEFORE[61:]]
    assert derive(before, BEFORE, after, tmp_path / "derived", "none")
    index = KIND.open(get_index_files(tmp_path / "derived", after), ENTRY)
    assert index.find_missing_terms("walk") == ["walk"]
    assert derive(before, BEFORE, after, tmp_path / "derived")
    assert KIND.open(get_index_files(tmp_path / "derived", after), ENTRY).find_missing_terms("walk") == []


@given(st.lists(st.integers(-1, 12), max_size=14))
def test_the_most_rows_that_rise_are_chosen(rows: list[int]) -> None:
    chosen = find_longest_rising_subsequence(np.array(rows, np.int64))
    found = [row for row, its in zip(rows, chosen.tolist(), strict=True) if its]
    assert found == sorted({*found} - {-1})
    best = [0] * len(rows)
    for at, row in enumerate(rows):
        best[at] = 0 if row < 0 else 1 + max((best[i] for i in range(at) if -1 < rows[i] < row), default=0)
    assert len(found) == max(best, default=0)


def test_few_passages_that_stayed_are_not_worth_it(before: Path, tmp_path: Path) -> None:
    assert derive(before, BEFORE, BEFORE[1:] + NEW, tmp_path / "derived", most=len(NEW) - 1) is None
    assert not derive(before, BEFORE, zipfian(200, seed=9), tmp_path / "derived")
    assert not (tmp_path / "derived").exists()


@pytest.mark.parametrize("texts", [0, 1, 3])
def test_other_texts_than_those_of_the_new_passages_are_refused(before: Path, tmp_path: Path, texts: int) -> None:
    batch = pa.RecordBatch.from_pylist([{"title": "", "text": "alpha"}])
    rows = kept(BEFORE, [*BEFORE[:9], *NEW[:2], *BEFORE[9:]])
    postings = count_texts(iter_texts(gather_batches([batch] * texts)), Analyzer())
    with pytest.raises(InputError, match=f"there are postings of {texts} passages, but 2 passages are new"):
        derive_index(before, rows, lambda _: postings, tmp_path / "derived", 1000)
    assert not (tmp_path / "derived").exists()


def test_another_analyzer_makes_nothing(before: Path, tmp_path: Path) -> None:
    entries = [{"settings": {"language": language, "analyzer": language}} for language in ("english", "german")]
    assert isinstance(KIND, DerivingKind)
    assert not KIND.derive(*entries, before, kept(BEFORE, BEFORE), lambda rows: iter(()), tmp_path / "derived")


def test_a_damaged_file_is_noticed_or_makes_another(before: Path, tmp_path: Path) -> None:
    """Whatever byte is wrong: a sentence, or a file whose digest tells; never a crash."""
    good, rng, noticed = before.read_bytes(), random.Random(1), 0
    for _ in range(60):
        bad = bytearray(good)
        at = rng.randrange(8, len(good))
        bad[at : at + 8] = rng.randbytes(8)[: len(bad) - at]
        (tmp_path / "bad").write_bytes(bad)
        try:
            derive(tmp_path / "bad", BEFORE, BEFORE, tmp_path / "derived")
        except InputError:
            noticed += 1
    assert noticed > 5


@pytest.mark.parametrize("factory", ["Impact", "Impact1"])
def test_derived_weighted_terms_equal_those_of_a_full_build(factory: str, tmp_path: Path) -> None:
    """Directly, and by the delta that a pull fetches: some rows go, some are new, some twice or empty."""
    dim, old = 300, impact_index.zipfian(2_000, 300, 30)
    new, rng = impact_index.zipfian(40, 300, 30, seed=7), np.random.default_rng(3)
    stays = np.flatnonzero(rng.random(len(old)) > 0.02)
    rows, base_rows = np.insert(stays, 900, [5, 5]), np.insert(stays, 900, [-1, -1])
    places = np.sort(rng.integers(0, len(rows), len(new)))
    base_rows = np.insert(base_rows, places, np.full(len(new), -1))
    after = SparseVectors.concatenate([old, new]).take(np.insert(rows, places, len(old) + np.arange(len(new))))
    before, whole = (
        impact_index.build_impacts(rows, tmp_path / name, dim, [700], factory).file.path
        for name, rows in (("before", old), ("whole", after))
    )
    write_new_terms(base_rows, after.take(np.flatnonzero(base_rows < 0)), tmp_path / "delta")
    told_rows, terms = read_new_terms(tmp_path / "delta", whole.stat().st_size)
    entry = IMPACT_KIND.plan(IndexRecipe(factory), 1, dim).entry()
    for kept_rows, read in ((base_rows, lambda rows: iter([after.take(rows)])), (told_rows, lambda _: iter([terms]))):
        assert IMPACT_KIND.derive(entry, entry, before, kept_rows, read, tmp_path / "derived")
        assert (tmp_path / "derived").read_bytes() == whole.read_bytes()
    assert terms.weights.tolist() == after.take(np.flatnonzero(base_rows < 0)).weights.tolist()
    other = {**entry, "factory": "Impact1" if factory == "Impact" else "Impact"}
    assert IMPACT_KIND.derive(entry, other, before, base_rows, lambda _: iter([terms]), tmp_path / "other") is None
    share = (base_rows < 0).mean()
    assert (tmp_path / "delta").stat().st_size / whole.stat().st_size < 3 * share
