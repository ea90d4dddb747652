"""An index file derived from that of an earlier snapshot has the same bytes as one that is built."""

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
from tests.fixtures.bm25_index import build_bm25
from tests.rag_model.index.postings.test_search import zipfian

CORPUS = zipfian(200)
ENTRY = KIND.plan(IndexRecipe("BM25"), 1, 0).entry()
NEW_PASSAGES = [build_passage("", text) for text in ("alpha", "zulu w3 w3", "passage of ", "", "東京", "w1")]
EDIT = st.tuples(
    st.sampled_from(["change", "insert", "delete", "move", "repeat"]), st.integers(0, 79), st.integers(0, 79)
)


def apply_edits(passages: list[Passage], edits: list[tuple[str, int, int]]) -> list[Passage]:
    """Return the passages after edits, each an action and two numbers that choose positions."""
    edited = list(passages)
    for action, first, second in edits:
        source, target = first % len(edited), second % len(edited)
        if action == "change":
            edited[source] = NEW_PASSAGES[second % len(NEW_PASSAGES)]
        elif action == "insert":
            edited.insert(source, NEW_PASSAGES[second % len(NEW_PASSAGES)])
        elif action == "delete" and len(edited) > 1:
            del edited[source]
        elif action == "move":
            edited.insert(target, edited.pop(source))
        elif action == "repeat":
            edited.insert(target, edited[source])
    return edited


def get_index_files(path: Path, passages: Sequence[Passage]) -> IndexFiles:
    return IndexFiles(path, list, len(passages))


def find_old_rows(corpus: Sequence[Passage], new_corpus: Sequence[Passage]) -> Rows:
    """Return the old row of each passage, -1 for a new one."""
    rows = {passage.hash: row for row, passage in enumerate(corpus)}
    return np.array([rows.get(passage.hash, -1) for passage in new_corpus], np.int64)


def derive(
    path: Path, old: list[Passage], passages: list[Passage], out: Path, analyzer: str = "english", max_new: int = 1000
) -> IndexStats | None:
    """Derive the index of `passages` from that of the passages `old`."""

    def count(rows: Rows) -> PartPostings:
        batches = [
            pa.RecordBatch.from_pylist([{"title": passages[row].title, "text": passages[row].text}]) for row in rows
        ]
        return count_texts(iter_texts(gather_batches(batches)), Analyzer(analyzer))

    return derive_index(path, find_old_rows(old, passages), count, out, max_new)


def assert_equals_build(passages: Sequence[Passage], folder: Path) -> None:
    """Check that the file `derived` has the bytes of an index that is built from the passages."""
    built_path = build_bm25(passages, folder / "built").file.path
    assert (folder / "derived").read_bytes() == built_path.read_bytes()


@pytest.fixture(scope="module")
def old_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_bm25(CORPUS, tmp_path_factory.mktemp("before"), [70]).file.path


@given(st.lists(EDIT, max_size=9))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_edit_gives_the_bytes_of_a_build(old_path: Path, tmp_path: Path, edits: list[tuple[str, int, int]]) -> None:
    new_corpus = apply_edits(CORPUS, [(action, 2 * first, 2 * second) for action, first, second in edits])
    stats = derive(old_path, CORPUS, new_corpus, tmp_path / "derived")
    assert stats is not None
    assert stats["postings"] == PostingsFile(tmp_path / "derived").layout.n_postings
    assert_equals_build(new_corpus, tmp_path)


def test_long_lists_and_many_batches_give_the_bytes_of_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of several blocks lose and gain postings, in many batches because each holds few terms."""
    corpus = [
        build_passage("", f"common and {'again ' * (number % 5)} r{number} s{number // 2}") for number in range(900)
    ]
    added = [build_passage("", f"common new n{number}") for number in range(300)]
    new_corpus = [passage for row, passage in enumerate(corpus) if row % 7] + added[:100]
    new_corpus[300:300] = added[100:]
    for name, limit in (("_BATCH_TERMS", 3), ("_BATCH_LIST_BYTES", 1)):
        monkeypatch.setattr(derive_module, name, limit)
    old_file = build_bm25(corpus, tmp_path / "old").file.path
    assert derive(old_file, corpus, new_corpus, tmp_path / "derived")
    assert_equals_build(new_corpus, tmp_path)
    assert derive(old_file, corpus, corpus[::-1], tmp_path / "backwards") is None, "a new build is faster"


@pytest.mark.parametrize("count", [1, 2, 127, 128, 129, 256, 257])
def test_lists_at_the_limits_of_blocks_and_weights_give_the_bytes_of_a_build(count: int, tmp_path: Path) -> None:
    frequencies = [1, 2, 254, 255, 256, 257]
    corpus = [build_passage("", f"r{number} " + "a " * frequencies[number % 6]) for number in range(count)]
    corpus += [build_passage("", "a " * times) for times in (65_534, 65_535, 65_536)]  # 65,535 is the largest count
    old_file = build_bm25(corpus, tmp_path / "old").file.path
    alpha, zulu, *_ = NEW_PASSAGES
    for new_corpus in ([*corpus[:count], *corpus[-2:]], corpus[1:], [zulu, *corpus], [*corpus, alpha]):
        assert derive(old_file, corpus, new_corpus, tmp_path / "derived")
        assert_equals_build(new_corpus, tmp_path)


def test_only_new_passages_are_analysed(old_path: Path, tmp_path: Path) -> None:
    """Deriving with another analyzer than the file's shows which passages were analysed."""
    new_corpus = [*CORPUS[:50], build_passage("", "Walking"), CORPUS[60], CORPUS[55], *CORPUS[61:]]
    assert derive(old_path, CORPUS, new_corpus, tmp_path / "derived", "none")
    index = KIND.open(get_index_files(tmp_path / "derived", new_corpus), ENTRY)
    assert index.find_missing_terms("walk") == ["walk"]
    assert derive(old_path, CORPUS, new_corpus, tmp_path / "derived")
    assert KIND.open(get_index_files(tmp_path / "derived", new_corpus), ENTRY).find_missing_terms("walk") == []


