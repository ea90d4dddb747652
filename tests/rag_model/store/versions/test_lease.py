"""A lease ends when its object is dropped, in any thread."""

import asyncio
import gc

from fsspec.asyn import get_loop

from rag_model.store import Store
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.versions.snapshot import SnapshotLease
from tests.fixtures.serving import wait_until
from tests.fixtures.store_files import publish_blobs


def lease_snapshot(store: Store) -> SnapshotLease:
    lease = SnapshotLease(store)
    lease.hold(publish_blobs(store, store.blobs.put_bytes(b"a")))
    assert len(store.files.list_names("intents")) == 1
    return lease


def test_lease_ends_with_its_object(any_store: Store) -> None:
    lease = lease_snapshot(any_store)
    del lease
    gc.collect()
    assert any_store.files.list_names("intents") == []


def test_lease_ends_if_it_is_dropped_in_the_request_thread(s3_store: Store) -> None:
    """Python's garbage collector runs in any thread, and the request thread cannot wait for a request."""
    leases = [lease_snapshot(s3_store)]

    async def drop() -> None:
        leases.clear()
        gc.collect()

    asyncio.run_coroutine_threadsafe(drop(), get_loop()).result()
    wait_until(lambda: s3_store.files.list_names("intents") == [])


def test_gc_keeps_only_files_of_leased_snapshots(store: Store) -> None:
    lease = lease_snapshot(store)
    (snapshot_id,) = store.snapshots.list_ids()
    (blob,) = store.snapshots.get(snapshot_id).content.files.values()
    publish_blobs(store, store.blobs.put_bytes(b"b"))
    store.files.remove(store.snapshots.manifest_path(snapshot_id))  # the snapshot expired
    orphan = store.blobs.put_bytes(b"of a page that was taken down")
    collect_garbage(store, 0.0)
    assert [store.blobs.exists(ref) for ref in (blob, orphan)] == [True, False]
    lease.close()
    collect_garbage(store, 0.0)
    assert not store.blobs.exists(blob)
