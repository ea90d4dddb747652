"""Publishers that race for one ref: every move is in its history, and the gate is asked about what stands there now."""

import multiprocessing
from collections.abc import Callable
from itertools import pairwise

import pytest

from rag_model.evaluation.gate import GateRecipe, GateVerdict, SnapshotSummary, check_snapshot
from rag_model.snapshots.publish import PublishResult, publish, summarize_snapshot
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest, PartEntry

PUBLISHERS = 12
processes = multiprocessing.get_context("fork")


def manifest(store: Store, day: int, rows: int = 10) -> Manifest:
    """A snapshot of a dump of that day; its one file is real, what is in it does not matter here."""
    file: BlobRef = store.blobs.put_bytes(f"passages of day {day}".encode())
    corpus = {"kind": "wiki", "newest_revision": f"2026-11-{day:02}T00:00:00Z"}
    part = PartEntry("part-00000", 1, 9, rows)
    return Manifest(Content(corpus, (part,), {"passages/part-00000.parquet": file}, {}))


def gate(what: Manifest) -> Callable[[SnapshotSummary | None], GateVerdict]:
    return lambda parent: check_snapshot(GateRecipe(), summarize_snapshot(what), {}, parent)


def put(store: Store, what: Manifest) -> PublishResult:
    return publish(store, what, "latest", gate(what))


def test_the_first_has_no_parent_and_the_next_has_one(store: Store) -> None:
    first, second = put(store, manifest(store, 1)), put(store, manifest(store, 2))
    assert first.move is not None
    assert second.move is not None
    assert (first.move.number, second.move.number) == (1, 2)
    assert store.snapshots.get(first.snapshot).parents == ()
    assert store.snapshots.get(second.snapshot).parents == (first.snapshot,)


def test_publishing_again_moves_nothing(store: Store) -> None:
    first, again = put(store, manifest(store, 1)), put(store, manifest(store, 1))
    assert (again.snapshot, again.move) == (first.snapshot, first.move)
    assert again.verdict.passed
    assert len(store.refs.read_history("latest")) == 1


def test_what_the_gate_refuses_is_published_and_the_ref_stays(store: Store) -> None:
    first, older = put(store, manifest(store, 2)), put(store, manifest(store, 1))
    assert older.move is None
    assert not older.verdict.passed
    assert "newest revision" in older.verdict.reason
    assert store.snapshots.get(older.snapshot)
    (move,) = store.refs.read_history("latest")
    assert move.snapshot == first.snapshot


@pytest.mark.parametrize("round_", range(3))
def test_publishers_that_race_lose_nothing(store: Store, round_: int) -> None:
    """All at once, each another day's dump: the ref only ever moves forward, and who is refused is told why."""
    days = range(1, PUBLISHERS + 1)
    made = {day: manifest(store, day) for day in days}
    barrier = processes.Barrier(PUBLISHERS)
    told = processes.SimpleQueue()

    def race(day: int) -> None:
        own = Store.open(store.url)
        barrier.wait()
        published = publish(own, made[day], "latest", gate(made[day]))
        told.put((day, published.move.number if published.move else 0, published.verdict.reason))

    racers = [processes.Process(target=race, args=(day,)) for day in days]
    for racer in racers:
        racer.start()
    outcomes = [told.get() for _ in racers]
    for racer in racers:
        racer.join()

    moved = {number: day for day, number, _ in outcomes if number}
    history = store.refs.read_history("latest")
    assert [move.snapshot for move in history] == [made[moved[n]].id for n in range(1, len(moved) + 1)]
    assert [move.number for move in history] == sorted(moved)
    in_order = [moved[number] for number in sorted(moved)]
    assert in_order == sorted(in_order)  # never back to an older dump
    assert in_order[-1] == PUBLISHERS
    assert set(store.snapshots.list_ids()) == {what.id for what in made.values()}
    assert all("newest revision" in why for _, number, why in outcomes if not number)
    assert all(later.previous == earlier.snapshot for earlier, later in pairwise(history))
