"""Rebuilds of a moving index: compared with encoding by hand, and in children that are killed and that fail."""

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
from tests.fixtures.tiny_end2end import EVERY, SETTINGS, ByHand, Running, prepare, task_of, trained

EXACT = replace(SETTINGS, rag=replace(SETTINGS.rag, retriever="exact"), moving=MovingSettings(2))
REF = "refresh"
LISTS = "IVF5,Flat"


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepare(tmp_path_factory.mktemp("given"))
    tag(Store.open(str(folder / "store")), "latest", "first")
    return folder


class Here(ByHand):
    """Rebuilds by the flow, in this process."""

    def __init__(self, given: Path) -> None:
        super().__init__()
        self._store = str(given / "store")

    def start(self, order: RebuildOrder) -> Running:
        task = RebuildTask(self._store, order.snapshot, str(order.encoders), order.step, REF, (), "")
        self.ended[order.step] = rebuild_index(task)
        return super().start(order)


class Brute(PassageMemory):
    """All vectors in one array, compared with every question."""

    def __init__(self, passages: Sequence[Passage], vectors: Vectors) -> None:
        self._every, self._vectors = passages, vectors

    def retrieve(self, questions: Sequence[str], query_vectors: Vectors, k: int) -> RetrievedBatch:
        rows = np.argsort(-(query_vectors @ self._vectors.T), axis=1, kind="stable")[:, :k]
        hits = [
            [Hit(rank, 0.0, row, self._every[row], "", "") for rank, row in enumerate(own, start=1)]
            for own in rows.tolist()
        ]
        return RetrievedBatch(hits, self._vectors[rows])


class Naive(End2EndTask):
    """Encodes all passages again when that is due, before the next step."""

    def move_index(self, step: int) -> Measures:
        if self._settings.moving.is_due(step - 1):
            passages = self._snapshot.passages(range(self._snapshot.n))
            with tempfile.TemporaryDirectory() as folder:
                self.save_encoders(Path(folder))
                encoder = Encoder.load(Path(folder) / "passage", threads=1, device="cpu")
                vectors = encoder.encode_passages(
                    [passage.title for passage in passages], [passage.text for passage in passages]
                )
            self._memory = Brute(passages, vectors.astype(np.float16).astype(np.float32))  # as vectors are stored
        return {}


