import bz2
import gc
import gzip
import re
import shutil
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise, repeat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.corpus.dump_formats.mediawiki import FORMAT as MEDIAWIKI
from rag_model.corpus.dump_formats.mediawiki import MAX_DEPTH, PageParser, parse_pages
from rag_model.corpus.plan import compute_source_digest
from rag_model.corpus.records import Page, Plan, parse_seconds
from rag_model.corpus.wikitext import clean_wikitext
from rag_model.errors import InputError
from tests.fixtures.work_counters import measure_peaks

NOON = parse_seconds("2026-11-01T12:00:00Z")
STAMP = "<timestamp>2026-11-01T12:00:00Z</timestamp>"


def parse_in_chunks(xml: bytes, step: int = 1000) -> list[Page]:
    return list(parse_pages((xml[i : i + step] for i in range(0, len(xml), step)), "x.xml"))


@pytest.mark.parametrize("schema", ["0.10", "0.11"])
def test_page_is_read_completely(page_xml, export_xml, schema: str) -> None:
    xml = export_xml(page_xml(12, "a < b & 'c' é", rev_id=34, title="A &amp; B"), schema=schema)
    assert parse_in_chunks(xml) == [Page(12, 34, NOON, 0, "A & B", False, "wikitext", "a < b & 'c' é")]


def test_redirects_namespaces_and_models_are_read(page_xml, export_xml) -> None:
    xml = export_xml(page_xml(1, redirect="X"), page_xml(2, ns="10"), page_xml(3, model="json"))
    assert [(page.redirect, page.namespace, page.model) for page in parse_in_chunks(xml)] == [
        (True, 0, "wikitext"),
        (False, 10, "wikitext"),
        (False, 0, "json"),
    ]


def test_pages_without_a_root_are_read(page_xml, export_xml) -> None:
    pages = page_xml(1) + page_xml(2)
    assert parse_in_chunks(pages.encode()) == parse_in_chunks(export_xml(pages))
    assert parse_in_chunks((pages + "</mediawiki>\n").encode()) == parse_in_chunks(export_xml(pages))


def test_only_the_main_slot_is_text(page_xml) -> None:
    slot = "<content><role>data</role><model>json</model><text>{}</text></content></revision>"
    (page,) = parse_in_chunks(page_xml(1, "main").replace("</revision>", slot).encode())
    assert (page.text, page.model) == ("main", "wikitext")


@pytest.mark.parametrize("new_first", [True, False])
@pytest.mark.parametrize(
    ("old_id", "old_time"),
    [
        (5, "2026-10"),
        (5, "2026-11"),  # at equal times the higher id is newer
        (12, "2026-10"),  # the old revision was imported later
        (12, ""),
    ],
)
def test_newest_revision_is_used(page_xml, old_id: int, old_time: str, *, new_first: bool) -> None:
    page = page_xml(1, "new", rev_id=9)
    new_revision, old_revision = (
        xml.partition("<revision>")[2].partition("</revision>")[0] for xml in (page, page_xml(1, "old", rev_id=old_id))
    )
    time = f"<timestamp>{old_time}-01T12:00:00Z</timestamp>" if old_time else ""
    old_revision = re.sub("<timestamp>.*</timestamp>", time, old_revision)
    revisions = [new_revision, old_revision] if new_first else [old_revision, new_revision]
    xml = page.replace(new_revision, "</revision><revision>".join(revisions))
    assert [(page.rev_id, page.text, page.revised) for page in parse_in_chunks(xml.encode())] == [(9, "new", NOON)]


@pytest.mark.parametrize(
    ("stamp", "revised"),
    [
        ("", None),
        ("<timestamp/>", None),
        ("<timestamp> \n</timestamp>", None),
        ("<timestamp>\n2026-11-01T12:00:00Z </timestamp>", NOON),
        ("<timestamp>2026-11-01 12:00</timestamp>", NOON),
        ("<timestamp>2199-12-31T23:59:59Z</timestamp>", parse_seconds("2199-12-31T23:59:59Z")),
    ],
)
def test_revision_may_have_no_time(page_xml, stamp: str, revised: int | None) -> None:
    (page,) = parse_in_chunks(page_xml(1).replace(STAMP, stamp).encode())
    assert page.revised == revised


