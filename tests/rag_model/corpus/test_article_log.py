"""An article's passages are reused only if nothing that determines them has changed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.corpus import chunk
from rag_model.corpus.article_log import ReusableArticles, compute_article_key, compute_key_basis
from rag_model.corpus.chunk import ChunkRecipe, ChunkStats, chunk_part
from rag_model.corpus.dump_formats.mediawiki import FORMAT, PageParser
from rag_model.corpus.passages import UNDATED_SCHEMA, PassageFile, PassageWriter
from rag_model.corpus.plan import plan_dump
from rag_model.corpus.records import Article, Page, Part, Section, Siteinfo, parse_seconds
from rag_model.corpus.wikitext import MAX_CHARS
from rag_model.errors import InputError
from tests.fixtures.plugin_package import install_package
from tests.fixtures.window_chunker import OverlappingWindows, save_tokenizer

SITE = Siteinfo("enwiki", "en", "https://en.wikipedia.org/wiki/Main_Page", {"file": 6})
PAGE = Page(7, 70, 1_767_225_600, 0, "Title", False, "wikitext", "Some text.")
DEFAULT = ChunkRecipe()
SECTIONS = ChunkRecipe("sections")  # the previous default
HOSTILE = "x" * (MAX_CHARS + 1)


def get_page_key(page: Page = PAGE, site: Siteinfo = SITE, recipe: ChunkRecipe = DEFAULT, version: int = 1) -> bytes:
    return compute_article_key(compute_key_basis(site, recipe.get_identity(), version), page)


def test_keys_of_older_versions_are_unchanged() -> None:
    """Article logs of an older version, which has computed these keys, are reused."""
    bases = [compute_key_basis(SITE, recipe.get_identity(), 2) for recipe in (SECTIONS, ChunkRecipe("words", 50))]
    assert bases == [
        b"sha256:62b7532f82d94920e536973f1792100c988ec84b27ac27210939eb9bc703f097",
        b"sha256:08cbceb34a7ab22da4f14c7264e10d8fe528c0d356db7beb62095f97dfeec339",
    ]
    assert SECTIONS.get_identity() == {
        "chunker": "sections",
        "words": 100,
        "quarantine_share": 0.01,
        "quarantine_floor": 20,
    }, "the memo key contains these fields"


def test_key_depends_on_all_inputs_of_the_passages() -> None:
    keys = [
        get_page_key(),
        get_page_key(replace(PAGE, page_id=8)),
        get_page_key(replace(PAGE, rev_id=71)),
        get_page_key(replace(PAGE, revised=1_767_225_601)),
        get_page_key(replace(PAGE, revised=None)),
        get_page_key(replace(PAGE, title="Other")),
        get_page_key(replace(PAGE, text="Some text!")),
        get_page_key(site=replace(SITE, language="de")),
        get_page_key(site=replace(SITE, namespaces={"bild": 6})),
        get_page_key(recipe=ChunkRecipe("words")),
        get_page_key(recipe=SECTIONS),
        get_page_key(recipe=ChunkRecipe(words=99)),
        get_page_key(version=2),
    ]
    assert len(set(keys)) == len(keys)


def test_nul_characters_do_not_move_text_between_fields() -> None:
    """Otherwise a document could get the passages or the id of another one."""
    basis = compute_key_basis(SITE, DEFAULT.get_identity(), 1)
    ids_and_titles = [("x", "A\0000\0None\0B"), ("x\0000\0None\0A", "B"), ("x", "A\0\1B"), ("x", "A\0B")]
    articles = [Article(page_id, 0, title, (Section("", "Text."),)) for page_id, title in ids_and_titles]
    assert len({compute_article_key(basis, article) for article in articles}) == len(articles)


@pytest.fixture
def part(request: pytest.FixtureRequest, tmp_path: Path, page_xml: Any, export_xml: Any) -> tuple[Part, Siteinfo]:
    """Plan a dump of 20 long pages, or of as many as the test asks for, and of three special ones."""
    long = " ".join(f"word{number}" for number in range(600))
    count = getattr(request, "param", 20)
    texts = ["One '''two'''.\n== Life ==\nThree.", "{{stub}}", HOSTILE, *(f"{long} {page}" for page in range(count))]
    return _plan_wiki(tmp_path, [page_xml(number, text) for number, text in enumerate(texts, start=1)], export_xml)


def chunk_with_reuse(
    part: tuple[Part, Siteinfo], folder: Path, *earlier: tuple[Path, Path], recipe: ChunkRecipe = DEFAULT
) -> tuple[ChunkStats, tuple[Path, Path]]:
    """Chunk a part with earlier passages and article logs, and return its statistics, passages and article log."""
    folder.mkdir()
    files = folder / "passages.parquet", folder / "articles.parquet"
    with ReusableArticles(earlier) as reusable:
        return chunk_part(*part, recipe, *files, reusable), files


def read_bytes(files: tuple[Path, Path]) -> list[bytes]:
    return [path.read_bytes() for path in files]


def test_other_chunker_settings_reuse_nothing(
    part: tuple[Part, Siteinfo], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_package(tmp_path, "chunkers", "overlapping = tests.fixtures.window_chunker:OverlappingWindows")
    monkeypatch.syspath_prepend(tmp_path)
    tokenizer = tmp_path / "tokenizer.json"
    save_tokenizer(tokenizer, "[UNK]")

    def count_reused(name: str, earlier: tuple[Path, Path], **settings: Any) -> int:
        recipe = ChunkRecipe("overlapping", settings={"tokenizer": str(tokenizer), "overlap": 8, **settings})
        return chunk_with_reuse(part, tmp_path / name, earlier, recipe=recipe)[0].inherited

    recipe = ChunkRecipe("overlapping", settings={"tokenizer": str(tokenizer), "overlap": 8})
    first, earlier = chunk_with_reuse(part, tmp_path / "1", recipe=recipe)
    assert count_reused("same", earlier) == first.articles > 0
    assert count_reused("explicit default", earlier, tokens=32) == first.articles
    assert count_reused("overlap", earlier, overlap=4) == 0
    tokenizer_copy = shutil.copy(tokenizer, tmp_path / "renamed.json")
    assert count_reused("renamed", earlier, tokenizer=str(tokenizer_copy)) == first.articles
    save_tokenizer(tokenizer, "[OTHER]")
    assert count_reused("tokenizer", earlier) == 0
    monkeypatch.setattr(OverlappingWindows, "version", "2")
    assert count_reused("version", earlier, tokenizer=str(tokenizer_copy)) == 0


@pytest.mark.parametrize("part", [200], indirect=True)
def test_reused_passages_equal_those_of_a_full_build(part: tuple[Part, Siteinfo], tmp_path: Path) -> None:
    """The part has several row groups of passages, an article without text, and one that cannot be parsed."""
    first, files = chunk_with_reuse(part, tmp_path / "1")
    assert (first.rows > 1024, first.dropped) == (True, {"no_text": 1, "unparsable": 1})
    second, second_files = chunk_with_reuse(part, tmp_path / "2", files)
    assert (first.inherited, second.inherited) == (0, second.articles)
    assert replace(second, inherited=0) == first
    assert read_bytes(second_files) == read_bytes(files)


def test_log_without_digests_is_reused(part: tuple[Part, Siteinfo], tmp_path: Path) -> None:
    first, (out, log) = chunk_with_reuse(part, tmp_path / "1")
    earlier = tmp_path / "earlier.parquet"
    pq.write_table(pq.read_table(log).drop_columns("digest"), earlier, store_schema=False)
    second, second_files = chunk_with_reuse(part, tmp_path / "2", (out, earlier))
    assert second == replace(first, inherited=first.articles)
    assert read_bytes(second_files) == read_bytes((out, log))


@pytest.mark.parametrize("part", [200], indirect=True)
def test_runs_of_reused_and_changed_articles_give_the_same_file(
    part: tuple[Part, Siteinfo], tmp_path: Path, page_xml: Any, export_xml: Any
) -> None:
    """Every seventh article is edited and one is deleted, over several row groups."""
    _, earlier = chunk_with_reuse(part, tmp_path / "1")
    long = " ".join(f"word{number}" for number in range(600))
    texts = {page: f"{long} {page} {'edited' if page % 7 == 0 else ''}".strip() for page in range(200) if page != 50}
    pages = [page_xml(page + 4, text) for page, text in texts.items()]
    (tmp_path / "dump.xml").write_bytes(export_xml(*pages))
    plan = plan_dump(str(tmp_path / "dump.xml"), workdir=tmp_path, stage=str, part_bytes=1 << 30)
    fresh, expected = chunk_with_reuse((plan.parts[0], plan.siteinfo), tmp_path / "fresh")
    second, files = chunk_with_reuse((plan.parts[0], plan.siteinfo), tmp_path / "again", earlier)
    assert 100 < second.inherited < 180
    assert replace(second, inherited=0) == fresh
    assert read_bytes(files) == read_bytes(expected)


def test_passages_of_the_previous_default_are_not_reused(part: tuple[Part, Siteinfo], tmp_path: Path) -> None:
    _, files = chunk_with_reuse(part, tmp_path / "before", recipe=SECTIONS)
    fresh, expected = chunk_with_reuse(part, tmp_path / "fresh")
    second, second_files = chunk_with_reuse(part, tmp_path / "again", files)
    assert (second.inherited, second) == (0, fresh)
    assert read_bytes(second_files) == read_bytes(expected)


def test_passages_of_another_version_are_not_reused(
    part: tuple[Part, Siteinfo], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        context.setattr(chunk, "KEY_VERSION", chunk.KEY_VERSION - 1)
        _, files = chunk_with_reuse(part, tmp_path / "before")
    assert chunk_with_reuse(part, tmp_path / "again", files)[0].inherited == 0


def test_passages_without_dates_are_not_reused(part: tuple[Part, Siteinfo], tmp_path: Path) -> None:
    """A takedown by an earlier version rewrites the other passages without dates."""
    fresh, (out, log) = chunk_with_reuse(part, tmp_path / "fresh")
    earlier = tmp_path / "earlier.parquet"
    with PassageFile(out) as file, PassageWriter(earlier, UNDATED_SCHEMA) as writer:
        for passage in file.iter_passages():
            writer.write(passage)
    second, (passages, _) = chunk_with_reuse(part, tmp_path / "again", (earlier, log))
    assert second == fresh
    assert passages.read_bytes() == out.read_bytes()
    with PassageFile(passages) as file:
        assert {passage.revised for passage in file.iter_passages()} == {parse_seconds("2026-11-01T12:00:00Z")}


def test_log_that_does_not_match_the_passages_is_ignored(part: tuple[Part, Siteinfo], tmp_path: Path) -> None:
    first, (out, log) = chunk_with_reuse(part, tmp_path / "1")
    without_first = tmp_path / "fewer.parquet"
    with PassageFile(out) as file, PassageWriter(without_first) as writer:
        for passage in list(file.iter_passages())[1:]:
            writer.write(passage)
    second, _ = chunk_with_reuse(part, tmp_path / "2", (without_first, log))
    assert second == first


def test_rows_of_another_page_are_not_reused(part: tuple[Part, Siteinfo], tmp_path: Path) -> None:
    first, (out, log) = chunk_with_reuse(part, tmp_path / "1")
    shifted = tmp_path / "shifted.parquet"
    with PassageFile(out) as file, PassageWriter(shifted) as writer:
        rows = list(file.iter_passages())
        for passage in [*rows[1:], rows[0]]:
            writer.write(passage)
    second, (passages, _) = chunk_with_reuse(part, tmp_path / "2", (shifted, log))
    assert replace(second, inherited=0) == first
    assert passages.read_bytes() == out.read_bytes()


def test_unreadable_log_is_reported(part: tuple[Part, Siteinfo], tmp_path: Path) -> None:
    _, (out, log) = chunk_with_reuse(part, tmp_path / "1")
    log.write_bytes(log.read_bytes()[:-10])
    with pytest.raises(InputError, match=r"articles\.parquet is not a readable article log"):
        ReusableArticles([(out, log)])


def _plan_wiki(folder: Path, pages: list[str], export_xml: Any) -> tuple[Part, Siteinfo]:
    folder.mkdir(exist_ok=True)
    (folder / "dump.xml").write_bytes(export_xml(*pages))
    plan = plan_dump(str(folder / "dump.xml"), workdir=folder, stage=str, part_bytes=1 << 30)
    return plan.parts[0], plan.siteinfo


def test_pages_in_the_log_are_not_parsed(
    tmp_path: Path, page_xml: Any, export_xml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among articles, a redirect and a page without text, only the changed page is parsed as XML."""
    texts = ["One.", "#REDIRECT [[A]]", "{{stub}}", "Four.", "Five."]
    pages = [page_xml(number, text) for number, text in enumerate(texts, start=1)]
    first, earlier = chunk_with_reuse(_plan_wiki(tmp_path / "old", pages, export_xml), tmp_path / "1")
    assert (first.articles, first.dropped) == (3, {"no_text": 1, "redirect": 1})
    pages[3] = page_xml(4, "Four, edited.")
    part = _plan_wiki(tmp_path / "new", pages, export_xml)
    parsed_pages: list[int] = []
    build_page = PageParser._build_page
    monkeypatch.setattr(PageParser, "_build_page", lambda self: (parsed_pages.append(1), build_page(self))[1])
    second, files = chunk_with_reuse(part, tmp_path / "2", earlier)
    assert (len(parsed_pages), second.inherited) == (1, 2)
    fresh, expected = chunk_with_reuse(part, tmp_path / "3")
    assert replace(second, inherited=0) == fresh
    assert read_bytes(files) == read_bytes(expected)


