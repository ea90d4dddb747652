"""Every dump format fulfils the contract: it recognizes its files, and its parts are reproducible and complete."""

import bz2
import gzip
import io
import json
import lzma
import os
import random
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import py7zr
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from rag_model.corpus.chunk import ChunkRecipe, chunk_part
from rag_model.corpus.dump_formats import mediawiki
from rag_model.corpus.dump_formats.document_files import find_dump_files
from rag_model.corpus.dump_formats.dump_format import (
    BUILT_IN_FORMATS,
    DUMP_HELP,
    FORMATS,
    describe_formats,
    detect_format,
    get_format,
    get_format_identity,
    get_part_format,
)
from rag_model.corpus.dump_formats.mediawiki import MediaWiki
from rag_model.corpus.dump_formats.page_format import PageFormat
from rag_model.corpus.parts import PartBoundaries
from rag_model.corpus.passages import PassageFile
from rag_model.corpus.plan import plan_dump
from rag_model.corpus.records import Article, Compression, Page, Part, Passage, Plan, Section, Siteinfo
from rag_model.corpus.source import MAX_DECODED_BYTES, decode, read_decoded
from rag_model.errors import InputError, MissingExtraError, UsageError
from tests.fixtures.mail_dump import FORMAT as MAIL
from tests.fixtures.mail_dump import MailArchive
from tests.fixtures.plugin_package import install_package
from tests.rag_model.corpus.test_document_files import build_docx, build_pdf

COUNT = 24  # documents or pages of each dump
DOCUMENTS = [{"id": f"d{i}", "title": f"Title {i}", "text": f"Text number {i}. It has words."} for i in range(COUNT)]
TABLE = "".join(f"{i}\tText {i}\tTitle {i}\n" for i in range(COUNT))
KILT_PAGES = [
    {
        "_id": str(i),
        "wikipedia_id": str(i),
        "wikipedia_title": f"Title {i}",
        "text": [f"Title {i}\n", f"Text number {i}.\n", "Section::::History.:Origin.\n", "BULLET::::- More words.\n"],
    }
    for i in range(COUNT)
]
HOTPOT_PAGES = [
    {
        "id": str(i),
        "url": f"https://en.wikipedia.org/wiki?curid={i}",
        "title": f"Title {i}",
        "text": [[f"Title {i}"], [f"Text number {i}.", " It has words."]],
        "charoffset": [],
    }
    for i in range(COUNT)
]
ENTERPRISE_PAGES = [
    {
        "name": f"Page {i}",
        "identifier": i * 37 % 101 + 1,
        "date_modified": "2026-11-01T12:00:00Z",
        "version": {"identifier": 100 + i, "comment": "a comment", "editor": {"identifier": 5}},
        "url": f"https://en.wikipedia.org/wiki/Page_{i}",
        "namespace": {"name": "Article", "identifier": 0},
        "in_language": {"name": "English", "identifier": "en"},
        "main_entity": {"identifier": f"Q{i}", "url": f"https://www.wikidata.org/entity/Q{i}"},
        "categories": [{"name": "Category:Pages", "url": "https://en.wikipedia.org/wiki/Category:Pages"}],
        "templates": [{"name": "Template:Short description"}],
        "redirects": [{"name": f"P. {i}", "url": f"https://en.wikipedia.org/wiki/P._{i}"}],
        "is_part_of": {"name": "Wikipedia", "identifier": "enwiki"},
        "article_body": {
            "html": f"<html><head><title>Page {i}</title></head><body><section><p>Text number {i}.</p></section></body>"
        },
        "license": [{"identifier": "CC-BY-SA-4.0", "url": "https://creativecommons.org/licenses/by-sa/4.0/"}],
    }
    for i in range(COUNT)
]
CIRRUS_PAGES = [
    {
        "template": ["Template:Short description"],
        "content_model": "wikitext",
        "wiki": "enwiki",
        "language": "en",
        "title": f"Page {i}",
        "timestamp": "2026-11-01T12:00:00Z",
        "redirect": [{"namespace": 0, "title": f"P. {i}"}],
        "version": 100 + i,
        "namespace": 0,
        "namespace_text": "",
        "category": ["Pages"],
        "wikibase_item": f"Q{i}",
        "text": f"Text number {i}. It has words.",
        "opening_text": f"Text number {i}.",
        "auxiliary_text": ["a cell"],
    }
    for i in range(COUNT)
]
CIRRUS_LINES = [
    row
    for i, page in enumerate(CIRRUS_PAGES)
    for row in ({"index": {"_type": "_doc", "_id": str(i * 37 % 101 + 1)}}, page)
]
PAGE = (
    "<page><title>Page {id}</title><ns>0</ns><id>{id}</id><revision><id>1</id><model>wikitext</model>"
    "<text>Text number {id}. It has '''words'''.</text></revision></page>"
)
XML = (
    '<mediawiki xml:lang="en"><siteinfo><dbname>enwiki</dbname></siteinfo>'
    + "".join(PAGE.format(id=i) for i in range(1, COUNT + 1))
    + "</mediawiki>"
)
MESSAGE = "From x@y.org Thu Jan  1 00:00:00 2026\nMessage-ID: <m{i}@y.org>\nSubject: Title {i}\n\nText number {i}.\n\n"