@pytest.mark.parametrize(
    ("stamp", "message"),
    [
        ("yesterday", "x.xml has 'yesterday' instead of a revision's time: give a MediaWiki export"),
        ("20261101120000000", "instead of a revision's time"),
        ("x" * 100_000, f"has '{'x' * 40}' instead of"),
        ("9999-12-31T23:59:59Z", "x.xml has the time 9999-12-31T23:59:59Z, which is too far in the future: give"),
        ("2200-01-01T00:00:00Z", "which is too far in the future"),
        ("12026-11-01T12:00:00Z", "instead of a revision's time"),
    ],
)
def test_impossible_time_is_reported(page_xml, stamp: str, message: str) -> None:
    """With such a time the dump would be newer than any later one."""
    with pytest.raises(InputError, match=message) as error:
        parse_in_chunks(page_xml(1).replace(STAMP, f"<timestamp>{stamp}</timestamp>").encode())
    assert len(str(error.value)) < 200


def test_siteinfo_has_the_wiki_and_its_namespaces(page_xml, export_xml) -> None:
    parser = PageParser("x.xml")
    parser.feed(export_xml(page_xml(1), language="de", dbname="dewiki", files="Datei"))
    assert parser.siteinfo is not None
    assert (parser.siteinfo.dbname, parser.siteinfo.language) == ("dewiki", "de")
    assert {parser.siteinfo.namespaces[name] for name in ("datei", "bild", "file", "image")} == {6}
    assert parser.siteinfo.namespaces["category"] == 14


def test_picture_with_an_old_namespace_name_is_dropped(page_xml, export_xml) -> None:
    parser = PageParser("x.xml")
    text = "[[Εικόνα:A.jpg|thumb|right|Το τέμενος]]\nΚείμενο για την πόλη."
    ((_, page),) = parser.feed(export_xml(page_xml(1, text), language="el", dbname="elwiki", files="Αρχείο"))
    assert parser.siteinfo is not None
    assert [section.text for section in clean_wikitext(page.text, parser.siteinfo)] == ["Κείμενο για την πόλη."]


@given(cuts=st.lists(st.integers(0, 2000), max_size=20))
def test_pages_do_not_depend_on_chunk_boundaries(page_xml, export_xml, cuts: list[int]) -> None:
    xml = export_xml(*(page_xml(i, "é&" * i) for i in range(1, 4)))
    bounds = [0, *sorted(offset for offset in cuts if offset < len(xml)), len(xml)]
    chunks = [xml[a:b] for a, b in pairwise(bounds)]
    assert list(parse_pages(chunks, "x")) == parse_in_chunks(xml)


def test_offset_of_a_page_is_the_start_of_its_tag(page_xml, export_xml) -> None:
    for xml in (export_xml(page_xml(1), page_xml(2)), (page_xml(1) + page_xml(2)).encode()):
        starts = [start for start, _ in PageParser("x").feed(xml)]
        assert [xml[start : start + 6] for start in starts] == [b"<page>"] * 2


def test_page_of_twenty_megabytes_is_read(page_xml) -> None:
    text = "word & word\n" * (20 << 20 >> 3)
    (page,) = parse_in_chunks(page_xml(1, text).encode(), step=1 << 20)
    assert page.text == text


def build_entity_bomb() -> bytes:
    entities = "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 20))
    return f'<!DOCTYPE x [<!ENTITY a0 "ha">{entities}]><mediawiki><page>&a19;</page></mediawiki>'.encode()


