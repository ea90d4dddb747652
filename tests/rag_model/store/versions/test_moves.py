"""Refs moved by hand: where `rollback` goes, and what both refuse."""

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
def named(memory_store: Store) -> Callable[[str], str]:
    """Publish an empty snapshot for a letter and return its id."""
    return lambda letter: memory_store.snapshots.publish(Manifest(Content({"letter": letter}, (), {})))


def letters(store: Store) -> str:
    """The letters of the snapshots that `latest` has named, oldest first."""
    return "".join(
        store.snapshots.get(move.snapshot).content.corpus["letter"] for move in store.refs.read_history("latest")
    )


@pytest.mark.parametrize(
    ("moves", "rollbacks", "history"),
    [
        ("AB", 1, "ABA"),
        ("ABC", 2, "ABCBA"),  # not forth to C again
        ("ABA", 1, "ABAB"),  # a tag back to A is a move like any other
        ("ABBC", 2, "ABBCBA"),
        ("ABA", 2, "ABABA"),
    ],
)
def test_rollback_goes_ever_further_back(
    memory_store: Store, named: Callable[[str], str], moves: str, rollbacks: int, history: str
) -> None:
    for number, letter in enumerate(moves):
        memory_store.refs.move("latest", named(letter), number)
    for _ in range(rollbacks):
        rollback(memory_store, "latest")
    assert letters(memory_store) == history


def test_what_was_rolled_back_is_not_gone_back_to(memory_store: Store, named: Callable[[str], str]) -> None:
    for letter in "AB":
        tag(memory_store, named(letter), "latest")
    rollback(memory_store, "latest")
    tag(memory_store, named("C"), "latest")
    rollback(memory_store, "latest")
    assert letters(memory_store) == "ABACA"
    with pytest.raises(UsageError, match=r"named no other snapshot before .*--to NUMBER"):
        rollback(memory_store, "latest")
    assert rollback(memory_store, "latest", 2).note == "rollback to @2"
    assert letters(memory_store) == "ABACAB"


@given(st.text("ABC", min_size=1, max_size=6), st.integers(1, 8))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_rollbacks_end_and_never_repeat_themselves(
    memory_store: Store, named: Callable[[str], str], moves: str, extra: int
) -> None:
    memory_store.files.delete_folder("refs")
    for number, letter in enumerate(moves):
        memory_store.refs.move("latest", named(letter), number, note=f"rollback to @{extra}" if number == extra else "")
    notes = []
    with pytest.raises(UsageError):  # noqa: PT012 - the last of them
        while True:
            notes.append(int(rollback(memory_store, "latest").note.removeprefix("rollback to @")))
    assert notes == sorted(set(notes), reverse=True)
    assert letters(memory_store)[: len(moves)] == moves


def test_a_tag_that_stands_already_adds_nothing(memory_store: Store, named: Callable[[str], str]) -> None:
    first = tag(memory_store, named("A"), "latest", "first")
    assert tag(memory_store, "latest", "latest", "again") == first
    copied = tag(memory_store, "latest@1", "2026-11", "kept")
    assert (copied.snapshot, copied.number, copied.previous, copied.note) == (first.snapshot, 1, None, "kept")
    assert memory_store.refs.list_numbers("latest") == [1]


@pytest.mark.parametrize("number", [-1, 0, 2, 10**9])
def test_a_number_that_is_not_there_is_refused(memory_store: Store, named: Callable[[str], str], number: int) -> None:
    tag(memory_store, named("A"), "latest")
    with pytest.raises(StoreError, match=f"ref latest has no move {number}"):
        rollback(memory_store, "latest", number)
    with pytest.raises(UsageError, match=r"already names .*, which latest@1 named"):
        rollback(memory_store, "latest", 1)
    with pytest.raises(StoreError, match="ref other has no history"):
        rollback(memory_store, "other", 1)
    assert memory_store.refs.list_numbers("latest") == [1]


