"""Deltas of a real rebuild: pulls fetch fewer bytes with them, no build needs them, and takedowns delete them."""

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.reindex import reindex
from flows.takedown import takedown
from rag_model.corpus.chunk import ChunkRecipe
from rag_model.digest import digest_file
from rag_model.evaluation.gate import GateRecipe
from rag_model.index.quality.results import RecallFloor
from rag_model.index.recipe import IndexRecipe
from rag_model.retrieve.indexes import derive_index_file, open_index
from rag_model.snapshots.encoding import RepresentRecipe
from rag_model.snapshots.recipe import Recipe
from rag_model.store.diff import diff_snapshots
from rag_model.store.pulling.deltas import STAGE
from rag_model.store.pulling.folder import MANIFEST
from rag_model.store.pulling.pull import pull
from rag_model.store.store import Store
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.versions.manifest import passages_path, select_files
from rag_model.store.versions.moves import rollback
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.blob_texts import list_blobs_with
from tests.fixtures.tiny_splade import save_mlm

LOOSE = RecallFloor(0.0, 0.0)  # the encoder is random, so recall may be low
INDEXES = {
    "hnsw": IndexRecipe("HNSW8"),
    "lists": IndexRecipe("IVF4,SQ8"),
    "words": IndexRecipe("BM25"),
    "bag": IndexRecipe("Impact1", over="bag"),
}
PAGES, EDITED = 100, 50
SECRET = b"Xylophagous"  # the edit; a takedown must remove all its bytes


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A recipe with an index of each kind that has deltas or is derived from the parent's index."""
    bag = RepresentRecipe(kind="bag", encoder=str(save_mlm(tmp_path_factory.mktemp("mlm"))))
    gate = GateRecipe(queries=8, floors={"hnsw": LOOSE, "lists": LOOSE})
    return replace(Recipe(chunk=ChunkRecipe(words=10)), represent={"bag": bag}, index=INDEXES, gate=gate)


@pytest.fixture(scope="module")
def dumps(
    tmp_path_factory: pytest.TempPathFactory, page_xml: Callable[..., str], export_xml: Callable[..., bytes]
) -> tuple[str, str]:
    """A dump, and the dump of a month later, in which one page of a hundred is edited."""
    words = random.Random(1)
    texts = {page: " ".join(f"w{words.randrange(10**6)}" for _ in range(40)) for page in range(1, PAGES + 1)}
    folder = tmp_path_factory.mktemp("dumps")
    for name, edit in (("old.xml", ""), ("new.xml", f"{SECRET.decode()} ")):
        pages = [
            page_xml(page, edit * (page == EDITED) + text, rev_id=1 + (page == EDITED and bool(edit)))
            for page, text in texts.items()
        ]
        (folder / name).write_bytes(export_xml(*pages))
    return str(folder / "old.xml"), str(folder / "new.xml")


