"""Plans of builds: a source is split only once, and an index that does not fit is refused before the build."""

import gzip
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rag_model.corpus.chunk import ChunkRecipe, ChunkStats
from rag_model.corpus.records import MetadataName, Part, Plan, Siteinfo, SiteSettings
from rag_model.errors import InputError, ResourceError, UsageError
from rag_model.index.recipe import IndexRecipe
from rag_model.snapshots.parent import Parent
from rag_model.snapshots.planning import (
    Inputs,
    collect_inputs,
    describe_missing_prose,
    plan_dry_run,
    plan_indexes,
    plan_parts,
)
from rag_model.snapshots.recipe import Recipe
from rag_model.snapshots.stage_results import ChunkResult
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest, PartEntry
from tests.fixtures.tiny import save_bert

RECIPE = Recipe(part_bytes=100_000)


def count_plans(store: Store, folder: Path) -> int:
    return len(list((folder / "store" / "memo" / "plan").glob("*.json")))


def test_split_source_is_not_split_again(store: Store, small_dump: Path, tmp_path: Path) -> None:
    first = plan_parts(store, str(small_dump), RECIPE)
    assert len(first.parts) > 1
    assert all(piece.url.startswith(store.url) for part in first.parts for piece in part.slices)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*") if path.is_file()}
    assert plan_parts(store, str(small_dump), RECIPE) == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*") if path.is_file()} == times
    assert plan_parts(store, str(small_dump), Recipe(part_bytes=200_000)) != first
    assert count_plans(store, tmp_path) == 4  # Each plan is also recorded by its page ranges, for the next build.


@pytest.mark.parametrize("is_multistream", [False, True])
def test_page_ranges_of_the_parent_are_kept(
    store: Store, small_dump: Path, tmp_path: Path, make_multistream: Callable[..., str], is_multistream: bool
) -> None:
    dump = make_multistream(tmp_path, small_dump) if is_multistream else str(small_dump)
    own_plan = plan_parts(store, dump, RECIPE)
    last, starts = own_plan.parts[-1].last_page, [0, 200, 210, 400]
    ends = [start - 1 for start in starts[1:]] + [last]

    def plan_ranges(recipe: Recipe = RECIPE, **corpus: str) -> list[tuple[int, int]]:
        ranges = zip(starts, ends, strict=True)
        entries = tuple(PartEntry(f"part-{i:05d}", *pages, rows=1) for i, pages in enumerate(ranges))
        source = {"kind": "wiki", "dbname": "enwiki", **corpus}
        parent = Parent(Manifest(Content(source, entries, {}, {"part_bytes": RECIPE.part_bytes})))
        parts = plan_parts(store, dump, recipe, parent=parent).parts
        return [(part.first_page, part.last_page) for part in parts]

    reference = [(part.first_page, part.last_page) for part in own_plan.parts]
    assert plan_ranges() == list(zip(starts, ends, strict=True)) != reference
    assert plan_ranges(dbname="dewiki") == reference, "page ids of another wiki are not comparable"
    assert plan_ranges(kind="documents") == reference
    ranges = plan_ranges(Recipe(part_bytes=1 << 30))
    assert ranges == [(0, last)], "the recipe requests parts of another size"


def test_table_of_wikidata_items_is_an_input_of_a_release(store: Store, small_dump: Path, tmp_path: Path) -> None:
    dump = shutil.copy(small_dump, tmp_path / "enwiki-20261101-pages-articles.xml")
    table = tmp_path / "enwiki-20261101-page_props.sql.gz"
    encoder = str(save_bert(tmp_path / "encoder"))

    def collect(*metadata: MetadataName) -> Inputs | None:
        return collect_inputs(store, str(dump), encoder, Recipe(chunk=ChunkRecipe(metadata=metadata)), None)

    old_inputs, old_items_inputs = collect(), collect("wikidata")
    table.write_bytes(b"items")
    items_inputs = collect("wikidata")
    table.write_bytes(b"more items")
    assert collect("wikidata") not in (old_items_inputs, items_inputs)
    assert items_inputs != old_items_inputs
    assert collect() == old_inputs is not None


def test_changed_source_is_split_again(store: Store, demo_dump: Path, small_dump: Path) -> None:
    assert plan_parts(store, str(small_dump), RECIPE) != plan_parts(store, str(demo_dump), RECIPE)


def test_plan_is_renewed_after_a_move_of_the_store(store: Store, small_dump: Path, tmp_path: Path) -> None:
    plan_parts(store, str(small_dump), RECIPE)
    moved_store = Store.open(str((tmp_path / "store").rename(tmp_path / "moved")))
    plan = plan_parts(moved_store, str(small_dump), RECIPE)
    assert all(piece.url.startswith(moved_store.url) for part in plan.parts for piece in part.slices)


