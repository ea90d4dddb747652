"""The verbs of versions on models in an S3 store, and a model that was trained elsewhere."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DPRConfig,
    DPRQuestionEncoder,
    RagConfig,
    RagSequenceForGeneration,
)

from rag_model.store.store import Store
from rag_model.store.versions.models import ModelMetadata, put_model
from tests.fixtures.serving import wait_until
from tests.fixtures.tiny import SHAPE, add_tokenizer
from tests.fixtures.tiny_generators import save_bart
from tests.fixtures.tiny_rag import save_tiny_rag

pytestmark = pytest.mark.xdist_group("processes")  # These tests share the S3 server.

QUESTION = "who wrote about anarchism?"


@pytest.fixture(scope="class")
def store(library: Path, tiny: Path, s3_store_url: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The small library on S3, with two models that the name `reader` had in turn."""
    fsspec.filesystem("s3").put(f"{library}/", f"{s3_store_url}/library/", recursive=True)
    url = f"{s3_store_url}/library"
    opened_store = Store.open(url)
    for kind in ("sequence", "token"):
        folder = save_tiny_rag(tmp_path_factory.mktemp(kind), tiny, kind)  # type: ignore[arg-type]
        lineage, metrics = {"recipe": {"loop": {"seed": 0}}}, {"after": {"f1": 0.5}}
        put_model(opened_store, folder, ModelMetadata(f"rag-{kind}", None, lineage, metrics), "reader", "trained")
    return url


@pytest.fixture
def run_json(bookwheel: Callable[..., Any], store: str) -> Callable[..., Any]:
    """Run a verb that succeeds, by default on the S3 store, and return its JSON."""

    def run(*arguments: object) -> Any:
        result = bookwheel(*arguments, *([] if "--store" in arguments else ["--store", store]), "--json")
        assert result.code == 0, result.err
        return result.json

    return run


class TestOnS3:
    def test_version_verbs_apply_to_models(
        self, run_json: Callable[..., Any], bookwheel: Callable[..., Any], store: str
    ) -> None:
        log = run_json("log", "--ref", "model:reader")
        assert [(move["number"], move["note"]) for move in log] == [(2, "trained"), (1, "trained")]
        new_model, old_model = log[0]["model"], log[1]["model"]
        assert run_json("show", "model:reader")["id"] == new_model
        assert run_json("show", "model:reader@1", "--recipe-only") == {"loop": {"seed": 0}}
        verified = {"ok": True, "model": new_model, "signed": "not signed", "problems": []}
        assert run_json("verify", f"model:{new_model[:8]}") == verified
        assert run_json("rollback", "model:reader")["model"] == old_model
        assert run_json("tag", f"model:{new_model}", "reader")["number"] == 4
        assert run_json("tag", f"model:{new_model}", "model:twin")["model"] == new_model
        deleted = run_json("tag", "--delete", "model:twin", "--yes")
        assert (deleted["model"], deleted["others"]) == (new_model, ["reader"])
        result = bookwheel("diff", "model:reader@1", "model:reader", "--store", store)
        assert (result.code, "is not the name of a snapshot" in result.complaint) == (2, True)

    def test_model_answers_from_store_pull_and_export(
        self, run_json: Callable[..., Any], bookwheel: Callable[..., Any], store: str, tmp_path: Path
    ) -> None:
        reply = run_json("answer", QUESTION, "--model", "reader")
        model = reply["model"]
        pulled = run_json("pull", "model:reader", tmp_path / "pulled")
        assert set(pulled) == {"model", "path", "fetched_bytes", "reused_bytes", "pruned", "taken_down"}
        assert (pulled["model"], pulled["path"], pulled["reused_bytes"]) == (model, str(tmp_path / "pulled" / model), 0)
        second_pull = run_json("pull", "model:reader", tmp_path / "pulled")
        assert (second_pull["fetched_bytes"], second_pull["reused_bytes"]) == (0, pulled["fetched_bytes"])
        exported = run_json("export", "model:reader", tmp_path / "plain")
        assert (exported["model"], exported["kind"], exported["bytes"]) == (model, "rag-token", pulled["fetched_bytes"])
        for folder in (tmp_path / "pulled" / "current", tmp_path / "plain"):
            assert run_json("answer", QUESTION, "--model", folder)["answers"] == reply["answers"]
            AutoModel.from_pretrained(folder / "question")
            AutoModelForSeq2SeqLM.from_pretrained(folder / "generator")
        for arguments in (["pull", "--no-embeddings"], ["pull", "--index", "hnsw"], ["export", "--layout", "dpr"]):
            failure = bookwheel(arguments[0], "model:reader", tmp_path / "no", *arguments[1:], "--store", store)
            assert (failure.code, "is a model" in failure.complaint) == (2, True)
        result = bookwheel("pull", "latest", tmp_path / "pulled", "--store", store)
        assert (result.code, "is a folder of models" in result.complaint) == (2, True)

    def test_expire_and_gc_delete_unnamed_model(
        self, run_json: Callable[..., Any], s3_store_url: str, tmp_path: Path
    ) -> None:
        opened_store, models = Store.open(f"{s3_store_url}/another", create=True), []
        for word in ("one", "two"):
            (tmp_path / "config.json").write_text(word)
            models.append(put_model(opened_store, tmp_path, ModelMetadata("dpr", None, {}), "finder").model)
        store_option = ("--store", opened_store.url)
        expired = run_json("expire", "--keep", 1, "--older-than", "0", "--yes", *store_option)
        assert (expired["moves"], expired["models"]) == (["model:finder@1"], [models[0]])
        # S3 times are whole seconds, and gc keeps a file that is as new as its listing.
        wait_until(lambda: run_json("gc", "--grace", "0", "--yes", *store_option)["kinds"]["blobs"]["files"] == 1)
        assert run_json("verify", "model:finder", *store_option)["ok"]


