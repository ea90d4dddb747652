"""Tables, infoboxes and long lists become passages of their kind, and prose does not change."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from rag_model.corpus.chunk import ChunkRecipe, ChunkStats, chunk_part
from rag_model.corpus.markup.template_table import TemplateTable, merge_templates, read_templates
from rag_model.corpus.markup.templates import use_templates
from rag_model.corpus.passage_delta import apply_delta, write_delta
from rag_model.corpus.passages import KIND_SCHEMA, PASSAGE_SCHEMA, PassageFile, PassageWriter
from rag_model.corpus.plan import plan_dump
from rag_model.corpus.records import Page, Passage, Siteinfo, Structure
from rag_model.corpus.redact import PartFiles, redact_part
from rag_model.corpus.rendered_html import clean_html
from rag_model.corpus.wikitext import clean_wikitext
from rag_model.errors import UsageError
from rag_model.store.versions.mapped import MappedPassages, write_mapped_copy
from tests.rag_model.corpus.test_chunk import PAGE, XML

ALL_STRUCTURES = ("infobox", "lists", "tables")
SITE = Siteinfo("testwiki", "en", "", {"": 0})
ITEMS = "".join(f"* Item {i} is one of the many things that are in this list of long lines.\n" for i in range(9))
TEXT = f"""{{{{Infobox person
| name = Ada
| born = {{{{plainlist|
* 1815
* London
}}}}
}}}}
Ada was a mathematician.
== Works ==
She wrote these:
{ITEMS}
== Data ==
{{|
! Year !! Title
|-
| 1843 || Note G
|}}
== Data ==
The end."""


def read_structures(text: str, names: tuple[str, ...] = ALL_STRUCTURES) -> list[Structure]:
    return [structure for section in clean_wikitext(text, SITE, structures=names) for structure in section.structures]  # type: ignore[arg-type]


def chunk(tmp_path: Path, recipe: ChunkRecipe, text: str = TEXT) -> tuple[ChunkStats, list[Passage]]:
    (tmp_path / "dump.xml").write_text(XML.format(PAGE.format(id=1, ns=0, title="Ada", text=text)))
    plan = plan_dump(str(tmp_path / "dump.xml"), workdir=tmp_path, stage=str)
    stats = chunk_part(plan.parts[0], plan.siteinfo, recipe, tmp_path / "out.parquet", spans=tmp_path / "spans.npy")
    return stats, list(PassageFile(tmp_path / "out.parquet").iter_passages())


def test_file_without_structures_equals_that_of_earlier_versions(tmp_path: Path) -> None:
    stats, passages = chunk(tmp_path, ChunkRecipe(words=60))
    # Both digests were computed by a version without structures.
    assert stats.digest == "sha256:5b5c681a826fc0928201cc85215d0047f3fd7d6c270d24946eb82a446b0cc996"
    file_digest = hashlib.sha256((tmp_path / "out.parquet").read_bytes()).hexdigest()
    assert file_digest == "165115e060c834529ec37f4c1a2b70d02a1bd8c50f724630c2a7c962a8555dc3"
    assert PassageFile(tmp_path / "out.parquet").schema == PASSAGE_SCHEMA
    assert {passage.kind for passage in passages} == {"prose"}
    assert "structures" not in ChunkRecipe().to_json()
    assert "structures_version" not in ChunkRecipe().get_identity()


def test_structures_become_passages_after_unchanged_prose(tmp_path: Path) -> None:
    _, plain = chunk(tmp_path, ChunkRecipe(words=60))
    stats, passages = chunk(tmp_path, ChunkRecipe(words=60, structures=("tables", "infobox"), spans=True))
    assert passages[: len(plain)] == plain
    assert [(p.id, p.kind, p.section, p.text) for p in passages[len(plain) :]] == [
        ("1:infobox0.0", "infobox", "", "Name: Ada\nBorn: 1815; London"),
        ("1:Data.table0.0", "table", "Data", "Data\nYear | Title\n1843 | Note G"),
    ]
    assert stats.rows == len(passages)
    batches = list(PassageFile(tmp_path / "out.parquet").iter_batches(["id", "kind"]))
    assert batches[0]["kind"].to_pylist() == [p.kind for p in passages]


def test_long_list_is_removed_from_prose_and_repeats_its_introduction(tmp_path: Path) -> None:
    _, passages = chunk(tmp_path, ChunkRecipe(words=60, structures=("lists",)))
    prose = [p for p in passages if p.kind == "prose"]
    lists = [p for p in passages if p.kind == "list"]
    assert " ".join(p.text for p in prose) == "Ada was a mathematician. She wrote these: The end."
    assert [p.id for p in lists] == [f"1:Works.list0.{n}" for n in range(len(lists))]
    assert len(lists) > 2
    assert all(p.text.startswith("Works\nShe wrote these:\nItem ") and p.n_words <= 60 for p in lists)
    assert [line for p in lists for line in p.text.split("\n")[2:]] == [
        f"Item {i} is one of the many things that are in this list of long lines." for i in range(9)
    ]


@pytest.mark.parametrize(
    ("markup", "head", "rows"),
    [
        ("{|\n|+ Cap\n! A !! B\n|-\n| 1 || 2\n|}", ["Cap", "A | B"], ["1 | 2"]),
        ("{|\n! A !! B\n|-\n|rowspan=3| x || 1\n|-\n| 2\n|-\n| 3\n|}", ["A | B"], ["x | 1", "x | 2", "x | 3"]),
        ('{|\n! A\n! colspan="2" | B\n|-\n! !! p !! q\n|-\n| 1 || 2 || 3\n|}', ["A | B p | B q"], ["1 | 2 | 3"]),
        ("{|\n! colspan=2 | All\n|-\n! A !! B\n|-\n| 1 || 2\n|}", ["All", "A | B"], ["1 | 2"]),
        ("{|\n|-\n| one || 1\n|- style='display: none'\n| two || 2\n|}", [], ["one | 1"]),
        ('{|\n| one || style="display:none" | 2 || 3\n|}', [], ["one | 3"]),
        ("{|\n| {{sort|010|ten}} || {{sortname|Ada|Byron}} || {{hs|x}}9\n|}", [], ["ten | Ada Byron | 9"]),
        ('{|\n| <span style="display:none">0</span>one || data-sort-value="2" | two\n|}', [], ["one | two"]),
        ("{|\n| one\n* a\n* b\n| [[x|two]], ''three''<ref>r</ref>\n|}", [], ["one; a; b | two, three"]),
        ("{|\n| one\n{|\n! in !! ner\n|-\n| x || y\n|}\n| two\n|}", [], ["one; in; ner; x; y | two"]),
        ("{|\n| *a- || #1 || : x\n|}", [], ["*a- | #1 | : x"]),
        ('{|\n| <span style="display:none">one || two</span>\n| x<b\n| > y\n|}', [], ["one | two | x<b | > y"]),
        ("{|\n! Name\n| Ada\n|-\n! Year\n| 1815\n|}", [], ["Name | Ada", "Year | 1815"]),
        ("{|\n| {{yes}} || {{no|never}} || {{won}} || {{dts|2004|5|1}}\n|}", [], ["Yes | never | Won | May 1, 2004"]),
        ("<table><tr><th>A<th>B</tr><tr><td>1<td rowspan=2>two<tr><td>3</table>", ["A | B"], ["1 | two", "3 | two"]),
        ("<table><tr><td>one<table><tr><td>in</td></tr></table></td><td>two</td></tr></table>", [], ["one; in | two"]),
    ],
)  # fmt: skip
def test_table_becomes_rows_with_column_names(markup: str, head: list[str], rows: list[str]) -> None:
    assert read_structures(f"Text.\n{markup}\n") == [Structure("table", tuple(rows), tuple(head))]


@pytest.mark.parametrize(
    ("fields", "lines"),
    [
        ("birth_date = {{birth date|1815|12|10}}", ["Birth date: December 10, 1815"]),
        ("a_b = {{ubl|one|two}}\n| c = {{hlist|x|y}}", ["A b: one; two", "C: x, y"]),
        ("known = {{plainlist|\n* [[One]]\n** two\n}}\n| d = a<br>b", ["Known: One; two", "D: a; b"]),
        ("at = {{coord|57|18|22|N|4|27|32|W|display=title}}", ["At: 57°18′22″N 4°27′32″W"]),
        ("place = P\n| latd = 57 |latm= 18 |latNS= N |longd=4 |longEW=W", ["Place: P", "Coordinates: 57°18′N 4°W"]),
        (
            "place = P|lat_deg=57|lat_min=18|lat_direction=n|lat_NS=|lon_deg=4|lon_direction=W",
            ["Place: P", "Coordinates: 57°18′N 4°W"],
        ),
        ("image = A.jpg\n| logo_size = 20px\n| caption = Ada in 1840\n| x = Y.svg", ["Caption: Ada in 1840"]),
        ("module = {{Infobox officeholder\n| office = Mayor\n}}\n| z = end", ["Office: Mayor", "Z: end"]),
        ("name1 = One\n| name2 = Two\n| empty = \n| shown = yes", ["Name: One", "Name: Two"]),
        ("table = \n{|\n| in || box\n|}\n| z = end", ["Z: end"]),
    ],
)
def test_infobox_becomes_lines_of_fields(fields: str, lines: list[str]) -> None:
    first, *_ = read_structures(f"{{{{Infobox thing\n| {fields}\n}}}}\nText.", ("infobox",))
    assert (first.kind, list(first.rows)) == ("infobox", lines)


def test_dates_of_french_infobox_have_day_month_and_year() -> None:
    box = "{{Infobox Biographie\n| naissance = {{date de naissance|14|juillet|1789}}\n| mort = {{date|2|mai|1850}}\n}}"
    (section,) = clean_wikitext(f"{box}\nTexte.", replace(SITE, language="fr"), structures=("infobox",))
    assert section.structures[0].rows == ("Naissance: 14 juillet 1789", "Mort: 2 mai 1850")


@pytest.mark.parametrize("name", ["Карточка", "Ficha de persona", "Unknown data", "صندوق معلومات شخص", "کشور infobox"])
def test_infobox_is_recognized_by_name_or_fields(name: str) -> None:
    box = f"{{{{{name}\n| a = one\n| b = two\n| c = three\n| d = four\n}}}}"
    assert [structure.kind for structure in read_structures(f"{box}\nText.")] == ["infobox"]


def test_navigation_and_reference_tables_are_ignored() -> None:
    table = "{|\n! A !! B\n|-\n| one || two\n|}\n"
    assert not read_structures(table.replace("{|", "{| class='navbox'"))
    assert not read_structures(f"Text.\n== References ==\n{table}")
    assert len(read_structures(f"Text.\n== Data ==\n{table}")) == 1
    assert [structure.kind for structure in read_structures(table.replace("{|", '{| class="infobox"'))] == ["infobox"]


def test_table_passage_repeats_the_head_within_the_limit(tmp_path: Path) -> None:
    notes = {year: "word " * (70 if year == 1955 else 3) for year in range(1950, 1960)}
    rows = "".join(f"|-\n| {year} || Film number {year} || {note}\n" for year, note in notes.items())
    text = f"Text.\n== Films ==\n{{|\n|+ All films\n! Year !! Title !! Notes\n{rows}|}}"
    _, passages = chunk(tmp_path, ChunkRecipe(words=40, structures=("tables",)), text)
    tables = [p for p in passages if p.kind == "table"]
    assert len(tables) > 3
    for passage in tables:
        assert passage.text.startswith("Films\nAll films\nYear | Title | Notes\n")
        assert sum(word != "|" for word in passage.text.split()) == passage.n_words <= 40
    lines = [line for passage in tables for line in passage.text.split("\n")[3:]]
    expected = " ".join(f"{year} | Film number {year} | {note}" for year, note in notes.items())
    assert " ".join(lines).split() == expected.split()


def test_kinds_survive_deltas_copies_and_takedowns(tmp_path: Path) -> None:
    _, passages = chunk(tmp_path, ChunkRecipe(words=60, structures=("tables", "infobox")))
    file = tmp_path / "out.parquet"
    write_mapped_copy(file, tmp_path / "copy.arrow")
    assert MappedPassages(tmp_path / "copy.arrow").read_rows(range(len(passages))) == passages
    with PassageWriter(tmp_path / "base.parquet", KIND_SCHEMA) as writer:
        for passage in passages[1:]:
            writer.write(passage)
    assert write_delta(tmp_path / "base.parquet", file, tmp_path / "delta")
    apply_delta(tmp_path / "base.parquet", tmp_path / "delta", len(passages), tmp_path / "again.parquet")
    assert (tmp_path / "again.parquet").read_bytes() == file.read_bytes()
    (tmp_path / "redacted").mkdir()
    redacted, rows = redact_part(PartFiles(file), ["2"], tmp_path / "redacted")
    assert rows == len(passages)
    assert redacted.passages.read_bytes() == file.read_bytes()


HOSTILE = [
    "{|\n" + "|-\n" + "|a||b||c||d\n" * 60_000 + "|}",
    "{|\n" + "|rowspan=1000000 colspan=1000000|x\n" * 3_000 + "|-\n|y\n" * 30_000 + "|}",
    "{|\n|-\n" + "|rowspan=65534|x\n" * 900 + "|-\n|y\n" * 50_000 + "|}",
    "{|\n|a\n" * 40_000,
    "{|\n|a\n" * 20_000 + "|}\n" * 20_000,
    "<table><tr><td>" * 20_000 + "</table>" * 20_000,
    "{{Infobox a\n| b = " * 20_000,
    "\n{{x\n|a=1|b=2|c=3|d=4|" * 20_000,
    "{{Infobox a" + "\n| b = c" * 40_000 + "}}",
    "{{Infobox a|b=" * 100 + "x" + "}}" * 100,
    "* a\n" * 100_000 + "* " + "b " * 100_000,
    ("* " + "a " * 20 + "\n") * 10_000,
    "{|\n|rowspan=" + " " * 200_000 + "x| y\n|}",
    "{{Infobox a\n| b" + "1" * 200_000 + "c = d\n}}",
    "{|\n|a\n|}\n<table><tr><td>b</table>\n" * 10_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_rows_of_a_hostile_page_are_limited(text: str) -> None:
    """The length of a page limits its rows and the time, even if row and column spans are huge."""
    rows = [row for structure in read_structures(text) for row in (*structure.head, *structure.rows)]
    assert sum(map(len, rows)) < 12 * len(text) + 100_000


def test_rendered_html_gives_the_same_structures() -> None:
    html = """<p>Text.</p><table class="infobox vcard"><caption>Ada</caption><tr><th>Born</th><td><div
