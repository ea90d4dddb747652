"""A sitemap is a dump: changed pages are fetched and stored as files, and hostile sites are refused."""

import gzip
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from rag_model.corpus import web_site
from rag_model.corpus.dump_formats.document_files import find_dump_files
from rag_model.corpus.web_site import SiteFiles, mirror_site
from rag_model.errors import InputError, ResourceError, UnreachableError, UsageError
from tests.rag_model.corpus.test_document_files import list_ids, plan_folder

Reply = tuple[int, dict[str, str], bytes]


class SitemapServer:
    """A server with replies that a test sets, which records its requests."""

    def __init__(self) -> None:
        self.replies: dict[str, list[Reply]] = {}
        self.requests: list[tuple[str, dict[str, str]]] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
                replies = site.replies.get(self.path, [(404, {}, b"")])
                status, headers, body = replies.pop(0) if len(replies) > 1 else replies[0]
                if headers.get("ETag") and self.headers.get("If-None-Match") == headers["ETag"]:
                    status, body = 304, b""
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    if value:
                        self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.origin = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.address = f"sitemap+{self.origin}/sitemap.xml"

    def set_page(self, path: str, text: str, content_type: str = "text/html; charset=utf-8", **headers: str) -> None:
        self.replies[path] = [(200, {"Content-Type": content_type, **headers}, f"<h1>{text}</h1><p>Words.".encode())]

    def set_sitemap(self, *pages: str, path: str = "/sitemap.xml", root: str = "urlset", entry: str = "url") -> None:
        """List pages in a sitemap; in `/page!2026-11-01`, the date is that of the last change."""
        rows = ""
        for page, _, date in (page.partition("!") for page in pages):
            last_change = f"<lastmod>{date}</lastmod>" if date else ""
            rows += f"<{entry}><loc> {self.origin}{page} </loc>{last_change}</{entry}>"
        text = f'<{root} xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">{rows}</{root}>'
        self.replies[path] = [(200, {}, text.encode())]

    def mirror(self) -> SiteFiles:
        """Mirror the site again, and clear the recorded requests."""
        web_site._recent_files.clear()
        self.requests.clear()
        return mirror_site(self.address, sleep=lambda _: None)

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SitemapServer]:
    monkeypatch.setenv("BOOKWHEEL_SITES", str(tmp_path / "sites"))
    site = SitemapServer()
    Thread(target=site.server.serve_forever, daemon=True).start()
    yield site
    site.server.shutdown()
    site.server.server_close()


def test_pages_of_a_sitemap_are_documents(site: SitemapServer, tmp_path: Path) -> None:
    site.set_sitemap("/main.xml", "/more.xml.gz", root="sitemapindex", entry="sitemap")
    site.set_sitemap("/", "/guide/install", "/a%20b.html?c=1", "/gone", "/logo.png", path="/main.xml")
    site.set_sitemap("/moved", "/../etc/x", path="/more.xml.gz")
    site.replies["/more.xml.gz"] = [(200, {}, gzip.compress(site.replies["/more.xml.gz"][0][2]))]
    site.replies["/moved"] = [(302, {"Location": "/guide/install"}, b"")]
    for path in ("/", "/guide/install", "/a%20b.html?c=1"):
        site.set_page(path, f"Page {path}")
    site.set_page("/logo.png", "", content_type="image/png")
    files = find_dump_files(site.address)
    assert files.dropped == {"bad_name": 1, "missing": 1, "unknown_format": 1}
    plan = plan_folder(site.address, tmp_path / "work")
    assert list_ids(plan) == ["a%20b.html%253Fc=1.html", "guide/install.html", "index.html", "moved.html"]
    assert site.paths.count("/sitemap.xml") == 1, "a process does not read a site twice within minutes"
    assert {headers["user-agent"] for _, headers in site.requests} == {"bookwheel"}


def test_page_is_decoded_from_the_encoding_in_its_reply(site: SitemapServer, tmp_path: Path) -> None:
    site.set_sitemap("/latin.html", "/wrong.html", "/meta.html")
    body = "<h1>Zürich</h1><p>“Words.”".encode("cp1252")
    site.replies["/latin.html"] = [(200, {"Content-Type": "text/html; charset=iso-8859-1"}, body)]
    site.replies["/wrong.html"] = [(200, {"Content-Type": "text/html; charset=utf-8"}, body)]
    meta_body = b"<meta charset=windows-1252>" + body
    site.replies["/meta.html"] = [(200, {"Content-Type": "text/html; charset=utf-8"}, meta_body)]
    plan = plan_folder(site.address, tmp_path / "work")
    assert list_ids(plan) == ["latin.html", "meta.html"]
    assert plan.dropped == {"not_utf8": 1}
    assert (site.mirror().folder / "latin.html").read_text() == "<h1>Zürich</h1><p>“Words.”"


