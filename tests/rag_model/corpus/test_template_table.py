"""Templates that a dump defines are expanded, and changed templates cause their articles to be chunked again."""

import bz2
import json
from collections.abc import Mapping
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from rag_model.corpus.article_log import ReusableArticles
from rag_model.corpus.chunk import ChunkRecipe, ChunkStats, chunk_part
from rag_model.corpus.dump_formats.mediawiki import FORMAT
from rag_model.corpus.markup.template_table import TemplateEntry, TemplateTable, merge_templates, read_templates
from rag_model.corpus.markup.templates import use_templates
from rag_model.corpus.passages import PassageFile
from rag_model.corpus.plan import plan_dump
from rag_model.corpus.records import Page, Plan, Siteinfo, hash_id
from rag_model.corpus.wikitext import clean_wikitext

SITE = Siteinfo("ltgwiki", "ltg", "", {"taiss": 10, "template": 10, "file": 6, "category": 14})
TEMPLATES = {
    # Templates of the Latgalian Wikipedia, whose language names are in no table of this package.
    "Taiss:Ll": "#redirect [[Template:Language link]]",
    "Taiss:Language link": "[[{{{1}}} volūda|{{{1}}}]]",
    "Taiss:LangWithName": "{{ll|{{{2}}}}}: {{lang|{{{1}}}|{{{3}}}}}",
    "Taiss:Vol-en": "{{langWithName|en|anglīšu|''{{{1}}}''}}<noinclude>\n[[Kategoreja:Volūdu taisi]]</noinclude>",
    "Taiss:Plural": "{{{1}}} {{#if:{{{2|}}}|{{{2}}}|{{#switch:{{{1}}}|1=gods|2|3=godi|#default=godu}}}}",
    "Taiss:Upper": "{{uc:{{{1|{{PAGENAME}}}}}}}{{#ifeq:{{{1}}}|a|!|}}",
    "Taiss:Note": "<ref>{{{1}}}</ref>",
    "Taiss:Doubt": "<sup class='noprint'>[{{{1|doubt}}}]</sup>",
    "Taiss:Stub": '<div class="notice" id="stub">This page is short.</div>',
    "Taiss:Navbar": "{{Navbox|name=Navbar|list1=[[A]] [[B]]}}",
    "Taiss:Nūruodis": "{{#invoke:Footnotes|main|{{{1}}}}}",
    "Template:Convert": "#REDIRECT [[Taiss:Puorveiduot]]",
    "Taiss:Puorveiduot": "{{#invoke:Local|main}}",
    "Taiss:Day": "{{{1}}} ir {{{2}}} gods dīna.",
    "Taiss:Count": "{{#invoke:Count|main}}",
    "Taiss:Loop": "{{Loop|{{{1}}}}}",
    "Taiss:Dab": "<p>Many things</p>__DISAMBIG__",
    "Taiss:Dab2": "#REDIRECT [[Template:Dab]]",
}


def build_table(templates: Mapping[str, str]) -> TemplateTable:
    pages = [Page(i, 1, None, 10, title, False, "wikitext", text) for i, (title, text) in enumerate(templates.items())]
    return TemplateTable.from_bytes(merge_templates([read_templates(pages, SITE.language, SITE.namespaces)]).to_bytes())


TABLE = build_table(TEMPLATES)


