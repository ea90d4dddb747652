"""Dumps with one page per line may have any order; other pages are dropped, and hostile files are refused."""

import gzip
import json
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rag_model.corpus import source
from rag_model.corpus.chunk import ChunkRecipe, ChunkStats, chunk_part
from rag_model.corpus.dump_formats import page_lines
from rag_model.corpus.passages import PassageFile
from rag_model.corpus.plan import compute_source_digest, plan_dump
from rag_model.corpus.records import Article, Page, Passage, Plan, Section
from rag_model.errors import InputError
from rag_model.retrieve.attribution import find_licence
from tests.rag_model.corpus.test_dump_formats import read_content, write_tar

HTML = (
    '<html><body><section><p>Ada <b>Lovelace</b> wrote notes.<sup typeof="mw:Extension/ref">[1]</sup></p></section>'
    "<section><h2>Life</h2><p>She was born in 1815.</p><table><tr><td>cell</td></tr></table></section></body></html>"
)


def build_article(page_id: int, name: str, html: str = HTML, **other_fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "identifier": page_id,
        "date_modified": "2026-11-01T12:00:00Z",
        "version": {"identifier": page_id * 10},
        "url": "https://en.wikipedia.org/wiki/Ada",
        "namespace": {"identifier": 0},
        "in_language": {"identifier": "en"},
        "is_part_of": {"identifier": "enwiki"},
        "article_body": {"html": html},
        **other_fields,
    }


ARTICLES = [
    build_article(30, "Energy", "<p>Energy is conserved.</p>"),
    build_article(20, "Mercury", templates=[{"name": "Template:Hndis"}]),
    build_article(10, "Ada Lovelace"),
    build_article(15, "Category:Energy", namespace={"identifier": 14}),
]


def write_lines(path: Path, rows: list[Any]) -> Path:
    data = "\n".join(map(json.dumps, rows)).encode()
    if path.name.endswith(".tar.gz"):
        write_tar(
            path, {"../../outside.ndjson": data[: data.find(b"\n")], "/tmp/absolute.ndjson": data[data.find(b"\n") :]}
        )
    else:
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def plan_file(path: Path, **settings: Any) -> Plan:
    workdir = path.parent / "work"
    workdir.mkdir(exist_ok=True)
    return plan_dump(str(path), workdir=workdir, stage=str, **settings)


def chunk(plan: Plan, out: Path) -> tuple[ChunkStats, list[Passage]]:
    (part,) = plan.parts
    stats = chunk_part(part, plan.siteinfo, ChunkRecipe(), out)
    with PassageFile(out) as file:
        return stats, list(file.iter_passages())


@pytest.mark.parametrize("name", ["a.ndjson", "a.json", "a.json.gz", "a.tar.gz"])
def test_articles_become_passages_and_other_pages_are_counted(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    plan = plan_file(write_lines(folder / name, ARTICLES))
    assert (plan.siteinfo.dbname, plan.siteinfo.language) == ("enwiki", "en")
    assert plan.siteinfo.base == "https://en.wikipedia.org/wiki/"
    stats, passages = chunk(plan, tmp_path / "out.parquet")
    assert stats.dropped == {"disambiguation": 1, "namespace": 1}
    assert [(p.page_id, p.rev_id, p.title, p.section, p.text) for p in passages] == [
        ("10", 100, "Ada Lovelace", "", "Ada Lovelace wrote notes. She was born in 1815."),
        ("30", 300, "Energy", "", "Energy is conserved."),
    ]
    assert passages[0].revised == 1_793_534_400
    assert {path.name for path in tmp_path.iterdir()} == {"dumps", "out.parquet"}


def test_parts_do_not_depend_on_order_and_compression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"<p>{'x' * 50} {i}</p>" for i in range(150)]
    rows = [build_article(i * 37 % 101, f"A {i}", text, version={"identifier": i}) for i, text in enumerate(texts)]
    plan = plan_file(write_lines(tmp_path / "a.ndjson", rows))
    monkeypatch.setattr(page_lines, "MAX_SORTED_BYTES", 1000)
    monkeypatch.setattr(page_lines, "MAX_MERGED_FILES", 3)
    random.Random(0).shuffle(rows)
    other_plan = plan_file(write_lines(tmp_path / "b.tar.gz", rows))
    assert list(map(compute_source_digest, plan.parts)) == list(map(compute_source_digest, other_plan.parts))
    pages = [page for page in read_content(other_plan) if isinstance(page, Page)]
    assert [page.page_id for page in pages] == list(range(101))
    newest = {i * 37 % 101: i for i in range(150)}
    assert {page.page_id: page.rev_id for page in pages} == newest
    assert {path.name[:6] for path in (tmp_path / "work").iterdir()} == {"split-"}, "sorted files are deleted"


