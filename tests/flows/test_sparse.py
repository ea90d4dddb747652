"""Weighted terms in every verb: encoded, indexed, gated, reused, taken down, pulled, searched and served."""

import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flows import cli
from rag_model.corpus.ragged_file import SparseFile, SparseVectors
from rag_model.encoders.sparse_encoder import SparseEncoder
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.indexes import open_index
from rag_model.store.store import Store
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.impact_index import build_impact_index
from tests.fixtures.serving import make_settings, run_service
from tests.fixtures.tiny_splade import save_mlm, save_splade

RECIPE = """
part_bytes = 50_000

[represent.sparse]
encoder = "{encoder}"
spec = {{ passage_terms = 40 }}

[index.hnsw]
factory = "HNSW8"

[index.bm25]
factory = "BM25"

[index.splade]
factory = "Impact"
"""
BAG = '[index.bag]\nfactory = "Impact1"\nsearch = { terms = 30 }\n'
QUESTION = "who was the king of the river city?"


@pytest.fixture(scope="module")
def mlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny masked-language model."""
    return save_mlm(tmp_path_factory.mktemp("mlm"))


@pytest.fixture(scope="module")
def recipe_of_terms(mlm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with weighted terms."""
    path = tmp_path_factory.mktemp("recipe") / "sparse.toml"
    path.write_text(RECIPE.format(encoder=mlm))
    return path


@pytest.fixture(scope="module")
def sparse_build(
    mini_dump: Path, tiny: Path, recipe_of_terms: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """A store with a snapshot, and the reply of `reindex --json`; tests only read it."""
    store, out = tmp_path_factory.mktemp("store"), io.StringIO()
    options = ["--dump", mini_dump, "--encoder", tiny, "--recipe", recipe_of_terms, "--store", store]
    with redirect_stdout(out):
        assert cli.run(["reindex", *map(str, options), "--json"]) == 0
    return store, json.loads(out.getvalue())


def read_sparse_rows(snapshot: Snapshot) -> SparseVectors:
    return SparseVectors.concatenate(
        [block for path in snapshot.row_files("sparse") for block in SparseFile(path).iter_batches()]
    )


def test_sparse_index_returns_exact_scores(sparse_build: tuple[Path, Any], mlm: Path, tmp_path: Path) -> None:
    store, reply = sparse_build
    assert "embed sparse" in reply["seconds"]
    assert reply["metrics"]["splade"]["recall@20"] == 1.0
    assert "source@20" in reply["metrics"]["splade"]
    with Snapshot.open(str(store)) as snapshot:
        content, rows = snapshot.manifest.content, read_sparse_rows(snapshot)
        assert content.representations["sparse"]["kind"] == "sparse"
        assert len(snapshot.row_files("sparse")) == len(content.parts) > 1
        expected_file = build_impact_index(rows, tmp_path / "whole", 128).file.path
        assert expected_file.read_bytes() == snapshot.path("index/splade.postings").read_bytes()

        encoder, last = SparseEncoder.load(mlm, {"passage_terms": 40}), snapshot.n - 1
        passages = snapshot.passages([0, last])
        encoded = encoder.encode_passages([p.title for p in passages], [p.text for p in passages])
        stored = rows.take(np.array([0, last]))
        assert (stored.terms.tolist(), stored.weights.tolist()) == (encoded.terms.tolist(), encoded.weights.tolist())

        dense = np.zeros((snapshot.n, 128))
        dense[np.repeat(np.arange(snapshot.n), np.diff(rows.offsets)), rows.terms] = rows.weights / 64
        query_vectors = encoder.encode_questions([QUESTION])[0]
        scores = dense[:, query_vectors[:, 0].astype(int)] @ query_vectors[:, 1]
        expected = np.lexsort((np.arange(snapshot.n), -scores))[:5]
        hits = open_retriever(snapshot, "splade").search([QUESTION], 5)[0]
        assert [hit.row for hit in hits] == expected.tolist()
        assert [hit.score for hit in hits] == pytest.approx(scores[expected].tolist())


def test_sparse_index_is_fused_evaluated_and_served(
    sparse_build: tuple[Path, Any], bookwheel: Any, other_tiny: Path, tmp_path: Path
) -> None:
    store, fused = sparse_build[0], "rrf(bm25, splade(terms=20):50, hnsw)"
    result = bookwheel("search", QUESTION, "--store", store, "-k", 4, "--retriever", fused, "--json")
    assert result.code == 0, result.err
    legs = {leg["leg"] for hit in result.json["results"][0]["hits"] for leg in hit["legs"]}
    assert "splade(terms=20)" in legs <= {"bm25", "splade(terms=20)", "hnsw"}

    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"id": "p", "question": QUESTION, "answers": ["king"]}) + "\n")
    both = ("--retriever", "splade", "--retriever", fused)
    measured = bookwheel("evaluate", "--store", store, "--questions", questions, "--json", *both)
    assert measured.code == 0, measured.err

    with run_service(str(store), tmp_path / "dest", make_settings(retrievers=(fused, "splade"))) as served:
        for retriever in (None, "splade", "rrf(splade, hnsw)"):
            choice = {} if retriever is None else {"retriever": retriever}
            reply = served.client.post("/search", json={"questions": [QUESTION], "k": 4, **choice})
            assert reply.status_code == 200, reply.text
            ids = [hit["id"] for hit in reply.json()["results"][0]["hits"]]
            with Snapshot.open(str(store)) as snapshot:
                hits = open_retriever(snapshot, retriever or fused).search([QUESTION], 4)[0]
            assert ids == [hit.passage.id for hit in hits]

    for expression, message in (
        ("splade(k1=2)", "k1 is not a search parameter of this index: it takes terms"),
        ("splade(terms=0)", "terms is 0: give a whole number from 1 to 10,000"),
        ("maxsim(hnsw, splade, 50)", "splade is not an index over token vectors"),
    ):
        result = bookwheel("search", "x", "--store", store, "--retriever", expression)
        assert (result.code, message in result.complaint) == (2, True), result.complaint
    for encoder in (save_splade(tmp_path / "other", seed=8), other_tiny):
        options = ("--retriever", "splade", "--question-encoder", encoder)
        result = bookwheel("search", "x", "--store", store, *options)
        assert "cannot search a snapshot of encoder BertForMaskedLM-128-" in result.complaint


