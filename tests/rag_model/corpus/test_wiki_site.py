"""Following a MediaWiki site gives the passages of a full build after every kind of change."""

import gzip
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from rag_model.corpus import wiki_mirror
from rag_model.corpus.chunk import ChunkRecipe, chunk_part
from rag_model.corpus.dump_formats import wiki_site
from rag_model.corpus.passages import PassageFile
from rag_model.corpus.records import Plan, SiteSettings
from rag_model.corpus.wiki_api import WikiClient
from rag_model.corpus.wiki_mirror import SeenChange
from rag_model.errors import InputError, UnreachableError, UsageError
from rag_model.snapshots.mirrors import open_mirror
from rag_model.snapshots.planning import plan_dry_run, plan_parts
from rag_model.snapshots.recipe import Recipe
from rag_model.store.store import Store
from tests.fixtures.wiki_server import Fault, Wiki, build_export, run_wiki

pytestmark = pytest.mark.xdist_group("wiki")

SETTINGS = Recipe(part_bytes=1000)


@pytest.fixture(scope="module")
def wiki(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wiki]:
    with run_wiki(tmp_path_factory.mktemp("wiki") / "one") as running_server:
        text = "Page number {i} has '''words''' about the subject {i}. {{{{echo|said {i}}}}}"
        running_server.import_xml(build_export({f"Page {i}": text.format(i=i) for i in range(60)}))
        running_server.edit("Template:Echo", "And so it was {{{1}}}.")
        yield running_server


def read_passages(plan: Plan, folder: Path) -> list[tuple[Any, ...]]:
    """Return the passages of a plan."""
    rows = []
    for part in plan.parts:
        chunk_part(part, plan.siteinfo, ChunkRecipe(), folder / "out.parquet")
        with PassageFile(folder / "out.parquet") as file:
            rows += [(p.id, p.rev_id, p.title, p.text, p.revised) for p in file.iter_passages()]
    return rows


def edit_pages(wiki: Wiki) -> None:
    wiki.edit("Page 3", "Page three is new & <b>bold</b>, with a | bar.")
    wiki.edit("New page", "A page that was not there.")
    wiki.edit("Page 9", "#REDIRECT [[Page 10]]")
    wiki.edit("Page 8", "Edited last, and soon gone.")
    wiki.delete("Page 8")


def move_pages(wiki: Wiki) -> None:
    wiki.move("Page 4", "Moved page")
    wiki.move("Moved page", "Page 4")  # replaces the redirect
    wiki.move("Page 5", "Another page", redirect=False)
    wiki.move("Page 11", "User:Admin/Page 11")
    wiki.move("Page 12", "Page 12, moved")


def delete_and_restore_pages(wiki: Wiki) -> None:
    wiki.delete("Page 6")
    wiki.delete("Page 7")
    wiki.restore("Page 7")


def restore_and_import_pages(wiki: Wiki) -> None:
    wiki.restore("Page 6")
    wiki.import_xml(build_export({"Imported": "This came from elsewhere.", "Page 13": "Imported into an old page."}))
    wiki.move("User:Admin/Page 11", "Page 11 again")


def test_incremental_plan_equals_a_full_one_after_every_change(wiki: Wiki, tmp_path: Path) -> None:
    followed_store = Store.open(str(tmp_path / "followed"), create=True)
    plan = plan_parts(followed_store, wiki.dump, SETTINGS)
    assert (plan.siteinfo.dbname, plan.siteinfo.language, plan.licence) == ("wiki", "en", "CC BY-SA 3.0")
    for change in (edit_pages, move_pages, delete_and_restore_pages, restore_and_import_pages, lambda wiki: None):
        change(wiki)
        wiki.queries.clear()
        plan = plan_parts(followed_store, wiki.dump, SETTINGS)
        assert len(wiki.queries) <= 3, wiki.queries
        assert not any("gapnamespace" in query for query in wiki.queries), "the pages were listed again"
        full = plan_parts(Store.open(str(tmp_path / str(change)), create=True), wiki.dump, SETTINGS)
        assert read_passages(plan, tmp_path) == read_passages(full, tmp_path)
    assert len(wiki.queries) > 1
    wiki.queries.clear()
    assert plan_parts(followed_store, wiki.dump, SETTINGS) == plan
    assert len(wiki.queries) == 1, "one request shows that nothing changed"


