"""The index moves during training: when rebuilds start, and which snapshot is searched after a failure or a restart."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from rag_model.errors import BookwheelError, GateRefusedError, InputError, StoreError, UsageError
from rag_model.store.store import Store
from rag_model.store.upkeep.expire import ExpirePolicy, expire_store
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.moving_index import MovingIndex, MovingIndexHooks, MovingSettings
from tests.fixtures.tiny import save_bert
from tests.fixtures.tiny_end2end import ManualRebuilder
from tests.fixtures.tiny_snapshot import publish_tiny

ARTICLES = {"York": "the king of york.", "Oslo": "the river of oslo.", "Riga": "the war of riga."}
NOW = ExpirePolicy(keep=1, older_than=0)
LOW = "recall is 0.100, wanted at least 0.950"


class MovingSetup:
    """A store with three snapshots of the same passages, and hooks that record the searched snapshot."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, Store.open(str(folder / "store"), create=True)
        self.work, self.weights, self.searched = folder / "training", "first", ""
        self.snapshots = [self.publish(seed) for seed in (1, 2, 3)]
        self.rebuild = ManualRebuilder()

    def publish(self, seed: int) -> str:
        work = self.folder / f"work-{seed}"
        work.mkdir()
        return publish_tiny(self.store, save_bert(self.folder / f"bert-{seed}", seed), ARTICLES, work).id

    def save(self, folder: Path) -> None:
        (folder / "passage.txt").write_text(self.weights)

    def search(self, snapshot: Snapshot) -> None:
        self.searched = snapshot.id

    def index(self, mode: Any = "asynchronous", every: int = 2) -> MovingIndex:
        first = Snapshot.from_store(self.store, self.snapshots[0])
        hooks, settings = MovingIndexHooks(self.save, self.search), MovingSettings(every, mode)
        return MovingIndex(self.store, first, settings, self.rebuild, self.work, hooks)


@pytest.fixture
def setup(tmp_path: Path) -> MovingSetup:
    return MovingSetup(tmp_path)


def test_training_continues_during_a_rebuild_and_swaps_when_it_ends(setup: MovingSetup) -> None:
    index = setup.index()
    ages = [index.move_index(step)["snapshot_age"] for step in (1, 2)]
    setup.weights = "after two steps"
    ages += [index.move_index(step)["snapshot_age"] for step in (3, 4)]
    assert (ages, index.searched_snapshot, setup.searched) == ([0, 1, 2, 3], setup.snapshots[0], "")
    (order,) = setup.rebuild.orders
    assert (order.step, order.snapshot) == (2, setup.snapshots[0])
    assert (order.encoders / "passage.txt").read_text() == "after two steps"
    setup.rebuild.end(2, setup.snapshots[1])
    metrics = index.move_index(5)
    assert index.searched_snapshot == setup.searched == setup.snapshots[1]
    assert (metrics["snapshot_age"], metrics["encoding_seconds"], metrics["rebuild_seconds"]) == (2, 2.0, 3.0)
    assert metrics["swap_seconds"] > 0 == metrics["refreshes_failed"]
    # The rebuild of step 4 was due during the first one.
    assert [order.step for order in setup.rebuild.orders] == [2, 4]
    assert not order.encoders.exists(), "the saved encoders are no longer needed"


def test_synchronous_mode_waits_for_each_rebuild(setup: MovingSetup) -> None:
    index = setup.index("synchronous")
    setup.rebuild.end(2, setup.snapshots[1])
    setup.rebuild.end(4, setup.snapshots[2])
    ages = [(index.move_index(step)["snapshot_age"], index.searched_snapshot) for step in range(1, 6)]
    first, second, third = setup.snapshots
    assert ages == [(0, first), (1, first), (0, second), (1, second), (0, third)]


