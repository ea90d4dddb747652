"""Retrievers of installed packages are composed, planned and named in hits like built-in ones."""

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
from tests.fixtures.plugin_package import install_package

QUESTIONS = ["who wrote animal farm?", "which unit measures electric current", "what relieves pain?"]
LISTS = st.lists(st.lists(st.integers(0, 9), unique=True, max_size=6), min_size=2, max_size=4)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install `interleave_retriever.py` as a package with an entry point."""
    entry_point = "interleave = interleave_retriever:build"
    install_package(tmp_path, "retrievers", entry_point, interleave_retriever.__file__, name="interleave_retriever")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(CALLS, "_loaded", {})
    yield
    sys.modules.pop("interleave_retriever", None)


def test_passages_are_taken_in_turn(package: None, snapshot: Snapshot, encoder: Encoder) -> None:
    exact_results = open_retriever(snapshot, "exact", encoder=encoder).search(QUESTIONS, 5)
    fused_results = open_retriever(snapshot, "rrf(hnsw, ivfpq, weights=[1, 9])", encoder=encoder).search(QUESTIONS, 5)
    retriever = open_retriever(snapshot, "interleave(exact, rrf(hnsw, ivfpq, weights=[1, 9]))", encoder=encoder)
    for first, second, hits in zip(exact_results, fused_results, retriever.search(QUESTIONS, 5), strict=True):
        turns = [hit.row for pair in zip(first, second, strict=True) for hit in pair]
        assert [hit.row for hit in hits] == list(dict.fromkeys(turns))[:5]
        assert [hit.score for hit in hits] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])
        ranks = {hit.row: hit.rank for hit in first}
        for hit in hits:
            leg_ranks = {leg.leg: leg.rank for leg in hit.legs}
            assert leg_ranks.get("exact") == ranks.get(hit.row)


def test_retriever_of_a_package_is_a_leg_of_others(package: None, snapshot: Snapshot, encoder: Encoder) -> None:
    nested = open_retriever(snapshot, "rrf(interleave(hnsw:3, exact), ivfpq)", encoder=encoder)
    legs = [leg.leg for leg in nested.search(QUESTIONS, 1)[0][0].legs]
    assert legs == ["hnsw", "exact", "interleave(hnsw, exact)", "ivfpq"]
    assert plan_retriever(snapshot, "interleave(hnsw, ivfpq)").indexes == ("hnsw", "ivfpq")


@given(questions=st.lists(LISTS, min_size=1, max_size=3), k=st.integers(1, 9), data=st.data())
def test_interleaving_keeps_each_row_once(questions: list[list[list[int]]], k: int, data: st.DataObject) -> None:
    legs = min(map(len, questions))
    rankings = [np.array([(question[leg] + [-1] * 6)[:6] for question in questions], np.int64) for leg in range(legs)]
    for question, rows in zip(questions, interleave_retriever.in_turn(rankings, k).tolist(), strict=True):
        hit_rows = [row for row in rows if row >= 0]
        assert rows == hit_rows + [-1] * (k - len(hit_rows))
        assert len({*hit_rows}) == len(hit_rows) == min(k, len({row for leg in question[:legs] for row in leg}))
        assert hit_rows[:1] == next((leg[:1] for leg in question[:legs] if leg), [])


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("interleave(hnsw)", "character 1: interleave takes two legs or more"),
        ("interleave(hnsw, hnsw:3)", "character 18: the leg hnsw is given twice"),
        ("interleave(hnsw, exact, k=3)", "interleave has no option 'k': it has no options"),
        ("interleave(hnsw, nowhere)", "nowhere"),
    ],
)
def test_invalid_call_is_refused(package: None, snapshot: Snapshot, expression: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
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
        return {ranking}

    most = {depth}

def ranked(rows, scores):
    return RankedRows("broken", rows, scores)

def build(call, factory):
    leg = factory.leg(call.arguments[0])
    return {retriever}
"""
ERROR_PREFIX = r"^retriever 'broken' \(broken_retriever:build of the package broken-retriever 2.1\) "