def compress_zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def write_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(DOCUMENTS), path)


def write_7z(path: Path, files: dict[str, bytes], **options: Any) -> None:
    with py7zr.SevenZipFile(path, "w", **options) as archive:
        for name, data in files.items():
            archive.writestr(data, name)


def encode_lines(rows: list[dict[str, Any]]) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


def write_tar(path: Path, files: dict[str, bytes], mode: str = "w:gz", **options: Any) -> None:
    with tarfile.open(path, mode, **options) as archive:  # type: ignore[call-overload]
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, data in files.items():
            header = tarfile.TarInfo(name)
            header.size = len(data)
            archive.addfile(header, io.BytesIO(data))


def write_finewiki(path: Path) -> None:
    rows = [
        {
            "text": f"# Page {i}\nText number {i}.\n\n## History\n\nIt has words.",
            "id": f"enwiki/{i}",
            "wikiname": "enwiki",
            "page_id": i,
            "title": f"Page {i}",
            "url": f"https://en.wikipedia.org/wiki/Page_{i}",
            "date_modified": "2026-11-01T12:00:00Z",
            "in_language": "en",
            "wikidata_id": f"Q{i}",
            "wikitext": "text " * 100,
        }
        for i in range(COUNT)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_wiki_dpr(path: Path) -> None:
    rows = [{"id": str(i), "text": f"Text {i}", "title": f"Title {i}", "embeddings": [0.0] * 8} for i in range(COUNT)]
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_folder(path: Path, ending: str, text: str) -> None:
    path.mkdir()
    for i in range(COUNT):
        (path / f"{i}{ending}").write_text(text.format(i=i))


def write_documents(path: Path, ending: str, build: Callable[[str], bytes]) -> None:
    path.mkdir()
    for i in range(COUNT):
        (path / f"{i}{ending}").write_bytes(build(f"Text number {i}."))


# The format, the file name, and a function that writes the file.
DUMPS: list[tuple[str, str, Callable[[Path], object]]] = [
    ("jsonl", "a.jsonl", lambda path: path.write_bytes(encode_lines(DOCUMENTS))),
    ("jsonl", "a.ndjson.gz", lambda path: path.write_bytes(gzip.compress(encode_lines(DOCUMENTS)))),
    ("kilt", "kilt.jsonl", lambda path: path.write_bytes(encode_lines(KILT_PAGES))),
    ("parquet", "a.parquet", write_parquet),
    ("parquet", "nameless-parquet", write_parquet),
    ("kilt", "kilt_knowledgesource.json", lambda path: path.write_bytes(encode_lines(KILT_PAGES))),
    (
        "hotpot",
        "pages.tar.bz2",
        lambda path: write_tar(
            path,
            {f"en/A{i}/wiki_00.bz2": bz2.compress(encode_lines(HOTPOT_PAGES[i::3])) for i in range(3)},
            "w:bz2",
        ),
    ),
    ("enterprise", "enwiki_namespace_0.ndjson", lambda path: path.write_bytes(encode_lines(ENTERPRISE_PAGES))),
    ("enterprise", "a.json.gz", lambda path: path.write_bytes(gzip.compress(encode_lines(ENTERPRISE_PAGES)))),
    (
        "enterprise",
        "enwiki-NS0-ENTERPRISE-HTML.json.tar.gz",
        lambda path: write_tar(path, {f"enwiki_{i}.ndjson": encode_lines(ENTERPRISE_PAGES[i::2]) for i in range(2)}),
    ),
    (
        "cirrus",
        "enwiki-20261101-cirrussearch-content.json.gz",
        lambda path: path.write_bytes(gzip.compress(encode_lines(CIRRUS_LINES))),
    ),
    ("finewiki", "000_00000.parquet", write_finewiki),
    ("wiki_dpr", "train-00000.parquet", write_wiki_dpr),
    ("tsv", "a.tsv", lambda path: path.write_text(TABLE)),
    ("mediawiki", "a.xml", lambda path: path.write_text(XML)),
    ("mediawiki", "a.xml-p1p60.bz2", lambda path: path.write_bytes(bz2.compress(XML.encode()))),
    ("mediawiki", "a.gz", lambda path: path.write_bytes(gzip.compress(XML.encode()))),
    ("mediawiki", "a.xml.xz", lambda path: path.write_bytes(lzma.compress(XML.encode()))),
    ("mediawiki", "a.xml.zst", lambda path: path.write_bytes(compress_zstd(XML.encode()))),
    ("jsonl", "a.jsonl.xz", lambda path: path.write_bytes(lzma.compress(encode_lines(DOCUMENTS)))),
    ("mediawiki", "a.xml.7z", lambda path: write_7z(path, {"a.xml": XML.encode()})),
    ("tsv", "a.tsv.7z", lambda path: write_7z(path, {"a.tsv": TABLE.encode()})),
    ("tsv", "a.tsv.zst", lambda path: path.write_bytes(compress_zstd(TABLE.encode()))),
    ("mediawiki", "nameless-wiki", lambda path: path.write_text(XML)),
    ("markdown", "notes", lambda path: write_folder(path, ".md", "# Title {i}\n\nText number {i}.")),
    ("html", "site", lambda path: write_folder(path, ".html", "<h1>Title {i}</h1><p>Text number {i}.")),
    ("source_code", "package", lambda path: write_folder(path, ".py", 'def f{i}():\n    """Text number {i}."""')),
    ("pdf", "papers", lambda path: write_documents(path, ".pdf", lambda text: build_pdf([[text], []]))),
    ("office", "reports", lambda path: write_documents(path, ".docx", build_docx)),
    ("mail", "a.mbox", lambda path: path.write_text("".join(MESSAGE.format(i=i) for i in range(COUNT)))),
    ("mail", "nameless-mail", lambda path: path.write_text("".join(MESSAGE.format(i=i) for i in range(COUNT)))),
    ("pages", "a.wikipages", lambda path: path.write_text(XML)),
]
# Any bytes can be a table or mail, damaged documents are dropped, and a damaged file without a name has no format.
LENIENT_FORMATS = {"tsv", "mail", "markdown", "html", "source_code", "pdf", "office"}
STRICT_DUMPS = [entry for entry in DUMPS if entry[0] not in LENIENT_FORMATS and not entry[1].startswith("nameless")]


class PlainPages(MediaWiki):
    """A page format of another package: its pages are plain text."""

    version = "7"

    def recognize(self, name: str, read_head: Callable[[], bytes]) -> bool:
        return name.endswith(".wikipages")

    def clean(self, page: Page, siteinfo: Siteinfo, *, anchors: bool) -> tuple[Section, ...]:
        return (Section("", page.text),)


PLAIN_PAGES = PlainPages()


@pytest.fixture(autouse=True)
def install_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install two packages that provide formats."""
    install_package(tmp_path / "mail_package", "dump_formats", "mail = tests.fixtures.mail_dump:FORMAT")
    install_package(tmp_path / "pages_package", "dump_formats", f"pages = {__name__}:PLAIN_PAGES")
    monkeypatch.syspath_prepend(tmp_path / "mail_package")
    monkeypatch.syspath_prepend(tmp_path / "pages_package")
    monkeypatch.setattr(FORMATS, "_loaded", {})
    monkeypatch.setattr(mediawiki, "MIN_RUN_BYTES", 1000)  # so that small dumps have several parts


@pytest.fixture(params=DUMPS, ids=[name for _, name, _ in DUMPS])
def dump(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    format_name, file_name, write = request.param
    (tmp_path / "dumps").mkdir()
    write(tmp_path / "dumps" / file_name)
    return format_name, tmp_path / "dumps" / file_name


def plan_file(path: Path, workdir: Path, **settings: Any) -> Plan:
    """Plan a dump; staged files are numbered, so that plans can be compared."""
    shutil.rmtree(workdir, ignore_errors=True)
    workdir.mkdir()
    numbers = iter(range(1000))

    def stage(staged: Path) -> str:
        return str(staged.rename(workdir / f"staged-{next(numbers)}"))

    return plan_dump(str(path), workdir=workdir, stage=stage, **settings)


def read_content(plan: Plan) -> list[Page | Article | Passage]:
    return [item for part in plan.parts for item in get_part_format(part).read(part)]


def get_id(item: Page | Article | Passage) -> str:
    return item.id if isinstance(item, Passage) else str(item.page_id)


def test_dumps_cover_every_built_in_format() -> None:
    file_formats = {*BUILT_IN_FORMATS} - {"wiki_site"}  # its dumps are in test_wiki_site.py
    assert {name for name, _, _ in DUMPS} == {*file_formats, "mail", "pages"}


def test_exactly_one_format_recognizes_a_file(dump: tuple[str, Path]) -> None:
    format_name, path = dump
    assert {detect_format(url) for url in find_dump_files(str(path)).urls} == {format_name}


def test_parts_cover_the_dump_and_are_reproducible(dump: tuple[str, Path], tmp_path: Path) -> None:
    format_name, path = dump
    whole_content = read_content(plan_file(path, tmp_path / "work"))
    assert len(whole_content) == COUNT
    plan = plan_file(path, tmp_path / "work", part_bytes=100)
    assert len(plan.parts) > 1
    assert sorted(map(get_id, read_content(plan))) == sorted(map(get_id, whole_content)), "nothing may be repeated"
    assert all(first.last_page < second.first_page for first, second in zip(plan.parts, plan.parts[1:], strict=False))
    assert plan_file(path, tmp_path / "work", part_bytes=100) == plan
    assert plan.kind == plan.parts[0].kind
    for part in plan.parts:
        value = json.loads(json.dumps(part.to_json()))
        assert Part.from_json(value) == part
        has_own_parts = format_name in {"pages", "enterprise", "cirrus"}
        assert ("format" in value) == has_own_parts, "plans of standard formats do not name the format"

    starts = (0, *(part.first_page for part in plan.parts[1:]))
    boundaries = PartBoundaries(plan.kind, plan.siteinfo.dbname, starts, plan.parts[-1].last_page + 1)
    second_plan = plan_file(path, tmp_path / "work", parent_boundaries=boundaries, part_bytes=100)
    assert [part.first_page for part in second_plan.parts] == [part.first_page for part in plan.parts]


def test_every_format_is_chunked_with_and_without_a_limit(dump: tuple[str, Path], tmp_path: Path) -> None:
    _, path = dump
    assert len(read_content(plan_file(path, tmp_path / "work", limit=7))) == 7
    plan = plan_file(path, tmp_path / "work")
    rows = 0
    for part in plan.parts:
        stats = chunk_part(part, plan.siteinfo, ChunkRecipe(), tmp_path / "out.parquet")
        rows += stats.rows
        with PassageFile(tmp_path / "out.parquet") as file:
            assert all("Text" in passage.text for passage in file.iter_passages())
    assert rows == COUNT


def test_identity_of_a_part_has_the_format_of_a_package(tmp_path: Path) -> None:
    (tmp_path / "a.wikipages").write_text(XML)
    (part,) = plan_file(tmp_path / "a.wikipages", tmp_path / "work").parts
    assert get_format_identity(part) == {"dump_formats": {"pages": "7"}}
    assert isinstance(get_part_format(part), PageFormat)
    (tmp_path / "a.xml").write_text(XML)
    (part,) = plan_file(tmp_path / "a.xml", tmp_path / "work").parts
    assert get_format_identity(part) == {}


def test_format_that_is_not_installed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UsageError, match=r"no dump format 'ogg': choose one of jsonl, parquet, tsv, mediawiki, .*, mail, pages"
    ):
        get_format("ogg")


@pytest.mark.parametrize("dump", STRICT_DUMPS, ids=[name for _, name, _ in STRICT_DUMPS], indirect=True)
def test_damaged_file_is_an_input_error(dump: tuple[str, Path], tmp_path: Path) -> None:
    _, path = dump
    path.write_bytes(b"\x00\xff" + path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(InputError, match=path.name):
        plan_file(path, tmp_path / "work")


def test_help_and_docs_list_all_formats() -> None:
    page = " ".join((Path(__file__).parents[3] / "docs" / "howto" / "build.md").read_text(encoding="utf-8").split())
    for entry in BUILT_IN_FORMATS.values():
        assert entry.summary in describe_formats()
        assert entry.summary in DUMP_HELP
        assert entry.summary in page
    assert "mail (of an installed package)" in describe_formats()


def test_listed_kinds_agree_with_the_formats() -> None:
    assert {name: entry.kind for name, entry in BUILT_IN_FORMATS.items()} == {
        name: get_format(name).kind for name in BUILT_IN_FORMATS
    }
    assert MAIL.kind == "documents"


class CustomFormat(PlainPages):
    """A page format whose members a test replaces."""

    kind: Any = "wiki"

    def recognize(self, name: str, read_head: Callable[[], bytes]) -> bool:
        return name.endswith(".custom")


BROKEN_NAME = f"dump format 'aaa' ({__name__}:BROKEN of the package broken_package 1.0)"


def break_format(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: object) -> None:
    """Install a package whose dump format `aaa` is this value."""
    monkeypatch.setattr(f"{__name__}.BROKEN", value, raising=False)
    install_package(tmp_path / "broken_package", "dump_formats", f"aaa = {__name__}:BROKEN")
    monkeypatch.syspath_prepend(tmp_path / "broken_package")


def raise_error(*_: object) -> Any:
    raise ZeroDivisionError("division by zero")


BROKEN_FORMATS: dict[str, tuple[object, str]] = {
    "number": (3, r"is 3, without `recognize`: register an instance of a subclass of RecordFormat or"),
    "class": (CustomFormat, r"is the class CustomFormat: register an instance of it"),
    "kind": (type("A", (CustomFormat,), {"kind": "films"})(), r"has the kind 'films': give it one of 'wiki', "),
    "version": (type("A", (CustomFormat,), {"version": 2})(), r"has the version 2: give it a string"),
    "recognize None": (
        type("A", (CustomFormat,), {"recognize": lambda *_: None})(),
        r"returns None from `recognize` instead of bool: repair",
    ),
    "recognize raises": (
        type("A", (CustomFormat,), {"recognize": raise_error})(),
        r"raises ZeroDivisionError in `recognize` \(division by zero\): repair",
    ),
    "companion": (
        type("A", (CustomFormat,), {"is_companion": raise_error, "recognize": raise_error})(),
        r"raises ZeroDivisionError in `recognize`",
    ),
    "plan": (type("A", (CustomFormat,), {"plan": lambda *_: None})(), r"returns None from `plan` instead of Plan"),
    "split": (type("A", (CustomFormat,), {"split": raise_error})(), r"raises ZeroDivisionError in `plan`"),
}


@pytest.fixture(scope="module")
def all_dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one dump of each format to a folder, which tests only read."""
    folder = tmp_path_factory.mktemp("dumps")
    for _, file_name, write in DUMPS:
        write(folder / file_name)
    return folder


@pytest.mark.parametrize(("value", "message"), BROKEN_FORMATS.values(), ids=BROKEN_FORMATS)
def test_broken_format_fails_only_for_its_own_dumps(
    value: object, message: str, all_dumps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_format(monkeypatch, tmp_path, value)
    (tmp_path / "a.custom").write_text(XML)
    with pytest.raises(InputError, match=rf"^{re.escape(BROKEN_NAME)} {message}"):
        plan_file(tmp_path / "a.custom", tmp_path / "work")
    for format_name, file_name, _ in DUMPS:
        assert detect_format(find_dump_files(str(all_dumps / file_name)).urls[0]) == format_name
    plan_file(all_dumps / "a.xml", tmp_path / "work")


def test_format_that_cannot_be_imported_fails_only_for_its_own_dumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package, entry_point in (("broken", "aaa"), ("first", "bbb"), ("second", "bbb")):
        target = f"no_such_module:{package.upper()}"
        install_package(tmp_path / f"{package}_package", "dump_formats", f"{entry_point} = {target}")
        monkeypatch.syspath_prepend(tmp_path / f"{package}_package")
    (tmp_path / "a.xml").write_text(XML)
    assert len(read_content(plan_file(tmp_path / "a.xml", tmp_path / "work"))) == COUNT
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"Not a MediaWiki export."))
    (tmp_path / "a.custom").touch()
    for file_name in ("a.custom", "a.gz"):
        with pytest.raises(InputError, match=r"dump format 'aaa' .* cannot be imported"):
            plan_file(tmp_path / file_name, tmp_path / "work")
    with pytest.raises(InputError, match="'bbb' is registered by no_such_module:FIRST and by"):
        get_format("bbb")