def test_build_skips_hidden_log_entry(wiki: Wiki, tmp_path: Path) -> None:
    followed_store = Store.open(str(tmp_path / "followed"), create=True)
    plan_parts(followed_store, wiki.dump, SETTINGS)
    wiki.move("Page 50", "Moved and hidden")
    wiki.hide_last_log_entry()
    wiki.edit("Page 51", "Edited after the hidden move.")
    for name in ("followed", "new"):
        plan = plan_parts(Store.open(str(tmp_path / name), create=True), wiki.dump, SETTINGS)
        texts = {title: text for _, _, title, text, _ in read_passages(plan, tmp_path)}
        assert texts["Page 51"] == "Edited after the hidden move."
    assert "Moved and hidden" in texts


def test_restored_site_is_listed_again(wiki: Wiki, tmp_path: Path) -> None:
    followed_store = Store.open(str(tmp_path / "followed"), create=True)
    wiki.edit("Page 20", "Before the backup.")
    plan_parts(followed_store, wiki.dump, SETTINGS)
    backup = wiki.save_backup()
    wiki.edit("Page 20", "Lost with the backup.")
    wiki.edit("Page 21", "Lost as well.")
    wiki.delete("Page 22")
    plan_parts(followed_store, wiki.dump, SETTINGS)
    wiki.restore_backup(backup)
    wiki.edit("Page 23", "Has the number of a revision that was lost.")
    wiki.queries.clear()
    plan = plan_parts(followed_store, wiki.dump, SETTINGS)
    assert any("gapnamespace" in query for query in wiki.queries)
    texts = {title: text for _, _, title, text, _ in read_passages(plan, tmp_path)}
    assert texts["Page 20"] == "Before the backup."
    assert "Page 22" in texts
    full = plan_parts(Store.open(str(tmp_path / "full"), create=True), wiki.dump, SETTINGS)
    assert read_passages(plan, tmp_path) == read_passages(full, tmp_path)


def test_unlogged_changes_are_found_by_a_listing(wiki: Wiki, tmp_path: Path) -> None:
    followed_store = Store.open(str(tmp_path / "followed"), create=True)
    plan_parts(followed_store, wiki.dump, SETTINGS)
    wiki.run_script("importDump.php", text=build_export({"From a script": "No log has this."}))
    assert "From a script" not in read_titles(plan_parts(followed_store, wiki.dump, SETTINGS), tmp_path)
    mirror = open_mirror(followed_store, wiki.dump, SETTINGS.site)
    state = mirror.load()
    assert state.cursor is not None
    mirror.save(replace(state, cursor=replace(state.cursor, listed_at=state.cursor.listed_at - 25 * 3600)))
    wiki.set_item("Page 40", "Q40")
    wiki.queries.clear()
    plan = plan_parts(followed_store, wiki.dump, SETTINGS)
    assert "From a script" in read_titles(plan, tmp_path)
    items = {page.title: page.metadata.wikidata for part in plan.parts for page in wiki_site.FORMAT.read(part)}
    assert {title: item for title, item in items.items() if item} == {"Page 40": "Q40"}
    fetched = [page for query in wiki.queries for page in query.get("pageids", "").split("|") if page]
    assert len(fetched) == 1, "a page with a new item only is not fetched"
    # If the list of changes starts after the known changes, it is incomplete.
    forgotten = (SeenChange(1, 1, 1, "Forgotten", "2001-01-01T00:00:00Z"),)
    mirror.save(replace(mirror.load(), cursor=replace(state.cursor, changes=forgotten)))
    wiki.queries.clear()
    plan_parts(followed_store, wiki.dump, SETTINGS)
    assert any("gapnamespace" in query for query in wiki.queries)


def read_titles(plan: Plan, folder: Path) -> set[str]:
    return {title for _, _, title, _, _ in read_passages(plan, folder)}