@pytest.mark.parametrize(
    ("wikitext", "expected"),
    [
        ("Augi ({{vol-en|plants}}) aug", "Augi (anglīšu: plants) aug"),
        ("Augi ({{Taiss:Vol-en|plants}}) aug", "Augi (anglīšu: plants) aug"),
        ("a {{plural|1}}, {{plural|3}}, {{plural|7}}, {{plural|2|x}}", "a 1 gods, 3 godi, 7 godu, 2 x"),
        ("a {{upper|a}} {{upper}}", "a A! TITLE"),
        ("a{{note|b}} c{{doubt|d}} {{navbar|e}}.", "a c."),
        ("x {{puorveiduot|5|mi|km}} y", "x 5 mi (8.0 km) y"),
        ("x {{count|words}} y", "x words y"),
        ("x {{loop|words}} y", "x words y"),
        ("{{stub}}\nText.", "Text."),
        ("{{day|1 May|121}}\nText.", "1 May ir 121 gods dīna.\nText."),
        ("{{vol-en|plants}}\nText.", "Text."),
    ],
)
def test_templates_of_the_dump_are_expanded(wikitext: str, expected: str) -> None:
    with use_templates(TABLE):
        (lead,) = clean_wikitext(wikitext, SITE, "Title")
    assert lead.text == expected


def test_page_without_templates_of_the_dump_is_unchanged() -> None:
    page = "A {{lang|fr|b}} {{convert|5|mi|km}} {{unknown|c}}.\n{{quote|d}}"
    with use_templates(TABLE) as use:
        assert clean_wikitext(page, SITE) == clean_wikitext(page, SITE)
    assert use.names == {"unknown"}


def build_chain(n: int, body: str) -> dict[str, str]:
    return {f"n{i}": body.format(f"{{{{n{i + 1}|{{{{{{1}}}}}}}}}}") for i in range(n)}


@pytest.mark.parametrize(
    "bodies",
    [
        {"a": "x {{a|{{{1}}}}} {{a}}"},
        {"a": "{{b|{{{1}}}}}", "b": "{{a|{{{1}}}}}"},
        {"a": "{{n0|{{{1}}}}}", **build_chain(30, "{0}" * 20)},
        {"a": "{{{1}}}" * 500},
        {"a": "{{n0|{{{1}}}}}", **build_chain(5_000, "{0}")},
        {"a": "{{a" * 600},
        {"a": "{{#if:{{{1}}}|" * 300},
    ],
)
def test_expansion_of_hostile_templates_is_limited(bodies: Mapping[str, str]) -> None:
    table = TemplateTable({name: TemplateEntry("body", body) for name, body in bodies.items()})
    page = "w {{a|" + "q" * 5_000 + "}}" + " {{a|zz}}" * 500
    with use_templates(table):
        assert sum(len(section.text) for section in clean_wikitext(page, SITE)) < 2_500_000


def write_dump(
    path: Path, articles: Mapping[int, str], templates: Mapping[str, str], messages: Mapping[str, str] = {}
) -> Path:
    pages = [(i, 0, f"Rakstīņs {i}", text) for i, text in articles.items()]
    pages += [(1_000 + i, 10, title, text) for i, (title, text) in enumerate(templates.items())]
    pages += [(2_000 + i, 8, title, text) for i, (title, text) in enumerate(messages.items())]
    names = "".join(f'<namespace key="{key}">{name}</namespace>' for key, name in {0: "", 10: "Taiss"}.items())
    xml = "".join(
        f"<page><title>{title}</title><ns>{key}</ns><id>{i}</id><revision><id>1</id>"
        f"<model>wikitext</model><text>{escape(text)}</text></revision></page>"
        for i, key, title, text in pages
    )
    info = f"<siteinfo><dbname>ltgwiki</dbname><namespaces>{names}</namespaces></siteinfo>"
    path.write_text(f'<mediawiki xml:lang="ltg">{info}{xml}</mediawiki>', encoding="utf-8")
    return path


class ChunkedPart:
    """The files of a part that was chunked with the templates of its dump."""

    def __init__(self, folder: Path, templates: Mapping[str, str], parent: "ChunkedPart | None" = None) -> None:
        articles = {1: "Augi ({{vol-en|plants}}) aug.", 2: "Cyts {{count|teksts}}.", 3: "{{dab2}}\n* [[A]]\n* [[B]]"}
        folder.mkdir()
        plan = plan_dump(str(write_dump(folder / "x.xml", articles, templates)), workdir=folder, stage=str)
        (part,), info = plan.parts, plan.siteinfo
        table = merge_templates([read_templates(FORMAT.read_templates(part), info.language, info.namespaces)])
        self.files = folder / "passages.parquet", folder / "articles.parquet"
        with ReusableArticles([parent.files] if parent else [], table) as reusable:
            self.stats: ChunkStats = chunk_part(part, info, ChunkRecipe(), *self.files, reusable, template_table=table)
        with PassageFile(self.files[0]) as file:
            self.texts = [passage.text for passage in file.iter_passages()]