def test_second_run_requests_only_pages_that_may_have_changed(site: SitemapServer) -> None:
    site.set_sitemap("/dated!2026-11-01", "/tagged", "/plain", "/removed")
    for path in ("/dated", "/plain", "/removed"):
        site.set_page(path, "Old")
    site.set_page("/tagged", "Old", ETag='"1"')
    folder = site.mirror().folder
    old_time = (folder / "plain.html").stat().st_mtime_ns
    site.set_sitemap("/dated!2026-11-01", "/tagged", "/plain")
    site.set_page("/dated", "New")
    site.mirror()
    assert site.paths == ["/robots.txt", "/sitemap.xml", "/tagged", "/plain"]
    assert site.requests[2][1]["if-none-match"] == '"1"'
    assert sorted(file.name for file in folder.iterdir()) == ["dated.html", "plain.html", "tagged.html"]
    assert (folder / "plain.html").stat().st_mtime_ns == old_time, "an equal page is not written again"
    site.set_sitemap("/dated!2026-11-02", "/tagged")
    site.set_page("/tagged", "New", ETag='"2"')
    site.mirror()
    assert {file.name: "New" in file.read_text() for file in folder.iterdir()} == {
        "dated.html": True,
        "tagged.html": True,
    }


def test_interrupted_run_is_resumed(site: SitemapServer) -> None:
    site.set_sitemap("/a!2026-11-01", "/b!2026-11-01")
    site.set_page("/a", "A")
    site.replies["/b"] = [(503, {"Retry-After": "7200"}, b"")]
    with pytest.raises(UnreachableError, match=r"asks to wait 7200 s.*run the command again later to continue"):
        site.mirror()
    site.set_page("/b", "B")
    site.mirror()
    assert site.paths == ["/robots.txt", "/sitemap.xml", "/b"]


def test_request_is_retried_after_the_requested_pause(site: SitemapServer) -> None:
    site.set_sitemap("/a", "/secret/b")
    site.replies["/robots.txt"] = [(200, {}, b"User-agent: *\nDisallow: /secret/\nCrawl-delay: 3\n")]
    site.set_page("/a", "A")
    site.replies["/a"].insert(0, (429, {"Retry-After": "5"}, b""))
    web_site._recent_files.clear()
    pauses = list[float]()
    assert mirror_site(site.address, sleep=pauses.append).dropped == {"robots": 1}
    assert pauses == [3, 3, 5, 3]


HOSTILE_SITEMAPS = {
    "another root": (b"<html></html>", "is not a sitemap"),
    "no XML": (b"\x00\xff", "is not a sitemap"),
    "damaged gzip": (b"\x1f\x8bwords", "is damaged"),
    "entities": (
        b"<!DOCTYPE urlset [<!ENTITY a SYSTEM 'file:///etc/passwd'>]><urlset><url><loc>&a;</loc></url></urlset>",
        "lists no page",
    ),
    "another host": (b"<urlset><url><loc>http://127.0.0.2/a</loc></url></urlset>", "'other_host': 1"),
    "bomb": (gzip.compress(bytes(60 << 20), 1), "is not a sitemap"),
}


def test_hostile_sitemap_is_refused(site: SitemapServer) -> None:
    for body, message in HOSTILE_SITEMAPS.values():
        site.replies["/sitemap.xml"] = [(200, {}, body)]
        with pytest.raises(InputError, match=message):
            site.mirror()
        assert site.paths == ["/robots.txt", "/sitemap.xml"]
    site.replies["/robots.txt"] = [(200, {}, b"User-agent: *\nDisallow: /\n")]
    with pytest.raises(InputError, match=r"robots.txt of .* forbids"):
        site.mirror()
    for address in ("sitemap+http://example.org/a.xml", "sitemap+https://", "sitemap+https://me:x@example.org/a.xml"):
        with pytest.raises(UsageError):
            mirror_site(address)


def test_unreadable_page_does_not_stop_a_run(site: SitemapServer) -> None:
    redirects = {
        "/loop": "/loop",
        "/elsewhere": "http://localhost:1/x",
        "/port": f"{site.origin.rpartition(':')[0]}:99999999/x",
        "/bracket": "http://[::1/x",
        "/private": "/secret/a",
    }
    site.replies = {path: [(302, {"Location": target}, b"")] for path, target in redirects.items()}
    site.replies["/robots.txt"] = [
        (200, {}, "User-agent: *\nCrawl-delay: ²\nDisallow: //[\nDisallow: /secret/".encode())
    ]
    site.replies["/compressed"] = [(200, {"Content-Type": "text/html", "Content-Encoding": "gzip"}, b"words")]
    site.replies["/unchanged"] = [(304, {}, b"")]
    site.set_sitemap(*redirects, "/compressed", "/unchanged", "/a.html", "/a", "/a.html/b", "/a/" * 1000, "")
    body = site.replies["/sitemap.xml"][0][2].replace(b"</urlset>", b"<url><loc>http://[::1/</loc></url></urlset>")
    site.replies["/sitemap.xml"] = [(200, {}, body.replace(b"<loc> http", b"<loc> <!-- home -->HTTP"))]
    for path in ("/", "/a.html", "/a.html/b", "/secret/a"):
        site.set_page(path, path)
    files = site.mirror()
    dropped = {"bad_name": 2, "missing": 1, "other_host": 2, "robots": 1, "same_name": 1, "unreadable": 3}
    assert files.dropped == dropped
    names = sorted(file.relative_to(files.folder).as_posix() for file in files.folder.rglob("*.html"))
    assert names == ["a%2Ehtml/b.html", "a.html", "index.html"]


