"""SiDR and OpenRAG: train an encoder, build its sparse and bag indexes, search, train further, and rebuild."""

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
        {"question": f"what {p.title} {n}", "answers": ["h7"[n % 2]], "title": p.title, "context": p.text}
        for n, p in enumerate(passages)
    ]
    for name, split_rows in (("train", rows[:8]), ("dev", rows[8:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in split_rows))
    for name, text in (("sidr", SIDR), ("openrag", OPENRAG)):
        (tmp_path / f"{name}.toml").write_text(text)

    def run(kind: str, **options: object) -> Any:
        files = {name: tmp_path / f"{name}.jsonl" for name in ("train", "dev")}
        all_options = {"store": store, **files, "training": tmp_path / f"{kind}.toml", "max_steps": 2, **options}
        words = [word for name, value in all_options.items() for word in (f"--{name.replace('_', '-')}", value)]
        return bookwheel("finetune", kind, *words, "--json")

    return run


def test_pair_is_trained_and_next_training_reuses_its_bags(
    finetune: Any, bookwheel: Bookwheel, reindex: Any, store: Path, tmp_path: Path
) -> None:
    result = finetune("sidr", name="finder")
    assert result.code == 0, result.err
    reply = result.json
    assert (reply["kind"], reply["steps"]) == ("sidr", 2)
    assert {"average_rank", "bag_average_rank", "bag_Success@5"} <= set(reply["metrics"]["after"])
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(name="finder"))
    build = reindex(store, recipe=recipe)
    assert build.code == 0, build.err
    assert build.json["metrics"]["bag"]["recall@20"] == 1.0
    assert "embed bag" in build.json["seconds"]
    folder = Store.open(str(store)).get_model_folder("finder")
    with Snapshot.open(str(store)) as snapshot:
        old_content = snapshot.manifest.content
        space, tokenizer = snapshot.manifest.content.space_of("bag"), load_tokenizer(folder / "passage", 64)
        assert space is not None
        assert (space["weights"], space["pooling"]) == ("", "bag")
        first = snapshot.passages([0])[0]
        stored_bag = next(iter(SparseFile(snapshot.row_files("bag")[0]).iter_batches())).take(np.array([0]))
        assert set(stored_bag.terms.tolist()) <= {*tokenizer.encode(f"{first.title} {first.text}").ids}
    for retriever in ("sidr", "bag", "bag(terms=5)", "rrf(sidr, bag, hnsw)"):
        search_result = bookwheel("search", QUESTION, "--store", store, "--retriever", retriever, "--json")
        assert (search_result.code, len(search_result.json["results"][0]["hits"])) == (0, 5), search_result.err

    generator = save_bart(tmp_path / "generator")
    result = finetune("openrag", name="better", encoder="model:finder", generator=generator)
    assert result.code == 0, result.err
    assert {"right", "nll", "questions", "all_wrong", "agreement"} <= set(result.json["metrics"]["after"])
    assert bookwheel("export", "model:better", tmp_path / "better", "--store", store).code == 0
    other_encoder = save_sidr(tmp_path / "other", spec=replace(SPEC, max_length=64))
    for encoder in (tmp_path / "better" / "question", other_encoder):
        search_options = ("--question-encoder", encoder, "--retriever")
        search_result = bookwheel("search", QUESTION, "--store", store, *search_options, "bag", "--json")
        assert search_result.code == 0, search_result.err
    hits = search_result.json["results"][0]["hits"]
    refused = bookwheel("search", QUESTION, "--store", store, *search_options, "sidr")
    assert (refused.code, "cannot search a snapshot of encoder" in refused.complaint) == (3, True), refused.complaint

    recipe.write_text(RECIPE.replace("model:{name}", str(other_encoder)).format())
    rebuild = reindex(store, recipe=recipe)
    assert rebuild.code == 0, rebuild.err
    with Snapshot.open(str(store)) as rebuilt:
        new_content = rebuilt.manifest.content
    assert old_content.space_of("bag") == new_content.space_of("bag")
    changed = dict(old_content.files.items() ^ new_content.files.items())
    assert "index/sidr.postings" in changed
    assert not [name for name in changed if name.startswith(("bag/", "index/bag"))], "bags depend only on the tokenizer"
    search_result = bookwheel("search", QUESTION, "--store", store, "--retriever", "bag", "--json")
    assert search_result.json["results"][0]["hits"] == hits
