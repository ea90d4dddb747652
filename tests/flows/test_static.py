"""A static encoder in every verb: it is gated, rebuilt, searched, fused and served, but not trained."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_model.encoders.encoder import Encoder
from rag_model.resources.estimates import estimate_build
from rag_model.retrieve.factory import open_retriever
from rag_model.snapshots.recipe import Recipe
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.serving import make_settings, run_service
from tests.fixtures.tiny_static import save_model2vec, save_static_embedding

RECIPE = """
part_bytes = 50_000

[represent.quick]
encoder = "{encoder}"

[index.hnsw]
factory = "HNSW8"

[index.quick]
factory = "Flat"
over = "quick"

[index.bm25]
factory = "BM25"
"""
QUESTION = "who was the king of the river city?"
PROGRAM = """
import sys
from flows.cli import run
code = run(sys.argv[1:])
unused = {"prefect", "httpx", "torch", "transformers", "apache_beam", "pandas", "scipy.linalg", "pydantic", "rich"}
print(code, *sorted(unused & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A static encoder in the format of model2vec."""
    return save_model2vec(tmp_path_factory.mktemp("static"))


@pytest.fixture(scope="module")
def nested_static(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another static encoder, in the format of sentence-transformers, which has no config."""
    return save_static_embedding(tmp_path_factory.mktemp("nested"), seed=2, inside="0_StaticEmbedding", normalize=True)


def test_static_encoder_works_in_every_verb(
    static: Path, nested_static: Path, tiny: Path, reindex: Any, bookwheel: Any, tmp_path: Path
) -> None:
    store, recipe = tmp_path / "store", tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(encoder=nested_static))
    first = reindex(store, encoder=static, recipe=recipe)
    assert first.code == 0, first.err
    assert first.json["metrics"]["quick"]["recall@20"] == 1.0
    second = reindex(store, encoder=static, recipe=recipe)
    assert (second.json["snapshot"], second.json["counts"]["embedded"]) == (first.json["snapshot"], 0)

    with Snapshot.open(str(store)) as snapshot:
        content, last = snapshot.manifest.content, snapshot.n - 1
        spaces = {name: content.space_of(name) or {} for name in ("embeddings", "quick")}
        assert [space["name"].rpartition("-")[0] for space in spaces.values()] == ["StaticModel-16", "StaticModel-16"]
        assert spaces["quick"]["digest"] == Encoder.load(nested_static).space().digest
        (passage,) = snapshot.passages([last])
        encoded = Encoder.load(static).encode_passages([passage.title], [passage.text])
        stored = np.asarray(snapshot.embeddings(snapshot.parts[-1].name))[-1]
        assert np.array_equal(stored, encoded[0].astype(np.float16))
        hits = open_retriever(snapshot, "rrf(hnsw, quick, bm25)").search([passage.title], 3)[0]

    fused = ("--retriever", "rrf(hnsw, quick, bm25)")
    result = bookwheel("search", passage.title, "--store", store, "-k", 3, *fused, "--json")
    assert result.code == 0, result.err
    assert [hit["id"] for hit in result.json["results"][0]["hits"]] == [hit.passage.id for hit in hits]

    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"id": "p", "question": QUESTION, "answers": ["king"]}) + "\n")
    both = ("--retriever", "quick", "--retriever", "rrf(quick, bm25)")
    assert bookwheel("evaluate", "--store", store, "--questions", questions, "--json", *both).code == 0

    with run_service(str(store), tmp_path / "dest", make_settings(retrievers=("hnsw", "quick"))) as served:
        for retriever in ("hnsw", "quick"):
            reply = served.client.post("/search", json={"questions": [QUESTION], "k": 2, "retriever": retriever})
            assert reply.status_code == 200, reply.text

    examples = tmp_path / "examples.jsonl"
    examples.write_text(json.dumps({"question": QUESTION, "answers": ["king"], "context": "the king"}) + "\n")
    for kind, encoder_option in (("dpr", ()), ("cross-encoder", ()), ("dpr", ("--encoder", nested_static))):
        result = bookwheel("finetune", kind, "--train", examples, "--dev", examples, "--store", store, *encoder_option)
        assert (result.code, "is static and cannot be trained" in result.complaint) == (2, True), result.complaint

    transformer_build = reindex(store, encoder=tiny, recipe=recipe)
    assert transformer_build.code == 3, "the gate refuses another encoder space"
    result = bookwheel("search", "x", "--store", store, "--question-encoder", nested_static)
    assert "cannot search a snapshot of encoder StaticModel-16-" in result.complaint


def test_damaged_static_encoder_is_refused(static: Path, reindex: Any, tmp_path: Path) -> None:
    broken = save_model2vec(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes((static / "model.safetensors").read_bytes()[:-9])
    result = reindex(tmp_path / "store", encoder=broken)
    assert result.code
    assert "is truncated (9 bytes are missing): fetch it again" in result.complaint


def test_static_encoding_has_its_own_rate(static: Path, tiny: Path) -> None:
    quick, slow = (estimate_build(1_000_000, folder, Recipe().index, None) for folder in (static, tiny))
    assert quick.operations == 0 < slow.operations
    assert quick.seconds > 1_000_000 * 5e-5


def test_rebuild_without_server_imports_neither_prefect_nor_torch_nor_pandas(static: Path, tmp_path: Path) -> None:
    dump = tmp_path / "dump.jsonl"
    lines = [{"_id": str(number), "title": "Rivers", "text": f"the king of river {number}"} for number in range(40)]
    dump.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    words = ["reindex", "--dump", str(dump), "--store", str(tmp_path / "store"), "--encoder", str(static)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["PREFECT_LOGGING_LEVEL"] = "CRITICAL"  # The command line sets it too; it configures no server.
    for settings, output in (
        ('[project]\ndependencies = ["prefect"]', "0"),
        ('[tool.prefect.api]\nurl = "http://127.0.0.1:1/api"', "1 httpx prefect pydantic rich"),
    ):
        (tmp_path / "pyproject.toml").write_text(settings)
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM, *words],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert result.stdout.splitlines()[-1] == output, result.stderr
    assert "server at http://127.0.0.1:1/api cannot be reached" in result.stderr
