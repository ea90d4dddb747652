"""Wikimedia's dumps are found by their list and status pages, and downloaded despite interrupted connections."""

import hashlib
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rag_model.corpus.dump_catalog import ARTICLES_JOB, PROPERTIES_JOB, PublishedDump, fetch_dump, find_newest_dump
from rag_model.errors import InputError, ResourceError, UnreachableError
from tests.fixtures.dump_server import MEGABYTE, DumpSite, serve_dumps

NAMES = ("testwiki-{}-pages-articles-multistream.xml.bz2", "testwiki-{}-pages-articles-multistream-index.txt.bz2")


def publish_dump(site: DumpSite, date: str, status: str = "done", size: int = 300_000) -> None:
    names = [pattern.format(date) for pattern in NAMES]
    site.publish_run(date, {name: hashlib.shake_128(name.encode()).digest(size) for name in names}, status)


def find_dump(site: DumpSite) -> PublishedDump:
    dump = find_newest_dump(site.url)
    assert dump is not None
    return dump


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[DumpSite]:
    monkeypatch.setattr("rag_model.corpus.dump_catalog._FIRST_PAUSE", 0.0)
    with serve_dumps() as running_site:
        yield running_site


def test_complete_dump_is_found_and_fetched(site: DumpSite, tmp_path: Path) -> None:
    publish_dump(site, "20261001")
    dump = find_dump(site)
    progress: list[tuple[int, int]] = []
    glob = fetch_dump(dump, tmp_path / "20261001", lambda done, total: progress.append((done, total)))
    assert Path(glob).name == NAMES[0].format("20261001")
    for name in (pattern.format("20261001") for pattern in NAMES):
        assert (tmp_path / "20261001" / name).read_bytes() == site.pages[f"/testwiki/20261001/{name}"]
    assert progress[-1] == (600_000, 600_000)
    assert progress == sorted(progress)


def test_requested_table_is_part_of_the_dump(site: DumpSite, tmp_path: Path) -> None:
    publish_dump(site, "20261001")
    assert find_newest_dump(site.url, tables=[PROPERTIES_JOB]) is None, "the table is not written yet"
    name = "testwiki-20261001-page_props.sql.gz"
    site.publish_run("20261001", {name: b"rows"}, job=PROPERTIES_JOB)
    dump = find_newest_dump(site.url, tables=[PROPERTIES_JOB])
    assert dump is not None
    glob = fetch_dump(dump, tmp_path)
    assert Path(glob).name == NAMES[0].format("20261001")
    assert (tmp_path / name).read_bytes() == b"rows"
    expected = sorted(pattern.format("20261001") for pattern in NAMES)
    assert [file.name for file in find_newest_dump(site.url).files] == expected  # type: ignore[union-attr]


def test_check_without_a_new_dump_costs_one_request(site: DumpSite) -> None:
    publish_dump(site, "20261001")
    assert find_newest_dump(site.url, after="20261001") is None
    assert site.requested_paths == ["/testwiki/"]


def test_incomplete_dump_is_skipped(site: DumpSite) -> None:
    publish_dump(site, "20260801")
    publish_dump(site, "20261001")
    publish_dump(site, "20261101", status="in-progress")
    dump = find_newest_dump(site.url, after="20260801")
    assert dump is not None
    assert dump.date == "20261001"
    assert find_newest_dump(site.url, after="20261001") is None
    del site.pages["/testwiki/20261101/dumpstatus.json"]  # a new run has no status page yet
    assert find_newest_dump(site.url, after="20261001") is None


@pytest.mark.parametrize("ranges", [True, False])
def test_interrupted_download_is_resumed(site: DumpSite, tmp_path: Path, ranges: bool) -> None:
    publish_dump(site, "20261001")
    site.accepts_ranges, site.cuts = ranges, [0.6, 0.3, 0.9, 1.0]
    dump = find_dump(site)
    fetch_dump(dump, tmp_path)
    name = dump.files[0].name
    assert (tmp_path / name).read_bytes() == site.pages[f"/testwiki/20261001/{name}"]