@pytest.fixture(scope="module")
def first_month(dumps: tuple[str, str], tiny: Path, recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the snapshot of the first month."""
    store = tmp_path_factory.mktemp("first") / "store"
    reindex.fn(dumps[0], str(store), str(tiny), recipe)
    return store


@pytest.fixture
def store(first_month: Path, tmp_path: Path) -> Path:
    """A copy of the store with the first month."""
    return Path(shutil.copytree(first_month, tmp_path / "store"))


def list_deltas(store: Store) -> dict[str, str]:
    """Return the blob of each delta by the key of its record."""
    keys = [name.partition(".")[0] for name in store.files.list_names(f"memo/{STAGE}")]
    records = {key: record for key in keys if (record := store.memo.find(STAGE, key))}
    return {key: ref.path.rpartition("/")[2] for key, record in records.items() for ref in record.outputs.values()}


def test_takedown_deletes_the_deltas_that_contain_the_page(
    store: Path, dumps: tuple[str, str], tiny: Path, recipe: Recipe
) -> None:
    """Before the takedown, a pull of the second month fetches fewer bytes, and results in the same files."""
    library, dest = Store.open(str(store)), store.with_name("dest")
    old_snapshot = library.snapshots.resolve("latest")
    pull(library, old_snapshot, dest)
    new_snapshot = reindex.fn(dumps[1], str(store), str(tiny), recipe).snapshot
    files = library.snapshots.get(new_snapshot).content.files
    select = select_files(library.snapshots.get(new_snapshot).content)
    report = pull(library, new_snapshot, dest, select=select, derive_index=derive_index_file)
    paths = [path.relative_to(report.path).as_posix() for path in report.path.rglob("*.*") if path.name != MANIFEST]
    assert len(paths) >= 4
    assert all(digest_file(report.path / path) == files[path].id for path in paths)
    blobs = {*list_deltas(library).values()}
    assert len(blobs) == 5, "passages, terms, lists, and a graph with and without the old graph"
    with Snapshot.from_store(library, old_snapshot) as parent, Snapshot.from_store(library, new_snapshot) as child:
        fetched_bytes = {kind: plan.fetched_bytes for kind, plan in diff_snapshots(parent, child).pull.items()}
    assert 0 < fetched_bytes["index/bag"] < 0.1 * files["index/bag.postings"].size
    assert report.fetched_bytes == sum(fetched_bytes.values()) - fetched_bytes["index/words"]

    for blob in blobs:  # as `verify` advises if deltas are damaged
        (store / "blobs" / blob[:2] / blob).unlink()
    assert reindex.fn(dumps[1], str(store), str(tiny), recipe).snapshot == new_snapshot
    assert all((store / "blobs" / blob[:2] / blob).exists() for blob in blobs)

    assert {*list_blobs_with(store, SECRET)} & blobs, "the deltas contain the edit"
    n_derived = len([*library.memo.iter_inputs("derive")])
    takedown.fn(str(store), [str(EDITED)])
    assert len([*library.memo.iter_inputs("derive")]) == n_derived + 2, "both inverted indexes are derived"
    collect_garbage(library, 0.0)
    assert list_blobs_with(store, SECRET) == []
    assert list_deltas(library) == {}
    assert not blobs & {path.name for path in (store / "blobs").glob("??/*")}


def test_inverted_indexes_are_derived_from_the_parent(
    store: Path, dumps: tuple[str, str], tiny: Path, recipe: Recipe
) -> None:
    """No part is scattered again, and the files equal those of a build without a parent."""
    library, fresh = Store.open(str(store)), store.with_name("fresh")

    def count_inverted_scatters() -> int:
        return sum(inputs["plan"]["kind"] in ("bm25", "impact") for inputs in library.memo.iter_inputs("scatter"))

    n_scatters = count_inverted_scatters()
    contents = []
    for url in (store, fresh):
        snapshot = reindex.fn(dumps[1], str(url), str(tiny), recipe).snapshot
        contents.append(Store.open(str(url)).snapshots.get(snapshot).content)
    for name in ("words", "bag"):
        assert len({content.files[content.index_file(name)] for content in contents}) == 1
        assert contents[0].indexes[name] == contents[1].indexes[name]
    assert len([*library.memo.iter_inputs("derive")]) == 2
    assert count_inverted_scatters() == n_scatters > 0


def test_build_is_published_when_deltas_cannot_be_written(
    store: Path, dumps: tuple[str, str], tiny: Path, recipe: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    library = Store.open(str(store))
    content = library.snapshots.get(library.snapshots.resolve("latest")).content
    (store / content.files[content.index_file("lists")].path).unlink()  # Deltas compare the new lists with it.
    snapshot = reindex.fn(dumps[1], str(store), str(tiny), recipe).snapshot
    assert library.snapshots.resolve("latest") == snapshot
    assert "deltas not written, so clients pull whole files: " in capfd.readouterr().err


def test_repeated_updates_after_a_rollback_equal_full_builds(
    store: Path, dumps: tuple[str, str], tiny: Path, recipe: Recipe, page_xml: Any, export_xml: Any, tmp_path: Path
) -> None:
    """Successive dumps turn half of the pages into duplicates, drop most pages, and replace all rows."""
    library = Store.open(str(store))
    loose_recipe = replace(recipe, gate=replace(recipe.gate, max_passage_loss=1.0))
    texts = {page: " ".join(f"v{page * number}" for number in range(40)) for page in range(1, PAGES + 1)}
    first_snapshot = library.snapshots.resolve("latest")
    reindex.fn(dumps[1], str(store), str(tiny), loose_recipe)
    rollback(library, "latest")
    assert library.snapshots.resolve("latest") == first_snapshot
    states = {
        "duplicates": {page: texts[min(page, PAGES // 2)] for page in texts},
        "emptied": {page: texts[page] for page in range(1, 20)},
        "replaced": {page: f"other {text}" for page, text in texts.items()},
    }
    for name, pages in states.items():
        dump = tmp_path / f"{name}.xml"
        dump.write_bytes(export_xml(*(page_xml(page, text, rev_id=9) for page, text in pages.items())))
        contents = []
        for url in (store, tmp_path / f"fresh-{name}"):
            outcome = reindex.fn(str(dump), str(url), str(tiny), loose_recipe)
            contents.append(Store.open(str(url)).snapshots.get(outcome.snapshot).content)
        updated, fresh = contents
        paths = [updated.index_file("words"), updated.index_file("bag"), passages_path("part-00000")]
        assert [updated.files[path] for path in paths] == [fresh.files[path] for path in paths], name
        with Snapshot.from_store(library, library.snapshots.resolve("latest")) as snapshot:
            assert open_index(snapshot, "hnsw").n == snapshot.n == fresh.n
