"""What is garbage and what is not."""

import json
from collections.abc import Callable

import pytest

from rag_model.errors import StoreError, UsageError
from rag_model.store import BlobRef, Content, Manifest, Store
from rag_model.store.objects.memo import TARGET_KEY
from rag_model.store.upkeep.expire import ExpirePolicy, expire_store
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.moves import tag

HOUR = 3600.0
DAY = 24 * HOUR
AT_ONCE = ExpirePolicy(keep=1, older_than=0)


@pytest.fixture
def store(local_store: Store) -> Store:
    return local_store


def removed(store: Store, grace: float = 0.0, *, dry_run: bool = False) -> dict[str, int]:
    """How many files of each kind; kinds without one left out."""
    return {kind: tally.files for kind, tally in collect_garbage(store, grace, dry_run=dry_run).items() if tally.files}


def put_list(store: Store, *refs: BlobRef) -> BlobRef:
    return store.blobs.put_bytes(json.dumps([ref.to_json() for ref in refs]).encode())


def snapshot_of(store: Store, *refs: BlobRef) -> str:
    files = {f"index/{number}.faiss": ref for number, ref in enumerate(refs)}
    return store.snapshots.publish(Manifest(Content({}, (), files)))


def test_what_no_snapshot_names_goes(store: Store, publish: Callable[..., str]) -> None:
    kept = publish(store)
    orphan = store.blobs.put_bytes(b"orphan")
    assert removed(store, dry_run=True) == {"blobs": 1}
    assert store.blobs.exists(orphan)
    assert collect_garbage(store, 0.0)["blobs"].bytes == len(b"orphan")
    assert not store.blobs.exists(orphan)
    assert removed(store) == {}
    assert verify_version(store, kept) == []
    assert store.files.list_names("sweeps") == store.files.list_names("intents") == []


def test_what_is_young_stays(store: Store, publish: Callable[..., str], later: Callable[..., None]) -> None:
    publish(store)
    orphan = store.blobs.put_bytes(b"orphan")
    store.memo.write_record("train", "k", {"out": orphan}, {})
    later(store, 23 * HOUR)
    assert removed(store, DAY) == {}
    later(store, 2 * HOUR)
    assert removed(store, DAY) == {"memo": 1, "blobs": 1}


def test_a_young_record_keeps_old_blobs(store: Store, publish: Callable[..., str], later: Callable[..., None]) -> None:
    """As when a run resumes what one of last week had begun."""
    publish(store)
    old = store.blobs.put_bytes(b"of last week")
    later(store, 7 * DAY)
    store.memo.write_record("merge", "k", {"out": store.blobs.put_bytes(b"new")}, {}, {"of": old.id})
    assert removed(store, DAY) == {}


def test_what_the_current_snapshot_was_made_from_stays(store: Store) -> None:
    """The record of a file names a list of blobs, which other records made; of older snapshots only the files stay."""
    blob = store.blobs.put_bytes
    for version in (b"1", b"2"):
        vectors, trained, shard, index = (blob(kind + version) for kind in (b"vectors", b"trained", b"shard", b"index"))
        listed = put_list(store, shard)
        key = version.decode()
        store.memo.write_record("embed", key, {"embeddings": vectors}, {})
        store.memo.write_record("train", key, {"out": trained}, {}, {"vectors": vectors.id})
        store.memo.write_record("shard", key, {"out": shard}, {}, {"trained": trained.id})
        store.memo.write_record("merge", key, {"out": index}, {}, {"shards": listed.id})
        store.memo.write_record("tune", key, {}, {"nprobe": 3}, {"index": index.id})
        tag(store, snapshot_of(store, index, vectors), "latest")
    assert removed(store) == {"memo": 2, "blobs": 3}  # of the first: trained and shard; their blobs, and the list
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


def test_record_with_targets_stays_as_long_as_a_snapshot_has_all_of_them(store: Store) -> None:
    first, second, output = map(store.blobs.put_bytes, (b"first", b"second", b"neighbours"))
    store.memo.write_record("neighbors", "k", {"neighbors": output}, {TARGET_KEY: [first.id, second.id]})
    tag(store, snapshot_of(store, first, second), "latest")
    assert removed(store) == {}
    tag(store, snapshot_of(store, first), "latest")
    expire_store(store, AT_ONCE)
    assert removed(store)["memo"] == 1
    assert not store.blobs.exists(output)


