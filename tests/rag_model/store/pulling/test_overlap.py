"""A later snapshot's files, put together of what an earlier one has and the ranges that are fetched."""

import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.corpus.passages import PassageWriter
from rag_model.corpus.records import Passage
from rag_model.digest import digest_file
from rag_model.errors import StoreError
from rag_model.store import Content, Manifest, PartEntry, Snapshot, Store
from rag_model.store.diff import diff_snapshots
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.pulling.overlap import PulledVectors, RowOverlap, RowPatch, VectorTable, find_vector_tables
from rag_model.store.pulling.pull import pull
from rag_model.store.versions.manifest import embeddings_in_space
from tests.fixtures.s3_proxy import FaultyServer
from tests.rag_model.store.test_faults import failures

D = 8
Month = dict[int, list[str]]  # the texts of an article's passages, by page
Publish = Callable[..., Snapshot]
LAST = {page: [f"{page} {place}" for place in range(page % 5)] for page in range(400)}
NOW = {
    **{page: texts for page, texts in LAST.items() if page not in {7, 208}},
    11: ["a new lead", *LAST[11]],
    112: [*LAST[112], "new"],
    213: [*LAST[213][:1], "edited", *LAST[213][2:]],
    399: ["new", *LAST[399]],
}
NEW_ROWS = 4


def vector(text: str, dtype: Any) -> Any:
    """Return one vector a text: what an encoder does."""
    return np.random.default_rng([*text.encode()]).normal(size=D).astype(np.float16).astype(dtype)


@pytest.fixture
def month(tmp_path: Path) -> Publish:
    """Publish a month: passages and embeddings of three parts, and indexes by name and factory."""

    def month(
        store: Store,
        articles: Month,
        *,
        dtype: Any = np.float16,
        starts: Sequence[int] = (0, 100, 200),
        indexes: dict[str, str] | None = None,
        space: str = "one",
        shift: float = 0.0,
    ) -> Snapshot:
        files, parts, all_vectors, scratch = {}, [], [], tmp_path / secrets.token_hex(4)
        scratch.mkdir()
        for number, (first, end) in enumerate(pairwise([*starts, 400])):
            name, vectors = f"part-{number:05d}", []
            with PassageWriter(scratch / name) as writer:
                for page in range(first, end):
                    for place, text in enumerate(articles.get(page, [])):
                        digest = Passage.hash_of(str(page), text)
                        writer.write(Passage(f"{page}:{place}", str(page), 1, str(page), "", text, 0, 1, digest))
                        vectors.append(vector(f"{page}{text}", dtype) + np.asarray(shift, dtype))
            np.save(scratch / f"{name}.npy", np.array(vectors, dtype))
            files[f"passages/{name}.parquet"] = store.blobs.put_file(scratch / name)
            files[f"embeddings/{name}.npy"] = store.blobs.put_file(scratch / f"{name}.npy")
            parts.append(PartEntry(name, first, end - 1, len(vectors)))
            all_vectors += vectors
        entries = {}
        for name, factory in (indexes or {}).items():
            index = faiss.index_factory(D, factory, faiss.METRIC_INNER_PRODUCT)
            index.train(np.array(all_vectors, np.float32))
            index.add(np.array(all_vectors, np.float32))
            faiss.write_index(index, str(scratch / name))
            files[f"index/{name}.faiss"] = store.blobs.put_file(scratch / name)
            entries[name] = {"factory": factory, "metric": "ip", "n": len(all_vectors), "d": D}
        content = Content({"kind": "wiki"}, tuple(parts), files, {}, embeddings_in_space({"digest": space}), entries)
        return Snapshot.from_store(store, store.snapshots.publish(Manifest(content)))

    return month


