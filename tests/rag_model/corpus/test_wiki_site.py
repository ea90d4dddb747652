"""A MediaWiki site is followed: after every kind of change, an incremental plan has the passages of a full one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from beam_jobs.chunk import plan_chunk_tasks  # noqa: F401
from rag_model.corpus.chunk import ChunkRecipe, chunk_part
from rag_model.corpus.passages import PassageFile
from rag_model.corpus.records import Plan
from rag_model.snapshots.planning import plan_parts
from rag_model.snapshots.recipe import Recipe
from rag_model.store.store import Store
from tests.fixtures.wiki_server import Wiki, running_wiki

pytestmark = pytest.mark.xdist_group("wiki")

PAGE = (
    "<page><title>{title}</title><ns>0</ns><id>{id}</id><revision><id>{id}</id><timestamp>2001-02-03T04:05:06Z</timestamp>"
    "<contributor><username>A</username></contributor><model>wikitext</model><format>text/x-wiki</format>"
    "<text>{text}</text></revision></page>"
)
SETTINGS = Recipe(part_bytes=1000)


def export(pages: dict[str, str]) -> str:
    """Return an export of pages by title."""
    elements = (PAGE.format(id=i, title=title, text=text) for i, (title, text) in enumerate(pages.items(), 1))
    return f'<mediawiki xml:lang="en"><siteinfo><dbname>x</dbname></siteinfo>{"".join(elements)}</mediawiki>'


@pytest.fixture(scope="module")
def wiki(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wiki]:
    with running_wiki(tmp_path_factory.mktemp("wiki") / "one") as running:
        text = "Page number {i} has '''words''' about the subject {i}. {{{{echo|said {i}}}}}"
        running.import_xml(export({f"Page {i}": text.format(i=i) for i in range(60)}))
        running.edit("Template:Echo", "And so it was {{{1}}}.")
        yield running


def read_passages(plan: Plan, folder: Path) -> list[tuple[Any, ...]]:
    """Return the passages of a plan."""
    rows = []
    for part in plan.parts:
        chunk_part(part, plan.siteinfo, ChunkRecipe(), folder / "out.parquet")
        with PassageFile(folder / "out.parquet") as file:
            rows += [(p.id, p.rev_id, p.title, p.text, p.revised) for p in file.iter_passages()]
    return rows


def edit_pages(wiki: Wiki) -> None:
    wiki.edit("Page 3", "Page three is new & <b>bold</b>, with a | bar.")
    wiki.edit("New page", "A page that was not there.")
    wiki.edit("Page 9", "#REDIRECT [[Page 10]]")
    wiki.edit("Page 8", "Edited last, and soon gone.")
    wiki.delete("Page 8")


def move_pages(wiki: Wiki) -> None:
    wiki.move("Page 4", "Moved page")
    wiki.move("Moved page", "Page 4")  # over the redirect
    wiki.move("Page 5", "Another page", redirect=False)
    wiki.move("Page 11", "User:Admin/Page 11")
    wiki.move("Page 12", "Page 12, moved")


def delete_and_restore_pages(wiki: Wiki) -> None:
    wiki.delete("Page 6")
    wiki.delete("Page 7")
    wiki.restore("Page 7")


def restore_and_import_pages(wiki: Wiki) -> None:
    wiki.restore("Page 6")
    wiki.import_xml(export({"Imported": "This came from elsewhere.", "Page 13": "Imported into an old page."}))
    wiki.move("User:Admin/Page 11", "Page 11 again")


def test_after_every_change_the_passages_are_those_of_a_full_build(wiki: Wiki, tmp_path: Path) -> None:
    followed = Store.open(str(tmp_path / "followed"), create=True)
    plan = plan_parts(followed, wiki.dump, SETTINGS)
    assert (plan.siteinfo.dbname, plan.siteinfo.language, plan.licence) == ("wiki", "en", "CC BY-SA 3.0")
    for change in (edit_pages, move_pages, delete_and_restore_pages, restore_and_import_pages, lambda wiki: None):
        change(wiki)
        wiki.queries.clear()
        plan = plan_parts(followed, wiki.dump, SETTINGS)
        assert len(wiki.queries) <= 3, wiki.queries
        assert not any("gapnamespace" in query for query in wiki.queries), "the pages were listed"
        full = plan_parts(Store.open(str(tmp_path / str(change)), create=True), wiki.dump, SETTINGS)
        assert read_passages(plan, tmp_path) == read_passages(full, tmp_path)
    assert len(wiki.queries) > 1
    wiki.queries.clear()
    assert plan_parts(followed, wiki.dump, SETTINGS) == plan
    assert len(wiki.queries) == 1, "one request tells that nothing happened"
