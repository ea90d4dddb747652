"""Deltas of a real rebuild: what pulls spare by them, that no build needs them, and that a takedown ends them."""

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
from tests.fixtures.blob_texts import told
from tests.fixtures.tiny_splade import save_mlm

LOOSE = RecallFloor(0.0, 0.0)  # the neighbours of random vectors are hard to find
INDEXES = {
    "hnsw": IndexRecipe("HNSW8"),
    "lists": IndexRecipe("IVF4,SQ8"),
    "words": IndexRecipe("BM25"),
    "bag": IndexRecipe("Impact1", over="bag"),
}
PAGES, EDITED = 100, 50
SECRET = b"Xylophagous"  # the edit, of which no byte may be left


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A recipe with an index of each kind that has deltas, or is derived."""
    bag = RepresentRecipe(kind="bag", encoder=str(save_mlm(tmp_path_factory.mktemp("mlm"))))
    gate = GateRecipe(queries=8, floors={"hnsw": LOOSE, "lists": LOOSE})
    return replace(Recipe(chunk=ChunkRecipe(words=10)), represent={"bag": bag}, index=INDEXES, gate=gate)


@pytest.fixture(scope="module")
def dumps(
    tmp_path_factory: pytest.TempPathFactory, page_xml: Callable[..., str], export_xml: Callable[..., bytes]
) -> tuple[str, str]:
    """A dump, and the one of a month later: one page of a hundred is edited."""
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
def first(dumps: tuple[str, str], tiny: Path, recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the first month."""
    store = tmp_path_factory.mktemp("first") / "store"
    reindex.fn(dumps[0], str(store), str(tiny), recipe)
    return store


@pytest.fixture
def store(first: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(first, tmp_path / "store"))


def deltas(store: Store) -> dict[str, str]:
    """The blobs of all deltas, by the stage's key."""
    keys = [name.partition(".")[0] for name in store.files.list_names(f"memo/{STAGE}")]
    found = {key: store.memo.find(STAGE, key) for key in keys}
    return {key: ref.path.rpartition("/")[2] for key, made in found.items() if made for ref in made.outputs.values()}


def test_a_takedown_ends_the_deltas_with_the_page(
    store: Path, dumps: tuple[str, str], tiny: Path, recipe: Recipe
) -> None:
    """And before it a pull of the second month takes a part of the bytes, and gives the same files."""
    opened, dest = Store.open(str(store)), store.with_name("dest")
    old = opened.snapshots.resolve("latest")
    pull(opened, old, dest)
    new = reindex.fn(dumps[1], str(store), str(tiny), recipe).snapshot
    files = opened.snapshots.get(new).content.files
    select = select_files(opened.snapshots.get(new).content)
    report = pull(opened, new, dest, select=select, derive=derive_index_file)
    here = [path.relative_to(report.path).as_posix() for path in report.path.rglob("*.*") if path.name != MANIFEST]
    assert len(here) >= 4
    assert all(digest_file(report.path / path) == files[path].id for path in here)
    made = {*deltas(opened).values()}
    assert len(made) == 5, "passages, terms, lists, a graph with and without that of the old month"
    with Snapshot.from_store(opened, old) as before, Snapshot.from_store(opened, new) as after:
        told_bytes = {kind: its.fetched_bytes for kind, its in diff_snapshots(before, after).pull.items()}
    assert 0 < told_bytes["index/bag"] < 0.1 * files["index/bag.postings"].size
    assert report.fetched_bytes == sum(told_bytes.values()) - told_bytes["index/words"]

    for blob in made:  # as `verify` advises if deltas are damaged
        (store / "blobs" / blob[:2] / blob).unlink()
    assert reindex.fn(dumps[1], str(store), str(tiny), recipe).snapshot == new
    assert all((store / "blobs" / blob[:2] / blob).exists() for blob in made)

    assert {*told(store, SECRET)} & made, "or there is nothing to take down"
    derived = len([*opened.memo.iter_inputs("derive")])
    takedown.fn(str(store), [str(EDITED)])
    assert len([*opened.memo.iter_inputs("derive")]) == derived + 2, "words and terms are not built again"
    collect_garbage(opened, 0.0)
    assert told(store, SECRET) == []
    assert deltas(opened) == {}
    assert not made & {path.name for path in (store / "blobs").glob("??/*")}


def test_inverted_indexes_are_derived_from_the_parents(
    store: Path, dumps: tuple[str, str], tiny: Path, recipe: Recipe
) -> None:
    """No part is counted again, and the files are those of a store without a parent."""
    opened, fresh = Store.open(str(store)), store.with_name("fresh")

    def counted() -> int:
        return sum(one["plan"]["kind"] in ("bm25", "impact") for one in opened.memo.iter_inputs("scatter"))

    before = counted()
    made = [reindex.fn(dumps[1], str(url), str(tiny), recipe).snapshot for url in (store, fresh)]
    files = [Store.open(str(url)).snapshots.get(one).content for url, one in zip((store, fresh), made, strict=True)]
    for name in ("words", "bag"):
        assert len({content.files[content.index_file(name)] for content in files}) == 1
        assert files[0].indexes[name] == files[1].indexes[name]
    assert len([*opened.memo.iter_inputs("derive")]) == 2
    assert counted() == before > 0


def test_a_build_whose_deltas_cannot_be_made_is_published(
    store: Path, dumps: tuple[str, str], tiny: Path, recipe: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    opened = Store.open(str(store))
    before = opened.snapshots.get(opened.snapshots.resolve("latest")).content
    (store / before.files[before.index_file("lists")].path).unlink()  # what the new lists are compared with
    made = reindex.fn(dumps[1], str(store), str(tiny), recipe).snapshot
    assert opened.snapshots.resolve("latest") == made
    assert "deltas not written, so clients pull whole files: " in capfd.readouterr().err


def test_updates_on_updates_after_a_rollback_equal_full_builds(
    store: Path, dumps: tuple[str, str], tiny: Path, recipe: Recipe, page_xml: Any, export_xml: Any, tmp_path: Path
) -> None:
    """Half of the pages become duplicates, most pages go, and all rows are replaced, one after the other."""
    opened = Store.open(str(store))
    loose = replace(recipe, gate=replace(recipe.gate, max_passage_loss=1.0))
    texts = {page: " ".join(f"v{page * number}" for number in range(40)) for page in range(1, PAGES + 1)}
    first = opened.snapshots.resolve("latest")
    reindex.fn(dumps[1], str(store), str(tiny), loose)
    rollback(opened, "latest")
    assert opened.snapshots.resolve("latest") == first
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
            outcome = reindex.fn(str(dump), str(url), str(tiny), loose)
            contents.append(Store.open(str(url)).snapshots.get(outcome.snapshot).content)
        updated, fresh = contents
        same = [updated.index_file("words"), updated.index_file("bag"), *map(passages_path, ["part-00000"])]
        assert [updated.files[path] for path in same] == [fresh.files[path] for path in same], name
        with Snapshot.from_store(opened, opened.snapshots.resolve("latest")) as snapshot:
            assert open_index(snapshot, "hnsw").n == snapshot.n == fresh.n
