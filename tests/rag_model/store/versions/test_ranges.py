"""Search of a snapshot in its store by verified ranges, with damage, failures and small caches."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rag_model.corpus import passages
from rag_model.corpus.passages import PassageWriter
from rag_model.corpus.records import Passage
from rag_model.errors import ResourceError, StoreError
from rag_model.index import search as index_search
from rag_model.index.lists.kind import ListKind
from rag_model.retrieve.dense import DenseRetriever
from rag_model.retrieve.factory import open_retriever
from rag_model.snapshots import range_digests
from rag_model.snapshots.range_digests import DigestTask, add_range_digests, list_range_tasks
from rag_model.store.recorded_tasks import compute_once
from rag_model.store.store import Store
from rag_model.store.versions import ranges
from rag_model.store.versions.manifest import RANGE_DIGESTS, RANGE_TABLE, Content, Manifest, PartEntry
from rag_model.store.versions.moves import tag
from rag_model.store.versions.snapshot import Snapshot
from tests.benchmarks.far_store import Far
from tests.fixtures.ranged_snapshot import DIM, WORDS, K, copy_to_far_store, list_questions, publish_ranged
from tests.fixtures.store_files import replace_value
from tests.fixtures.tiny_snapshot import copy_store


@pytest.fixture(scope="module")
def local_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Publish a snapshot to a local store."""
    folder = tmp_path_factory.mktemp("published")
    store = Store.open(str(folder / "store"), create=True)
    publish_ranged(store, folder)
    return store


def search_all(snapshot: Snapshot) -> dict[str, list[list[tuple[Passage, float]]]]:
    """Return the passages and scores of the hits by retriever."""
    vectors = np.random.default_rng(5).normal(size=(12, DIM)).astype(np.float32)
    results = {name: DenseRetriever(snapshot, None, name).search_vectors(vectors, K) for name in ("ivf", "rotated")}
    results["bm25"] = open_retriever(snapshot, "bm25").search(list_questions(), K)
    return {name: [[(hit.passage, hit.score) for hit in hits] for hits in lists] for name, lists in results.items()}


def test_search_by_ranges_of_a_real_s3_store_equals_search_of_the_files(
    local_store: Store, s3_store_url: str, cache: Path
) -> None:
    copy_store(local_store, s3_store_url)
    with Snapshot.open(str(local_store.url)) as snapshot, Snapshot.open(s3_store_url, by_ranges=True) as ranged:
        assert ranged.ranges is not None
        assert search_all(ranged) == search_all(snapshot)
        first_requests = ranged.ranges.cache.requests
        search_all(ranged)
        assert ranged.ranges.cache.requests == first_requests
        assert not list(cache.glob("??/*")), "no file was copied as a whole"
    with Snapshot.open(s3_store_url, by_ranges=True) as reopened:  # reads and verifies the cached ranges on the disk
        assert reopened.ranges is not None
        assert search_all(reopened) == search_all(Snapshot.open(local_store.url))
        assert reopened.ranges.cache.requests == 0


def get_latest_content(store: Store) -> Content:
    return store.snapshots.get(store.snapshots.resolve("latest")).content


def open_by_ranges(store: Store, name: str = "latest", cache_bytes: int | None = None) -> Snapshot:
    return Snapshot.open(store.url, name, by_ranges=True, cache_bytes=cache_bytes)


@pytest.fixture
def far_store(local_store: Store) -> Iterator[Store]:
    """Copy the store to a file system whose requests can be counted and can fail."""
    with copy_to_far_store(local_store) as store:
        yield store


def split_blob_path(store: Store, path: str) -> tuple[str, str]:
    content = get_latest_content(store)
    folder, _, name = f"ranged/{content.files[path].path}".rpartition("/")
    return folder, name


@pytest.mark.parametrize("path", ["index/bm25.postings", "passages/part-1.parquet", "index/ivf.faiss", RANGE_DIGESTS])
def test_damaged_range_is_named_and_refused(far_store: Store, path: str) -> None:
    folder, name = split_blob_path(far_store, path)
    body, size, modified = Far.folders[folder][name]
    assert isinstance(body, bytes)
    Far.folders[folder][name] = bytes(byte ^ 1 for byte in body), size, modified
    with open_by_ranges(far_store) as snapshot, pytest.raises(StoreError, match=f"of {path}.*read twice"):
        search_all(snapshot)
    Far.folders[folder][name] = body, size, modified
    with open_by_ranges(far_store) as snapshot:
        assert all(map(all, search_all(snapshot).values()))


