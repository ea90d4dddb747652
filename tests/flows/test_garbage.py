"""Old versions forgotten, and what nothing needs deleted, by the command line; and a build beside it."""

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
    """A copy of the library, where `latest` named an empty snapshot before."""
    copy = tmp_path / "store"
    shutil.copytree(library, copy)
    opened = Store.open(str(copy))
    built = opened.snapshots.resolve("latest")
    old = opened.snapshots.publish(Manifest(Content({}, (), {"index/old.faiss": opened.blobs.put_bytes(b"of old")})))
    tag(opened, old, "latest")
    tag(opened, built, "latest")
    return copy


def files(store: Path) -> set[Path]:
    return {path for path in store.rglob("*") if path.is_file()}


def test_versions_are_forgotten_and_their_files_deleted(store: Path, bookwheel: Any, reindex: Any) -> None:
    before = files(store)
    reply = bookwheel("expire", "--keep", 1, "--older-than", 0, "--store", store, "--json").json
    assert (reply["dry_run"], reply["moves"], len(reply["snapshots"])) == (True, ["latest@1", "latest@2"], 1)
    assert "nothing was changed" in bookwheel("expire", "--keep", 1, "--older-than", 0, "--store", store).out
    assert bookwheel("expire", "--store", store, "--json").json["moves"] == []
    assert files(store) == before
    done = bookwheel("expire", "--keep", 1, "--older-than", 0, "--store", store, "--yes", "--json").json
    assert done == {**reply, "dry_run": False}

    assert bookwheel("gc", "--store", store, "--json").json["files"] == 0
    reply = bookwheel("gc", "--grace", 0, "--store", store, "--json").json
    assert reply["kinds"]["blobs"]["files"] >= 1
    words = bookwheel("gc", "--grace", 0, "--store", store).out
    assert f"would delete {reply['files']:,} files" in words
    assert len(files(store)) == len(before) - 3
    done = bookwheel("gc", "--grace", 0, "--store", store, "--yes", "--json").json
    assert done == {**reply, "dry_run": False}
    assert bookwheel("gc", "--grace", 0, "--store", store, "--yes", "--json").json["files"] == 0

    assert bookwheel("verify", "--store", store).code == 0
    counts = reindex(store).json["counts"]
    assert (counts["embedded"], counts["reused"]) == (0, 247)
    assert [move["number"] for move in bookwheel("log", "--store", store, "--json").json] == [3]


def test_a_build_that_died_is_gone_on_with_after_a_gc_and_cleared_after_a_longer_time(
    store: Path, bookwheel: Any
) -> None:
    opened = Store.open(str(store))
    opened.runs.write_report("20261101T000000-dead", "chunk", 0, {})
    opened.memo.write_record("chunk", "k", {"passages": opened.blobs.put_bytes(b"of a build that died")}, {})
    assert bookwheel("gc", "--store", store, "--yes", "--json").json["files"] == 0
    with Store.open(str(store)).intents.hold("killed"):
        printed = bookwheel("gc", "--store", store, "--yes", "--grace", "0")
        assert "kept the files of 1 run (killed) and" in printed.out
    kinds = bookwheel("gc", "--store", store, "--yes", "--grace", "0", "--json").json["kinds"]
    assert kinds["runs"]["files"] == 1
    assert opened.memo.find("chunk", "k") is None


@pytest.mark.parametrize(
    ("verb", "why"),
    [
        (["expire", "--keep", "0"], "keep must be at least 1"),
        (["expire", "--older-than", "soon"], "'soon' is not a length of time"),
        (["gc", "--grace", "1.5h"], "is not a length of time"),
    ],
)
def test_what_cannot_be_is_one_sentence(store: Path, bookwheel: Any, verb: list[str], why: str) -> None:
    result = bookwheel(*verb, "--store", store)
    assert (result.code, why in result.complaint) == (2, True)


@pytest.mark.parametrize(("text", "seconds"), [("90d", 7776000.0), ("2w", 1209600.0), ("5", 5.0), ("24h", 86400.0)])
def test_ages_are_read(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "-1d", "1.5h", "1 d", "9999999"])
def test_what_is_no_age_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a length of time"):
        parse_age(text)