def test_failed_download_is_reported_and_can_be_resumed(site: DumpSite, tmp_path: Path) -> None:
    publish_dump(site, "20261001", size=30_000)
    dump = find_dump(site)
    site.cuts = [0.6] + [0.0] * 20
    with pytest.raises(UnreachableError, match="broke off at byte 18000 of 30000"):
        fetch_dump(dump, tmp_path)
    assert not (tmp_path / dump.files[0].name).exists()
    site.cuts = []
    fetch_dump(dump, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {file.name for file in dump.files}


def test_only_temporary_errors_are_retried(site: DumpSite, tmp_path: Path) -> None:
    publish_dump(site, "20261001")
    dump = find_dump(site)
    for status in (429, 500, 503):
        site.error_statuses = [status]
        with pytest.raises(UnreachableError, match=r"/testwiki/ cannot be read \(.*: check the network and the server"):
            find_newest_dump(site.url)
    path, site.error_statuses = tmp_path / "fetched", [503, 503]
    fetch_dump(dump, path)
    assert {file.name for file in path.iterdir()} == {file.name for file in dump.files}
    request_count, site.pages = len(site.requested_paths), {}
    with pytest.raises(InputError, match=r"cannot be read \(Not Found\): check the address") as error:
        fetch_dump(dump, tmp_path / "gone")
    assert not isinstance(error.value, UnreachableError)
    assert len(site.requested_paths) == request_count + 1


def test_refused_connection_is_a_temporary_error(site: DumpSite) -> None:
    with socket.socket() as bound_socket:
        bound_socket.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{bound_socket.getsockname()[1]}/testwiki/"
        with pytest.raises(UnreachableError, match="Connection refused"):
            find_newest_dump(address)


def test_file_with_a_wrong_checksum_is_deleted(site: DumpSite, tmp_path: Path) -> None:
    publish_dump(site, "20261001")
    dump = find_dump(site)
    name = dump.files[0].name
    body = site.pages[f"/testwiki/20261001/{name}"]
    site.pages[f"/testwiki/20261001/{name}"] = body[:-1] + bytes([body[-1] ^ 1])
    with pytest.raises(InputError, match="does not match its sha1 and was deleted"):
        fetch_dump(dump, tmp_path)
    assert not list(tmp_path.iterdir())
    site.pages[f"/testwiki/20261001/{name}"] = body
    fetch_dump(dump, tmp_path)


def test_redirect_to_another_server_is_not_followed(site: DumpSite, tmp_path: Path) -> None:
    publish_dump(site, "20261001")
    dump = find_dump(site)
    with serve_dumps() as other_site:
        other_site.pages = site.pages
        file_name = dump.files[0].name
        for path in ("/testwiki/", "/testwiki/20261001/dumpstatus.json", f"/testwiki/20261001/{file_name}"):
            site.redirects = {path: other_site.url.replace("/testwiki/", path)}
            with pytest.raises(InputError, match="redirects to another server"):
                find_newest_dump(site.url) and fetch_dump(dump, tmp_path)
        assert other_site.requested_paths == []


def test_redirect_within_the_server_is_followed(site: DumpSite, tmp_path: Path) -> None:
    publish_dump(site, "20261001")
    dump = find_dump(site)
    path = f"/testwiki/20261001/{dump.files[0].name}"
    site.pages["/mirror.bz2"], site.redirects = site.pages[path], {path: "/mirror.bz2"}
    fetch_dump(dump, tmp_path)
    assert (tmp_path / dump.files[0].name).read_bytes() == site.pages[path]


def test_download_stops_at_the_declared_size(site: DumpSite, tmp_path: Path) -> None:
    publish_dump(site, "20261001", size=5)
    site.endless = True
    dump = find_dump(site)
    with pytest.raises(InputError, match="longer than the 5 bytes in the dump's status"):
        fetch_dump(dump, tmp_path)
    assert not list(tmp_path.iterdir())
    assert site.sent_bytes < 50 * MEGABYTE  # the system's buffers may hold a part of it


def test_very_slow_server_is_given_up(site: DumpSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_dump(site, "20261001")
    dump = find_dump(site)
    monkeypatch.setattr("rag_model.corpus.dump_catalog.PATIENCE", 0.3)
    site.dripping = True
    with pytest.raises(InputError, match=r"broke off \((the server sends less than 64 KiB in|timed out)"):
        find_newest_dump(site.url)
    with pytest.raises(InputError, match=r"broke off at byte \d+ of \d+ \((the server sends less than|timed out)"):
        fetch_dump(dump, tmp_path)


def test_dump_larger_than_the_disk_is_not_fetched(site: DumpSite, tmp_path: Path) -> None:
    publish_dump(site, "20261001")
    dump = find_dump(site)
    request_count = len(site.requested_paths)
    large = replace(dump, files=tuple(replace(file, size=1 << 60) for file in dump.files))
    with pytest.raises(ResourceError, match=r"2,305,843,009,213,693,952 bytes have to be fetched"):
        fetch_dump(large, tmp_path)
    assert len(site.requested_paths) == request_count
    name = dump.files[0].name
    (tmp_path / name).write_bytes(b"")  # this file has been downloaded already
    with pytest.raises(ResourceError, match=r"1,152,921,504,606,846,976 bytes"):
        fetch_dump(large, tmp_path)


def build_status(files: Any) -> bytes:
    return json.dumps({"jobs": {ARTICLES_JOB: {"status": "done", "files": files}}}).encode()


@pytest.mark.parametrize(
    "status",
    [
        b"<html>down for maintenance</html>",
        b"[]",
        b'{"jobs": []}',
        json.dumps({"jobs": {ARTICLES_JOB: {"status": "done"}}}).encode(),
        build_status({}),
        build_status({"x.bz2": {"size": "many", "url": "/x", "sha1": "0"}}),
        build_status({"x.bz2": {"size": 1, "url": "/x"}}),
        build_status({"x.bz2": {"size": -1, "url": "/x", "sha1": "0" * 40}}),
        build_status({"x.bz2": {"size": 1, "url": "/x", "sha1": "../0"}}),
        build_status({"../x.bz2": {"size": 1, "url": "/x", "sha1": "0"}}),
        build_status({"x.bz2": {"size": 1, "url": "file:///etc/passwd", "sha1": "0"}}),
        build_status({"x.bz2": {"size": 1, "url": "http://elsewhere/x", "sha1": "0"}}),
    ],
)
def test_invalid_status_is_reported(site: DumpSite, status: bytes) -> None:
    publish_dump(site, "20261001")
    site.pages["/testwiki/20261001/dumpstatus.json"] = status
    with pytest.raises(InputError, match=r"dumpstatus\.json"):
        find_newest_dump(site.url)


def test_invalid_listing_is_reported(site: DumpSite) -> None:
    site.pages["/testwiki/"] = b"nothing here"
    with pytest.raises(InputError, match="lists no dumps by date"):
        find_newest_dump(site.url)
    with pytest.raises(InputError, match="cannot be read"):
        find_newest_dump(site.url + "nowhere/")
    for address in ("file:///etc", "https:///enwiki/"):
        with pytest.raises(InputError, match="not a web address") as error:
            find_newest_dump(address)
        assert not isinstance(error.value, UnreachableError)
