"""`bookwheel finetune rag-end2end` as a user runs it: rebuilds in child processes, and an index of the model's own."""

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
def words(store: Path, tmp_path: Path) -> list[object]:
    """The words of a command that trains on questions about real passages."""
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
    for name, some in (("train", rows[:8]), ("dev", rows[8:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    (tmp_path / "settings.toml").write_text(SETTINGS)
    given = {"store": store, "train": tmp_path / "train.jsonl", "dev": tmp_path / "dev.jsonl"}
    given |= {"training": tmp_path / "settings.toml", "generator": save_bart(tmp_path / "bart"), "name": "moved"}
    given |= {"work": tmp_path / "work"}
    return ["finetune", "rag-end2end", *(word for name, value in given.items() for word in (f"--{name}", value))]


def test_a_model_is_trained_beside_its_index_and_answers_with_its_own(
    bookwheel: Bookwheel, words: list[object], store: Path, tmp_path: Path
) -> None:
    result = bookwheel(*words, "--json")
    assert result.code == 0, result.err
    reply, opened = result.json, Store.open(str(store))
    rows = [row for row in read_metrics(tmp_path / "work") if row["kind"] == "train"]
    assert [row["snapshot_age"] for row in rows] == [0, 1, 0]
    assert rows[0]["snapshot"] == rows[1]["snapshot"] == reply["snapshot"] != rows[2]["snapshot"]
    assert rows[2]["encoding_seconds"] > 0 == rows[2]["refreshes_failed"]

    folder, own = opened.get_model_folder("moved"), Snapshot.open(str(store), "moved")
    assert own.id == reply["index"]
    assert own.n == Snapshot.open(str(store), reply["snapshot"]).n
    assert (opened.models.get(reply["model"]).content.space or {})["digest"] == (own.space or {})["digest"]
    assert (folder / "passage" / "model.safetensors").is_file()
    asked = bookwheel("answer", "who was king?", "--store", store, "--model", "moved", "--ref", "moved", "--json")
    assert asked.code == 0, asked.err
    other = bookwheel("answer", "who was king?", "--store", store, "--model", "moved")
    assert (other.code, "weights differ" in other.complaint) == (3, True)
    assert opened.refs.list_names() == ["latest", "moved"], "the rebuilds of the training are not named any more"


def test_an_index_that_the_gate_refuses_leaves_the_model_and_the_same_command_builds_it_alone(
    bookwheel: Bookwheel, words: list[object], store: Path, tiny: Path, other_tiny: Path, tmp_path: Path
) -> None:
    run_flow(reencode, "latest", str(store), str(other_tiny), "moved")  # as of a training on a larger snapshot
    opened, small = Store.open(str(store)), tmp_path / "small"
    small.mkdir()
    publish_tiny(opened, tiny, ARTICLES, small, corpus=CORPUS)
    short = SETTINGS.replace("max_steps = 3", "max_steps = 1").replace("[moving]\nevery = 2", "[moving]\nevery = 0")
    (tmp_path / "settings.toml").write_text(short)
    refused = bookwheel(*words)
    assert (refused.code, "moved did not move: passages lost since the parent" in refused.complaint) == (3, True)
    before, published = opened.refs.find_current("moved"), opened.models.refs.find_current("moved")
    assert before is not None
    assert published is not None, "the model is there, without its index"

    opened.refs.delete("moved", before.number, "the larger one is not asked any more")
    shutil.rmtree(tmp_path / "work")
    again = bookwheel(*words, "--json")
    assert again.code == 0, again.err
    assert (again.json["model"], opened.models.refs.find_current("moved")) == (published.snapshot, published)
    assert Snapshot.open(str(store), "moved").id == again.json["index"] != before.snapshot
    assert not (tmp_path / "work").exists(), "nothing is trained again"
