"""Takedowns, which remove a page from all snapshots and files of a store and from later builds."""

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
from tests.fixtures.blob_texts import list_blobs_with
from tests.fixtures.forked_processes import ForkedCommand

PAGE, TITLE, SENTENCE = "12", "Anarchism", "political philosophy"  # Only this page of the small dump has the sentence.


def list_page_ids(snapshot: Snapshot) -> set[str]:
    return {passage.page_id for passage in snapshot.passages(range(snapshot.n))}


def collect_vector_traces(snapshot: Snapshot, page: str) -> list[bytes]:
    """Return the vectors of a page in float16 and float32, and the digests of both."""
    rows = [row for row, passage in enumerate(snapshot.passages(range(snapshot.n))) if passage.page_id == page]
    vectors = np.concatenate([snapshot.embeddings(part.name) for part in snapshot.parts])[rows]
    stored = [vector.astype(kind).tobytes() for vector in vectors for kind in (np.float16, np.float32)]
    return [*stored, *(blake2b(vector, digest_size=8).digest() for vector in stored)]


def check_shard(store: Store, snapshot_id: str) -> None:
    """Check that the only shard of the graph has only digests of vectors of the snapshot and links between them."""
    manifest = store.snapshots.get(snapshot_id)
    (shard,) = read_shards(store, BlobRef.from_json(manifest.provenance["shards"]["hnsw"]["list"]))
    plan = manifest.content.indexes["hnsw"]["trained"]["plan"]
    stamp = digest_json([{name: value for name, value in plan.items() if name != "cells"}, "shard", 0])
    with Snapshot.open(store.url, snapshot_id) as snapshot:
        vectors = np.concatenate([snapshot.embeddings(part.name) for part in snapshot.parts])
    with PieceReader.open(path_opener(store.blobs.get_local_path(shard.blob)), stamp, 8, "the shard") as piece:
        links, out_links, _, in_links, _, _, members, sources = map(piece.read, range(8))
    digests = [blake2b(vector.tobytes(), digest_size=8).digest() for vector in vectors]
    assert members.tobytes() == b"".join(digests)
    assert (len(out_links), len(in_links), len(sources)) == (0, 0, 0)
    rows, slots = np.nonzero(links != np.uint64(2**64 - 1))
    keys = links[rows, slots]
    similarity = ((~(keys >> np.uint64(32))).astype(np.uint32) ^ np.uint32(1 << 31)).view(np.float32)
    pairs = vectors[rows].astype(np.float32) * vectors[keys & np.uint64(2**32 - 1)]
    np.testing.assert_allclose(similarity, pairs.sum(axis=1), atol=1e-5)


@pytest.mark.usefixtures("prefect_server")
def test_takedown_removes_every_byte_of_page(
    store: Path, bookwheel: Any, reindex: Any, mini_dump: Path, tmp_path: Path
) -> None:
    with Snapshot.open(str(store)) as snapshot:
        old_id, traces, pages = snapshot.id, collect_vector_traces(snapshot, PAGE), list_page_ids(snapshot)
    assert list_blobs_with(store, SENTENCE.encode())
    assert PAGE in pages
    blobs = [path.read_bytes() for path in (store / "blobs").glob("??/*")]
    assert all(any(trace in blob for blob in blobs) for trace in traces[::2]), "the store has float16 vectors"

    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "what is anarchism?", "answers": ["Proudhon"]}\n')
    evaluation = bookwheel("evaluate", "--store", store, "--questions", questions, "--json").json["evaluation"]
    assert len(list_blobs_with(store, f'"title": "{TITLE}"'.encode())) >= 1

    dry_run = bookwheel("takedown", PAGE, "--store", store, "--json").json
    assert evaluation in dry_run["evaluations"]
    assert dry_run["dry_run"]
    assert dry_run["wiki"] == "enwiki"
    (entry,) = dry_run["snapshots"]
    assert (entry["snapshot"], entry["refs"], entry["pages"]) == (old_id, ["latest"], [PAGE])
    assert 0 < entry["passages"] < 247
    output = bookwheel("takedown", PAGE, "--store", store).out
    assert f"page      {PAGE}: {TITLE}\n" in output
    assert "nothing was changed" in output
    assert not (store / "takedowns").exists()

    result = bookwheel(
        "takedown", PAGE, "--reason", "a request", "--store", store, "--yes", "--json", "--", "--runner=FnApiRunner"
    )
    assert result.code == 0, result.err
    report = result.json
    opened_store = Store.open(str(store))
    (record,) = opened_store.takedowns.list_records()
    assert (record.wiki, record.pages, record.reason, report["record"]) == ("enwiki", (PAGE,), "a request", 1)
    assert (list(report["replaced"]), report["moves"], report["waiting"]) == ([old_id], 1, [])
    assert (report["evaluations"], opened_store.evaluations.list_ids()) == (dry_run["evaluations"], [])
    new_id = report["replaced"][old_id]
    assert opened_store.snapshots.list_ids() == [new_id]
    assert verify_version(opened_store, new_id) == []
    with Snapshot.open(str(store)) as snapshot:
        assert snapshot.id == new_id
        assert list_page_ids(snapshot) == pages - {PAGE}
        assert snapshot.n == 247 - entry["passages"]
        assert snapshot.manifest.provenance["takedown"] == {"of": old_id, "pages": [PAGE]}
        index = faiss.read_index(str(snapshot.path("index/hnsw.faiss")))
        assert index.ntotal == snapshot.n
        assert snapshot.manifest.provenance["shards"]["hnsw"]["generation"] == [1], "the graph was updated"
    assert bookwheel("search", "what is anarchism?", "--store", store, "--json").json["snapshot"] == new_id

    deleted = bookwheel("gc", "--grace", 0, "--store", store, "--yes", "--json").json
    assert deleted["files"] > 0
    assert list_blobs_with(store, SENTENCE.encode()) == list_blobs_with(store, f'"title": "{TITLE}"'.encode()) == []
    blobs = [path.read_bytes() for path in (store / "blobs").glob("??/*")]
    assert not any(trace in blob for trace in traces for blob in blobs)
    check_shard(opened_store, new_id)
    assert bookwheel("verify", "--store", store).code == 0

    rebuilt = reindex(store, dump=mini_dump).json
    assert rebuilt["snapshot"] == new_id, "a later build leaves the page out"
    assert rebuilt["counts"]["dropped"]["taken_down"] == 1
    assert rebuilt["counts"]["embedded"] == 0


