"""Reciprocal rank fusion and interpolation, compared with their equations, and on a real snapshot."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.encoders.encoder import Encoder
from rag_model.errors import UsageError
from rag_model.retrieve.dense import DenseRetriever
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.fusion import fuse, interpolate
from rag_model.retrieve.retriever import RankedRows
from rag_model.store.versions.snapshot import Snapshot

QUESTIONS = ["who wrote animal farm?", "which unit measures electric current", "what relieves pain?"]
LISTS = st.lists(st.lists(st.integers(0, 9), unique=True, max_size=6), min_size=2, max_size=4)


def _fuse_exactly(lists: list[list[int]], k: int, weights: list[int]) -> list[tuple[int, Fraction]]:
    """Return rows and RRF(d) = sum over lists of w / (k + rank) as fractions; best first, ties by row."""
    total: dict[int, Fraction] = {}
    for rows, weight in zip(lists, weights, strict=True):
        for rank, row in enumerate(rows, start=1):
            total[row] = total.get(row, Fraction(0)) + Fraction(weight, k + rank)
    return sorted(total.items(), key=lambda item: (-item[1], item[0]))


@given(questions=st.lists(LISTS, min_size=1, max_size=3), k=st.sampled_from([1, 60, 1000]), data=st.data())
def test_sum_of_reciprocal_ranks_orders_hits(questions: list[list[list[int]]], k: int, data: st.DataObject) -> None:
    legs = min(map(len, questions))
    weights = data.draw(st.lists(st.integers(1, 3), min_size=legs, max_size=legs))
    rankings = [np.array([(question[leg] + [-1] * 6)[:6] for question in questions], np.int64) for leg in range(legs)]
    rows, scores = fuse(rankings, k, [float(weight) for weight in weights])
    for number, question in enumerate(questions):
        expected = _fuse_exactly(question[:legs], k, weights)
        is_hit = rows[number] >= 0
        assert rows[number][is_hit].tolist() == [row for row, _ in expected]
        assert scores[number][is_hit] == pytest.approx([float(score) for _, score in expected])
        assert not is_hit[len(expected) :].any(), "-1 is only after the last row"


def test_sums_that_differ_only_by_rounding_are_ties() -> None:
    legs = [np.array([[0, 2]]), np.array([[3, 1]]), np.array([[3, 1]])]
    assert fuse(legs, 1000, [3.0, 1.0, 2.0])[0].tolist() == [[0, 3, 1, 2]]


def _pyserini_scores(
    first: dict[int, float], second: dict[int, float], alpha: float, normalize: bool
) -> dict[int, float]:
    """Compute `HybridSearcher._hybrid_results` of Pyserini, with 0 instead of a division by zero."""
    low_first, high_first = (min(first.values()), max(first.values())) if first else (0, 1)
    low_second, high_second = (min(second.values()), max(second.values())) if second else (0, 1)
    scores = {}
    for row in first.keys() | second.keys():
        a, b = first.get(row, low_first), second.get(row, low_second)
        if normalize:
            a = (a - (low_first + high_first) / 2) / (high_first - low_first) if high_first > low_first else 0
            b = (b - (low_second + high_second) / 2) / (high_second - low_second) if high_second > low_second else 0
        scores[row] = a + alpha * b
    return scores


@pytest.mark.parametrize("normalize", [False, True])
def test_interpolation_equals_pyserinis(normalize: bool) -> None:
    generator = np.random.default_rng(7)
    for alpha in (0.0, 0.1, 1.3):
        # Few rows and few scores, so that lists overlap, tie, and are sometimes empty or of one score.
        lists = [
            [
                dict(zip(generator.permutation(30)[:size].tolist(), np.sort(values)[::-1].tolist(), strict=True))
                for size in generator.integers(0, 12, 500)
                for values in [generator.integers(-4, 5, size).astype(np.float32) * np.float32(0.7)]
            ]
            for _ in range(2)
        ]
        rows, scores = interpolate(*map(_build_rows, lists), alpha, normalize=normalize)
        for number, (first, second) in enumerate(zip(*lists, strict=True)):
            expected = _pyserini_scores(first, second, alpha, normalize)
            ranked_rows = sorted(expected, key=lambda row: (-expected[row], row))
            assert rows[number, : len(ranked_rows)].tolist() == ranked_rows
            assert (rows[number, len(ranked_rows) :] == -1).all()
            assert scores[number, : len(ranked_rows)].tolist() == [expected[row] for row in ranked_rows]


def _build_rows(lists: list[dict[int, float]]) -> RankedRows:
    """Return the lists of all queries, best first, with NaN as the score of missing rows."""
    rows, scores = np.full((len(lists), 12), -1, np.int64), np.full((len(lists), 12), np.nan, np.float32)
    for number, score_by_row in enumerate(lists):
        rows[number, : len(score_by_row)] = list(score_by_row)
        scores[number, : len(score_by_row)] = list(score_by_row.values())
    return RankedRows("leg", rows, scores)


def test_interpolated_hits_have_the_scores_of_their_legs(snapshot: Snapshot, encoder: Encoder) -> None:
    text = "interpolate(hnsw, ivfpq:3, alpha=1.5)"
    retriever = open_retriever(snapshot, text, encoder=encoder)
    assert retriever.name == "interpolate(hnsw, ivfpq:3, 1.5)"
    for hits, ivfpq_hits in zip(
        retriever.search(QUESTIONS, 12), DenseRetriever(snapshot, encoder, "ivfpq").search(QUESTIONS, 3), strict=True
    ):
        assert len(hits) == 12
        for hit in hits:
            scores = {leg.leg: leg.score for leg in hit.legs}
            second_score = scores.get("ivfpq", ivfpq_hits[-1].score)
            assert hit.score == pytest.approx(scores["hnsw"] + 1.5 * second_score, rel=1e-5)
    nested = open_retriever(snapshot, f"rrf({text}, interpolate(hnsw, exact, 2, normalization=true))", encoder=encoder)
    legs = [leg.leg for leg in nested.search(QUESTIONS, 1)[0][0].legs]
    assert "interpolate(hnsw, exact, 2, normalization=true)" in legs


def test_fused_hits_have_the_ranks_and_scores_of_their_legs(snapshot: Snapshot, encoder: Encoder) -> None:
    legs = {name: DenseRetriever(snapshot, encoder, name).search(QUESTIONS, 12) for name in ("hnsw", "exact")}
    fused = open_retriever(snapshot, "rrf(hnsw, exact:3, k=10, weights=[1, 2])", encoder=encoder).search(QUESTIONS, 5)
    for number, hits in enumerate(fused):
        assert [hit.rank for hit in hits] == [1, 2, 3, 4, 5]
        for hit in hits:
            leg_results = {leg.leg: (leg.rank, leg.score) for leg in hit.legs}
            expected = {
                name: (leg_hit.rank, pytest.approx(leg_hit.score))
                for name, depth in (("hnsw", 12), ("exact", 3))
                for leg_hit in legs[name][number][:depth]
                if leg_hit.row == hit.row
            }
            assert leg_results == expected
            weights = {"hnsw": 1, "exact": 2}
            score = sum(weights[name] / (10 + rank) for name, (rank, _) in leg_results.items())
            assert hit.score == pytest.approx(score)
        assert any(len(hit.legs) == 1 for hit in hits), "rank 4 of one leg is not among the 3 hits of the other"


def test_legs_may_differ_in_a_setting_only(snapshot: Snapshot, encoder: Encoder) -> None:
    expression = "interpolate(rrf(hnsw, exact, k=1), rrf(hnsw, exact, k=60), 1)"
    hit = open_retriever(snapshot, expression, encoder=encoder).search(QUESTIONS, 1)[0][0]
    fused_scores = {leg.leg: leg.score for leg in hit.legs if leg.leg.startswith("rrf")}
    assert fused_scores.keys() == {"rrf(hnsw, exact, k=1)", "rrf(hnsw, exact)"}
    assert hit.score == pytest.approx(sum(fused_scores.values()))
    with pytest.raises(UsageError, match=r"rrf\(hnsw, exact\) is given twice"):
        open_retriever(snapshot, "rrf(rrf(hnsw, exact), rrf(hnsw, exact, k=60):5)")


def test_legs_are_searched_deeper_than_k(snapshot: Snapshot, encoder: Encoder) -> None:
    hit = open_retriever(snapshot, "rrf(hnsw, exact)", encoder=encoder).search(QUESTIONS, 1)[0][0]
    assert [leg.rank for leg in hit.legs] == [1, 1]
    deep = open_retriever(snapshot, "rrf(hnsw, exact:1)", encoder=encoder).search(QUESTIONS, snapshot.n)[0]
    assert len(deep) == snapshot.n
    assert [len(deep_hit.legs) for deep_hit in deep] == [2] + [1] * (snapshot.n - 1)


def test_fusion_of_fusions_names_every_step(snapshot: Snapshot, encoder: Encoder) -> None:
    nested = open_retriever(snapshot, "rrf(rrf(hnsw, ivfpq):4, exact)", encoder=encoder)
    hit = nested.search(QUESTIONS, 1)[0][0]
    assert [leg.leg for leg in hit.legs] == ["hnsw", "ivfpq", "rrf(hnsw, ivfpq)", "exact"]


@pytest.mark.parametrize(
    ("expression", "k", "message"),
    [
        ("rrf(hnsw:2, exact:3)", 6, r"k is 6 but rrf\(hnsw:2, exact:3\) gives 5 passages"),
        ("rrf(hnsw, exact)", 13, "k is 13 but the snapshot holds 12 passages"),
        ("rrf(hnsw, exact)", 0, "k is 0: ask for at least 1"),
    ],
)
def test_k_out_of_range_is_refused(snapshot: Snapshot, encoder: Encoder, expression: str, k: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_retriever(snapshot, expression, encoder=encoder).search(QUESTIONS, k)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("rrf(hnsw)", "character 1: rrf fuses two or more retrievers"),
        ("rrf()", "two or more retrievers"),
        ("rrf(hnsw, hnsw)", "character 11: the retriever hnsw is given twice"),
        ("rrf(hnsw:5, hnsw:50)", "character 13: the retriever hnsw is given twice"),
        ("rrf(hnsw, exact, k=0)", "character 20: k of rrf is 0: give a whole number from 1"),
        ("rrf(hnsw, exact, k=-3)", "k of rrf is -3"),
        ("rrf(hnsw, exact, k=1.5)", "k of rrf is 1.5"),
        ("rrf(hnsw, exact, k=[1])", r"k of rrf is \[1\]"),
        ("rrf(hnsw, exact, weights=[1])", "is a list of 1 for 2 retrievers: give one number per retriever"),
        ("rrf(hnsw, exact, weights=[1, 2, 3])", "weights of rrf is a list of 3 for 2 retrievers"),
        ("rrf(hnsw, exact, weights=2)", r"weights of rrf is 2: give a list, as in weights=\[1, 1\]"),
        ("rrf(hnsw, exact, weights=[1, 0])", "character 30: weights holds 0: give numbers above 0"),
        ("rrf(hnsw, exact, weights=[1, nan])", "weights holds nan"),
        ("rrf(hnsw, exact, weights=[1, inf])", "weights holds inf"),
        ("rrf(hnsw, exact, depth=5)", "rrf has no option 'depth': its options are k and weights"),
        ("rrf(hnsw, [exact])", r"\[exact\] is not a retriever"),
        ("interpolate(hnsw, exact)", "character 1: interpolate takes two retrievers and the weight of the second"),
        ("interpolate(hnsw, exact, 1, alpha=1)", "two retrievers and the weight of the second"),
        ("interpolate(hnsw, hnsw, 1)", "character 19: the retriever hnsw is given twice"),
        ("interpolate(hnsw, exact, half)", "character 26: argument 3 of interpolate is half: give a number"),
        ("interpolate(hnsw, exact, alpha=inf)", "alpha of interpolate is inf: give a number"),
        ("interpolate(hnsw, exact, -1)", "alpha of interpolate is -1: give a number from 0 to 1,000,000"),
        ("interpolate(hnsw, exact, 1, normalization=1)", "normalization of interpolate is 1: give true or false"),
        ("interpolate(hnsw, exact, 1, k=60)", "has no option 'k': its options are alpha and normalization"),
        ("rrf(hnsw:-1, exact)", "character 5: the depth of 'hnsw' is -1 passages"),
    ],
)
def test_wrong_fusions_are_refused(snapshot: Snapshot, expression: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_retriever(snapshot, expression)
