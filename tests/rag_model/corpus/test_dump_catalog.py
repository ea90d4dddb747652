"""Wikimedia's way of publishing: a list of runs, a status page each, files that come and connections that break."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rag_model.corpus.dump_catalog import ARTICLES_JOB, PROPERTIES_JOB, fetch_dump, find_newest_dump
from rag_model.errors import InputError, ResourceError
from tests.fixtures.dump_server import MEGABYTE, Site, serving

NAMES = ("testwiki-{}-pages-articles-multistream.xml.bz2", "testwiki-{}-pages-articles-multistream-index.txt.bz2")


def run(site: Site, date: str, status: str = "done", size: int = 300_000) -> None:
    names = [name.format(date) for name in NAMES]
    site.run(date, {name: hashlib.shake_128(name.encode()).digest(size) for name in names}, status)


@pytest.fixture
def site() -> Iterator[Site]:
    with serving() as of:
        yield of


def test_a_complete_dump_is_found_and_fetched(site: Site, tmp_path: Path) -> None:
    run(site, "20261001")
    found = find_newest_dump(site.url)
    assert found is not None
    messages: list[tuple[int, int]] = []
    glob = fetch_dump(found, tmp_path / "20261001", lambda done, total: messages.append((done, total)))
    assert Path(glob).name == NAMES[0].format("20261001")
    for name in (name.format("20261001") for name in NAMES):
        assert (tmp_path / "20261001" / name).read_bytes() == site.pages[f"/testwiki/20261001/{name}"]
    assert messages[-1] == (600_000, 600_000)
    assert messages == sorted(messages)


def test_a_requested_table_is_part_of_the_dump(site: Site, tmp_path: Path) -> None:
    run(site, "20261001")
    assert find_newest_dump(site.url, tables=[PROPERTIES_JOB]) is None, "the table is not written yet"
    name = "testwiki-20261001-page_props.sql.gz"
    site.run("20261001", {name: b"rows"}, job=PROPERTIES_JOB)
    found = find_newest_dump(site.url, tables=[PROPERTIES_JOB])
    assert found is not None
    glob = fetch_dump(found, tmp_path)
    assert Path(glob).name == NAMES[0].format("20261001")
    assert (tmp_path / name).read_bytes() == b"rows"
    assert [file.name for file in find_newest_dump(site.url).files] == sorted(each.format("20261001") for each in NAMES)  # type: ignore[union-attr]


def test_nothing_new_costs_one_request(site: Site) -> None:
    run(site, "20261001")
    assert find_newest_dump(site.url, after="20261001") is None
    assert site.asked == ["/testwiki/"]


def test_one_that_is_still_written_is_left_and_a_month_may_be_skipped(site: Site) -> None:
    run(site, "20260801")
    run(site, "20261001")
    run(site, "20261101", status="in-progress")
    found = find_newest_dump(site.url, after="20260801")
    assert found is not None
    assert found.date == "20261001"
    assert find_newest_dump(site.url, after="20261001") is None
    del site.pages["/testwiki/20261101/dumpstatus.json"]  # a run begins without one
    assert find_newest_dump(site.url, after="20261001") is None


@pytest.mark.parametrize("ranges", [True, False])
def test_a_connection_that_is_cut_goes_on(site: Site, tmp_path: Path, ranges: bool) -> None:
    run(site, "20261001")
    site.ranges, site.cuts = ranges, [0.6, 0.3, 0.9, 1.0]
    found = find_newest_dump(site.url)
    assert found is not None
    fetch_dump(found, tmp_path)
    name = found.files[0].name
    assert (tmp_path / name).read_bytes() == site.pages[f"/testwiki/20261001/{name}"]


def test_one_that_never_comes_is_told_and_a_later_call_goes_on(site: Site, tmp_path: Path) -> None:
    run(site, "20261001", size=30_000)
    found = find_newest_dump(site.url)
    assert found is not None
    site.cuts = [0.6] + [0.0] * 20
    with pytest.raises(InputError, match="broke off at byte 18000 of 30000"):
        fetch_dump(found, tmp_path)
    assert not (tmp_path / found.files[0].name).exists()
    site.cuts = []
    fetch_dump(found, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {file.name for file in found.files}


def test_a_checksum_that_fails(site: Site, tmp_path: Path) -> None:
    run(site, "20261001")
    found = find_newest_dump(site.url)
    assert found is not None
    name = found.files[0].name
    body = site.pages[f"/testwiki/20261001/{name}"]
    site.pages[f"/testwiki/20261001/{name}"] = body[:-1] + bytes([body[-1] ^ 1])
    with pytest.raises(InputError, match="does not match its sha1 and was deleted"):
        fetch_dump(found, tmp_path)
    assert not list(tmp_path.iterdir())
    site.pages[f"/testwiki/20261001/{name}"] = body
    fetch_dump(found, tmp_path)


def test_a_redirect_to_another_server_is_not_followed(site: Site, tmp_path: Path) -> None:
    run(site, "20261001")
    found = find_newest_dump(site.url)
    assert found is not None
    with serving() as elsewhere:
        elsewhere.pages = site.pages
        (file, *_) = (file.name for file in found.files)
        for path in ("/testwiki/", "/testwiki/20261001/dumpstatus.json", f"/testwiki/20261001/{file}"):
            site.moved = {path: elsewhere.url.replace("/testwiki/", path)}
            with pytest.raises(InputError, match="redirects to another server"):
                find_newest_dump(site.url) and fetch_dump(found, tmp_path)
        assert elsewhere.asked == []


def test_a_redirect_within_the_server_is_followed(site: Site, tmp_path: Path) -> None:
    run(site, "20261001")
    found = find_newest_dump(site.url)
    assert found is not None
    path = f"/testwiki/20261001/{found.files[0].name}"
    site.pages["/mirror.bz2"], site.moved = site.pages[path], {path: "/mirror.bz2"}
    fetch_dump(found, tmp_path)
    assert (tmp_path / found.files[0].name).read_bytes() == site.pages[path]


def test_no_more_is_read_than_was_declared(site: Site, tmp_path: Path) -> None:
    run(site, "20261001", size=5)
    site.endless = True
    found = find_newest_dump(site.url)
    assert found is not None
    with pytest.raises(InputError, match="longer than the 5 bytes in the dump's status"):
        fetch_dump(found, tmp_path)
    assert not list(tmp_path.iterdir())
    assert site.sent < 50 * MEGABYTE  # what lay in the system's buffers


def test_a_server_that_sends_a_byte_now_and_then_is_left(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(site, "20261001")
    found = find_newest_dump(site.url)
    assert found is not None
    monkeypatch.setattr("rag_model.corpus.dump_catalog.PATIENCE", 0.3)
    site.dripping = True
    with pytest.raises(InputError, match=r"broke off \((the server sends less than 64 KiB in|timed out)"):
        find_newest_dump(site.url)
    with pytest.raises(InputError, match=r"broke off at byte \d+ of \d+ \((the server sends less than|timed out)"):
        fetch_dump(found, tmp_path)


def test_a_dump_that_does_not_fit_is_not_fetched(site: Site, tmp_path: Path) -> None:
    run(site, "20261001")
    found = find_newest_dump(site.url)
    assert found is not None
    asked = len(site.asked)
    large = replace(found, files=tuple(replace(file, size=1 << 60) for file in found.files))
    with pytest.raises(ResourceError, match=r"2,305,843,009,213,693,952 bytes have to be fetched"):
        fetch_dump(large, tmp_path)
    assert len(site.asked) == asked
    name = found.files[0].name
    (tmp_path / name).write_bytes(b"")  # one that is there already
    with pytest.raises(ResourceError, match=r"1,152,921,504,606,846,976 bytes"):
        fetch_dump(large, tmp_path)


def done(files: Any) -> bytes:
    return json.dumps({"jobs": {ARTICLES_JOB: {"status": "done", "files": files}}}).encode()


@pytest.mark.parametrize(
    "garbage",
    [
        b"<html>down for maintenance</html>",
        b"[]",
        b'{"jobs": []}',
        json.dumps({"jobs": {ARTICLES_JOB: {"status": "done"}}}).encode(),
        done({}),
        done({"x.bz2": {"size": "many", "url": "/x", "sha1": "0"}}),
        done({"x.bz2": {"size": 1, "url": "/x"}}),
        done({"x.bz2": {"size": -1, "url": "/x", "sha1": "0" * 40}}),
        done({"x.bz2": {"size": 1, "url": "/x", "sha1": "../0"}}),
        done({"../x.bz2": {"size": 1, "url": "/x", "sha1": "0"}}),
        done({"x.bz2": {"size": 1, "url": "file:///etc/passwd", "sha1": "0"}}),
        done({"x.bz2": {"size": 1, "url": "http://elsewhere/x", "sha1": "0"}}),
    ],
)
def test_a_status_that_is_garbage(site: Site, garbage: bytes) -> None:
    run(site, "20261001")
    site.pages["/testwiki/20261001/dumpstatus.json"] = garbage
    with pytest.raises(InputError, match=r"dumpstatus\.json"):
        find_newest_dump(site.url)


def test_a_listing_that_is_none(site: Site) -> None:
    site.pages["/testwiki/"] = b"nothing here"
    with pytest.raises(InputError, match="lists no dumps by date"):
        find_newest_dump(site.url)
    with pytest.raises(InputError, match="cannot be read"):
        find_newest_dump(site.url + "nowhere/")
    with pytest.raises(InputError, match="not a web address"):
        find_newest_dump("file:///etc")
