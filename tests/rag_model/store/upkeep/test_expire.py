"""Moves and snapshots expire by number and age, but never the current move of a ref."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.errors import StoreError, UsageError
from rag_model.store import Store
from rag_model.store.objects.files import StoredFile
from rag_model.store.upkeep.expire import ExpirePolicy, _find_expired_numbers, expire_store
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.moves import rollback, tag
from tests.fixtures.store_files import age_files, publish_empty

DAY = 86400.0


def test_old_moves_expire_except_the_last_ones(store: Store) -> None:
    for letter in "ABCD":
        tag(store, publish_empty(store, letter), "latest")
        age_files(store, 10 * DAY)
    assert expire_store(store, ExpirePolicy(keep=3, older_than=0), dry_run=True).moves == ("latest@1",)
    assert expire_store(store, ExpirePolicy(keep=1, older_than=25 * DAY)).moves == ("latest@1",)  # 30 days old
    report = expire_store(store, ExpirePolicy(keep=2, older_than=0))
    assert (report.moves, report.snapshots) == (("latest@2",), (publish_empty(store, "B"),))
    assert store.refs.list_numbers("latest") == [3, 4]
    assert verify_version(store, publish_empty(store, "D")) == []


def test_damaged_move_expires_or_is_reported(store: Store) -> None:
    for letter in "ABC":
        tag(store, publish_empty(store, letter), "latest")
        age_files(store, DAY)
    for number in (1, 2):
        store.files.write(store.refs.move_path("latest", number), b"{")
    with pytest.raises(StoreError, match=store.refs.move_path("latest", 2)):
        expire_store(store, ExpirePolicy(keep=2, older_than=0))
    assert expire_store(store, ExpirePolicy(keep=1, older_than=0)).moves == ("latest@1", "latest@2")


def test_age_of_a_move_counts_from_the_next_move(store: Store) -> None:
    tag(store, publish_empty(store, "A"), "latest")
    age_files(store, 365 * DAY)
    tag(store, publish_empty(store, "B"), "latest")
    assert expire_store(store, ExpirePolicy(keep=1)).moves == ()
    age_files(store, 91 * DAY)
    assert expire_store(store, ExpirePolicy(keep=1)).moves == ("latest@1",)


def test_current_move_never_expires(store: Store) -> None:
    tag(store, publish_empty(store, "A"), "2026-11")
    age_files(store, 1000 * DAY)
    assert expire_store(store, ExpirePolicy(keep=1, older_than=0)).snapshots == ()
    assert store.snapshots.resolve("2026-11") == publish_empty(store, "A")


def test_snapshot_stays_while_a_move_names_it(store: Store) -> None:
    for letter in "ABA":
        tag(store, publish_empty(store, letter), "latest")
    tag(store, publish_empty(store, "B"), "good")
    report = expire_store(store, ExpirePolicy(keep=1, older_than=0))
    assert (report.moves, report.snapshots) == (("latest@1", "latest@2"), ())


def test_snapshot_without_ref_expires_by_age(store: Store) -> None:
    refused = publish_empty(store, "A")
    assert expire_store(store, ExpirePolicy()).snapshots == ()
    age_files(store, 91 * DAY)
    assert expire_store(store, ExpirePolicy()).snapshots == (refused,)


def test_age_limit_is_inclusive() -> None:
    moves = {number: StoredFile(f"refs/latest/{number:08d}.json", 1, 100.0 * number) for number in (1, 2, 3)}
    assert _find_expired_numbers(moves, 199.9, 1) == set()
    assert _find_expired_numbers(moves, 200.0, 1) == {1}


@given(st.lists(st.integers(0, 5), max_size=8), st.integers(1, 9), st.integers(-1, 6))
def test_expired_moves_are_the_first_of_the_log(times: list[int], keep: int, bound: int) -> None:
    """This holds for any file times, since copying a store changes them."""
    moves = {number: StoredFile("", 1, float(moment)) for number, moment in enumerate(times, start=3)}
    expired_numbers = _find_expired_numbers(moves, bound, keep)
    assert sorted(expired_numbers) == sorted(moves)[: len(expired_numbers)]
    assert len(moves) - len(expired_numbers) >= min(keep, len(moves))
    assert all(times[number - 2] <= bound for number in expired_numbers)


def test_rollback_does_not_reach_expired_moves(store: Store) -> None:
    for letter in "ABC":
        tag(store, publish_empty(store, letter), "latest")
    expire_store(store, ExpirePolicy(keep=2, older_than=0))
    assert rollback(store, "latest").snapshot == publish_empty(store, "B")
    with pytest.raises(UsageError, match="named no other snapshot before"):
        rollback(store, "latest")
    with pytest.raises(StoreError, match="ref latest has no move 1"):
        rollback(store, "latest", 1)
    expire_store(store, ExpirePolicy(keep=1, older_than=0))
    with pytest.raises(UsageError, match="named no other snapshot before"):
        rollback(store, "latest")
    assert tag(store, publish_empty(store, "D"), "latest").number == 5


@pytest.mark.parametrize("settings", [{"keep": 0}, {"older_than": -1.0}])
def test_invalid_policy_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=r"at least 1|0 or more"):
        ExpirePolicy(**settings)  # type: ignore[arg-type]