def test_takedown_that_waits_for_writer_exits_3(store: Path, bookwheel: Any) -> None:
    opened_store = Store.open(str(store))
    old_id = opened_store.snapshots.resolve("latest")
    with opened_store.intents.hold("move-1", [f"snapshots/{old_id}.json"]):
        result = bookwheel("takedown", PAGE, "--store", store, "--yes")
    assert (result.code, "running builds or services still need 1 snapshot with the pages" in result.err) == (3, True)
    assert bookwheel("takedown", "--store", store, "--yes").code == 0


def test_takedown_reports_page_that_no_snapshot_has(store: Path, bookwheel: Any) -> None:
    result = bookwheel("takedown", "999999999", "--store", store, "--yes")
    assert (result.code, "no snapshot holds such a page: check the ids" in result.out) == (0, True)


def test_recorded_takedown_is_finished(store: Path, bookwheel: Any, trust_file: Path) -> None:
    opened_store = Store.open(str(store))
    opened_store.takedowns.add("enwiki", [PAGE], "a request", "me")
    old_id = opened_store.snapshots.resolve("latest")
    assert "would replace 1 snapshot;" in bookwheel("takedown", "--store", store).out
    result = bookwheel("takedown", "--store", store, "--yes", "--trust", trust_file)
    assert result.out.splitlines()[0] == "record    none: all pages were ordered before"
    new_id = opened_store.snapshots.resolve("latest")
    unsigned_names = [line.partition(":")[0] for line in result.out.splitlines() if line.startswith("unsigned")]
    assert unsigned_names == [f"unsigned  {new_id[:12]}", "unsigned  latest@2"], "as the snapshot it replaces"
    assert not list(store.glob("snapshots/*.sig"))
    assert f"replaced  {old_id[:12]} by {new_id[:12]}\n" in result.out
    assert "would replace 0 snapshots" in bookwheel("takedown", "--store", store).out
    description = bookwheel("show", old_id, "--store", store)
    assert (description.code, "which replaces it" in description.complaint) == (1, True)
    assert [move["number"] for move in bookwheel("log", "--store", store, "--json").json] == [2, 1]
    assert f"made of   {old_id[:12]}: without pages {PAGE}\n" in bookwheel("show", "--store", store).out


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("pattern", ["takedowns/*.json", "memo/merge/*.json", "snapshots/*.json"])
def test_killed_takedown_is_finished(pattern: str, store: Path, bookwheel: Any, tmp_path: Path) -> None:
    opened_store = Store.open(str(store))
    old_id, files_before = opened_store.snapshots.resolve("latest"), set(store.glob(pattern))
    process = ForkedCommand(["takedown", PAGE, "--store", str(store), "--yes"], tmp_path)
    while set(store.glob(pattern)) <= files_before:
        assert process.poll() is None, "the process ended before the moment to kill it"
        time.sleep(0.001)
    process.kill()
    process.communicate()
    assert verify_version(opened_store, opened_store.snapshots.resolve("latest")) == []
    assert bookwheel("takedown", "--store", store, "--yes").code == 0
    (record,) = opened_store.takedowns.list_records()
    assert record.pages == (PAGE,)
    new_id = opened_store.snapshots.resolve("latest")
    assert opened_store.snapshots.list_ids() == [new_id]
    assert new_id != old_id
    assert verify_version(opened_store, new_id) == []
    with Snapshot.open(str(store)) as snapshot:
        assert PAGE not in list_page_ids(snapshot)
    for file in opened_store.files.iter_tree():  # After an hour, gc ignores the killed process.
        os.utime(store / file.path, (file.modified - 3601,) * 2)
    assert bookwheel("gc", "--grace", 0, "--store", store, "--yes").code == 0
    assert list_blobs_with(store, SENTENCE.encode()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([PAGE, "--wiki", "frwiki"], 2, "no snapshot in"),
        ([PAGE, "--wiki", "frwiki", "--yes"], 2, "is of wiki 'frwiki': there are 'enwiki'"),
    ],
)
def test_unknown_wiki_is_refused(library: Path, bookwheel: Any, arguments: list[str], code: int, message: str) -> None:
    result = bookwheel("takedown", *arguments, "--store", library)
    assert (result.code, message in result.complaint) == (code, True)
    assert not (library / "takedowns").exists()


