"""Hits that contain an answer, and the cutoffs of reports."""

import pytest

from rag_model.evaluation.measures.retrieval import report_cutoffs
from rag_model.evaluation.questions import Question
from rag_model.evaluation.retrieval.judging import match_hits


def test_the_title_is_not_searched(make_hits) -> None:
    assert match_hits(Question("a", "Q", ("Title 1",)), make_hits([("1", "text")])).first_answer_rank is None


@pytest.mark.parametrize(("k", "depths"), [(1, [1]), (5, [1, 5]), (20, [1, 5, 20]), (30, [1, 5, 20, 30])])
def test_report_cutoffs_end_with_k(k: int, depths: list[int]) -> None:
    assert report_cutoffs(k) == depths


def test_patterns_match_anywhere_in_a_text(make_hits) -> None:
    question = Question("a", "Q", (r"19\d\d",))
    hits = make_hits([("1", "in 1789"), ("2", "about 1912")])
    assert match_hits(question, hits, patterns=True).has_answer == (False, True)
    assert match_hits(question, hits).first_answer_rank is None
