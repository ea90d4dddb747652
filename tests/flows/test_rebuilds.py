"""Rebuilds of a moving index, compared with full reencoding, and in child processes that are killed or fail."""

import logging
import os
import resource
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from flows.rebuild import (
    RebuildLauncher,
    RebuildProcess,
    RebuildTask,
    delete_rebuild_refs,
    open_rebuild_launcher,
    rebuild_index,
)
from rag_model.corpus.records import Passage
from rag_model.encoders.encoder import Encoder, Vectors
from rag_model.errors import InputError, UsageError
from rag_model.retrieve.hits import Hit
from rag_model.store.store import Store
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.moves import tag
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.memory import PassageMemory, RetrievedBatch
from rag_model.training.loop.checkpoint import list_checkpoints, read_checkpoint, read_metrics
from rag_model.training.loop.loop import train
from rag_model.training.loop.task import Measures
from rag_model.training.moving_index import MovingSettings, RebuildOrder
from rag_model.training.objectives.end2end import End2EndTask
from tests.fixtures import async_rebuilds
from tests.fixtures.forked_processes import SHARED, check_killed
from tests.fixtures.tiny_end2end import INTERVAL, SETTINGS, ManualRebuild, ManualRebuilder, make_task, prepare, train_in

EXACT_SETTINGS = replace(SETTINGS, rag=replace(SETTINGS.rag, retriever="exact"), moving=MovingSettings(2))
REF = "refresh"
LISTS = "IVF5,Flat"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepare(tmp_path_factory.mktemp("given"))
    tag(Store.open(str(folder / "store")), "latest", "first")
    return folder


class InProcessRebuilds(ManualRebuilder):
    """Call the rebuild flow in this process."""

    def __init__(self, inputs: Path) -> None:
        super().__init__()
        self._store = str(inputs / "store")

    def start(self, order: RebuildOrder) -> ManualRebuild:
        task = RebuildTask(self._store, order.snapshot, str(order.encoders), order.step, REF, (), "")
        self.results[order.step] = rebuild_index(task)
        return super().start(order)


class ExhaustiveMemory(PassageMemory):
    """Compare every question with an array of all vectors."""

    def __init__(self, passages: Sequence[Passage], vectors: Vectors) -> None:
        self._passages, self._vectors = passages, vectors

    def retrieve(self, questions: Sequence[str], query_vectors: Vectors, k: int) -> RetrievedBatch:
        rows = np.argsort(-(query_vectors @ self._vectors.T), axis=1, kind="stable")[:, :k]
        hits = [
            [Hit(rank, 0.0, row, self._passages[row], "", "") for rank, row in enumerate(row_numbers, start=1)]
            for row_numbers in rows.tolist()
        ]
        return RetrievedBatch(hits, self._vectors[rows])


class ReencodingTask(End2EndTask):
    """Encode all passages again, instead of rebuilding the index."""

    def move_index(self, step: int) -> Measures:
        if self._settings.moving.is_due(step - 1):
            passages = self._snapshot.passages(range(self._snapshot.n))
            with tempfile.TemporaryDirectory() as folder:
                self.save_encoders(Path(folder))
                encoder = Encoder.load(Path(folder) / "passage", threads=1, device="cpu")
                titles, texts = [p.title for p in passages], [p.text for p in passages]
                vectors = encoder.encode_passages(titles, texts).astype(np.float16)  # The store has float16 vectors.
            self._memory = ExhaustiveMemory(passages, vectors.astype(np.float32))
        return {}


