"""Token vectors the whole way: encoded by part, compressed, gated, inherited, taken down, pulled and searched."""

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


@pytest.fixture
def late(tmp_path: Path, colbert: Path) -> Path:
    """A recipe with token vectors."""
    path = tmp_path / "late.toml"
    path.write_text(RECIPE.format(colbert=colbert))
    return path


def test_token_vectors_go_the_whole_way(
    reindex: Any, bookwheel: Any, colbert: Path, late: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    first = reindex(store, recipe=late)
    assert first.code == 0, first.err
    assert "embed tokens" in first.json["seconds"]
    assert first.json["metrics"]["tokens"]["tokens_a_passage"] > 5
    with Snapshot.open(str(store)) as snapshot:
        content = snapshot.manifest.content
        assert content.representations["tokens"]["kind"] == "tokens"
        files = snapshot.row_files("tokens")
        assert [TokenFile(path).n for path in files] == [part.rows for part in snapshot.parts]
        assert len(files) > 1
        before = snapshot.n
        some = snapshot.passages([0, before - 1])
        own = TokenEncoder.load(colbert).encode_passages([one.title for one in some], [one.text for one in some])
        stored = TokenRows(files).take(np.array([0, before - 1]))
        assert (stored.offsets == own.offsets).all()
        assert np.abs(stored.vectors - own.vectors).max() < 2e-3  # float16

        muvera = Muvera(TINY_DIM, repetitions=2, bits=2, projected=8)
        fixed = np.concatenate([snapshot.embeddings(part.name, "fixed") for part in snapshot.parts])
        assert fixed.shape == (before, muvera.encoded_dim)
        assert np.abs(fixed[[0, -1]] - muvera.encode_passages(own)).max() < 2e-3
        hits = open_retriever(snapshot, "fixed").search([QUESTION], 3)[0]
        sums = muvera.encode_questions(TokenEncoder.load(colbert).encode_questions([QUESTION]))[0]
        assert [hit.score for hit in hits] == pytest.approx([float(sums @ fixed[hit.row]) for hit in hits], rel=1e-2)

        coded = open_retriever(snapshot, "coded").search([QUESTION], before)[0]  # IVF-PQ over the same vectors
        assert {hit.row for hit in hits} <= {hit.row for hit in coded[: before // 2]}

        every = open_index(snapshot, "tokens")
        query_vectors = TokenEncoder.load(colbert).encode_questions([QUESTION])
        tokens = every.decode(np.arange(before))
        expected = maxsim(query_vectors, tokens.vectors, tokens.offsets)[0]
        best = np.lexsort((np.arange(before), -expected))[:5]
        assert [hit.row for hit in open_retriever(snapshot, "tokens").search([QUESTION], 5)[0]] == best.tolist()
        deep = f"maxsim(hnsw:20, tokens, {before}, rounds=4)"
        hits = open_retriever(snapshot, deep).search([QUESTION], 5)[0]
        assert [hit.score for hit in hits] == pytest.approx([float(expected[hit.row]) for hit in hits], abs=1e-3)
        assert all({leg.leg for leg in hit.legs} & {"hnsw", "neighbours(hnsw)"} for hit in hits)

    again = reindex(store, recipe=late)
    assert (again.json["snapshot"], again.json["counts"]["embedded"]) == (first.json["snapshot"], 0)

    result = bookwheel("takedown", "12", "--store", store, "--yes", "--json")
    assert result.code == 0, result.err
    with Snapshot.open(str(store)) as after:
        assert 0 < after.n < before
        assert TokenRows(after.row_files("tokens")).n == open_index(after, "tokens").n == after.n
        identity = after.id
    assert verify_version(Store.open(str(store)), identity) == []

    pulled = tmp_path / "pulled"
    assert bookwheel("pull", "latest", pulled, "--store", store, "--index", "hnsw", "--index", "tokens").code == 0
    assert not list(pulled.rglob("embeddings/**/*.arrow"))  # the index holds codes of them
    with Snapshot.from_folder(pulled) as local:
        found = open_retriever(local, "maxsim(hnsw:20, tokens, 50)").search([QUESTION], 3)[0]
        assert len(found) == 3
    result = bookwheel(
        "search", QUESTION, "--store", store, "-k", 3, "--retriever", "maxsim(hnsw:20, tokens, 50)", "--json"
    )
    assert [hit["id"] for hit in result.json["results"][0]["hits"]] == [hit.passage.id for hit in found]


def test_what_does_not_fit_is_refused_in_one_sentence(
    reindex: Any, bookwheel: Any, library: Path, tiny: Path, colbert: Path, tmp_path: Path
) -> None:
    plain, swapped, bare = (tmp_path / f"{name}.toml" for name in ("plain", "swapped", "bare"))
    plain.write_text(f'[represent.tokens]\nencoder = "{tiny}"\n[index.hnsw]\nfactory = "HNSW8"\n')
    swapped.write_text(f'[represent.other]\nencoder = "{colbert}"\n[index.hnsw]\nfactory = "HNSW8"\n')
    bare.write_text('[index.tokens]\nfactory = "MaxSim"\n')
    for path, words in ((plain, "is not a ColBERT"), (swapped, "is a ColBERT"), (bare, "add [represent.tokens]")):
        result = reindex(tmp_path / "none", recipe=path)
        assert result.code
        assert words in result.complaint

    for expression, words in (
        ("maxsim(hnsw, hnsw, 50)", "hnsw is not an index over token vectors"),
        ("maxsim(hnsw)", "maxsim takes a retriever"),
        ("maxsim(hnsw, rrf(hnsw, exact), 50)", "is not an index over token vectors"),
        ("maxsim(hnsw, lost, 50)", "no index 'lost'"),
    ):
        result = bookwheel("search", "x", "--store", library, "--retriever", expression)
        assert result.code == 2
        assert words in result.complaint


def test_a_dry_run_explains_what_would_be_encoded(reindex: Any, late: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert reindex(store, recipe=late).code == 0
    result = reindex(store, "--explain", recipe=late)
    assert result.code == 0, result.err
    stages = {row["stage"]: row for row in json.loads(result.out)["stages"]}
    assert stages["embed tokens"]["recorded"] == stages["embed tokens"]["tasks"]


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


def test_a_colbert_is_trained_taught_stored_and_indexed_by_its_name(
    reindex: Any, bookwheel: Any, library: Path, tmp_path: Path
) -> None:
    store = Path(shutil.copytree(library, tmp_path / "store"))
    passages = Snapshot.open(str(store)).passages(range(0, 120, 10))
    rows = [
        {"question": passage.title, "answers": ["zzz"], "title": passage.title, "context": passage.text}
        for passage in passages
    ]
    train, dev, training = tmp_path / "train.jsonl", tmp_path / "dev.jsonl", tmp_path / "colbert.toml"
    for path, some in ((train, rows[:8]), (dev, rows[8:])):
        path.write_text("".join(json.dumps(row) + "\n" for row in some))
    training.write_text(TRAINING)
    named = ["--store", store, "--train", train, "--dev", dev, "--training", training]
    begins = ["--encoder", save_marked_bert(tmp_path / "plain")]
    plain = bookwheel("finetune", "colbert", *named, *begins, "--json")
    assert plain.code == 0, plain.err
    teacher = ["--teacher", save_cross_encoder(tmp_path / "teacher")]
    taught = bookwheel("finetune", "colbert", *named, *begins, *teacher, "--name", "taught", "--json")
    assert taught.code == 0, taught.err
    assert [*Store.open(str(store)).files.list_names("memo/teach")], "for a run that resumes"
    assert taught.json["model"] != plain.json["model"]
    assert "average_rank" in taught.json["metrics"]["after"]

    recipe = tmp_path / "named.toml"
    recipe.write_text(RECIPE.format(colbert="model:taught"))
    made = reindex(store, recipe=recipe)
    assert made.code == 0, made.err
    assert made.json["metrics"]["tokens"]["tokens_a_passage"] <= 32
    recipe.write_text(RECIPE.format(colbert="model:lost"))
    assert reindex(store, recipe=recipe).complaint
