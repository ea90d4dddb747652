"""The index file of a later snapshot made of an earlier one's, beside the file that a build makes: the same bytes."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.corpus.records import Passage
from rag_model.errors import InputError
from rag_model.index.deriving import DerivingKind
from rag_model.index.files.engine import Rows
from rag_model.index.postings.analyzer import Analyzer
from rag_model.index.postings.derive import derived
from rag_model.index.postings.kind import KIND
from tests.fixtures.words import build_words
from tests.rag_model.index.postings.test_changes import EDIT, edited
from tests.rag_model.index.postings.test_search import zipfian

BEFORE = zipfian(200)


def kept(before: Sequence[Passage], after: Sequence[Passage]) -> Rows:
    """Return the earlier row of each passage, or -1."""
    rows = {one.hash: row for row, one in enumerate(before)}
    return np.array([rows.get(one.hash, -1) for one in after], np.int64)


def derive(before: Path, old: Sequence[Passage], new: Sequence[Passage], out: Path) -> bool:
    def texts(rows: Rows) -> list[pa.RecordBatch]:
        return [pa.RecordBatch.from_pylist([{"title": new[row].title, "text": new[row].text}]) for row in rows]

    return derived(before, kept(old, new), lambda rows: iter(texts(rows)), Analyzer(), out)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_words(BEFORE, tmp_path_factory.mktemp("before"), [70]).file.path


@given(st.lists(EDIT, max_size=9))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_edit_gives_the_bytes_of_a_build(before: Path, tmp_path: Path, edits: list[tuple[str, int, int]]) -> None:
    after = edited(BEFORE, [(what, 2 * place, 2 * other) for what, place, other in edits])
    assert derive(before, BEFORE, after, tmp_path / "derived")
    assert (tmp_path / "derived").read_bytes() == build_words(after, tmp_path / "after").file.path.read_bytes()


def test_few_passages_that_stayed_are_not_worth_it(before: Path, tmp_path: Path) -> None:
    assert not derive(before, BEFORE, zipfian(200, seed=9), tmp_path / "derived")
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
