"""`bookwheel expire` and `bookwheel gc`: delete old versions and unreferenced files, keep those of running builds."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from flows.command.reply import parse_age
from rag_model.errors import UsageError
from rag_model.store import Content, Manifest, Store
from rag_model.store.versions.moves import tag


@pytest.fixture
def store(library: Path, tmp_path: Path) -> Path:
    """A copy of the library, in which `latest` named an empty snapshot before."""
    copy = tmp_path / "store"
    shutil.copytree(library, copy)
    library_store = Store.open(str(copy))
    snapshot = library_store.snapshots.resolve("latest")
    blob = library_store.blobs.put_bytes(b"an old index")
    old_snapshot = library_store.snapshots.publish(Manifest(Content({}, (), {"index/old.faiss": blob})))
    tag(library_store, old_snapshot, "latest")
    tag(library_store, snapshot, "latest")
    return copy


def list_files(store: Path) -> set[Path]:
    return {path for path in store.rglob("*") if path.is_file()}


def test_expire_and_gc_delete_old_versions_and_their_files(store: Path, bookwheel: Any, reindex: Any) -> None:
    old_files = list_files(store)
    reply = bookwheel("expire", "--keep", 1, "--older-than", 0, "--store", store, "--json").json
    assert (reply["dry_run"], reply["moves"], len(reply["snapshots"])) == (True, ["latest@1", "latest@2"], 1)
    assert "nothing was changed" in bookwheel("expire", "--keep", 1, "--older-than", 0, "--store", store).out
    assert bookwheel("expire", "--store", store, "--json").json["moves"] == []
    assert list_files(store) == old_files
    result = bookwheel("expire", "--keep", 1, "--older-than", 0, "--store", store, "--yes", "--json").json
    assert result == {**reply, "dry_run": False}

    assert bookwheel("gc", "--store", store, "--json").json["files"] == 0
    reply = bookwheel("gc", "--grace", 0, "--store", store, "--json").json
    assert reply["kinds"]["blobs"]["files"] >= 1
    text = bookwheel("gc", "--grace", 0, "--store", store).out
    assert f"would delete {reply['files']:,} files" in text
    assert len(list_files(store)) == len(old_files) - 3
    result = bookwheel("gc", "--grace", 0, "--store", store, "--yes", "--json").json
    assert result == {**reply, "dry_run": False}
    assert bookwheel("gc", "--grace", 0, "--store", store, "--yes", "--json").json["files"] == 0

    assert bookwheel("verify", "--store", store).code == 0
    counts = reindex(store).json["counts"]
    assert (counts["embedded"], counts["reused"]) == (0, 247)
    assert [move["number"] for move in bookwheel("log", "--store", store, "--json").json] == [3]


def test_gc_keeps_files_of_a_killed_build_until_the_grace_period_ends(store: Path, bookwheel: Any) -> None:
    library_store = Store.open(str(store))
    library_store.runs.write_report("20261101T000000-dead", "chunk", 0, {})
    blob = library_store.blobs.put_bytes(b"passages of a killed build")
    library_store.memo.write_record("chunk", "k", {"passages": blob}, {})
    assert bookwheel("gc", "--store", store, "--yes", "--json").json["files"] == 0
    with Store.open(str(store)).intents.hold("killed"):
        text = bookwheel("gc", "--store", store, "--yes", "--grace", "0")
        assert "kept the files of 1 run (killed) and" in text.out
    kinds = bookwheel("gc", "--store", store, "--yes", "--grace", "0", "--json").json["kinds"]
    assert kinds["runs"]["files"] == 1
    assert library_store.memo.find("chunk", "k") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["expire", "--keep", "0"], "keep must be at least 1"),
        (["expire", "--older-than", "soon"], "'soon' is not a length of time"),
        (["gc", "--grace", "1.5h"], "is not a length of time"),
    ],
)
def test_invalid_age_or_count_is_rejected(store: Path, bookwheel: Any, arguments: list[str], message: str) -> None:
    result = bookwheel(*arguments, "--store", store)
    assert (result.code, message in result.complaint) == (2, True)


@pytest.mark.parametrize(("text", "seconds"), [("90d", 7776000.0), ("2w", 1209600.0), ("5", 5.0), ("24h", 86400.0)])
def test_age_is_parsed(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "-1d", "1.5h", "1 d", "9999999"])
def test_invalid_age_is_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="is not a length of time"):
        parse_age(text)
