import gc
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.corpus.moments import seconds_of
from rag_model.corpus.pages import MAX_DEPTH, PageParser, parse_pages
from rag_model.corpus.records import Page
from rag_model.errors import InputError

NOON = seconds_of("2026-11-01T12:00:00Z")
STAMP = "<timestamp>2026-11-01T12:00:00Z</timestamp>"


def pages_of(xml: bytes, step: int = 1000) -> list[Page]:
    return list(parse_pages((xml[i : i + step] for i in range(0, len(xml), step)), "x.xml"))


@pytest.mark.parametrize("schema", ["0.10", "0.11"])
def test_a_page_is_read_whole(page_xml, export_xml, schema: str) -> None:
    xml = export_xml(page_xml(12, "a < b & 'c' é", rev_id=34, title="A &amp; B"), schema=schema)
    assert pages_of(xml) == [Page(12, 34, NOON, 0, "A & B", False, "wikitext", "a < b & 'c' é")]


def test_redirects_namespaces_and_content_models_are_kept_apart(page_xml, export_xml) -> None:
    xml = export_xml(page_xml(1, redirect="X"), page_xml(2, ns="10"), page_xml(3, model="json"))
    assert [(page.redirect, page.namespace, page.model) for page in pages_of(xml)] == [
        (True, 0, "wikitext"),
        (False, 10, "wikitext"),
        (False, 0, "json"),
    ]


def test_a_run_of_pages_needs_no_root(page_xml, export_xml) -> None:
    pages = page_xml(1) + page_xml(2)
    assert pages_of(pages.encode()) == pages_of(export_xml(pages))
    assert pages_of((pages + "</mediawiki>\n").encode()) == pages_of(export_xml(pages))


def test_other_slots_of_a_revision_are_no_text(page_xml) -> None:
    slot = "<content><role>data</role><model>json</model><text>{}</text></content></revision>"
    (page,) = pages_of(page_xml(1, "main").replace("</revision>", slot).encode())
    assert (page.text, page.model) == ("main", "wikitext")


def test_of_several_revisions_the_highest_is_taken(page_xml) -> None:
    page = page_xml(1, "new", rev_id=9)
    old = page_xml(1, "old", rev_id=5).partition("<revision>")[2].partition("</revision>")[0]
    old = old.replace("2026-11", "2027-01")  # a clock that was wrong
    both = page.replace("</revision>", f"</revision><revision>{old}</revision>")
    assert [(page.rev_id, page.text, page.revised) for page in pages_of(both.encode())] == [(9, "new", NOON)]


@pytest.mark.parametrize(
    ("stamp", "revised"),
    [
        ("", None),
        ("<timestamp/>", None),
        ("<timestamp> \n</timestamp>", None),
        ("<timestamp>\n2026-11-01T12:00:00Z </timestamp>", NOON),
        ("<timestamp>2026-11-01 12:00</timestamp>", NOON),
        ("<timestamp>2199-12-31T23:59:59Z</timestamp>", seconds_of("2199-12-31T23:59:59Z")),
    ],
)
def test_a_revision_may_have_no_time(page_xml, stamp: str, revised: int | None) -> None:
    (page,) = pages_of(page_xml(1).replace(STAMP, stamp).encode())
    assert page.revised == revised


@pytest.mark.parametrize(
    ("stamp", "says"),
    [
        ("yesterday", "x.xml has 'yesterday' in place of a revision's time: give a MediaWiki export"),
        ("20261101120000000", "in place of a revision's time"),
        ("x" * 100_000, f"has '{'x' * 40}' in place of"),
        ("9999-12-31T23:59:59Z", "x.xml has the time 9999-12-31T23:59:59Z, which no revision has: give"),
        ("2200-01-01T00:00:00Z", "which no revision has"),
        ("12026-11-01T12:00:00Z", "in place of a revision's time"),
    ],
)
def test_an_impossible_time_is_one_sentence(page_xml, stamp: str, says: str) -> None:
    """It would date the dump, so that no later one could take its place."""
    with pytest.raises(InputError, match=says) as refused:
        pages_of(page_xml(1).replace(STAMP, f"<timestamp>{stamp}</timestamp>").encode())
    assert len(str(refused.value)) < 200


def test_siteinfo_names_the_wiki_and_its_namespaces(page_xml, export_xml) -> None:
    parser = PageParser("x.xml")
    parser.feed(export_xml(page_xml(1), language="de", dbname="dewiki", files="Datei"))
    assert parser.siteinfo is not None
    assert (parser.siteinfo.dbname, parser.siteinfo.language) == ("dewiki", "de")
    assert {parser.siteinfo.namespaces[name] for name in ("datei", "bild", "file", "image")} == {6}
    assert parser.siteinfo.namespaces["category"] == 14


