"""A snapshot returns passages, vectors and folders, and detects damage."""

import io
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.errors import StoreError
from rag_model.store import BlobRef, Content, Manifest, PartEntry, Snapshot, Store
from tests.fixtures.store_files import build_parts, publish_content, publish_empty, publish_parts

N = 2201
FIRST = "passages/part-00000.parquet"
SINGLE_ROW = "passages/part-00001.parquet"


@pytest.fixture
def snapshot(store: Store) -> Snapshot:
    return Snapshot.from_store(store, publish_parts(store))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(rows=st.lists(st.integers(0, N - 1), max_size=20))
def test_rows_are_returned_in_the_requested_order(snapshot: Snapshot, rows: list[int]) -> None:
    assert [passage.text for passage in snapshot.passages(rows)] == [f"text {row}" for row in rows]


def test_rows_may_be_numpy_integers(snapshot: Snapshot) -> None:
    rows = np.array([N - 1, 1500])
    assert [passage.text for passage in snapshot.passages(rows.tolist())] == [f"text {N - 1}", "text 1500"]
    assert snapshot.passages(rows)[1].text == "text 1500"  # type: ignore[arg-type]


@pytest.mark.parametrize("row", [-1, N])
def test_rows_outside_are_refused(snapshot: Snapshot, row: int) -> None:
    with pytest.raises(IndexError, match=f"outside the {N} passages"):
        snapshot.passages([0, row])


def test_empty_parts_take_no_rows(store: Store, tmp_path: Path) -> None:
    empty = tmp_path / "empty.parquet"
    pq.write_table(pq.read_table(io.BytesIO(build_parts()[SINGLE_ROW])).slice(0, 0), empty)
    blobs = {"empty": store.blobs.put_file(empty)}
    blobs["one"] = store.blobs.put_bytes(build_parts()[SINGLE_ROW])
    names = ["empty", "one", "empty", "one"]
    parts = tuple(PartEntry(f"p{i}", 0, 0, int(name == "one")) for i, name in enumerate(names))
    files = {f"passages/p{i}.parquet": blobs[name] for i, name in enumerate(names)}
    snapshot = Snapshot(
        Manifest(Content({}, parts, files)),
        lambda file: store.blobs.get_local_path(files[file]),
        lambda file: store.blobs.get_local_path(files[file]),
        "here",
    )
    assert [passage.id for passage in snapshot.passages([1, 0])] == ["1:1500", "1:1500"]


def test_vectors_are_memory_mapped(snapshot: Snapshot) -> None:
    vectors = snapshot.embeddings("part-00002")
    assert isinstance(vectors, np.memmap)
    assert vectors.shape == (700, 4)
    assert vectors[0].tolist() == [1501] * 4
    assert (snapshot.n, snapshot.dim, snapshot.space) == (N, 4, None)


def test_dimension_is_read_from_the_index_entry(memory_store: Store) -> None:
    content = Content({}, (), {}, indexes={"hnsw": {"factory": "HNSW32", "d": 384}})
    assert publish_content(memory_store, content).dim == 384


def test_snapshot_without_vectors_has_no_dimension(memory_store: Store) -> None:
    snapshot = publish_content(memory_store, Content({}, (), {}))
    with pytest.raises(StoreError, match="no vectors"):
        _ = snapshot.dim
    assert snapshot.passages([]) == []


def test_missing_files_are_reported(snapshot: Snapshot) -> None:
    with pytest.raises(StoreError, match=r"has no file index/hnsw.faiss"):
        snapshot.path("index/hnsw.faiss")
    with pytest.raises(StoreError, match="no files below encoder/passage/"):
        snapshot.folder("encoder/passage")


def test_model_folder_is_assembled(snapshot: Snapshot) -> None:
    folder = snapshot.folder("encoder/question")
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.json")) == [
        "config.json",
        "copy/config.json",
    ]
    assert snapshot.folder("encoder/question") == folder


def test_only_needed_row_groups_are_read(store: Store, snapshot: Snapshot) -> None:
    """After the second row group of an open file is overwritten, only rows of the first can be read."""
    assert snapshot.passages([0])[0].text == "text 0"
    path = store.blobs.get_local_path(snapshot.manifest.content.files[FIRST])
    group = pq.ParquetFile(path).metadata.row_group(1)
    with path.open("r+b") as file:
        for i in range(group.num_columns):
            file.seek(group.column(i).dictionary_page_offset or group.column(i).data_page_offset)
            file.write(b"\xff" * group.column(i).total_compressed_size)
    assert snapshot.passages([1023])[0].text == "text 1023"
    with pytest.raises(StoreError, match=r"cannot read .* part-00000 in .* run `verify`"):
        snapshot.passages([1024])