class CustomRecords(MailArchive):
    """A record format whose records a test replaces."""

    def recognize(self, name: str, read_head: Callable[[], bytes]) -> bool:
        return name.endswith(".custom")


@pytest.mark.parametrize(
    ("read_records", "message"),
    [
        (lambda *_: None, r"returns None from `read_records` instead of Iterable"),
        (raise_error, r"raises ZeroDivisionError in `read_records` \(division by zero\)"),
        (lambda *_: map(raise_error, [1]), r"raises ZeroDivisionError in `read_records`"),
        (lambda *_: iter([3]), r"yields 3 from `read_records` instead of \(id, title, \[\(heading, text\), …\]"),
        (lambda *_: iter([("a", "b")]), r"yields \('a', 'b'\) from"),
        (lambda *_: iter([(1, "b", [], None)]), r"yields \(1, 'b', \[\], None\) from"),
        (lambda *_: iter([("a", "b", "text", None)]), r"yields \('a', 'b', 'text', None\) from"),
        (lambda *_: iter([("a", "b", ["text"], None)]), r"yields \('a', 'b', \['text'\], None\) from"),
        (lambda *_: iter([("a", "b", [], "2026")]), r"yields \('a', 'b', \[\], '2026'\) from"),
    ],
)
def test_invalid_records_are_an_error_of_the_format(
    read_records: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_format(monkeypatch, tmp_path, type("A", (CustomRecords,), {"read_records": read_records})())
    (tmp_path / "a.custom").touch()
    with pytest.raises(InputError, match=rf"^{re.escape(BROKEN_NAME)} {message}"):
        plan_file(tmp_path / "a.custom", tmp_path / "work")


@pytest.mark.parametrize("member", ["parse_slice", "classify"])
def test_page_format_that_fails_on_a_worker_is_reported(
    member: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.custom").write_text(XML)
    break_format(monkeypatch, tmp_path, CustomFormat())
    plan = plan_file(tmp_path / "a.custom", tmp_path / "work")
    monkeypatch.setattr(CustomFormat, member, raise_error)
    with pytest.raises(InputError, match=r"^dump format 'aaa' .* raises ZeroDivisionError in"):
        chunk_part(plan.parts[0], plan.siteinfo, ChunkRecipe(), tmp_path / "out.parquet")


@pytest.mark.parametrize("date", ["never", "", "Thu, 32 Jan 2026 99:00:00"])
def test_mail_without_a_valid_date_is_read(date: str, tmp_path: Path) -> None:
    (tmp_path / "a.mbox").write_text(MESSAGE.format(i=1).replace("Subject", f"Date: {date}\nSubject"))
    assert len(read_content(plan_file(tmp_path / "a.mbox", tmp_path / "work"))) == 1


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", json.dumps(DOCUMENTS[0])),
        ("a.jsonl", "\n".join(map(json.dumps, DOCUMENTS))),
        ("a.tsv", "1\tText\tTitle\n"),
        ("a.xml", XML),
    ],
)
def test_utf16_and_utf32_are_reported(encoding: str, name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding=encoding)
    with pytest.raises(InputError, match=rf"^{name} is {encoding[:6].upper()}: convert it to UTF-8"):
        plan_file(tmp_path / name, tmp_path / "work")