@given(cuts=st.lists(st.integers(0, 2000), max_size=20))
def test_where_chunks_end_changes_nothing(page_xml, export_xml, cuts: list[int]) -> None:
    xml = export_xml(*(page_xml(i, "é&" * i) for i in range(1, 4)))
    bounds = [0, *sorted(cut for cut in cuts if cut < len(xml)), len(xml)]
    chunks = [xml[a:b] for a, b in pairwise(bounds)]
    assert list(parse_pages(chunks, "x")) == pages_of(xml)


def test_the_offset_of_a_page_is_where_its_tag_begins(page_xml, export_xml) -> None:
    for xml in (export_xml(page_xml(1), page_xml(2)), (page_xml(1) + page_xml(2)).encode()):
        starts = [start for start, _ in PageParser("x").feed(xml)]
        assert [xml[start : start + 6] for start in starts] == [b"<page>"] * 2


def test_a_page_of_twenty_megabytes_is_read(page_xml) -> None:
    text = "word & word\n" * (20 << 20 >> 3)
    (page,) = pages_of(page_xml(1, text).encode(), step=1 << 20)
    assert page.text == text


def bomb() -> bytes:
    entities = "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 20))
    return f'<!DOCTYPE x [<!ENTITY a0 "ha">{entities}]><mediawiki><page>&a19;</page></mediawiki>'.encode()


@pytest.mark.parametrize(
    ("xml", "says"),
    [
        (bomb(), "document type"),
        (b'<!DOCTYPE x SYSTEM "file:///etc/passwd"><mediawiki>', "document type"),
        (b"<mediawiki>" + b"<a>" * 100_000, f"more than {MAX_DEPTH} deep"),
        (b"<rss><channel/></rss>", "root is <rss>"),
        (b"<!doctype html><html></html>", "document type|not well-formed"),
        (b"just some words", "not well-formed"),
        (b"\x89PNG\r\n\x1a\n", "not well-formed"),
        (b"<mediawiki><page>\xff</page></mediawiki>", "not well-formed"),
        ("<mediawiki><page></page></mediawiki>".encode("utf-16"), "is UTF-16"),
        (b"<mediawiki><page><title>a</title></page></mediawiki>", "without <id>"),
        (b"<page><title>a</title><id>9223372036854775808</id></page>", "which no wiki has"),
        (b"<page><title>a</title><id>one</id></page>", "'one' in place of a number"),
        (b'<mediawiki><siteinfo><namespaces><namespace key="x"/>', "'x' in place of a number"),
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"<mediawiki>", "truncated"),
        (b"<mediawiki><page><id>1</id>", "truncated"),
        (b"<page><title>a</title><id>1</id></page><page><ti", "truncated"),
        (b"<page><title>" + b"a" * 1001 + b"</title><id>1</id></page>", "has a <title> of more than 1,000 characters"),
    ],
)
def test_what_is_no_export_is_refused_in_one_sentence(xml: bytes, says: str) -> None:
    with pytest.raises(InputError, match=says) as refused:
        pages_of(xml)
    assert str(refused.value).startswith("x.xml ")
    assert "\n" not in str(refused.value)


def endless(opening: bytes, filling: bytes) -> Iterator[bytes]:
    yield opening
    while True:
        yield filling


@pytest.mark.parametrize(
    ("opening", "says"),
    [
        (b"<page><revision><text>", "MiB of text"),
        (b'<page><revision><text a="', "XML tag of more than"),
        (b"<page><!--", "XML tag of more than"),
        (b" " * (1 << 20), "XML tag of more than"),
        (b"<page", "XML tag of more than"),
    ],
)
def test_what_never_ends_is_given_up(opening: bytes, says: str) -> None:
    tracemalloc.start()
    with pytest.raises(InputError, match=says):
        list(parse_pages(endless(opening, b"x" * (1 << 20)), "x.xml"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 << 20


def test_a_parser_goes_without_waiting_for_the_collector(page_xml) -> None:
    gc.disable()
    try:
        parser = PageParser("x")
        parser.feed(page_xml(1).encode())
        parser.close()
        seen = weakref.ref(parser)
        del parser
        assert seen() is None
    finally:
        gc.enable()


def test_memory_does_not_grow_with_the_pages(page_xml) -> None:
    def peak(count: int) -> int:
        page: Callable[[int], bytes] = lambda i: page_xml(i, "word " * 2000).encode()  # noqa: E731
        tracemalloc.start()
        for _ in parse_pages(map(page, range(1, count)), "x"):
            pass
        seen = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return seen

    peak(10)
    assert peak(2000) < 1.5 * peak(200)
