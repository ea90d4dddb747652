"""Differences between snapshots, against a model, and the bytes against what a pull fetches."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.errors import StoreError
from rag_model.store import Content, Manifest, PartEntry, Snapshot, Store
from rag_model.store.diff import diff_snapshots, iter_article_changes
from rag_model.store.pulling.pull import pull
from rag_model.store.versions.manifest import embeddings_in_space

Articles = dict[int, list[str]]
Cut = Callable[..., Snapshot]
FIRST = "passages/part-00000.parquet"

articles = st.dictionaries(st.integers(0, 99), st.lists(st.sampled_from("abc"), min_size=1, max_size=3), max_size=12)
starts = st.sets(st.sampled_from(range(10, 100, 10)), max_size=3).map(lambda chosen: (0, *sorted(chosen)))


def expected(before: Articles, after: Articles) -> dict[tuple[str, str], dict[str, int]]:
    """What became of each article that is not as it was, by page and kind: its passages, counted."""
    found = {}
    for page in before.keys() | after.keys():
        old = dict(enumerate(before.get(page, [])))
        new = dict(enumerate(after.get(page, [])))
        counts = {
            "added": len(new.keys() - old.keys()),
            "changed": sum(old[place] != new[place] for place in old.keys() & new.keys()),
            "removed": len(old.keys() - new.keys()),
        }
        kind = "added" if not old else "removed" if not new else "changed"
        if any(counts.values()):
            found[str(page), kind] = {name: count for name, count in counts.items() if count}
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(before=articles, after=articles, cuts=st.tuples(starts, starts), bucket=st.sampled_from([1, 5, 1000]))
def test_changes_are_found_however_it_is_cut(
    local_store: Store, cut: Cut, before: Articles, after: Articles, cuts: tuple[tuple[int, ...], ...], bucket: int
) -> None:
    one, two = cut(local_store, before, cuts[0]), cut(local_store, after, cuts[1])
    found = list(iter_article_changes(one, two, max_rows=bucket))
    assert {(change.page_id, change.change): change.passages for change in found} == expected(before, after)
    assert len(found) == len(expected(before, after))
    assert all(change.title == f"Title {change.page_id}" for change in found)
    assert list(iter_article_changes(one, two, max_rows=bucket)) == found
    counted = diff_snapshots(one, two)
    assert sum(counted.articles.values()) == len(found)
    for kind, count in counted.passages.items():
        assert count == sum(passages.get(kind, 0) for passages in expected(before, after).values())


def test_a_part_that_did_not_change_is_not_read(local_store: Store, cut: Cut) -> None:
    before = cut(local_store, {1: ["a"], 60: ["b"]}, (0, 50))
    after = cut(local_store, {1: ["a"], 60: ["c"]}, (0, 50))
    local_store.files.delete_folder(before.manifest.content.files["passages/part-00000.parquet"].path)
    assert diff_snapshots(before, after).passages == {"added": 0, "changed": 1, "removed": 0}


def test_equal_ranges_need_no_disk(local_store: Store, cut: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cut(local_store, {1: ["a"], 60: ["b"]}, (0, 50))
    after = cut(local_store, {1: ["x"], 60: ["c"]}, (0, 50))
    moved = cut(local_store, {1: ["x"], 60: ["c"]}, (0, 40))
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    assert diff_snapshots(before, after).articles["changed"] == 2
    with pytest.raises(FileNotFoundError):
        diff_snapshots(before, moved)


@pytest.mark.parametrize(("bucket", "files"), [(1000, 1), (12, 2), (1, 5)])
def test_small_parts_are_distributed_together(
    local_store: Store, cut: Cut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: int, files: int
) -> None:
    texts = {page: ["a"] for page in (1, 21, 41, 61, 81)}
    before, after = cut(local_store, texts, (0, 20, 40, 60, 80)), cut(local_store, {**texts, 1: ["b"]}, (0, 50))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    changes = iter_article_changes(before, after, max_rows=bucket)
    next(changes)
    assert len(list((tmp_path / "temporary").glob("*/before/*"))) == files  # a file a part would grow with their square
    changes.close()  # type: ignore[attr-defined]


def test_nothing_is_left_on_the_disk(
    local_store: Store, cut: Cut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = cut(local_store, {1: ["a"], 60: ["b"]}, (0, 50)), cut(local_store, {1: ["x"], 60: ["c"]}, (0, 40))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    changes = iter_article_changes(before, after, max_rows=1)
    next(changes)
    assert list((tmp_path / "temporary").iterdir())
    changes.close()  # type: ignore[attr-defined]
    assert diff_snapshots(before, after).articles["changed"] == 2
    assert list((tmp_path / "temporary").iterdir()) == []


def test_parts_that_overlap_are_compared_by_page(local_store: Store, cut: Cut) -> None:
    """Two parts of one page range: an article's passages may lie in either, so the range decides nothing."""

    def joined(*snapshots: Snapshot) -> Snapshot:
        files = {f"passages/p{i}.parquet": part.manifest.content.files[FIRST] for i, part in enumerate(snapshots)}
        parts = tuple(PartEntry(f"p{i}", 0, 0, snapshot.n) for i, snapshot in enumerate(snapshots))
        return Snapshot.from_store(local_store, local_store.snapshots.publish(Manifest(Content({}, parts, files))))

    one, two = cut(local_store, {1: ["a"], 2: ["b"]}), cut(local_store, {3: ["c"]})
    swapped = cut(local_store, {3: ["c"], 2: ["b"]}), cut(local_store, {1: ["x"]})
    found = diff_snapshots(joined(one, two), joined(*swapped))
    assert found.articles == {"added": 0, "changed": 1, "removed": 0}


