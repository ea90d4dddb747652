"""Token vectors in every verb: encoded, compressed, gated, reused, taken down, pulled and searched."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_model.corpus.ragged_file import TokenFile
from rag_model.encoders.muvera import Muvera
from rag_model.encoders.token_encoder import TokenEncoder
from rag_model.index.tokens.kind import TokenRows
from rag_model.index.tokens.search import maxsim
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.indexes import open_index
from rag_model.store.store import Store
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.tiny import save_cross_encoder
from tests.fixtures.tiny_colbert import DIM as TINY_DIM
from tests.fixtures.tiny_colbert import save_colbert, save_marked_bert

RECIPE = """
part_bytes = 50_000

[represent.tokens]
encoder = "{colbert}"

[represent.fixed]
kind = "muvera"
encoder = "{colbert}"
muvera = {{ repetitions = 2, bits = 2, projected = 8 }}

[index.hnsw]
factory = "HNSW8"

[index.fixed]
factory = "HNSW8"
over = "fixed"

[index.coded]
factory = "IVF4,PQ16np"
over = "fixed"

[index.tokens]
factory = "MaxSim,PQ8"

[gate.floors.coded]
mean = 0.3
p5 = 0.0

[gate.floors.tokens]
mean = 0.1
p5 = 0.0

[gate.floors.fixed]
mean = 0.5
p5 = 0.0
"""
QUESTION = "who was the king of the river city?"


@pytest.fixture(scope="module")
def colbert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny ColBERT."""
    return save_colbert(tmp_path_factory.mktemp("late") / "colbert")