@pytest.mark.parametrize("limit", [1, 2])
def test_limit_takes_the_first_articles(limit: int, tmp_path: Path) -> None:
    rows = [*ARTICLES, "no page"]  # a limit leaves this line unread
    stats, _ = chunk(plan_file(write_lines(tmp_path / "a.ndjson", rows), limit=limit), tmp_path / "out.parquet")
    assert stats.articles == limit


@pytest.mark.parametrize(
    ("other_fields", "message"),
    [
        ({"name": None}, "has None as its `name`: give a title"),
        ({"name": "x" * 1001}, "give a title of 1 to 1,000 characters"),
        ({"identifier": "1"}, "has '1' as its `identifier`: give a whole number"),
        ({"identifier": 1 << 63}, "give a whole number"),
        ({"version": []}, "has None as its `version.identifier`"),
        ({"date_modified": "soon"}, "has 'soon' as its `date_modified`: give a time"),
        ({"article_body": "<p>"}, "has no string `article_body.html`: give a dump of Wikimedia Enterprise"),
        ({"is_part_of": {"identifier": "dewiki"}}, "is of 'dewiki', but the first page of 'enwiki'"),
    ],
)
def test_invalid_article_is_reported_with_its_line(other_fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    dump = write_lines(tmp_path / "a.ndjson", [ARTICLES[0], build_article(1, "X") | other_fields])
    with pytest.raises(InputError, match=rf"^line 2 of a\.ndjson .*{message}"):
        plan_file(dump)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def truncate_tar(path: Path) -> None:
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:1500]))


def damage_second_header(path: Path) -> None:
    data = bytearray(gzip.decompress(path.read_bytes()))
    start = data.find(b"/tmp/absolute") // 512 * 512
    data[start + 148 : start + 156] = b"0000000\0"  # the checksum
    path.write_bytes(gzip.compress(data))


def add_long_header(path: Path) -> None:
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("x" * (2 << 20)))


def add_sparse_file(path: Path) -> None:
    header = tarfile.TarInfo("sparse")
    header.type = tarfile.GNUTYPE_SPARSE
    data = bytearray(header.tobuf(tarfile.GNU_FORMAT))
    data[483:495] = b"77777777777\0"  # its size
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data)
    path.write_bytes(gzip.compress(bytes(data) + bytes(1024)))


def break_line(path: Path) -> None:
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:2], lines[2][:40], lines[3]]))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("a.json.gz", truncate, "a.json.gz is truncated"),
        ("a.ndjson", break_line, "line 3 of a.ndjson is not JSON"),
        ("a.tar.gz", truncate, "a.tar.gz is truncated"),
        ("a.tar.gz", truncate_tar, r"a\.tar\.gz is truncated or not a tar archive \(unexpected end of data\)"),
        ("a.tar.gz", damage_second_header, r"a\.tar\.gz is truncated or not a tar archive \(bad checksum\)"),
        ("a.tar.gz", add_long_header, r"not a tar archive \(a header of 2\d{6} bytes\)"),
        ("a.tar.gz", add_sparse_file, "has a sparse file, 'sparse'"),
    ],
)
def test_damaged_or_hostile_file_is_reported(
    name: str, damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    damage(path := write_lines(tmp_path / name, ARTICLES))
    with pytest.raises(InputError, match=message):
        plan_file(path)


def test_very_long_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "a.json.gz", [ARTICLES[0], build_article(1, "X", "x" * (5 << 20))])
    monkeypatch.setattr(source, "MAX_LINE", 2 << 20)
    with pytest.raises(InputError, match=r"a\.json\.gz has a line of more than 2 MiB: put one record on each line"):
        plan_file(path)


def test_characters_that_xml_does_not_allow_are_replaced(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.ndjson", [build_article(1, "A\ud800 & <B>", "<p>x\x0b\ufffe]]> and \udfff words</p>")]
    )
    _, (passage,) = chunk(plan_file(path), tmp_path / "out.parquet")
    assert (passage.title, passage.text) == ("A\ufffd & <B>", "x\ufffd\ufffd]]> and \ufffd words")