@pytest.fixture
def install_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install a package whose retriever `broken` returns an expression from one of its members."""

    def install(ranking: str = "None", depth: str = "5", retriever: str = "Broken(leg)", source: str = BROKEN) -> None:
        entry_point = "broken = broken_retriever:build"
        install_package(tmp_path, "retrievers", entry_point, name="broken-retriever", version="2.1")
        for name, value in (("ranking", ranking), ("depth", depth), ("retriever", retriever)):
            source = source.replace(f"{{{name}}}", value)
        (tmp_path / "broken_retriever.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(CALLS, "_loaded", {})

    yield install
    sys.modules.pop("broken_retriever", None)


@pytest.mark.parametrize(
    ("retriever", "message"),
    [
        ("3", "built 3: return a SnapshotRetriever"),
        ("None", "built None: return a SnapshotRetriever"),
        ("Broken", "built <class .*: return a SnapshotRetriever"),
        ("fail()", r"fails \(KeyError: 'secret'\): repair or uninstall its package"),
        ("Broken()", r"fails \(TypeError: .*leg"),
        ("Broken.__new__(Broken)", r"fails \(AttributeError: .*snapshot"),
    ],
)
def test_result_of_a_builder_is_checked(
    install_broken: Callable[..., None], snapshot: Snapshot, retriever: str, message: str
) -> None:
    install_broken(retriever=retriever)
    for expression in ("broken(exact)", "rrf(broken(exact), hnsw)"):
        with pytest.raises(InputError, match=ERROR_PREFIX + message) as error:
            plan_retriever(snapshot, expression)
        assert error.value.exit_code == 1


def test_builder_that_is_not_a_function_is_refused(install_broken: Callable[..., None], snapshot: Snapshot) -> None:
    install_broken(source="build = 3")
    with pytest.raises(InputError, match=ERROR_PREFIX + r"is int: register a function build\(call, factory\)"):
        plan_retriever(snapshot, "broken(exact)")


ONES = "np.ones((len(queries), 2))"


@pytest.mark.parametrize(
    ("ranking", "message"),
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
def test_ranking_of_a_package_is_checked(
    install_broken: Callable[..., None], snapshot: Snapshot, encoder: Encoder, ranking: str, message: str
) -> None:
    install_broken(ranking)
    retriever = open_retriever(snapshot, "broken(exact)", encoder=encoder)
    with pytest.raises(InputError, match=ERROR_PREFIX + message) as error:
        retriever.search(QUESTIONS, 5)
    assert error.value.exit_code == 1


@pytest.mark.parametrize("depth", ["None", "0", "2.5", "property(fail)"])
def test_the_depth_of_a_package_is_checked(
    install_broken: Callable[..., None], snapshot: Snapshot, encoder: Encoder, depth: str
) -> None:
    install_broken(depth=depth)
    with pytest.raises(InputError, match=ERROR_PREFIX + "(has `most`|fails .KeyError)"):
        open_retriever(snapshot, "broken(exact)", encoder=encoder).search(QUESTIONS, 5)


def test_usage_error_of_a_package_is_passed_on(install_broken: Callable[..., None], snapshot: Snapshot) -> None:
    install_broken(retriever="(_ for _ in ()).throw(UsageError('broken takes no index'))")
    with pytest.raises(UsageError, match=r"^broken takes no index$"):
        plan_retriever(snapshot, "broken(exact)")


def test_call_of_a_missing_package_is_refused(snapshot: Snapshot) -> None:
    calls = "interpolate, maxsim, rerank, rrf, where"
    with pytest.raises(UsageError, match=rf"no call 'interleave': choose one of {calls}, or"):
        open_retriever(snapshot, "interleave(hnsw, exact)")
