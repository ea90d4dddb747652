"""The benchmark of the paper's findings: when it says `reproduced`, and that its smallest run ends."""

import json
from dataclasses import replace

import pytest

from rag_model.evaluation.answers.readings import Reading
from rag_model.evaluation.answers.scores import ScoredAnswer, score_answer
from rag_model.evaluation.bootstrap import Estimate
from rag_model.evaluation.measures.measure import AnswerKind
from rag_model.evaluation.questions import Question
from tests.benchmarks.paper_swap import changed
from tests.benchmarks.paper_verdicts import GOLD, NOT, REPRODUCED, UNDECIDABLE, Finding, Judged, judge, verdict
from tests.fixtures.benchmarks import run_benchmark


def answers(texts: list[str], gold: str, kind: AnswerKind) -> list[ScoredAnswer]:
    return [
        score_answer(Question(str(at), "?", (f"{gold} {at}",)), Reading(str(at), text, None, ()), kind)
        for at, text in enumerate(texts)
    ]


def judged(measure: str, larger: list[ScoredAnswer], smaller: list[ScoredAnswer], other: str = "b") -> Judged:
    found = judge(
        Finding("table 1", "x", measure, "a", other), {"x: a": larger, f"x: {other}": smaller, "x: b": smaller}
    )
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("low", "high", "differing", "said"),
    [
        (0.01, 0.2, 6, REPRODUCED),
        (-0.2, -0.01, 6, NOT),
        (-0.1, 0.1, 60, UNDECIDABLE),
        (0.0, 0.1, 60, UNDECIDABLE),
        (-0.1, 0.0, 60, UNDECIDABLE),
        (1.0, 1.0, 5, UNDECIDABLE),  # five questions that agree: p = .0625
    ],
)
def test_a_verdict_is_the_side_of_zero_on_which_the_interval_lies(
    low: float, high: float, differing: int, said: str
) -> None:
    assert verdict(Estimate((low + high) / 2, low, high, 100), differing) == said


def test_a_seed_that_disagrees_makes_a_finding_undecidable() -> None:
    difference = Estimate(0.1, 0.01, 0.2, 100)
    assert verdict(difference, 60, (0.3, 0.2, 0.0)) == REPRODUCED
    assert verdict(difference, 60, (0.3, 0.2, -0.1)) == UNDECIDABLE
    assert verdict(Estimate(-0.1, -0.2, -0.01, 100), 60, (-0.3, 0.1)) == UNDECIDABLE


def test_each_seed_has_a_difference_of_its_own() -> None:
    right = [
        replace(one, question=replace(one.question, id=f"{at // 4}-questions-{at}"))
        for at, one in enumerate(answers([f"king {at}" for at in range(8)], "king", "spans"))
    ]
    wrong = [replace(one, measures={**one.measures, "EM": float(at > 5)}) for at, one in enumerate(right)]
    assert judged("EM", right, wrong).seeds == (1.0, 0.5)


def test_a_library_is_changed_where_it_holds_an_answer() -> None:
    asked = [
        Question("0", "who ruled?", ("Queen Ann",)),
        Question("1", "who came then?", ("King Bob", "Bob")),
        Question("2", "in which year?", ("1702",)),  # no other number: nothing to change it for
        Question("3", "who was last?", ("Carl",)),
    ]
    library = [("", "Queen Ann ruled from 1702."), ("", "King Bob came then, Bob!"), ("", "It was carl."), ("", "-")]
    before, after, texts = changed(asked, library)
    assert [one.id for one in before] == ["0", "1"]  # a Carl of small letters is still one
    assert [one.answers for one in after] == [("King Bob",), ("Carl",)]
    assert [text for _, text in texts] == ["King Bob ruled from 1702.", "Carl came then, Carl!", "It was carl.", "-"]


def test_a_measure_of_each_answer_is_compared_question_by_question() -> None:
    right, wrong = answers([f"king {at}" for at in range(8)], "king", "spans"), answers(["?"] * 8, "king", "spans")
    assert judged("EM", right, wrong).verdict == REPRODUCED
    assert judged("EM", wrong, right).verdict == NOT
    few = judged("EM", right[:5], wrong)  # of the first only: the questions of both
    assert (few.ours, few.difference.n, few.verdict) == ((1.0, 0.0), 5, UNDECIDABLE)
    assert judge(Finding("table 1", "x", "EM", "a", "b"), {"x: a": right}) is None


def test_a_measure_of_all_answers_is_compared_over_the_same_questions() -> None:
    varied = answers([f"state {at} has king {at}" for at in range(9)], "state with some king", "texts")
    alike = answers(["this state has a king"] * 9, "state with some king", "texts")
    found = judged("distinct-3", varied, alike)
    assert found.ours == (1.0, 3 / 27)
    assert found.verdict == REPRODUCED
    assert judged("distinct-3", alike, varied).verdict == NOT
    gold = judge(Finding("table 5", "x", "distinct-3", GOLD, "b"), {"x: b": alike})
    assert gold is not None
    assert gold.ours == (11 / 27, 3 / 27)  # "state with some" and "with some king" stand in all nine
    assert judged("BLEU-1", varied, varied).ours[0] > 0
    assert judged("BLEU-1", varied, varied).verdict == UNDECIDABLE


def test_the_smallest_run_judges_each_finding_of_the_made_world() -> None:
    tiny = ["--subjects", "2", "--steps", "1", "--reader-steps", "1", "--made-questions", "2", "--most", "3"]
    *table, line = run_benchmark("bench_paper.py", *tiny).splitlines()
    found = json.loads(line)
    assert len(table) == 2 + len(found["findings"])
    assert found["verdicts"] == {REPRODUCED: 0, NOT: 0, UNDECIDABLE: 9}
    assert {one["where"] for one in found["findings"]} == {"table 6", "section 4.5", "figure 3"}
