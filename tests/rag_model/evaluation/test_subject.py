"""What identifies an evaluation: it changes with whatever decides a figure, and with nothing else."""

import dataclasses
import gzip
import json
from pathlib import Path

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
def asked(tmp_path: Path) -> QuestionSet:
    return read(tmp_path, ROWS)


def read(folder: Path, rows: list[dict[str, object]], name: str = "q.jsonl") -> QuestionSet:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_questions(folder / name)


def test_questions_are_known_by_what_they_ask(tmp_path: Path, asked: QuestionSet) -> None:
    (tmp_path / "q.jsonl.gz").write_bytes(gzip.compress((tmp_path / "q.jsonl").read_bytes()))
    assert digest_questions(read_questions(tmp_path / "q.jsonl.gz")) == digest_questions(asked)
    others = [
        [{**ROWS[0], "answers": ["she"]}, ROWS[1]],
        [{**ROWS[0], "id": "3"}, ROWS[1]],
        [{**ROWS[0], "passages": ["1:0"]}, ROWS[1]],
        [{**ROWS[0], "source": "nq"}, ROWS[1]],
        ROWS[::-1],
        ROWS[:1],
    ]
    found = {digest_questions(read(tmp_path, rows)) for rows in others}
    assert len(found | {digest_questions(asked)}) == len(others) + 1
    kilt = {
        "id": "1",
        "input": "who?",
        "output": [{"answer": "he", "provenance": [{"wikipedia_id": p} for p in "3142"]}],
    }
    assert digest_questions(read(tmp_path, [kilt])) == digest_questions(read(tmp_path, [kilt]))


def test_the_default_and_its_name_are_one_evaluation(
    store: Store, snapshot: Snapshot, asked: QuestionSet, hub: Hub
) -> None:
    judge = RetrievalJudge.for_questions(asked)
    plain = describe_retrieval_subject(store, snapshot, asked, [], 20, judge)
    assert describe_retrieval_subject(store, snapshot, asked, ["hnsw"], 20, judge) == plain
    others = [
        describe_retrieval_subject(store, snapshot, asked, ["exact"], 20, judge),
        describe_retrieval_subject(store, snapshot, asked, ["exact", "hnsw"], 20, judge),
        describe_retrieval_subject(store, snapshot, asked, [], 5, judge),
        describe_retrieval_subject(store, snapshot, asked, [], 20, RetrievalJudge.for_questions(asked, patterns=True)),
    ]
    repository = hub.add("models/another/encoder", {"config.json": b"{}"})
    for _ in range(2):  # the branch moves, so that the encoder is another
        others.append(describe_retrieval_subject(store, snapshot, asked, [], 20, judge, encoder="another/encoder"))
        commit = repository.branches["main"]
        assert others[-1].settings["models"] == {"another/encoder": f"another/encoder@{commit}"}
        repository.commit({"config.json": b"{ }"})
    assert len({one.id for one in (plain, *others)}) == 7
    answered = describe_answers_subject(store, snapshot, MODEL, asked, EvaluationSettings())
    assert describe_answers_subject(store, snapshot, MODEL, asked, EvaluationSettings(index="hnsw")) == answered
    changed = [
        dataclasses.replace(EvaluationSettings(), **one) for one in ({"k": 3}, {"depth": 5}, {"retriever": "exact"})
    ]
    found = {describe_answers_subject(store, snapshot, MODEL, asked, one).id for one in changed}
    assert (
        len({*found, answered.id, describe_answers_subject(store, snapshot, "b" * 64, asked, EvaluationSettings()).id})
        == 5
    )


def test_a_model_in_an_expression_is_known_by_its_bytes(
    store: Store, snapshot: Snapshot, asked: QuestionSet, tmp_path: Path
) -> None:
    judge = RetrievalJudge.for_questions(asked)

    def of(retriever: str) -> str:
        return describe_retrieval_subject(store, snapshot, asked, [retriever], 20, judge).id

    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    put_model(store, folder, ModelMetadata("cross-encoder", None, {}), "ranker")
    first = of("rerank(hnsw, model:ranker, 5)")
    assert of("rerank(hnsw, model:ranker, 5)") == first
    put_model(store, folder, ModelMetadata("cross-encoder", None, {"second": 1}), "ranker")
    assert of("rerank(hnsw, model:ranker, 5)") != first
    cross = save_cross_encoder(tmp_path / "cross")
    local = of(f"rerank(hnsw, {cross}, 5)")
    (cross / "README.md").write_text("changed")
    assert of(f"rerank(hnsw, {cross}, 5)") != local
    with pytest.raises(StoreError, match="no model or ref 'nothing'"):
        of("rerank(hnsw, model:nothing, 5)")


def test_a_folder_is_known_by_its_files(store: Store, snapshot: Snapshot, asked: QuestionSet, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    first = describe_answers_subject(store, snapshot, str(folder), asked, EvaluationSettings())
    assert first.model.startswith("sha256:")
    assert first.stored_model is None
    (folder / "config.json").write_text("{ }")
    assert describe_answers_subject(store, snapshot, str(folder), asked, EvaluationSettings()).model != first.model


def test_an_endpoints_model_is_known_by_its_address_and_settings(
    store: Store, snapshot: Snapshot, asked: QuestionSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(model: str = "openai:small") -> str:
        return describe_answers_subject(store, snapshot, model, asked, EvaluationSettings()).id

    monkeypatch.setenv("BOOKWHEEL_LLM_BASE_URL", "http://localhost:8000/v1")
    monkeypatch.setenv("BOOKWHEEL_LLM_API_KEY", "a-key")
    first = of()
    assert of("openai:large") != first
    monkeypatch.setenv("BOOKWHEEL_LLM_API_KEY", "another-key")
    assert of() == first
    monkeypatch.setenv("BOOKWHEEL_LLM_CONTEXT", "4096")
    assert of() != first
    monkeypatch.delenv("BOOKWHEEL_LLM_CONTEXT")
    monkeypatch.setenv("BOOKWHEEL_LLM_BASE_URL", "http://localhost:9000/v1")
    assert of() != first


def test_an_installed_measure_makes_another_evaluation(
    store: Store, snapshot: Snapshot, asked: QuestionSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, model_settings = RetrievalJudge.for_questions(asked), EvaluationSettings()
    without = describe_retrieval_subject(store, snapshot, asked, [], 20, judge)
    assert "measures" not in without.settings
    monkeypatch.setattr("rag_model.evaluation.subject.list_measure_versions", lambda: {"AP": "1"})
    first = describe_retrieval_subject(store, snapshot, asked, [], 20, judge)
    assert first.settings == {**without.settings, "measures": {"AP": "1"}}
    assert describe_answers_subject(store, snapshot, MODEL, asked, model_settings).settings["measures"] == {"AP": "1"}
    monkeypatch.setattr("rag_model.evaluation.subject.list_measure_versions", lambda: {"AP": "2"})
    assert describe_retrieval_subject(store, snapshot, asked, [], 20, judge) != first