@pytest.mark.parametrize("stage", ["train", "follow"])
def test_what_was_trained_once_does_not_keep_what_it_was_trained_on(store: Store, stage: str) -> None:
    """It is inherited from month to month, and the vectors of the first would never go, nor a page taken down."""
    blob = store.blobs.put_bytes
    old, new, trained, index = blob(b"old vectors"), blob(b"new vectors"), blob(b"cells"), blob(b"index")
    listed = put_list(store, old)
    store.memo.write_record("embed", "old", {"embeddings": old}, {})
    store.memo.write_record(stage, "old", {"out": trained}, {}, {"vectors": listed.id})
    store.memo.write_record(
        "merge", "new", {"out": index}, {}, {"vectors": put_list(store, new).id, "trained": trained.id}
    )
    tag(store, snapshot_of(store, index, trained, new), "latest")
    removed(store)
    assert [store.blobs.exists(ref) for ref in (old, listed, new, trained, index)] == [False, False, True, True, True]
    assert store.memo.find(stage, "old") is not None, "the same vectors would give it again"


def test_all_generations_of_a_record_go_or_stay_together(store: Store) -> None:
    lost, found = store.blobs.put_bytes(b"lost"), store.blobs.put_bytes(b"found")
    store.memo.write_record("chunk", "k", {"out": lost}, {})
    store.files.delete_folder(lost.path)
    store.memo.write_record("chunk", "k", {"out": found}, {})
    snapshot_of(store, found)
    assert removed(store) == {}
    store.files.delete_folder("snapshots")
    snapshot_of(store)
    assert removed(store) == {"memo": 2, "blobs": 1}


def test_reports_of_runs_and_of_snapshots_that_are_gone_go(store: Store, later: Callable[..., None]) -> None:
    kept = snapshot_of(store)
    store.files.write(f"reports/{kept}.html", b"")
    store.files.write(f"reports/{'0' * 64}.html", b"")
    store.runs.write_report("dead", "chunk", 0, {})
    store.runs.write_report("slow", "chunk", 0, {})
    later(store, 2 * DAY)
    store.runs.write_report("slow", "chunk", 1, {})
    assert removed(store, DAY) == {"runs": 1, "reports": 1}
    assert store.runs.count_reports("slow", "chunk") == 2
    assert store.files.list_names("reports") == [f"{kept}.html"]


def test_what_dead_writers_leave_goes(store: Store, later: Callable[..., None]) -> None:
    left = ["blobs/ab/.landing-1", "refs/latest/.landing-2", ".landing-3", "probe/probe-4", "intents/a.json"]
    for path in [*left, "sweeps/b.json", "blobs/README", "notes.txt"]:
        store.files.write(path, b"{}")
    later(store, 2 * DAY)
    assert removed(store, DAY) == {"leftovers": 6}
    assert [file.path for file in store.files.iter_tree() if file.path != "store.json"] == ["notes.txt", "blobs/README"]


def test_a_store_with_blobs_and_no_root_at_all_is_left_as_it_is(store: Store, publish: Callable[..., str]) -> None:
    publish(store)
    blobs = sorted(store.files.list_names("blobs"))
    store.files.delete_folder("snapshots")
    store.files.delete_folder("refs")
    with pytest.raises(StoreError, match=r"no ref, snapshot, model or evaluation\. The listing may be wrong"):
        collect_garbage(store, 0.0)
    assert sorted(store.files.list_names("blobs")) == blobs


def test_a_folder_of_a_later_version_stops_it(store: Store) -> None:
    orphan = store.blobs.put_bytes(b"an adapter's weights")
    store.files.write("adapters/1.json", b"{}")
    with pytest.raises(StoreError, match="'adapters' that this version does not know, so nothing was deleted"):
        collect_garbage(store, 0.0)
    assert store.blobs.exists(orphan)


@pytest.mark.parametrize("data", [b"{", b'{"format": 2}'], ids=["damaged", "of a newer format"])
def test_a_manifest_that_cannot_be_read_stops_it(store: Store, data: bytes) -> None:
    orphan = store.blobs.put_bytes(b"perhaps it is needed")
    store.files.write(f"snapshots/{'0' * 64}.json", data)
    with pytest.raises(StoreError, match=r"snapshots/000.*cannot be used"):
        collect_garbage(store, 0.0)
    assert store.blobs.exists(orphan)


def test_a_current_snapshot_that_is_missing_stops_it(store: Store, publish: Callable[..., str]) -> None:
    tag(store, publish(store), "latest")
    store.files.delete_folder("snapshots")
    with pytest.raises(StoreError, match=r"ref latest .* which is missing: restore it .*; nothing was deleted"):
        collect_garbage(store, 0.0)
    assert len(list(store.files.iter_tree("blobs"))) == 7


def test_files_of_an_expired_snapshot_go_unless_another_needs_them(store: Store, publish: Callable[..., str]) -> None:
    tag(store, snapshot_of(store, store.blobs.put_bytes(b"of the first alone")), "latest")
    kept = publish(store)
    tag(store, kept, "latest")
    expire_store(store, AT_ONCE)
    assert removed(store) == {"blobs": 1}
    assert verify_version(store, kept) == []


def test_a_grace_below_nothing_is_refused(store: Store) -> None:
    with pytest.raises(UsageError, match="must be 0 or more"):
        collect_garbage(store, -1.0)