METADATA = {
    "main_entity": {"identifier": "Q7259"},
    "categories": [{"name": "Category:1815 births"}, {"name": "Category:Women in computing"}],
    "redirects": [{"name": "Ada King"}, {"name": "Lovelace, Ada"}, {"name": "Countess of Lovelace"}],
}


def test_metadata_of_a_page_are_stored_if_the_recipe_names_them(tmp_path: Path) -> None:
    plan = plan_file(write_lines(tmp_path / "a.ndjson", [build_article(10, "Ada Lovelace", **METADATA)]))
    (part,) = plan.parts
    names: tuple[Any, ...]
    for names in ((), ("language", "wikidata", "categories"), ("aliases",), ("wikidata",)):
        chunk_part(part, plan.siteinfo, ChunkRecipe(metadata=names), tmp_path / "out.parquet")
        with PassageFile(tmp_path / "out.parquet") as file:
            (passage,) = file.iter_passages()
            columns = file.schema.names
        assert ("wikidata" in columns) == ("wikidata" in names), "columns are optional"
        assert passage.wikidata == ("Q7259" if "wikidata" in names else "")
        assert passage.language == ("en" if "language" in names else "")
        categories = "1815 births|Women in computing" if "categories" in names else ""
        assert passage.categories == categories
        text = "Ada Lovelace wrote notes. She was born in 1815."
        assert passage.text == (f"Ada King; Countess of Lovelace. {text}" if "aliases" in names else text)


def build_cirrus_page(page_id: int, **other_fields: Any) -> list[dict[str, Any]]:
    fields = {"title": f"Page {page_id}", "text": f"Text {page_id}.", "language": "en", "namespace": 0, "version": 7}
    return [{"index": {"_type": "_doc", "_id": str(page_id)}}, fields | other_fields]


def test_cirrussearch_pages_are_plain_text(tmp_path: Path) -> None:
    rows = [
        *build_cirrus_page(5, text=" The [[plain]] {{text}} of 1815. "),
        *build_cirrus_page(3, template=["Template:Disambiguation"]),
        *build_cirrus_page(4, namespace=14),
        *build_cirrus_page(2, content_model="json"),
        *build_cirrus_page(1, text=""),
    ]
    plan = plan_file(write_lines(tmp_path / "enwiki-20261101-cirrussearch-content.json.gz", rows))
    assert (plan.siteinfo.dbname, plan.siteinfo.language) == ("enwiki", "en")
    assert find_licence(plan.siteinfo.base) == "CC BY-SA 4.0"
    stats, passages = chunk(plan, tmp_path / "out.parquet")
    assert stats.dropped == {"disambiguation": 1, "empty": 1, "namespace": 1, "not_wikitext": 1}
    assert [(p.page_id, p.rev_id, p.text) for p in passages] == [("5", 7, "The [[plain]] {{text}} of 1815.")]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (build_cirrus_page(1)[:1], "ends after an action, without its page"),
        ([*build_cirrus_page(1), build_cirrus_page(2)[1]], "line 3 of a.json has no action `index` before it"),
        (build_cirrus_page(1, language=None), "line 2 of a.json has no string `language`"),
        ([build_cirrus_page(1)[0], {"language": "en", "text": 3}], "line 2 of a.json has no string `text`"),
        ([{"index": {}}, build_cirrus_page(1)[1]], "line 2 of a.json has no action"),
    ],
)
def test_invalid_cirrussearch_dump_is_reported(rows: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        plan_file(write_lines(tmp_path / "a.json", rows))


def test_hotpot_page_has_a_paragraph_per_list_of_sentences(tmp_path: Path) -> None:
    row = {"id": "12", "url": ["https://en.wikipedia.org/wiki?curid=12"], "title": "Ada"}
    for text in (["Ada wrote notes.", " She was born in 1815."], [["Ada"], ["Ada wrote.", " It was 1843."], ["End."]]):
        plan = plan_file(write_lines(tmp_path / "a.jsonl", [row | {"text": text}]))
        (article,) = read_content(plan)
        assert isinstance(article, Article)
        expected = "".join(text) if isinstance(text[0], str) else "Ada wrote. It was 1843.\nEnd."
        assert (article.page_id, article.title, article.sections) == ("12", "Ada", (Section("", expected),))
    with pytest.raises(InputError, match=r"line 1 of a\.jsonl has no list of sentences as its `text`"):
        plan_file(write_lines(tmp_path / "a.jsonl", [row | {"text": [["a"], 3]}]))
