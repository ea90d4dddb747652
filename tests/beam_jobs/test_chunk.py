"""Test the estimated time of the chunk job, which decides where it runs, and the template job before it."""

import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import pytest

from beam_jobs.chunk import ChunkTask, _estimate_seconds, load_template_table, plan_template_tasks, run, run_table_jobs
from beam_jobs.job_settings import JobSettings
from rag_model.corpus.chunk import ChunkRecipe
from rag_model.corpus.passages import PassageFile
from rag_model.corpus.plan import plan_dump
from rag_model.corpus.records import Part, Siteinfo, Slice
from rag_model.snapshots.parent import ParentPart
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store

MEGABYTE = Slice("dump.xml.bz2", 0, 1 << 20, "bz2", 1, 9)
SITE = Siteinfo("enwiki", "en", "")


def estimate_seconds(size: int = 0) -> float:
    """Estimate the time for a megabyte of a dump if the chunker's encoder has `size` bytes."""
    files = (("encoder", (("model.safetensors", BlobRef("sha256:" + "0" * 64, size)),)),) if size else ()
    return _estimate_seconds(
        ChunkTask(Part("part-00000", "wiki", 1, 9, (MEGABYTE,)), SITE, ChunkRecipe(), setting_files=files)
    )


def test_a_chunker_with_a_model_takes_as_long_as_encoding_its_passages() -> None:
    assert 0.5 < estimate_seconds() < 2
    assert estimate_seconds(700_000) < 2, "a tokenizer takes no more time"
    assert 20 < estimate_seconds(90_000_000) < 80, "MiniLM encodes 3,400 passages"


def test_the_templates_of_a_dump_are_read_once(tmp_path: Path) -> None:
    pages = "".join(
        f"<page><title>{title}</title><ns>{namespace}</ns><id>{i}</id><revision><id>1</id><text>{text}</text></revision></page>"
        for i, (title, namespace, text) in enumerate([("A", 0, "A {{b|c}}."), ("Template:B", 10, "b: {{{1}}}")], 1)
    )
    site = '<siteinfo><namespaces><namespace key="10">Template</namespace></namespaces></siteinfo>'
    store, folder = Store.open(str(tmp_path / "store"), create=True), tmp_path / "work"
    folder.mkdir()
    tables = []
    for name, xml in (("with", pages), ("without", pages.replace("<ns>10</ns>", "<ns>4</ns>"))):
        dump = tmp_path / f"{name}.xml"
        dump.write_text(f'<mediawiki xml:lang="en">{site}{xml}</mediawiki>', encoding="utf-8")
        plan, job_settings = plan_dump(str(dump), workdir=folder, stage=str), JobSettings.new(store.url, [])
        tables.append(run_table_jobs(store, plan, str(dump), (), job_settings).templates)
        tasks = plan_template_tasks(plan)
        assert len(tasks) == (name == "with"), "pages without templates are not read"
        for task in tasks:
            assert store.memo.find("templates", store.memo.compute_key(task.inputs()))
        assert run_table_jobs(store, plan, str(dump), (), job_settings).templates == tables[-1]
    with_templates, without_templates = tables
    assert load_template_table(store, with_templates).entries["b"].value == "b: {{{1}}}"
    assert without_templates is None, "the parts have the keys of a dump without templates"


ARTICLES = {1: "Ada", 2: "Ben & Co", 3: "Cyd", 4: "Dov"}
REDIRECTS = {
    11: ("Countess", "Ada", "#REDIRECT [[Ada]]"),
    12: ("Lady Ada", "Ada", "#redirect [[ada]] {{R}}"),
    13: ("Ada's youth", "Ada", "#REDIRECT [[Ada#Youth]]"),
    14: ("Benjamin & Sons", "Ben & Co", "#REDIRECT [[Ben & Co]]"),
    15: ("Dav", "Cyd", "#REDIRECT [[Cyd]]"),
    16: ("Loop", "Loop", "#REDIRECT [[Loop]]"),
}
PROPERTIES = (
    "CREATE TABLE `page_props` (...);\nINSERT INTO `page_props` VALUES (1,'defaultsort','Ada',NULL),"
    "(1,'wikibase_item','Q7259',NULL),(2,'displaytitle','(2,\\'wikibase_item\\',\\'Q1\\',',NULL),(4,'wikibase_item','Q4',NULL);\n"
)


