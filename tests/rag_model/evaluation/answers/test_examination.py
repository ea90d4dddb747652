"""An evaluation of answers, with a retriever and a reader whose results are known."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rag_model.errors import InputError, UsageError
from rag_model.evaluation.answers.ablation import (
    CLOSED_BOOK,
    GOLD_PASSAGE,
    OPEN_BOOK,
    SHUFFLED_PASSAGES,
    AblationSettings,
)
from rag_model.evaluation.answers.examination import AnswerCache, AnswerEvaluation
from rag_model.evaluation.answers.settings import EvaluationSettings
from rag_model.evaluation.measures.measure import JudgedBy
from rag_model.evaluation.questions import Question, QuestionSet
from rag_model.retrieve.hits import Hit
from rag_model.store.store import Store
from tests.fixtures.last_word_reader import LastWordReader

N = 24


class CircularRetriever:
    """Retrieves the passages n, n + 1, … in a circle for question n, or always the same if it has collapsed."""

    def __init__(self, hits: Sequence[Hit], has_collapsed: bool = False) -> None:
        self.hits, self.has_collapsed = hits, has_collapsed

    def search(self, questions: Sequence[str], k: int) -> list[list[Hit]]:
        starts = [0 if self.has_collapsed else int(question) for question in questions]
        return [[self._hit(start + position, position + 1) for position in range(k)] for start in starts]

    def _hit(self, position: int, rank: int) -> Hit:
        return replace(self.hits[position % len(self.hits)], rank=rank)


Evaluate = Callable[..., AnswerEvaluation]


@pytest.fixture
def evaluate(make_hits, tmp_path: Path) -> Evaluate:
    hits = make_hits([(str(n), f"it was {1900 + n}") for n in range(N)])
    store = Store.open(str(tmp_path / "store"), create=True)

    def evaluate_questions(
        questions: Sequence[Question], settings: EvaluationSettings, k: int = 2, has_collapsed: bool = False
    ) -> AnswerEvaluation:
        retriever, answer_cache = (
            CircularRetriever(hits, has_collapsed),
            AnswerCache(store, LastWordReader(), {"has_collapsed": has_collapsed}),
        )
        evaluation = AnswerEvaluation(retriever, answer_cache, QuestionSet(tuple(questions)), k, N, settings)
        evaluation.retrieve()
        for condition in evaluation.list_conditions():
            evaluation.answer_condition(condition)
        return evaluation

    return evaluate_questions


def create_questions(*golds: str) -> list[Question]:
    return [Question(str(n), str(n), golds or (f"{1900 + n}",)) for n in range(N)]


def test_an_evaluation_shows_that_a_model_reads(evaluate: Evaluate) -> None:
    evaluation = evaluate(create_questions(), EvaluationSettings(depth=5, ablations=AblationSettings(sweep=(1, 99))))
    assert [row.name for row in evaluation.results] == [
        OPEN_BOOK,
        CLOSED_BOOK,
        GOLD_PASSAGE,
        SHUFFLED_PASSAGES,
        f"{OPEN_BOOK}, k = 1",
    ]
    assert [row.metrics["EM"].value for row in evaluation.results] == [1, 0, 1, 0, 1]
    assert evaluation.retrieval == {"Success@1": 1, "Success@5": 1}
    assert evaluation.ranks == {"RR@5": 1}
    assert (evaluation.collapse.spread, evaluation.collapse.unchanged) == (pytest.approx(1), 0)
    assert evaluation.collapse.describe_collapse() == ""


def test_an_evaluation_shows_a_collapsed_retriever(evaluate: Evaluate) -> None:
    evaluation = evaluate(
        create_questions(), EvaluationSettings(ablations=AblationSettings(sweep=())), has_collapsed=True
    )
    assert evaluation.collapse.spread == pytest.approx(0)
    assert evaluation.collapse.unchanged == 1  # shuffled passages are the same ones
    assert "retrieval has collapsed" in evaluation.collapse.describe_collapse()


def test_k_and_depth_are_limited_to_the_corpus(evaluate: Evaluate) -> None:
    evaluation = evaluate(create_questions(), EvaluationSettings(depth=1000), k=500)
    assert (evaluation.k, evaluation.results[0].k, evaluation.depth) == (N, N, N)
    assert set(evaluation.retrieval) == {"Success@1", "Success@5", "Success@20", f"Success@{N}"}


def test_patterns_are_searched_in_passages_and_answers(evaluate: Evaluate) -> None:
    evaluation = evaluate(create_questions(r"19\d5"), EvaluationSettings(kind="patterns", depth=3))
    right = [n for n in range(N) if n % 10 == 5]
    assert evaluation.results[0].metrics["EM"].value == pytest.approx(len(right) / N)
    assert evaluation.retrieval["Success@3"] == pytest.approx(
        sum(any((n + i) % N in right for i in range(3)) for n in range(N)) / N
    )
    with pytest.raises(InputError, match="not a regular expression"):
        evaluate(create_questions("("), EvaluationSettings(kind="patterns"))


def test_labels_are_not_searched_in_passages(evaluate: Evaluate) -> None:
    claims = [Question(str(n), str(n), ("SUPPORTS",), (frozenset({str(n)}),)) for n in range(N)]
    evaluation = evaluate(claims, EvaluationSettings(kind="labels", depth=5, ablations=AblationSettings(sweep=())))
    assert evaluation.retrieval == {}
    assert evaluation.ranks == {"nDCG@10": 1, "Article@1": 1, "Article@10": 1}
    assert evaluation.results[2].name == GOLD_PASSAGE  # found by its page
    assert evaluation.results[0].metrics["R-precision"].value == 1
    assert evaluation.results[0].metrics["KILT-AC"].value == 0


@pytest.mark.parametrize(("judged_by", "depth"), [("answers", 20), ("pages", 20), ("passages", 10)])
def test_each_recorded_value_is_the_mean_of_its_values_per_question(
    evaluate: Evaluate, judged_by: JudgedBy, depth: int
) -> None:
    # Two passages are read; the relevant page is at rank 4.
    evidence = [(frozenset({str((n + 3) % N)}),) for n in range(N)]
    passages = [(f"{(n + 3) % N}-{(n + 3) % N + 1}",) for n in range(N)]
    questions = [Question(str(n), str(n), (f"{1900 + n}",), evidence[n], passages[n]) for n in range(N)]
    evaluation = evaluate(questions, EvaluationSettings(judged_by=judged_by, depth=depth))
    estimates = {**evaluation.intervals, **evaluation.results[0].metrics}
    answer_metrics = {name: estimate.value for name, estimate in evaluation.results[0].metrics.items()}
    recorded_metrics = {**evaluation.retrieval, **answer_metrics, **evaluation.ranks}
    assert (recorded_metrics["recall@5"], recorded_metrics["Article@10"]) == (0, 1)
    columns = evaluation.list_question_values()
    assert {"recall@5", "R-precision", "EM"} < columns.keys() <= recorded_metrics.keys()
    for name, column in columns.items():
        assert recorded_metrics[name] == pytest.approx(sum(filter(None, column)) / N), name
        assert estimates[name].low <= recorded_metrics[name] <= estimates[name].high, name


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        EvaluationSettings(depth=0)
    with pytest.raises(UsageError, match="at least 1"):
        EvaluationSettings(k=0)