@pytest.mark.parametrize(
    ("error", "outcome"), [(GateRefusedError(LOW), "was refused by the gate"), (StoreError(LOW), "failed")]
)
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_failed_rebuild_keeps_the_snapshot_and_logs_a_warning(
    setup: MovingSetup, mode: str, error: BookwheelError, outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    index = setup.index(mode)
    setup.rebuild.results[2] = error
    setup.rebuild.end(4, setup.snapshots[1])
    with caplog.at_level(logging.WARNING):
        failure_counts = [index.move_index(step)["refreshes_failed"] for step in range(1, 5)]
    assert (failure_counts[-1], index.searched_snapshot) == (1, setup.snapshots[0])
    stays = f"the training stays at snapshot {setup.snapshots[0][:12]}: {LOW}"
    assert f"the rebuild of step 2 {outcome}; {stays}" in caplog.text
    index.move_index(5)
    index.move_index(6)
    assert index.searched_snapshot == setup.snapshots[1], "the next rebuild is used"


def test_snapshot_that_cannot_be_opened_keeps_the_previous_one(setup: MovingSetup) -> None:
    def fail_to_open(snapshot: Snapshot) -> None:
        raise StoreError("its index is damaged")

    setup.search = fail_to_open  # type: ignore[method-assign]
    index = setup.index("synchronous")
    setup.rebuild.end(2, setup.snapshots[1])
    assert index.move_index(3)["refreshes_failed"] == 1
    assert index.searched_snapshot == setup.snapshots[0]
    expire_store(setup.store, NOW)
    assert {setup.snapshots[0], setup.snapshots[2]} == {*setup.store.snapshots.list_ids()}, "searched, and latest"


@pytest.mark.parametrize("finished", [False, True])
def test_resumed_run_searches_its_snapshot_and_finishes_the_started_rebuild(setup: MovingSetup, finished: bool) -> None:
    index = setup.index()
    for step in (1, 2, 3):
        index.move_index(step)
    if finished:
        setup.rebuild.end(2, setup.snapshots[1])
        index.move_index(4)
    setup.rebuild = ManualRebuilder()
    resumed = setup.index()
    resumed.search_snapshot(setup.snapshots[0])  # in the checkpoint of step 3
    metrics = resumed.move_index(4)
    if finished:
        assert (resumed.searched_snapshot, metrics["snapshot_age"], setup.rebuild.orders) == (setup.snapshots[1], 1, [])
    else:
        assert (resumed.searched_snapshot, [order.step for order in setup.rebuild.orders]) == (setup.snapshots[0], [2])
        setup.rebuild.end(2, setup.snapshots[1])
        resumed.move_index(5)
        assert resumed.searched_snapshot == setup.snapshots[1]


def test_run_that_resumes_where_a_rebuild_started_orders_it_again(setup: MovingSetup) -> None:
    setup.index().move_index(3)
    resumed = setup.index()
    resumed.search_snapshot(setup.snapshots[0])  # in the checkpoint of step 2
    resumed.move_index(3)
    setup.rebuild.end(2, setup.snapshots[1])
    resumed.move_index(4)
    assert (resumed.searched_snapshot, [order.step for order in setup.rebuild.orders]) == (setup.snapshots[1], [2, 2])


def test_run_that_resumes_with_a_finished_rebuild_starts_the_next_one(setup: MovingSetup) -> None:
    index = setup.index()
    index.move_index(3)
    setup.rebuild.end(2, setup.snapshots[1])
    index.move_index(4)  # It is killed before a checkpoint contains the new snapshot.
    resumed = setup.index()
    resumed.search_snapshot(setup.snapshots[0])  # in a checkpoint after step 4
    resumed.move_index(5)
    assert (resumed.searched_snapshot, [order.step for order in setup.rebuild.orders]) == (setup.snapshots[1], [2, 4])


def test_resumed_run_knows_the_age_of_its_snapshot(setup: MovingSetup) -> None:
    index = setup.index("synchronous")
    setup.rebuild.end(2, setup.snapshots[1])
    index.move_index(3)
    resumed = setup.index("synchronous")
    resumed.search_snapshot(setup.snapshots[1])
    assert resumed.move_index(4)["snapshot_age"] == 1
    record = setup.work / "refreshes" / "step-00000002.json"
    assert json.loads(record.read_text())["snapshot"] == setup.snapshots[1]
    record.write_text("{")
    with pytest.raises(InputError, match="is corrupt"):
        setup.index().search_snapshot(setup.snapshots[1])


def test_expire_keeps_the_searched_snapshot_and_deletes_earlier_ones(setup: MovingSetup) -> None:
    first, second, third = setup.snapshots  # only the third has a ref
    index = setup.index("synchronous")
    assert expire_store(setup.store, NOW).snapshots == (second,)
    collect_garbage(setup.store, 0)
    assert Snapshot.from_store(setup.store, first).passages([0])
    setup.rebuild.end(2, third)
    index.move_index(3)
    assert expire_store(setup.store, NOW).snapshots == (first,)
    with pytest.raises(StoreError, match="missing"):
        index.search_snapshot(first)
    assert index.searched_snapshot == third


def test_expire_deletes_the_snapshot_of_a_finished_training(setup: MovingSetup) -> None:
    index = setup.index()
    assert index.searched_snapshot
    del index
    assert {*expire_store(setup.store, NOW).snapshots} == {*setup.snapshots[:2]}


def test_rebuilds_are_counted_and_settings_checked() -> None:
    assert [MovingSettings(2).count_rebuilds(steps) for steps in (1, 2, 3, 4, 5)] == [0, 0, 1, 1, 2]
    assert MovingSettings(0).count_rebuilds(9) == 0
    assert not MovingSettings(0).is_due(4)
    assert not MovingSettings(4).is_due(0)
    with pytest.raises(UsageError, match=r"every of \[moving\] is -1: use 0 or more"):
        MovingSettings(-1)


def test_training_without_a_rebuilder_cannot_have_rebuilds(setup: MovingSetup) -> None:
    setup.rebuild = None  # type: ignore[assignment]
    with pytest.raises(UsageError, match="cannot rebuild an index"):
        setup.index()
    assert setup.index(every=0).move_index(9)["snapshot_age"] == 8
