"""`tag`, `rollback` and `untag` move refs, and refuse incomplete snapshots and invalid names."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.errors import RefConflictError, RefusedError, StoreError, UsageError
from rag_model.store import Content, Manifest, Store
from rag_model.store.upkeep.expire import ExpirePolicy, expire_store
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.moves import _move, rollback, tag, untag

FILE = "embeddings/part-00000.npy"


@pytest.fixture
def publish_letter(memory_store: Store) -> Callable[[str], str]:
    """Publish an empty snapshot for a letter and return its id."""
    return lambda letter: memory_store.snapshots.publish(Manifest(Content({"letter": letter}, (), {})))


def read_letters(store: Store) -> str:
    """Return the letters of the snapshots in the history of `latest`, oldest first."""
    return "".join(
        store.snapshots.get(move.snapshot).content.corpus["letter"] for move in store.refs.read_history("latest")
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
def test_repeated_rollbacks_reach_earlier_snapshots(
    memory_store: Store, publish_letter: Callable[[str], str], moves: str, rollbacks: int, history: str
) -> None:
    for number, letter in enumerate(moves):
        memory_store.refs.move("latest", publish_letter(letter), number)
    for _ in range(rollbacks):
        rollback(memory_store, "latest")
    assert read_letters(memory_store) == history


def test_rollback_skips_snapshots_rolled_back_before(memory_store: Store, publish_letter: Callable[[str], str]) -> None:
    for letter in "AB":
        tag(memory_store, publish_letter(letter), "latest")
    rollback(memory_store, "latest")
    tag(memory_store, publish_letter("C"), "latest")
    rollback(memory_store, "latest")
    assert read_letters(memory_store) == "ABACA"
    with pytest.raises(UsageError, match=r"named no other snapshot before .*--to NUMBER"):
        rollback(memory_store, "latest")
    assert rollback(memory_store, "latest", 2).note == "rollback to @2"
    assert read_letters(memory_store) == "ABACAB"


@given(st.text("ABC", min_size=1, max_size=6), st.integers(1, 8))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_rollbacks_end_and_never_repeat(
    memory_store: Store, publish_letter: Callable[[str], str], moves: str, extra: int
) -> None:
    memory_store.files.delete_folder("refs")
    for number, letter in enumerate(moves):
        note = f"rollback to @{extra}" if number == extra else ""
        memory_store.refs.move("latest", publish_letter(letter), number, note=note)
    notes = []
    with pytest.raises(UsageError):  # noqa: PT012 - the last rollback fails
        while True:
            notes.append(int(rollback(memory_store, "latest").note.removeprefix("rollback to @")))
    assert notes == sorted(set(notes), reverse=True)
    assert read_letters(memory_store)[: len(moves)] == moves


def test_repeated_tag_adds_no_move(memory_store: Store, publish_letter: Callable[[str], str]) -> None:
    first = tag(memory_store, publish_letter("A"), "latest", "first")
    assert tag(memory_store, "latest", "latest", "again") == first
    copied = tag(memory_store, "latest@1", "2026-11", "kept")
    assert (copied.snapshot, copied.number, copied.previous, copied.note) == (first.snapshot, 1, None, "kept")
    assert memory_store.refs.list_numbers("latest") == [1]


@pytest.mark.parametrize("number", [-1, 0, 2, 10**9])
def test_missing_number_is_refused(memory_store: Store, publish_letter: Callable[[str], str], number: int) -> None:
    tag(memory_store, publish_letter("A"), "latest")
    with pytest.raises(StoreError, match=f"ref latest has no move {number}"):
        rollback(memory_store, "latest", number)
    with pytest.raises(UsageError, match=r"already names .*, which latest@1 named"):
        rollback(memory_store, "latest", 1)
    with pytest.raises(StoreError, match="ref other has no history"):
        rollback(memory_store, "other", 1)
    assert memory_store.refs.list_numbers("latest") == [1]


@pytest.mark.parametrize(("snapshot", "ref"), [("0000", "latest"), ("latest", "no/name"), ("latest", "latest@1")])
def test_invalid_snapshot_or_ref_name_is_refused(
    memory_store: Store, publish_letter: Callable[[str], str], snapshot: str, ref: str
) -> None:
    tag(memory_store, publish_letter("A"), "latest")
    with pytest.raises((StoreError, UsageError), match=r"no snapshot or ref '0000'|is not a ref name"):
        tag(memory_store, snapshot, ref)
    assert memory_store.refs.list_names() == ["latest"]


@pytest.mark.parametrize("damage", ["truncated", "gone", "no manifest"])
def test_incomplete_snapshot_is_refused(local_store: Store, publish: Callable[..., str], damage: str) -> None:
    first, second = publish(local_store), publish(local_store, words=50)
    tag(local_store, first, "latest")
    tag(local_store, second, "latest")
    if damage == "no manifest":
        local_store.files.delete_folder(f"snapshots/{first}.json")
    else:
        blob = local_store.snapshots.get(first).content.files[FILE]
        local_store.files.delete_folder(blob.path)
        if damage == "truncated":
            local_store.files.write(blob.path, b"short")
    attempts: list[Callable[[], Any]] = [lambda: rollback(local_store, "latest")]
    attempts.append(lambda: tag(local_store, "latest@1", "kept"))
    for attempt in attempts:
        with pytest.raises(RefusedError, match=f"was not moved: snapshot {first[:12]} .* is incomplete"):
            attempt()
    assert local_store.refs.list_numbers("latest") == [1, 2]
    assert local_store.refs.list_names() == ["latest"]


def test_error_of_a_lost_race_names_the_winner(memory_store: Store, publish_letter: Callable[[str], str]) -> None:
    first_move = tag(memory_store, publish_letter("A"), "latest")
    tag(memory_store, publish_letter("B"), "latest")
    with pytest.raises(RefConflictError, match=rf"to snapshot {publish_letter('B')[:12]} \(latest@2\) first"):
        _move(
            memory_store, memory_store.snapshots, "latest", publish_letter("C"), first_move, ""
        )  # another writer moved the ref after it was read
    assert read_letters(memory_store) == "AB"


def test_deleted_ref_can_be_created_again(memory_store: Store, publish_letter: Callable[[str], str]) -> None:
    first = tag(memory_store, publish_letter("A"), "v1")
    assert untag(memory_store, "v1", dry_run=True) == first
    assert untag(memory_store, "v1").number == 2
    assert memory_store.refs.find_current("v1") is None
    assert memory_store.refs.list_names() == []
    assert memory_store.snapshots.resolve("v1@1") == publish_letter("A")
    for name, message in (("v1", r"no snapshot or ref 'v1' .*refs: none"), ("v1@2", "v1@2 in .* names no snapshot")):
        with pytest.raises(StoreError, match=message):
            memory_store.snapshots.resolve(name)
    for delete_missing_ref in (lambda: untag(memory_store, "v1"), lambda: untag(memory_store, "v2")):
        with pytest.raises(StoreError, match=r"there is no ref 'v.' in .* to delete \(refs: none\)"):
            delete_missing_ref()
    with pytest.raises(StoreError, match="nothing to roll back"):
        rollback(memory_store, "v1")
    second_move = tag(memory_store, publish_letter("B"), "v1")
    assert (second_move.number, second_move.previous) == (3, None)
    assert rollback(memory_store, "v1").snapshot == publish_letter("A")
    assert verify_version(memory_store, publish_letter("A")) == []


def test_deleted_ref_keeps_no_snapshot(
    local_store: Store, publish: Callable[..., str], age_store: Callable[..., None]
) -> None:
    first, second = publish(local_store), publish(local_store, words=50)
    tag(local_store, first, "v1")
    tag(local_store, second, "latest")
    untag(local_store, "v1")
    assert expire_store(local_store, ExpirePolicy(keep=1, older_than=60.0)).moves == ()
    age_store(local_store, 61.0)
    report = expire_store(local_store, ExpirePolicy(keep=5, older_than=60.0))
    assert (report.moves, report.snapshots) == (("v1@1",), (first,))
    collect_garbage(local_store, 0.0)
    assert verify_version(local_store, second) == []
    assert tag(local_store, second, "v1").number == 3, "numbers are never used twice"
