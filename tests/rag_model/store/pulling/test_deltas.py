"""Deltas beside the files of a store: what a pull fetches with them, and that nothing depends on them."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np
import pyarrow as pa
import pytest

from rag_model.corpus.passages import PassageWriter
from rag_model.corpus.records import Passage
from rag_model.digest import digest_file
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

D = 8
LAST = {page: f"text of {page}" for page in range(1500)}
NOW = {**{page: text for page, text in LAST.items() if page != 300}, 700: "edited", 9999: "new"}
PASSAGES, GRAPH, LISTS = "passages/part-00000.parquet", "index/hnsw.faiss", "index/ivf.faiss"


def publish(store: Store, texts: dict[int, str], folder: Path, *parents: str) -> Snapshot:
    """Publish passages in a part, with embeddings and a graph."""
    folder.mkdir()
    vectors = [np.random.default_rng([*text.encode()]).normal(size=D).astype(np.float16) for text in texts.values()]
    with PassageWriter(folder / "part") as writer:
        for page, text in texts.items():
            digest = Passage.hash_of(str(page), text)
            writer.write(Passage(f"{page}:0", str(page), 1, str(page), "", text, 0, 1, digest))
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
    entries = {name: {"factory": of, "metric": "ip", "n": len(texts), "d": D} for name, of in factories.items()}
    parts = (PartEntry("part-00000", 0, 99999, len(texts)),)
    content = Content({"kind": "wiki"}, parts, files, {}, embeddings_in_space({"digest": "one"}), entries)
    return Snapshot.from_store(store, store.snapshots.publish(Manifest(content, parents=parents)))


@dataclass(frozen=True, slots=True)
class Months:
    """Two snapshots, the second of which was built after the first."""

    store: Store
    old: Snapshot
    new: Snapshot

    def all_steps(self) -> dict[str, list[DeltaStep]]:
        return list_delta_steps(self.old.manifest.content, self.new.manifest.content)

    def steps(self) -> dict[str, DeltaStep]:
        """The first delta of each file, which is the smallest."""
        return {path: steps[0] for path, steps in self.all_steps().items()}

    def offer(self) -> dict[str, BlobRef]:
        """Make the deltas, as a build does; return the first of each file."""
        for steps in self.all_steps().values():
            for step in steps:
                self.build(step)
        return {path: self.build(step).outputs["delta"] for path, step in self.steps().items()}

    def build(self, step: DeltaStep) -> Record:
        pages = {(page, text): row for row, (page, text) in enumerate(LAST.items())}
        base_rows = np.array([pages.get(item, -1) for item in NOW.items()])
        return build_delta(self.store, step, lambda: base_rows, find_row_lists)

    def pulled(self, dest: Path) -> int:
        """Pull both; return the bytes fetched for the second, which is whole."""
        pull(self.store, self.old.id, dest)
        report = pull(self.store, self.new.id, dest)
        for path, ref in self.new.manifest.content.files.items():
            assert digest_file(report.path / path) == ref.id, path
        assert report.fetched_bytes + report.reused_bytes == sum(
            r.size for r in self.new.manifest.content.files.values()
        )
        return report.fetched_bytes

    def size(self, path: str) -> int:
        return self.new.manifest.content.files[path].size


@pytest.fixture
def months(local_store: Store, tmp_path: Path) -> Months:
    old = publish(local_store, LAST, tmp_path / "old")
    return Months(local_store, old, publish(local_store, NOW, tmp_path / "new", old.id))


def told(months: Months) -> int:
    return sum(its.fetched_bytes for its in diff_snapshots(months.old, months.new).pull.values())


def test_a_pull_fetches_the_deltas_in_place_of_the_files(months: Months, tmp_path: Path) -> None:
    before = told(months)
    assert months.pulled(tmp_path / "without") == before  # a store of an earlier bookwheel has none
    deltas = months.offer()
    assert set(deltas) == {PASSAGES, GRAPH, LISTS}
    head = months.steps()[GRAPH].head_bytes
    assert (months.size(GRAPH) - head) % (4 * D) == 0
    whole = months.size(PASSAGES) + months.size(LISTS) + head
    spared = whole - sum(delta.size for delta in deltas.values())
    assert spared > 0.5 * whole
    assert months.pulled(tmp_path / "with") == told(months) == before - spared
    assert months.offer() == deltas  # from the memo


@pytest.mark.parametrize("what", ["damaged", "missing", "of another file", "no base", "another library"])
def test_without_a_sound_delta_the_file_is_fetched(
    months: Months, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, before, deltas = months.store, told(months), months.offer()
    dest = tmp_path / "dest"
    for step in (step for steps in months.all_steps().values() for step in steps):
        delta = months.build(step).outputs["delta"]
        place = store.files.local_path(delta.path)
        if what == "damaged":
            place.write_bytes(place.read_bytes()[:-1] + b"\1")
        elif what == "missing":
            place.unlink()
        elif what == "of another file":
            _swap(store, step, next(iter({*deltas.values()} - {delta})))
    if what == "no base":
        report = pull(store, months.new.id, dest)
        assert report.fetched_bytes == sum(ref.size for ref in months.new.manifest.content.files.values())
        return
    if what == "another library":
        monkeypatch.setattr(pa, "__version__", "0.0.1")
        assert find_delta(store, months.steps()[PASSAGES]) is None
        spared = months.steps()[GRAPH].head_bytes - deltas[GRAPH].size + months.size(LISTS) - deltas[LISTS].size
        assert months.pulled(dest) == before - spared
        return
    assert months.pulled(dest) >= before


def test_a_file_that_there_is_no_room_to_make_is_fetched(months: Months, tmp_path: Path) -> None:
    def full(before: Snapshot, after: Snapshot, path: str, kept: object, terms: None, out: Path) -> bool:
        out.write_bytes(bytes(9))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    pull(months.store, months.old.id, tmp_path)
    report = pull(months.store, months.new.id, tmp_path, derive=full)
    for path, ref in months.new.manifest.content.files.items():
        assert digest_file(report.path / path) == ref.id, path
    assert report.fetched_bytes == told(months)


def _swap(store: Store, step: DeltaStep, other: BlobRef) -> None:
    """Let the record of a step name another delta, as a store that lies may."""
    key = store.memo.compute_key(step.inputs())
    path = f"memo/delta/{key}.json"
    value = store.files.read_json(path)
    assert value is not None
    store.files.remove(path)
    store.memo.write_record("delta", key, {"delta": other}, value["facts"], value["inputs"])


def test_a_damaged_delta_is_a_problem(months: Months) -> None:
    deltas = months.offer()
    assert verify_version(months.store, months.new.id) == []
    months.store.files.local_path(deltas[GRAPH].path).write_bytes(bytes(deltas[GRAPH].size))
    assert [(one.path, one.blob) for one in verify_version(months.store, months.new.id)] == [
        (f"the delta of {GRAPH}", deltas[GRAPH].id)
    ]


def test_a_delta_lives_as_long_as_the_file_that_it_makes(months: Months) -> None:
    store, deltas = months.store, months.offer()
    tag(store, months.new.id, "latest")
    store.files.remove(store.snapshots.manifest_path(months.old.id))  # expired; who pulled it still has it
    collect_garbage(store, 0.0)
    assert all(map(store.blobs.exists, deltas.values()))
    assert {path: find_delta(store, step) for path, step in months.steps().items()} == deltas
    store.files.remove("refs/latest/00000001.json")
    store.files.remove(store.snapshots.manifest_path(months.new.id))
    store.snapshots.publish(Manifest(Content({}, (), {})))  # a store without any root is left alone
    collect_garbage(store, 0.0)
    assert not any(map(store.blobs.exists, deltas.values()))
    assert store.files.list_names("memo/delta") == []


def test_a_delta_that_spares_little_is_not_kept(local_store: Store, tmp_path: Path) -> None:
    old = publish(local_store, LAST, tmp_path / "old")
    new = publish(local_store, {page: f"all {text}" for page, text in LAST.items()}, tmp_path / "new")
    (step,) = list_delta_steps(old.manifest.content, new.manifest.content)[PASSAGES]
    assert build_delta(local_store, step).outputs == {}
    assert find_delta(local_store, step) is None


@pytest.mark.parametrize("size", [0, 1, delta_files._PACK_BLOCK, delta_files._PACK_BLOCK + 9])
def test_what_is_packed_is_unpacked(size: int, tmp_path: Path) -> None:
    data = np.random.default_rng(1).integers(0, 4, size, np.uint8).tobytes()
    (tmp_path / "file").write_bytes(data + b"vectors")
    delta_files.pack_file(tmp_path / "file", size, tmp_path / "packed")
    delta_files.unpack_file(tmp_path / "packed", size, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == data


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:2], lambda data: b"\xff" * len(data)])
def test_a_damaged_pack_is_refused(damage: object, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(9999))
    delta_files.pack_file(tmp_path / "file", 9999, tmp_path / "packed")
    (tmp_path / "packed").write_bytes(damage((tmp_path / "packed").read_bytes()))  # type: ignore[operator]
    with pytest.raises(InputError, match="fetch the whole file"):
        delta_files.unpack_file(tmp_path / "packed", 9999, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_index_with_wrong_derived_bytes_is_rebuilt_from_its_delta(months: Months, tmp_path: Path) -> None:
    derived = []

    def derive(previous: Snapshot, target: Snapshot, path: str, previous_rows: object, terms: None, out: Path) -> bool:
        out.write_bytes(bytes(months.size(path)))
        derived.append(path)
        return True

    months.offer()
    pull(months.store, months.old.id, tmp_path)
    report = pull(months.store, months.new.id, tmp_path, derive=derive)
    assert LISTS in derived
    assert report.fetched_bytes == told(months)