def test_token_vectors_are_built_searched_taken_down_and_pulled(
    reindex: Any, bookwheel: Any, colbert: Path, tmp_path: Path
) -> None:
    late_recipe = tmp_path / "late.toml"
    late_recipe.write_text(RECIPE.format(colbert=colbert))
    store = tmp_path / "store"
    first = reindex(store, recipe=late_recipe)
    assert first.code == 0, first.err
    assert "embed tokens" in first.json["seconds"]
    assert first.json["metrics"]["tokens"]["tokens_a_passage"] > 5
    with Snapshot.open(str(store)) as snapshot:
        content = snapshot.manifest.content
        assert content.representations["tokens"]["kind"] == "tokens"
        files = snapshot.row_files("tokens")
        assert [TokenFile(path).n for path in files] == [part.rows for part in snapshot.parts]
        assert len(files) > 1
        n_passages = snapshot.n
        passages = snapshot.passages([0, n_passages - 1])
        encoder = TokenEncoder.load(colbert)
        encoded = encoder.encode_passages([p.title for p in passages], [p.text for p in passages])
        stored = TokenRows(files).take(np.array([0, n_passages - 1]))
        assert (stored.offsets == encoded.offsets).all()
        assert np.abs(stored.vectors - encoded.vectors).max() < 2e-3  # float16

        muvera = Muvera(TINY_DIM, repetitions=2, bits=2, projected=8)
        fixed_vectors = np.concatenate([snapshot.embeddings(part.name, "fixed") for part in snapshot.parts])
        assert fixed_vectors.shape == (n_passages, muvera.encoded_dim)
        assert np.abs(fixed_vectors[[0, -1]] - muvera.encode_passages(encoded)).max() < 2e-3
        hits = open_retriever(snapshot, "fixed").search([QUESTION], 3)[0]
        query_vectors = encoder.encode_questions([QUESTION])
        scores = fixed_vectors @ muvera.encode_questions(query_vectors)[0]
        assert [hit.score for hit in hits] == pytest.approx([scores[hit.row] for hit in hits], rel=1e-2)

        coded_hits = open_retriever(snapshot, "coded").search([QUESTION], n_passages)[0]
        assert {hit.row for hit in hits} <= {hit.row for hit in coded_hits[: n_passages // 2]}, "the same vectors"

        token_index = open_index(snapshot, "tokens")
        tokens = token_index.decode(np.arange(n_passages))
        scores = maxsim(query_vectors, tokens.vectors, tokens.offsets)[0]
        best_rows = np.lexsort((np.arange(n_passages), -scores))[:5]
        assert [hit.row for hit in open_retriever(snapshot, "tokens").search([QUESTION], 5)[0]] == best_rows.tolist()
        retriever = f"maxsim(hnsw:20, tokens, {n_passages}, rounds=4)"
        hits = open_retriever(snapshot, retriever).search([QUESTION], 5)[0]
        assert [hit.score for hit in hits] == pytest.approx([scores[hit.row] for hit in hits], abs=1e-3)
        assert all({leg.leg for leg in hit.legs} & {"hnsw", "neighbours(hnsw)"} for hit in hits)

    second = reindex(store, recipe=late_recipe)
    assert (second.json["snapshot"], second.json["counts"]["embedded"]) == (first.json["snapshot"], 0)
    explanation = reindex(store, "--explain", recipe=late_recipe)
    assert explanation.code == 0, explanation.err
    stages = {row["stage"]: row for row in explanation.json["stages"]}
    assert stages["embed tokens"]["recorded"] == stages["embed tokens"]["tasks"]

    result = bookwheel("takedown", "12", "--store", store, "--yes", "--json")
    assert result.code == 0, result.err
    with Snapshot.open(str(store)) as new_snapshot:
        assert 0 < new_snapshot.n < n_passages
        assert TokenRows(new_snapshot.row_files("tokens")).n == open_index(new_snapshot, "tokens").n == new_snapshot.n
        snapshot_id = new_snapshot.id
    assert verify_version(Store.open(str(store)), snapshot_id) == []

    pulled = tmp_path / "pulled"
    assert bookwheel("pull", "latest", pulled, "--store", store, "--index", "hnsw", "--index", "tokens").code == 0
    assert not list(pulled.rglob("embeddings/**/*.arrow")), "the index has the codes of the vectors"
    rerank = "maxsim(hnsw:20, tokens, 50)"
    with Snapshot.from_folder(pulled) as local:
        local_hits = open_retriever(local, rerank).search([QUESTION], 3)[0]
        assert len(local_hits) == 3
    result = bookwheel("search", QUESTION, "--store", store, "-k", 3, "--retriever", rerank, "--json")
    assert [hit["id"] for hit in result.json["results"][0]["hits"]] == [hit.passage.id for hit in local_hits]


def test_wrong_recipes_and_retrievers_are_refused(
    reindex: Any, bookwheel: Any, library: Path, tiny: Path, colbert: Path, tmp_path: Path
) -> None:
    recipe, graph = tmp_path / "wrong.toml", '[index.hnsw]\nfactory = "HNSW8"\n'
    for text, message in (
        (f'[represent.tokens]\nencoder = "{tiny}"\n{graph}', "is not a ColBERT"),
        (f'[represent.other]\nencoder = "{colbert}"\n{graph}', "is a ColBERT"),
        ('[index.tokens]\nfactory = "MaxSim"\n', "add [represent.tokens]"),
    ):
        recipe.write_text(text)
        assert message in reindex(tmp_path / "none", recipe=recipe).complaint

    for expression, message in (
        ("maxsim(hnsw, hnsw, 50)", "hnsw is not an index over token vectors"),
        ("maxsim(hnsw)", "maxsim takes a retriever"),
        ("maxsim(hnsw, rrf(hnsw, exact), 50)", "is not an index over token vectors"),
        ("maxsim(hnsw, lost, 50)", "no index 'lost'"),
    ):
        result = bookwheel("search", "x", "--store", library, "--retriever", expression)
        assert result.code == 2
        assert message in result.complaint


TRAINING = """
[loop]
learning_rate = 1e-3
max_steps = 3
cpu = true

[colbert]
dim = 16
question_length = 12
passage_length = 32
batch_size = 4
ways = 3

[negatives]
ranked = 20
"""


def test_colbert_is_trained_with_teacher_stored_and_indexed_by_name(
    reindex: Any, bookwheel: Any, library: Path, tmp_path: Path
) -> None:
    store = Path(shutil.copytree(library, tmp_path / "store"))
    passages = Snapshot.open(str(store)).passages(range(0, 120, 10))
    rows = [
        {"question": passage.title, "answers": ["zzz"], "title": passage.title, "context": passage.text}
        for passage in passages
    ]
    train, dev, training = tmp_path / "train.jsonl", tmp_path / "dev.jsonl", tmp_path / "colbert.toml"
    for path, split_rows in ((train, rows[:8]), (dev, rows[8:])):
        path.write_text("".join(json.dumps(row) + "\n" for row in split_rows))
    training.write_text(TRAINING)
    command = ["finetune", "colbert", "--store", store, "--train", train, "--dev", dev, "--training", training]
    command += ["--encoder", save_marked_bert(tmp_path / "plain"), "--json"]
    untaught = bookwheel(*command)
    assert untaught.code == 0, untaught.err
    taught = bookwheel(*command, "--teacher", save_cross_encoder(tmp_path / "teacher"), "--name", "taught")
    assert taught.code == 0, taught.err
    assert [*Store.open(str(store)).files.list_names("memo/teach")], "the recorded scores of the teacher"
    assert taught.json["model"] != untaught.json["model"]
    assert "average_rank" in taught.json["metrics"]["after"]

    recipe = tmp_path / "named.toml"
    recipe.write_text(RECIPE.format(colbert="model:taught"))
    build = reindex(store, recipe=recipe)
    assert build.code == 0, build.err
    assert build.json["metrics"]["tokens"]["tokens_a_passage"] <= 32
    recipe.write_text(RECIPE.format(colbert="model:lost"))
    assert reindex(store, recipe=recipe).complaint