def test_rendered_html_has_the_words_of_templates(wiki: Wiki, tmp_path: Path) -> None:
    followed_store, settings = Store.open(str(tmp_path / "html"), create=True), SiteSettings("html", (4,))
    text = "Rendered {{echo|here}}<ref>Gone.</ref>\n\n== Sub & head ==\n* one\n* two\n{|\n|a table\n|}"
    text += "[[Category:Small_pages]]"
    wiki.edit("Project:One", text)
    wiki.edit("Project:Two", "No template.")
    plan = plan_parts(followed_store, wiki.dump, replace(SETTINGS, site=settings))
    expected = {"Test Wiki:One": "Rendered And so it was here. one two", "Test Wiki:Two": "No template."}
    assert {title: text for _, _, title, text, _ in read_passages(plan, tmp_path)} == expected
    pages = [page for part in plan.parts for page in wiki_site.FORMAT.read(part)]
    assert {page.title: page.metadata.categories for page in pages} == {
        "Test Wiki:One": ("Small pages",),
        "Test Wiki:Two": (),
    }
    wiki.edit("Template:Echo", "It became {{{1}}}.")
    wiki.queries.clear()
    time.sleep(1)  # MediaWiki renders a page again if its purge is later than its rendering, in whole seconds
    plan = plan_parts(followed_store, wiki.dump, replace(SETTINGS, site=settings))
    expected["Test Wiki:One"] = "Rendered It became here. one two"
    assert {title: text for _, _, title, text, _ in read_passages(plan, tmp_path)} == expected
    assert sum(query["action"] == "parse" for query in wiki.queries) == 1
    wiki.queries.clear()
    second_plan = plan_parts(followed_store, wiki.dump, replace(SETTINGS, site=settings))
    assert second_plan.compute_digest() == plan.compute_digest()
    assert len(wiki.queries) == 1


def test_interrupted_first_build_is_resumed(wiki: Wiki, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiki_mirror, "FLUSH_PAGES", 20)
    monkeypatch.setattr(wiki_site, "IDS_PER_REQUEST", 10)
    followed_store = Store.open(str(tmp_path / "followed"), create=True)

    def cut_off(proxy: Any, query: dict[str, str]) -> bool:
        if "pageids" not in query or sum("pageids" in query for query in wiki.queries) <= 4:
            return False
        proxy.reply(403, b"no more")
        return True

    wiki.queries.clear()
    wiki.fault = cut_off
    with pytest.raises(InputError, match="answers HTTP 403: check the address, and that you may read the wiki"):
        plan_parts(followed_store, wiki.dump, SETTINGS)
    wiki.fault = None
    wiki.queries.clear()
    plan = plan_parts(followed_store, wiki.dump, SETTINGS)
    fetched = [query["pageids"].split("|") for query in wiki.queries if "pageids" in query]
    full = plan_parts(Store.open(str(tmp_path / "full"), create=True), wiki.dump, SETTINGS)
    passages = read_passages(full, tmp_path)
    assert read_passages(plan, tmp_path) == passages
    n_pages = sum(block.pages for block in open_mirror(followed_store, wiki.dump, SETTINGS.site).load().blocks)
    assert 0 < sum(map(len, fetched)) <= n_pages - 20


def build_reply(value: Any) -> Fault:
    return lambda proxy, _: proxy.send_json(value) or True


SITEINFO = {"general": {"wikiid": "x", "lang": "en", "base": "b", "case": "first-letter"}, "namespaces": {}}
INVALID_REPLIES: dict[str, tuple[Fault, str]] = {
    "HTML": (lambda proxy, _: proxy.reply(200, b"<html>", "text/html") or True, "answers text/html instead of JSON"),
    "list": (build_reply([]), r"answers \[\] where MediaWiki's API has an object"),
    "nothing": (build_reply({"query": {}}), "answers None where MediaWiki's API has an object"),
    "namespace": (build_reply({"curtimestamp": "2026-01-01T00:00:00Z", "query": SITEINFO}), "has no namespace 0"),
    "endless": (
        lambda proxy, query: "gapnamespace" in query and (proxy.send_json({"query": {}, "continue": {"a": 1}}) or True),
        "keeps returning the same results",
    ),
    "refusal": (build_reply({"error": {"code": "readapidenied", "info": "private"}}), "set BOOKWHEEL_WIKI_USER and"),
    "elsewhere": (
        lambda proxy, _: proxy.reply(302, b"", location="https://evil.example/api.php") or True,
        "redirects to another server, https://evil.example: use that address if you trust it",
    ),
    "loop": (lambda proxy, _: proxy.reply(302, b"", location="/w/api.php") or True, "redirects more than 5 times"),
    "bomb": (
        lambda proxy, _: proxy.reply(200, gzip.compress(bytes(80 << 20)), content_encoding="gzip") or True,
        "sends a reply of more than 64 MiB",
    ),
    "other page": (
        lambda proxy, query: (
            "pageids" in query
            and (
                proxy.send_json({"query": {"pages": [{"pageid": 10**6, "ns": 0, "title": "x", "revisions": [{}]}]}})
                or True
            )
        ),
        "answers with page 1000000, which was not requested",
    ),
    "number": (
        lambda proxy, query: (
            "gapnamespace" in query and (proxy.send_json({"query": {"pages": [{"pageid": "7", "title": "x"}]}}) or True)
        ),
        "sends pageid '7' instead of a number",
    ),
}