def test_range_that_was_damaged_on_its_way_is_logged_and_read_again(
    far_store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, damaged = Far.cat_file, set[str]()

    def damage_first_read(self: Far, path: str, start: int | None = None, end: int | None = None) -> bytes:
        data = read(self, path, start, end)
        if start is None or path in damaged:
            return data
        damaged.add(path)
        return data[:-1] + bytes([data[-1] ^ 255])

    monkeypatch.setattr(Far, "cat_file", damage_first_read)
    with open_by_ranges(far_store) as snapshot:
        assert all(map(all, search_all(snapshot).values()))
    assert damaged
    messages = {record.getMessage() for record in caplog.records if record.name == "rag_model.ranges"}
    assert len(messages) == len(damaged)
    assert all(" do not match their digest and are read again" in message for message in messages)


def test_searches_on_a_full_disk_evict_the_ranges_of_others(
    far_store: Store, cache: Path, local_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, disk_bytes = os.pwrite, 1 << 19

    def write_to_small_disk(descriptor: int, data: memoryview, offset: int) -> int:
        files = cache.rglob("*.ranges")
        if sum(512 * path.stat().st_blocks for path in files) + len(data) > disk_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", write_to_small_disk)
    with open_by_ranges(far_store) as snapshot, Snapshot.open(local_store.url) as mapped:
        assert search_all(snapshot) == search_all(mapped)
        disk_bytes = 0  # another program uses the evicted space
        words = open_retriever(snapshot, "bm25")
        with pytest.raises(ResourceError, match=r"No space left on device.*free some space"):
            words.search([" ".join(WORDS)], 1000)
        disk_bytes = 1 << 30
        assert len(words.search([" ".join(WORDS)], 1000)[0]) == 1000


def test_cached_ranges_answer_while_the_store_is_away(
    far_store: Store, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_by_ranges(far_store) as snapshot:
        retriever = open_retriever(snapshot, "bm25")
        hits = retriever.search(list_questions()[:1], 1)
        monkeypatch.setattr(Far, "cat_file", partial(_raise, OSError("the network is down")))
        shutil.rmtree(cache)
        assert retriever.search(list_questions()[:1], 1) == hits
        with pytest.raises(StoreError, match="the network is down"):
            retriever.search([" ".join(WORDS)], 100)


def _raise(error: Exception, *arguments: object, **options: object) -> None:
    raise error


@pytest.mark.parametrize("cache_bytes", [1 << 16, 1 << 20])
def test_small_cache_stays_within_its_limit(
    far_store: Store, cache: Path, local_store: Store, cache_bytes: int
) -> None:
    with open_by_ranges(far_store, cache_bytes=cache_bytes) as snapshot:
        assert search_all(snapshot) == search_all(Snapshot.open(local_store.url))
        assert snapshot.ranges is not None
        pinned = 120_000 + (2 << 15)  # the headers of three indexes, in blocks
        stored = sum(512 * path.stat().st_blocks for path in cache.rglob("*.ranges"))
        assert stored <= cache_bytes + pinned


def test_query_needs_few_rounds_of_requests(far_store: Store) -> None:
    with open_by_ranges(far_store) as snapshot:
        words, vectors = open_retriever(snapshot, "bm25"), DenseRetriever(snapshot, None, "ivf")
        assert snapshot.ranges is not None
        cache = snapshot.ranges.cache
        rounds_before = cache.rounds
        words.search([" ".join(WORDS[-40:-20:4])], K)
        assert cache.rounds - rounds_before <= 3  # dictionary, lists, passages; long lists may need another one
        rounds_before = cache.rounds
        vectors.search_vectors(np.random.default_rng(6).normal(size=(1, DIM)).astype(np.float32), K)
        assert cache.rounds - rounds_before <= 3  # lists, vectors, passages


def test_reading_the_ids_of_hits_only_changes_no_result(
    far_store: Store, local_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_search, "_MIN_SAVED_BYTES", -(1 << 40))
    with Snapshot.open(str(local_store.url)) as snapshot, open_by_ranges(far_store) as ranged:
        assert search_all(ranged) == search_all(snapshot)


@pytest.mark.parametrize("has_cuts", [True, False])
def test_hits_need_one_round_whatever_the_size_of_the_footers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_cuts: bool
) -> None:
    """A file of 800 row groups has a footer several times as large as usual."""
    monkeypatch.setattr(passages, "ROW_GROUP", 1)
    if not has_cuts:  # as in snapshots of earlier versions
        monkeypatch.setattr(range_digests, "list_cuts", lambda *arguments: [])
    store = Store.open(str(tmp_path / "store"), create=True)
    texts = [f"text {number}" for number in range(800)]
    with PassageWriter(tmp_path / "rows.parquet") as writer:
        for number, text in enumerate(texts):
            writer.write(Passage(f"{number}", "1", 1, "", "", text, 0, 2, Passage.hash_of("", text)))
    files = {"passages/part-0.parquet": store.blobs.put_file(tmp_path / "rows.parquet")}
    content = Content({"kind": "passages"}, (PartEntry("part-0", 0, 0, len(texts)),), files, {}, {}, {}, "")
    tasks = list_range_tasks(content, min_bytes=1)
    content = add_range_digests(store, content, tasks, lambda batch, _: [compute_once(task, store) for task in batch])
    tag(store, store.snapshots.publish(Manifest(content)), "latest")
    with copy_to_far_store(store) as far_store, open_by_ranges(far_store) as snapshot:
        assert snapshot.passages([7])[0].text == "text 7"
        assert snapshot.ranges is not None
        assert snapshot.ranges.cache.rounds == 1
        assert (snapshot.ranges.cache.fetched_bytes < 100_000) == has_cuts
        monkeypatch.setattr(Snapshot, "_read_rows", partial(_raise, AssertionError("a passage is decoded again")))
        assert [passage.text for passage in snapshot.passages([7, 7])] == ["text 7"] * 2


def test_small_files_of_rows_get_digests_beside_a_large_file(far_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_digests, "_MIN_ROW_FILE_BYTES", 1)
    content = get_latest_content(far_store)
    is_row_file = {path: path.startswith(("passages/", "embeddings/")) for path in content.files}
    largest_bytes = max(content.files[path].size for path in list_range_tasks(content, min_bytes=1))
    tasks = list_range_tasks(content, largest_bytes)
    assert {path for path, is_row in is_row_file.items() if is_row} <= tasks.keys()
    assert all(is_row_file[path] or content.files[path].size == largest_bytes for path in tasks)
    assert not list_range_tasks(content, largest_bytes + 1)


def test_table_of_the_previous_version_is_read(
    local_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the previous version, blocks of lists had equal sizes."""
    content = get_latest_content(local_store)
    build_outline = ListKind.build_outline

    def build_previous_outline(kind: ListKind, path: Path) -> dict[str, object]:
        return {"pinned": (build_outline(kind, path) or {})["pinned"]}

    monkeypatch.setattr(ListKind, "build_outline", build_previous_outline)
    monkeypatch.setattr(DigestTask, "CODE", 3)
    tasks = list_range_tasks(content, min_bytes=1)
    content = add_range_digests(
        local_store, content, tasks, lambda batch, _: [compute_once(task, local_store) for task in batch]
    )
    assert json.loads(local_store.blobs.read(content.files[RANGE_TABLE]))["version"] == 1
    snapshot_id = local_store.snapshots.publish(Manifest(content))
    with copy_to_far_store(local_store) as far_store, open_by_ranges(far_store, snapshot_id) as ranged:
        assert search_all(ranged) == search_all(Snapshot.open(local_store.url))


ENTRY = ("files", "index/ivf.faiss")
PINNED = (*ENTRY, "outline", "pinned")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), 3, "have version 3: upgrade bookwheel, or pull it"),
        ((*ENTRY, "outline", "bounds"), "AAA=", "are damaged"),
        ((*ENTRY, "block"), 1 << 80, "digests of ranges of .* are damaged: pull it"),
        ((*ENTRY, "outline"), 0, "digests of ranges of .* are damaged: pull it"),
        (PINNED, [[0, 1 << 70]], "the outline of index/ivf.faiss .* ranges outside the file"),
        (PINNED, [[-100, 50]], "the outline of index/ivf.faiss .* ranges outside the file"),
        (PINNED, [[50, 2]], "the outline of index/ivf.faiss .* ranges outside the file"),
        (PINNED, [[1, 2, 3]], "the outline of index/ivf.faiss .* ranges outside the file"),
        (PINNED, 7, "the outline of index/ivf.faiss .* ranges outside the file"),
    ],
)
def test_table_of_a_later_version_or_with_invalid_values_is_refused(
    far_store: Store, path: tuple[str, ...], value: object, message: str
) -> None:
    content = get_latest_content(far_store)
    table = json.loads(far_store.blobs.read(content.files[RANGE_TABLE]))
    assert table["version"] == 2
    table_ref = far_store.blobs.put_bytes(json.dumps(replace_value(table, path, value)).encode())
    files = {**content.files, RANGE_TABLE: table_ref}
    snapshot_id = far_store.snapshots.publish(Manifest(replace(content, files=files)))
    with pytest.raises(StoreError, match=message), open_by_ranges(far_store, snapshot_id) as snapshot:
        search_all(snapshot)


def test_index_without_digests_is_copied(
    local_store: Store, far_store: Store, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "WHOLE_BYTES", 100)  # as if all files were large
    content = get_latest_content(local_store)
    files = {path: ref for path, ref in content.files.items() if not path.startswith("ranges/")}
    snapshot_id = far_store.snapshots.publish(Manifest(replace(content, files=files)))
    with open_by_ranges(far_store, snapshot_id) as snapshot:
        assert search_all(snapshot) == search_all(Snapshot.open(local_store.url))
        assert list(cache.glob("??/*"))
