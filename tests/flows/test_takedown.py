"""A page is taken down: out of every snapshot, out of all bytes of the store, and out of whatever is built later."""

import bz2
import os
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from flows import finish
from flows import reindex as flow
from rag_model.digest import digest_json
from rag_model.index.files.pieces import PieceReader, path_opener
from rag_model.snapshots.reused_training import read_shards
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.blob_texts import told
from tests.fixtures.forked_processes import ForkedCommand

PAGE, TITLE, SENTENCE = "12", "Anarchism", "political philosophy"  # of the small dump, and of no other page of it


def pages_of(snapshot: Snapshot) -> set[str]:
    return {passage.page_id for passage in snapshot.passages(range(snapshot.n))}


def vectors_of(store: Path, snapshot: Snapshot, page: str) -> list[bytes]:
    """The vectors of a page, as float16 and as float32, and the digests of both: what no file may hold afterwards."""
    rows = [row for row, passage in enumerate(snapshot.passages(range(snapshot.n))) if passage.page_id == page]
    whole = np.concatenate([snapshot.embeddings(part.name) for part in snapshot.parts])[rows]
    stored = [vector.astype(kind).tobytes() for vector in whole for kind in (np.float16, np.float32)]
    return [*stored, *(blake2b(vector, digest_size=8).digest() for vector in stored)]


def check_shard(store: Store, snapshot_id: str) -> None:
    """Check that a graph's only shard holds digests of the snapshot's vectors, and links between them, alone."""
    manifest = store.snapshots.get(snapshot_id)
    (shard,) = read_shards(store, BlobRef.from_json(manifest.provenance["shards"]["hnsw"]["list"]))
    plan = manifest.content.indexes["hnsw"]["trained"]["plan"]
    stamp = digest_json([{name: value for name, value in plan.items() if name != "cells"}, "shard", 0])
    with Snapshot.open(store.url, snapshot_id) as snapshot:
        vectors = np.concatenate([snapshot.embeddings(part.name) for part in snapshot.parts])
    with PieceReader.open(path_opener(store.blobs.get_local_path(shard.blob)), stamp, 8, "the shard") as piece:
        links, out, _, into, _, _, members, sources = map(piece.read, range(8))
    digests = [blake2b(vector.tobytes(), digest_size=8).digest() for vector in vectors]
    assert members.tobytes() == b"".join(digests)
    assert (len(out), len(into), len(sources)) == (0, 0, 0)
    rows, slots = np.nonzero(links != np.uint64(2**64 - 1))
    keys = links[rows, slots]
    similarity = ((~(keys >> np.uint64(32))).astype(np.uint32) ^ np.uint32(1 << 31)).view(np.float32)
    pairs = vectors[rows].astype(np.float32) * vectors[keys & np.uint64(2**32 - 1)]
    np.testing.assert_allclose(similarity, pairs.sum(axis=1), atol=1e-5)


@pytest.mark.usefixtures("prefect_server")
def test_a_page_leaves_every_byte(store: Path, bookwheel: Any, reindex: Any, mini_dump: Path, tmp_path: Path) -> None:
    with Snapshot.open(str(store)) as before:
        old, vectors, titles = before.id, vectors_of(store, before, PAGE), pages_of(before)
    assert told(store, SENTENCE.encode())
    assert PAGE in titles
    held = [path.read_bytes() for path in (store / "blobs").glob("??/*")]
    assert all(any(trace in blob for blob in held) for trace in vectors[::2]), "of float16, as they are stored"

    (tmp_path / "asked.jsonl").write_text('{"question": "what is anarchism?", "answers": ["Proudhon"]}\n')
    measured = bookwheel("evaluate", "--store", store, "--questions", tmp_path / "asked.jsonl", "--json").json
    assert len(told(store, f'"title": "{TITLE}"'.encode())) >= 1

    rehearsed = bookwheel("takedown", PAGE, "--store", store, "--json").json
    assert measured["evaluation"] in rehearsed["evaluations"]  # other tests may have measured the library too
    assert rehearsed["dry_run"]
    assert rehearsed["wiki"] == "enwiki"
    (holder,) = rehearsed["snapshots"]
    assert (holder["snapshot"], holder["refs"], holder["pages"]) == (old, ["latest"], [PAGE])
    assert 0 < holder["passages"] < 247
    words = bookwheel("takedown", PAGE, "--store", store).out
    assert f"page      {PAGE}: {TITLE}\n" in words
    assert "nothing was changed" in words
    assert not (store / "takedowns").exists()

    result = bookwheel(
        "takedown", PAGE, "--reason", "a request", "--store", store, "--yes", "--json", "--", "--runner=FnApiRunner"
    )
    assert result.code == 0, result.err
    done = result.json
    opened = Store.open(str(store))
    (record,) = opened.takedowns.list_records()
    assert (record.wiki, record.pages, record.reason, done["record"]) == ("enwiki", (PAGE,), "a request", 1)
    assert (list(done["replaced"]), done["moves"], done["waiting"]) == ([old], 1, [])
    assert (done["evaluations"], opened.evaluations.list_ids()) == (rehearsed["evaluations"], [])
    new = done["replaced"][old]
    assert opened.snapshots.list_ids() == [new]
    assert verify_version(opened, new) == []
    with Snapshot.open(str(store)) as after:
        assert after.id == new
        assert pages_of(after) == titles - {PAGE}
        assert after.n == 247 - holder["passages"]
        assert after.manifest.provenance["takedown"] == {"of": old, "pages": [PAGE]}
        index = faiss.read_index(str(after.path("index/hnsw.faiss")))
        assert index.ntotal == after.n
        assert after.manifest.provenance["shards"]["hnsw"]["generation"] == [1], "the graph was updated"
    assert bookwheel("search", "what is anarchism?", "--store", store, "--json").json["snapshot"] == new

    deleted = bookwheel("gc", "--grace", 0, "--store", store, "--yes", "--json").json
    assert deleted["files"] > 0
    assert told(store, SENTENCE.encode()) == told(store, f'"title": "{TITLE}"'.encode()) == []
    blobs = [path.read_bytes() for path in (store / "blobs").glob("??/*")]
    assert not [1 for vector in vectors for blob in blobs if vector in blob]
    check_shard(opened, new)
    assert bookwheel("verify", "--store", store).code == 0

    again = reindex(store, dump=mini_dump).json
    assert again["snapshot"] == new, "what is built later is what was put in its place"
    assert again["counts"]["dropped"]["taken_down"] == 1
    assert again["counts"]["embedded"] == 0


