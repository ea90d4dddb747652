"""A pull derives the index of words from the previous index and the passages instead of fetching it."""

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
from tests.fixtures.bm25_index import build_bm25

OLD_PASSAGES = [build_passage(f"page {row}", f"words of w{row % 13} and w{row % 7}") for row in range(200)]
NEW_PASSAGES = [*OLD_PASSAGES[:50], build_passage("new", "another one"), *OLD_PASSAGES[52:], OLD_PASSAGES[3]]
INDEX = "index/bm25.postings"


def publish(store: Store, passages: Sequence[Passage], work: Path) -> Snapshot:
    """Publish passages in two parts, and an index of their words."""
    index = build_bm25(passages, work, [100])
    sizes = (100, len(passages) - 100)
    files = {INDEX: store.blobs.put_file(index.file.path)}
    for number in range(2):
        file = work / f"part-{number:05d}.parquet"
        files[f"passages/{file.name}"] = store.blobs.put_file(file)
    parts = tuple(PartEntry(f"part-{number:05d}", 0, 0, size) for number, size in enumerate(sizes))
    entry = {"file": INDEX, **KIND.plan(IndexRecipe("BM25"), len(passages), 0).entry()}
    content = Content({"kind": "wiki"}, parts, files, {}, {}, {"bm25": entry})
    return Snapshot.from_store(store, store.snapshots.publish(Manifest(content)))


def pull_and_check(store: Store, snapshot: Snapshot, dest: Path) -> PullReport:
    report = pull(store, snapshot.id, dest, derive_index=derive_index_file)
    for path, ref in snapshot.manifest.content.files.items():
        assert digest_file(report.path / path) == ref.id, path
    return report


def count_new_bytes(snapshot: Snapshot, old_snapshot: Snapshot) -> int:
    """Return the bytes of the files that the old snapshot does not have, without the index."""
    files, old_files = snapshot.manifest.content.files, set(old_snapshot.manifest.content.files.values())
    return sum(ref.size for path, ref in files.items() if path != INDEX and ref not in old_files)


@pytest.fixture
def local_store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"), create=True)


@pytest.fixture
def snapshots(local_store: Store, tmp_path: Path) -> tuple[Snapshot, Snapshot]:
    return publish(local_store, OLD_PASSAGES, tmp_path / "old"), publish(local_store, NEW_PASSAGES, tmp_path / "new")


def test_index_of_words_is_derived_from_the_old_one(
    local_store: Store, snapshots: tuple[Snapshot, Snapshot], tmp_path: Path
) -> None:
    first, second = snapshots
    dest = tmp_path / "dest"
    all_bytes = sum(ref.size for ref in first.manifest.content.files.values())
    assert pull_and_check(local_store, first, dest).fetched_bytes == all_bytes
    assert pull_and_check(local_store, second, dest).fetched_bytes == count_new_bytes(second, first)
    assert pull_and_check(local_store, second, dest).fetched_bytes == 0
    assert not [path.name for path in dest.iterdir() if "tmp" in path.name]


def test_index_is_fetched_if_none_exists(
    local_store: Store, snapshots: tuple[Snapshot, Snapshot], tmp_path: Path
) -> None:
    first, second = snapshots
    index_bytes, dest = second.manifest.content.files[INDEX].size, tmp_path / "dest"
    pull(local_store, first.id, dest, select=lambda path: path != INDEX)
    assert pull_and_check(local_store, second, dest).fetched_bytes == count_new_bytes(second, first) + index_bytes


def test_index_is_fetched_if_the_derived_file_differs(
    local_store: Store, snapshots: tuple[Snapshot, Snapshot], tmp_path: Path
) -> None:
    first, second = snapshots
    index_bytes, dest = second.manifest.content.files[INDEX].size, tmp_path / "dest"
    report = pull_and_check(local_store, first, dest)
    data = bytearray((report.path / INDEX).read_bytes())
    data[72] ^= 1  # the length of a passage
    (report.path / INDEX).chmod(0o644)
    (report.path / INDEX).write_bytes(data)
    assert pull_and_check(local_store, second, dest).fetched_bytes == count_new_bytes(second, first) + index_bytes