def test_bag_is_added_page_is_taken_down_and_postings_are_pulled(
    sparse_build: tuple[Path, Any], reindex: Any, bookwheel: Any, recipe_of_terms: Path, tmp_path: Path
) -> None:
    store, recipe_path = Path(shutil.copytree(sparse_build[0], tmp_path / "store")), tmp_path / "more.toml"
    result = reindex(store, "--explain", recipe=recipe_of_terms)
    stages = {row["stage"]: row for row in json.loads(result.out)["stages"]}
    assert stages["embed sparse"]["recorded"] == stages["embed sparse"]["tasks"] > 1
    recipe_path.write_text(recipe_of_terms.read_text() + BAG)
    result = bookwheel("add-index", "latest", "--recipe", recipe_path, "--index", "bag", "--store", store, "--json")
    assert result.code == 0, result.err
    assert result.json["metrics"]["bag"]["recall@20"] == 1.0
    with Snapshot.open(str(store)) as snapshot:
        n_passages, rows = snapshot.n, read_sparse_rows(snapshot)
        retriever = open_retriever(snapshot, "bag")
        encoder = SparseEncoder.load(snapshot.folder("encoder/sparse/question"))
        query_vector = encoder.encode_questions([QUESTION])[0][:30]
        weights = {int(term): weight for term, weight in query_vector.tolist()}
        contributions = np.array([weights.get(term, 0) for term in rows.terms.tolist()])
        scores = np.add.reduceat(contributions, rows.offsets[:-1])
        assert [hit.score for hit in retriever.search([QUESTION], 5)[0]] == pytest.approx(-np.sort(-scores)[:5])
    difference = bookwheel("diff", sparse_build[1]["snapshot"], "latest", "--store", store)
    assert "index/bag" in difference.out, difference.err
    assert "sparse" in bookwheel("show", "--store", store).out

    result = bookwheel("takedown", "12", "--store", store, "--yes", "--json")
    assert result.code == 0, result.err
    with Snapshot.open(str(store)) as new_snapshot:
        assert 0 < new_snapshot.n < n_passages
        assert len(read_sparse_rows(new_snapshot)) == new_snapshot.n
        assert open_index(new_snapshot, "splade").n == open_index(new_snapshot, "bag").n == new_snapshot.n
        assert verify_version(Store.open(str(store)), new_snapshot.id) == []

    pulled = tmp_path / "pulled"
    options = ("--index", "splade", "--index", "bm25", "--no-embeddings")
    assert bookwheel("pull", "latest", pulled, "--store", store, *options).code == 0
    assert not list(pulled.rglob("*.sparse")), "the index has the weights in its own format"
    with Snapshot.from_folder(pulled) as local:
        local_hits = open_retriever(local, "rrf(splade, bm25)").search([QUESTION], 3)[0]
    result = bookwheel("search", QUESTION, "--store", store, "-k", 3, "--retriever", "rrf(splade, bm25)", "--json")
    assert [hit["id"] for hit in result.json["results"][0]["hits"]] == [hit.passage.id for hit in local_hits]


def test_wrong_recipes_are_refused(reindex: Any, tiny: Path, mlm: Path, tmp_path: Path) -> None:
    splade, recipe = save_splade(tmp_path / "splade"), tmp_path / "wrong.toml"
    index, graph = '[index.s]\nfactory = "Impact"\n', '[index.hnsw]\nfactory = "HNSW8"'
    for text, message in (
        (f'[represent.sparse]\nencoder = "{tiny}"\n{index}', "is a BertModel, which has no weights over its vocab"),
        (f'[represent.other]\nencoder = "{splade}"\n{graph}', "is a sparse encoder, which computes"),
        (f'[represent.a]\nencoder = "{mlm}"\n{index}over = "a"', "but Impact takes sparse"),
        (index, "add [represent.sparse] with an encoder"),
        (f'[represent.a]\nkind = "sparse"\nencoder = "{mlm}"\nspec.scale = 0\n{index}over = "a"', "scale of a sparse"),
    ):
        recipe.write_text(text)
        assert message in reindex(tmp_path / "none", recipe=recipe).complaint


def test_plan_estimates_bytes_of_impact_index(bookwheel: Any) -> None:
    result = bookwheel("index", "--plan", "--index", "Impact1", "--n", 21_015_324, "--json")
    assert result.code == 0, result.err
    reply = result.json
    assert reply["disk_bytes"] == reply["n"] * (2 + 128 * 10 // 8)
    output = bookwheel("index", "--plan", "--index", "Impact", "--n", 1000).out
    assert "Impact over 1,000 passages\n" in output
