"""`bookwheel finetune realm`, which masks links instead of reading examples and rebuilds its index."""

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
RANDOM_MASK_SETTINGS = SETTINGS.replace("[realm]", '[realm]\nmasks = "random"').replace("\nevery = 2", "\nevery = 0")


@pytest.fixture
def finetune(bookwheel: Bookwheel, store: Path, tmp_path: Path) -> Bookwheel:
    def run(kind: str, text: str, *more: object) -> Any:
        (tmp_path / "settings.toml").write_text(text)
        options = ["--store", store, "--training", tmp_path / "settings.toml"]
        return bookwheel("finetune", kind, *options, *more, "--json", "--", IN_PROCESS)

    return run


def test_realm_masks_links_and_rebuilds_its_index(
    finetune: Bookwheel, bookwheel: Bookwheel, reindex: Bookwheel, store: Path, tmp_path: Path
) -> None:
    refused = finetune("realm", SETTINGS)
    assert refused.code == 2
    assert "has no spans of links and dates: build it with spans = true" in refused.complaint

    (tmp_path / "spans.toml").write_text(f"[chunk]\nspans = true\n{RECIPE}".replace("part_bytes = 50_000", ""))
    without_spans = Snapshot.open(str(store))
    build = reindex(store, "--ref", "linked", recipe=tmp_path / "spans.toml")
    assert build.code == 0, build.err
    snapshot = Snapshot.open(str(store), "linked")
    assert build.json["counts"]["embedded"] == 0, "the passages are the same"
    assert (snapshot.n, snapshot.id == without_spans.id) == (without_spans.n, False)
    spans, rows = SalientSpans(snapshot), range(snapshot.n)
    span_texts = [
        passage.text[span.start : span.end]
        for passage, row_spans in zip(snapshot.passages(rows), spans.read_spans(rows), strict=True)
        for span in row_spans
    ]
    assert {"anarchists", "1840"} & {*span_texts}
    assert len(span_texts) > snapshot.n

    result = finetune("realm", SETTINGS, "--ref", "linked", "--name", "filled", "--work", tmp_path / "work")
    assert result.code == 0, result.err
    assert {"nll", "utility", "null_prior", "distinct", "spread"} <= set(result.json["metrics"]["after"])
    steps = [row for row in read_metrics(tmp_path / "work") if row["kind"] == "train"]
    assert [row["snapshot_age"] for row in steps] == [0, 1, 0]
    assert steps[1]["snapshot"] == snapshot.id != steps[2]["snapshot"]

    opened_store = Store.open(str(store))
    manifest = opened_store.models.get(opened_store.models.resolve("filled"))
    assert [searched["step"] for searched in manifest.provenance["asked"]] == [0, 3]
    assert not TrainableMaskedLM.load(opened_store.get_model_folder("filled") / "masked-lm").new_head
    rebuilt = Snapshot.open(str(store), "filled")
    assert rebuilt.id == result.json["index"]
    assert (rebuilt.space or {})["digest"] == (manifest.content.space or {})["digest"]
    assert SalientSpans(rebuilt).read_spans([3]) == spans.read_spans([3])
    assert bookwheel("search", "who was king", "--store", store, "--ref", "filled").code == 0

    refused = finetune("realm", RANDOM_MASK_SETTINGS, "--encoder", "model:filled", "--generator", "model:filled")
    assert (refused.code, "weights differ" in refused.complaint) == (3, True)


def test_realm_refuses_examples_that_dpr_requires(finetune: Bookwheel, tmp_path: Path) -> None:
    refused = finetune("realm", SETTINGS, "--train", "questions.jsonl")
    message = "realm learns from the snapshot's own text: leave --train and --dev out"
    assert (refused.code, refused.complaint) == (2, message)
    refused = finetune("dpr", "", "--train", "questions.jsonl")
    assert (refused.code, refused.complaint) == (2, "--dev is required")


def test_unit_vectors_get_temperature() -> None:
    assert parse_settings("realm", {}, None, unit_vectors=True).realm.temperature == 0.05  # type: ignore[attr-defined]
    assert parse_settings("realm", {}, None, unit_vectors=False).realm.temperature == 1  # type: ignore[attr-defined]