def test_losses_equal_those_of_full_reencoding(inputs: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    losses, searched_steps = [], []
    for kind in (End2EndTask, ReencodingTask):
        task = make_task(inputs, tmp_path / kind.__name__, EXACT_SETTINGS, InProcessRebuilds, kind=kind)
        result = train(task, EXACT_SETTINGS.loop, tmp_path / kind.__name__)
        losses.append([row["loss"] for row in read_metrics(tmp_path / kind.__name__) if row["kind"] == "train"])
        searched_steps.append([searched.step for searched in result.searched_snapshots])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert searched_steps == [[0, 3, 5], [0]]
    store = Store.open(str(inputs / "store"))
    old_manifest, new_manifest = (store.snapshots.get(store.snapshots.resolve(name)) for name in ("first", REF))
    assert new_manifest.provenance["reencoded"] == {"of": old_manifest.id}
    passage_file = "passages/part-00000.parquet"
    assert new_manifest.content.files[passage_file] == old_manifest.content.files[passage_file]
    assert store.models.get(store.models.resolve(REF)).content.lineage["step"] == 4
    delete_rebuild_refs(store, REF)
    assert (store.refs.find_current(REF), store.models.refs.find_current(REF)) == (None, None)


@dataclass
class FullDiskAtStep:
    """Start rebuilds in child processes; limit the files of one step to 10,000 bytes, as on a full disk."""

    rebuilds: RebuildLauncher
    step: int

    def start(self, order: RebuildOrder) -> RebuildProcess:
        child = self.rebuilds.start(order)
        if order.step == self.step:
            resource.prlimit(child._process.pid, resource.RLIMIT_FSIZE, (10_000, 10_000))
        return child


def test_failed_rebuild_keeps_snapshot_and_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    articles = {f"City {number}": f"the king of city {number} was {number * 3}." for number in range(200)}
    # A search of one list misses neighbours in the others, so the gate refuses the index.
    recipe = {"index": {"lists": {"factory": LISTS, "search": {"nprobe": 1}}}}
    inputs = prepare(tmp_path, articles, more_indexes={"lists": LISTS}, recipe=recipe)
    store, settings = Store.open(str(inputs / "store")), replace(SETTINGS, moving=MovingSettings(2))
    tag(store, "latest", "first")
    with open_rebuild_launcher(store, REF, ()) as launcher, caplog.at_level(logging.WARNING):
        task = make_task(inputs, tmp_path / "run", settings, lambda _: FullDiskAtStep(launcher, 4))
        result = train(task, replace(settings.loop, max_steps=5), tmp_path / "run")
    rows = [row for row in read_metrics(tmp_path / "run") if row["kind"] == "train"]
    first = store.snapshots.resolve("first")
    assert [(row["snapshot"], row["refreshes_failed"]) for row in rows] == [(first, n) for n in (0, 0, 1, 1, 2)]
    assert (result.steps, task.searched_snapshot, store.refs.find_current(REF)) == (5, first, None)
    gate, disk = (record.message for record in caplog.records if "the training stays at" in record.message)
    (refused,) = {*store.snapshots.list_ids()} - {first}
    assert f"rebuild of step 2 was refused by the gate; the training stays at snapshot {first[:12]}: " in gate
    assert f"snapshot {refused[:12]} is published but refresh did not move: lists recall@20, mean is" in gate
    assert "rebuild of step 4 failed" in disk
    assert "File too large" in disk
    assert all(verify_version(store, snapshot_id) == [] for snapshot_id in (first, refused))


def test_rebuild_with_invalid_encoders_publishes_nothing(inputs: Path, tmp_path: Path) -> None:
    store, task = Store.open(str(inputs / "store")), make_task(inputs, tmp_path)
    snapshot_ids = store.snapshots.list_ids()
    with torch.no_grad():
        next(task._passage.parameters()).fill_(float("nan"))
    task.save_encoders(tmp_path / "encoders")
    first = store.snapshots.resolve("first")
    rebuild = RebuildTask(store.url, first, str(tmp_path / "encoders"), 2, "broken", (), "")
    with pytest.raises(InputError, match="not finite"):
        rebuild_index(rebuild)
    (tmp_path / "questions-only" / "question").mkdir(parents=True)
    (tmp_path / "questions-only" / "question" / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="encodes only questions"):
        rebuild_index(replace(rebuild, encoders=str(tmp_path / "questions-only")))
    assert (store.snapshots.list_ids(), store.refs.find_current("broken")) == (snapshot_ids, None)


@SHARED
@pytest.mark.slow
def test_killed_trainer_finds_its_published_rebuild(inputs: Path, tmp_path: Path) -> None:
    store, folder, observed = Store.open(str(inputs / "store")), tmp_path / "run", []
    first = store.snapshots.resolve("first")
    for kill_at in (INTERVAL + 1, INTERVAL + 2):  # before the trainer sees the rebuild; before a checkpoint records it
        check_killed(async_rebuilds.main, str(inputs), str(folder), "found", kill_at)
        checkpoint = read_checkpoint(list_checkpoints(folder / "checkpoints")[0])
        assert [searched.snapshot for searched in checkpoint.searched_snapshots] == [first]
        observed.append((store.snapshots.resolve("found"), sorted(store.snapshots.list_ids())))
    assert observed[0] == observed[1], "the second trainer starts no second rebuild"

    no_rebuilds = ManualRebuilder()
    _, result = train_in(inputs, folder, "asynchronous", rebuild=lambda _: no_rebuilds)
    rows = [row for row in read_metrics(folder) if row["kind"] == "train"]
    second = observed[0][0]
    assert [row["snapshot"] for row in rows] == [first] * (INTERVAL + 1) + [second] * 2
    assert [row["snapshot_age"] for row in rows] == [0, 1, 2, 3, 1, 2]
    assert [searched.snapshot for searched in result.searched_snapshots] == [first, second]
    assert no_rebuilds.orders == []


def test_killed_rebuild_restarts_and_launcher_ends_its_rebuilds(inputs: Path, tmp_path: Path) -> None:
    store = Store.open(str(inputs / "store"))
    task = make_task(inputs, tmp_path)
    first = store.snapshots.resolve("first")
    order = RebuildOrder(2, first, tmp_path / "step-2")
    order.encoders.mkdir(parents=True)
    task.save_encoders(order.encoders)
    with open_rebuild_launcher(store, REF, ()) as launcher:
        child = launcher.start(order)
        os.kill(child._process.pid, signal.SIGKILL)
        rebuilt = child.result()
        assert (rebuilt.step, child.done()) == (2, True)
        assert Snapshot.from_store(store, rebuilt.snapshot).manifest.provenance["reencoded"] == {"of": first}
        running = launcher.start(order)
    assert running._process.returncode == -signal.SIGTERM
    assert store.snapshots.resolve(REF) == rebuilt.snapshot
