"""The identity of an evaluation changes with everything that affects its metrics, and with nothing else."""

import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rag_model.errors import StoreError
from rag_model.evaluation.answers.settings import EvaluationSettings
from rag_model.evaluation.questions import QuestionSet, digest_questions, read_questions
from rag_model.evaluation.retrieval.judging import RetrievalJudge
from rag_model.evaluation.subject import describe_answers_subject, describe_retrieval_subject
from rag_model.store import Content, Manifest, PartEntry, Snapshot, Store
from rag_model.store.versions.models import ModelMetadata, put_model
from tests.fixtures.hub import Hub
from tests.fixtures.tiny import save_cross_encoder

ROWS = [{"id": "1", "question": "who?", "answers": ["he"]}, {"id": "2", "question": "what?", "answers": ["it", "that"]}]
MODEL = "a" * 64


@pytest.fixture
def snapshot(store: Store) -> Snapshot:
    blob = store.blobs.put_bytes(b"index")
    index = {"hnsw": {"kind": "hnsw", "factory": "HNSW8", "file": "index/hnsw.faiss", "n": 1, "d": 4}}
    space = {"embeddings": {"kind": "vectors", "space": {"digest": "sha256:0", "dim": 4}}}
    content = Content(
        {"kind": "wiki"}, (PartEntry("part-0", 0, 1, 1),), {"index/hnsw.faiss": blob}, {}, space, index, "hnsw"
    )
    return Snapshot.from_manifest(store, Manifest(content))


@pytest.fixture
def questions(tmp_path: Path) -> QuestionSet:
    return write_questions(tmp_path, ROWS)


def write_questions(folder: Path, rows: list[dict[str, object]], name: str = "q.jsonl") -> QuestionSet:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_questions(folder / name)


def test_the_digest_of_questions_depends_on_their_contents(tmp_path: Path, questions: QuestionSet) -> None:
    (tmp_path / "q.jsonl.gz").write_bytes(gzip.compress((tmp_path / "q.jsonl").read_bytes()))
    assert digest_questions(read_questions(tmp_path / "q.jsonl.gz")) == digest_questions(questions)
    question_lists = [
        [{**ROWS[0], "answers": ["she"]}, ROWS[1]],
        [{**ROWS[0], "id": "3"}, ROWS[1]],
        [{**ROWS[0], "passages": ["1:0"]}, ROWS[1]],
        [{**ROWS[0], "source": "nq"}, ROWS[1]],
        ROWS[::-1],
        ROWS[:1],
    ]
    digests = {digest_questions(write_questions(tmp_path, rows)) for rows in question_lists}
    assert len(digests | {digest_questions(questions)}) == len(question_lists) + 1
    kilt = {
        "id": "1",
        "input": "who?",
        "output": [{"answer": "he", "provenance": [{"wikipedia_id": p} for p in "3142"]}],
    }
    assert digest_questions(write_questions(tmp_path, [kilt])) == digest_questions(write_questions(tmp_path, [kilt]))


def test_the_default_retriever_and_its_name_are_the_same_evaluation(
    store: Store, snapshot: Snapshot, questions: QuestionSet, hub: Hub
) -> None:
    judge = RetrievalJudge.for_questions(questions)
    describe_retrieval = partial(describe_retrieval_subject, store, snapshot, questions)
    default_subject = describe_retrieval([], 20, judge)
    assert describe_retrieval(["hnsw"], 20, judge) == default_subject
    subjects = [
        describe_retrieval(["exact"], 20, judge),
        describe_retrieval(["exact", "hnsw"], 20, judge),
        describe_retrieval([], 5, judge),
        describe_retrieval([], 20, RetrievalJudge.for_questions(questions, patterns=True)),
    ]
    repository = hub.add("models/another/encoder", {"config.json": b"{}"})
    for _ in range(2):  # the branch moves, so that the encoder is another
        subjects.append(describe_retrieval([], 20, judge, encoder="another/encoder"))
        commit = repository.branches["main"]
        assert subjects[-1].settings["models"] == {"another/encoder": f"another/encoder@{commit}"}
        repository.commit({"config.json": b"{ }"})
    assert len({subject.id for subject in (default_subject, *subjects)}) == 7
    describe_answers = partial(describe_answers_subject, store, snapshot)
    answers_subject = describe_answers(MODEL, questions, EvaluationSettings())
    assert describe_answers(MODEL, questions, EvaluationSettings(index="hnsw")) == answers_subject
    changes: list[dict[str, Any]] = [{"k": 3}, {"depth": 5}, {"retriever": "exact"}]
    subjects = [describe_answers(MODEL, questions, EvaluationSettings(**change)) for change in changes]
    subjects += [answers_subject, describe_answers("b" * 64, questions, EvaluationSettings())]
    assert len({subject.id for subject in subjects}) == 5


