"""A second month's index: what was learnt, and the pieces and shards of what did not change, are the first month's."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beam_jobs import index
from beam_jobs.index_work import IndexInProgress, ScatterTask, read_blob_list
from beam_jobs.launch import Launch
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
CODED = IndexRecipe("IVF8,PQ8x4np")  # whose codes are worth carrying over
Months = tuple[list[Path], list[Path]]


def clouds(n: int, seed: int) -> Any:
    """Return unit vectors about three directions, so that each cell holds one of them."""
    rng = np.random.default_rng(seed)
    vectors = 8 * np.eye(3, D)[rng.integers(0, 3, n)] + rng.normal(size=(n, D))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def saved(folder: Path, parts: Sequence[Any]) -> list[Path]:
    folder.mkdir()
    paths = [folder / f"{number}.npy" for number in range(len(parts))]
    for path, vectors in zip(paths, parts, strict=True):
        np.save(path, vectors)
    return paths


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"), create=True)


@pytest.fixture
def months(tmp_path: Path) -> Months:
    """Parts of a month; in the next the first has lost a vector and won two, all of one direction."""
    parts = [clouds(size, seed) for seed, size in enumerate(SIZES)]
    more = clouds(200, 9)
    gone, new = parts[0][:, 1].argmax(), more[np.argsort(-more[:, 1])[:2]]  # so near it that no other cell knows them
    edited = np.concatenate([np.delete(parts[0], gone, axis=0), new])
    return saved(tmp_path / "old", parts), saved(tmp_path / "new", [edited, *parts[1:]])


def nearest(vectors: Any) -> Any:
    return vectors[:, :3].argmax(axis=1)


def graphs_of(built: BuiltIndex) -> BlobRef | None:
    """Return the list of an index's shards."""
    return BlobRef.from_json(built.shards["list"]) if built.shards else None


def build(
    store: Store,
    files: Sequence[Path],
    before: Sequence[BuiltIndex] = (),
    old: Sequence[Path] = (),
    growth: str = "",
    beam: Sequence[str] = (),
) -> Any:
    """Return the finished indexes, and the builds, of which `before` gives what is inherited.

    Without options of Beam the launcher runs the tasks of such small jobs.
    """
    vectors, known = ([store.blobs.put_file(path) for path in paths] for paths in (files, old))
    changed = tuple((ref, tuple(known)) for ref in vectors if ref not in known)
    same = tuple(ref for ref in vectors if ref in known)
    earlier = [[asdict(ParentRows(ref, number)) for ref in known[number : number + 1]] for number in range(len(files))]
    listed = store.blobs.put_bytes(json.dumps(earlier).encode()) if known else None
    heirlooms = {
        built.name: ReusedTraining("0" * 64, *built.training, changed, same, listed, graphs_of(built), growth=growth)
        for built in before
        if built.training
    }
    n, launch = sum(len(np.load(path)) for path in files), Launch.new(store.url, beam)
    builds = [
        index.start_index(store, name, resolve(recipe, n, D), vectors, heirlooms.get(name))
        for name, recipe in RECIPES.items()
    ]
    for job in (index.train, index.scatter, index.build_shards):
        builds = job(builds, launch)
    return index.merge(builds, launch), builds


def records(store: Store, stage: str) -> int:
    return len(list(store.files.local_path(f"memo/{stage}").glob("*")))


def scattered(store: Store) -> list[Record]:
    """Return the records of all pieces whose outputs are there."""
    keys = [name.removesuffix(".json") for name in store.files.list_names("memo/scatter")]
    return [record for key in keys if (record := store.memo.find("scatter", key))]


def listed(store: Store, builds: Sequence[IndexInProgress], name: str, which: str) -> list[Any]:
    (build,) = [build for build in builds if build.name == name]
    return read_blob_list(store, getattr(build, which))