def test_articles_with_changed_templates_are_chunked_again(tmp_path: Path) -> None:
    first = ChunkedPart(tmp_path / "first", TEMPLATES)
    assert first.texts == ["Augi (anglīšu: plants) aug.", "Cyts teksts."]
    assert first.stats.dropped == {"disambiguation": 1, "namespace": len(TEMPLATES)}
    assert first.stats.unknown_templates == {"count": 1}
    unchanged = ChunkedPart(tmp_path / "same", TEMPLATES, first)
    assert (unchanged.stats.inherited, unchanged.texts) == (2, first.texts)
    # A template that another one includes has changed: only the article that uses it is chunked again.
    changed = {**TEMPLATES, "Taiss:LangWithName": "{{{3}}} [{{{2}}}]"}
    refresh = ChunkedPart(tmp_path / "refresh", changed, unchanged)
    assert (refresh.stats.inherited, refresh.texts) == (1, ["Augi (plants [anglīšu]) aug.", "Cyts teksts."])
    assert refresh.files[0].read_bytes() == ChunkedPart(tmp_path / "full", changed).files[0].read_bytes()
    # First an unknown template gets a body; then the dump has no templates.
    defined = ChunkedPart(tmp_path / "defined", {**changed, "Taiss:Count": "<b>{{{1}}}!</b>"}, refresh)
    assert (defined.stats.inherited, defined.texts[1]) == (1, "Cyts teksts!.")
    without_templates = ChunkedPart(tmp_path / "without", {}, defined)
    assert without_templates.texts == ["Augi (plants) aug.", "Cyts teksts.", "A B"]
    assert without_templates.stats.unknown_templates == {"count": 1, "dab2": 1, "vol-en": 1}


@pytest.mark.parametrize("dump_type", ["multistream", "xml.bz2", "xml"])
def test_only_page_runs_with_templates_are_read(tmp_path, make_multistream, dump_type: str) -> None:
    prose = " ".join(f"{hash_id(str(i)):x}" for i in range(25_000))
    articles = {i: f"{prose} {i}" for i in range(1, 9)}
    messages = {"MediaWiki:Disambiguationspage": "* [[Taiss:Disambig]]", "MediaWiki:Edit": "[[Taiss:No]]"}
    source = write_dump(tmp_path / "x.xml", articles, TEMPLATES, messages)
    dump = str(source)
    if dump_type == "multistream":
        dump = make_multistream(tmp_path, source, pages_a_stream=2)
    elif dump_type == "xml.bz2":
        dump = str(tmp_path / "y.xml.bz2")
        Path(dump).write_bytes(bz2.compress(source.read_bytes()))
    plan = plan_dump(dump, workdir=tmp_path, stage=str)
    info = plan.siteinfo
    assert plan.template_parts
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    tables, sizes = [], []
    for parts in (plan.parts, plan.template_parts):
        pages = [page for part in parts for page in FORMAT.read_templates(part)]
        tables.append(merge_templates([read_templates(pages, info.language, info.namespaces)]).to_bytes())
        sizes.append(sum(byte_slice.length for part in parts for byte_slice in part.slices))
    assert tables[0] == tables[1] != merge_templates([]).to_bytes()
    assert b'"disambig"' in tables[0].lower()
    assert sizes[1] < sizes[0] / 3
    without_templates = plan_dump(str(write_dump(tmp_path / "z.xml", articles, {})), workdir=tmp_path, stage=str)
    assert without_templates.template_parts == ()