def test_multistream_dump_is_not_copied(
    store: Store, small_dump: Path, tmp_path: Path, make_multistream: Callable[..., str]
) -> None:
    plan = plan_parts(store, make_multistream(tmp_path, small_dump), RECIPE)
    assert all(not piece.url.startswith(store.url) for part in plan.parts for piece in part.slices)
    assert not (tmp_path / "store" / "blobs").exists()


def test_limited_plan_is_not_recorded(store: Store, small_dump: Path, tmp_path: Path) -> None:
    plan_parts(store, str(small_dump), RECIPE, limit=2)
    assert not (tmp_path / "store" / "memo").exists()


def create_chunk_results(*rows: int) -> list[ChunkResult]:
    return [ChunkResult(BlobRef(f"sha256:{0:064}", 0), ChunkStats(count)) for count in rows]


def test_indexes_are_sized_for_all_passages() -> None:
    plans = plan_indexes({"a": IndexRecipe("HNSW32")}, create_chunk_results(3, 0, 4), {"embeddings": 32}, 1 << 30)
    assert (plans["a"].n, plans["a"].to_json()["d"]) == (7, 32)


def test_index_that_does_not_fit_is_refused_with_an_alternative() -> None:
    recipes, passages = {"graph": IndexRecipe("HNSW32")}, create_chunk_results(21_015_324)
    with pytest.raises(ResourceError, match=r"PQ|SQ"):
        plan_indexes(recipes, passages, {"embeddings": 768}, 8 << 30)
    plans = plan_indexes(recipes, passages, {"embeddings": 768}, None)  # The memory of other machines is unknown.
    assert plans["graph"].n == 21_015_324


def test_dump_without_passages_and_impossible_factory_are_refused() -> None:
    with pytest.raises(InputError, match="the dump has no passages"):
        plan_indexes({"a": IndexRecipe("HNSW32")}, create_chunk_results(0), {"embeddings": 32}, None)
    with pytest.raises(UsageError, match="PQ7"):
        plan_indexes({"a": IndexRecipe("IVF4,PQ7")}, create_chunk_results(5000), {"embeddings": 32}, None)


def test_reasons_for_dropped_pages_are_reported() -> None:
    dropped: list[dict[str, int]] = [{"namespace": 2, "redirect": 1}, {"namespace": 1_000}]
    results = [
        replace(result, stats=ChunkStats(0, dropped=drops))
        for result, drops in zip(create_chunk_results(0, 0), dropped, strict=True)
    ]
    with pytest.raises(
        InputError, match=r"all of its 1,003 pages were dropped \(outside the main namespace: 1,002, redirects: 1\)"
    ):
        plan_indexes({"a": IndexRecipe("HNSW32")}, results, {"embeddings": 32}, None)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_dry_run_reports_the_bytes_of_the_dump(name: str, tmp_path: Path) -> None:
    data = b"".join(b'{"id": "%d", "text": "A text of words."}\n' % i for i in range(1000))
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    plan, size = plan_dry_run(str(tmp_path / name), RECIPE)
    assert (len(plan.parts), size) == (1, (tmp_path / name).stat().st_size)


@pytest.mark.parametrize(("name", "line"), [("a.jsonl", '{"id": "7", "text": "A"}\n'), ("a.tsv", "7\tA\tT\n")])
def test_dry_run_refuses_a_repeated_id(name: str, line: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(2 * line)
    with pytest.raises(InputError, match="the id '7' occurs twice"):
        plan_dry_run(str(tmp_path / name), RECIPE)


@pytest.mark.parametrize(
    ("dbname", "part_format", "text", "expected"),
    [
        ("frwiktionary", "", "wikitext", "frwiktionary is a Wiktionary, whose entries are mostly templates"),
        ("enwikisource", "", "wikitext", "enwikisource is a Wikisource, whose texts are included from"),
        ("enwiktionary", "wiki_site", "wikitext", "or the address of the wiki with --text html"),
        ("enwiktionary", "wiki_site", "html", ""),
        ("enwiktionary", "enterprise", "wikitext", ""),
        ("enwiki", "", "wikitext", ""),
    ],
)
def test_html_is_advised_for_projects_without_prose_in_their_wikitext(
    dbname: str, part_format: str, text: str, expected: str
) -> None:
    part = Part("part-00000", "wiki", 0, 9, (), True, part_format)
    plan = Plan("wiki", Siteinfo(dbname, "en", ""), (part,))
    advice = describe_missing_prose(plan, Recipe(site=SiteSettings(text=text)))
    assert expected in advice
    assert bool(advice) == bool(expected)
