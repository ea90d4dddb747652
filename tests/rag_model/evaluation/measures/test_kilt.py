"""Provenance scores agree with the rules of KILT's evaluation script, and KILT's files are read."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.errors import InputError
from rag_model.evaluation.measures.answers import strict_match
from rag_model.evaluation.measures.retrieval import list_distinct_pages, r_precision, recall_at
from rag_model.evaluation.questions import read_questions

PAGES = st.lists(st.sampled_from("123456"), max_size=8)
EVIDENCE = st.lists(st.frozensets(st.sampled_from("123456"), min_size=1, max_size=3), min_size=1, max_size=3)


def kilt_r_precision(ranked: list[str], evidence: list[frozenset[str]]) -> float:
    best = 0.0
    for gold_pages in evidence:
        distinct_pages: list[str] = []
        for page in ranked:
            if page not in distinct_pages:
                distinct_pages.append(page)
                if len(distinct_pages) == len(gold_pages):
                    break
        best = max(best, sum(page in gold_pages for page in distinct_pages) / len(gold_pages))
    return best


def kilt_recall(ranked: list[str], evidence: list[frozenset[str]], k: int) -> float:
    """Walk through the ranking as the script does, and move the name of an incomplete set to its last page."""
    sets: list[set[str]] = []
    for gold_pages in evidence:
        if gold_pages not in sets:
            sets.append(set(gold_pages))
    total, ranks = len(sets), []
    for page in dict.fromkeys(ranked):
        is_hit = False
        for number, remaining in enumerate(sets):
            name = f"set {number}"
            if page in remaining:
                is_hit = True
                if name in ranks:
                    ranks.remove(name)
                remaining.remove(page)
                ranks.append(name if remaining else "complete")
        if not is_hit:
            ranks.append("wrong")
    return ranks[:k].count("complete") / total


@given(PAGES, EVIDENCE, st.integers(1, 6))
def test_provenance_scores_are_those_of_kilt(ranked: list[str], evidence: list[frozenset[str]], k: int) -> None:
    assert r_precision(ranked, evidence) == pytest.approx(kilt_r_precision(ranked, evidence))
    assert recall_at(ranked, evidence, k) == pytest.approx(kilt_recall(ranked, evidence, k))


def test_an_evidence_set_has_the_rank_of_its_last_page() -> None:
    both = [frozenset({"1", "2"})]
    assert [recall_at(["1", "9", "2"], both, k) for k in (1, 2, 3)] == [0, 1, 1]  # only "9" precedes the set
    assert [recall_at(["9", "1", "2"], both, k) for k in (1, 2)] == [0, 1]
    assert r_precision(["1", "1", "2"], both) == 1  # two passages of a page are one page


def test_scores_without_evidence_are_0() -> None:
    assert (r_precision(["1"], []), recall_at(["1"], [], 5)) == (0, 0)
    assert (r_precision([], [frozenset("1")]), recall_at([], [frozenset("1")], 5)) == (0, 0)
    assert list_distinct_pages(["2", "1", "2"]) == ["2", "1"]


def test_accuracy_is_strict() -> None:
    assert strict_match(" REFUTES", ["REFUTES"]) == 1
    assert strict_match("", [""]) == 0


def build_line(outputs: Any, **fields: Any) -> str:
    return json.dumps({"id": "q1", "input": "who?", "output": outputs, **fields}) + "\n"


def test_kilts_files_are_question_files(tmp_path: Path) -> None:
    path = tmp_path / "nq-dev-kilt.jsonl"
    outputs = [
        {"answer": "Paris", "meta": {"score": 1}, "provenance": [{"wikipedia_id": "12"}, {"wikipedia_id": "13"}]},
        {"answer": "Paris"},
        {"provenance": [{"wikipedia_id": 14, "title": "X"}]},
    ]
    path.write_text(build_line(outputs))
    (question,) = read_questions(path).questions
    assert (question.id, question.text, question.answers) == ("q1", "who?", ("Paris",))
    assert question.evidence == (frozenset({"12", "13"}), frozenset({"14"}))


def test_a_test_file_of_kilt_has_no_outputs(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text('{"id": "1", "input": "who?"}\n')
    assert read_questions(path).questions[0].answers == ()


@pytest.mark.parametrize("outputs", [5, [5], [{"provenance": [{"title": "X"}]}], [{"answer": 5}], [{"answer": ["x"]}]])
def test_malformed_outputs_are_named(outputs: Any, tmp_path: Path) -> None:
    path = tmp_path / "kilt.jsonl"
    path.write_text(build_line([]) + build_line(outputs, id="q2"))
    with pytest.raises(InputError, match=r"kilt\.jsonl, line 2"):
        read_questions(path)