def test_part_with_a_wrong_row_count_is_refused(store: Store) -> None:
    files = {
        FIRST: store.blobs.put_bytes(build_parts()[SINGLE_ROW]),
        "embeddings/part-00000.npy": store.blobs.put_bytes(build_parts()["embeddings/part-00001.npy"]),
    }
    snapshot = publish_content(store, Content({}, (PartEntry("part-00000", 0, 0, 2),), files))
    with pytest.raises(StoreError, match="damaged: 1 rows"):
        snapshot.passages([0])
    with pytest.raises(StoreError, match=r"shape \(1, 4\) for 2 passages"):
        snapshot.embeddings("part-00000")


@pytest.mark.parametrize("file_type", ["object array", "no array"])
def test_pickles_are_never_read(store: Store, tmp_path: Path, file_type: str) -> None:
    file = tmp_path / "x.npy"
    if file_type == "object array":
        np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    else:
        file.write_bytes(b"\x80\x04N.")
    files = {"embeddings/part-00000.npy": store.blobs.put_file(file)}
    snapshot = publish_content(store, Content({}, (PartEntry("part-00000", 0, 0, 1),), files))
    with pytest.raises(StoreError, match="damaged"):
        snapshot.embeddings("part-00000")


def test_manifest_with_another_id_is_refused(store: Store, snapshot: Snapshot) -> None:
    data = store.files.read(f"snapshots/{snapshot.id}.json") or b""
    store.files.write(f"snapshots/{'0' * 64}.json", data)
    with pytest.raises(StoreError, match="damaged: it contains snapshot"):
        store.snapshots.get("0" * 64)


def test_ambiguous_prefixes_are_refused(memory_store: Store) -> None:
    prefixes = set()
    for i in range(2000):  # 2,000 ids share a prefix of four digits with probability 1 - e^-30
        prefixes.add(publish_empty(memory_store, f"{i}")[:4])
        if len(prefixes) <= i:
            break
    shared_prefix = next(p for p in prefixes if sum(s.startswith(p) for s in memory_store.snapshots.list_ids()) > 1)
    with pytest.raises(StoreError, match="a prefix of 2 snapshots"):
        memory_store.snapshots.resolve(shared_prefix)


def test_files_of_many_parts_are_closed(store: Store) -> None:
    blob: BlobRef = store.blobs.put_bytes(build_parts()[SINGLE_ROW])
    parts = tuple(PartEntry(f"p{i}", 0, 0, 1) for i in range(100))
    content = Content({}, parts, {f"passages/{part.name}.parquet": blob for part in parts})
    with publish_content(store, content) as snapshot:
        open_files = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(2):
            assert {passage.id for passage in snapshot.passages(range(100))} == {"1:1500"}
        assert len(list(Path("/proc/self/fd").iterdir())) - open_files < 150  # two files for each part


def test_flipped_bit_is_detected(any_store: Store, cache: Path) -> None:
    snapshot_id = publish_parts(any_store)
    ref = any_store.snapshots.get(snapshot_id).content.files["embeddings/part-00000.npy"]
    data = any_store.blobs.read(ref)
    assert Snapshot.from_store(any_store, snapshot_id).embeddings("part-00000").shape == (1500, 4)
    any_store.files.write(ref.path, data[:-1] + bytes([data[-1] ^ 1]))
    if not any_store.files.is_local:  # the intact copy in the cache is used until it is damaged as well
        (copy,) = cache.glob(f"??/{ref.id.partition(':')[2]}")
        assert Snapshot.from_store(any_store, snapshot_id).embeddings("part-00000")[0, 0] == 0
        copy.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(StoreError, match=f"{ref.id} .* is damaged"):
        Snapshot.from_store(any_store, snapshot_id).embeddings("part-00000")
    any_store.files.write(ref.path, data)
    assert Snapshot.from_store(any_store, snapshot_id).embeddings("part-00000").shape == (1500, 4)


def test_flipped_bit_in_a_range_is_detected(memory_store: Store) -> None:
    snapshot_id = publish_parts(memory_store)
    ref = memory_store.snapshots.get(snapshot_id).content.files[FIRST]
    data = bytearray(memory_store.blobs.read(ref))
    data[len(data) // 3] ^= 1
    memory_store.files.write(ref.path, bytes(data))
    with Snapshot.from_store(memory_store, snapshot_id) as snapshot, pytest.raises(StoreError, match="cannot read"):
        snapshot.passages([0, 500, 1499])
