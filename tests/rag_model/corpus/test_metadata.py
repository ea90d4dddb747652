"""Metadata of pages are read from dumps, limited in length, and refused if they are invalid."""

import json
from pathlib import Path
from typing import Any

import pytest

from rag_model.corpus.chunk import ChunkRecipe, chunk_part
from rag_model.corpus.metadata import (
    MAX_ALIAS_WORDS,
    MAX_CATEGORIES,
    PageTable,
    add_aliases,
    build_metadata,
    find_categories,
    format_metadata,
    parse_metadata,
    set_passage_metadata,
    write_items,
)
from rag_model.corpus.passages import PassageFile
from rag_model.corpus.plan import plan_dump
from rag_model.corpus.records import Metadata, Passage, Section, Siteinfo
from rag_model.errors import InputError, UsageError

DE = Siteinfo("dewiki", "de", "", {"kategorie": 14, "category": 14, "datei": 6})
PAGE = (
    "<page><title>Ada</title><ns>0</ns><id>1</id><revision><id>2</id>"
    "<text>Ada schrieb.\n[[Kategorie:Frau]] [[category: Geboren_1815|Ada]] [[:Kategorie:Link]]</text>"
    "</revision></page>"
)
XML = (
    '<mediawiki xml:lang="de"><siteinfo><dbname>dewiki</dbname><namespaces>'
    f'<namespace key="14">Kategorie</namespace></namespaces></siteinfo>{PAGE}</mediawiki>'
)


def chunk_file(path: Path, metadata: tuple[Any, ...]) -> list[Passage]:
    work = path.parent / "work"
    work.mkdir(exist_ok=True)
    plan = plan_dump(str(path), workdir=work, stage=str)
    (part,) = plan.parts
    chunk_part(part, plan.siteinfo, ChunkRecipe(metadata=metadata), work / "out.parquet")
    with PassageFile(work / "out.parquet") as file:
        return list(file.iter_passages())


def test_language_and_categories_of_an_export_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(XML)
    (passage,) = chunk_file(tmp_path / "a.xml", ("language", "categories", "wikidata"))
    assert (passage.language, passage.categories) == ("de", "Frau|Geboren 1815")
    assert passage.wikidata == ""


def test_metadata_of_documents_are_read(tmp_path: Path) -> None:
    row = {"id": "1", "title": "Ada", "text": "She wrote.", "language": "en", "categories": "Women"}
    rows = [row, row | {"id": "2", "language": 7, "wikidata": "42", "aliases": ["Lady \ud800 Ada"]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    passages = chunk_file(tmp_path / "a.jsonl", ("language", "categories", "aliases", "wikidata"))
    first, second = sorted(passages, key=lambda passage: passage.id)
    assert (first.language, first.categories, first.text) == ("en", "Women", "She wrote.")
    assert (second.language, second.wikidata) == ("", "")
    assert second.text == "Lady \ufffd Ada. She wrote."


def test_only_links_to_categories_are_categories() -> None:
    text = "[[Kategorie:A]] [[Datei:B.jpg]] [[:Kategorie:C]] [[D]] [[category:E|key]] [[Kategorie:A]]"
    assert find_categories(text, DE) == ("A", "E")


def test_aliases_without_a_new_word_are_omitted() -> None:
    sections = (Section("", "Ada wrote.", ((0, 3),)), Section("Life", "Born."))
    aliases = ["ada lovelace", "Lovelace, Ada", "Ada King", "King", "Countess"]
    first, second = add_aliases(sections, "Ada Lovelace", aliases)
    assert first.text == "Ada King; Countess.\nAda wrote."
    assert [first.text[start:end] for start, end in first.links] == ["Ada"]
    assert second == sections[1]
    assert add_aliases(sections, "Ada King Countess Lovelace", aliases) == sections
    assert add_aliases(sections[1:], "Ada", ["King"])[0] == Section("", "King.")
    assert add_aliases((), "Ada", aliases) == ()


def test_aliases_and_categories_are_limited() -> None:
    aliases = [f"word{i}" for i in range(10_000)]
    (section,) = add_aliases((Section("", "Text."),), "Title", aliases)
    assert len(section.text.split()) == MAX_ALIAS_WORDS + 1
    passage = Passage("1:0", "1", 0, "T", "", "x", 0, 1, "")
    metadata = build_metadata({"categories": [f"Category {i}" for i in range(10_000)]})
    (passage,) = set_passage_metadata([passage], metadata, ("categories",))
    assert len(passage.categories) <= MAX_CATEGORIES
    assert passage.categories.split("|")[-1].startswith("Category ")


@pytest.mark.parametrize("text", ["", "[]", "{", "3", "[" * 100_000, '{"language": ["de"]}'])
def test_invalid_metadata_are_empty(text: str) -> None:
    assert parse_metadata(text) == Metadata()


def test_metadata_round_trip() -> None:
    metadata = Metadata("pt-BR", "Q42", ("A", "B c"), ("Ä",))
    assert parse_metadata(format_metadata(metadata)) == metadata


def test_unknown_metadata_in_a_recipe_are_reported() -> None:
    with pytest.raises(UsageError, match="metadata has the unknown value 'lang': choose from aliases, "):
        ChunkRecipe(metadata=("lang",))  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1_000_000])
def test_items_are_read_from_the_page_properties(tmp_path: Path, chunk_bytes: int) -> None:
    # Page 3 has a title that looks like an item, and page 7 an invalid item.
    rows = "(1,'wikibase_item','Q42',NULL),(3,'displaytitle','(3,\\'wikibase_item\\',\\'Q9\\',',NULL)"
    rows += ",(7,'wikibase_item','42',NULL)," + ",".join(f"({i},'wikibase_item','Q{i}',NULL)" for i in range(8, 500))
    data = f"CREATE TABLE `page_props` (\n);\nINSERT INTO `page_props` VALUES {rows};\n".encode()
    path = tmp_path / "items.arrow"
    assert write_items((data[i : i + chunk_bytes] for i in range(0, len(data), chunk_bytes)), "x.sql", path) == 493
    table = PageTable(items=path, first_page=0, last_page=400)
    items = {i: table.find(i, "A").wikidata for i in (1, 3, 7, 8, 400, 401)}
    assert items == {1: "Q42", 3: "", 7: "", 8: "Q8", 400: "Q400", 401: ""}


def test_other_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"x\.sql has no table page_props: download"):
        write_items([b"INSERT INTO `page` VALUES (1,0,'A');"], "x.sql", tmp_path / "items.arrow")