def test_kilt_pages_have_titles_and_sections(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(KILT_PAGES[1]))
    (article,) = read_content(plan_file(tmp_path / "a.jsonl", tmp_path / "work"))
    assert isinstance(article, Article)
    assert (article.page_id, article.title) == ("1", "Title 1")
    assert article.sections == (Section("", "Text number 1."), Section("Origin", "More words."))


def test_finewiki_page_has_sections_and_a_date(tmp_path: Path) -> None:
    write_finewiki(tmp_path / "a.parquet")
    article = read_content(plan_file(tmp_path / "a.parquet", tmp_path / "work", limit=1))[0]
    assert isinstance(article, Article)
    assert (article.page_id, article.title, article.revised) == ("enwiki/0", "Page 0", 1_793_534_400)
    assert article.sections == (Section("", "Text number 0.\n\n"), Section("History", "\nIt has words."))


def test_wiki_dpr_passages_are_read_unchanged(tmp_path: Path) -> None:
    write_wiki_dpr(tmp_path / "a.parquet")
    passage = read_content(plan_file(tmp_path / "a.parquet", tmp_path / "work", limit=1))[0]
    assert isinstance(passage, Passage)
    assert (passage.id, passage.title, passage.text) == ("0", "Title 0", "Text 0")


@pytest.mark.parametrize("text", ["message", None, [1], [["message"]]])
def test_kilt_page_without_paragraphs_is_reported(text: object, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({**KILT_PAGES[1], "text": text}))
    with pytest.raises(InputError, match=r"line 1 of a\.jsonl has no list of paragraphs"):
        plan_file(tmp_path / "a.jsonl", tmp_path / "work")