@pytest.mark.parametrize(("fault", "message"), INVALID_REPLIES.values(), ids=INVALID_REPLIES)
def test_invalid_reply_is_refused(wiki: Wiki, fault: Fault, message: str, tmp_path: Path) -> None:
    wiki.fault = fault
    store = Store.open(str(tmp_path / "store"), create=True)
    try:
        with pytest.raises(InputError, match=message) as error:
            plan_parts(store, f"{wiki.dump}api.php", SETTINGS)
    finally:
        wiki.fault = None
    assert not isinstance(error.value, UnreachableError)


BUSY_REPLIES: dict[str, tuple[Fault, float]] = {
    "429": (lambda proxy, _: proxy.reply(429, b"slow down", retry_after="7") or True, 7.0),
    "503": (lambda proxy, _: proxy.reply(503, b"", retry_after="Wed, 21 Oct 2015 07:28:00 GMT") or True, 0.0),
    "500": (lambda proxy, _: proxy.reply(500, b"") or True, 1.0),
    "maxlag": (lambda proxy, _: proxy.send_json({"error": {"code": "maxlag"}}, retry_after="5") or True, 5.0),
    "broken off": (lambda proxy, _: proxy.hang_up() or True, 1.0),
}


@pytest.mark.parametrize(("fault", "pause"), BUSY_REPLIES.values(), ids=BUSY_REPLIES)
def test_busy_site_is_asked_again_after_its_pause(wiki: Wiki, fault: Fault, pause: float) -> None:
    pauses: list[float] = []

    def recover(seconds: float) -> None:
        pauses.append(seconds)
        wiki.fault = None if len(pauses) == 2 else fault

    wiki.fault = fault
    with WikiClient(f"{wiki.dump}api.php", sleep=recover) as client:
        assert "query" in client.query(meta="siteinfo")
    assert pauses[0] == pause
    assert client.requests == 3
    wiki.fault = lambda proxy, _: proxy.reply(503, b"", retry_after="7200") or True
    with (
        WikiClient(f"{wiki.dump}api.php", sleep=pauses.append) as client,
        pytest.raises(UnreachableError, match=r"\(HTTP 503, and asks to wait 7200 s\): run the command again later"),
    ):
        client.query(meta="siteinfo")
    wiki.fault = None


@pytest.mark.parametrize("case", ["nothing listens", "unknown host", "no TLS"])
def test_unreachable_site_fails_without_retry(wiki: Wiki, case: str) -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        port = server.server_port
    pauses: list[float] = []
    url, reason = {
        "nothing listens": (f"mediawiki+https://localhost:{port}/", "Connection refused"),
        "unknown host": ("mediawiki+https://wiki.invalid/", "Name or service|name resolution|No address"),
        "no TLS": (f"mediawiki+https://{wiki.url.removeprefix('http://')}/", "SSL"),
    }[case]
    with (
        WikiClient(url, sleep=pauses.append) as client,
        pytest.raises(UnreachableError, match=rf"cannot be reached \(.*({reason}).*\): check the address") as error,
    ):
        client.query(meta="siteinfo")
    assert (pauses, client.requests, error.value.exit_code) == ([], 1, 1)