@pytest.mark.slow
def test_what_did_not_change_is_not_made_again(store: Store, months: Months) -> None:
    first, old = build(store, months[0])
    made = {stage: records(store, stage) for stage in ("train", "scatter", "shard", "merge")}
    assert made == {"train": 2, "scatter": 6, "shard": 3, "merge": 2}
    second, new = build(store, months[1], first, months[0], beam=["--runner=FnApiRunner"])
    assert {stage: records(store, stage) - count for stage, count in made.items()} == {
        "train": 0,
        "scatter": 2,  # the part that changed, of either index
        "shard": 1,  # the cell about the direction that changed
        "merge": 2,
    }
    for name in RECIPES:
        before, after = (listed(store, builds, name, "pieces") for builds in (old, new))
        assert [a == b for a, b in zip(before, after, strict=True)] == [False, True, True]
    before, after = (listed(store, builds, "hnsw", "shards") for builds in (old, new))
    assert sorted(a == b for a, b in zip(before, after, strict=True)) == [False, True, True]
    assert [built.training and built.training[0] for built in first] == [
        built.training and built.training[0] for built in second
    ]
    assert all(built.plan.notes == ("trained as in snapshot 000000000000",) for built in second)


def test_of_a_part_that_changed_only_new_vectors_are_coded(
    store: Store, months: Months, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECIPES, "ivf", CODED)
    first, old = build(store, months[0])
    index_of = [built.blob for built in build(store, months[1], first, months[0])[0]]
    found = {record.stats["encoded"] for record in scattered(store) if "encoded" in record.stats}
    assert found == {*SIZES, 2}
    for lost in listed(store, old, "ivf", "pieces")[:1]:  # the piece of which it was made
        store.files.local_path(lost.path).unlink()
    for record in scattered(store):
        if record.stats.get("encoded") == 2:
            store.files.local_path(f"memo/scatter/{record.key}.json").unlink()
    again = [built.blob for built in build(store, months[1], first, months[0])[0]]
    assert sorted(record.stats["encoded"] for record in scattered(store) if "encoded" in record.stats) == [
        300,
        401,
        500,
    ]
    assert again == index_of, "coded or carried, the index has the same bytes"


def test_a_damaged_piece_of_the_parent_is_not_carried(
    store: Store, months: Months, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECIPES, "ivf", CODED)
    first, old = build(store, months[0])
    lost = store.files.local_path(listed(store, old, "ivf", "pieces")[0].path)
    data = bytearray(lost.read_bytes())
    data[-1] ^= 1  # a code: the piece is as long as it was
    lost.write_bytes(data)
    found = [built.blob for built in build(store, months[1], first, months[0])[0]]
    coded = sorted(record.stats["encoded"] for record in scattered(store) if "encoded" in record.stats)
    assert coded == [300, 400, 401, 500], "all vectors of the part that changed"
    other = Store.open(str(store.files.local_path("").parent / "other"), create=True)
    other_first, _ = build(other, months[0])
    assert [built.blob for built in build(other, months[1], other_first, months[0])[0]] == found


def test_a_task_after_training_names_no_files_of_other_parts(store: Store, months: Months) -> None:
    """There is a task for each part: if each named all parts, a build would take their square in memory."""
    first, _ = build(store, months[0])
    _, builds = build(store, months[1], first, months[0])
    others = {store.blobs.put_file(path).id for path in (*months[0], *months[1])}
    for one in builds:
        told = repr(ScatterTask(one, 0, one.rows))
        assert not [id_ for id_ in others if id_ in told]


def test_an_index_of_inherited_pieces_is_as_good_as_one_of_new_ones(
    store: Store, months: Months, tmp_path: Path
) -> None:
    first, _ = build(store, months[0])
    inherited, _ = build(store, months[1], first, months[0])
    anew, _ = build(Store.open(str(tmp_path / "other"), create=True), months[1])
    questions = clouds(100, 21)
    _, rows = ExactIndex(months[1]).search(questions, 10)
    for ours, theirs in zip(inherited, anew, strict=True):
        found = [
            open_index(path, defaults=ours.plan.search).search(questions, 10)[1]
            for path in (store.blobs.get_local_path(ours.blob), tmp_path / "other" / theirs.blob.path)
        ]
        recalls = [np.mean([len({*a} & {*b}) / 10 for a, b in zip(own, rows, strict=True)]) for own in found]
        assert recalls[0] > recalls[1] - 0.02, ours.name