def test_a_model_in_an_expression_is_identified_by_its_bytes(
    store: Store, snapshot: Snapshot, questions: QuestionSet, tmp_path: Path
) -> None:
    judge = RetrievalJudge.for_questions(questions)

    def describe_id(retriever: str) -> str:
        return describe_retrieval_subject(store, snapshot, questions, [retriever], 20, judge).id

    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    put_model(store, folder, ModelMetadata("cross-encoder", None, {}), "ranker")
    first = describe_id("rerank(hnsw, model:ranker, 5)")
    assert describe_id("rerank(hnsw, model:ranker, 5)") == first
    put_model(store, folder, ModelMetadata("cross-encoder", None, {"second": 1}), "ranker")
    assert describe_id("rerank(hnsw, model:ranker, 5)") != first
    cross = save_cross_encoder(tmp_path / "cross")
    folder_id = describe_id(f"rerank(hnsw, {cross}, 5)")
    (cross / "README.md").write_text("changed")
    assert describe_id(f"rerank(hnsw, {cross}, 5)") != folder_id
    with pytest.raises(StoreError, match="no model or ref 'nothing'"):
        describe_id("rerank(hnsw, model:nothing, 5)")


def test_a_folder_is_identified_by_its_files(
    store: Store, snapshot: Snapshot, questions: QuestionSet, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    first = describe_answers_subject(store, snapshot, str(folder), questions, EvaluationSettings())
    assert first.model.startswith("sha256:")
    assert first.stored_model is None
    (folder / "config.json").write_text("{ }")
    assert describe_answers_subject(store, snapshot, str(folder), questions, EvaluationSettings()).model != first.model


def test_a_model_of_an_endpoint_is_identified_by_address_and_settings(
    store: Store, snapshot: Snapshot, questions: QuestionSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def describe_id(model: str = "openai:small") -> str:
        return describe_answers_subject(store, snapshot, model, questions, EvaluationSettings()).id

    monkeypatch.setenv("BOOKWHEEL_LLM_BASE_URL", "http://localhost:8000/v1")
    monkeypatch.setenv("BOOKWHEEL_LLM_API_KEY", "a-key")
    first = describe_id()
    assert describe_id("openai:large") != first
    monkeypatch.setenv("BOOKWHEEL_LLM_API_KEY", "another-key")
    assert describe_id() == first
    monkeypatch.setenv("BOOKWHEEL_LLM_CONTEXT", "4096")
    assert describe_id() != first
    monkeypatch.delenv("BOOKWHEEL_LLM_CONTEXT")
    monkeypatch.setenv("BOOKWHEEL_LLM_BASE_URL", "http://localhost:9000/v1")
    assert describe_id() != first


def test_an_installed_measure_makes_another_evaluation(
    store: Store, snapshot: Snapshot, questions: QuestionSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, model_settings = RetrievalJudge.for_questions(questions), EvaluationSettings()
    without_measures = describe_retrieval_subject(store, snapshot, questions, [], 20, judge)
    assert "measures" not in without_measures.settings
    monkeypatch.setattr("rag_model.evaluation.subject.list_measure_versions", lambda: {"AP": "1"})
    first = describe_retrieval_subject(store, snapshot, questions, [], 20, judge)
    assert first.settings == {**without_measures.settings, "measures": {"AP": "1"}}
    answers_subject = describe_answers_subject(store, snapshot, MODEL, questions, model_settings)
    assert answers_subject.settings["measures"] == {"AP": "1"}
    monkeypatch.setattr("rag_model.evaluation.subject.list_measure_versions", lambda: {"AP": "2"})
    assert describe_retrieval_subject(store, snapshot, questions, [], 20, judge) != first