HIDDEN = [
    "<!-- {} -->",
    "<page><title>Outer</title><id>9</id><comment><![CDATA[{}]]></comment></page>",
    "<other>{}</other>",
    "<?note {} ?>",
    "<page><title>Outer</title><id>9</id><upload>{}</upload></page>",
]


@pytest.mark.parametrize("hidden", HIDDEN, ids=["comment", "cdata", "other element", "instruction", "nested"])
def test_logged_page_is_reused_only_as_a_page_element(
    hidden: str, tmp_path: Path, page_xml: Any, export_xml: Any
) -> None:
    """A logged page inside another element is not reused: the result is that of a full build."""
    pages = [page_xml(number, f"Text of {number}.") for number in (1, 20, 30)]
    _, earlier = chunk_with_reuse(_plan_wiki(tmp_path / "old", pages, export_xml), tmp_path / "1")
    part = _plan_wiki(tmp_path / "new", [pages[0], hidden.format(pages[1]), pages[2]], export_xml)
    second, (out, _) = chunk_with_reuse(part, tmp_path / "2", earlier)
    fresh, (expected, _) = chunk_with_reuse(part, tmp_path / "3")
    assert replace(second, inherited=0) == fresh
    assert out.read_bytes() == expected.read_bytes()


@pytest.mark.parametrize("hidden", HIDDEN, ids=["comment", "cdata", "other element", "instruction", "nested"])
def test_only_page_elements_outside_a_part_are_skipped(
    hidden: str, tmp_path: Path, page_xml: Any, export_xml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [page_xml(number, f"Text of {number}.") for number in (1, 20, 30)]
    hidden = hidden.replace("<id>9</id>", "<ns>0</ns><id>9</id>")
    dump, siteinfo = _plan_wiki(tmp_path, [pages[0], hidden.format(pages[1]), pages[2]], export_xml)
    part = replace(dump, first_page=30), siteinfo
    skimmed_stats, (out, _) = chunk_with_reuse(part, tmp_path / "1")
    monkeypatch.setattr(chunk, "_skim_outside_page", lambda element, part: None)
    parsed_stats, (expected, _) = chunk_with_reuse(part, tmp_path / "2")
    assert (skimmed_stats, skimmed_stats.articles) == (parsed_stats, 1)
    assert out.read_bytes() == expected.read_bytes()


def test_documents_are_reused(tmp_path: Path) -> None:
    texts = {f"d{number}": f"Text of document {number}." for number in range(50)}

    def plan_texts(name: str) -> tuple[Part, Siteinfo]:
        folder = tmp_path / name
        folder.mkdir()
        lines = (json.dumps({"id": document_id, "title": "T", "text": text}) for document_id, text in texts.items())
        (folder / "corpus.jsonl").write_text("\n".join(lines))
        plan = plan_dump(str(folder / "corpus.jsonl"), workdir=folder, stage=str)
        return plan.parts[0], plan.siteinfo

    first, earlier = chunk_with_reuse(plan_texts("old"), tmp_path / "1")
    texts |= {"d7": "Edited.", "d50": "New."}
    del texts["d9"]
    part = plan_texts("new")
    second, files = chunk_with_reuse(part, tmp_path / "2", earlier)
    fresh, expected = chunk_with_reuse(part, tmp_path / "3")
    assert (first.inherited, second.inherited) == (0, 48)
    assert replace(second, inherited=0) == fresh
    assert read_bytes(files) == read_bytes(expected)


def test_log_of_version_2_is_reused(part: tuple[Part, Siteinfo], tmp_path: Path) -> None:
    """Version 2 has numeric page ids, keys of parsed pages, and no dropped pages."""
    first, (out, log) = chunk_with_reuse(part, tmp_path / "1")
    basis = compute_key_basis(part[1], DEFAULT.get_identity(), chunk.KEY_VERSION)
    keys = {str(page.page_id): compute_article_key(basis, page) for page in FORMAT.read(part[0])}
    table = pq.read_table(log).drop_columns(["dropped", "revised"])
    pages = table["page_id"].to_pylist()
    table = table.set_column(0, "page_id", pa.array(map(int, pages), pa.int64()))
    table = table.set_column(1, "key", pa.array([keys[page] for page in pages], pa.binary(16)))
    pq.write_table(table, tmp_path / "earlier.parquet", store_schema=False)
    second, second_files = chunk_with_reuse(part, tmp_path / "2", (out, tmp_path / "earlier.parquet"))
    assert second == replace(first, inherited=first.articles)
    assert read_bytes(second_files) == read_bytes((out, log))


@given(data=st.data())
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_refreshes_over_random_edits_equal_full_builds(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory, page_xml: Any, export_xml: Any
) -> None:
    """Pages are edited, moved, redirected, deleted and added, in one or several parts."""
    folder = tmp_path_factory.mktemp("wiki")
    wiki = {page: ("Text. " * page, f"T{page}", 0) for page in range(1, 12)}
    earlier: list[tuple[Path, Path]] = []
    for generation in range(3):
        for page in data.draw(st.lists(st.integers(1, 14), max_size=6), "changed pages"):
            wiki.pop(page, None)
            change = data.draw(st.sampled_from(["edit", "redirect", "talk", "delete", "empty"]))
            if change != "delete":
                texts = {"edit": f"Edit {generation}.", "redirect": "#REDIRECT [[A]]", "empty": " "}
                wiki[page] = (texts.get(change, "Talk."), f"T{page}.{generation}", int(change == "talk"))
        pages = [page_xml(page, text, title=title, ns=str(ns)) for page, (text, title, ns) in sorted(wiki.items())]
        if not pages:
            continue
        dump = folder / f"{generation}.xml"
        dump.write_bytes(export_xml(*pages))
        part_bytes = data.draw(st.sampled_from([200, 1 << 30]), "bytes of a part")
        plan = plan_dump(str(dump), workdir=folder, stage=str, part_bytes=part_bytes)
        results: list[tuple[Path, Path]] = []
        for part in plan.parts:
            part_folder = folder / f"{generation}-{part.name}"
            stats, files = chunk_with_reuse((part, plan.siteinfo), part_folder, *earlier)
            fresh, expected = chunk_with_reuse((part, plan.siteinfo), part_folder / "full")
            assert replace(stats, inherited=0) == fresh
            assert read_bytes(files) == read_bytes(expected)
            results.append(files)
        earlier = results
