"""Deltas reduce what a pull fetches, and a pull without usable deltas still succeeds."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np
import pyarrow as pa
import pytest

from rag_model.errors import InputError
from rag_model.index.files.layout import find_row_lists
from rag_model.store import BlobRef, Content, Manifest, PartEntry, Snapshot, Store
from rag_model.store.diff import diff_snapshots
from rag_model.store.objects.memo import Record
from rag_model.store.pulling import delta_files
from rag_model.store.pulling.deltas import DeltaStep, build_delta, find_delta, list_delta_steps
from rag_model.store.pulling.pull import pull
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.manifest import embeddings_in_space
from rag_model.store.versions.moves import tag
from tests.fixtures.store_files import check_pulled_files, publish_empty, write_articles

D = 8
OLD_TEXTS = {page: f"text of {page}" for page in range(1500)}
NEW_TEXTS = {**{page: text for page, text in OLD_TEXTS.items() if page != 300}, 700: "edited", 9999: "new"}
PASSAGES, GRAPH, LISTS = "passages/part-00000.parquet", "index/hnsw.faiss", "index/ivf.faiss"


def publish(store: Store, texts: dict[int, str], folder: Path, *parents: str) -> Snapshot:
    """Publish a snapshot with one part of passages, embeddings, a graph and inverted lists."""
    folder.mkdir()
    vectors = [np.random.default_rng([*text.encode()]).normal(size=D).astype(np.float16) for text in texts.values()]
    write_articles(folder / "part", {page: [text] for page, text in texts.items()})
    np.save(folder / "part.npy", np.array(vectors))
    index = faiss.IndexHNSWFlat(D, 16, faiss.METRIC_INNER_PRODUCT)
    index.add(np.array(vectors, np.float32))
    faiss.write_index(index, str(folder / "graph"))
    lists = faiss.index_factory(D, "IVF4,SQ8", faiss.METRIC_INNER_PRODUCT)
    lists.train(np.random.default_rng(1).normal(size=(1000, D)).astype(np.float32))
    lists.add(np.array(vectors, np.float32))
    faiss.write_index(lists, str(folder / "lists"))
    names = {PASSAGES: "part", "embeddings/part-00000.npy": "part.npy", GRAPH: "graph", LISTS: "lists"}
    files = {path: store.blobs.put_file(folder / name) for path, name in names.items()}
    factories = {"hnsw": "HNSW16", "ivf": "IVF4,SQ8"}
    entries = {name: {"factory": text, "metric": "ip", "n": len(texts), "d": D} for name, text in factories.items()}
    parts = (PartEntry("part-00000", 0, 99999, len(texts)),)
    content = Content({"kind": "wiki"}, parts, files, {}, embeddings_in_space({"digest": "one"}), entries)
    return Snapshot.from_store(store, store.snapshots.publish(Manifest(content, parents=parents)))


@dataclass(frozen=True, slots=True)
class SnapshotPair:
    """Two snapshots, the second of which was built after the first."""

    store: Store
    base: Snapshot
    target: Snapshot

    def list_all_steps(self) -> dict[str, list[DeltaStep]]:
        return list_delta_steps(self.base.manifest.content, self.target.manifest.content)

    def list_smallest_steps(self) -> dict[str, DeltaStep]:
        """Return the first delta of each file, which is the smallest."""
        return {path: steps[0] for path, steps in self.list_all_steps().items()}

    def build_deltas(self) -> dict[str, BlobRef]:
        """Build all deltas like a build, and return the first of each file."""
        for steps in self.list_all_steps().values():
            for step in steps:
                self.build_delta(step)
        return {path: self.build_delta(step).outputs["delta"] for path, step in self.list_smallest_steps().items()}

    def build_delta(self, step: DeltaStep) -> Record:
        pages = {(page, text): row for row, (page, text) in enumerate(OLD_TEXTS.items())}
        base_rows = np.array([pages.get(item, -1) for item in NEW_TEXTS.items()])
        return build_delta(self.store, step, lambda: base_rows, find_row_lists)

    def pull_both(self, dest: Path) -> int:
        """Pull both snapshots, verify the second, and return the bytes that it fetched."""
        pull(self.store, self.base.id, dest)
        report = pull(self.store, self.target.id, dest)
        check_pulled_files(self.target, report.path)
        assert report.fetched_bytes + report.reused_bytes == sum(
            r.size for r in self.target.manifest.content.files.values()
        )
        return report.fetched_bytes

    def get_size(self, path: str) -> int:
        return self.target.manifest.content.files[path].size


@pytest.fixture
def pair(store: Store, tmp_path: Path) -> SnapshotPair:
    old = publish(store, OLD_TEXTS, tmp_path / "old")
    return SnapshotPair(store, old, publish(store, NEW_TEXTS, tmp_path / "new", old.id))


def count_forecast_bytes(pair: SnapshotPair) -> int:
    return sum(category.fetched_bytes for category in diff_snapshots(pair.base, pair.target).pull.values())


def test_pull_fetches_deltas_instead_of_files(pair: SnapshotPair, tmp_path: Path) -> None:
    bytes_without_deltas = count_forecast_bytes(pair)
    assert pair.pull_both(tmp_path / "without") == bytes_without_deltas  # stores of earlier versions have no deltas
    deltas = pair.build_deltas()
    assert set(deltas) == {PASSAGES, GRAPH, LISTS}
    head = pair.list_smallest_steps()[GRAPH].head_bytes
    assert (pair.get_size(GRAPH) - head) % (4 * D) == 0
    full_bytes = pair.get_size(PASSAGES) + pair.get_size(LISTS) + head
    saved_bytes = full_bytes - sum(delta.size for delta in deltas.values())
    assert saved_bytes > 0.5 * full_bytes
    assert pair.pull_both(tmp_path / "with") == count_forecast_bytes(pair) == bytes_without_deltas - saved_bytes
    assert pair.build_deltas() == deltas  # from the memo


@pytest.mark.parametrize("problem", ["damaged", "missing", "of another file", "no base", "another library"])
def test_file_is_fetched_without_a_usable_delta(
    pair: SnapshotPair, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, bytes_without_deltas, deltas = pair.store, count_forecast_bytes(pair), pair.build_deltas()
    dest = tmp_path / "dest"
    for step in (step for steps in pair.list_all_steps().values() for step in steps):
        delta = pair.build_delta(step).outputs["delta"]
        delta_path = store.files.local_path(delta.path)
        if problem == "damaged":
            delta_path.write_bytes(delta_path.read_bytes()[:-1] + b"\1")
        elif problem == "missing":
            delta_path.unlink()
        elif problem == "of another file":
            _record_other_delta(store, step, next(iter({*deltas.values()} - {delta})))
    if problem == "no base":
        report = pull(store, pair.target.id, dest)
        assert report.fetched_bytes == sum(ref.size for ref in pair.target.manifest.content.files.values())
        return
    if problem == "another library":
        monkeypatch.setattr(pa, "__version__", "0.0.1")
        steps = pair.list_smallest_steps()
        assert find_delta(store, steps[PASSAGES]) is None
        full_bytes = steps[GRAPH].head_bytes + pair.get_size(LISTS)
        saved_bytes = full_bytes - deltas[GRAPH].size - deltas[LISTS].size
        assert pair.pull_both(dest) == bytes_without_deltas - saved_bytes
        return
    assert pair.pull_both(dest) >= bytes_without_deltas


def test_file_is_fetched_if_deriving_it_fails(pair: SnapshotPair, tmp_path: Path) -> None:
    def fail_on_full_disk(base: Snapshot, target: Snapshot, path: str, rows: object, terms: None, out: Path) -> bool:
        out.write_bytes(bytes(9))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    pull(pair.store, pair.base.id, tmp_path)
    report = pull(pair.store, pair.target.id, tmp_path, derive_index=fail_on_full_disk)
    check_pulled_files(pair.target, report.path)
    assert report.fetched_bytes == count_forecast_bytes(pair)


def _record_other_delta(store: Store, step: DeltaStep, delta: BlobRef) -> None:
    """Let the record of a step name another delta."""
    key = store.memo.compute_key(step.inputs())
    path = f"memo/delta/{key}.json"
    value = store.files.read_json(path)
    assert value is not None
    store.files.remove(path)
    store.memo.write_record("delta", key, {"delta": delta}, value["facts"], value["inputs"])


def test_verify_reports_damaged_delta(pair: SnapshotPair) -> None:
    deltas = pair.build_deltas()
    assert verify_version(pair.store, pair.target.id) == []
    pair.store.files.local_path(deltas[GRAPH].path).write_bytes(bytes(deltas[GRAPH].size))
    assert [(problem.path, problem.blob) for problem in verify_version(pair.store, pair.target.id)] == [
        (f"the delta of {GRAPH}", deltas[GRAPH].id)
    ]


def test_delta_is_kept_as_long_as_its_result(pair: SnapshotPair) -> None:
    store, deltas = pair.store, pair.build_deltas()
    tag(store, pair.target.id, "latest")
    store.files.remove(store.snapshots.manifest_path(pair.base.id))  # it expired, but pulled copies of it exist
    collect_garbage(store, 0.0)
    assert all(map(store.blobs.exists, deltas.values()))
    assert {path: find_delta(store, step) for path, step in pair.list_smallest_steps().items()} == deltas
    store.files.remove("refs/latest/00000001.json")
    store.files.remove(store.snapshots.manifest_path(pair.target.id))
    publish_empty(store)  # gc deletes nothing in a store without roots
    collect_garbage(store, 0.0)
    assert not any(map(store.blobs.exists, deltas.values()))
    assert store.files.list_names("memo/delta") == []


def test_delta_that_saves_little_is_not_stored(store: Store, tmp_path: Path) -> None:
    base = publish(store, OLD_TEXTS, tmp_path / "old")
    target = publish(store, {page: f"all {text}" for page, text in OLD_TEXTS.items()}, tmp_path / "new")
    (step,) = list_delta_steps(base.manifest.content, target.manifest.content)[PASSAGES]
    assert build_delta(store, step).outputs == {}
    assert find_delta(store, step) is None


@pytest.mark.parametrize("size", [0, 1, delta_files._PACK_BLOCK, delta_files._PACK_BLOCK + 9])
def test_packed_file_is_unpacked(size: int, tmp_path: Path) -> None:
    data = np.random.default_rng(1).integers(0, 4, size, np.uint8).tobytes()
    (tmp_path / "file").write_bytes(data + b"vectors")
    delta_files.pack_file(tmp_path / "file", size, tmp_path / "packed")
    delta_files.unpack_file(tmp_path / "packed", size, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == data


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:2], lambda data: b"\xff" * len(data)])
def test_damaged_packed_file_is_refused(damage: object, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(9999))
    delta_files.pack_file(tmp_path / "file", 9999, tmp_path / "packed")
    (tmp_path / "packed").write_bytes(damage((tmp_path / "packed").read_bytes()))  # type: ignore[operator]
    with pytest.raises(InputError, match="fetch the whole file"):
        delta_files.unpack_file(tmp_path / "packed", 9999, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_index_with_wrong_derived_bytes_is_rebuilt_from_its_delta(pair: SnapshotPair, tmp_path: Path) -> None:
    derived = []

    def derive(previous: Snapshot, target: Snapshot, path: str, previous_rows: object, terms: None, out: Path) -> bool:
        out.write_bytes(bytes(pair.get_size(path)))
        derived.append(path)
        return True

    pair.build_deltas()
    pull(pair.store, pair.base.id, tmp_path)
    report = pull(pair.store, pair.target.id, tmp_path, derive_index=derive)
    assert LISTS in derived
    assert report.fetched_bytes == count_forecast_bytes(pair)