def test_site_that_stops_answering_is_asked_again() -> None:
    class AnswerOnce(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(b'HTTP/1.0 200 OK\r\n\r\n{"query": {}}')

    pauses: list[float] = []
    with HTTPServer(("127.0.0.1", 0), AnswerOnce) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        client = WikiClient(f"mediawiki+http://127.0.0.1:{server.server_port}/", sleep=pauses.append)
        assert client.query() == {"query": {}}
        thread.join()
    with client, pytest.raises(UnreachableError, match=r"did not answer 8 requests .*: run the command again later"):
        client.query()
    assert len(pauses) == 7


def test_error_gives_advice_once(wiki: Wiki) -> None:
    wiki.fault = INVALID_REPLIES["HTML"][0]
    try:
        with WikiClient(wiki.dump) as client, pytest.raises(InputError, match="answers text/html instead of") as error:
            client.query()
    finally:
        wiki.fault = None
    assert str(error.value).count("give the address of") == 1
    assert str(error.value).endswith(f"such as {wiki.dump}wiki/api.php")


def test_private_wiki_is_read_with_a_bot_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_wiki(tmp_path / "private", "$wgGroupPermissions['*']['read'] = false;") as private_wiki:
        store = Store.open(str(tmp_path / "store"), create=True)
        with pytest.raises(InputError, match=r"refuses the request \(readapidenied: .*set BOOKWHEEL_WIKI_USER"):
            plan_parts(store, private_wiki.dump, SETTINGS)
        output = private_wiki.run_script("createBotPassword.php", "--appid", "reader", "--grants", "basic", "Admin")
        password = re.search(r"\b([a-z0-9]{32})\b", output)
        assert password, output
        monkeypatch.setenv("BOOKWHEEL_WIKI_USER", "Admin@reader")
        monkeypatch.setenv("BOOKWHEEL_WIKI_PASSWORD", "0" * 32)
        with pytest.raises(UsageError, match="set BOOKWHEEL_WIKI_HOST, such as to 127"):
            plan_parts(store, private_wiki.dump, SETTINGS)
        monkeypatch.setenv("BOOKWHEEL_WIKI_HOST", "wiki.example.org")
        private_wiki.queries.clear()
        with pytest.raises(InputError, match="readapidenied"):
            plan_parts(store, private_wiki.dump, SETTINGS)
        assert not any("lgpassword" in query for query in private_wiki.queries), "the account is for another host"
        monkeypatch.setenv("BOOKWHEEL_WIKI_HOST", private_wiki.url.removeprefix("http://"))
        with pytest.raises(InputError, match="does not accept the account in BOOKWHEEL_WIKI_USER"):
            plan_parts(store, private_wiki.dump, SETTINGS)
        monkeypatch.setenv("BOOKWHEEL_WIKI_PASSWORD", password[1])
        monkeypatch.setenv("BOOKWHEEL_WIKI_CONTACT", "me@example.org")
        assert read_titles(plan_parts(store, private_wiki.dump, SETTINGS), tmp_path) == {"Main Page"}


def test_invalid_addresses_and_accounts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for url, message in {
        "mediawiki+https:///": "is not a wiki's address",
        "mediawiki+https://wiki.example.org/?a=b": "has a query parameter",
        "mediawiki+http://wiki.example.org/": "would be read without encryption",
        "mediawiki+https://me:pw@wiki.example.org/": "names a user or a password",
    }.items():
        with pytest.raises(UsageError, match=message):
            WikiClient(url)
    monkeypatch.setenv("BOOKWHEEL_WIKI_USER", "me")
    with pytest.raises(UsageError, match="only one of BOOKWHEEL_WIKI_USER and BOOKWHEEL_WIKI_PASSWORD is set"):
        WikiClient("mediawiki+https://wiki.example.org/")


def test_dry_run_and_limit_fetch_little(wiki: Wiki, tmp_path: Path) -> None:
    wiki.queries.clear()
    plan, n_bytes = plan_dry_run(wiki.dump, SETTINGS)
    assert n_bytes > 3000
    assert len(plan.parts) == 1
    assert not any("pageids" in query for query in wiki.queries)
    limited = plan_parts(Store.open(str(tmp_path / "store"), create=True), wiki.dump, SETTINGS, limit=7)
    assert len(read_titles(limited, tmp_path)) == 7
