"""Which moves and snapshots are forgotten: by number, by age, and never what a ref names now."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.errors import StoreError, UsageError
from rag_model.store import Content, Manifest, Store
from rag_model.store.objects.files import StoredFile
from rag_model.store.upkeep.expire import ExpirePolicy, _ExpirePlanner, expire_store
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.moves import rollback, tag

DAY = 86400.0


@pytest.fixture
def store(local_store: Store) -> Store:
    return local_store


@pytest.fixture
def named(store: Store) -> Callable[[str], str]:
    """Publish an empty snapshot for a letter and return its id."""
    return lambda letter: store.snapshots.publish(Manifest(Content({"letter": letter}, (), {})))


def test_moves_go_when_they_are_neither_new_nor_among_the_last(
    store: Store, named: Callable[[str], str], later: Callable[..., None]
) -> None:
    for letter in "ABCD":
        tag(store, named(letter), "latest")
        later(store, 10 * DAY)
    assert expire_store(store, ExpirePolicy(keep=3, older_than=0), dry_run=True).moves == ("latest@1",)
    assert expire_store(store, ExpirePolicy(keep=1, older_than=25 * DAY)).moves == (
        "latest@1",
    )  # passed on 30 days ago
    found = expire_store(store, ExpirePolicy(keep=2, older_than=0))
    assert (found.moves, found.snapshots) == (("latest@2",), (named("B"),))
    assert store.refs.list_numbers("latest") == [3, 4]
    assert verify_version(store, named("D")) == []


def test_a_damaged_move_goes_as_others_and_one_that_stays_is_told(
    store: Store, named: Callable[[str], str], later: Callable[..., None]
) -> None:
    for letter in "ABC":
        tag(store, named(letter), "latest")
        later(store, DAY)
    for number in (1, 2):
        store.files.write(store.refs.move_path("latest", number), b"{")
    with pytest.raises(StoreError, match=store.refs.move_path("latest", 2)):
        expire_store(store, ExpirePolicy(keep=2, older_than=0))
    assert expire_store(store, ExpirePolicy(keep=1, older_than=0)).moves == ("latest@1", "latest@2")


def test_the_age_of_a_move_counts_from_when_the_ref_moved_on(
    store: Store, named: Callable[[str], str], later: Callable[..., None]
) -> None:
    tag(store, named("A"), "latest")
    later(store, 365 * DAY)
    tag(store, named("B"), "latest")
    assert expire_store(store, ExpirePolicy(keep=1)).moves == ()
    later(store, 91 * DAY)
    assert expire_store(store, ExpirePolicy(keep=1)).moves == ("latest@1",)


def test_what_a_ref_names_now_stays_for_ever(
    store: Store, named: Callable[[str], str], later: Callable[..., None]
) -> None:
    tag(store, named("A"), "2026-11")
    later(store, 1000 * DAY)
    assert expire_store(store, ExpirePolicy(keep=1, older_than=0)).snapshots == ()
    assert store.snapshots.resolve("2026-11") == named("A")


def test_a_snapshot_stays_as_long_as_any_move_names_it(
    store: Store, named: Callable[[str], str], later: Callable[..., None]
) -> None:
    for letter in "ABA":
        tag(store, named(letter), "latest")
    tag(store, named("B"), "good")
    found = expire_store(store, ExpirePolicy(keep=1, older_than=0))
    assert (found.moves, found.snapshots) == (("latest@1", "latest@2"), ())


def test_a_snapshot_that_no_ref_ever_named_goes_when_it_is_old(
    store: Store, named: Callable[[str], str], later: Callable[..., None]
) -> None:
    refused = named("A")
    assert expire_store(store, ExpirePolicy()).snapshots == ()
    later(store, 91 * DAY)
    assert expire_store(store, ExpirePolicy()).snapshots == (refused,)


def test_the_bound_is_inclusive() -> None:
    moves = {number: StoredFile(f"refs/latest/{number:08d}.json", 1, 100.0 * number) for number in (1, 2, 3)}
    assert _ExpirePlanner._find_expired_numbers(moves, 199.9, 1) == set()
    assert _ExpirePlanner._find_expired_numbers(moves, 200.0, 1) == {1}


@given(st.lists(st.integers(0, 5), max_size=8), st.integers(1, 9), st.integers(-1, 6))
def test_what_is_forgotten_is_the_beginning_of_the_log(times: list[int], keep: int, bound: int) -> None:
    """Whatever the times of files that were copied here and there."""
    moves = {number: StoredFile("", 1, float(moment)) for number, moment in enumerate(times, start=3)}
    gone = _ExpirePlanner._find_expired_numbers(moves, bound, keep)
    assert sorted(gone) == sorted(moves)[: len(gone)]
    assert len(moves) - len(gone) >= min(keep, len(moves))
    assert all(times[number - 2] <= bound for number in gone)


def test_a_rollback_ends_where_the_log_begins(store: Store, named: Callable[[str], str]) -> None:
    for letter in "ABC":
        tag(store, named(letter), "latest")
    expire_store(store, ExpirePolicy(keep=2, older_than=0))
    assert rollback(store, "latest").snapshot == named("B")
    with pytest.raises(UsageError, match="named no other snapshot before"):
        rollback(store, "latest")
    with pytest.raises(StoreError, match="ref latest has no move 1"):
        rollback(store, "latest", 1)
    expire_store(store, ExpirePolicy(keep=1, older_than=0))
    with pytest.raises(UsageError, match="named no other snapshot before"):
        rollback(store, "latest")
    assert tag(store, named("D"), "latest").number == 5


@pytest.mark.parametrize("wrong", [{"keep": 0}, {"older_than": -1.0}])
def test_what_cannot_be_a_policy_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=r"at least 1|0 or more"):
        ExpirePolicy(**wrong)  # type: ignore[arg-type]
