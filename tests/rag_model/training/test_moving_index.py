"""When a rebuild begins, when the trainer moves to it, and what it asks where a rebuild fails or a run was killed."""

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
from tests.fixtures.tiny_end2end import ByHand
from tests.fixtures.tiny_snapshot import publish_tiny

ARTICLES = {"York": "the king of york.", "Oslo": "the river of oslo.", "Riga": "the war of riga."}
NOW = ExpirePolicy(keep=1, older_than=0)
LOW = "recall is 0.100, wanted at least 0.950"


class Kept:
    """A store of three snapshots of the same passages, and a learner that asks one of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, Store.open(str(folder / "store"), create=True)
        self.work, self.weights, self.asks = folder / "training", "first", ""
        self.made = [self.publish(seed) for seed in (1, 2, 3)]
        self.rebuild = ByHand()

    def publish(self, seed: int) -> str:
        work = self.folder / f"work-{seed}"
        work.mkdir()
        return publish_tiny(self.store, save_bert(self.folder / f"bert-{seed}", seed), ARTICLES, work).id

    def save(self, folder: Path) -> None:
        (folder / "passage.txt").write_text(self.weights)

    def turn_to(self, snapshot: Snapshot) -> None:
        self.asks = snapshot.id

    def index(self, mode: Any = "asynchronous", every: int = 2) -> MovingIndex:
        first = Snapshot.from_store(self.store, self.made[0])
        learner, settings = MovingIndexHooks(self.save, self.turn_to), MovingSettings(every, mode)
        return MovingIndex(self.store, first, settings, self.rebuild, self.work, learner)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


def test_the_trainer_goes_on_while_a_rebuild_runs_and_moves_at_a_boundary(kept: Kept) -> None:
    index = kept.index()
    ages = [index.move_index(step)["snapshot_age"] for step in (1, 2)]
    kept.weights = "after two steps"
    ages += [index.move_index(step)["snapshot_age"] for step in (3, 4)]
    assert (ages, index.searched_snapshot, kept.asks) == ([0, 1, 2, 3], kept.made[0], "")
    (order,) = kept.rebuild.orders
    assert (order.step, order.snapshot) == (2, kept.made[0])
    assert (order.encoders / "passage.txt").read_text() == "after two steps"
    kept.rebuild.end(2, kept.made[1])
    said = index.move_index(5)
    assert index.searched_snapshot == kept.asks == kept.made[1]
    assert (said["snapshot_age"], said["encoding_seconds"], said["rebuild_seconds"]) == (2, 2.0, 3.0)
    assert said["swap_seconds"] > 0 == said["refreshes_failed"]
    assert [order.step for order in kept.rebuild.orders] == [2, 4], (
        "what was due meanwhile begins now, with new weights"
    )
    assert not order.encoders.exists(), "the trainer is past them"


def test_the_trainer_waits_in_synchronous_mode(kept: Kept) -> None:
    index = kept.index("synchronous")
    kept.rebuild.end(2, kept.made[1])
    kept.rebuild.end(4, kept.made[2])
    told = [(index.move_index(step)["snapshot_age"], index.searched_snapshot) for step in range(1, 6)]
    first, second, third = kept.made
    assert told == [(0, first), (1, first), (0, second), (1, second), (0, third)]


@pytest.mark.parametrize(
    ("error", "how"), [(GateRefusedError(LOW), "was refused by the gate"), (StoreError(LOW), "failed")]
)
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_rebuild_that_fails_leaves_the_snapshot_and_says_so(
    kept: Kept, mode: str, error: BookwheelError, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    index = kept.index(mode)
    kept.rebuild.ended[2] = error
    kept.rebuild.end(4, kept.made[1])
    with caplog.at_level(logging.WARNING):
        failed = [index.move_index(step)["refreshes_failed"] for step in range(1, 5)]
    assert (failed[-1], index.searched_snapshot) == (1, kept.made[0])
    assert f"the rebuild of step 2 {how}; the training stays at snapshot {kept.made[0][:12]}: {LOW}" in caplog.text
    index.move_index(5)
    index.move_index(6)
    assert index.searched_snapshot == kept.made[1], "the next one is tried"


def test_a_snapshot_that_cannot_be_opened_leaves_the_one_before(kept: Kept) -> None:
    def broken(snapshot: Snapshot) -> None:
        raise StoreError("its index is damaged")

    kept.turn_to = broken  # type: ignore[method-assign]
    index = kept.index("synchronous")
    kept.rebuild.end(2, kept.made[1])
    assert index.move_index(3)["refreshes_failed"] == 1
    assert index.searched_snapshot == kept.made[0]
    expire_store(kept.store, NOW)
    assert {kept.made[0], kept.made[2]} == {*kept.store.snapshots.list_ids()}, "asked, and named by latest"


@pytest.mark.parametrize("finished", [False, True])
def test_a_run_that_was_killed_asks_its_snapshot_and_finishes_what_was_begun(kept: Kept, finished: bool) -> None:
    index = kept.index()
    for step in (1, 2, 3):
        index.move_index(step)
    if finished:
        kept.rebuild.end(2, kept.made[1])
        index.move_index(4)
    kept.rebuild = ByHand()
    again = kept.index()
    again.search_snapshot(kept.made[0])  # of the checkpoint after step 3
    said = again.move_index(4)
    if finished:
        assert (again.searched_snapshot, said["snapshot_age"], kept.rebuild.orders) == (kept.made[1], 1, [])
    else:
        assert (again.searched_snapshot, [order.step for order in kept.rebuild.orders]) == (kept.made[0], [2])
        kept.rebuild.end(2, kept.made[1])
        again.move_index(5)
        assert again.searched_snapshot == kept.made[1]


def test_a_run_that_goes_on_where_a_rebuild_was_begun_makes_it_once(kept: Kept) -> None:
    kept.index().move_index(3)
    again = kept.index()
    again.search_snapshot(kept.made[0])  # of the checkpoint after step 2
    again.move_index(3)
    kept.rebuild.end(2, kept.made[1])
    again.move_index(4)
    assert (again.searched_snapshot, [order.step for order in kept.rebuild.orders]) == (kept.made[1], [2, 2])


def test_a_run_that_goes_on_with_a_finished_rebuild_begins_the_one_that_is_due(kept: Kept) -> None:
    index = kept.index()
    index.move_index(3)
    kept.rebuild.end(2, kept.made[1])
    index.move_index(4)  # and is killed before it has a checkpoint that asks the new snapshot
    again = kept.index()
    again.search_snapshot(kept.made[0])  # of a checkpoint after step 4
    again.move_index(5)
    assert (again.searched_snapshot, [order.step for order in kept.rebuild.orders]) == (kept.made[1], [2, 4])


def test_a_run_that_resumes_knows_the_age_of_what_it_asks(kept: Kept) -> None:
    index = kept.index("synchronous")
    kept.rebuild.end(2, kept.made[1])
    index.move_index(3)
    again = kept.index("synchronous")
    again.search_snapshot(kept.made[1])
    assert again.move_index(4)["snapshot_age"] == 1
    record = kept.work / "refreshes" / "step-00000002.json"
    assert json.loads(record.read_text())["snapshot"] == kept.made[1]
    record.write_text("{")
    with pytest.raises(InputError, match="is corrupt"):
        kept.index().search_snapshot(kept.made[1])


def test_what_is_asked_is_not_deleted_and_what_was_asked_may_be(kept: Kept) -> None:
    first, second, third = kept.made  # only the third has a ref
    index = kept.index("synchronous")
    assert expire_store(kept.store, NOW).snapshots == (second,)
    collect_garbage(kept.store, 0)
    assert Snapshot.from_store(kept.store, first).passages([0])
    kept.rebuild.end(2, third)
    index.move_index(3)
    assert expire_store(kept.store, NOW).snapshots == (first,)
    with pytest.raises(StoreError, match="missing"):
        index.search_snapshot(first)
    assert index.searched_snapshot == third


def test_a_training_that_ends_lets_its_snapshot_go(kept: Kept) -> None:
    index = kept.index()
    assert index.searched_snapshot
    del index
    assert {*expire_store(kept.store, NOW).snapshots} == {*kept.made[:2]}


def test_settings_are_checked() -> None:
    assert [MovingSettings(2).count_rebuilds(steps) for steps in (1, 2, 3, 4, 5)] == [0, 0, 1, 1, 2]
    assert (MovingSettings(0).count_rebuilds(9), MovingSettings(0).is_due(4), MovingSettings(4).is_due(0)) == (
        0,
        False,
        False,
    )
    with pytest.raises(UsageError, match=r"every of \[moving\] is -1: use 0 or more"):
        MovingSettings(-1)


def test_without_anything_that_rebuilds_only_a_training_without_rebuilds_begins(kept: Kept) -> None:
    kept.rebuild = None  # type: ignore[assignment]
    with pytest.raises(UsageError, match="cannot rebuild an index"):
        kept.index()
    assert kept.index(every=0).move_index(9)["snapshot_age"] == 8
