"""Hostile and damaged records are refused with a clear error."""

import json
from typing import Any

import pytest

from rag_model.errors import StoreError, UsageError
from rag_model.store import Content, Manifest, Store

SNAPSHOT, OTHER_SNAPSHOT = "1" * 64, "2" * 64
DEEP_JSON = b"[" * 100_000


def _write_json(store: Store, path: str, value: Any) -> None:
    store.files.write(path, value if isinstance(value, bytes) else json.dumps(value).encode())


def _write_replacement(store: Store, snapshot: str, by: Any) -> None:
    _write_json(store, f"takedowns/{snapshot}.json", {"format": 1, "snapshot": snapshot, "by": by, "nonce": ""})


def _takedown(**changed: Any) -> dict[str, Any]:
    texts = dict.fromkeys(("wiki", "reason", "by", "created_at", "nonce"), "x")
    return {"format": 1, "number": 1, "pages": ["624"], **texts, **changed}


def _move(**changed: Any) -> dict[str, Any]:
    move = {"format": 1, "number": 1, "snapshot": SNAPSHOT, "created_at": "", "previous": None, "nonce": "", "note": ""}
    return {**move, **changed}


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b"\xff", DEEP_JSON, b'{"a": ' * 500, b'{"note": "\\ud800"}', b'{"number": NaN}'],
)
def test_invalid_json_is_reported_as_damage(memory_store: Store, damage: bytes) -> None:
    for path, read in (
        ("refs/latest/00000001.json", lambda: memory_store.refs.find_current("latest")),
        ("takedowns/00000001.json", memory_store.takedowns.list_records),
        (f"takedowns/{SNAPSHOT}.json", lambda: memory_store.takedowns.find_replacement(SNAPSHOT)),
        (f"snapshots/{SNAPSHOT}.json", lambda: memory_store.snapshots.get(SNAPSHOT)),
        (f"models/{SNAPSHOT}.json", lambda: memory_store.models.get(SNAPSHOT)),
        ("store.json", lambda: Store.open(memory_store.url)),
    ):
        _write_json(memory_store, path, damage)
        with pytest.raises(StoreError, match=rf"{path} (is damaged|cannot be used)"):
            read()
    _write_json(memory_store, f"memo/embed/{SNAPSHOT}.json", damage)
    assert memory_store.memo.find("embed", SNAPSHOT) is None
    assert list(memory_store.memo.iter_inputs("embed")) == []


@pytest.mark.parametrize("value", [b"NaN", b"-Infinity", b"1e999", b'"\\udc00"', b"[" * 90 + b"]" * 90])
def test_manifest_with_invalid_values_is_refused(value: bytes) -> None:
    data = json.dumps(Manifest(Content({}, (), {}), {"recall": "HERE"}).to_json()).encode()
    assert Manifest.from_bytes(data).metrics == {"recall": "HERE"}
    with pytest.raises(StoreError, match="damaged"):
        Manifest.from_bytes(data.replace(b'"HERE"', value))


def test_circular_takedowns_are_damage(memory_store: Store) -> None:
    _write_replacement(memory_store, SNAPSHOT, SNAPSHOT)
    with pytest.raises(StoreError, match=f"{SNAPSHOT}\\.json is damaged"):
        memory_store.takedowns.find_replacement(SNAPSHOT)
    for replaced, by in ((SNAPSHOT, OTHER_SNAPSHOT), (OTHER_SNAPSHOT, SNAPSHOT)):
        _write_replacement(memory_store, replaced, by)
    for replaced in (SNAPSHOT, OTHER_SNAPSHOT):
        with pytest.raises(StoreError, match="is damaged"):
            memory_store.takedowns.find_replacement(replaced)


@pytest.mark.parametrize("by", ["../x", "2", None, 5, ["2" * 64]])
def test_replacement_of_a_snapshot_must_be_an_id(memory_store: Store, by: Any) -> None:
    _write_replacement(memory_store, SNAPSHOT, by)
    with pytest.raises(StoreError, match="is damaged"):
        memory_store.takedowns.find_replacement(SNAPSHOT)


def test_pages_of_a_takedown_must_be_a_list_of_ids(memory_store: Store) -> None:
    _write_json(memory_store, "takedowns/00000001.json", _takedown())
    assert memory_store.takedowns.list_pages("x") == {"624"}
    for changes in ({"pages": "624"}, {"pages": [624]}, {"pages": None}, {"number": 2}, {"number": "1"}, {"wiki": 5}):
        _write_json(memory_store, "takedowns/00000001.json", _takedown(**changes))
        with pytest.raises(StoreError, match=r"00000001\.json is damaged"):
            memory_store.takedowns.list_records()


def test_full_log_accepts_no_move(memory_store: Store) -> None:
    _write_json(memory_store, "refs/latest/99999999.json", _move(number=99999999))
    with pytest.raises(StoreError, match="the last possible number"):
        memory_store.refs.move("latest", OTHER_SNAPSHOT, 99999999)
    assert memory_store.refs.find_current("latest").snapshot == SNAPSHOT  # type: ignore[union-attr]
    _write_json(memory_store, "takedowns/99999999.json", _takedown(number=99999999))
    with pytest.raises(StoreError, match="the last takedown"):
        memory_store.takedowns.add("enwiki", ["1"], "a request", "me")


@pytest.mark.parametrize(
    "move",
    [
        {},
        {"format": 1, "number": 2},
        _move(note=5),
        _move(nonce=None),
        _move(created_at=[]),
        _move(number=True),
        _move(number=1.0),
        _move(snapshot=1),
    ],
)
def test_move_with_missing_or_wrong_fields_is_damage(memory_store: Store, move: dict[str, Any]) -> None:
    _write_json(memory_store, "refs/latest/00000001.json", move)
    with pytest.raises(StoreError, match=r"refs/latest/00000001\.json .*damaged"):
        memory_store.refs.find_current("latest")


@pytest.mark.parametrize("text", ["\x1b[2J", "half \ud800", "\u202eback"])
def test_control_characters_are_refused(memory_store: Store, text: str) -> None:
    with pytest.raises(UsageError, match="control character"):
        memory_store.refs.move("latest", SNAPSHOT, 0, text)
    with pytest.raises(UsageError, match="control character"):
        memory_store.takedowns.add("enwiki", ["1"], text, "me")
    with pytest.raises(UsageError, match="lone surrogate"):
        memory_store.takedowns.add("enwiki", ["\ud800"], "a request", "me")
    assert memory_store.takedowns.list_records() == memory_store.refs.list_names() == []