@pytest.mark.parametrize(
    ("xml", "message"),
    [
        (build_entity_bomb(), "document type"),
        (b'<!DOCTYPE x SYSTEM "file:///etc/passwd"><mediawiki>', "document type"),
        (b"<mediawiki>" + b"<a>" * 100_000, f"more than {MAX_DEPTH} deep"),
        (b"<rss><channel/></rss>", "root is <rss>"),
        (b"<!doctype html><html></html>", "document type|not well-formed"),
        (b"just some words", "not well-formed"),
        (b"\x89PNG\r\n\x1a\n", "not well-formed"),
        (b"<mediawiki><page>\xff</page></mediawiki>", "not well-formed"),
        ("<mediawiki><page></page></mediawiki>".encode("utf-16"), "is UTF-16"),
        (b"<mediawiki><page><title>a</title></page></mediawiki>", "without <id>"),
        (b"<page><title>a</title><id>9223372036854775808</id></page>", "which is out of range"),
        (b"<page><title>a</title><id>one</id></page>", "'one' instead of a number"),
        (b'<mediawiki><siteinfo><namespaces><namespace key="x"/>', "'x' instead of a number"),
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"<mediawiki>", "truncated"),
        (b"<mediawiki><page><id>1</id>", "truncated"),
        (b"<page><title>a</title><id>1</id></page><page><ti", "truncated"),
        (b"<page><title>" + b"a" * 1001 + b"</title><id>1</id></page>", "has a <title> of more than 1,000 characters"),
    ],
)
def test_invalid_export_is_reported_in_one_line(xml: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        parse_in_chunks(xml)
    assert str(error.value).startswith("x.xml ")
    assert "\n" not in str(error.value)


def iter_endless(opening: bytes, filling: bytes) -> Iterator[bytes]:
    yield opening
    while True:
        yield filling


def check_endless_element_is_refused(opening: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        list(parse_pages(iter_endless(opening, b"x" * (1 << 20)), "x.xml"))


def test_endless_elements_are_refused_in_little_memory() -> None:
    cases = [
        (b"<page><revision><text>", "MiB of text"),
        (b'<page><revision><text a="', "XML tag of more than"),
        (b"<page><!--", "XML tag of more than"),
        (b" " * (1 << 20), "XML tag of more than"),
        (b"<page", "XML tag of more than"),
    ]
    peaks = measure_peaks(*(partial(check_endless_element_is_refused, *case) for case in cases))
    assert max(peaks) < 200 << 20, peaks


def test_parser_is_freed_without_the_garbage_collector(page_xml) -> None:
    gc.disable()
    try:
        parser = PageParser("x")
        parser.feed(page_xml(1).encode())
        parser.close()
        parser_reference = weakref.ref(parser)
        del parser
        assert parser_reference() is None
    finally:
        gc.enable()


def parse_same_page(page: bytes, count: int) -> None:
    for _ in parse_pages(repeat(page, count), "x"):
        pass


def test_memory_does_not_grow_with_the_number_of_pages(page_xml) -> None:
    page = page_xml(1, "word " * 2000).encode()
    _, few, many = measure_peaks(*(partial(parse_same_page, page, count) for count in (10, 200, 2000)))
    assert many < 1.5 * few


def read_pages(plan: Plan) -> list[Page]:
    return [page for part in plan.parts for page in MEDIAWIKI.read(part)]


@pytest.fixture(scope="module")
def demo_pages(demo_dump: Path) -> list[Page]:
    return list(parse_pages([bz2.decompress(demo_dump.read_bytes())], "demo"))


@pytest.mark.parametrize(("pages_a_stream", "files"), [(1, 1), (20, 4), (1000, 1)])
def test_parts_of_a_multistream_dump_have_all_pages(
    tmp_path, make_multistream, plan, small_dump, *, pages_a_stream: int, files: int
) -> None:
    pattern = make_multistream(tmp_path, small_dump, pages_a_stream=pages_a_stream, files=files)
    expected = list(parse_pages([bz2.decompress(small_dump.read_bytes())], "small"))
    assert read_pages(plan(pattern, part_bytes=100_000)) == expected


def test_parts_of_a_plain_dump_have_all_pages(tmp_path, demo_dump, plan, demo_pages) -> None:
    xml = tmp_path / "demo.xml"
    xml.write_bytes(bz2.decompress(demo_dump.read_bytes()))
    assert read_pages(plan(demo_dump)) == demo_pages
    assert read_pages(plan(xml)) == demo_pages


def test_worker_reads_only_the_streams_of_its_part(tmp_path, make_multistream, plan, demo_pages) -> None:
    dump = Path(make_multistream(tmp_path))
    parts = plan(dump).parts
    part = parts[2]
    data = dump.read_bytes()
    (part_slice,) = part.slices
    start, end = part_slice.offset, part_slice.offset + part_slice.length
    dump.write_bytes(b"?" * start + data[start:end] + b"?" * 10)
    expected = [page for page in demo_pages if part.first_page <= page.page_id <= part.last_page]
    assert list(MEDIAWIKI.read(part)) == expected
    with pytest.raises(InputError, match=f"bytes {parts[1].slices[0].offset} to .* is corrupt"):
        list(MEDIAWIKI.read(parts[1]))


# Page id, time and id of each revision: an imported old revision has a high id.
revisions = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=30)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(
    revisions=revisions,
    pages_a_stream=st.integers(1, 5),
    files=st.integers(1, 3),
    multistream=st.booleans(),
    limit=st.none() | st.integers(1, 13),
)
def test_newest_revision_of_a_duplicate_page_is_read(
    tmp_path, page_xml, export_xml, make_multistream, plan, *, revisions, pages_a_stream, files, multistream, limit
) -> None:
    folder = tmp_path / "dumps"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    pages = [
        page_xml(page_id, f"{page_id}.{rev} {'x' * 100_000}", rev_id=rev).replace("2026-11", f"2026-0{time}")
        for page_id, time, rev in revisions
    ]
    source = folder / "all.xml"
    source.write_bytes(export_xml(*pages))
    if multistream:
        make_multistream(folder, source, pages_a_stream=pages_a_stream, files=files)
        source.unlink()
    dump_plan = plan(f"{folder}/*.*", part_bytes=1 + 200 * files, limit=limit)
    read_revisions = [(page.page_id, page.rev_id) for page in read_pages(dump_plan)]
    newest = {
        page_id: max((time, rev) for other_id, time, rev in revisions if other_id == page_id)[1]
        for page_id, _, _ in revisions
    }
    assert len(read_revisions) == min(len(newest), limit or len(newest))
    assert len(dict(read_revisions)) == len(read_revisions)
    if limit is None:  # a limit leaves newer revisions unread
        assert dict(read_revisions) == newest


def test_plan_records_whether_ids_are_ordered(tmp_path, page_xml, export_xml, plan) -> None:
    for name, ids in {"up": [1, 2, 9], "down": [9, 2, 1], "twice": [1, 2, 2]}.items():
        (tmp_path / f"{name}.xml").write_bytes(export_xml(*map(page_xml, ids)))
    assert [plan(tmp_path / f"{name}.xml").parts[0].ordered for name in ("up", "down", "twice")] == [True, False, False]


def test_pages_in_another_order_than_planned_are_refused(tmp_path, page_xml, export_xml, plan) -> None:
    dump = tmp_path / "x.xml"
    dump.write_bytes(export_xml(page_xml(1), page_xml(2), page_xml(3)))
    (part,) = plan(dump).parts
    dump.write_bytes(export_xml(page_xml(1), page_xml(3), page_xml(2)))
    with pytest.raises(InputError, match="page 2 follows page 3 in part-00000"):
        list(MEDIAWIKI.read(part))


@pytest.mark.parametrize(("ids_now", "message"), [((1, 7, 3), "page 7"), ((1, 2, 2), "only pages 1 to 2")])
def test_pages_that_were_not_planned_are_refused(tmp_path, page_xml, export_xml, plan, *, ids_now, message) -> None:
    dump = tmp_path / "x.xml"
    dump.write_bytes(export_xml(*map(page_xml, (1, 2, 3))))
    part = replace(plan(dump).parts[0], ordered=False)
    dump.write_bytes(export_xml(*map(page_xml, ids_now)))
    with pytest.raises(InputError, match=f"should have pages 1 to 3 according to its index, but it has {message}"):
        list(MEDIAWIKI.read(part))


def test_digest_depends_on_the_bytes_of_the_part_only(tmp_path, make_multistream, plan) -> None:
    dump = Path(make_multistream(tmp_path))
    first, second, *_ = plan(dump).parts
    digests_before = [compute_source_digest(first), compute_source_digest(second)]
    changed = bytearray(dump.read_bytes())
    changed[second.slices[0].offset + 100] ^= 1
    dump.write_bytes(changed)
    digests_after = [compute_source_digest(first), compute_source_digest(second)]
    assert digests_before[0] == digests_after[0]
    assert digests_before[1] != digests_after[1]
    assert compute_source_digest(replace(first, last_page=first.last_page - 1)) != digests_before[0]


def test_digest_does_not_depend_on_the_compression_level(small_dump, plan) -> None:
    (part, *_) = plan(small_dump).parts
    digest_before = compute_source_digest(part)
    (part_slice,) = part.slices
    path = Path(part_slice.url.removeprefix("file://"))
    start, end = part_slice.offset, part_slice.offset + part_slice.length
    recompressed = gzip.compress(gzip.decompress(path.read_bytes()[start:end]), 9)
    path.write_bytes(recompressed)
    part = replace(part, slices=(replace(part_slice, offset=0, length=len(recompressed)),))
    assert compute_source_digest(part) == digest_before