def test_a_takedown_that_waits_for_a_writer_exits_3(store: Path, bookwheel: Any) -> None:
    opened = Store.open(str(store))
    old = opened.snapshots.resolve("latest")
    with opened.intents.hold("move-1", [f"snapshots/{old}.json"]):
        waiting = bookwheel("takedown", PAGE, "--store", store, "--yes")
    assert (waiting.code, "running builds or services still need 1 snapshot with the pages" in waiting.err) == (3, True)
    assert bookwheel("takedown", "--store", store, "--yes").code == 0


def test_a_takedown_of_a_page_that_no_snapshot_holds_says_so(store: Path, bookwheel: Any) -> None:
    result = bookwheel("takedown", "999999999", "--store", store, "--yes")
    assert (result.code, "no snapshot holds such a page: check the ids" in result.out) == (0, True)


def test_a_takedown_that_was_only_ordered_is_gone_on_with(store: Path, bookwheel: Any, trusted: Path) -> None:
    """And without its pages being named again; where refs are half moved, `tests/rag_model/snapshots` looks."""
    opened = Store.open(str(store))
    opened.takedowns.add("enwiki", [PAGE], "a request", "me")
    old = opened.snapshots.resolve("latest")
    assert "would replace 1 snapshot;" in bookwheel("takedown", "--store", store).out
    result = bookwheel("takedown", "--store", store, "--yes", "--trust", trusted)
    assert result.out.splitlines()[0] == "record    none: all pages were ordered before"
    new = opened.snapshots.resolve("latest")
    left = [line.partition(":")[0] for line in result.out.splitlines() if line.startswith("unsigned")]
    assert left == [f"unsigned  {new[:12]}", "unsigned  latest@2"], "there is a key, but nobody signed the old one"
    assert not list(store.glob("snapshots/*.sig"))
    assert f"replaced  {old[:12]} by {new[:12]}\n" in result.out
    assert "would replace 0 snapshots" in bookwheel("takedown", "--store", store).out
    told = bookwheel("show", old, "--store", store)
    assert (told.code, "which replaces it" in told.complaint) == (1, True)
    assert [move["number"] for move in bookwheel("log", "--store", store, "--json").json] == [2, 1]
    assert f"made of   {old[:12]}: without pages {PAGE}\n" in bookwheel("show", "--store", store).out


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("moment", ["takedowns/*.json", "memo/merge/*.json", "snapshots/*.json"])
def test_a_takedown_that_was_killed_is_gone_on_with(moment: str, store: Path, bookwheel: Any, tmp_path: Path) -> None:
    opened = Store.open(str(store))
    old, before = opened.snapshots.resolve("latest"), set(store.glob(moment))
    running = ForkedCommand(["takedown", PAGE, "--store", str(store), "--yes"], tmp_path)
    while set(store.glob(moment)) <= before:
        assert running.poll() is None, "the moment was not seen before the process ended"
        time.sleep(0.001)
    running.kill()
    running.communicate()
    assert verify_version(opened, opened.snapshots.resolve("latest")) == []
    assert bookwheel("takedown", "--store", store, "--yes").code == 0
    (record,) = opened.takedowns.list_records()
    assert record.pages == (PAGE,)
    new = opened.snapshots.resolve("latest")
    assert opened.snapshots.list_ids() == [new]
    assert new != old
    assert verify_version(opened, new) == []
    with Snapshot.open(str(store)) as after:
        assert PAGE not in pages_of(after)
    for file in opened.files.iter_tree():  # an hour later, when nobody waits for the dead one any more
        os.utime(store / file.path, (file.modified - 3601,) * 2)
    assert bookwheel("gc", "--grace", 0, "--store", store, "--yes").code == 0
    assert told(store, SENTENCE.encode()) == []


