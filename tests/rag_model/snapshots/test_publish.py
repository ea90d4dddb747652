"""Publishers that race for one ref: the history has every move, and the gate sees the current snapshot of the ref."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from rag_model.evaluation.gate import GateRecipe, GateVerdict, SnapshotSummary, check_snapshot
from rag_model.snapshots.publish import PublishResult, publish, summarize_snapshot
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest, PartEntry
from tests.rag_model.store.test_races import race

PUBLISHERS = 12


def create_manifest(store: Store, day: int, rows: int = 10) -> Manifest:
    """Return the manifest of a dump of that day, with one stored file."""
    file: BlobRef = store.blobs.put_bytes(f"passages of day {day}".encode())
    corpus = {"kind": "wiki", "newest_revision": f"2026-11-{day:02}T00:00:00Z"}
    part = PartEntry("part-00000", 1, 9, rows)
    return Manifest(Content(corpus, (part,), {"passages/part-00000.parquet": file}, {}))


def create_gate(manifest: Manifest) -> Callable[[SnapshotSummary | None], GateVerdict]:
    return lambda parent: check_snapshot(GateRecipe(), summarize_snapshot(manifest), {}, parent)


def publish_day(store: Store, day: int) -> PublishResult:
    manifest = create_manifest(store, day)
    return publish(store, manifest, "latest", create_gate(manifest))


def test_second_snapshot_has_the_first_as_parent(store: Store) -> None:
    first, second = publish_day(store, 1), publish_day(store, 2)
    assert first.move is not None
    assert second.move is not None
    assert (first.move.number, second.move.number) == (1, 2)
    assert store.snapshots.get(first.snapshot).parents == ()
    assert store.snapshots.get(second.snapshot).parents == (first.snapshot,)


def test_publishing_the_same_snapshot_again_moves_no_ref(store: Store) -> None:
    first, second = publish_day(store, 1), publish_day(store, 1)
    assert (second.snapshot, second.move) == (first.snapshot, first.move)
    assert second.verdict.passed
    assert len(store.refs.read_history("latest")) == 1


def test_refused_snapshot_is_stored_but_the_ref_does_not_move(store: Store) -> None:
    first, older = publish_day(store, 2), publish_day(store, 1)
    assert older.move is None
    assert not older.verdict.passed
    assert "newest revision" in older.verdict.reason
    assert store.snapshots.get(older.snapshot)
    (move,) = store.refs.read_history("latest")
    assert move.snapshot == first.snapshot


@pytest.mark.parametrize("round_", range(3))
def test_concurrent_publishers_lose_nothing(store: Store, round_: int) -> None:
    """Each process publishes the dump of another day; the ref moves only to later dumps, and refusals have reasons."""
    days = range(1, PUBLISHERS + 1)
    manifests = {day: create_manifest(store, day) for day in days}

    def publish_in_process(number: int) -> tuple[int, int, str]:
        result = publish_day(Store.open(store.url), days[number])
        return days[number], result.move.number if result.move else 0, result.verdict.reason

    outcomes = race(PUBLISHERS, publish_in_process)
    day_by_number = {number: day for day, number, _ in outcomes if number}
    history = store.refs.read_history("latest")
    assert [move.number for move in history] == sorted(day_by_number)
    published_days = [day_by_number[number] for number in sorted(day_by_number)]
    assert [move.snapshot for move in history] == [manifests[day].id for day in published_days]
    assert published_days == sorted(published_days)  # The ref never moves to an older dump.
    assert published_days[-1] == PUBLISHERS
    assert set(store.snapshots.list_ids()) == {manifest.id for manifest in manifests.values()}
    assert all("newest revision" in reason for _, number, reason in outcomes if not number)
    assert all(later.previous == earlier.snapshot for earlier, later in pairwise(history))