def test_the_same_again_makes_nothing(store: Store, months: Months) -> None:
    first, _ = build(store, months[0])
    second, _ = build(store, months[1], first, months[0])
    files = sorted(store.files.local_path("memo").rglob("*"))
    again, _ = build(store, months[1], first, months[0])
    third, _ = build(store, months[1], second, months[1])  # a parent that is itself: no vector is new, none is asked
    assert [built.blob for built in second] == [built.blob for built in again] == [built.blob for built in third]
    assert [built.training for built in second] == [built.training for built in third]
    assert sorted(store.files.local_path("memo").rglob("*")) == files


@pytest.fixture
def later(tmp_path: Path, months: Months) -> list[Path]:
    """Parts of a third month: of every direction some vectors are gone and some are new; some are there twice."""
    parts = [np.load(path) for path in months[1]]
    parts[1] = np.concatenate([parts[1][25:], clouds(20, 31), parts[1][40:43]])
    return saved(tmp_path / "later", parts)


def stats_of(store: Store) -> list[dict[str, Any]]:
    """Return what each recorded shard says of itself."""
    keys = [name.removesuffix(".json") for name in store.files.list_names("memo/shard")]
    return [dict(record.stats) for key in keys if (record := store.memo.find("shard", key))]


def count_cells(built: BuiltIndex) -> list[float]:
    names = ("built_cells", "updated_cells", "reused_cells", "generation")
    return [built.stats.get(name, -1) for name in names]


def test_the_graph_of_a_cell_is_updated_from_update_to_update(
    store: Store, months: Months, later: list[Path], tmp_path: Path
) -> None:
    (first, _), _ = build(store, months[0])
    assert count_cells(first) == [-1, -1, -1, -1], "nothing to update"
    (second, _), _ = build(store, months[1], [first], months[0])
    assert count_cells(second) == [0, 1, 2, 1]
    (third, _), builds = build(store, later, [second], months[1])
    assert count_cells(third) == [0, 3, 0, 2]
    assert sorted(one["generation"] for one in stats_of(store)) == [0, 0, 0, 1, 1, 1, 2]
    assert all(0 < one["inserted"] < 20 for one in stats_of(store) if one["generation"])
    assert third.shards
    assert sorted(third.shards["generation"]) == [1, 1, 2]
    assert third.stats["replaced"] == max(third.shards["replaced"]) < 0.1

    # Killed after two of the three cells, and without the merge: the same bytes.
    shards = listed(store, builds, "hnsw", "shards")
    for stage, output in (("shard", shards[1]), ("merge", third.blob)):
        for path in store.files.local_path(f"memo/{stage}").glob("*.json"):
            if output.id in path.read_text():
                path.unlink()
    store.files.local_path(shards[1].path).unlink()
    (resumed, _), _ = build(store, later, [second], months[1])
    assert (resumed.blob, resumed.shards) == (third.blob, third.shards)

    # After a rollback to the first month, the second comes again, and then goes on to the third.
    (again, _), _ = build(store, months[1], [first], months[0])
    assert (again.blob, again.shards) == (second.blob, second.shards)
    (from_first, _), _ = build(store, later, [first], months[0])
    assert count_cells(from_first) == [0, 3, 0, 1]

    whole, _ = build(Store.open(str(tmp_path / "other"), create=True), later)
    _, exact = ExactIndex(later).search(questions := clouds(200, 21), 10)
    recalls = []
    for path in (store.blobs.get_local_path(third.blob), tmp_path / "other" / whole[0].blob.path):
        found = open_index(path, defaults=third.plan.search).search(questions, 10)[1]
        recalls.append(np.mean([len({*a} & {*b}) / 10 for a, b in zip(found, exact, strict=True)]))
    assert recalls[0] > recalls[1] - 0.01, recalls


@pytest.mark.parametrize(
    ("harm", "why"), [("damage", "the parent's graph is damaged"), ("loss", "the parent has none in the store")]
)
def test_without_the_graph_of_the_parent_a_cell_is_built_again(
    harm: str, why: str, store: Store, months: Months, later: list[Path]
) -> None:
    (first, _), builds = build(store, months[0])
    shard = store.files.local_path(listed(store, builds, "hnsw", "shards")[1].path)
    shard.write_bytes(shard.read_bytes()[:-1] + b"?") if harm == "damage" else shard.unlink()
    (second, _), _ = build(store, later, [first], months[0])
    assert count_cells(second) == [1, 2, 0, 1]
    assert f"graphs of cells built again: 1 ({why})" in second.plan.notes
    assert second.shards
    assert second.shards["generation"][1] == 0


