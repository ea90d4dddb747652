"""Differences between snapshots agree with a simple model, and byte counts with those of a pull."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.errors import StoreError
from rag_model.store import Content, PartEntry, Snapshot, Store
from rag_model.store.diff import diff_snapshots, iter_article_changes
from rag_model.store.pulling.pull import pull
from rag_model.store.versions.manifest import embeddings_in_space
from tests.fixtures.store_files import publish_articles, publish_content

Articles = dict[int, list[str]]
PartStarts = tuple[tuple[int, ...], tuple[int, ...]]
FIRST = "passages/part-00000.parquet"

articles = st.dictionaries(st.integers(0, 99), st.lists(st.sampled_from("abc"), min_size=1, max_size=3), max_size=12)
starts = st.sets(st.sampled_from(range(10, 100, 10)), max_size=3).map(lambda chosen: (0, *sorted(chosen)))


def compare_articles(before: Articles, after: Articles) -> dict[tuple[str, str], dict[str, int]]:
    """Return the counts of added, changed and removed passages of each changed article, by page and kind of change."""
    changes = {}
    for page in before.keys() | after.keys():
        old_texts = dict(enumerate(before.get(page, [])))
        new_texts = dict(enumerate(after.get(page, [])))
        counts = {
            "added": len(new_texts.keys() - old_texts.keys()),
            "changed": sum(old_texts[i] != new_texts[i] for i in old_texts.keys() & new_texts.keys()),
            "removed": len(old_texts.keys() - new_texts.keys()),
        }
        kind = "added" if not old_texts else "removed" if not new_texts else "changed"
        if any(counts.values()):
            changes[str(page), kind] = {name: count for name, count in counts.items() if count}
    return changes


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
@given(old=articles, new=articles, part_starts=st.tuples(starts, starts), max_rows=st.sampled_from([1, 5, 1000]))
def test_changes_do_not_depend_on_part_boundaries(
    store: Store, old: Articles, new: Articles, part_starts: PartStarts, max_rows: int
) -> None:
    base, target = publish_articles(store, old, part_starts[0]), publish_articles(store, new, part_starts[1])
    changes, expected = list(iter_article_changes(base, target, max_rows=max_rows)), compare_articles(old, new)
    assert {(change.page_id, change.change): change.passages for change in changes} == expected
    assert len(changes) == len(expected)
    assert all(change.title == f"Title {change.page_id}" for change in changes)
    assert list(iter_article_changes(base, target, max_rows=max_rows)) == changes
    diff = diff_snapshots(base, target)
    assert sum(diff.articles.values()) == len(changes)
    for kind, count in diff.passages.items():
        assert count == sum(passages.get(kind, 0) for passages in expected.values())


def test_unchanged_part_is_not_read(store: Store) -> None:
    base = publish_articles(store, {1: ["a"], 60: ["b"]}, (0, 50))
    target = publish_articles(store, {1: ["a"], 60: ["c"]}, (0, 50))
    store.files.delete_folder(base.manifest.content.files["passages/part-00000.parquet"].path)
    assert diff_snapshots(base, target).passages == {"added": 0, "changed": 1, "removed": 0}


def test_equal_ranges_need_no_disk(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    base = publish_articles(store, {1: ["a"], 60: ["b"]}, (0, 50))
    target = publish_articles(store, {1: ["x"], 60: ["c"]}, (0, 50))
    target_with_other_parts = publish_articles(store, {1: ["x"], 60: ["c"]}, (0, 40))
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    assert diff_snapshots(base, target).articles["changed"] == 2
    with pytest.raises(FileNotFoundError):
        diff_snapshots(base, target_with_other_parts)


@pytest.mark.parametrize(("max_rows", "files"), [(1000, 1), (12, 2), (1, 5)])
def test_small_parts_are_distributed_together(store: Store, temporary_folder: Path, max_rows: int, files: int) -> None:
    texts = {page: ["a"] for page in (1, 21, 41, 61, 81)}
    base = publish_articles(store, texts, (0, 20, 40, 60, 80))
    target = publish_articles(store, {**texts, 1: ["b"]}, (0, 50))
    changes = iter_article_changes(base, target, max_rows=max_rows)
    next(changes)
    assert len(list(temporary_folder.glob("*/before/*"))) == files  # one file per part would be too many
    changes.close()  # type: ignore[attr-defined]


def test_temporary_files_are_deleted(store: Store, temporary_folder: Path) -> None:
    base = publish_articles(store, {1: ["a"], 60: ["b"]}, (0, 50))
    target = publish_articles(store, {1: ["x"], 60: ["c"]}, (0, 40))
    changes = iter_article_changes(base, target, max_rows=1)
    next(changes)
    assert list(temporary_folder.iterdir())
    changes.close()  # type: ignore[attr-defined]
    assert diff_snapshots(base, target).articles["changed"] == 2
    assert list(temporary_folder.iterdir()) == []


def test_overlapping_parts_are_compared_by_page(store: Store) -> None:
    """Two parts have one page range, so the range does not determine which part has an article."""

    def join_parts(*snapshots: Snapshot) -> Snapshot:
        files = {f"passages/p{i}.parquet": part.manifest.content.files[FIRST] for i, part in enumerate(snapshots)}
        parts = tuple(PartEntry(f"p{i}", 0, 0, snapshot.n) for i, snapshot in enumerate(snapshots))
        return publish_content(store, Content({}, parts, files))

    first, second = publish_articles(store, {1: ["a"], 2: ["b"]}), publish_articles(store, {3: ["c"]})
    swapped = publish_articles(store, {3: ["c"], 2: ["b"]}), publish_articles(store, {1: ["x"]})
    diff = diff_snapshots(join_parts(first, second), join_parts(*swapped))
    assert diff.articles == {"added": 0, "changed": 1, "removed": 0}


def test_examples_are_limited_and_counts_are_not(store: Store) -> None:
    base = publish_articles(store, {page: ["a"] for page in range(40)})
    target = publish_articles(store, {page: ["b"] for page in range(20, 60)})
    diff = diff_snapshots(base, target, limit=3)
    assert diff.articles == {"added": 20, "changed": 20, "removed": 20}
    assert {kind: len(examples) for kind, examples in diff.examples.items()} == dict.fromkeys(diff.articles, 3)
    assert diff.to_json()["examples"]["changed"][0] == {
        "page_id": "20",
        "title": "Title 20",
        "change": "changed",
        "passages": {"changed": 1},
    }
    assert not any(diff_snapshots(base, target, limit=0).examples.values())


def test_changed_settings_are_listed(memory_store: Store) -> None:
    def publish_settings(**settings: Any) -> Snapshot:
        return publish_content(memory_store, Content({"kind": "wiki"}, (), {}, **settings))

    hnsw = {"factory": "HNSW32", "search": {"efSearch": 128}}
    base = publish_settings(recipe={"chunk": {"words": 100, "chunker": "words"}}, indexes={"hnsw": hnsw})
    target = publish_settings(
        recipe={"chunk": {"words": 50, "chunker": "words"}},
        indexes={"hnsw": {**hnsw, "search": {"efSearch": 64}}, "ivfpq": {"factory": "IVF,PQ"}},
        representations=embeddings_in_space({"digest": "new"}),
    )
    assert diff_snapshots(base, target).settings == {
        "recipe.chunk.words": (100, 50),
        "indexes.hnsw.search.efSearch": (128, 64),
        "indexes.ivfpq": (None, {"factory": "IVF,PQ"}),
        "space": (None, {"digest": "new"}),
    }
    assert diff_snapshots(base, base).settings == {}


def test_bytes_equal_those_of_a_pull(store: Store, dest: Path) -> None:
    def publish_files(**files: str) -> Snapshot:
        blobs = {path.replace("_", "/"): store.blobs.put_bytes(data.encode()) for path, data in files.items()}
        return publish_content(store, Content({}, (), blobs))

    base = publish_files(index_hnsw="old graph", encoder_a="same", encoder_b="also", embeddings_x="vectors")
    target = publish_files(
        index_hnsw="new longer graph", encoder_a="same", encoder_c="same", embeddings_y="vectors", index_flat="same"
    )
    diff = diff_snapshots(base, target)
    assert {kind: (category.fetched_bytes, category.reused_bytes) for kind, category in diff.pull.items()} == {
        "embeddings": (0, 7),
        "encoder": (0, 4),
        "index/hnsw": (16, 0),
    }
    pull(store, base.id, dest)
    report = pull(store, target.id, dest)
    assert report.fetched_bytes == sum(category.fetched_bytes for category in diff.pull.values())
    assert report.reused_bytes == sum(category.reused_bytes for category in diff.pull.values())


def test_pulled_folders_are_compared(store: Store, dest: Path) -> None:
    base, target = publish_articles(store, {1: ["a"]}), publish_articles(store, {1: ["b"]})
    folders = [pull(store, snapshot.id, dest).path for snapshot in (base, target)]
    diff = diff_snapshots(*map(Snapshot.from_folder, folders))
    assert (diff.before, diff.after, diff.articles["changed"]) == (base.id, target.id, 1)


@pytest.mark.parametrize("damage", ["gone", "truncated", "overwritten"])
def test_damaged_passages_are_reported(store: Store, damage: str) -> None:
    base = publish_articles(store, {page: ["a", "b"] for page in range(90)})
    target = publish_articles(store, {1: ["b"]})
    path = store.blobs.get_local_path(base.manifest.content.files[FIRST])
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "truncated" else data[:4] + b"\xff" * 2000 + data[2004:])
    with pytest.raises(StoreError, match=r"is missing|is damaged|cannot read the passages of part-00000"):
        diff_snapshots(base, target)
