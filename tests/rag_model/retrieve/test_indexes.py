"""A pull that makes the index of words from the earlier one and the passages: nothing of it is fetched."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from rag_model.corpus.records import Passage
from rag_model.digest import digest_file
from rag_model.index.postings.kind import KIND
from rag_model.index.recipe import IndexRecipe
from rag_model.retrieve.indexes import derive_index_file
from rag_model.store import Content, Manifest, PartEntry, Snapshot, Store
from rag_model.store.pulling.pull import PullReport, pull
from rag_model.training.data.examples import build_passage
from tests.fixtures.bm25_index import build_words

LAST = [build_passage(f"page {row}", f"words of w{row % 13} and w{row % 7}") for row in range(200)]
NOW = [*LAST[:50], build_passage("new", "another one"), *LAST[52:], LAST[3]]
INDEX = "index/bm25.postings"


def publish(store: Store, passages: Sequence[Passage], work: Path) -> Snapshot:
    """Publish passages in two parts, and an index of their words."""
    index = build_words(passages, work, [100])
    sizes = (100, len(passages) - 100)
    files = {INDEX: store.blobs.put_file(index.file.path)}
    for number in range(2):
        file = work / f"part-{number:05d}.parquet"
        files[f"passages/{file.name}"] = store.blobs.put_file(file)
    parts = tuple(PartEntry(f"part-{number:05d}", 0, 0, size) for number, size in enumerate(sizes))
    entry = {"file": INDEX, **KIND.plan(IndexRecipe("BM25"), len(passages), 0).entry()}
    content = Content({"kind": "wiki"}, parts, files, {}, {}, {"bm25": entry})
    return Snapshot.from_store(store, store.snapshots.publish(Manifest(content)))


def pulled(store: Store, snapshot: Snapshot, dest: Path) -> PullReport:
    report = pull(store, snapshot.id, dest, derive=derive_index_file)
    for path, ref in snapshot.manifest.content.files.items():
        assert digest_file(report.path / path) == ref.id, path
    return report


def lacking(snapshot: Snapshot, before: Snapshot) -> int:
    """Return the bytes of the files that the earlier snapshot has not, without the index."""
    files, old = snapshot.manifest.content.files, set(before.manifest.content.files.values())
    return sum(ref.size for path, ref in files.items() if path != INDEX and ref not in old)


@pytest.fixture
def local_store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"), create=True)


@pytest.fixture
def months(local_store: Store, tmp_path: Path) -> tuple[Snapshot, Snapshot]:
    return publish(local_store, LAST, tmp_path / "last"), publish(local_store, NOW, tmp_path / "now")


def test_an_index_of_words_is_made_of_the_earlier_one(
    local_store: Store, months: tuple[Snapshot, Snapshot], tmp_path: Path
) -> None:
    old, new = months
    dest = tmp_path / "dest"
    assert pulled(local_store, old, dest).fetched_bytes == sum(ref.size for ref in old.manifest.content.files.values())
    assert pulled(local_store, new, dest).fetched_bytes == lacking(new, old)
    assert pulled(local_store, new, dest).fetched_bytes == 0
    assert not [path.name for path in dest.iterdir() if "tmp" in path.name]


def test_what_cannot_be_made_is_fetched(local_store: Store, months: tuple[Snapshot, Snapshot], tmp_path: Path) -> None:
    old, new = months
    index, dest = new.manifest.content.files[INDEX].size, tmp_path / "dest"
    pull(local_store, old.id, dest, select=lambda path: path != INDEX)
    assert pulled(local_store, new, dest).fetched_bytes == lacking(new, old) + index


def test_another_file_than_the_published_one_is_not_kept(
    local_store: Store, months: tuple[Snapshot, Snapshot], tmp_path: Path
) -> None:
    old, new = months
    index, dest = new.manifest.content.files[INDEX].size, tmp_path / "dest"
    report = pulled(local_store, old, dest)
    damaged = bytearray((report.path / INDEX).read_bytes())
    damaged[72] ^= 1  # the length of a passage
    (report.path / INDEX).chmod(0o644)
    (report.path / INDEX).write_bytes(damaged)
    assert pulled(local_store, new, dest).fetched_bytes == lacking(new, old) + index