@pytest.fixture(autouse=True)
def _near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch no row for being near another: so few rows are all near."""
    monkeypatch.setattr("rag_model.store.pulling.overlap._MIN_GAP", 0)


def fetched(found: Any) -> dict[str, int]:
    return {kind: its.fetched_bytes for kind, its in found.pull.items()}


def check_whole(snapshot: Snapshot, folder: Path) -> None:
    for path, ref in snapshot.manifest.content.files.items():
        assert digest_file(folder / path) == ref.id, path


INDEXES = {"flat": "Flat", "hnsw": "HNSW4,Flat", "half": "HNSW4,SQfp16", "lists": "IVF4,Flat"}


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_vectors_of_passages_that_stayed_are_not_fetched_again(
    local_store: Store, month: Publish, dtype: Any, tmp_path: Path
) -> None:
    old, new = (month(local_store, articles, dtype=dtype, indexes=INDEXES) for articles in (LAST, NOW))
    told = diff_snapshots(old, new)
    pull(local_store, old.id, tmp_path / "dest")
    report = pull(local_store, new.id, tmp_path / "dest")
    check_whole(new, report.path)
    sizes, width = new.manifest.content.files, D * np.dtype(dtype).itemsize
    assert fetched(told) == {
        "passages": sum(ref.size for path, ref in sizes.items() if path.startswith("passages/")),
        "embeddings": 3 * 128 + NEW_ROWS * width,
        # The embeddings have the vectors of the new rows too, unless they have to be rounded.
        "index/flat": sizes["index/flat.faiss"].size - new.n * 4 * D,
        "index/hnsw": sizes["index/hnsw.faiss"].size - new.n * 4 * D,
        "index/half": sizes["index/half.faiss"].size - (new.n - NEW_ROWS * (width > 2 * D)) * 2 * D,
        "index/lists": sizes["index/lists.faiss"].size,  # it ends in a list, not in the vectors by row
    }
    assert report.fetched_bytes == sum(fetched(told).values())
    assert report.reused_bytes == sum(its.reused_bytes for its in told.pull.values())
    assert report.fetched_bytes + report.reused_bytes == sum(ref.size for ref in set(sizes.values()))


def test_an_index_has_the_vectors_where_no_embeddings_were_pulled(
    local_store: Store, month: Publish, tmp_path: Path
) -> None:
    indexes = {"half": "HNSW4,SQfp16", "hnsw": "HNSW4"}
    old, new = (month(local_store, articles, indexes=indexes) for articles in (LAST, NOW))

    def lean(path: str) -> bool:
        return not path.startswith("embeddings/") and path != "index/half.faiss"

    pull(local_store, old.id, tmp_path / "dest", select=lean)
    report = pull(local_store, new.id, tmp_path / "dest", select=lean)
    assert report.reused_bytes == (new.n - NEW_ROWS) * 4 * D
    more = pull(local_store, new.id, tmp_path / "dest")
    assert more.fetched_bytes == sum(
        ref.size for path, ref in new.manifest.content.files.items() if path.startswith(("embeddings/", "index/half"))
    )
    check_whole(new, more.path)


def test_another_cut_of_the_pages_changes_nothing(local_store: Store, month: Publish, tmp_path: Path) -> None:
    old = month(local_store, LAST)
    new = month(local_store, NOW, starts=(0, 30, 60, 150, 333))
    pull(local_store, old.id, tmp_path / "dest")
    report = pull(local_store, new.id, tmp_path / "dest")
    check_whole(new, report.path)
    assert report.reused_bytes == (new.n - NEW_ROWS) * 2 * D


def test_passages_of_a_part_that_did_not_change_are_not_read(local_store: Store, month: Publish) -> None:
    old, new = month(local_store, LAST), month(local_store, {**LAST, 112: NOW[112]})

    def kept() -> Any:
        overlap = RowOverlap.between(old, new)
        assert overlap is not None
        return overlap.find_previous_rows()

    joined = kept()
    assert (joined < 0).sum() == 1
    local_store.files.remove(new.manifest.content.files["passages/part-00002.parquet"].path)
    np.testing.assert_array_equal(kept(), joined)
    local_store.files.remove(new.manifest.content.files["passages/part-00001.parquet"].path)
    with pytest.raises(StoreError, match="missing"):
        kept()


@pytest.mark.parametrize("change", [{"space": "two"}, {"shift": 1.0}])
def test_vectors_that_are_others_are_fetched_whole(
    local_store: Store, month: Publish, change: dict[str, Any], tmp_path: Path
) -> None:
    old, new = month(local_store, LAST), month(local_store, NOW, indexes={"hnsw": "HNSW4"}, **change)
    pull(local_store, old.id, tmp_path / "dest")
    report = pull(local_store, new.id, tmp_path / "dest")
    check_whole(new, report.path)
    sizes = sum(ref.size for ref in set(new.manifest.content.files.values()))
    assert report.fetched_bytes == sizes - new.n * 4 * D  # the index has those of the new embeddings


def test_rows_of_another_type_are_fetched_and_an_index_of_the_same_ones_is_not(
    local_store: Store, month: Publish, tmp_path: Path
) -> None:
    old, new = month(local_store, LAST), month(local_store, NOW, indexes={"hnsw": "HNSW4"}, dtype=np.float64)
    pull(local_store, old.id, tmp_path / "dest")
    report, told = pull(local_store, new.id, tmp_path / "dest"), diff_snapshots(old, new)
    check_whole(new, report.path)
    assert report.reused_bytes == told.pull["index/hnsw"].reused_bytes == (new.n - NEW_ROWS) * 4 * D
    assert report.fetched_bytes == sum(fetched(told).values())


def test_what_lies_here_damaged_is_not_used(local_store: Store, month: Publish, tmp_path: Path) -> None:
    old, new = month(local_store, LAST), month(local_store, NOW)
    folder = pull(local_store, old.id, tmp_path / "dest").path
    file = folder / "embeddings/part-00001.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    report = pull(local_store, new.id, tmp_path / "dest")
    check_whole(new, report.path)
    assert report.reused_bytes == 0


def test_an_interrupted_patch_is_gone_on_with(local_store: Store, month: Publish, tmp_path: Path) -> None:
    old, new = (month(local_store, articles, indexes={"hnsw": "HNSW4"}) for articles in (LAST, NOW))
    dest, calls = tmp_path / "dest", 0
    pull(local_store, old.id, dest)

    class StoppedError(Exception):
        pass

    def stop(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise StoppedError

    with pytest.raises(StoppedError):
        pull(local_store, new.id, dest, on_progress=stop)
    assert Snapshot.from_folder(dest).id == old.id
    check_whole(new, pull(local_store, new.id, dest).path)


def test_a_missing_blob_is_named(local_store: Store, month: Publish, tmp_path: Path) -> None:
    old, new = month(local_store, LAST), month(local_store, NOW)
    pull(local_store, old.id, tmp_path / "dest")
    ref = new.manifest.content.files["embeddings/part-00002.npy"]
    local_store.files.remove(ref.path)
    with pytest.raises(StoreError, match=f"{ref.id} is missing"):
        pull(local_store, new.id, tmp_path / "dest")
    assert Snapshot.from_folder(tmp_path / "dest").id == old.id


def test_a_server_is_asked_for_new_rows_alone_on_a_bad_day_too(
    faulty_server: FaultyServer,
    s3_bucket: Callable[[str], AbstractContextManager[str]],
    month: Publish,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("rag_model.store.objects.s3._PAUSE_SECONDS", 0.001)
    with s3_bucket(faulty_server.url) as url:
        store = Store.open(url, create=True)
        old, new = (month(store, articles, indexes={"hnsw": "HNSW4"}) for articles in (LAST, NOW))
        pull(store, old.id, tmp_path / "dest")
        faulty_server.requests.clear()
        faulty_server.fault = lambda request: "break" if request.number % 3 == 0 else None
        report = pull(store, new.id, tmp_path / "dest")
        faulty_server.fault = lambda request: None
        check_whole(new, report.path)
    files = new.manifest.content.files
    assert report.reused_bytes == (new.n - NEW_ROWS) * 2 * D + new.n * 4 * D
    for path, rows in {"embeddings/part-00001.npy": 1, "index/hnsw.faiss": 0}.items():
        table, calls = find_vector_tables(new.manifest.content)[path], set[tuple[int, int]]()
        for request in faulty_server.requests:
            if request.method == "GET" and request.touches(files[path].path):
                first, last = request.headers["Range"].removeprefix("bytes=").split("-")
                calls.add((int(first), int(last) + 1))
        assert sum(end - first for first, end in calls) == table.head_bytes + rows * table.row_bytes, path


def test_a_full_disk_leaves_the_earlier_snapshot_and_the_next_pull_goes_on(
    local_store: Store, month: Publish, tmp_path: Path
) -> None:
    old, new = (month(local_store, articles, indexes={"hnsw": "HNSW4"}) for articles in (LAST, NOW))
    dest, seen = tmp_path / "dest", 0
    pull(local_store, old.id, dest)
    for error in failures(lambda: pull(local_store, new.id, dest)):
        seen += 1
        assert "disk is full" in str(error) or "No space left" in str(error)
        with Snapshot.from_folder(dest) as snapshot:
            assert snapshot.id == old.id
            check_whole(old, dest / "current")
    assert seen > 4
    assert Snapshot.from_folder(dest).id == new.id
    check_whole(new, dest / "current")


@pytest.mark.parametrize(
    "entry",
    [
        {"factory": "HNSW4", "d": 1 << 40},
        {"factory": "HNSW4", "d": -8},
        {"factory": "HNSW4", "d": "8"},
        {"factory": ["HNSW4"], "d": 8},
        {"factory": "HNSW4,PQ8", "d": 8},
        {},
    ],
)
def test_an_index_entry_that_fits_nothing_is_no_table(
    local_store: Store, month: Publish, entry: dict[str, Any]
) -> None:
    content = month(local_store, LAST, indexes={"hnsw": "HNSW4"}).manifest.content
    assert "index/hnsw.faiss" in find_vector_tables(content)
    assert "index/hnsw.faiss" not in find_vector_tables(replace(content, indexes={"hnsw": entry}))


def test_passages_of_another_number_than_the_manifest_says_are_no_overlap(local_store: Store, month: Publish) -> None:
    old, new = month(local_store, LAST), month(local_store, NOW)
    first, *others = new.manifest.content.parts
    content = replace(new.manifest.content, parts=(replace(first, rows=first.rows + 1), *others))
    size = 128 + 2 * D * (first.rows + 1)
    files = {**content.files, "embeddings/part-00000.npy": BlobRef("sha256:" + "0" * 64, size)}
    lying = Snapshot.from_manifest(local_store, Manifest(replace(content, files=files)))
    overlap = RowOverlap.between(old, lying)
    assert overlap is not None
    assert overlap.find_patch("embeddings/part-00000.npy") is None
    assert overlap.find_patch("embeddings/part-00001.npy") is not None
    assert overlap.find_patch("encoder/none") is None


@given(
    head=st.integers(0, 9_000_000),
    kept=st.lists(st.integers(-1, 9), min_size=1, max_size=60),
    start=st.floats(0, 1),
    near=st.integers(0, 40),
)
def test_a_patch_is_the_file_from_wherever_it_is_gone_on_with(
    head: int, kept: list[int], start: float, near: int
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("rag_model.store.pulling.overlap._MIN_GAP", near * 16)
        earlier = np.random.default_rng(0).integers(0, 256, (10, 16), np.uint8)
        rows = np.array(kept, np.int64)
        later = np.where(rows[:, None] < 0, np.uint8(7), earlier[rows])
        data = bytes(head) + later.tobytes()
        patch = RowPatch(VectorTable("embeddings", head, 16, (PartEntry("part-00000", 0, 0, len(kept)),)), rows)
        calls: list[tuple[int, int]] = []

        def read(first: int, end: int) -> bytes:
            calls.append((first, end))
            return data[first:end]

        vectors = PulledVectors([earlier[:4], earlier[4:]])
        assert b"".join(patch.iter_chunks(vectors, read, 0)) == data
        assert sum(end - first for first, end in calls) == patch.fetched_bytes
        begin = int(start * len(data))
        assert b"".join(patch.iter_chunks(vectors, read, begin)) == data[begin:]


def test_a_few_rows_between_two_that_are_fetched_are_fetched_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rag_model.store.pulling.overlap._MIN_GAP", 3 * 16)
    kept = np.array([-1, 0, 1, -1, 2, 3, 4, -1, *range(50)], np.int64)
    patch = RowPatch(VectorTable("embeddings", 128, 16, (PartEntry("part-00000", 0, 0, len(kept)),)), kept)
    assert [(piece.start, piece.end) for piece in patch.iter_pieces() if piece.rows is None] == [
        (0, 128),
        (128, 128 + 4 * 16),
        (128 + 7 * 16, 128 + 8 * 16),
    ]
