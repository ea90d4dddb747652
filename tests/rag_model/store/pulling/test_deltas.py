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
from rag_model.store import BlobRef, Content, Manifest, PartEntry, Snapshot, Store
from rag_model.store.comparing.diff import diff
from rag_model.store.pulling import packed
from rag_model.store.pulling.deltas import Step, made, offered, steps
from rag_model.store.pulling.pull import pull
from rag_model.store.upkeep.gc import gc
from rag_model.store.upkeep.verify import verify
from rag_model.store.versions.manifest import in_space
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
    content = Content({"kind": "wiki"}, parts, files, {}, in_space({"digest": "one"}), entries)
    return Snapshot.from_store(store, store.snapshots.put(Manifest(content, parents=parents)))


@dataclass(frozen=True, slots=True)
class Months:
    """Two snapshots, the second of which was built after the first."""

    store: Store
    old: Snapshot
    new: Snapshot

    def steps(self) -> dict[str, Step]:
        files = {ref: path for path, ref in self.new.manifest.content.files.items()}
        return {files[step.after]: step for step in steps(self.old.manifest.content, self.new.manifest.content)}

    def offer(self) -> dict[str, BlobRef]:
        """Make the deltas, as a build does; return them by the file that they are for."""
        return {path: made(self.store, step).outputs["delta"] for path, step in self.steps().items()}

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
    return sum(its.fetched_bytes for its in diff(months.old, months.new).pull.values())


def test_a_pull_fetches_the_deltas_in_place_of_the_files(months: Months, tmp_path: Path) -> None:
    before = told(months)
    assert months.pulled(tmp_path / "without") == before  # a store of an earlier bookwheel has none
    deltas = months.offer()
    assert set(deltas) == {PASSAGES, GRAPH, LISTS}
    head = months.steps()[GRAPH].head
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
    for path, delta in deltas.items():
        place = store.files.local_path(delta.path)
        if what == "damaged":
            place.write_bytes(place.read_bytes()[:-1] + b"\1")
        elif what == "missing":
            place.unlink()
        elif what == "of another file":
            _swap(store, months.steps()[path], next(iter({*deltas.values()} - {delta})))
    if what == "no base":
        report = pull(store, months.new.id, dest)
        assert report.fetched_bytes == sum(ref.size for ref in months.new.manifest.content.files.values())
        return
    if what == "another library":
        monkeypatch.setattr(pa, "__version__", "0.0.1")
        assert offered(store, months.steps()[PASSAGES]) is None
        spared = months.steps()[GRAPH].head - deltas[GRAPH].size + months.size(LISTS) - deltas[LISTS].size
        assert months.pulled(dest) == before - spared
        return
    assert months.pulled(dest) >= before


def test_a_file_that_there_is_no_room_to_make_is_fetched(months: Months, tmp_path: Path) -> None:
    def full(before: Snapshot, after: Snapshot, path: str, kept: object, out: Path) -> bool:
        out.write_bytes(bytes(9))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    pull(months.store, months.old.id, tmp_path)
    report = pull(months.store, months.new.id, tmp_path, derive=full)
    for path, ref in months.new.manifest.content.files.items():
        assert digest_file(report.path / path) == ref.id, path
    assert report.fetched_bytes == told(months)


def _swap(store: Store, step: Step, other: BlobRef) -> None:
    """Let the record of a step name another delta, as a store that lies may."""
    key = store.memo.key(step.inputs())
    path = f"memo/delta/{key}.json"
    value = store.files.read_json(path)
    assert value is not None
    store.files.remove(path)
    store.memo.record("delta", key, {"delta": other}, value["facts"], value["inputs"])


def test_a_damaged_delta_is_a_problem(months: Months) -> None:
    deltas = months.offer()
    assert verify(months.store, months.new.id) == []
    months.store.files.local_path(deltas[GRAPH].path).write_bytes(bytes(deltas[GRAPH].size))
    assert [(one.path, one.blob) for one in verify(months.store, months.new.id)] == [
        (f"the delta of {GRAPH}", deltas[GRAPH].id)
    ]


def test_a_delta_lives_as_long_as_the_file_that_it_makes(months: Months) -> None:
    store, deltas = months.store, months.offer()
    tag(store, months.new.id, "latest")
    store.files.remove(store.snapshots.path(months.old.id))  # expired; who pulled it still has it
    gc(store, 0.0)
    assert all(map(store.blobs.exists, deltas.values()))
    assert {path: offered(store, step) for path, step in months.steps().items()} == deltas
    store.files.remove("refs/latest/00000001.json")
    store.files.remove(store.snapshots.path(months.new.id))
    gc(store, 0.0)
    assert not any(map(store.blobs.exists, deltas.values()))
    assert store.files.names("memo/delta") == []


def test_a_delta_that_spares_little_is_not_kept(local_store: Store, tmp_path: Path) -> None:
    old = publish(local_store, LAST, tmp_path / "old")
    new = publish(local_store, {page: f"all {text}" for page, text in LAST.items()}, tmp_path / "new")
    step = {s.after: s for s in steps(old.manifest.content, new.manifest.content)}[new.manifest.content.files[PASSAGES]]
    assert made(local_store, step).outputs == {}
    assert offered(local_store, step) is None


@pytest.mark.parametrize("size", [0, 1, packed._BLOCK, packed._BLOCK + 9])
def test_what_is_packed_is_unpacked(size: int, tmp_path: Path) -> None:
    data = np.random.default_rng(1).integers(0, 4, size, np.uint8).tobytes()
    (tmp_path / "file").write_bytes(data + b"vectors")
    packed.pack(tmp_path / "file", size, tmp_path / "packed")
    packed.unpack(tmp_path / "packed", size, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == data


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:2], lambda data: b"\xff" * len(data)])
def test_a_damaged_pack_is_refused(damage: object, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(9999))
    packed.pack(tmp_path / "file", 9999, tmp_path / "packed")
    (tmp_path / "packed").write_bytes(damage((tmp_path / "packed").read_bytes()))  # type: ignore[operator]
    with pytest.raises(InputError, match="fetch the whole file"):
        packed.unpack(tmp_path / "packed", 9999, tmp_path / "out")
    assert not (tmp_path / "out").exists()
