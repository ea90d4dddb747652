"""A way of finding that an installed package brings is composed, surveyed and told of in hits as our own."""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.encoders.encoder import Encoder
from rag_model.errors import InputError, UsageError
from rag_model.retrieve.factory import CALLS, open_retriever, plan_retriever
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures import interleave_retriever

ASKED = ["who wrote animal farm?", "which unit measures electric current", "what relieves pain?"]
LISTS = st.lists(st.lists(st.integers(0, 9), unique=True, max_size=6), min_size=2, max_size=4)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The file `interleave_retriever.py` as an installed package, with its entry point."""
    about = tmp_path / "interleave_retriever-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: interleave_retriever\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[bookwheel.retrievers]\ninterleave = interleave_retriever:build\n")
    shutil.copy(interleave_retriever.__file__, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(CALLS, "_loaded", {})
    yield
    sys.modules.pop("interleave_retriever", None)


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
    for question, found in zip(questions, interleave_retriever.in_turn(lines, k).tolist(), strict=True):
        kept = [row for row in found if row >= 0]
        assert found == kept + [-1] * (k - len(kept))
        assert len({*kept}) == len(kept) == min(k, len({row for leg in question[:legs] for row in leg}))
        assert kept[:1] == next((leg[:1] for leg in question[:legs] if leg), [])


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("interleave(hnsw)", "character 1: interleave takes two legs or more"),
        ("interleave(hnsw, hnsw:3)", "character 18: the leg hnsw is given twice"),
        ("interleave(hnsw, exact, k=3)", "interleave has no option 'k': it has no options"),
        ("interleave(hnsw, nowhere)", "nowhere"),
    ],
)
def test_a_mistake_is_one_sentence(package: None, snapshot: Snapshot, expression: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        open_retriever(snapshot, expression)


BROKEN = """
import numpy as np
from rag_model.errors import UsageError
from rag_model.retrieve.retriever import RankedRows, SnapshotRetriever

def fail(*_):
    raise KeyError("secret")

class Broken(SnapshotRetriever):
    def __init__(self, leg):
        super().__init__(leg.retriever.snapshot, f"broken({leg.name})")

    def find(self, queries, k):
        return {found}

    most = {most}

def ranked(rows, scores):
    return RankedRows("broken", rows, scores)

def build(call, factory):
    leg = factory.leg(call.arguments[0])
    return {built}
"""
NAMED = r"^retriever 'broken' \(broken_retriever:build of the package broken-retriever 2.1\) "


@pytest.fixture
def install_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install a package whose retriever `broken` returns an expression from one of its members."""

    def install(found: str = "None", most: str = "5", built: str = "Broken(leg)", source: str = BROKEN) -> None:
        about = tmp_path / "broken_retriever-2.1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-retriever\nVersion: 2.1\n")
        (about / "entry_points.txt").write_text("[bookwheel.retrievers]\nbroken = broken_retriever:build\n")
        for name, value in (("found", found), ("most", most), ("built", built)):
            source = source.replace(f"{{{name}}}", value)
        (tmp_path / "broken_retriever.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(CALLS, "_loaded", {})

    yield install
    sys.modules.pop("broken_retriever", None)


@pytest.mark.parametrize(
    ("built", "says"),
    [
        ("3", "built 3: return a SnapshotRetriever"),
        ("None", "built None: return a SnapshotRetriever"),
        ("Broken", "built <class .*: return a SnapshotRetriever"),
        ("fail()", r"fails \(KeyError: 'secret'\): repair or uninstall its package"),
        ("Broken()", r"fails \(TypeError: .*leg"),
        ("Broken.__new__(Broken)", r"fails \(AttributeError: .*snapshot"),
    ],
)
def test_what_a_package_builds_is_checked(
    install_broken: Callable[..., None], snapshot: Snapshot, built: str, says: str
) -> None:
    install_broken(built=built)
    for expression in ("broken(exact)", "rrf(broken(exact), hnsw)"):
        with pytest.raises(InputError, match=NAMED + says) as caught:
            plan_retriever(snapshot, expression)
        assert caught.value.exit_code == 1


def test_a_builder_that_is_no_function_is_named(install_broken: Callable[..., None], snapshot: Snapshot) -> None:
    install_broken(source="build = 3")
    with pytest.raises(InputError, match=NAMED + r"is int: register a function build\(call, factory\)"):
        plan_retriever(snapshot, "broken(exact)")


ONES = "np.ones((len(queries), 2))"


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ("3", "returned 3: return RankedRows"),
        ("None", "returned None: return RankedRows"),
        ("fail()", r"fails \(KeyError: 'secret'\)"),
        ("ranked([[1, 2]], [[1.0, 0.5]])", "returned rows that are not an array of integer numbers"),
        (f"ranked({ONES}, {ONES})", "returned rows that are not an array of integer numbers"),
        ("ranked(np.array([1, 2]), np.ones(2))", r"returned rows of shape \(2,\) for 3 queries"),
        ("ranked(np.array([[1, 2]]), np.ones((1, 2)))", r"returned rows of shape \(1, 2\) for 3 queries"),
        ("ranked(np.arange(27).reshape(3, 9) % 9, np.ones((3, 9)))", r"returned rows of shape \(3, 9\)"),
        ("ranked(np.array([[1, 2]] * 3), np.ones((3, 1)))", r"returned scores of shape \(3, 1\)"),
        (f"ranked(np.array([[1, 12]] * 3), {ONES})", "returned a row outside the 12 rows of the snapshot"),
        (f"ranked(np.array([[1, -2]] * 3), {ONES})", "returned a row outside the 12 rows of the snapshot"),
        (f"ranked(np.array([[-1, 2]] * 3), {ONES})", "returned a row after -1"),
        (f"ranked(np.array([[2, 2]] * 3), {ONES})", "returned a row twice for one query"),
        (f"ranked(np.array([[1, 2]] * 3), {ONES} * np.nan)", "returned a score that is not finite"),
    ],
)
def test_what_a_package_finds_is_checked(
    install_broken: Callable[..., None], snapshot: Snapshot, encoder: Encoder, found: str, says: str
) -> None:
    install_broken(found)
    retriever = open_retriever(snapshot, "broken(exact)", encoder=encoder)
    with pytest.raises(InputError, match=NAMED + says) as caught:
        retriever.search(ASKED, 5)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("most", ["None", "0", "2.5", "property(fail)"])
def test_the_depth_of_a_package_is_checked(
    install_broken: Callable[..., None], snapshot: Snapshot, encoder: Encoder, most: str
) -> None:
    install_broken(most=most)
    with pytest.raises(InputError, match=NAMED + "(has `most`|fails .KeyError)"):
        open_retriever(snapshot, "broken(exact)", encoder=encoder).search(ASKED, 5)


def test_an_error_of_ours_is_passed_on(install_broken: Callable[..., None], snapshot: Snapshot) -> None:
    install_broken(built="(_ for _ in ()).throw(UsageError('broken takes no index'))")
    with pytest.raises(UsageError, match=r"^broken takes no index$"):
        plan_retriever(snapshot, "broken(exact)")


def test_without_the_package_the_call_is_named(snapshot: Snapshot) -> None:
    calls = "interpolate, maxsim, rerank, rrf, where"
    with pytest.raises(UsageError, match=rf"no call 'interleave': choose one of {calls}, or"):
        open_retriever(snapshot, "interleave(hnsw, exact)")
