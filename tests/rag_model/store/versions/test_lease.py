"""A lease that is dropped ends, in whichever thread that happens."""

import asyncio
import gc

import pytest
from fsspec.asyn import get_loop

from rag_model.store import Content, Manifest, Store
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.versions.snapshot import SnapshotLease
from tests.fixtures.serving import until


def leased(store: Store) -> SnapshotLease:
    lease = SnapshotLease(store)
    lease.hold(store.snapshots.publish(Manifest(Content({}, (), {"index/a": store.blobs.put_bytes(b"a")}))))
    assert len(store.files.list_names("intents")) == 1
    return lease


@pytest.mark.parametrize("backend", ["local_store", "s3_store"])
def test_it_ends_where_it_is_dropped(backend: str, request: pytest.FixtureRequest) -> None:
    store: Store = request.getfixturevalue(backend)
    lease = leased(store)
    del lease
    gc.collect()
    assert store.files.list_names("intents") == []


def test_it_ends_though_it_is_dropped_in_the_thread_of_requests(s3_store: Store) -> None:
    """The garbage collector runs in any thread; that one cannot wait for a request."""
    leases = [leased(s3_store)]

    async def drop() -> None:
        leases.clear()
        gc.collect()

    asyncio.run_coroutine_threadsafe(drop(), get_loop()).result()
    until(lambda: s3_store.files.list_names("intents") == [])


def test_gc_keeps_what_a_reader_names_and_nothing_else(local_store: Store) -> None:
    lease = leased(local_store)
    (held,) = local_store.snapshots.list_ids()
    blob = local_store.snapshots.get(held).content.files["index/a"]
    other = Content({}, (), {"index/b": local_store.blobs.put_bytes(b"b")})
    local_store.snapshots.publish(Manifest(other))
    local_store.files.remove(local_store.snapshots.manifest_path(held))  # it expired
    orphan = local_store.blobs.put_bytes(b"of a page that was taken down")
    collect_garbage(local_store, 0.0)
    assert [local_store.blobs.exists(ref) for ref in (blob, orphan)] == [True, False]
    lease.close()
    collect_garbage(local_store, 0.0)
    assert not local_store.blobs.exists(blob)
