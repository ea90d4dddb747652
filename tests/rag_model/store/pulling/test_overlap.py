"""The files of a snapshot are assembled from an earlier snapshot's files and fetched ranges."""

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.errors import StoreError
from rag_model.store import Content, Manifest, PartEntry, Snapshot, Store
from rag_model.store.diff import diff_snapshots
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.pulling.overlap import (
    PageRanges,
    PulledVectors,
    RowOverlap,
    RowPatch,
    VectorTable,
    find_vector_tables,
)
from rag_model.store.pulling.pull import pull
from rag_model.store.versions.manifest import embeddings_in_space
from tests.fixtures.s3_proxy import FaultyServer
from tests.fixtures.store_files import check_pulled_files, publish_content, write_articles
from tests.fixtures.work_counters import count_lines
from tests.rag_model.store.test_faults import iter_disk_full_errors

D = 8
Articles = dict[int, list[str]]  # the texts of an article's passages, by page
OLD_TEXTS = {page: [f"{page} {position}" for position in range(page % 5)] for page in range(400)}
NEW_TEXTS = {
    **{page: texts for page, texts in OLD_TEXTS.items() if page not in {7, 208}},
    11: ["a new lead", *OLD_TEXTS[11]],
    112: [*OLD_TEXTS[112], "new"],
    213: [*OLD_TEXTS[213][:1], "edited", *OLD_TEXTS[213][2:]],
    399: ["new", *OLD_TEXTS[399]],
}
NEW_ROWS = 4


def make_vector(text: str, dtype: Any) -> Any:
    """Return a vector that depends on the text only, like an encoder."""
    return np.random.default_rng([*text.encode()]).normal(size=D).astype(np.float16).astype(dtype)


def publish(
    store: Store,
    articles: Articles,
    *,
    dtype: Any = np.float16,
    starts: Sequence[int] = (0, 100, 200),
    indexes: dict[str, str] | None = None,
    space: str = "one",
    shift: float = 0.0,
) -> Snapshot:
    """Publish a snapshot with passages and embeddings in three parts, and indexes by name and factory."""
    files, parts, all_vectors, entries = {}, [], [], {}
    with TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        for number, (first, end) in enumerate(pairwise([*starts, 400])):
            name, part_articles = f"part-{number:05d}", {page: articles.get(page, []) for page in range(first, end)}
            texts = [f"{page}{text}" for page, texts in part_articles.items() for text in texts]
            vectors = [make_vector(text, dtype) + np.asarray(shift, dtype) for text in texts]
            parts.append(PartEntry(name, first, end - 1, write_articles(folder / name, part_articles)))
            np.save(folder / f"{name}.npy", np.array(vectors, dtype))
            files[f"passages/{name}.parquet"] = store.blobs.put_file(folder / name)
            files[f"embeddings/{name}.npy"] = store.blobs.put_file(folder / f"{name}.npy")
            all_vectors += vectors
        for name, factory in (indexes or {}).items():
            index = faiss.index_factory(D, factory, faiss.METRIC_INNER_PRODUCT)
            index.train(np.array(all_vectors, np.float32))
            index.add(np.array(all_vectors, np.float32))
            faiss.write_index(index, str(folder / name))
            files[f"index/{name}.faiss"] = store.blobs.put_file(folder / name)
            entries[name] = {"factory": factory, "metric": "ip", "n": len(all_vectors), "d": D}
    spaces = embeddings_in_space({"digest": space})
    return publish_content(store, Content({"kind": "wiki"}, tuple(parts), files, {}, spaces, entries))


