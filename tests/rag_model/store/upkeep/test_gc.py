"""Garbage collection deletes unused files, and keeps files that a snapshot or a build may need."""

import json

import pytest

from rag_model.errors import StoreError, UsageError
from rag_model.store import BlobRef, Store
from rag_model.store.objects.memo import TARGET_KEY
from rag_model.store.upkeep.expire import ExpirePolicy, expire_store
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.moves import tag
from tests.fixtures.store_files import age_files, publish_blobs, publish_parts

HOUR = 3600.0
DAY = 24 * HOUR
IMMEDIATELY = ExpirePolicy(keep=1, older_than=0)


def count_deleted(store: Store, grace: float = 0.0, *, dry_run: bool = False) -> dict[str, int]:
    """Collect garbage, and return the numbers of deleted files by kind, without zeros."""
    return {kind: tally.files for kind, tally in collect_garbage(store, grace, dry_run=dry_run).items() if tally.files}


def put_blob_list(store: Store, *refs: BlobRef) -> BlobRef:
    return store.blobs.put_bytes(json.dumps([ref.to_json() for ref in refs]).encode())


def test_unreferenced_blob_is_deleted(store: Store) -> None:
    snapshot_id = publish_parts(store)
    orphan = store.blobs.put_bytes(b"orphan")
    assert count_deleted(store, dry_run=True) == {"blobs": 1}
    assert store.blobs.exists(orphan)
    assert collect_garbage(store, 0.0)["blobs"].bytes == len(b"orphan")
    assert not store.blobs.exists(orphan)
    assert count_deleted(store) == {}
    assert verify_version(store, snapshot_id) == []
    assert store.files.list_names("sweeps") == store.files.list_names("intents") == []


def test_recent_files_are_kept(store: Store) -> None:
    publish_parts(store)
    orphan = store.blobs.put_bytes(b"orphan")
    store.memo.write_record("train", "k", {"out": orphan}, {})
    age_files(store, 23 * HOUR)
    assert count_deleted(store, DAY) == {}
    age_files(store, 2 * HOUR)
    assert count_deleted(store, DAY) == {"memo": 1, "blobs": 1}


def test_recent_record_keeps_blobs(store: Store) -> None:
    """A run may resume the run of last week and reuse its files."""
    publish_parts(store)
    old = store.blobs.put_bytes(b"of last week")
    age_files(store, 7 * DAY)
    store.memo.write_record("merge", "k", {"out": store.blobs.put_bytes(b"new")}, {}, {"of": old.id})
    assert count_deleted(store, DAY) == {}


def test_inputs_of_the_current_snapshot_are_kept(store: Store) -> None:
    """Records are kept back to the first stage for the current snapshot, and only for its files for older ones."""
    blob = store.blobs.put_bytes
    for version in (b"1", b"2"):
        vectors, trained, shard, index = (blob(kind + version) for kind in (b"vectors", b"trained", b"shard", b"index"))
        blob_list = put_blob_list(store, shard)
        key = version.decode()
        store.memo.write_record("embed", key, {"embeddings": vectors}, {})
        store.memo.write_record("train", key, {"out": trained}, {}, {"vectors": vectors.id})
        store.memo.write_record("shard", key, {"out": shard}, {}, {"trained": trained.id})
        store.memo.write_record("merge", key, {"out": index}, {}, {"shards": blob_list.id})
        store.memo.write_record("tune", key, {}, {"nprobe": 3}, {"index": index.id})
        tag(store, publish_blobs(store, index, vectors), "latest")
    # The records and blobs of the first trained file and shard, and the list of blobs.
    assert count_deleted(store) == {"memo": 2, "blobs": 3}
    assert {
        stage: store.files.list_names(f"memo/{stage}") for stage in store.files.list_names("memo", kind="directory")
    } == {
        "embed": ["1.json", "2.json"],
        "train": ["2.json"],
        "shard": ["2.json"],
        "merge": ["1.json", "2.json"],
        "tune": ["1.json", "2.json"],
    }
    assert all(store.memo.find(stage, "2") for stage in ("embed", "train", "shard", "merge", "tune"))


def test_record_with_targets_is_kept_while_a_snapshot_has_all_of_them(store: Store) -> None:
    first, second, output = map(store.blobs.put_bytes, (b"first", b"second", b"neighbours"))
    store.memo.write_record("neighbors", "k", {"neighbors": output}, {TARGET_KEY: [first.id, second.id]})
    tag(store, publish_blobs(store, first, second), "latest")
    assert count_deleted(store) == {}
    tag(store, publish_blobs(store, first), "latest")
    expire_store(store, IMMEDIATELY)
    assert count_deleted(store)["memo"] == 1
    assert not store.blobs.exists(output)


