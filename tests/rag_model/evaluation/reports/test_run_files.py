"""Readers of their formats can read run files, and a failed write leaves no partial file."""

import json
from pathlib import Path

import pytest

from rag_model.errors import InputError, UsageError
from rag_model.evaluation.answers.readings import AnswerPassage, Reading
from rag_model.evaluation.answers.scores import ScoredAnswer, score_answer
from rag_model.evaluation.questions import Question
from rag_model.evaluation.reports.run_files import (
    check_paths,
    write_answers,
    write_dpr,
    write_jsonl,
    write_kilt,
    write_trec,
)
from rag_model.evaluation.retrieval.judging import RetrievalResult, match_hits


@pytest.fixture
def outcomes(make_hits) -> list[RetrievalResult]:
    first = make_hits([("1", "in Paris — “Zoë”"), ("2", "elsewhere")])
    return [match_hits(Question("q 1", "Where?", ("Paris",)), first), match_hits(Question("q2", "Who?"), ())]


def test_trec_run_is_read_by_ir_measures(tmp_path: Path, outcomes: list[RetrievalResult]) -> None:
    measures = pytest.importorskip("ir_measures")
    write_trec(outcomes, tmp_path / "run.trec")
    rows = [(d.query_id, d.doc_id, d.score) for d in measures.read_trec_run(str(tmp_path / "run.trec"))]
    assert rows == [("q%201", "1-1", 1.0), ("q%201", "2-2", 0.5)]


def test_dpr_json_has_the_reader_s_fields(tmp_path: Path, outcomes: list[RetrievalResult]) -> None:
    write_dpr(outcomes, tmp_path / "run.json")
    first, second = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert first["question"] == "Where?"
    assert first["answers"] == ["Paris"]
    assert first["ctxs"][0] == {
        "id": "1-1",
        "title": "Title 1",
        "text": "in Paris — “Zoë”",
        "score": "1",
        "has_answer": True,
    }
    assert [context["has_answer"] for context in first["ctxs"]] == [True, False]
    assert second == {"question": "Who?", "answers": [], "ctxs": []}


def test_jsonl_has_a_row_for_each_question(tmp_path: Path, outcomes: list[RetrievalResult]) -> None:
    write_jsonl(outcomes, tmp_path / "new" / "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "new" / "rows.jsonl").read_text("utf-8").splitlines()]
    assert [(row["id"], row["first"], len(row["hits"])) for row in rows] == [("q 1", 1, 2), ("q2", None, 0)]


@pytest.mark.parametrize("write", [write_trec, write_dpr, write_jsonl])
def test_a_failed_write_keeps_the_old_file(tmp_path: Path, outcomes: list[RetrievalResult], write) -> None:
    path = tmp_path / "run"
    path.write_text("before")
    with_invalid_result = [outcomes[0], None]
    with pytest.raises(AttributeError):
        write(with_invalid_result, path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_unusable_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_paths(None, str(tmp_path / "new" / "run.trec"), str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"it is a folder"):
        check_paths(str(tmp_path))
    with pytest.raises(InputError, match=r"file is not a folder"):
        check_paths(None, str(tmp_path / "file" / "run.trec"))
    question_file, run_file = str(tmp_path / "asked.jsonl"), str(tmp_path / "run.trec")
    with pytest.raises(UsageError, match=r"asked\.jsonl holds the questions"):
        check_paths(None, run_file, question_file, questions=question_file)
    with pytest.raises(UsageError, match=r"run\.trec is given twice"):
        check_paths(run_file, str(tmp_path / "." / "run.trec"), questions=question_file)


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path, outcomes: list[RetrievalResult]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="choose another path"):
        write_trec(outcomes, tmp_path / "file" / "run")


@pytest.fixture
def scored_answers() -> list[ScoredAnswer]:
    passages = tuple(AnswerPassage(f"{page}-0", page, "Paris", "“Zoë”", 1.5, 0.75, 0.25) for page in ("7", "7", "8"))
    return [score_answer(Question("q 1", "Where?", ("Paris",)), Reading("q 1", "paris", -0.5, passages, ended=False))]


def test_answers_have_a_row_for_each_question(tmp_path: Path, scored_answers: list[ScoredAnswer]) -> None:
    write_answers(scored_answers, tmp_path / "rows.jsonl")
    (row,) = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    passages = row.pop("passages")
    assert row == {
        "id": "q 1",
        "problem": None,
        "question": "Where?",
        "answers": ["Paris"],
        "prediction": "paris",
        "memory": "passages",
        "ended": False,
        "log_likelihood": -0.5,
        "closed_book_log_likelihood": None,
        "statements": [],
        "metrics": {"EM": 1.0, "F1": 1.0, "EM-unheld": 1.0, "supported": 0.0},
    }
    assert [passage["rank"] for passage in passages] == [1, 2, 3]
    assert passages[0] == {
        "rank": 1,
        "id": "7-0",
        "page_id": "7",
        "title": "Paris",
        "text": "“Zoë”",
        "score": 1.5,
        "weight": 0.75,
        "posterior": 0.25,
    }


def test_predictions_are_written_in_the_format_of_kilt(tmp_path: Path, scored_answers: list[ScoredAnswer]) -> None:
    write_kilt(scored_answers, tmp_path / "kilt.jsonl")
    provenance = [{"wikipedia_id": "7"}, {"wikipedia_id": "8"}]
    expected = {"id": "q 1", "output": [{"answer": "paris", "provenance": provenance}]}
    assert json.loads((tmp_path / "kilt.jsonl").read_text(encoding="utf-8")) == expected