def test_pages_with_http_500_are_dropped_or_kept_unless_they_are_many(site: SitemapServer) -> None:
    site.set_sitemap("/a", "/b", "/c")
    site.set_page("/b", "B")
    site.replies["/a"] = [(500, {}, b"")]
    site.set_page("/c", "C")
    site.replies["/c"].insert(0, (500, {}, b""))
    files = site.mirror()
    assert (files.dropped, site.paths.count("/a"), site.paths.count("/c")) == ({"server_error": 1}, 4, 2)
    site.replies["/b"] = [(500, {}, b"")]
    files = site.mirror()
    assert files.dropped == {"server_error": 1}
    assert {file.name for file in files.folder.iterdir()} == {"b.html", "c.html"}, "the last version remains"
    failing_paths = [f"/x{number}" for number in range(30)]
    site.replies |= {path: [(500, {}, b"")] for path in failing_paths}
    site.set_sitemap("/c", *failing_paths)
    with pytest.raises(UnreachableError, match=r"30 of the first 31 pages of .* answer HTTP 500: run"):
        site.mirror()
    failing_paths += [f"/x{number}" for number in range(30, 60)]
    site.replies |= {path: [(500, {}, b"")] for path in failing_paths}
    site.set_sitemap(*failing_paths, "/c")
    with pytest.raises(UnreachableError, match=r"51 of the first 51 pages of .* answer HTTP 500: run"):
        site.mirror()
    assert "/x51" not in site.paths
    site.set_sitemap("/b", "/c")
    site.replies["/b"] = [(500, {"Retry-After": "1000"}, b"")]
    with pytest.raises(UnreachableError, match=r"/b did not answer 1 requests in a row .*asks to wait 1000 s"):
        site.mirror()
    site.replies["/sitemap.xml"] = [(500, {}, b"")]
    with pytest.raises(UnreachableError, match=r"sitemap.xml did not answer 4 requests in a row \(HTTP 500\)"):
        site.mirror()


def test_files_of_a_killed_run_are_deleted(site: SitemapServer) -> None:
    site.set_sitemap("/a")
    site.set_page("/a", "A")
    folder = site.mirror().folder
    for name in ("b.html", ".landing-0123456789abcdef"):  # files of a run that was killed before it saved versions
        (folder / name).write_text("B")
    site.mirror()
    assert [file.name for file in folder.iterdir()] == ["a.html"]
    site.set_sitemap()
    with pytest.raises(InputError, match="lists no page"):
        site.mirror()
    assert [file.name for file in folder.iterdir()] == ["a.html"], "an empty sitemap does not remove the pages"


def test_folder_that_cannot_be_written_is_reported(site: SitemapServer, tmp_path: Path) -> None:
    site.set_sitemap("/a")
    site.set_page("/a", "A")
    (tmp_path / "sites").write_text("a file")
    with pytest.raises(
        ResourceError, match=r"cannot write the pages of .* into .*sites.* set BOOKWHEEL_SITES to another"
    ):
        site.mirror()


def test_too_large_page_is_dropped(site: SitemapServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_site, "MAX_PAGE_BYTES", 1000)
    site.set_sitemap("/a", "/b")
    site.set_page("/a", "A")
    site.replies["/b"] = [(200, {"Content-Type": "text/html", "Content-Encoding": "gzip"}, gzip.compress(bytes(2000)))]
    assert site.mirror().dropped == {"too_large": 1}


def test_page_whose_gzip_is_cut_off_is_fetched_again(site: SitemapServer) -> None:
    text = "".join(f"<p>Paragraph {number}.</p>" for number in range(200)).encode()
    headers = {"Content-Type": "text/html", "Content-Encoding": "gzip", "Content-Length": ""}
    for path, body in (("/one", gzip.compress(text)), ("/two", gzip.compress(text[:900]) + gzip.compress(text[900:]))):
        site.replies[path] = [(200, headers, body[: -len(body) // 3]), (200, headers, body)]
    site.set_sitemap("/one", "/two")
    files = site.mirror()
    assert files.dropped == {}
    assert [(files.folder / f"{name}.html").read_bytes() for name in ("one", "two")] == [text, text]
    assert site.paths[2:] == ["/one", "/one", "/two", "/two"]
