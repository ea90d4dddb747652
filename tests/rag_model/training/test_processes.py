"""Two processes that share a training; `python test_processes.py FOLDER TINY GIVEN` trains in one of many."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import PartialState
from torch import nn

from rag_model.encoders.encoder import Encoder
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.errors import RefusedError, StoreError
from rag_model.generate.load import load_generator
from rag_model.generate.rag import Rag, RagSettings
from rag_model.generate.rag_folder import load_rag
from rag_model.store.store import Store
from rag_model.store.versions.moves import tag
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.examples import Example, build_passage
from rag_model.training.loop.journal import read_metrics
from rag_model.training.loop.loop import train
from rag_model.training.moving_index import MovingIndex, MovingIndexHooks
from rag_model.training.objectives.biencoder import BiEncoder
from rag_model.training.objectives.dpr import DprRecipe, DprTask
from rag_model.training.objectives.ict import IctRecipe, IctTask
from rag_model.training.objectives.rag import RagRecipe, RagTask
from rag_model.training.objectives.realm import RealmTask
from rag_model.training.objectives.sidr import SidrPair, SidrRecipe, SidrTask
from rag_model.training.rebuilds import MovingSettings
from tests.fixtures import filling, moving
from tests.fixtures.learning import LineTask, settings
from tests.fixtures.tiny import save_bert
from tests.fixtures.tiny_generators import save_bart
from tests.fixtures.tiny_snapshot import publish_tiny

ROOT = Path(__file__).parents[3]
EXAMPLES = [
    Example(str(n), f"who was king {n}?", ("x",), (build_passage("", f"the king {n} was born."),)) for n in range(16)
]


def without_dropout(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0


def train_all(folder: Path, tiny: Path, given_folder: Path, processes: int) -> None:
    """Train on the same batches a step, however many processes share them."""
    given = settings(max_steps=6, evaluate_every=3, checkpoint_every=3)
    line = LineTask()
    without_dropout(line.module)
    train(line, dataclasses.replace(given, accumulation=2 // processes), folder / "line")
    dpr = DprTask.load(tiny, None, EXAMPLES, EXAMPLES, DprRecipe(batch_size=8 // processes, temperature=0.1))
    without_dropout(dpr.module)
    train(dpr, dataclasses.replace(given, learning_rate=1e-3), folder / "dpr")
    question = TrainableEncoder.load(tiny, "question", device="cpu")
    rag = Rag(question, load_generator(given_folder / "bart", device="cpu"), RagSettings("token", k=3, temperature=0.1))
    recipe = RagRecipe(batch_size=8 // processes, k=3, temperature=0.1, answered=4, refuse_collapse=False)
    reading = RagTask(rag, Snapshot.open(str(given_folder / "store")), EXAMPLES, EXAMPLES[:4], recipe)
    without_dropout(reading.module)
    train(reading, dataclasses.replace(given, learning_rate=1e-3), folder / "rag")
    sidr_recipe = SidrRecipe(batch_size=8 // processes, terms=24, temperature=20.0)
    sidr = SidrTask(SidrPair.load(tiny, tiny, sidr_recipe, device="cpu"), EXAMPLES, EXAMPLES, sidr_recipe)
    without_dropout(sidr.module)
    train(sidr, dataclasses.replace(given, learning_rate=1e-3), folder / "sidr")
    realm_recipe = dataclasses.replace(filling.RECIPE, marginal="token", batch_size=4 // processes)
    realm_folder = given_folder / "filling"
    realm = RealmTask(filling.realm_of(realm_folder), Snapshot.open(str(realm_folder / "store")), realm_recipe)
    without_dropout(realm.module)
    train(realm, dataclasses.replace(given, learning_rate=1e-3), folder / "realm")
    cloze_store = Snapshot.open(str(given_folder / "cloze"))
    ict_recipe = IctRecipe(batch_size=6 // processes, dev_texts=4, temperature=0.5)
    ict = IctTask(BiEncoder.load(tiny, device="cpu"), cloze_store, ict_recipe)
    without_dropout(ict.module)
    train(ict, dataclasses.replace(given, learning_rate=1e-3), folder / "ict")
    train_end2end(folder / "end2end", given_folder / "moving", processes)
    if processes > 1:
        (folder / f"moved-{os.environ['RANK']}").write_text(json.dumps(moves(folder, given_folder / "moving")))
        poisoned = LineTask(poison="p3")
        try:
            train(poisoned, given, folder / "poisoned")
        except RefusedError as told:
            (folder / f"told-{os.environ['RANK']}").write_text(str(told))


def train_end2end(folder: Path, given: Path, processes: int) -> None:
    """Train beside an index that is rebuilt in between; the passages of a batch are those of the last rebuild."""
    recipe = dataclasses.replace(moving.RECIPE, batch_size=4 // processes)
    written = dataclasses.replace(moving.SETTINGS.reconstruction, batch_size=2 // processes)
    task = moving.task_of(given, folder, dataclasses.replace(moving.SETTINGS, rag=recipe, reconstruction=written))
    without_dropout(task.module)
    train(task, moving.STEPS, folder)


def publish_three(given: Path) -> list[str]:
    """Write what a moving index needs, and two more snapshots of its passages; return the ids of all."""
    given.mkdir()
    store = Store.open(str(moving.prepare(given) / "store"))
    made = [tag(store, "latest", "first").snapshot]
    for seed in (2, 3):
        work = given / f"work-{seed}"
        work.mkdir()
        made.append(publish_tiny(store, save_bert(given / f"bert-{seed}", seed), moving.ARTICLES, work).id)
    (given / "made.json").write_text(json.dumps(made))
    return made


def moves(folder: Path, given: Path) -> list[list[Any]]:
    """Return what this process asks, the age and the failed rebuilds by step, as the first process' rebuilds end.

    The second process cannot open what the second rebuild made.
    """
    first_process = PartialState().is_main_process
    store, opened = Store.open(str(given / "store")), list[str]()
    first, second, third = json.loads((given / "made.json").read_text())

    def turn_to(snapshot: Snapshot) -> None:
        opened.append(snapshot.id)
        if not first_process and opened == [second, third]:
            raise StoreError("its disk is gone")

    rebuild, told = moving.ByHand(), list[list[Any]]()
    snapshot, settings = Snapshot.from_store(store, first), MovingSettings(2, "asynchronous")
    index = MovingIndex(store, snapshot, settings, rebuild, folder / "moves", MovingIndexHooks(lambda _: None, turn_to))
    for step in range(1, 11):
        for ended, order, made in ((5, 2, second), (7, 4, third), (9, 6, first)):
            if step == ended and first_process:
                rebuild.end(order, made)
        said = index.move(step)
        told.append([index.asked, said["snapshot_age"], said["refreshes_failed"]])
    return told


@pytest.mark.slow
def test_two_processes_train_as_one_does(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    store = Store.open(str(tmp_path / "store"), create=True)
    publish_tiny(store, tiny, {f"King {n}": f"the king {n} was born." for n in range(16)}, tmp_path / "work")
    # Articles of one sentence have no cloze pair, so the two processes have different numbers of pairs.
    clozes = {f"King {n}": f"The king {n} was born." + " He was king of the city." * (n % 7 > 0) for n in range(16)}
    (tmp_path / "cloze-work").mkdir()
    publish_tiny(Store.open(str(tmp_path / "cloze"), create=True), tiny, clozes, tmp_path / "cloze-work")
    save_bart(tmp_path / "bart")
    (tmp_path / "filling").mkdir()
    filling.prepare(tmp_path / "filling")
    made = publish_three(tmp_path / "moving")
    train_all(tmp_path / "one", tiny, tmp_path, 1)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*launch, str(tmp_path / "two"), str(tiny), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measures = {"line": "error", "dpr": "average_rank", "sidr": "average_rank", "ict": "average_rank"}
    for name, measure in [*measures.items(), *((name, "nll") for name in ("rag", "realm", "end2end"))]:
        one, two = (read_metrics(tmp_path / processes / name) for processes in ("one", "two"))
        assert [row["step"] for row in one] == [row["step"] for row in two]
        for first, second in zip(one, two, strict=True):
            assert first.keys() == second.keys()
            key = "loss" if first["kind"] == "train" else measure
            assert second[key] == pytest.approx(first[key], rel=1e-4)
    Encoder.load(next((tmp_path / "two" / "dpr").glob("best-*")) / "question", "question")
    load_rag(next((tmp_path / "two" / "rag").glob("best-*")), device="cpu")
    asked = [row["snapshot"] for row in read_metrics(tmp_path / "two" / "end2end") if row["kind"] == "train"]
    assert [one == made[0] for one in asked] == [True] * moving.EVERY + [False] * moving.EVERY
    first, second = (json.loads((tmp_path / "two" / f"moved-{rank}").read_text()) for rank in (0, 1))
    assert first == second
    assert [one for one, *_ in first] == [made[0]] * 4 + [made[1]] * 4 + [made[0]] * 2
    assert [failed for *_, failed in first] == [0] * 6 + [1] * 4
    told = {(tmp_path / "two" / f"told-{rank}").read_text() for rank in (0, 1)}
    (sentence,) = told
    assert "p3" in sentence.partition(" of examples ")[2].partition(":")[0].split(", ")


if __name__ == "__main__":
    train_all(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), 2)