def test_losses_are_those_of_encoding_all_passages_again_by_hand(given: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    curves, calls = [], []
    for kind in (End2EndTask, Naive):
        task = task_of(given, tmp_path / kind.__name__, EXACT, Here, kind=kind)
        done = train(task, EXACT.loop, tmp_path / kind.__name__)
        curves.append([row["loss"] for row in read_metrics(tmp_path / kind.__name__) if row["kind"] == "train"])
        calls.append([searched_snapshot.step for searched_snapshot in done.searched_snapshots])
    assert curves[0] == pytest.approx(curves[1], rel=1e-6)
    assert calls == [[0, 3, 5], [0]]
    store = Store.open(str(given / "store"))
    old, new = (store.snapshots.get(store.snapshots.resolve(name)) for name in ("first", REF))
    assert new.provenance["reencoded"] == {"of": old.id}
    passages = [[entry.content.files["passages/part-00000.parquet"]] for entry in (old, new)]
    assert passages[0] == passages[1], "chunks stay"
    assert store.models.get(store.models.resolve(REF)).content.lineage["step"] == 4
    delete_rebuild_refs(store, REF)
    assert (store.refs.find_current(REF), store.models.refs.find_current(REF)) == (None, None)


@dataclass
class FullAt:
    """Rebuilds in child processes; that of a step may write no file of more than 10,000 bytes, as on a full disk."""

    rebuilds: RebuildLauncher
    step: int

    def start(self, order: RebuildOrder) -> RebuildProcess:
        child = self.rebuilds.start(order)
        if order.step == self.step:
            resource.prlimit(child._process.pid, resource.RLIMIT_FSIZE, (10_000, 10_000))
        return child


def test_a_refresh_that_the_gate_refuses_or_that_finds_the_store_full_leaves_the_snapshot_and_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    many = {f"City {number}": f"the king of city {number} was {number * 3}." for number in range(200)}
    one_list = {"index": {"lists": {"factory": LISTS, "search": {"nprobe": 1}}}}  # misses neighbours in the other lists
    given = prepare(tmp_path, many, more={"lists": LISTS}, recipe=one_list)
    store, settings = Store.open(str(given / "store")), replace(SETTINGS, moving=MovingSettings(2))
    tag(store, "latest", "first")
    with open_rebuild_launcher(store, REF, ()) as made, caplog.at_level(logging.WARNING):
        task = task_of(given, tmp_path / "run", settings, lambda _: FullAt(made, 4))
        done = train(task, replace(settings.loop, max_steps=5), tmp_path / "run")
    rows = [row for row in read_metrics(tmp_path / "run") if row["kind"] == "train"]
    first = store.snapshots.resolve("first")
    assert [(row["snapshot"], row["refreshes_failed"]) for row in rows] == [(first, n) for n in (0, 0, 1, 1, 2)]
    assert (done.steps, task.searched_snapshot, store.refs.find_current(REF)) == (5, first, None)
    refused, full = (record.message for record in caplog.records if "the training stays at" in record.message)
    (other,) = {*store.snapshots.list_ids()} - {first}
    assert f"rebuild of step 2 was refused by the gate; the training stays at snapshot {first[:12]}: " in refused
    assert f"snapshot {other[:12]} is published but refresh did not move: lists recall@20, mean is" in refused
    assert "rebuild of step 4 failed" in full
    assert "File too large" in full
    assert [problem for known in store.snapshots.list_ids() for problem in verify_version(store, known)] == []


def test_vectors_that_are_not_finite_are_never_published(given: Path, tmp_path: Path) -> None:
    store, task = Store.open(str(given / "store")), task_of(given, tmp_path)
    before = store.snapshots.list_ids()
    with torch.no_grad():
        next(task._passage.parameters()).fill_(float("nan"))
    task.save_encoders(tmp_path / "encoders")
    first = store.snapshots.resolve("first")
    with pytest.raises(InputError, match="not finite"):
        rebuild_index(RebuildTask(store.url, first, str(tmp_path / "encoders"), 2, "broken", (), ""))
    assert (store.snapshots.list_ids(), store.refs.find_current("broken")) == (before, None)


@SHARED
@pytest.mark.slow
def test_a_trainer_that_is_killed_after_its_rebuild_was_published_finds_it_again(given: Path, tmp_path: Path) -> None:
    store, folder, known = Store.open(str(given / "store")), tmp_path / "run", []
    first = store.snapshots.resolve("first")
    for kill_at in (EVERY + 1, EVERY + 2):  # before the trainer has seen that it is there; before a checkpoint asks it
        check_killed(async_rebuilds.main, str(given), str(folder), "found", kill_at)
        assert [
            searched_snapshot.snapshot
            for searched_snapshot in read_checkpoint(list_checkpoints(folder / "checkpoints")[0]).searched_snapshots
        ] == [first]
        known.append((store.snapshots.resolve("found"), sorted(store.snapshots.list_ids())))
    assert known[0] == known[1], "it is made once"

    none = ByHand()
    _, done = trained(given, folder, "asynchronous", rebuild=lambda _: none)
    rows = [row for row in read_metrics(folder) if row["kind"] == "train"]
    second = known[0][0]
    assert [row["snapshot"] for row in rows] == [first] * (EVERY + 1) + [second] * 2
    assert [row["snapshot_age"] for row in rows] == [0, 1, 2, 3, 1, 2]
    assert ([searched_snapshot.snapshot for searched_snapshot in done.searched_snapshots], none.orders) == (
        [first, second],
        [],
    )


def test_a_rebuild_that_is_killed_begins_again_and_one_that_fails_says_why(given: Path, tmp_path: Path) -> None:
    store = Store.open(str(given / "store"))
    task = task_of(given, tmp_path)
    first = store.snapshots.resolve("first")
    good, bad = (RebuildOrder(step, first, tmp_path / f"step-{step}") for step in (2, 4))
    good.encoders.mkdir(parents=True)
    task.save_encoders(good.encoders)
    (bad.encoders / "question").mkdir(parents=True)
    (bad.encoders / "question" / "config.json").write_text("{}")
    with open_rebuild_launcher(store, REF, ()) as made:
        child = made.start(good)
        os.kill(child._process.pid, signal.SIGKILL)
        found = child.result()
        assert (found.step, child.done()) == (2, True)
        assert Snapshot.from_store(store, found.snapshot).manifest.provenance["reencoded"] == {"of": first}
        with pytest.raises(UsageError, match="encodes only questions"):
            made.start(bad).result()
        running = made.start(good)
    assert running._process.returncode == -signal.SIGTERM, "none outlives the training"
    assert store.snapshots.resolve(REF) == found.snapshot