@pytest.mark.parametrize(
    ("given", "code", "why"),
    [
        ([PAGE, "--wiki", "frwiki"], 2, "no snapshot in"),
        ([PAGE, "--wiki", "frwiki", "--yes"], 2, "is of wiki 'frwiki': there are 'enwiki'"),
    ],
)
def test_what_cannot_be_is_one_sentence(library: Path, bookwheel: Any, given: list[str], code: int, why: str) -> None:
    result = bookwheel("takedown", *given, "--store", library)
    assert (result.code, why in result.complaint) == (code, True)
    assert not (library / "takedowns").exists()


def test_a_page_that_is_nowhere_is_told_before_it_is_ordered(library: Path, bookwheel: Any) -> None:
    output = bookwheel("takedown", "999", "--store", library).out
    assert "page      999: in no snapshot\nno snapshot holds such a page" in output


@pytest.mark.parametrize("given", [["-1", "999"], ["--", "-30-", "999"]])
def test_what_begins_with_one_hyphen_is_no_option_of_beam(given: list[str], library: Path, bookwheel: Any) -> None:
    output = bookwheel("takedown", "--store", library, *given).out
    assert f"page      {given[-2]}: in no snapshot\npage      999: in no snapshot" in output


def delete_files_of(store: Path, snapshot_id: str) -> None:
    """Delete the files of an expired snapshot, except the encoder, which the build has put there again."""
    opened = Store.open(str(store))
    for path, blob in opened.snapshots.get(snapshot_id).content.files.items():
        if not path.startswith("encoder"):
            opened.files.local_path(blob.path).unlink(missing_ok=True)


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(
    ("event", "stage", "code"), [("takedown", "chunk", 0), ("takedown", "train", 1), ("expire", "chunk", 0)]
)
def test_a_build_whose_parent_goes_meanwhile_publishes_a_whole_snapshot_and_says_so_or_none(
    event: str,
    stage: str,
    code: int,
    store: Path,
    reindex: Any,
    mini_dump: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = Store.open(str(store))
    parent = opened.snapshots.resolve("latest")
    module, name = (flow, "chunk_parts") if stage == "chunk" else (finish, "train_indexes")
    run_stage = getattr(module, name)

    def lose_parent(*arguments: Any, **options: Any) -> Any:
        if event == "takedown":
            running = ForkedCommand(["takedown", PAGE, "--store", str(store), "--yes"], tmp_path)
            assert running.wait(300) in {0, 3}
        else:
            delete_files_of(store, parent)
        return run_stage(*arguments, **options)

    dump = tmp_path / "edited.xml"
    before, end, after = bz2.decompress(mini_dump.read_bytes()).rpartition(b". The ")
    dump.write_bytes(before + b". Edited since" + end + after)
    with monkeypatch.context() as patched:
        patched.setattr(module, name, lose_parent)
        result = reindex(store, dump=dump)
    assert result.code == code, result.err
    if code:
        assert f"page {PAGE} in it ('{TITLE}') was taken down meanwhile: run the same command again" in result.complaint
        assert len(opened.snapshots.list_ids()) == 1, "only the snapshot of the takedown is there"
        result = reindex(store, dump=dump)
    latest = opened.snapshots.resolve("latest")
    assert (result.json["snapshot"], latest == parent) == (latest, False)
    assert verify_version(opened, latest) == []
    if event == "expire":  # the file of the other part is written again with the same bytes
        note = f"1 of 2 parts of the parent {parent[:12]} are gone: they are built again"
        assert f"chunk {note}" in result.err
        assert note in opened.snapshots.get(latest).provenance["notes"]
        assert note in (store / "reports" / f"{latest}.html").read_text()
    with Snapshot.open(str(store)) as snapshot:
        assert (PAGE in pages_of(snapshot)) == (event == "expire")
        assert any("Edited since." in passage.text for passage in snapshot.passages(range(snapshot.n)))