def test_of_a_month_of_other_vectors_all_cells_are_built_again(store: Store, months: Months, tmp_path: Path) -> None:
    (first, _), _ = build(store, months[0])
    files = saved(tmp_path / "strange", [clouds(size, 50 + seed) for seed, size in enumerate(SIZES)])
    (second, _), _ = build(store, files, [first], months[0])
    assert count_cells(second) == [3, 0, 0, 0]
    (note,) = (note for note in second.plan.notes if "built again" in note)
    assert note.count("(most of its vectors are new)") == 3


def test_what_does_not_fit_is_learnt_anew_and_said(store: Store, months: Months, tmp_path: Path) -> None:
    first, _ = build(store, months[0])
    strange = np.roll(clouds(200, 5), 7, axis=1)  # about other directions
    files = [*months[0], *saved(tmp_path / "strange", [strange])]
    second, _ = build(store, files, first, months[0])
    for before, after in zip(first, second, strict=True):
        assert after.training
        assert before.training
        assert after.training[0] != before.training[0]
        (note,) = after.plan.notes
        assert note.startswith("trained again: ")
        assert "with 200 new vectors" in note
    rows = sum(SIZES)
    for built in second:
        found = open_index(store.blobs.get_local_path(built.blob)).search(strange[:50], 1)[1]
        assert np.mean(found[:, 0] == np.arange(rows, rows + 50)) > 0.95


def test_lists_that_miss_one_new_article_move_to_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECIPES, "ivf", IndexRecipe("IVF32,SQ8"))
    parts = [clouds(size, seed) for seed, size in enumerate((400, 1500, 300))]
    old = saved(tmp_path / "old", parts)
    first, _ = build(store, old)
    strange = clouds(200, 5)
    article = np.roll(strange[nearest(strange) == 0][:40], 7, axis=1)  # of so few rows that little is lost in all
    files = saved(tmp_path / "new", [parts[0], np.concatenate([parts[1], article]), parts[2]])
    (_, moved), _ = build(store, files, first, old)
    (before,) = [built.training for built in first if built.name == "ivf" and built.training]
    assert moved.training
    (note,) = moved.plan.notes
    assert note.startswith("trained as in snapshot 000000000000, lists moved: recall is 0.")
    assert note.endswith(" for old ones")
    assert moved.training[0] != before[0]
    made = records(store, "follow")
    (_, again), _ = build(store, files, first, old)
    assert (records(store, "follow"), again.blob) == (made, moved.blob)
    monkeypatch.setattr("rag_model.index.quality.results._MAX_RECALL_LOSS", 1.0)  # whatever they miss
    (_, stayed), _ = build(store, files, first, old)
    assert stayed.training == before
    (_, exact) = ExactIndex(files).search(article, 10)
    recalls = []
    for built in (moved, stayed):
        found = open_index(store.blobs.get_local_path(built.blob), defaults={"nprobe": 2}).search(article, 10)[1]
        recalls.append(np.mean([len({*a} & {*b}) / 10 for a, b in zip(found, exact, strict=True)]))
    assert recalls[0] > 0.8 > recalls[1], recalls


def test_a_cell_that_has_grown_is_split(store: Store, months: Months, tmp_path: Path) -> None:
    (first, _), _ = build(store, months[0])
    crowd = clouds(3000, 8)
    crowd = crowd[nearest(crowd) == 1]  # about one direction alone
    assert first.training
    fits = replace(first.training[1], losses=dict.fromkeys(first.training[1].losses, 9.0))
    grown = saved(tmp_path / "grown", [crowd])
    (second, _), _ = build(store, [*months[0], *grown], [replace(first, training=(first.training[0], fits))], months[0])
    assert second.training
    assert second.training[1].imbalance_now > 1.8
    larger = [*months[0], *grown]
    (third, _), _ = build(store, larger, [second], larger)
    (note, *_) = third.plan.notes
    assert note.startswith("trained as in snapshot 000000000000, cells split: the largest cell has grown to 1.9")
    assert third.training
    assert third.training[0] != second.training[0]
    assert third.training[1].imbalance_now < second.training[1].imbalance_now
    assert sum(count_cells(third)[:3]) == 3, "the parent's graphs are there to be updated"
    questions = clouds(100, 21)
    _, exact = ExactIndex(larger).search(questions, 10)
    path = store.blobs.get_local_path(third.blob)
    found = open_index(path, defaults=third.plan.search).search(questions, 10)[1]
    assert np.mean([len({*a} & {*b}) / 10 for a, b in zip(found, exact, strict=True)]) > 0.97