@pytest.fixture(autouse=True)
def fetch_no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch no row because of a short gap; in these small files all gaps are short."""
    monkeypatch.setattr("rag_model.store.pulling.overlap._MIN_GAP_BYTES", 0)


def get_fetched_bytes(diff: Any) -> dict[str, int]:
    return {kind: category.fetched_bytes for kind, category in diff.pull.items()}


GRAPH = {"hnsw": "HNSW4"}
INDEXES = {"flat": "Flat", "hnsw": "HNSW4,Flat", "half": "HNSW4,SQfp16", "lists": "IVF4,Flat"}


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_vectors_of_unchanged_passages_are_not_fetched(store: Store, dtype: Any, dest: Path) -> None:
    first, second = (publish(store, texts, dtype=dtype, indexes=INDEXES) for texts in (OLD_TEXTS, NEW_TEXTS))
    diff = diff_snapshots(first, second)
    pull(store, first.id, dest)
    report = pull(store, second.id, dest)
    check_pulled_files(second, report.path)
    sizes, width = second.manifest.content.files, D * np.dtype(dtype).itemsize
    assert get_fetched_bytes(diff) == {
        "passages": sum(ref.size for path, ref in sizes.items() if path.startswith("passages/")),
        "embeddings": 3 * 128 + NEW_ROWS * width,
        # The vectors of new rows are copied from the embeddings, unless they have to be rounded.
        "index/flat": sizes["index/flat.faiss"].size - second.n * 4 * D,
        "index/hnsw": sizes["index/hnsw.faiss"].size - second.n * 4 * D,
        "index/half": sizes["index/half.faiss"].size - (second.n - NEW_ROWS * (width > 2 * D)) * 2 * D,
        "index/lists": sizes["index/lists.faiss"].size,  # its vectors are not in the order of the rows
    }
    assert report.fetched_bytes == sum(get_fetched_bytes(diff).values())
    assert report.reused_bytes == sum(category.reused_bytes for category in diff.pull.values())
    assert report.fetched_bytes + report.reused_bytes == sum(ref.size for ref in set(sizes.values()))


def test_vectors_are_copied_from_an_index_without_embeddings(store: Store, dest: Path) -> None:
    indexes = {"half": "HNSW4,SQfp16", "hnsw": "HNSW4"}
    first, second = (publish(store, articles, indexes=indexes) for articles in (OLD_TEXTS, NEW_TEXTS))

    def is_selected(path: str) -> bool:
        return not path.startswith("embeddings/") and path != "index/half.faiss"

    pull(store, first.id, dest, select=is_selected)
    report = pull(store, second.id, dest, select=is_selected)
    assert report.reused_bytes == (second.n - NEW_ROWS) * 4 * D
    full_report = pull(store, second.id, dest)
    assert full_report.fetched_bytes == sum(
        ref.size for path, ref in second.manifest.content.files.items() if path.startswith(("embeddings", "index/half"))
    )
    check_pulled_files(second, full_report.path)


def test_other_part_boundaries_fetch_no_more(store: Store, dest: Path) -> None:
    first = publish(store, OLD_TEXTS)
    second = publish(store, NEW_TEXTS, starts=(0, 30, 60, 150, 333))
    pull(store, first.id, dest)
    report = pull(store, second.id, dest)
    check_pulled_files(second, report.path)
    assert report.reused_bytes == (second.n - NEW_ROWS) * 2 * D


def test_passages_of_an_unchanged_part_are_not_read(store: Store) -> None:
    first, second = publish(store, OLD_TEXTS), publish(store, {**OLD_TEXTS, 112: NEW_TEXTS[112]})

    def find_previous_rows() -> Any:
        overlap = RowOverlap.between(first, second)
        assert overlap is not None
        return overlap.find_previous_rows()

    previous_rows = find_previous_rows()
    assert (previous_rows < 0).sum() == 1
    store.files.remove(second.manifest.content.files["passages/part-00002.parquet"].path)
    np.testing.assert_array_equal(find_previous_rows(), previous_rows)
    store.files.remove(second.manifest.content.files["passages/part-00001.parquet"].path)
    with pytest.raises(StoreError, match="missing"):
        find_previous_rows()


@pytest.mark.parametrize("change", [{"space": "two"}, {"shift": 1.0}])
def test_vectors_of_another_encoder_are_fetched(store: Store, change: dict[str, Any], dest: Path) -> None:
    first = publish(store, OLD_TEXTS)
    second = publish(store, NEW_TEXTS, indexes=GRAPH, **change)
    pull(store, first.id, dest)
    report = pull(store, second.id, dest)
    check_pulled_files(second, report.path)
    sizes = sum(ref.size for ref in set(second.manifest.content.files.values()))
    assert report.fetched_bytes == sizes - second.n * 4 * D  # the index copies its vectors from the new embeddings


def test_embeddings_of_another_type_are_fetched_but_index_vectors_are_not(store: Store, dest: Path) -> None:
    first = publish(store, OLD_TEXTS)
    second = publish(store, NEW_TEXTS, indexes=GRAPH, dtype=np.float64)
    pull(store, first.id, dest)
    report, diff = pull(store, second.id, dest), diff_snapshots(first, second)
    check_pulled_files(second, report.path)
    assert report.reused_bytes == diff.pull["index/hnsw"].reused_bytes == (second.n - NEW_ROWS) * 4 * D
    assert report.fetched_bytes == sum(get_fetched_bytes(diff).values())


def test_damaged_local_file_is_not_used(store: Store, dest: Path) -> None:
    first, second = publish(store, OLD_TEXTS), publish(store, NEW_TEXTS)
    folder = pull(store, first.id, dest).path
    file = folder / "embeddings/part-00001.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    report = pull(store, second.id, dest)
    check_pulled_files(second, report.path)
    assert report.reused_bytes == 0


def test_interrupted_patch_is_resumed(store: Store, dest: Path) -> None:
    first, second = (publish(store, texts, indexes=GRAPH) for texts in (OLD_TEXTS, NEW_TEXTS))
    calls = 0
    pull(store, first.id, dest)

    class StoppedError(Exception):
        pass

    def stop(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise StoppedError

    with pytest.raises(StoppedError):
        pull(store, second.id, dest, on_progress=stop)
    assert Snapshot.from_folder(dest).id == first.id
    check_pulled_files(second, pull(store, second.id, dest).path)


def test_missing_blob_is_reported(store: Store, dest: Path) -> None:
    first, second = publish(store, OLD_TEXTS), publish(store, NEW_TEXTS)
    pull(store, first.id, dest)
    ref = second.manifest.content.files["embeddings/part-00002.npy"]
    store.files.remove(ref.path)
    with pytest.raises(StoreError, match=f"{ref.id} is missing"):
        pull(store, second.id, dest)
    assert Snapshot.from_folder(dest).id == first.id


def test_only_new_rows_are_requested_despite_faults(
    faulty_server: FaultyServer,
    s3_bucket: Callable[[str], AbstractContextManager[str]],
    monkeypatch: pytest.MonkeyPatch,
    dest: Path,
) -> None:
    monkeypatch.setattr("rag_model.store.objects.buckets._PAUSE_SECONDS", 0.001)
    with s3_bucket(faulty_server.url) as url:
        store = Store.open(url, create=True)
        old_snapshot, new_snapshot = (publish(store, texts, indexes=GRAPH) for texts in (OLD_TEXTS, NEW_TEXTS))
        pull(store, old_snapshot.id, dest)
        faulty_server.requests.clear()
        faulty_server.fault = lambda request: "break" if request.number % 3 == 0 else None
        report = pull(store, new_snapshot.id, dest)
        faulty_server.fault = lambda request: None
        check_pulled_files(new_snapshot, report.path)
    files = new_snapshot.manifest.content.files
    assert report.reused_bytes == (new_snapshot.n - NEW_ROWS) * 2 * D + new_snapshot.n * 4 * D
    for path, rows in {"embeddings/part-00001.npy": 1, "index/hnsw.faiss": 0}.items():
        table, ranges = find_vector_tables(new_snapshot.manifest.content)[path], set[tuple[int, int]]()
        for request in faulty_server.requests:
            if request.method == "GET" and files[path].path in request.path:
                first, last = request.headers["Range"].removeprefix("bytes=").split("-")
                ranges.add((int(first), int(last) + 1))
        assert sum(end - first for first, end in ranges) == table.head_bytes + rows * table.row_bytes, path


def test_full_disk_keeps_the_earlier_snapshot_and_the_next_pull_resumes(store: Store, dest: Path) -> None:
    first, second = (publish(store, texts, indexes=GRAPH) for texts in (OLD_TEXTS, NEW_TEXTS))
    pull(store, first.id, dest)
    errors = 0
    for error in iter_disk_full_errors(lambda: pull(store, second.id, dest)):
        errors += 1
        assert "disk is full" in str(error) or "No space left" in str(error)
        with Snapshot.from_folder(dest) as snapshot:
            assert snapshot.id == first.id
            check_pulled_files(first, dest / "current")
    assert errors > 4
    assert Snapshot.from_folder(dest).id == second.id
    check_pulled_files(second, dest / "current")


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
def test_invalid_index_entry_has_no_vector_table(store: Store, entry: dict[str, Any]) -> None:
    content = publish(store, OLD_TEXTS, indexes=GRAPH).manifest.content
    assert "index/hnsw.faiss" in find_vector_tables(content)
    assert "index/hnsw.faiss" not in find_vector_tables(replace(content, indexes={"hnsw": entry}))


def test_part_with_a_wrong_row_count_has_no_patch(store: Store) -> None:
    old_snapshot, new_snapshot = publish(store, OLD_TEXTS), publish(store, NEW_TEXTS)
    first, *other_parts = new_snapshot.manifest.content.parts
    content = replace(new_snapshot.manifest.content, parts=(replace(first, rows=first.rows + 1), *other_parts))
    size = 128 + 2 * D * (first.rows + 1)
    files = {**content.files, "embeddings/part-00000.npy": BlobRef("sha256:" + "0" * 64, size)}
    inconsistent = Snapshot.from_manifest(store, Manifest(replace(content, files=files)))
    overlap = RowOverlap.between(old_snapshot, inconsistent)
    assert overlap is not None
    assert overlap.find_patch("embeddings/part-00000.npy") is None
    assert overlap.find_patch("embeddings/part-00001.npy") is not None
    assert overlap.find_patch("encoder/none") is None


@given(
    head=st.integers(0, 9_000_000),
    previous_rows=st.lists(st.integers(-1, 9), min_size=1, max_size=60),
    start=st.floats(0, 1),
    min_gap_rows=st.integers(0, 40),
)
def test_patch_gives_the_file_from_any_offset(
    head: int, previous_rows: list[int], start: float, min_gap_rows: int
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("rag_model.store.pulling.overlap._MIN_GAP_BYTES", min_gap_rows * 16)
        old_vectors = np.random.default_rng(0).integers(0, 256, (10, 16), np.uint8)
        rows = np.array(previous_rows, np.int64)
        new_vectors = np.where(rows[:, None] < 0, np.uint8(7), old_vectors[rows])
        data = bytes(head) + new_vectors.tobytes()
        patch = RowPatch(VectorTable("embeddings", head, 16, (PartEntry("part-00000", 0, 0, len(rows)),)), rows)
        calls: list[tuple[int, int]] = []

        def read(first: int, end: int) -> bytes:
            calls.append((first, end))
            return data[first:end]

        vectors = PulledVectors([old_vectors[:4], old_vectors[4:]])
        assert b"".join(patch.iter_chunks(vectors, read, 0)) == data
        assert sum(end - first for first, end in calls) == patch.fetched_bytes
        begin = int(start * len(data))
        assert b"".join(patch.iter_chunks(vectors, read, begin)) == data[begin:]


def test_short_gap_between_fetched_rows_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rag_model.store.pulling.overlap._MIN_GAP_BYTES", 3 * 16)
    rows = np.array([-1, 0, 1, -1, 2, 3, 4, -1, *range(50)], np.int64)
    patch = RowPatch(VectorTable("embeddings", 128, 16, (PartEntry("part-00000", 0, 0, len(rows)),)), rows)
    assert [(piece.start, piece.end) for piece in patch.iter_pieces() if piece.rows is None] == [
        (0, 128),
        (128, 128 + 4 * 16),
        (128 + 7 * 16, 128 + 8 * 16),
    ]


def make_parts(bounds: list[tuple[int, int]]) -> list[PartEntry]:
    return [PartEntry(f"part-{number:05d}", first, last, 1) for number, (first, last) in enumerate(bounds)]


@pytest.mark.parametrize("seed", range(5))
def test_parts_agree_with_a_linear_search(seed: int) -> None:
    rng = random.Random(seed)
    starts = [rng.randint(-50, 200) for _ in range(40)]
    parts = make_parts([(start, start + rng.randint(0, 30)) for start in (sorted(starts) if seed else starts)])
    ranges = PageRanges(parts)
    for first in range(-60, 240):
        last = first + rng.randint(0, 20)
        expected = [(n, part) for n, part in enumerate(parts) if part.first_page <= last and first <= part.last_page]
        assert list(ranges.find_overlapping(first, last)) == expected


def test_no_parts_have_no_pages() -> None:
    assert list(PageRanges([]).find_overlapping(0, 9)) == []


def test_work_does_not_grow_with_the_number_of_parts() -> None:
    few, many = (PageRanges(make_parts([(10 * n, 10 * n + 9) for n in range(count)])) for count in (100, 1000))
    n_lines = count_lines(lambda: list(few.find_overlapping(505, 525)))
    assert n_lines == count_lines(lambda: list(many.find_overlapping(505, 525)))