class="plainlist"><ul><li>1815</li><li>London</li></ul></div></td></tr>
<tr><td colspan="2"><img src="x"></td></tr></table>
<h2>Medals</h2><table class="wikitable"><tbody><tr><th rowspan="2">Year</th><th colspan="2">Medal</th></tr>
<tr><th>Gold</th><th>Silver</th></tr><tr><td rowspan="2">1990<sup class="reference">[1]</sup></td><td>A<br>B</td>
<td><table><tr><td>x</td><td>y</td></tr></table></td></tr><tr><td>C</td><td style="display: none">no</td><td>D</td></tr>
</tbody></table><table class="navbox"><tr><td>navigation</td></tr></table><p>End.</p>"""
    sections = clean_html(html, SITE, structures=ALL_STRUCTURES)
    assert [section.text for section in sections] == [section.text for section in clean_html(html, SITE)]
    assert [section.structures for section in sections] == [
        (Structure("infobox", ("Born: 1815; London",), ("Ada",)),),
        (Structure("table", ("1990 | A; B | x; y", "1990 | C | D"), ("Year | Medal Gold | Medal Silver",)),),
    ]
    assert [s.structures for s in clean_html(html, SITE, structures=("infobox",))] == [sections[0].structures, ()]


def test_unknown_structure_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'pictures': choose from tables, infobox, lists"):
        ChunkRecipe(structures=("pictures",))  # type: ignore[arg-type]
    assert ChunkRecipe(structures=("tables", "infobox", "tables")).to_json()["structures"] == ["infobox", "tables"]


MONSTER = """<infobox layout="stacked"><title source="name"><default>{{PAGENAME}}</default></title>
<image source="image"><caption source="caption"/></image><group><header>Stats</header>
<data source="hp"><label>[[Health|HP]]</label><format>{{{hp}}} points</format></data>
<data source="members"><label>Members</label></data><data source="place"><label>Place</label><default>Unknown</default>
</data><data source='size'/></group><navigation>[[All]]</navigation></infobox><noinclude>How to use.</noinclude>"""


@pytest.mark.parametrize(
    ("call", "rows"),
    [
        (
            "{{Monster\n| name = Cow\n| image = Cow.png\n| hp = 8\n| members = No\n}}",
            ["HP: 8 points", "Members: No", "Place: Unknown"],
        ),
        ("{{Mob|name=Red cow|place={{ubl|A|[[B]]}}|size=Big}}", ["Red cow", "Place: A; B", "Big"]),
        ("{{Template:monster}}", ["Place: Unknown"]),
    ],
)  # fmt: skip
def test_portable_infobox_becomes_fields_with_labels(call: str, rows: list[str]) -> None:
    texts = {"Template:Monster": MONSTER, "Template:Mob": "#REDIRECT [[Template:Monster]]"}
    pages = [Page(i, 1, None, 10, title, False, "wikitext", text) for i, (title, text) in enumerate(texts.items())]
    table = merge_templates([read_templates(pages, "en", {"template": 10})])
    with use_templates(TemplateTable.from_bytes(table.to_bytes())) as use:
        for names in ((), ALL_STRUCTURES):
            (section,) = clean_wikitext(f"{call}\nA cow is here.", SITE, "Cow", structures=names)
            assert section.text == "A cow is here."
            assert [structure.rows for structure in section.structures] == ([tuple(rows)] if names else [])
    assert "monster" in use.names, "the article is chunked again if the infobox changes"


def test_infobox_tag_in_a_page_is_not_prose() -> None:
    (section,) = clean_wikitext("<infobox><data><label>A</label><default>B</default></data></infobox>Text", SITE)
    assert section.text == "Text"