@given(st.lists(st.integers(-1, 12), max_size=14))
def test_longest_rising_subsequence_is_chosen(rows: list[int]) -> None:
    is_chosen = find_longest_rising_subsequence(np.array(rows, np.int64))
    chosen_rows = np.array(rows, np.int64)[is_chosen].tolist()
    assert chosen_rows == sorted({*chosen_rows} - {-1})
    longest = [0] * len(rows)
    for position, row in enumerate(rows):
        shorter = (longest[i] for i in range(position) if -1 < rows[i] < row)
        longest[position] = 0 if row < 0 else 1 + max(shorter, default=0)
    assert len(chosen_rows) == max(longest, default=0)


def test_index_is_not_derived_if_few_passages_stayed(old_path: Path, tmp_path: Path) -> None:
    new_corpus = CORPUS[1:] + NEW_PASSAGES
    assert derive(old_path, CORPUS, new_corpus, tmp_path / "derived", max_new=len(NEW_PASSAGES) - 1) is None
    assert not derive(old_path, CORPUS, zipfian(200, seed=9), tmp_path / "derived")
    assert not (tmp_path / "derived").exists()


@pytest.mark.parametrize("texts", [0, 1, 3])
def test_postings_of_another_number_of_passages_are_refused(old_path: Path, tmp_path: Path, texts: int) -> None:
    batch = pa.RecordBatch.from_pylist([{"title": "", "text": "alpha"}])
    rows = find_old_rows(CORPUS, [*CORPUS[:9], *NEW_PASSAGES[:2], *CORPUS[9:]])
    postings = count_texts(iter_texts(gather_batches([batch] * texts)), Analyzer())
    with pytest.raises(InputError, match=f"there are postings of {texts} passages, but 2 passages are new"):
        derive_index(old_path, rows, lambda _: postings, tmp_path / "derived", 1000)
    assert not (tmp_path / "derived").exists()


def test_index_of_another_analyzer_is_not_derived(old_path: Path, tmp_path: Path) -> None:
    entries = [{"settings": {"language": language, "analyzer": language}} for language in ("english", "german")]
    assert isinstance(KIND, DerivingKind)
    assert not KIND.derive(*entries, old_path, np.arange(len(CORPUS)), lambda rows: iter(()), tmp_path / "derived")


def test_damaged_file_is_refused_or_gives_a_file(old_path: Path, tmp_path: Path) -> None:
    """Damage gives an error, or a file whose digest is wrong; it never ends the process."""
    data, rng, n_refused = old_path.read_bytes(), random.Random(1), 0
    for _ in range(60):
        damaged = bytearray(data)
        offset = rng.randrange(8, len(data))
        damaged[offset : offset + 8] = rng.randbytes(8)[: len(damaged) - offset]
        (tmp_path / "bad").write_bytes(damaged)
        try:
            derive(tmp_path / "bad", CORPUS, CORPUS, tmp_path / "derived")
        except InputError:
            n_refused += 1
    assert n_refused > 5


@pytest.mark.parametrize("factory", ["Impact", "Impact1"])
def test_derived_weighted_terms_equal_those_of_a_full_build(factory: str, tmp_path: Path) -> None:
    """From the vectors and from the delta that a pull fetches; rows are removed, new, repeated or empty."""
    dim, old_vectors = 300, impact_index.draw_passages(2_000, 300, 30)
    added, rng = impact_index.draw_passages(40, 300, 30, seed=7), np.random.default_rng(3)
    remaining = np.flatnonzero(rng.random(len(old_vectors)) > 0.02)
    rows, base_rows = np.insert(remaining, 900, [5, 5]), np.insert(remaining, 900, [-1, -1])
    positions = np.sort(rng.integers(0, len(rows), len(added)))
    base_rows = np.insert(base_rows, positions, np.full(len(added), -1))
    rows = np.insert(rows, positions, len(old_vectors) + np.arange(len(added)))
    vectors = SparseVectors.concatenate([old_vectors, added]).take(rows)
    old_file, full_file = (
        impact_index.build_impact_index(rows, tmp_path / name, dim, [700], factory).file.path
        for name, rows in (("old", old_vectors), ("full", vectors))
    )
    write_new_terms(base_rows, vectors.take(np.flatnonzero(base_rows < 0)), tmp_path / "delta")
    delta_rows, terms = read_new_terms(tmp_path / "delta", full_file.stat().st_size)
    entry = IMPACT_KIND.plan(IndexRecipe(factory), 1, dim).entry()
    readers = ((base_rows, lambda rows: iter([vectors.take(rows)])), (delta_rows, lambda _: iter([terms])))
    for kept_rows, read in readers:
        assert IMPACT_KIND.derive(entry, entry, old_file, kept_rows, read, tmp_path / "derived")
        assert (tmp_path / "derived").read_bytes() == full_file.read_bytes()
    assert terms.weights.tolist() == vectors.take(np.flatnonzero(base_rows < 0)).weights.tolist()
    other_entry = {**entry, "factory": "Impact1" if factory == "Impact" else "Impact"}
    assert not IMPACT_KIND.derive(entry, other_entry, old_file, base_rows, lambda _: iter([terms]), tmp_path / "second")
    share = (base_rows < 0).mean()
    assert (tmp_path / "delta").stat().st_size / full_file.stat().st_size < 3 * share
