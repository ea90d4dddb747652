"""An examination step by step, over a shelf that finds by rule and a reader that answers by rule."""

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
from rag_model.evaluation.questions import Question, QuestionSet
from rag_model.retrieve.hits import Hit
from rag_model.store.store import Store
from tests.fixtures.last_word_reader import LastWord

N = 24


class Shelf:
    """Finds for question n the passages n, n + 1, … in a circle; or, worn out, always the same."""

    def __init__(self, hits: Sequence[Hit], worn: bool = False) -> None:
        self.hits, self.worn = hits, worn

    def search(self, questions: Sequence[str], k: int) -> list[list[Hit]]:
        starts = [0 if self.worn else int(question) for question in questions]
        return [[self._hit(start + place, place + 1) for place in range(k)] for start in starts]

    def _hit(self, place: int, rank: int) -> Hit:
        return replace(self.hits[place % len(self.hits)], rank=rank)


Examine = Callable[..., AnswerEvaluation]


@pytest.fixture
def examine(make_hits, tmp_path: Path) -> Examine:
    hits = make_hits([(str(n), f"it was {1900 + n}") for n in range(N)])
    store = Store.open(str(tmp_path / "store"), create=True)

    def make(
        questions: Sequence[Question], settings: EvaluationSettings, k: int = 2, worn: bool = False
    ) -> AnswerEvaluation:
        shelf, answering = Shelf(hits, worn), AnswerCache(store, LastWord(), {"worn": worn})
        examination = AnswerEvaluation(shelf, answering, QuestionSet(tuple(questions)), k, N, settings)
        examination.retrieve()
        for condition in examination.list_conditions():
            examination.answer_condition(condition)
        return examination

    return make


def asked(*golds: str) -> list[Question]:
    return [Question(str(n), str(n), golds or (f"{1900 + n}",)) for n in range(N)]


def test_a_model_that_reads_is_told_so(examine: Examine) -> None:
    seen = examine(asked(), EvaluationSettings(depth=5, ablations=AblationSettings(sweep=(1, 99))))
    assert [row.name for row in seen.results] == [
        OPEN_BOOK,
        CLOSED_BOOK,
        GOLD_PASSAGE,
        SHUFFLED_PASSAGES,
        f"{OPEN_BOOK}, k = 1",
    ]
    assert [row.metrics["EM"].value for row in seen.results] == [1, 0, 1, 0, 1]
    assert seen.retrieval == {"Success@1": 1, "Success@5": 1}
    assert seen.ranks == {"RR@5": 1}
    assert (seen.collapse.spread, seen.collapse.unchanged) == (pytest.approx(1), 0)
    assert seen.collapse.describe_collapse() == ""


def test_a_retriever_that_has_collapsed_is_told_so(examine: Examine) -> None:
    seen = examine(asked(), EvaluationSettings(ablations=AblationSettings(sweep=())), worn=True)
    assert seen.collapse.spread == pytest.approx(0)
    assert seen.collapse.unchanged == 1  # another question's passages are the same
    assert "retrieval has collapsed" in seen.collapse.describe_collapse()


def test_more_passages_than_there_are_are_all_of_them(examine: Examine) -> None:
    seen = examine(asked(), EvaluationSettings(depth=1000), k=500)
    assert (seen.k, seen.results[0].k, seen.depth) == (N, N, N)
    assert set(seen.retrieval) == {"Success@1", "Success@5", "Success@20", f"Success@{N}"}


def test_patterns_are_looked_for_in_passages_and_answers(examine: Examine) -> None:
    seen = examine(asked(r"19\d5"), EvaluationSettings(kind="patterns", depth=3))
    right = [n for n in range(N) if n % 10 == 5]
    assert seen.results[0].metrics["EM"].value == pytest.approx(len(right) / N)
    assert seen.retrieval["Success@3"] == pytest.approx(
        sum(any((n + i) % N in right for i in range(3)) for n in range(N)) / N
    )
    with pytest.raises(InputError, match="not a regular expression"):
        examine(asked("("), EvaluationSettings(kind="patterns"))


def test_labels_are_not_looked_for_in_passages(examine: Examine) -> None:
    claims = [Question(str(n), str(n), ("SUPPORTS",), (frozenset({str(n)}),)) for n in range(N)]
    seen = examine(claims, EvaluationSettings(kind="labels", depth=5, ablations=AblationSettings(sweep=())))
    assert seen.retrieval == {}
    assert seen.ranks == {"R-precision": 1, "recall@5": 1, "nDCG@10": 1, "Article@1": 1, "Article@10": 1}
    assert seen.results[2].name == GOLD_PASSAGE  # by its page
    assert seen.results[0].metrics["R-precision"].value == 1
    assert seen.results[0].metrics["KILT-AC"].value == 0


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        EvaluationSettings(depth=0)
    with pytest.raises(UsageError, match="at least 1"):
        EvaluationSettings(k=0)