def test_dry_run_reports_page_that_no_snapshot_has(library: Path, bookwheel: Any) -> None:
    output = bookwheel("takedown", "999", "--store", library).out
    assert "page      999: in no snapshot\nno snapshot holds such a page" in output


@pytest.mark.parametrize("arguments", [["-1", "999"], ["--", "-30-", "999"]])
def test_page_id_with_hyphen_is_no_beam_option(arguments: list[str], library: Path, bookwheel: Any) -> None:
    output = bookwheel("takedown", "--store", library, *arguments).out
    assert f"page      {arguments[-2]}: in no snapshot\npage      999: in no snapshot" in output


def delete_files_of(store: Path, snapshot_id: str) -> None:
    """Delete the files of an expired snapshot, except the encoder, which the build has written again."""
    opened_store = Store.open(str(store))
    for path, blob in opened_store.snapshots.get(snapshot_id).content.files.items():
        if not path.startswith("encoder"):
            opened_store.files.local_path(blob.path).unlink(missing_ok=True)


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(
    ("event", "stage", "code"), [("takedown", "chunk", 0), ("takedown", "train", 1), ("expire", "chunk", 0)]
)
def test_build_whose_parent_is_deleted_publishes_complete_snapshot_or_none(
    event: str,
    stage: str,
    code: int,
    store: Path,
    reindex: Any,
    mini_dump: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened_store = Store.open(str(store))
    parent = opened_store.snapshots.resolve("latest")
    module, name = (flow, "chunk_parts") if stage == "chunk" else (finish, "train_indexes")
    run_stage = getattr(module, name)

    def delete_parent(*arguments: Any, **options: Any) -> Any:
        if event == "takedown":
            process = ForkedCommand(["takedown", PAGE, "--store", str(store), "--yes"], tmp_path)
            assert process.wait(300) in {0, 3}
        else:
            delete_files_of(store, parent)
        return run_stage(*arguments, **options)

    dump = tmp_path / "edited.xml"
    head, end, tail = bz2.decompress(mini_dump.read_bytes()).rpartition(b". The ")
    dump.write_bytes(head + b". Edited since" + end + tail)
    with monkeypatch.context() as patched:
        patched.setattr(module, name, delete_parent)
        result = reindex(store, dump=dump)
    assert result.code == code, result.err
    if code:
        assert f"page {PAGE} in it ('{TITLE}') was taken down meanwhile: run the same command again" in result.complaint
        assert len(opened_store.snapshots.list_ids()) == 1, "only the takedown has published a snapshot"
        result = reindex(store, dump=dump)
    latest = opened_store.snapshots.resolve("latest")
    assert (result.json["snapshot"], latest == parent) == (latest, False)
    assert verify_version(opened_store, latest) == []
    if event == "expire":  # The build has written the file of the other part again, with the same bytes.
        note = f"1 of 2 parts of the parent {parent[:12]} are gone: they are built again"
        assert f"chunk {note}" in result.err
        assert note in opened_store.snapshots.get(latest).provenance["notes"]
        assert note in (store / "reports" / f"{latest}.html").read_text()
    with Snapshot.open(str(store)) as snapshot:
        assert (PAGE in list_page_ids(snapshot)) == (event == "expire")
        assert any("Edited since." in passage.text for passage in snapshot.passages(range(snapshot.n)))
