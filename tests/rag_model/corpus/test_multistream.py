import bz2
from collections.abc import Callable
from pathlib import Path

import pytest

from rag_model.corpus.dump_formats.mediawiki import FORMAT as MEDIAWIKI
from rag_model.corpus.dump_formats.mediawiki import find_offset_index, is_offset_index
from rag_model.errors import InputError

Lines = list[str]


@pytest.mark.parametrize(
    ("dump", "index"),
    [
        (
            "enwiki-20261101-pages-articles-multistream.xml.bz2",
            "enwiki-20261101-pages-articles-multistream-index.txt.bz2",
        ),
        (
            "enwiki-20261101-pages-articles-multistream1.xml-p1p41242.bz2",
            "enwiki-20261101-pages-articles-multistream-index1.txt-p1p41242.bz2",
        ),
        (
            "enwiki-20261101-pages-articles-multistream27.xml-p79822778p81322777.bz2",
            "enwiki-20261101-pages-articles-multistream-index27.txt-p79822778p81322777.bz2",
        ),
        ("simple-20261101.xml.bz2", "simple-20261101-index.txt.bz2"),
    ],
)
def test_index_is_found_by_its_name(tmp_path: Path, dump: str, index: str) -> None:
    url = (tmp_path / dump).as_uri()
    assert find_offset_index(url) is None
    (tmp_path / index).write_bytes(b"")
    assert find_offset_index(url) == (tmp_path / index).as_uri()
    assert is_offset_index(index)
    assert not is_offset_index(dump)


@pytest.fixture
def make_dump(tmp_path, make_multistream) -> Callable[[Callable[[Lines], Lines]], Path]:
    """Return a function that writes a dump and rewrites the lines of its index."""

    def write_dump(rewrite: Callable[[Lines], Lines]) -> Path:
        dump = Path(make_multistream(tmp_path))
        index = tmp_path / dump.name.replace(".xml", "-index.txt")
        lines = bz2.decompress(index.read_bytes()).decode().splitlines()
        index.write_bytes(bz2.compress("".join(f"{line}\n" for line in rewrite(lines)).encode()))
        return dump

    return write_dump


def shift_offsets(lines: Lines, by: int) -> Lines:
    return [f"{int(line.partition(':')[0]) + by}:{line.partition(':')[2]}" for line in lines]


def renumber_pages(lines: Lines, by: int) -> Lines:
    fields = [line.split(":", 2) for line in lines]
    return [f"{offset}:{int(page_id) + by}:{title}" for offset, page_id, title in fields]


@pytest.mark.parametrize(
    ("rewrite", "message"),
    [
        (lambda lines: shift_offsets(lines, 5), "but no bz2 stream begins there"),
        (
            lambda lines: renumber_pages(lines, 1),
            "should have pages 11 to 43 according to its index, but it has page 10",
        ),
        (
            lambda lines: renumber_pages(lines, -1),
            "should have pages 9 to 41 according to its index, but it has page 42",
        ),
        (lambda lines: shift_offsets(lines, 10_000_000), "past its end or its next stream"),
        (lambda lines: lines[40:60] + lines[:20], "past its end or its next stream"),
        (lambda lines: lines[20:], "does not name the first pages"),
        (lambda lines: lines[:-20], "but it has page [0-9]+"),
        (lambda lines: lines[:-1], "but it has page 775"),
        (lambda _: [], "is empty"),
        (lambda lines: [*lines[:5], "no numbers here"], "line 6 of .*index.* is not `offset:page id:title`"),
    ],
)
def test_index_of_another_dump_is_refused(make_dump, plan, rewrite, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        plan(make_dump(rewrite))
    assert str(error.value).endswith(": download the dump and its index again, both with the same date")


def test_worker_detects_missing_streams_of_the_index(make_dump, plan) -> None:
    parts = plan(make_dump(lambda lines: lines[:60] + lines[80:])).parts
    with pytest.raises(InputError, match=r"according to its index, but it has page .*: download the dump"):
        [page for part in parts for page in MEDIAWIKI.read(part)]


def test_missing_line_within_a_stream_is_harmless(make_dump, plan) -> None:
    parts = plan(make_dump(lambda lines: lines[:5] + lines[6:])).parts
    assert sum(1 for part in parts for _ in MEDIAWIKI.read(part)) == 206


def test_titles_may_contain_colons(tmp_path, page_xml, export_xml, make_multistream, plan) -> None:
    source = tmp_path / "source.xml"
    source.write_bytes(export_xml(page_xml(1, title="2001: A Space Odyssey: 1")))
    (part,) = plan(make_multistream(tmp_path, source)).parts
    assert [page.title for page in MEDIAWIKI.read(part)] == ["2001: A Space Odyssey: 1"]


def test_truncated_index_is_reported(tmp_path, make_multistream, plan) -> None:
    dump = Path(make_multistream(tmp_path))
    index = tmp_path / dump.name.replace(".xml", "-index.txt")
    index.write_bytes(index.read_bytes()[:-30])
    with pytest.raises(InputError, match=r"-index\.txt\.bz2 is truncated"):
        plan(dump)


def test_truncated_dump_is_reported(tmp_path, make_multistream, plan) -> None:
    dump = Path(make_multistream(tmp_path))
    dump.write_bytes(dump.read_bytes()[:-20_000])
    with pytest.raises(InputError, match=r"multistream\.xml\.bz2 .* is truncated"):
        plan(dump)