class DumpBuild:
    """A dump of several parts with redirects, chunked by the jobs."""

    def __init__(
        self, folder: Path, make_multistream: Any, redirects: Mapping[int, tuple[str, str, str]], parent: Any = None
    ) -> None:
        folder.mkdir()
        pages = [(i, title, "", f"{title} lived.") for i, title in ARTICLES.items()]
        pages += [(i, title, target, text) for i, (title, target, text) in redirects.items()]
        elements = "".join(
            f"<page><title>{escape(title)}</title><ns>0</ns><id>{i}</id>"
            + (f"<redirect title={quoteattr(target)} />" if target else "")
            + f"<revision><id>1</id><text>{escape(text)}</text></revision></page>\n"
            for i, title, target, text in sorted(pages)
        )
        source = folder / "source.xml"
        siteinfo = "<siteinfo><dbname>enwiki</dbname></siteinfo>"
        source.write_text(f'<mediawiki xml:lang="en">{siteinfo}\n{elements}</mediawiki>\n', encoding="utf-8")
        (folder / "enwiki-20261101-page_props.sql.gz").write_bytes(gzip.compress(PROPERTIES.encode()))
        dump = make_multistream(folder, source, pages_a_stream=2)
        store = Store.open(str(folder.parent / "store"), create=True)
        plan = plan_dump(dump, workdir=folder, stage=str, part_bytes=1)
        job_settings, names = JobSettings.new(store.url, []), ("aliases", "wikidata")
        self.tables = run_table_jobs(store, plan, dump, names, job_settings)
        self.items = run_table_jobs(store, plan, dump, ("wikidata",), job_settings).pages  # no part has templates
        parents = [ParentPart(each.passages, each.article_log) for each in parent.results] if parent else []
        tasks = [
            ChunkTask(part, plan.siteinfo, ChunkRecipe(metadata=names), tuple(parents), tables=self.tables)
            for part in plan.parts
        ]
        self.results = run(tasks, job_settings)
        self.files = [store.blobs.get_local_path(result.passages) for result in self.results]
        self.n_reused = sum(result.stats.inherited for result in self.results)
        self.passages = []
        for path in self.files:
            with PassageFile(path) as file:
                self.passages += file.iter_passages()

    def list_texts(self) -> list[tuple[str, str]]:
        return [(passage.text, passage.wikidata) for passage in self.passages]


def test_redirects_and_items_of_a_dump_are_metadata_of_its_articles(
    tmp_path: Path, make_multistream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = DumpBuild(tmp_path / "first", make_multistream, REDIRECTS)
    assert first.items is not None
    assert len(first.results) > 2, "redirects are in other parts than their targets"
    assert first.list_texts() == [
        ("Countess; Lady Ada. Ada lived.", "Q7259"),
        ("Benjamin & Sons. Ben & Co lived.", ""),
        ("Dav. Cyd lived.", ""),
        ("Dov lived.", "Q4"),
    ]
    # A redirect gets another target: the articles of both targets are chunked again.
    changed = {**REDIRECTS, 15: ("Dav", "Dov", "#REDIRECT [[Dov]]")}
    refresh = DumpBuild(tmp_path / "refresh", make_multistream, changed, first)
    assert [text for text, _ in refresh.list_texts()[2:]] == ["Cyd lived.", "Dav. Dov lived."]
    assert refresh.n_reused == 2
    monkeypatch.setattr("beam_jobs.chunk._MAX_FILE_REDIRECTS", 1)  # as many files as redirects
    full = DumpBuild(tmp_path / "full", make_multistream, changed)
    assert [path.read_bytes() for path in refresh.files] == [path.read_bytes() for path in full.files]
    # A further redirect without new words changes no article.
    further_redirects = {**changed, 17: ("Ada Countess", "Ada", "#REDIRECT [[Ada]]")}
    assert DumpBuild(tmp_path / "more", make_multistream, further_redirects, refresh).n_reused == 4
    # The title of a redirect that was taken down is no alias of a later build.
    Store.open(str(tmp_path / "store")).takedowns.add("enwiki", ["14"], "asked to", "operator")
    later = DumpBuild(tmp_path / "later", make_multistream, further_redirects, refresh)
    assert later.list_texts()[1] == ("Ben & Co lived.", "")
    assert later.n_reused == 3
