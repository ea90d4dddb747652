"""A way of finding that an installed package brings is composed, surveyed and told of in hits as our own."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.encoders.encoder import Encoder
from rag_model.errors import UsageError
from rag_model.retrieve.factory import CALLS, open_retriever, plan_retriever
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures import interleaving

ASKED = ["who wrote animal farm?", "which unit measures electric current", "what relieves pain?"]
LISTS = st.lists(st.lists(st.integers(0, 9), unique=True, max_size=6), min_size=2, max_size=4)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The file `interleaving.py` as an installed package, with its entry point."""
    about = tmp_path / "interleaving-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: interleaving\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[bookwheel.retrievers]\ninterleave = interleaving:build\n")
    shutil.copy(interleaving.__file__, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(CALLS, "_loaded", {})
    yield
    sys.modules.pop("interleaving", None)


def test_passages_are_taken_in_turn(package: None, snapshot: Snapshot, encoder: Encoder) -> None:
    one = open_retriever(snapshot, "exact", encoder=encoder).search(ASKED, 5)
    two = open_retriever(snapshot, "rrf(hnsw, ivfpq, weights=[1, 9])", encoder=encoder).search(ASKED, 5)
    both = open_retriever(snapshot, "interleave(exact, rrf(hnsw, ivfpq, weights=[1, 9]))", encoder=encoder)
    for first, second, hits in zip(one, two, both.search(ASKED, 5), strict=True):
        turns = [hit.row for pair in zip(first, second, strict=True) for hit in pair]
        assert [hit.row for hit in hits] == list(dict.fromkeys(turns))[:5]
        assert [hit.score for hit in hits] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])
        ranks = {hit.row: hit.rank for hit in first}
        for hit in hits:
            told = {leg.leg: leg.rank for leg in hit.legs}
            assert told.get("exact") == ranks.get(hit.row)


def test_it_is_a_leg_of_others(package: None, snapshot: Snapshot, encoder: Encoder) -> None:
    nested = open_retriever(snapshot, "rrf(interleave(hnsw:3, exact), ivfpq)", encoder=encoder)
    legs = [leg.leg for leg in nested.search(ASKED, 1)[0][0].legs]
    assert legs == ["hnsw", "exact", "interleave(hnsw, exact)", "ivfpq"]
    assert plan_retriever(snapshot, "interleave(hnsw, ivfpq)").indexes == ("hnsw", "ivfpq")


@given(questions=st.lists(LISTS, min_size=1, max_size=3), k=st.integers(1, 9), data=st.data())
def test_no_row_comes_twice_and_none_is_lost(questions: list[list[list[int]]], k: int, data: st.DataObject) -> None:
    legs = min(map(len, questions))
    lines = [np.array([(question[leg] + [-1] * 6)[:6] for question in questions], np.int64) for leg in range(legs)]
    for question, found in zip(questions, interleaving.in_turn(lines, k).tolist(), strict=True):
        kept = [row for row in found if row >= 0]
        assert found == kept + [-1] * (k - len(kept))
        assert len({*kept}) == len(kept) == min(k, len({row for leg in question[:legs] for row in leg}))
        assert kept[:1] == next((leg[:1] for leg in question[:legs] if leg), [])


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("interleave(hnsw)", "character 1: interleave takes two legs or more"),
        ("interleave(hnsw, hnsw:3)", "character 18: the leg hnsw is given twice"),
        ("interleave(hnsw, exact, k=3)", "interleave has no option 'k': it takes none"),
        ("interleave(hnsw, nowhere)", "nowhere"),
    ],
)
def test_a_mistake_is_one_sentence(package: None, snapshot: Snapshot, expression: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        open_retriever(snapshot, expression)


def test_without_the_package_the_call_is_named(snapshot: Snapshot) -> None:
    with pytest.raises(UsageError, match=r"there is no call 'interleave': choose one of maxsim, rerank, rrf, or name"):
        open_retriever(snapshot, "interleave(hnsw, exact)")