@pytest.mark.parametrize("compress", [lzma.compress, compress_zstd])
@pytest.mark.parametrize("damage", ["cut", "changed", "followed"])
def test_damaged_compressed_file_is_reported(compress: Callable[[bytes], bytes], damage: str, tmp_path: Path) -> None:
    name = "a.jsonl.xz" if compress is lzma.compress else "a.jsonl.zst"
    data = compress(encode_lines(DOCUMENTS))
    damaged = {"cut": data[:-9], "changed": data[:40] + b"\xff" * 40 + data[80:], "followed": data + b"more"}
    (tmp_path / name).write_bytes(damaged[damage])
    state = "truncated" if damage == "cut" else "corrupt"
    with pytest.raises(InputError, match=rf"^{re.escape(name)} is {state} \("):
        plan_file(tmp_path / name, tmp_path / "work")


@pytest.mark.parametrize("compress", [lzma.compress, compress_zstd])
def test_concatenated_streams_are_decoded_in_bounded_steps(compress: Callable[[bytes], bytes]) -> None:
    codec: Compression = "xz" if compress is lzma.compress else "zstd"
    data = compress(bytes(8 << 20)) + compress(b"end")
    data = data + bytes(4) if codec == "xz" else data  # padding, which xz allows
    steps = list(decode([data[:100], b"", data[100:]], codec, "a"))
    assert max(map(len, steps)) <= MAX_DECODED_BYTES
    assert b"".join(steps) == bytes(8 << 20) + b"end"


