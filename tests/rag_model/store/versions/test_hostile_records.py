"""Records that nobody should write: one clear sentence for each, and nothing half done."""

import json
from typing import Any

import pytest

from rag_model.errors import StoreError, UsageError
from rag_model.store import Content, Manifest, Store

ONE, OTHER = "1" * 64, "2" * 64
DEEP = b"[" * 100_000


def _put(store: Store, path: str, value: Any) -> None:
    store.files.write(path, value if isinstance(value, bytes) else json.dumps(value).encode())


def _takedown(**changed: Any) -> dict[str, Any]:
    texts = dict.fromkeys(("wiki", "reason", "by", "created_at", "nonce"), "x")
    return {"format": 1, "number": 1, "pages": ["624"], **texts, **changed}


def _move(**changed: Any) -> dict[str, Any]:
    move = {"format": 1, "number": 1, "snapshot": ONE, "created_at": "", "previous": None, "nonce": "", "note": ""}
    return {**move, **changed}


@pytest.mark.parametrize("damage", [DEEP, b'{"a": ' * 500, b'{"note": "\\ud800"}', b'{"number": NaN}'])
def test_json_that_cannot_be_kept_is_damage(memory_store: Store, damage: bytes) -> None:
    for path, read in (
        ("refs/latest/00000001.json", lambda: memory_store.refs.find_current("latest")),
        ("takedowns/00000001.json", memory_store.takedowns.list_records),
        (f"takedowns/{ONE}.json", lambda: memory_store.takedowns.find_replacement(ONE)),
        (f"snapshots/{ONE}.json", lambda: memory_store.snapshots.get(ONE)),
        (f"models/{ONE}.json", lambda: memory_store.models.get(ONE)),
        ("store.json", lambda: Store.open(memory_store.url)),
    ):
        _put(memory_store, path, damage)
        with pytest.raises(StoreError, match="damaged"):
            read()
    _put(memory_store, f"memo/embed/{ONE}.json", damage)
    assert memory_store.memo.find("embed", ONE) is None
    assert list(memory_store.memo.iter_inputs("embed")) == []


@pytest.mark.parametrize("value", [b"NaN", b"-Infinity", b"1e999", b'"\\udc00"', b"[" * 90 + b"]" * 90])
def test_a_manifest_that_could_not_be_written_is_refused(value: bytes) -> None:
    written = json.dumps(Manifest(Content({}, (), {}), {"recall": "HERE"}).to_json()).encode()
    assert Manifest.from_bytes(written).metrics == {"recall": "HERE"}
    with pytest.raises(StoreError, match="damaged"):
        Manifest.from_bytes(written.replace(b'"HERE"', value))


def test_takedowns_in_a_circle_are_damage(memory_store: Store) -> None:
    _put(memory_store, f"takedowns/{ONE}.json", {"format": 1, "snapshot": ONE, "by": ONE, "nonce": ""})
    with pytest.raises(StoreError, match=f"{ONE}\\.json is damaged"):
        memory_store.takedowns.find_replacement(ONE)
    for at, by in ((ONE, OTHER), (OTHER, ONE)):
        _put(memory_store, f"takedowns/{at}.json", {"format": 1, "snapshot": at, "by": by, "nonce": ""})
    for at in (ONE, OTHER):
        with pytest.raises(StoreError, match="is damaged"):
            memory_store.takedowns.find_replacement(at)


@pytest.mark.parametrize("by", ["../x", "2", None, 5, ["2" * 64]])
def test_what_takes_a_snapshots_place_is_an_id(memory_store: Store, by: Any) -> None:
    _put(memory_store, f"takedowns/{ONE}.json", {"format": 1, "snapshot": ONE, "by": by, "nonce": ""})
    with pytest.raises(StoreError, match="is damaged"):
        memory_store.takedowns.find_replacement(ONE)


def test_a_takedowns_pages_are_a_list_of_ids(memory_store: Store) -> None:
    _put(memory_store, "takedowns/00000001.json", _takedown())
    assert memory_store.takedowns.list_pages("x") == {"624"}
    for wrong in ({"pages": "624"}, {"pages": [624]}, {"pages": None}, {"number": 2}, {"number": "1"}, {"wiki": 5}):
        _put(memory_store, "takedowns/00000001.json", _takedown(**wrong))
        with pytest.raises(StoreError, match=r"00000001\.json is damaged"):
            memory_store.takedowns.list_records()


def test_a_full_log_takes_no_move(memory_store: Store) -> None:
    _put(memory_store, "refs/latest/99999999.json", _move(number=99999999))
    with pytest.raises(StoreError, match="the last possible number"):
        memory_store.refs.move("latest", OTHER, 99999999)
    assert memory_store.refs.find_current("latest").snapshot == ONE  # type: ignore[union-attr]
    _put(memory_store, "takedowns/99999999.json", _takedown(number=99999999))
    with pytest.raises(StoreError, match="the last takedown"):
        memory_store.takedowns.add("enwiki", ["1"], "a request", "me")


@pytest.mark.parametrize("wrong", [{"note": 5}, {"nonce": None}, {"created_at": []}, {"number": True}, {"number": 1.0}])
def test_a_move_of_other_types_is_damage(memory_store: Store, wrong: dict[str, Any]) -> None:
    _put(memory_store, "refs/latest/00000001.json", _move(**wrong))
    with pytest.raises(StoreError, match="damaged"):
        memory_store.refs.find_current("latest")


@pytest.mark.parametrize("text", ["\x1b[2J", "half \ud800", "\u202eback"])
def test_control_characters_are_not_kept(memory_store: Store, text: str) -> None:
    with pytest.raises(UsageError, match="control character"):
        memory_store.refs.move("latest", ONE, 0, text)
    with pytest.raises(UsageError, match="control character"):
        memory_store.takedowns.add("enwiki", ["1"], text, "me")
    with pytest.raises(UsageError, match="lone surrogate"):
        memory_store.takedowns.add("enwiki", ["\ud800"], "a request", "me")
    assert memory_store.takedowns.list_records() == memory_store.refs.list_names() == []