@pytest.mark.parametrize(("snapshot", "ref"), [("0000", "latest"), ("latest", "no/name"), ("latest", "latest@1")])
def test_what_is_no_snapshot_or_no_name_is_refused(
    memory_store: Store, named: Callable[[str], str], snapshot: str, ref: str
) -> None:
    tag(memory_store, named("A"), "latest")
    with pytest.raises((StoreError, UsageError), match=r"no snapshot or ref '0000'|is not a ref name"):
        tag(memory_store, snapshot, ref)
    assert memory_store.refs.list_names() == ["latest"]


@pytest.mark.parametrize("damage", ["truncated", "gone", "no manifest"])
def test_no_ref_moves_to_a_broken_snapshot(local_store: Store, publish: Callable[..., str], damage: str) -> None:
    old, new = publish(local_store), publish(local_store, words=50)
    tag(local_store, old, "latest")
    tag(local_store, new, "latest")
    if damage == "no manifest":
        local_store.files.delete_folder(f"snapshots/{old}.json")
    else:
        blob = local_store.snapshots.get(old).content.files[FILE]
        local_store.files.delete_folder(blob.path)
        if damage == "truncated":
            local_store.files.write(blob.path, b"short")
    attempts: list[Callable[[], Any]] = [lambda: rollback(local_store, "latest")]
    attempts.append(lambda: tag(local_store, "latest@1", "kept"))
    for attempt in attempts:
        with pytest.raises(RefusedError, match=f"was not moved: snapshot {old[:12]} .* is incomplete"):
            attempt()
    assert local_store.refs.list_numbers("latest") == [1, 2]
    assert local_store.refs.list_names() == ["latest"]


def test_who_loses_the_race_learns_who_won(memory_store: Store, named: Callable[[str], str]) -> None:
    seen = tag(memory_store, named("A"), "latest")
    tag(memory_store, named("B"), "latest")
    with pytest.raises(RefConflictError, match=rf"to snapshot {named('B')[:12]} \(latest@2\) first"):
        _move(
            memory_store, memory_store.snapshots, "latest", named("C"), seen, ""
        )  # another writer came while its files were looked at
    assert letters(memory_store) == "AB"


def test_a_name_is_taken_away_and_given_again(memory_store: Store, named: Callable[[str], str]) -> None:
    first = tag(memory_store, named("A"), "v1")
    assert untag(memory_store, "v1", dry_run=True) == first
    assert untag(memory_store, "v1").number == 2
    assert memory_store.refs.find_current("v1") is None
    assert memory_store.refs.list_names() == []
    assert memory_store.snapshots.resolve("v1@1") == named("A")
    for name, why in (("v1", r"no snapshot or ref 'v1' .*refs: none"), ("v1@2", "v1@2 in .* names no snapshot")):
        with pytest.raises(StoreError, match=why):
            memory_store.snapshots.resolve(name)
    for gone in (lambda: untag(memory_store, "v1"), lambda: untag(memory_store, "v2")):
        with pytest.raises(StoreError, match=r"there is no ref 'v.' in .* to delete \(refs: none\)"):
            gone()
    with pytest.raises(StoreError, match="nothing to roll back"):
        rollback(memory_store, "v1")
    again = tag(memory_store, named("B"), "v1")
    assert (again.number, again.previous) == (3, None)
    assert rollback(memory_store, "v1").snapshot == named("A")
    assert verify_version(memory_store, named("A")) == []


def test_a_deleted_ref_keeps_nothing(
    local_store: Store, publish: Callable[..., str], later: Callable[..., None]
) -> None:
    old, new = publish(local_store), publish(local_store, words=50)
    tag(local_store, old, "v1")
    tag(local_store, new, "latest")
    untag(local_store, "v1")
    assert expire_store(local_store, ExpirePolicy(keep=1, older_than=60.0)).moves == ()
    later(local_store, 61.0)
    found = expire_store(local_store, ExpirePolicy(keep=5, older_than=60.0))
    assert (found.moves, found.snapshots) == (("v1@1",), (old,))
    collect_garbage(local_store, 0.0)
    assert verify_version(local_store, new) == []
    assert tag(local_store, new, "v1").number == 3, "a number never comes twice"
