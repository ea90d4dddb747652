"""Refs behave like a simple model, and invalid names and damaged moves are refused."""

import json
import secrets
from functools import partial
from pathlib import PurePosixPath

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.errors import NotFoundError, RefConflictError, StoreError, UsageError
from rag_model.store import Store
from rag_model.store.versions.refs import check_ref_name


@given(
    st.lists(st.tuples(st.sampled_from(["latest", "candidate"]), st.integers(0, 5), st.integers(-1, 3)), max_size=20)
)
def test_refs_behave_like_a_list(moves: list[tuple[str, int, int]]) -> None:
    """A target below 0 deletes the ref, which then expects 0 as its current number, and its numbers continue."""
    url = f"memory://{secrets.token_hex(4)}"
    refs = Store.open(url, create=True).refs
    model: dict[str, list[str]] = {"latest": [], "candidate": []}
    for name, expected, target in moves:
        snapshot = f"{target:064x}" if target >= 0 else ""
        current_number = len(model[name]) if model[name] and model[name][-1] else 0
        write = partial(refs.move, name, snapshot, expected) if snapshot else partial(refs.delete, name, expected)
        if expected == current_number and (snapshot or current_number):
            assert write().number == len(model[name]) + 1
            model[name].append(snapshot)
        else:
            with pytest.raises(RefConflictError):
                write()
    for name, snapshots in model.items():
        assert [move.snapshot for move in refs.read_history(name)] == snapshots
        assert [move.number for move in refs.read_history(name)] == list(range(1, len(snapshots) + 1))
        assert (refs.find_current(name) is not None) == (name in refs.list_names())
    assert refs.list_names(include_deleted=True) == sorted(name for name, snapshots in model.items() if snapshots)
    assert refs.list_names() == sorted(name for name, snapshots in model.items() if snapshots and snapshots[-1])
    fsspec.filesystem("memory").rm(url, recursive=True)


def test_earlier_versions_refuse_a_deleted_ref(memory_store: Store) -> None:
    memory_store.refs.move("v1", "0" * 64, 0)
    memory_store.refs.delete("v1", 1)
    move = json.loads(memory_store.files.read("refs/v1/00000002.json") or b"")
    assert (move["format"], move["snapshot"], move["previous"]) == (2, "", "0" * 64)
    memory_store.files.write("refs/v1/00000002.json", json.dumps({**move, "format": 1}).encode())
    with pytest.raises(StoreError, match="damaged: '' is not a snapshot id"):
        memory_store.refs.find_current("v1")


@given(st.text())
def test_name_is_a_plain_folder_name_or_refused(name: str) -> None:
    try:
        check_ref_name(name)
    except UsageError:
        return
    assert PurePosixPath(name).parts == (name,)
    assert not name.startswith(".")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".hidden", "a b", "a\n", "é", "@", "x" * 101])
def test_bad_names_are_refused(name: str, memory_store: Store) -> None:
    with pytest.raises(UsageError, match="not a ref name"):
        memory_store.refs.move(name, "0" * 64, 0)


def test_ref_moves_to_full_ids_only(memory_store: Store) -> None:
    with pytest.raises(UsageError, match="not a full snapshot id"):
        memory_store.refs.move("latest", "abcd", 0)


def test_ref_named_like_an_id_is_not_resolved_as_an_id(memory_store: Store) -> None:
    memory_store.refs.move("a" * 64, "b" * 64, 0)
    with pytest.raises(NotFoundError, match="no snapshot or ref"):
        memory_store.snapshots.resolve("a" * 64)


def test_number_of_a_move_is_checked(memory_store: Store) -> None:
    memory_store.refs.move("latest", "0" * 64, 0)
    memory_store.files.write("refs/latest/00000002.json", memory_store.files.read("refs/latest/00000001.json") or b"")
    with pytest.raises(StoreError, match="is numbered as move 1"):
        memory_store.refs.read_history("latest")