@pytest.mark.parametrize("stage", ["train", "follow", "redact_training"])
def test_trained_file_does_not_keep_its_training_vectors(store: Store, stage: str) -> None:
    """A trained file is reused every month; if it kept its first vectors, a takedown could never delete them."""
    blob = store.blobs.put_bytes
    old_vectors, new_vectors, trained, index = map(blob, (b"old vectors", b"new vectors", b"cells", b"index"))
    blob_list = put_blob_list(store, old_vectors)
    store.memo.write_record("embed", "old", {"embeddings": old_vectors}, {})
    store.memo.write_record(stage, "old", {"out": trained}, {}, {"vectors": blob_list.id})
    store.memo.write_record(
        "merge", "new", {"out": index}, {}, {"vectors": put_blob_list(store, new_vectors).id, "trained": trained.id}
    )
    tag(store, publish_blobs(store, index, trained, new_vectors), "latest")
    count_deleted(store)
    assert not any(store.blobs.exists(ref) for ref in (old_vectors, blob_list))
    assert all(store.blobs.exists(ref) for ref in (new_vectors, trained, index))
    assert store.memo.find(stage, "old") is not None, "a build with the same vectors can reuse the trained file"


def test_generations_of_a_record_are_deleted_together(store: Store) -> None:
    lost_blob, new_blob = store.blobs.put_bytes(b"lost"), store.blobs.put_bytes(b"found")
    store.memo.write_record("chunk", "k", {"out": lost_blob}, {})
    store.files.delete_folder(lost_blob.path)
    store.memo.write_record("chunk", "k", {"out": new_blob}, {})
    publish_blobs(store, new_blob)
    assert count_deleted(store) == {}
    store.files.delete_folder("snapshots")
    publish_blobs(store)
    assert count_deleted(store) == {"memo": 2, "blobs": 1}


def test_reports_of_dead_runs_and_deleted_snapshots_are_deleted(store: Store) -> None:
    snapshot_id = publish_blobs(store)
    store.files.write(f"reports/{snapshot_id}.html", b"")
    store.files.write(f"reports/{'0' * 64}.html", b"")
    store.runs.write_report("dead", "chunk", 0, {})
    store.runs.write_report("slow", "chunk", 0, {})
    age_files(store, 2 * DAY)
    store.runs.write_report("slow", "chunk", 1, {})
    assert count_deleted(store, DAY) == {"runs": 1, "reports": 1}
    assert store.runs.count_reports("slow", "chunk") == 2
    assert store.files.list_names("reports") == [f"{snapshot_id}.html"]


def test_leftovers_of_dead_writers_are_deleted(store: Store) -> None:
    leftovers = ["blobs/ab/.landing-1", "refs/latest/.landing-2", ".landing-3", "probe/probe-4", "intents/a.json"]
    for path in [*leftovers, "sweeps/b.json", "blobs/README", "notes.txt"]:
        store.files.write(path, b"{}")
    age_files(store, 2 * DAY)
    assert count_deleted(store, DAY) == {"leftovers": 6}
    assert [file.path for file in store.files.iter_tree() if file.path != "store.json"] == ["notes.txt", "blobs/README"]


def test_store_with_blobs_and_without_roots_is_not_changed(store: Store) -> None:
    publish_parts(store)
    blobs = sorted(store.files.list_names("blobs"))
    store.files.delete_folder("snapshots")
    store.files.delete_folder("refs")
    with pytest.raises(StoreError, match=r"no ref, snapshot, model or evaluation\. The listing may be wrong"):
        collect_garbage(store, 0.0)
    assert sorted(store.files.list_names("blobs")) == blobs


def test_folder_of_a_later_version_stops_gc(store: Store) -> None:
    orphan = store.blobs.put_bytes(b"an adapter's weights")
    store.files.write("adapters/1.json", b"{}")
    with pytest.raises(StoreError, match="'adapters' that this version does not know, so nothing was deleted"):
        collect_garbage(store, 0.0)
    assert store.blobs.exists(orphan)


@pytest.mark.parametrize("data", [b"{", b'{"format": 2}'], ids=["damaged", "of a newer format"])
def test_unreadable_manifest_stops_gc(store: Store, data: bytes) -> None:
    orphan = store.blobs.put_bytes(b"perhaps it is needed")
    store.files.write(f"snapshots/{'0' * 64}.json", data)
    with pytest.raises(StoreError, match=r"snapshots/000.*cannot be used"):
        collect_garbage(store, 0.0)
    assert store.blobs.exists(orphan)


def test_missing_current_snapshot_stops_gc(store: Store) -> None:
    tag(store, publish_parts(store), "latest")
    store.files.delete_folder("snapshots")
    with pytest.raises(StoreError, match=r"ref latest .* which is missing: restore it .*; nothing was deleted"):
        collect_garbage(store, 0.0)
    assert len(list(store.files.iter_tree("blobs"))) == 7


def test_files_of_an_expired_snapshot_are_deleted_unless_shared(store: Store) -> None:
    tag(store, publish_blobs(store, store.blobs.put_bytes(b"of the first alone")), "latest")
    snapshot_id = publish_parts(store)
    tag(store, snapshot_id, "latest")
    expire_store(store, IMMEDIATELY)
    assert count_deleted(store) == {"blobs": 1}
    assert verify_version(store, snapshot_id) == []


def test_negative_grace_is_refused(store: Store) -> None:
    with pytest.raises(UsageError, match="must be 0 or more"):
        collect_garbage(store, -1.0)
