"""SiDR and OpenRAG as a user runs them: train, build bags and weights, search, train on, rebuild without encoding."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_model.corpus.ragged_file import SparseFile
from rag_model.encoders.tokens import load_tokenizer
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.tiny_generators import save_bart
from tests.fixtures.tiny_sidr import SPEC, save_sidr
from tests.flows.conftest import Bookwheel

LOOP = "[loop]\nlearning_rate = 1e-3\nevaluate_every = 2\ncpu = true\n"
SIDR = f"{LOOP}[sidr]\nbatch_size = 4\nterms = 24\npassage_length = 64\ntemperature = 20.0\n[negatives]\nranked = 20\n"
OPENRAG = f"""{LOOP}
[openrag]
depth = 12
proposed = 5
batch_size = 2
terms = 24
temperature = 20.0

[judge]
choices = ["h", "7"]
"""
RECIPE = """
part_bytes = 50_000

[represent.sparse]
encoder = "model:{name}"

[represent.bag]
kind = "bag"
encoder = "model:{name}"

[index.hnsw]
factory = "HNSW8"

[index.sidr]
factory = "Impact"

[index.bag]
factory = "Impact1"
over = "bag"
search = {{ terms = 40 }}
"""
QUESTION = "who was the king of the river city?"


@pytest.fixture
def finetune(bookwheel: Bookwheel, store: Path, library: Path, tmp_path: Path) -> Any:
    passages = Snapshot.open(str(library)).passages(range(0, 120, 10))
    rows = [
        {
            "question": f"what {passage.title} {n}",
            "answers": ["h7"[n % 2]],
            "title": passage.title,
            "context": passage.text,
        }
        for n, passage in enumerate(passages)
    ]
    for name, some in (("train", rows[:8]), ("dev", rows[8:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    for name, text in (("sidr", SIDR), ("openrag", OPENRAG)):
        (tmp_path / f"{name}.toml").write_text(text)

    def run(kind: str, **options: object) -> Any:
        files = {name: tmp_path / f"{name}.jsonl" for name in ("train", "dev")}
        named = {"store": store, **files, "training": tmp_path / f"{kind}.toml", "max_steps": 2, **options}
        words = [word for name, value in named.items() for word in (f"--{name.replace('_', '-')}", value)]
        return bookwheel("finetune", kind, *words, "--json")

    return run


def test_a_pair_is_trained_asks_both_indexes_and_its_bags_outlive_the_next_training(
    finetune: Any, bookwheel: Bookwheel, reindex: Any, store: Path, tmp_path: Path
) -> None:
    result = finetune("sidr", name="finder")
    assert result.code == 0, result.err
    reply = result.json
    assert (reply["kind"], reply["steps"]) == ("sidr", 2)
    assert {"average_rank", "bag_average_rank", "bag_Success@5"} <= set(reply["metrics"]["after"])
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(name="finder"))
    built = reindex(store, recipe=recipe)
    assert built.code == 0, built.err
    assert built.json["metrics"]["bag"]["recall@20"] == 1.0
    assert "embed bag" in built.json["seconds"]
    folder = Store.open(str(store)).get_model_folder("finder")
    with Snapshot.open(str(store)) as snapshot:
        old = snapshot.manifest.content
        space, tokenizer = snapshot.manifest.content.space_of("bag"), load_tokenizer(folder / "passage", 64)
        assert space is not None
        assert (space["weights"], space["pooling"]) == ("", "bag")
        first = snapshot.passages([0])[0]
        held = next(iter(SparseFile(snapshot.row_files("bag")[0]).iter_batches())).take(np.array([0]))
        assert set(held.terms.tolist()) <= {*tokenizer.encode(f"{first.title} {first.text}").ids}
    for retriever in ("sidr", "bag", "bag(terms=5)", "rrf(sidr, bag, hnsw)"):
        found = bookwheel("search", QUESTION, "--store", store, "--retriever", retriever, "--json")
        assert (found.code, len(found.json["results"][0]["hits"])) == (0, 5), found.err

    generator = save_bart(tmp_path / "generator")
    result = finetune("openrag", name="better", encoder="model:finder", generator=generator)
    assert result.code == 0, result.err
    assert {"right", "nll", "questions", "all_wrong", "agreement"} <= set(result.json["metrics"]["after"])
    assert bookwheel("export", "model:better", tmp_path / "better", "--store", store).code == 0
    other = save_sidr(tmp_path / "other", spec=replace(SPEC, max_length=64))
    for encoder in (tmp_path / "better" / "question", other):
        named = ("--question-encoder", encoder, "--retriever")
        found = bookwheel("search", QUESTION, "--store", store, *named, "bag", "--json")
        assert found.code == 0, found.err
    hits = found.json["results"][0]["hits"]
    refused = bookwheel("search", QUESTION, "--store", store, *named, "sidr")
    assert (refused.code, "cannot search a snapshot of encoder" in refused.complaint) == (3, True), refused.complaint

    recipe.write_text(RECIPE.replace("model:{name}", str(other)).format())
    again = reindex(store, recipe=recipe)
    assert again.code == 0, again.err
    with Snapshot.open(str(store)) as rebuilt:
        new = rebuilt.manifest.content
    assert old.space_of("bag") == new.space_of("bag")
    assert {name: old.files[name] for name in old.files if name.startswith("bag/")} == {
        name: new.files[name] for name in new.files if name.startswith("bag/")
    }
    assert old.files["index/bag.postings"] == new.files["index/bag.postings"], "no training makes it stale"
    assert old.files["index/sidr.postings"] != new.files["index/sidr.postings"]
    found = bookwheel("search", QUESTION, "--store", store, "--retriever", "bag", "--json")
    assert found.json["results"][0]["hits"] == hits