@pytest.fixture(scope="module")
def foreign_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like facebook/rag-sequence-nq, which does not declare its passage encoder."""
    folder = tmp_path_factory.mktemp("foreign")
    torch.manual_seed(3)
    question = DPRQuestionEncoder(DPRConfig(**SHAPE, projection_dim=0))
    generator = AutoModelForSeq2SeqLM.from_pretrained(save_bart(tmp_path_factory.mktemp("bart")))
    config = RagConfig.from_question_encoder_generator_configs(question.config, generator.config, n_docs=2)
    RagSequenceForGeneration(config=config, question_encoder=question, generator=generator).save_pretrained(folder)
    (folder / "question_encoder_tokenizer").mkdir()
    add_tokenizer(folder / "question_encoder_tokenizer")
    AutoTokenizer.from_pretrained(generator.name_or_path).save_pretrained(folder / "generator_tokenizer")
    return folder


def test_foreign_model_answers_with_declared_passage_encoder(
    foreign_model: Path, library: Path, tiny: Path, other_tiny: Path, bookwheel: Callable[..., Any], tmp_path: Path
) -> None:
    command = ["answer", QUESTION, "--store", library, "--model", foreign_model]
    result = bookwheel(*command)
    assert (result.code, "does not declare its passage encoder" in result.complaint) == (1, True)
    assert "--asks" in result.complaint
    accepted = bookwheel(*command, "--asks", tiny, "--json")
    assert accepted.code == 0, accepted.err
    assert len(accepted.json["answers"][0]["passages"]) == 2
    failure = bookwheel(*command, "--asks", other_tiny)
    assert (failure.code, "weights differ" in failure.complaint) == (3, True)

    snapshot = bookwheel("show", "latest", "--store", library, "--json").json
    space = snapshot["content"]["representations"]["embeddings"]["space"]
    declared = Path(shutil.copytree(foreign_model, tmp_path / "declared"))
    (declared / "question_encoder_tokenizer" / "bookwheel.json").write_text(json.dumps({"asks": space}))
    command[-1] = declared
    assert bookwheel(*command, "--json").json["answers"] == accepted.json["answers"]
    mismatch = bookwheel(*command, "--asks", other_tiny)
    assert (mismatch.code, "weights differ" in mismatch.complaint) == (3, True)


def test_foreign_model_is_evaluated_with_declared_passage_encoder(
    foreign_model: Path, library: Path, tiny: Path, bookwheel: Callable[..., Any], tmp_path: Path
) -> None:
    store, questions = shutil.copytree(library, tmp_path / "store"), tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"question": QUESTION, "answers": ["Proudhon"]}) + "\n")
    command = ["evaluate", "--store", store, "--questions", questions, "--asks", tiny]
    result = bookwheel(*command, "--model", foreign_model, "--json")
    assert (result.json["n"], result.json["k"]) == (1, 2)
    assert bookwheel(*command).code == 2, "--asks needs --model"
