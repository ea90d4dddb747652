"""Every verb of versions on a model, over a real S3 server; and a model that was trained elsewhere."""

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
from tests.fixtures.serving import until
from tests.fixtures.tiny import SHAPE, add_tokenizer
from tests.fixtures.tiny_generators import save_bart
from tests.fixtures.tiny_rag import save_tiny_rag

pytestmark = pytest.mark.xdist_group("processes")  # which share the S3 server

ASKED = "who wrote about anarchism?"


@pytest.fixture(scope="class")
def store(library: Path, tiny: Path, s3_store_url: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The small library on S3, with a model under two names and one before it."""
    fsspec.filesystem("s3").put(f"{library}/", f"{s3_store_url}/library/", recursive=True)
    url = f"{s3_store_url}/library"
    opened = Store.open(url)
    for kind in ("sequence", "token"):
        made = save_tiny_rag(tmp_path_factory.mktemp(kind), tiny, kind)  # type: ignore[arg-type]
        lineage, metrics = {"recipe": {"loop": {"seed": 0}}}, {"after": {"f1": 0.5}}
        put_model(opened, made, ModelMetadata(f"rag-{kind}", None, lineage, metrics), "reader", "trained")
    return url


@pytest.fixture
def json_of(bookwheel: Callable[..., Any], store: str) -> Callable[..., Any]:
    """Run a verb that ends well, on the store unless told otherwise, and return its document."""

    def run(*words: object) -> Any:
        where = [] if "--store" in words else ["--store", store]
        result = bookwheel(*words, *where, "--json")
        assert result.code == 0, result.err
        return result.json

    return run


class TestOnS3:
    """A model of a store on S3."""

    def test_a_model_is_a_version_as_a_snapshot_is(
        self, json_of: Callable[..., Any], bookwheel: Callable[..., Any], store: str
    ) -> None:
        log = json_of("log", "--ref", "model:reader")
        assert [(move["number"], move["note"]) for move in log] == [(2, "trained"), (1, "trained")]
        new, old = log[0]["model"], log[1]["model"]
        assert json_of("show", "model:reader")["id"] == new
        assert json_of("show", "model:reader@1", "--recipe-only") == {"loop": {"seed": 0}}
        assert json_of("verify", f"model:{new[:8]}") == {
            "ok": True,
            "model": new,
            "signed": "not signed",
            "problems": [],
        }
        assert json_of("rollback", "model:reader")["model"] == old
        assert json_of("tag", f"model:{new}", "reader")["number"] == 4
        assert json_of("tag", f"model:{new}", "model:twin")["model"] == new
        gone = json_of("tag", "--delete", "model:twin", "--yes")
        assert (gone["model"], gone["others"]) == (new, ["reader"])
        compared = bookwheel("diff", "model:reader@1", "model:reader", "--store", store)
        assert (compared.code, "is not the name of a snapshot" in compared.complaint) == (2, True)

    def test_a_model_is_read_with_from_the_store_from_a_pull_and_from_an_export(
        self, json_of: Callable[..., Any], bookwheel: Callable[..., Any], store: str, tmp_path: Path
    ) -> None:
        answered = json_of("answer", ASKED, "--model", "reader")
        model = answered["model"]
        pulled = json_of("pull", "model:reader", tmp_path / "pulled")
        assert set(pulled) == {"model", "path", "fetched_bytes", "reused_bytes", "pruned", "taken_down"}
        assert (pulled["model"], pulled["path"], pulled["reused_bytes"]) == (model, str(tmp_path / "pulled" / model), 0)
        again = json_of("pull", "model:reader", tmp_path / "pulled")
        assert (again["fetched_bytes"], again["reused_bytes"]) == (0, pulled["fetched_bytes"])
        exported = json_of("export", "model:reader", tmp_path / "plain")
        assert (exported["model"], exported["kind"], exported["bytes"]) == (model, "rag-token", pulled["fetched_bytes"])
        for folder in (tmp_path / "pulled" / "current", tmp_path / "plain"):
            assert json_of("answer", ASKED, "--model", folder)["answers"] == answered["answers"]
            AutoModel.from_pretrained(folder / "question")
            AutoModelForSeq2SeqLM.from_pretrained(folder / "generator")
        for words in (["pull", "--no-embeddings"], ["pull", "--index", "hnsw"], ["export", "--layout", "dpr"]):
            refused = bookwheel(words[0], "model:reader", tmp_path / "no", *words[1:], "--store", store)
            assert (refused.code, "is a model" in refused.complaint) == (2, True)
        wrong = bookwheel("pull", "latest", tmp_path / "pulled", "--store", store)
        assert (wrong.code, "is a folder of models" in wrong.complaint) == (2, True)

    def test_what_no_name_has_is_forgotten_and_its_files_go(
        self, json_of: Callable[..., Any], s3_store_url: str, tmp_path: Path
    ) -> None:
        opened, put = Store.open(f"{s3_store_url}/another", create=True), []
        for word in ("one", "two"):
            (tmp_path / "config.json").write_text(word)
            put.append(put_model(opened, tmp_path, ModelMetadata("dpr", None, {}), "finder").model)
        here = ("--store", opened.url)
        forgotten = json_of("expire", "--keep", 1, "--older-than", "0", "--yes", *here)
        assert (forgotten["moves"], forgotten["models"]) == (["model:finder@1"], [put[0]])
        # The store's clock counts whole seconds: files of the second of the listing are kept.
        until(lambda: json_of("gc", "--grace", "0", "--yes", *here)["kinds"]["blobs"]["files"] == 1)
        assert json_of("verify", "model:finder", *here)["ok"]


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as facebook/rag-sequence-nq: two configs, one file of weights, two folders of tokenizers, no record."""
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


def test_it_answers_when_somebody_says_whose_passages_it_asks(
    foreign: Path, library: Path, tiny: Path, other_tiny: Path, bookwheel: Callable[..., Any], tmp_path: Path
) -> None:
    given = ["answer", ASKED, "--store", library, "--model", foreign]
    silent = bookwheel(*given)
    assert (silent.code, "does not declare its passage encoder" in silent.complaint) == (1, True)
    assert "--asks" in silent.complaint
    said = bookwheel(*given, "--asks", tiny, "--json")
    assert said.code == 0, said.err
    assert len(said.json["answers"][0]["passages"]) == 2
    wrong = bookwheel(*given, "--asks", other_tiny)
    assert (wrong.code, "weights differ" in wrong.complaint) == (3, True)

    shown = bookwheel("show", "latest", "--store", library, "--json").json
    space = shown["content"]["representations"]["embeddings"]["space"]
    declared = Path(shutil.copytree(foreign, tmp_path / "declared"))
    (declared / "question_encoder_tokenizer" / "bookwheel.json").write_text(json.dumps({"asks": space}))
    given[-1] = declared
    assert bookwheel(*given, "--json").json["answers"] == said.json["answers"]
    contradicted = bookwheel(*given, "--asks", other_tiny)
    assert (contradicted.code, "weights differ" in contradicted.complaint) == (3, True)


def test_it_is_evaluated_the_same_way(
    foreign: Path, library: Path, tiny: Path, bookwheel: Callable[..., Any], tmp_path: Path
) -> None:
    store, questions = shutil.copytree(library, tmp_path / "store"), tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"question": ASKED, "answers": ["Proudhon"]}) + "\n")
    given = ["evaluate", "--store", store, "--questions", questions, "--asks", tiny]
    result = bookwheel(*given, "--model", foreign, "--json")
    assert (result.json["n"], result.json["k"]) == (1, 2)
    assert bookwheel(*given).code == 2, "retrieval alone has no model that could ask"