def test_examples_are_few_and_counts_are_not(local_store: Store, cut: Cut) -> None:
    before = cut(local_store, {page: ["a"] for page in range(40)})
    after = cut(local_store, {page: ["b"] for page in range(20, 60)})
    found = diff_snapshots(before, after, limit=3)
    assert found.articles == {"added": 20, "changed": 20, "removed": 20}
    assert {kind: len(named) for kind, named in found.examples.items()} == dict.fromkeys(found.articles, 3)
    assert found.to_json()["examples"]["changed"][0] == {
        "page_id": "20",
        "title": "Title 20",
        "change": "changed",
        "passages": {"changed": 1},
    }
    assert not any(diff_snapshots(before, after, limit=0).examples.values())


def test_settings_that_changed_are_named(memory_store: Store) -> None:
    def of(**content: dict[str, object]) -> Snapshot:
        manifest = Manifest(Content(**{"corpus": {"kind": "wiki"}, "parts": (), "files": {}, **content}))  # type: ignore[arg-type]
        return Snapshot.from_store(memory_store, memory_store.snapshots.publish(manifest))

    hnsw = {"factory": "HNSW32", "search": {"efSearch": 128}}
    before = of(recipe={"chunk": {"words": 100, "chunker": "words"}}, indexes={"hnsw": hnsw})
    after = of(
        recipe={"chunk": {"words": 50, "chunker": "words"}},
        indexes={"hnsw": {**hnsw, "search": {"efSearch": 64}}, "ivfpq": {"factory": "IVF,PQ"}},
        representations=embeddings_in_space({"digest": "new"}),
    )
    assert diff_snapshots(before, after).settings == {
        "recipe.chunk.words": (100, 50),
        "indexes.hnsw.search.efSearch": (128, 64),
        "indexes.ivfpq": (None, {"factory": "IVF,PQ"}),
        "space": (None, {"digest": "new"}),
    }
    assert diff_snapshots(before, before).settings == {}


def test_the_bytes_are_what_a_pull_fetches(local_store: Store, tmp_path: Path) -> None:
    def of(**files: str) -> str:
        blobs = {path.replace("_", "/"): local_store.blobs.put_bytes(data.encode()) for path, data in files.items()}
        return local_store.snapshots.publish(Manifest(Content({}, (), blobs)))

    old = of(index_hnsw="old graph", encoder_a="same", encoder_b="also", embeddings_x="vectors")
    new = of(
        index_hnsw="new longer graph", encoder_a="same", encoder_c="same", embeddings_y="vectors", index_flat="same"
    )
    found = diff_snapshots(Snapshot.from_store(local_store, old), Snapshot.from_store(local_store, new))
    assert {kind: (its.fetched_bytes, its.reused_bytes) for kind, its in found.pull.items()} == {
        "embeddings": (0, 7),
        "encoder": (0, 4),
        "index/hnsw": (16, 0),
    }
    pull(local_store, old, tmp_path / "dest")
    report = pull(local_store, new, tmp_path / "dest")
    assert report.fetched_bytes == sum(its.fetched_bytes for its in found.pull.values())
    assert report.reused_bytes == sum(its.reused_bytes for its in found.pull.values())


def test_pulled_folders_are_compared_too(local_store: Store, cut: Cut, tmp_path: Path) -> None:
    one, two = cut(local_store, {1: ["a"]}), cut(local_store, {1: ["b"]})
    folders = [pull(local_store, snapshot.id, tmp_path / "dest").path for snapshot in (one, two)]
    found = diff_snapshots(*map(Snapshot.from_folder, folders))
    assert (found.before, found.after, found.articles["changed"]) == (one.id, two.id, 1)


@pytest.mark.parametrize("damage", ["gone", "truncated", "overwritten"])
def test_damaged_passages_are_named(local_store: Store, cut: Cut, damage: str) -> None:
    before = cut(local_store, {page: ["a", "b"] for page in range(90)})
    after = cut(local_store, {1: ["b"]})
    path = local_store.blobs.get_local_path(before.manifest.content.files[FIRST])
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "truncated" else data[:4] + b"\xff" * 2000 + data[2004:])
    with pytest.raises(StoreError, match=r"is missing|is damaged|cannot read the passages of part-00000"):
        diff_snapshots(before, after)
