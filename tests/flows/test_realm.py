"""`bookwheel finetune realm` in this process: it needs no examples, masks links, and its index moves."""

from pathlib import Path
from typing import Any

import pytest

from rag_model.encoders.masked_lm import TrainableMaskedLM
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.texts import SalientSpans
from rag_model.training.loop.checkpoint import read_metrics
from rag_model.training.settings import parse_settings
from tests.flows.conftest import IN_PROCESS, RECIPE, Bookwheel

SETTINGS = """
[loop]
learning_rate = 1e-3
evaluate_every = 2
max_steps = 3
cpu = true

[realm]
candidates = 3
batch_size = 4
dev_texts = 8

[moving]
every = 2
"""
RANDOM = SETTINGS.replace("[realm]", '[realm]\nmasks = "random"').replace("\nevery = 2", "\nevery = 0")


@pytest.fixture
def finetune(bookwheel: Bookwheel, store: Path, tmp_path: Path) -> Bookwheel:
    def run(kind: str, text: str, *more: object) -> Any:
        (tmp_path / "settings.toml").write_text(text)
        given = ["--store", store, "--training", tmp_path / "settings.toml"]
        return bookwheel("finetune", kind, *given, *more, "--json", "--", IN_PROCESS)

    return run


def test_it_masks_links_beside_an_index_of_its_own(
    finetune: Bookwheel, bookwheel: Bookwheel, reindex: Bookwheel, store: Path, tmp_path: Path
) -> None:
    refused = finetune("realm", SETTINGS)
    assert refused.code == 2
    assert "has no spans of links and dates: build it with spans = true" in refused.complaint

    (tmp_path / "spans.toml").write_text(f"[chunk]\nspans = true\n{RECIPE}".replace("part_bytes = 50_000", ""))
    before = Snapshot.open(str(store))
    built = reindex(store, "--ref", "linked", recipe=tmp_path / "spans.toml")
    assert built.code == 0, built.err
    linked = Snapshot.open(str(store), "linked")
    assert built.json["counts"]["embedded"] == 0, "the passages are the same"
    assert (linked.n, linked.id == before.id) == (before.n, False)
    spans, rows = SalientSpans(linked), range(linked.n)
    passages = [
        passage.text[span.start : span.end]
        for passage, own in zip(linked.passages(rows), spans.read_spans(rows), strict=True)
        for span in own
    ]
    assert {"anarchists", "1840"} & {*passages}
    assert len(passages) > linked.n

    result = finetune("realm", SETTINGS, "--ref", "linked", "--name", "filled", "--work", tmp_path / "work")
    assert result.code == 0, result.err
    assert {"nll", "utility", "null_prior", "distinct", "spread"} <= set(result.json["metrics"]["after"])
    steps = [row for row in read_metrics(tmp_path / "work") if row["kind"] == "train"]
    assert [row["snapshot_age"] for row in steps] == [0, 1, 0]
    assert steps[1]["snapshot"] == linked.id != steps[2]["snapshot"]

    opened = Store.open(str(store))
    manifest = opened.models.get(opened.models.resolve("filled"))
    assert [one["step"] for one in manifest.provenance["asked"]] == [0, 3]
    assert not TrainableMaskedLM.load(opened.get_model_folder("filled") / "masked-lm").new_head
    own = Snapshot.open(str(store), "filled")
    assert (own.id, (own.space or {})["digest"]) == (result.json["index"], (manifest.content.space or {})["digest"])
    assert SalientSpans(own).read_spans([3]) == spans.read_spans([3])
    assert bookwheel("search", "who was king", "--store", store, "--ref", "filled").code == 0

    refused = finetune("realm", RANDOM, "--encoder", "model:filled", "--generator", "model:filled")
    assert (refused.code, "weights differ" in refused.complaint) == (3, True)


def test_examples_are_refused_and_missed(finetune: Bookwheel, tmp_path: Path) -> None:
    refused = finetune("realm", SETTINGS, "--train", "questions.jsonl")
    assert (refused.code, refused.complaint) == (
        2,
        "realm learns from the snapshot's own text: leave --train and --dev out",
    )
    missed = finetune("dpr", "", "--train", "questions.jsonl")
    assert (missed.code, missed.complaint) == (2, "--dev is required")


def test_vectors_of_unit_length_get_a_temperature() -> None:
    assert parse_settings("realm", {}, None, unit_vectors=True).realm.temperature == 0.05  # type: ignore[attr-defined]
    assert parse_settings("realm", {}, None, unit_vectors=False).realm.temperature == 1  # type: ignore[attr-defined]
