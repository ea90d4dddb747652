"""`bookwheel finetune rag-end2end` as a user runs it: child processes rebuild the index, and the model gets its own."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flows.add_index import reencode
from flows.stage import run_flow
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.loop.checkpoint import read_metrics
from tests.fixtures.tiny_end2end import ARTICLES, CORPUS
from tests.fixtures.tiny_generators import save_bart
from tests.fixtures.tiny_snapshot import publish_tiny
from tests.flows.conftest import Bookwheel

SETTINGS = """
[loop]
accumulation = 1
learning_rate = 1e-3
evaluate_every = 2
cpu = true
max_steps = 3

[rag]
k = 2
batch_size = 2
answered = 2
max_new_tokens = 3
refuse_collapse = false

[end2end]
candidates = 4

[moving]
every = 2
"""


@pytest.fixture
def finetune_command(store: Path, tmp_path: Path) -> list[object]:
    """A command that trains on questions about real passages."""
    passages = Snapshot.open(str(store)).passages(range(0, 120, 10))
    rows: list[dict[str, Any]] = [
        {
            "question": f"what {passage.title}",
            "answers": [passage.text.split()[0]],
            "title": passage.title,
            "context": passage.text,
        }
        for passage in passages
    ]
    for name, split_rows in (("train", rows[:8]), ("dev", rows[8:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in split_rows))
    (tmp_path / "settings.toml").write_text(SETTINGS)
    options = {"store": store, "train": tmp_path / "train.jsonl", "dev": tmp_path / "dev.jsonl"}
    options |= {"training": tmp_path / "settings.toml", "generator": save_bart(tmp_path / "bart"), "name": "moved"}
    options |= {"work": tmp_path / "work"}
    return ["finetune", "rag-end2end", *(word for name, value in options.items() for word in (f"--{name}", value))]


def test_model_is_trained_with_rebuilds_and_answers_from_its_own_index(
    bookwheel: Bookwheel, finetune_command: list[object], store: Path, tmp_path: Path
) -> None:
    result = bookwheel(*finetune_command, "--json")
    assert result.code == 0, result.err
    reply, library = result.json, Store.open(str(store))
    rows = [row for row in read_metrics(tmp_path / "work") if row["kind"] == "train"]
    assert [row["snapshot_age"] for row in rows] == [0, 1, 0]
    assert rows[0]["snapshot"] == rows[1]["snapshot"] == reply["snapshot"] != rows[2]["snapshot"]
    assert rows[2]["encoding_seconds"] > 0 == rows[2]["refreshes_failed"]

    folder, own_snapshot = library.get_model_folder("moved"), Snapshot.open(str(store), "moved")
    assert own_snapshot.id == reply["index"]
    assert own_snapshot.n == Snapshot.open(str(store), reply["snapshot"]).n
    assert (library.models.get(reply["model"]).content.space or {})["digest"] == (own_snapshot.space or {})["digest"]
    assert (folder / "passage" / "model.safetensors").is_file()
    answers = bookwheel("answer", "who was king?", "--store", store, "--model", "moved", "--ref", "moved", "--json")
    assert answers.code == 0, answers.err
    mismatch = bookwheel("answer", "who was king?", "--store", store, "--model", "moved")
    assert (mismatch.code, "weights differ" in mismatch.complaint) == (3, True)
    assert library.refs.list_names() == ["latest", "moved"], "the refs of the training's rebuilds are deleted"


def test_same_command_builds_only_the_index_after_the_gate_rejected_it(
    bookwheel: Bookwheel, finetune_command: list[object], store: Path, tiny: Path, other_tiny: Path, tmp_path: Path
) -> None:
    # The ref names a larger snapshot, as after an earlier training.
    run_flow(reencode, "latest", str(store), str(other_tiny), "moved")
    library, small = Store.open(str(store)), tmp_path / "small"
    small.mkdir()
    publish_tiny(library, tiny, ARTICLES, small, corpus=CORPUS)
    settings = SETTINGS.replace("max_steps = 3", "max_steps = 1").replace("[moving]\nevery = 2", "[moving]\nevery = 0")
    (tmp_path / "settings.toml").write_text(settings)
    rejected = bookwheel(*finetune_command)
    assert (rejected.code, "moved did not move: passages lost since the parent" in rejected.complaint) == (3, True)
    ref_move, model_move = library.refs.find_current("moved"), library.models.refs.find_current("moved")
    assert ref_move is not None
    assert model_move is not None, "the model is published without its index"

    library.refs.delete("moved", ref_move.number, "the larger snapshot is not needed")
    shutil.rmtree(tmp_path / "work")
    second = bookwheel(*finetune_command, "--json")
    assert second.code == 0, second.err
    assert (second.json["model"], library.models.refs.find_current("moved")) == (model_move.snapshot, model_move)
    assert Snapshot.open(str(store), "moved").id == second.json["index"] != ref_move.snapshot
    assert not (tmp_path / "work").exists(), "nothing is trained again"
