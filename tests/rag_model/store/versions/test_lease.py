"""A lease ends when its object is dropped, in any thread."""

import asyncio
import gc

import pytest
from fsspec.asyn import get_loop

from rag_model.store import Content, Manifest, Store
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.versions.snapshot import SnapshotLease
from tests.fixtures.serving import wait_until


def lease_snapshot(store: Store) -> SnapshotLease:
    lease = SnapshotLease(store)
    lease.hold(store.snapshots.publish(Manifest(Content({}, (), {"index/a": store.blobs.put_bytes(b"a")}))))
    assert len(store.files.list_names("intents")) == 1
    return lease


@pytest.mark.parametrize("backend", ["local_store", "s3_store"])
def test_lease_ends_with_its_object(backend: str, request: pytest.FixtureRequest) -> None:
    store: Store = request.getfixturevalue(backend)
    lease = lease_snapshot(store)
    del lease
    gc.collect()
    assert store.files.list_names("intents") == []


def test_lease_ends_if_it_is_dropped_in_the_request_thread(s3_store: Store) -> None:
    """Python's garbage collector runs in any thread, and the request thread cannot wait for a request."""
    leases = [lease_snapshot(s3_store)]

    async def drop() -> None:
        leases.clear()
        gc.collect()

    asyncio.run_coroutine_threadsafe(drop(), get_loop()).result()
    wait_until(lambda: s3_store.files.list_names("intents") == [])


def test_gc_keeps_only_files_of_leased_snapshots(local_store: Store) -> None:
    lease = lease_snapshot(local_store)
    (snapshot_id,) = local_store.snapshots.list_ids()
    blob = local_store.snapshots.get(snapshot_id).content.files["index/a"]
    other_content = Content({}, (), {"index/b": local_store.blobs.put_bytes(b"b")})
    local_store.snapshots.publish(Manifest(other_content))
    local_store.files.remove(local_store.snapshots.manifest_path(snapshot_id))  # the snapshot expired
    orphan = local_store.blobs.put_bytes(b"of a page that was taken down")
    collect_garbage(local_store, 0.0)
    assert [local_store.blobs.exists(ref) for ref in (blob, orphan)] == [True, False]
    lease.close()
    collect_garbage(local_store, 0.0)
    assert not local_store.blobs.exists(blob)
