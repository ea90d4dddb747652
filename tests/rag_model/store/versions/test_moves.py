"""`tag`, `rollback` and `untag` move refs, and refuse incomplete snapshots and invalid names."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.errors import RefConflictError, RefusedError, StoreError, UsageError
from rag_model.snapshots.publish import replace_snapshot
from rag_model.store import Store
from rag_model.store.upkeep.expire import ExpirePolicy, expire_store
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.moves import _move, rollback, tag, untag
from tests.fixtures.store_files import age_files, publish_empty, publish_parts

FILE = "embeddings/part-00000.npy"


def read_letters(store: Store) -> str:
    """Return the letters of the snapshots in the history of `latest`, oldest first."""
    return "".join(
        store.snapshots.get(move.snapshot).content.corpus["name"] for move in store.refs.read_history("latest")
    )


@pytest.mark.parametrize(
    ("moves", "rollbacks", "history"),
    [
        ("AB", 1, "ABA"),
        ("ABC", 2, "ABCBA"),  # the second rollback does not return to C
        ("ABA", 1, "ABAB"),  # a tag that returns to A is an ordinary move
        ("ABBC", 2, "ABBCBA"),
        ("ABA", 2, "ABABA"),
    ],
)
def test_repeated_rollbacks_reach_earlier_snapshots(store: Store, moves: str, rollbacks: int, history: str) -> None:
    for number, letter in enumerate(moves):
        store.refs.move("latest", publish_empty(store, letter), number)
    for _ in range(rollbacks):
        rollback(store, "latest")
    assert read_letters(store) == history


def test_rollback_skips_snapshots_rolled_back_before(store: Store) -> None:
    for letter in "AB":
        tag(store, publish_empty(store, letter), "latest")
    rollback(store, "latest")
    tag(store, publish_empty(store, "C"), "latest")
    rollback(store, "latest")
    assert read_letters(store) == "ABACA"
    with pytest.raises(UsageError, match=r"named no other snapshot before .*--to NUMBER"):
        rollback(store, "latest")
    assert rollback(store, "latest", 2).note == "rollback to @2"
    assert read_letters(store) == "ABACAB"


@pytest.mark.parametrize("n_tags", [0, 1])  # tags of D between the takedown and the next rollback
def test_rollback_after_takedown_skips_snapshots_rolled_back_before(store: Store, n_tags: int) -> None:
    snapshot_ids = [publish_empty(store, letter) for letter in "ABC"]
    for snapshot_id in snapshot_ids:
        tag(store, snapshot_id, "latest")
    rollback(store, "latest")
    replace_snapshot(store, snapshot_ids[1], publish_empty(store, "E"))
    assert read_letters(store) == "AECEE"  # E replaced B
    for _ in range(n_tags):
        tag(store, publish_empty(store, "D"), "latest")
        rollback(store, "latest")
    assert rollback(store, "latest").snapshot == snapshot_ids[0]


@given(st.text("ABC", min_size=1, max_size=6), st.integers(1, 8))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_rollbacks_end_and_never_repeat(store: Store, moves: str, extra: int) -> None:
    store.files.delete_folder("refs")
    for number, letter in enumerate(moves):
        note = f"rollback to @{extra}" if number == extra else ""
        store.refs.move("latest", publish_empty(store, letter), number, note=note)
    notes = []
    with pytest.raises(UsageError):  # noqa: PT012 - the last rollback fails
        while True:
            notes.append(int(rollback(store, "latest").note.removeprefix("rollback to @")))
    assert notes == sorted(set(notes), reverse=True)
    assert read_letters(store)[: len(moves)] == moves


def test_repeated_tag_adds_no_move(store: Store) -> None:
    first = tag(store, publish_empty(store, "A"), "latest", "first")
    assert tag(store, "latest", "latest", "again") == first
    copied = tag(store, "latest@1", "2026-11", "kept")
    assert (copied.snapshot, copied.number, copied.previous, copied.note) == (first.snapshot, 1, None, "kept")
    assert store.refs.list_numbers("latest") == [1]


@pytest.mark.parametrize("number", [-1, 0, 2, 10**9])
def test_missing_number_is_refused(store: Store, number: int) -> None:
    tag(store, publish_empty(store, "A"), "latest")
    with pytest.raises(StoreError, match=f"ref latest has no move {number}"):
        rollback(store, "latest", number)
    with pytest.raises(UsageError, match=r"already names .*, which latest@1 named"):
        rollback(store, "latest", 1)
    with pytest.raises(StoreError, match="ref other has no history"):
        rollback(store, "other", 1)
    assert store.refs.list_numbers("latest") == [1]


@pytest.mark.parametrize(("snapshot", "ref"), [("0000", "latest"), ("latest", "no/name"), ("latest", "latest@1")])
def test_invalid_snapshot_or_ref_name_is_refused(store: Store, snapshot: str, ref: str) -> None:
    tag(store, publish_empty(store, "A"), "latest")
    with pytest.raises((StoreError, UsageError), match=r"no snapshot or ref '0000'|is not a ref name"):
        tag(store, snapshot, ref)
    assert store.refs.list_names() == ["latest"]


@pytest.mark.parametrize("damage", ["truncated", "gone", "no manifest"])
def test_incomplete_snapshot_is_refused(store: Store, damage: str) -> None:
    first, second = publish_parts(store), publish_parts(store, words=50)
    tag(store, first, "latest")
    tag(store, second, "latest")
    if damage == "no manifest":
        store.files.delete_folder(f"snapshots/{first}.json")
    else:
        blob = store.snapshots.get(first).content.files[FILE]
        store.files.delete_folder(blob.path)
        if damage == "truncated":
            store.files.write(blob.path, b"short")
    for move_ref in (lambda: rollback(store, "latest"), lambda: tag(store, "latest@1", "kept")):
        with pytest.raises(RefusedError, match=f"was not moved: snapshot {first[:12]} .* is incomplete"):
            move_ref()
    assert store.refs.list_numbers("latest") == [1, 2]
    assert store.refs.list_names() == ["latest"]


def test_error_of_a_lost_race_names_the_winner(store: Store) -> None:
    first_move = tag(store, publish_empty(store, "A"), "latest")
    tag(store, publish_empty(store, "B"), "latest")
    with pytest.raises(RefConflictError, match=rf"to snapshot {publish_empty(store, 'B')[:12]} \(latest@2\) first"):
        _move(
            store, store.snapshots, "latest", publish_empty(store, "C"), first_move, ""
        )  # the ref moved after its read
    assert read_letters(store) == "AB"


def test_deleted_ref_can_be_created_again(store: Store) -> None:
    first = tag(store, publish_empty(store, "A"), "v1")
    assert untag(store, "v1", dry_run=True) == first
    assert untag(store, "v1").number == 2
    assert store.refs.find_current("v1") is None
    assert store.refs.list_names() == []
    assert store.snapshots.resolve("v1@1") == publish_empty(store, "A")
    for name, message in (("v1", r"no snapshot or ref 'v1' .*refs: none"), ("v1@2", "v1@2 in .* names no snapshot")):
        with pytest.raises(StoreError, match=message):
            store.snapshots.resolve(name)
    for delete_missing_ref in (lambda: untag(store, "v1"), lambda: untag(store, "v2")):
        with pytest.raises(StoreError, match=r"there is no ref 'v.' in .* to delete \(refs: none\)"):
            delete_missing_ref()
    with pytest.raises(StoreError, match="nothing to roll back"):
        rollback(store, "v1")
    second_move = tag(store, publish_empty(store, "B"), "v1")
    assert (second_move.number, second_move.previous) == (3, None)
    assert rollback(store, "v1").snapshot == publish_empty(store, "A")
    assert verify_version(store, publish_empty(store, "A")) == []


def test_deleted_ref_keeps_no_snapshot(store: Store) -> None:
    first, second = publish_parts(store), publish_parts(store, words=50)
    tag(store, first, "v1")
    tag(store, second, "latest")
    untag(store, "v1")
    assert expire_store(store, ExpirePolicy(keep=1, older_than=60.0)).moves == ()
    age_files(store, 61.0)
    report = expire_store(store, ExpirePolicy(keep=5, older_than=60.0))
    assert (report.moves, report.snapshots) == (("v1@1",), (first,))
    collect_garbage(store, 0.0)
    assert verify_version(store, second) == []
    assert tag(store, second, "v1").number == 3, "numbers are never used twice"
