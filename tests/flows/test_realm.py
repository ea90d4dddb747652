"""`bookwheel finetune realm` in this process: it needs no examples, and its encoders make an index."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from flows.training import training_of
from rag_model.encoders.masked_lm import TrainableMaskedLM
from rag_model.store.store import Store
from rag_model.store.versions.models import model_folder
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.loop.journal import read_metrics
from tests.flows.conftest import Bookwheel

pytestmark = pytest.mark.xdist_group("flows")  # one server for all of them

SETTINGS = """
[loop]
learning_rate = 1e-3
evaluate_every = 2
cpu = true

[realm]
masks = "random"
candidates = 3
batch_size = 4
dev_texts = 8
"""


@pytest.fixture
def store(library: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(library, tmp_path / "store"))


@pytest.fixture
def finetune(bookwheel: Bookwheel, store: Path, tmp_path: Path) -> Bookwheel:
    def run(kind: str, text: str, *more: object) -> Any:
        (tmp_path / "settings.toml").write_text(text)
        given = ["--store", store, "--training", tmp_path / "settings.toml", "--max-steps", 2]
        return bookwheel("finetune", kind, *given, *more, "--json")

    return run


def test_it_learns_from_the_snapshots_own_text_and_makes_an_index(
    finetune: Bookwheel, bookwheel: Bookwheel, reindex: Bookwheel, store: Path, tmp_path: Path
) -> None:
    ran = finetune("realm", SETTINGS, "--name", "filled", "--work", tmp_path / "work")
    assert ran.code == 0, ran.err
    assert {"nll", "utility", "null_prior", "distinct", "spread"} <= set(ran.json["metrics"]["after"])
    opened = Store.open(str(store))
    manifest = opened.models.get(opened.models.resolve("filled"))
    snapshot = opened.snapshots.resolve("latest")
    assert manifest.content.lineage["snapshot"] == snapshot
    assert manifest.provenance["asked"] == [{"step": 0, "snapshot": snapshot}]
    assert {row["snapshot"] for row in read_metrics(tmp_path / "work")} == {snapshot}
    folder = model_folder(opened, "filled")
    assert not TrainableMaskedLM.load(folder / "masked-lm").new_head
    built = reindex(store, "--ref", "trained", encoder="model:filled")
    assert built.code == 0, built.err
    again = Snapshot.open(str(store), "trained")
    assert (again.space or {})["digest"] == (manifest.content.space or {})["digest"]
    onwards = finetune(
        "realm", SETTINGS, "--ref", "trained", "--encoder", "model:filled", "--generator", "model:filled"
    )
    assert onwards.code == 0, onwards.err


def test_examples_are_refused_and_missed(finetune: Bookwheel, tmp_path: Path) -> None:
    refused = finetune("realm", SETTINGS, "--train", "questions.jsonl")
    assert (refused.code, refused.complaint) == (
        2,
        "realm learns from the snapshot's own text: leave --train and --dev out",
    )
    missed = finetune("dpr", "", "--train", "questions.jsonl")
    assert (missed.code, missed.complaint) == (2, "finetune needs --dev")


def test_vectors_of_unit_length_get_a_temperature() -> None:
    assert training_of("realm", {}, None, unit_vectors=True).realm.temperature == 0.05  # type: ignore[attr-defined]
    assert training_of("realm", {}, None, unit_vectors=False).realm.temperature == 1  # type: ignore[attr-defined]
