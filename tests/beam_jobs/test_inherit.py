"""A rebuild of an index reuses the training, and the pieces and shards of unchanged parts and cells."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beam_jobs import index
from beam_jobs.index_work import IndexInProgress, ScatterTask, read_blob_list
from beam_jobs.job_settings import JobSettings
from rag_model.index.exact_search import ExactIndex
from rag_model.index.recipe import IndexRecipe, resolve
from rag_model.index.search import open_index
from rag_model.snapshots.content import BuiltIndex
from rag_model.snapshots.reused_training import ParentRows, ReusedTraining
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.memo import Record
from rag_model.store.store import Store

D, SIZES = 16, (400, 500, 300)
RECIPES = {"hnsw": IndexRecipe("HNSW8", cells=3, linked=0.5), "ivf": IndexRecipe("IVF8,SQ8")}
SLOW_CODES = IndexRecipe("IVF8,PQ8x4np")  # whose codes are reused, because encoding is slow
Months = tuple[list[Path], list[Path]]


def draw_vectors(n: int, seed: int) -> Any:
    """Return unit vectors about three directions, so that each cell holds one of them."""
    rng = np.random.default_rng(seed)
    vectors = 8 * np.eye(3, D)[rng.integers(0, 3, n)] + rng.normal(size=(n, D))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def save_parts(folder: Path, parts: Sequence[Any]) -> list[Path]:
    folder.mkdir()
    paths = [folder / f"{number}.npy" for number in range(len(parts))]
    for path, vectors in zip(paths, parts, strict=True):
        np.save(path, vectors)
    return paths


@pytest.fixture(scope="module")
def months(tmp_path_factory: pytest.TempPathFactory) -> Months:
    """Parts of a month and of the next, in whose first part one vector is deleted and two of its direction are new."""
    folder, parts = tmp_path_factory.mktemp("months"), [draw_vectors(size, seed) for seed, size in enumerate(SIZES)]
    candidates = draw_vectors(200, 9)
    added = candidates[np.argsort(-candidates[:, 1])[:2]]  # so near the direction that no other cell links to them
    edited = np.concatenate([np.delete(parts[0], parts[0][:, 1].argmax(), axis=0), added])
    return save_parts(folder / "old", parts), save_parts(folder / "new", [edited, *parts[1:]])


@pytest.fixture(scope="module")
def parent_month(months: Months, tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Any]:
    """A store with the indexes of the first month; tests copy it."""
    store = Store.open(str(tmp_path_factory.mktemp("parent") / "store"), create=True)
    return store, build(store, months[0])


@pytest.fixture
def store(parent_month: tuple[Store, Any], tmp_path: Path) -> Store:
    """A copy of the store with the indexes of the first month."""
    return Store.open(str(shutil.copytree(parent_month[0].files.local_path(""), tmp_path / "store")))


@pytest.fixture
def empty_store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "empty"), create=True)


@pytest.fixture
def parents(parent_month: tuple[Store, Any]) -> Any:
    """The graph and the inverted lists of the first month."""
    return parent_month[1][0]


@pytest.fixture
def parent_builds(parent_month: tuple[Store, Any]) -> Any:
    """The builds of `parents`, which name their pieces and shards."""
    return parent_month[1][1]


def find_direction(vectors: Any) -> Any:
    """Return the number of the direction that each vector is nearest to."""
    return vectors[:, :3].argmax(axis=1)


def build(
    store: Store,
    files: Sequence[Path],
    parents: Sequence[BuiltIndex] = (),
    parent_files: Sequence[Path] = (),
    growth: str = "",
    beam: Sequence[str] = (),
) -> Any:
    """Build indexes that reuse results of `parents`; return them and their builds.

    Without Beam options the launcher runs the tasks of such small jobs.
    """
    vectors, parent_vectors = ([store.blobs.put_file(path) for path in paths] for paths in (files, parent_files))
    changed = tuple((ref, tuple(parent_vectors)) for ref in vectors if ref not in parent_vectors)
    unchanged = tuple(ref for ref in vectors if ref in parent_vectors)
    parent_rows = [
        [asdict(ParentRows(ref, number)) for ref in parent_vectors[number : number + 1]] for number in range(len(files))
    ]
    row_list = store.blobs.put_bytes(json.dumps(parent_rows).encode()) if parent_vectors else None
    reused_trainings = {}
    for parent in parents:
        if parent.training:
            shards = BlobRef.from_json(parent.shards["list"]) if parent.shards else None
            reused_trainings[parent.name] = ReusedTraining(
                "0" * 64, *parent.training, changed, unchanged, row_list, shards, growth=growth
            )
    n, job_settings = sum(len(np.load(path)) for path in files), JobSettings.new(store.url, beam)
    builds = [
        index.start_index(store, name, resolve(recipe, n, D), vectors, reused_trainings.get(name))
        for name, recipe in RECIPES.items()
    ]
    for job in (index.train, index.scatter, index.build_shards):
        builds = job(builds, job_settings)
    return index.merge(builds, job_settings), builds


def count_records(store: Store, stage: str) -> int:
    return len(list(store.files.local_path(f"memo/{stage}").glob("*")))


def list_scatter_records(store: Store) -> list[Record]:
    """Return the records of all pieces whose files exist."""
    keys = [name.removesuffix(".json") for name in store.files.list_names("memo/scatter")]
    return [record for key in keys if (record := store.memo.find("scatter", key))]


def measure_recall(store: Store, built_index: BuiltIndex, files: Sequence[Path], queries: Any, **search: int) -> float:
    """Return the recall@10 of an index of the vectors in files."""
    opened_index = open_index(store.blobs.get_local_path(built_index.blob), defaults=search or built_index.plan.search)
    rows, exact = opened_index.search(queries, 10)[1], ExactIndex(files).search(queries, 10)[1]
    return float(np.mean([len({*a} & {*b}) / 10 for a, b in zip(rows, exact, strict=True)]))


def list_encoded(store: Store) -> list[int]:
    """Return how many vectors each recorded scatter task has encoded."""
    return sorted(record.stats["encoded"] for record in list_scatter_records(store) if "encoded" in record.stats)


def read_blobs(store: Store, builds: Sequence[IndexInProgress], name: str, field: str) -> list[Any]:
    (build,) = [build for build in builds if build.name == name]
    return read_blob_list(store, getattr(build, field))


@pytest.mark.slow
def test_a_rebuild_runs_only_tasks_of_changed_parts_and_cells(
    store: Store, months: Months, parents: Any, parent_builds: Any
) -> None:
    counts = {stage: count_records(store, stage) for stage in ("train", "scatter", "shard", "merge")}
    assert counts == {"train": 2, "scatter": 6, "shard": 3, "merge": 2}
    indexes, new_builds = build(store, months[1], parents, months[0], beam=["--runner=FnApiRunner"])
    assert {stage: count_records(store, stage) - count for stage, count in counts.items()} == {
        "train": 0,
        "scatter": 2,  # the changed part, for both indexes
        "shard": 1,  # the cell of the changed direction
        "merge": 2,
    }
    for name, field in (("hnsw", "pieces"), ("ivf", "pieces"), ("hnsw", "shards")):
        old_blobs, new_blobs = (read_blobs(store, builds, name, field) for builds in (parent_builds, new_builds))
        assert sorted(a == b for a, b in zip(old_blobs, new_blobs, strict=True)) == [False, True, True]
    assert [index.training[0] for index in indexes] == [parent.training[0] for parent in parents]
    assert all(index.plan.notes == ("trained as in snapshot 000000000000",) for index in indexes)


def test_only_new_vectors_of_a_changed_part_are_encoded(
    empty_store: Store, months: Months, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECIPES, "ivf", SLOW_CODES)
    store, (parents, builds) = empty_store, build(empty_store, months[0])
    blobs = [index.blob for index in build(store, months[1], parents, months[0])[0]]
    assert {*list_encoded(store)} == {*SIZES, 2}
    store.files.local_path(read_blobs(store, builds, "ivf", "pieces")[0].path).unlink()
    for record in list_scatter_records(store):
        if record.stats.get("encoded") == 2:
            store.files.local_path(f"memo/scatter/{record.key}.json").unlink()
    rebuilt_blobs = [index.blob for index in build(store, months[1], parents, months[0])[0]]
    assert list_encoded(store) == [300, 401, 500]
    assert rebuilt_blobs == blobs, "with encoded or reused codes, the index has the same bytes"


def test_a_damaged_piece_of_the_parent_is_not_reused(
    empty_store: Store, months: Months, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECIPES, "ivf", SLOW_CODES)
    parents, builds = build(empty_store, months[0])
    intact_store = Store.open(str(shutil.copytree(empty_store.files.local_path(""), tmp_path / "intact")))
    piece = empty_store.files.local_path(read_blobs(empty_store, builds, "ivf", "pieces")[0].path)
    data = bytearray(piece.read_bytes())
    data[-1] ^= 1  # a code, so that the piece keeps its length
    piece.write_bytes(data)
    blobs = [index.blob for index in build(empty_store, months[1], parents, months[0])[0]]
    assert list_encoded(empty_store) == [300, 400, 401, 500], "all vectors of the changed part"
    assert [index.blob for index in build(intact_store, months[1], parents, months[0])[0]] == blobs


def test_a_task_after_training_names_no_files_of_other_parts(store: Store, months: Months, parents: Any) -> None:
    """If the task of each part named all parts, a build would need memory for their square."""
    _, builds = build(store, months[1], parents, months[0])
    blob_ids = {store.blobs.put_file(path).id for path in (*months[0], *months[1])}
    for index_build in builds:
        task_text = repr(ScatterTask(index_build, 0, index_build.rows))
        assert not [blob_id for blob_id in blob_ids if blob_id in task_text]


def test_an_index_of_reused_pieces_has_the_recall_of_a_new_one(
    store: Store, empty_store: Store, months: Months, parents: Any
) -> None:
    indexes, _ = build(store, months[1], parents, months[0])
    new_indexes, _ = build(empty_store, months[1])
    queries = draw_vectors(100, 21)
    for index_of_reused, new_index in zip(indexes, new_indexes, strict=True):
        recall = measure_recall(store, index_of_reused, months[1], queries)
        assert recall > measure_recall(empty_store, new_index, months[1], queries) - 0.02, new_index.name


def test_a_repeated_build_writes_no_record(store: Store, months: Months, parents: Any) -> None:
    indexes, _ = build(store, months[1], parents, months[0])
    files = sorted(store.files.local_path("memo").rglob("*"))
    for repeated_parents, parent_files in ((parents, months[0]), (indexes, months[1])):
        repeated, _ = build(store, months[1], repeated_parents, parent_files)
        assert [(index.blob, index.training) for index in repeated] == [
            (index.blob, index.training) for index in indexes
        ]
        assert sorted(store.files.local_path("memo").rglob("*")) == files


@pytest.fixture
def third_month(tmp_path: Path, months: Months) -> list[Path]:
    """Parts of a third month, with deleted and new vectors of every direction, and with repeated ones."""
    parts = [np.load(path) for path in months[1]]
    parts[1] = np.concatenate([parts[1][25:], draw_vectors(20, 31), parts[1][40:43]])
    return save_parts(tmp_path / "third_month", parts)


def read_shard_stats(store: Store) -> list[dict[str, Any]]:
    """Return the statistics of each recorded shard."""
    keys = [name.removesuffix(".json") for name in store.files.list_names("memo/shard")]
    return [dict(record.stats) for key in keys if (record := store.memo.find("shard", key))]


def count_cells(built_index: BuiltIndex) -> list[float]:
    names = ("built_cells", "updated_cells", "reused_cells", "generation")
    return [built_index.stats.get(name, -1) for name in names]


def test_graphs_of_cells_are_updated_in_successive_rebuilds(
    store: Store, empty_store: Store, months: Months, third_month: list[Path], parents: Any
) -> None:
    first, _ = parents
    assert count_cells(first) == [-1, -1, -1, -1], "nothing to update"
    (second, _), _ = build(store, months[1], [first], months[0])
    assert count_cells(second) == [0, 1, 2, 1]
    (third, _), builds = build(store, third_month, [second], months[1])
    assert count_cells(third) == [0, 3, 0, 2]
    assert sorted(stats["generation"] for stats in read_shard_stats(store)) == [0, 0, 0, 1, 1, 1, 2]
    assert all(0 < stats["inserted"] < 20 for stats in read_shard_stats(store) if stats["generation"])
    assert sorted(third.shards["generation"]) == [1, 1, 2]
    assert third.stats["replaced"] == max(third.shards["replaced"]) < 0.1

    # A build that was killed after two of the three cells resumes and gives the same bytes.
    shards = read_blobs(store, builds, "hnsw", "shards")
    for stage, output in (("shard", shards[1]), ("merge", third.blob)):
        for path in store.files.local_path(f"memo/{stage}").glob("*.json"):
            if output.id in path.read_text():
                path.unlink()
    store.files.local_path(shards[1].path).unlink()
    (resumed, _), _ = build(store, third_month, [second], months[1])
    assert (resumed.blob, resumed.shards) == (third.blob, third.shards)

    # After a rollback to the first month, the second and the third can be built from the first.
    (repeated, _), _ = build(store, months[1], [first], months[0])
    assert (repeated.blob, repeated.shards) == (second.blob, second.shards)
    (from_first, _), _ = build(store, third_month, [first], months[0])
    assert count_cells(from_first) == [0, 3, 0, 1]

    (full_build, _), _ = build(empty_store, third_month)
    queries = draw_vectors(200, 21)
    recall = measure_recall(store, third, third_month, queries)
    assert recall > measure_recall(empty_store, full_build, third_month, queries) - 0.01


@pytest.mark.parametrize(
    ("damage", "reason"),
    [("changed", "the parent's graph is damaged"), ("deleted", "the parent has none in the store")],
)
def test_a_cell_without_its_parents_graph_is_built_again(
    damage: str, reason: str, store: Store, months: Months, third_month: list[Path], parents: Any, parent_builds: Any
) -> None:
    shard = store.files.local_path(read_blobs(store, parent_builds, "hnsw", "shards")[1].path)
    shard.write_bytes(shard.read_bytes()[:-1] + b"?") if damage == "changed" else shard.unlink()
    (second, _), _ = build(store, third_month, parents[:1], months[0])
    assert count_cells(second) == [1, 2, 0, 1]
    assert f"graphs of cells built again: 1 ({reason})" in second.plan.notes
    assert second.shards["generation"][1] == 0


def test_all_cells_are_built_again_if_all_vectors_are_new(
    store: Store, months: Months, parents: Any, tmp_path: Path
) -> None:
    files = save_parts(tmp_path / "foreign", [draw_vectors(size, 50 + seed) for seed, size in enumerate(SIZES)])
    (second, _), _ = build(store, files, parents[:1], months[0])
    assert count_cells(second) == [3, 0, 0, 0]
    (note,) = (note for note in second.plan.notes if "built again" in note)
    assert note.count("(most of its vectors are new)") == 3


def test_training_runs_again_if_it_does_not_fit_new_vectors(
    store: Store, months: Months, parents: Any, tmp_path: Path
) -> None:
    foreign_vectors = np.roll(draw_vectors(200, 5), 7, axis=1)  # about other directions
    files = [*months[0], *save_parts(tmp_path / "foreign", [foreign_vectors])]
    indexes, _ = build(store, files, parents, months[0])
    n_old = sum(SIZES)
    for parent, new_index in zip(parents, indexes, strict=True):
        assert new_index.training[0] != parent.training[0]
        (note,) = new_index.plan.notes
        assert note.startswith("trained again: ")
        assert "with 200 new vectors" in note
        rows = open_index(store.blobs.get_local_path(new_index.blob)).search(foreign_vectors[:50], 1)[1]
        assert np.mean(rows[:, 0] == np.arange(n_old, n_old + 50)) > 0.95


def test_lists_that_miss_a_new_article_are_adapted_to_it(
    empty_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECIPES, "ivf", IndexRecipe("IVF32,SQ8"))
    store, parts = empty_store, [draw_vectors(size, seed) for seed, size in enumerate((400, 1500, 300))]
    old_files = save_parts(tmp_path / "old", parts)
    parents, _ = build(store, old_files)
    article = draw_vectors(200, 5)
    article = np.roll(article[find_direction(article) == 0][:40], 7, axis=1)  # too few to lower the mean recall
    files = save_parts(tmp_path / "new", [parts[0], np.concatenate([parts[1], article]), parts[2]])
    (_, adapted_index), _ = build(store, files, parents, old_files)
    (note,) = adapted_index.plan.notes
    assert note.startswith("trained as in snapshot 000000000000, lists moved: recall is 0.")
    assert note.endswith(" for old ones")
    assert adapted_index.training[0] != parents[1].training[0]
    n_records = count_records(store, "follow")
    (_, repeated_index), _ = build(store, files, parents, old_files)
    assert (count_records(store, "follow"), repeated_index.blob) == (n_records, adapted_index.blob)
    monkeypatch.setattr("rag_model.index.quality.results._MAX_RECALL_LOSS", 1.0)  # any recall is accepted
    (_, unadapted_index), _ = build(store, files, parents, old_files)
    assert unadapted_index.training == parents[1].training
    assert measure_recall(store, adapted_index, files, article, nprobe=2) > 0.8
    assert measure_recall(store, unadapted_index, files, article, nprobe=2) < 0.8


def test_an_overgrown_cell_is_split(store: Store, months: Months, parents: Any, tmp_path: Path) -> None:
    first, _ = parents
    crowd = draw_vectors(3000, 8)
    files = [*months[0], *save_parts(tmp_path / "crowd", [crowd[find_direction(crowd) == 1]])]
    fit = replace(first.training[1], losses=dict.fromkeys(first.training[1].losses, 9.0))
    (second, _), _ = build(store, files, [replace(first, training=(first.training[0], fit))], months[0])
    assert second.training[1].imbalance_now > 1.8
    (third, _), _ = build(store, files, [second], files)
    (note, *_) = third.plan.notes
    assert note.startswith("trained as in snapshot 000000000000, cells split: the largest cell has grown to 1.9")
    assert third.training[0] != second.training[0]
    assert third.training[1].imbalance_now < second.training[1].imbalance_now
    assert sum(count_cells(third)[:3]) == 3, "each cell is built, updated or reused"
    assert measure_recall(store, third, files, draw_vectors(100, 21)) > 0.97


def test_a_larger_number_of_cells_splits_one_cell_and_keeps_the_others(
    store: Store, months: Months, parents: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd = draw_vectors(1500, 8)
    files = [*months[0], *save_parts(tmp_path / "crowd", [crowd[find_direction(crowd) == 1]])]
    monkeypatch.setitem(RECIPES, "hnsw", replace(RECIPES["hnsw"], cells=4))
    growth = "there are 4 cells instead of 3"
    second, repeated = (build(store, files, parents[:1], months[0], growth)[0][0] for _ in range(2))
    assert second == repeated
    assert second.plan.notes[0] == f"trained as in snapshot 000000000000, cells split: {growth}"
    assert (second.plan.cells, count_cells(second)[:3]) == (4, [2, 2, 0]), "one cell became two"
    assert any("3 (the parent has none in the store)" in note for note in second.plan.notes)
    assert measure_recall(store, second, files, draw_vectors(100, 21)) > 0.97


def test_a_smaller_number_of_cells_merges_one_cell_and_keeps_the_others(
    empty_store: Store, months: Months, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last cell takes the number of the merged one, and an update writes its graph again."""
    store, recipe = empty_store, RECIPES["hnsw"]
    monkeypatch.setitem(RECIPES, "hnsw", replace(recipe, cells=4))
    (first, _), _ = build(store, months[0])
    parts = [np.load(path) for path in months[0]]
    files = save_parts(tmp_path / "remaining", [vectors[find_direction(vectors) != 0] for vectors in parts])
    monkeypatch.setitem(RECIPES, "hnsw", recipe)
    growth = "there are 3 cells instead of 4"
    second, repeated = (build(store, files, [first], months[0], growth)[0][0] for _ in range(2))
    assert second == repeated
    assert second.plan.notes[0] == f"trained as in snapshot 000000000000, cells merged: {growth}"
    assert sum(count_cells(second)[:3]) == 3
    assert count_cells(second)[0] <= 1, "only a cell without vectors is built again"
    assert measure_recall(store, second, files, draw_vectors(100, 21)) > 0.97


def test_cells_that_cannot_be_split_are_kept(store: Store, months: Months, parents: Any) -> None:
    first, _ = parents
    unbalanced = replace(first, training=(first.training[0], first.training[1].with_imbalance(2.9)))
    (second, _), _ = build(store, months[0], [unbalanced], months[0])
    assert second.plan.notes == (
        "trained as in snapshot 000000000000, cells split: the largest cell has grown to 2.90 times the mean",
    )
    assert (second.blob, second.training[0]) == (first.blob, first.training[0])
    assert count_cells(second) == [0, 0, 3, 0]


def test_training_reports_the_imbalance_of_the_cells(months: Months, parents: Any) -> None:
    hnsw, ivf = (index.training[1] for index in parents)
    rows = np.bincount(find_direction(np.concatenate([np.load(path) for path in months[0]])))
    assert hnsw.imbalance == hnsw.imbalance_now == pytest.approx(3 * rows.max() / rows.sum(), 1e-3)
    assert ivf.imbalance_now == 0