def test_more_cells_are_split_off_and_the_others_stay(
    store: Store, months: Months, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, _), _ = build(store, months[0])
    crowd = clouds(1500, 8)
    grown = [*months[0], *saved(tmp_path / "grown", [crowd[nearest(crowd) == 1]])]
    monkeypatch.setitem(RECIPES, "hnsw", replace(RECIPES["hnsw"], cells=4))
    made = [build(store, grown, [first], months[0], "there are 4 cells instead of 3")[0][0] for _ in range(2)]
    second = made[1]
    assert second == made[0]
    assert second.plan.notes[0] == "trained as in snapshot 000000000000, cells split: there are 4 cells instead of 3"
    assert (second.plan.cells, count_cells(second)[:3]) == (4, [2, 2, 0]), "one cell became two"
    assert any("3 (the parent has none in the store)" in note for note in second.plan.notes)
    questions = clouds(100, 21)
    found = open_index(store.blobs.get_local_path(second.blob), defaults=second.plan.search).search(questions, 10)[1]
    _, exact = ExactIndex(grown).search(questions, 10)
    assert np.mean([len({*a} & {*b}) / 10 for a, b in zip(found, exact, strict=True)]) > 0.97


def test_a_cell_that_lost_its_vectors_is_merged_and_the_others_stay(
    store: Store, months: Months, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last cell takes the place of the merged one, and its graph is written again by an update."""
    monkeypatch.setitem(RECIPES, "hnsw", replace(RECIPES["hnsw"], cells=4))
    (first, _), _ = build(store, months[0])
    parts = [np.load(path) for path in months[0]]
    left = saved(tmp_path / "left", [vectors[nearest(vectors) != 0] for vectors in parts])
    monkeypatch.setitem(RECIPES, "hnsw", replace(RECIPES["hnsw"], cells=3))
    made = [build(store, left, [first], months[0], "there are 3 cells instead of 4")[0][0] for _ in range(2)]
    second = made[1]
    assert second == made[0]
    assert second.plan.notes[0] == "trained as in snapshot 000000000000, cells merged: there are 3 cells instead of 4"
    assert sum(count_cells(second)[:3]) == 3
    assert count_cells(second)[0] <= 1, "only a cell without vectors is built again"
    questions = clouds(100, 21)
    found = open_index(store.blobs.get_local_path(second.blob), defaults=second.plan.search).search(questions, 10)[1]
    _, exact = ExactIndex(left).search(questions, 10)
    assert np.mean([len({*a} & {*b}) / 10 for a, b in zip(found, exact, strict=True)]) > 0.97


def test_cells_that_cannot_be_split_are_kept(store: Store, months: Months) -> None:
    (first, _), _ = build(store, months[0])
    assert first.training
    worn = replace(first, training=(first.training[0], first.training[1].with_imbalance(2.9)))
    (second, _), _ = build(store, months[0], [worn], months[0])
    assert second.plan.notes == (
        "trained as in snapshot 000000000000, cells split: the largest cell has grown to 2.90 times the mean",
    )
    assert (second.blob, second.training[0] if second.training else None) == (first.blob, first.training[0])
    assert count_cells(second) == [0, 0, 3, 0]


def test_how_even_the_cells_are_is_passed_on(store: Store, months: Months) -> None:
    (hnsw, ivf), _ = build(store, months[0])
    rows = np.bincount(nearest(np.concatenate([np.load(path) for path in months[0]])))
    assert (
        hnsw.training[1].imbalance == hnsw.training[1].imbalance_now == pytest.approx(3 * rows.max() / rows.sum(), 1e-3)
    )
    assert ivf.training[1].imbalance_now == 0