LZMA2 = {"id": py7zr.FILTER_LZMA2, "preset": 6}


@pytest.mark.parametrize(
    "filters", [[{"id": py7zr.FILTER_LZMA}], [LZMA2], [{"id": py7zr.FILTER_X86}, LZMA2], [{"id": py7zr.FILTER_BZIP2}]]
)
def test_archive_is_decoded_in_bounded_steps(filters: list[dict[str, int]], tmp_path: Path) -> None:
    data = random.Random(1).randbytes(600_000) + bytes(8 << 20) + b"end"
    write_7z(tmp_path / "a.7z", {"folder/a": data}, filters=filters)
    steps = list(read_decoded(str(tmp_path / "a.7z")))
    assert max(map(len, steps)) <= MAX_DECODED_BYTES
    assert b"".join(steps) == data


def change_byte(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(data)


XML_FILE = {"a.xml": XML.encode()}
ARCHIVES: dict[str, tuple[Callable[[Path], object], str]] = {
    "several": (lambda path: write_7z(path, {**XML_FILE, "b": b"b"}), "holds 2 files: unpack it with `7z x a.xml.7z`"),
    "none": (lambda path: write_7z(path, {}), "holds no file"),
    "empty file": (lambda path: write_7z(path, {"a.xml": b""}), "is empty"),
    "encrypted": (lambda path: write_7z(path, XML_FILE, password="secret"), "is encrypted, or uses a method"),
    "encrypted header": (
        lambda path: write_7z(path, XML_FILE, password="secret", header_encryption=True), "is encrypted: unpack it"
    ),
    "another method": (
        lambda path: write_7z(path, XML_FILE, filters=[{"id": py7zr.FILTER_PPMD, "order": 6, "mem": 24}]),
        "a method other than LZMA, LZMA2 and bzip2",
    ),
    "huge dictionary": (
        lambda path: write_7z(path, XML_FILE, filters=[{**LZMA2, "dict_size": 1 << 29}]), "needs 512 MiB to decode"
    ),
    "no bytes": (lambda path: path.write_bytes(b""), "is empty: download it again"),
    "no archive": (lambda path: path.write_bytes(b"<mediawiki>"), "is not a 7z archive"),
    "cut": (lambda path: [write_7z(path, XML_FILE), os.truncate(path, 150)], "not a readable 7z archive"),
    "changed": (lambda path: [write_7z(path, XML_FILE), change_byte(path, 200)], "is corrupt"),
    "changed header": (lambda path: [write_7z(path, XML_FILE), change_byte(path, -9)], "not a readable 7z archive"),
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHIVES)
def test_unsuitable_archive_is_reported(name: str, tmp_path: Path) -> None:
    write, message = ARCHIVES[name]
    write(tmp_path / "a.xml.7z")
    with pytest.raises(InputError, match=rf"^a\.xml\.7z .*{re.escape(message)}"):
        plan_file(tmp_path / "a.xml.7z", tmp_path / "work")


def test_archive_without_its_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_7z(tmp_path / "a.xml.7z", XML_FILE)
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "py7zr.py").write_text("raise ModuleNotFoundError(name='py7zr')")
    monkeypatch.syspath_prepend(tmp_path / "hidden")  # also on the path of the child process
    with pytest.raises(MissingExtraError, match=r"pip install 'bookwheel\[sevenzip\]'"):
        plan_file(tmp_path / "a.xml.7z", tmp_path / "work")
