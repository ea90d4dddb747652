"""The command and the scheduled flow follow a wiki: each edit becomes a snapshot, and only changed pages are built."""

import bz2
import gzip
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.maintain import watch
from rag_model.snapshots.recipe import read_recipe
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.wiki_server import Wiki, build_export, run_wiki

pytestmark = pytest.mark.xdist_group("wiki")


@pytest.fixture(scope="module")
def wiki(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wiki]:
    with run_wiki(tmp_path_factory.mktemp("wiki") / "two") as running:
        running.import_xml(build_export({f"Page {i}": f"Page number {i} is about the subject {i}." for i in range(40)}))
        yield running


def find_blobs_with(store: Path, text: bytes) -> list[Path]:
    """Return the blobs of a store that contain a text, also compressed by gzip."""

    def read(path: Path) -> bytes:
        data = path.read_bytes()
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data

    return [path for path in (store / "blobs").rglob("*") if path.is_file() and text in read(path)]


def test_edit_becomes_a_snapshot_and_takedown_deletes_fetched_pages(
    wiki: Wiki, tmp_path: Path, tiny: Path, recipe: Path, bookwheel: Any
) -> None:
    store, settings = tmp_path / "store", read_recipe(recipe)

    def watch_once() -> Any:
        return watch.fn(wiki.dump, str(store), encoder=str(tiny), recipe=settings)

    first = watch_once()
    assert first.built.number == 1
    assert first.built.counts["articles"] == 41
    first_provenance = _read_provenance(store)
    assert (first_provenance["embedded"], first_provenance["history"]) == (41, [])
    wiki.queries.clear()
    assert watch_once().built is None, "the wiki did not change"
    assert len(wiki.queries) == 1

    wiki.edit("Page 7", "Page seven is about zebras.")
    wiki.delete("Page 8")
    options = ["--dump", wiki.dump, "--encoder", tiny, "--recipe", recipe]
    files = sorted((store / "memo").rglob("*")) + sorted((store / "blobs").rglob("*"))
    explained = bookwheel("reindex", *options, "--store", store, "--explain", "--json").json
    assert [(row["reused"], row["total"]) for row in explained["stages"] if row["stage"] == "chunk"] == [(39, 40)]
    forecast = explained["forecast"]
    assert (forecast["builds"], forecast["changed"]) == (1, 1)
    first_cpu = first_provenance["cpu"]["embed"]
    assert forecast["stages"]["embed"]["cpu"] == pytest.approx(first_cpu / 41, abs=1e-3)
    assert sorted((store / "memo").rglob("*")) + sorted((store / "blobs").rglob("*")) == files
    second = watch_once()
    assert (second.built.counts["articles"], second.built.counts["embedded"]) == (40, 1)
    (first_build,) = _read_provenance(store)["history"]
    assert (first_build["snapshot"], first_build["changed"]) == (first.built.snapshot, 41)
    assert "The last builds" in (store / "reports" / f"{second.built.snapshot}.html").read_text()
    text = bookwheel("reindex", *options, "--store", store, "--explain").out
    assert "forecast  for 0 changed passages, from the cost of 2 builds" in text
    with Snapshot.open(str(store)) as snapshot:
        texts = {passage.title: passage.text for passage in snapshot.passages(range(snapshot.n))}
        assert snapshot.manifest.content.corpus["licence"] == "CC BY-SA 3.0"
    assert texts["Page 7"] == "Page seven is about zebras."
    full = bookwheel("reindex", *options, "--store", tmp_path / "full")
    assert full.code == 0, full.err
    with Snapshot.open(str(tmp_path / "full")) as snapshot:
        assert texts == {passage.title: passage.text for passage in snapshot.passages(range(snapshot.n))}

    page_id = next(p.page_id for p in _read_passages(store) if p.title == "Page 7")
    assert find_blobs_with(store, b"about zebras")
    assert bookwheel("takedown", page_id, "--store", store, "--yes").code == 0
    assert bookwheel("gc", "--store", store, "--grace", "0", "--yes").code == 0
    assert find_blobs_with(store, b"about zebras") == []
    wiki.queries.clear()
    assert bookwheel("reindex", *options, "--store", store).code == 0
    assert find_blobs_with(store, b"about zebras") == []
    refetched = any("gapnamespace" in query or "pageids" in query for query in wiki.queries)
    assert not refetched, "takedown keeps the other pages"


def test_redirects_become_aliases_and_items_become_columns(
    wiki: Wiki, tmp_path: Path, tiny: Path, bookwheel: Any
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[chunk]\nmetadata = ["aliases", "wikidata"]\n[index.bm25]\nfactory = "BM25"\n')

    def build(store: str) -> Any:
        options = ["--dump", wiki.dump, "--encoder", tiny, "--recipe", recipe, "--json"]
        result = bookwheel("reindex", *options, "--store", tmp_path / store)
        assert result.code == 0, result.err
        return result.json

    def find_titles(question: str) -> list[str]:
        result = bookwheel("search", question, "--store", tmp_path / "store", "--retriever", "bm25", "--json")
        return [hit["title"] for hit in result.json["results"][0]["hits"]]

    build("store")
    assert find_titles("zanzibar quagga") == []
    wiki.edit("Zanzibar", "#REDIRECT [[Page 30]]")
    wiki.edit("Quagga", "#REDIRECT [[Page 31#Part]]")
    wiki.edit("Template:Unused", "#REDIRECT [[Template:Zanzibar]]")
    wiki.move("Page 32", "Gnu")
    wiki.set_item("Page 33", "Q42")
    wiki.queries.clear()
    assert build("store")["counts"]["embedded"] == 2
    assert not any("gapnamespace" in query for query in wiki.queries), "the refresh does not list all pages"
    assert (find_titles("zanzibar"), find_titles("quagga"), find_titles("page 32")[0]) == (["Page 30"], [], "Gnu")
    (page,) = (p for p in _read_passages(tmp_path / "store") if p.title == "Page 30")
    assert page.text == "Zanzibar. Page number 30 is about the subject 30."
    wiki.edit("Zanzibar", "#REDIRECT [[Page 31]]")
    assert build("store")["counts"]["embedded"] == 2
    assert find_titles("zanzibar") == ["Page 31"]
    wiki.delete("Zanzibar")
    build("store")
    assert find_titles("zanzibar") == []
    build("full")
    passages = [[(p.id, p.title, p.text) for p in _read_passages(tmp_path / name)] for name in ("store", "full")]
    assert passages[0] == passages[1]
    assert [(p.title, p.wikidata) for p in _read_passages(tmp_path / "full") if p.wikidata] == [("Page 33", "Q42")]


def copy_dump(wiki: Wiki, path: Path) -> Path:
    """Write the current pages of a wiki as a dump."""
    path.write_bytes(bz2.compress(wiki.export().encode()))
    return path


def test_wiki_is_followed_from_its_dump(wiki: Wiki, tmp_path: Path, tiny: Path, recipe: Path, bookwheel: Any) -> None:
    dump, options = copy_dump(wiki, tmp_path / "dump.xml.bz2"), ["--encoder", tiny, "--recipe", recipe, "--json"]
    assert bookwheel("reindex", "--dump", dump, *options, "--store", tmp_path / "store").code == 0
    other_dump = dump.with_name("other.xml.bz2")
    other_dump.write_bytes(bz2.compress(wiki.export().replace("<dbname>wiki<", "<dbname>another<").encode()))
    assert bookwheel("reindex", "--dump", other_dump, *options, "--store", tmp_path / "other").code == 0
    wiki.edit("Page 1", "Page one is about storks.")
    wiki.edit("A page since the dump", "This is about herons.")
    wiki.delete("Page 2")

    wiki.queries.clear()
    explained = bookwheel("reindex", "--dump", wiki.dump, *options, "--store", tmp_path / "store", "--explain").json
    assert [row["total"] - row["reused"] for row in explained["stages"] if row["stage"] == "embed"] == [2]
    wiki.queries.clear()
    refresh = bookwheel("reindex", "--dump", wiki.dump, *options, "--store", tmp_path / "store")
    fetched = [page for query in wiki.queries for page in query.get("pageids", "").split("|") if page]
    assert (len(fetched), len(wiki.queries)) == (2, 4)
    assert f"unchanged pages are taken from {dump}" in refresh.err
    assert refresh.json["counts"]["embedded"] == 2
    wiki.queries.clear()
    assert bookwheel("reindex", "--dump", wiki.dump, *options, "--store", tmp_path / "store").code == 0
    assert len(wiki.queries) == 1, "later builds read the changes"

    full_build = bookwheel("reindex", "--dump", wiki.dump, *options, "--store", tmp_path / "full")
    assert full_build.code == 0
    passages = [[(p.id, p.title, p.text) for p in _read_passages(tmp_path / name)] for name in ("store", "full")]
    assert passages[0] == passages[1]
    mismatch = bookwheel("reindex", "--dump", wiki.dump, *options, "--store", tmp_path / "other")
    assert "built from a dump of another one, another at" in mismatch.err
    dump.unlink()
    shutil.rmtree(tmp_path / "store" / "memo")
    move_back = bookwheel("rollback", "latest", "--to", "1", "--store", tmp_path / "store")
    assert move_back.code == 0, move_back.err
    after_loss = bookwheel("reindex", "--dump", wiki.dump, *options, "--store", tmp_path / "store")
    assert "the dump cannot be read, so its remaining pages are fetched" in after_loss.err
    assert after_loss.json["snapshot"] == refresh.json["snapshot"]


# Runs a command in forked children, and kills each child when it renames or links a certain file into the store.
KILLER = """
import json, os, shutil, signal, sys
from contextlib import suppress
from importlib import import_module
from flows import cli
from flows.verbs import builds
from rag_model.encoders import model
from rag_model.index.graphs import kind
import faiss, numba, pyarrow.dataset, torch
numba.njit("int64(int64)")(lambda number: number)  # Each child would otherwise take .8 s to initialize numba.
command, base, folder, n_points = json.loads(sys.argv[1])
count, last = 0, None

def watch(event, arguments):
    global count
    # The prefix excludes files that numba renames in its cache.
    if event in ("os.rename", "os.link") and str(arguments[1]).startswith(folder):
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)

def run(store, kill_at):
    global last
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    last = kill_at
    code = cli.run([*command, "--store", store])
    with open(f"{folder}/count", "w") as file:
        json.dump([count, [*sys.modules]], file)
    os._exit(code)

sys.addaudithook(watch)
assert run(shutil.copytree(base, f"{folder}/whole"), None) == 0
total, names = json.load(open(f"{folder}/count"))
for name in names:  # Children then need not import them again.
    with suppress(ImportError):
        import_module(name)
for i in range(n_points):
    point = 1 + i * (total - 1) // (n_points - 1)
    store = shutil.copytree(base, f"{folder}/killed-{i}")
    assert run(store, point) == -signal.SIGKILL, point
    assert run(store, None) == 0, point
"""


def test_killed_refresh_resumes_to_the_same_snapshot(
    wiki: Wiki, tmp_path: Path, tiny: Path, recipe: Path, bookwheel: Any
) -> None:
    options, n_points = ["--encoder", str(tiny), "--recipe", str(recipe)], 12
    assert bookwheel("reindex", "--dump", wiki.dump, *options, "--store", tmp_path / "base").code == 0
    wiki.edit("Page 15", "Page fifteen is about cranes.")
    wiki.delete("Page 16")
    wiki.move("Page 17", "Page 17, moved")
    command = ["reindex", "--dump", wiki.dump, *options]
    arguments = json.dumps([command, str(tmp_path / "base"), str(tmp_path), n_points])
    result = subprocess.run([sys.executable, "-c", KILLER, arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    names = ["whole", *(f"killed-{i}" for i in range(n_points))]
    assert len({Store.open(str(tmp_path / name)).snapshots.resolve("latest") for name in names}) == 1
    texts = {p.title: p.text for p in _read_passages(tmp_path / "whole")}
    assert texts["Page 15"] == "Page fifteen is about cranes."
    assert {"Page 16", "Page 17"}.isdisjoint(texts)


def _read_provenance(store: Path) -> Any:
    with Snapshot.open(str(store)) as snapshot:
        return snapshot.manifest.provenance


def _read_passages(store: Path) -> list[Any]:
    with Snapshot.open(str(store)) as snapshot:
        return list(snapshot.passages(range(snapshot.n)))


def test_command_follows_a_wiki_until_it_is_interrupted(
    wiki: Wiki, tmp_path: Path, tiny: Path, recipe: Path, executable: Path
) -> None:
    store, out, err = tmp_path / "store", tmp_path / "out", tmp_path / "err"
    strict_recipe = tmp_path / "recipe.toml"
    strict_recipe.write_text(f"{recipe.read_text()}\n[gate]\nmax_passage_loss = 0.01\n")  # less than one page
    options = ["--dump", wiki.dump, "--encoder", tiny, "--recipe", strict_recipe, "--store", store]
    with out.open("wb") as stdout, err.open("wb") as stderr:
        command = [executable, "reindex", *options, "--every", "1s", "--json"]
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr)

    def wait_for(condition: Callable[[], object]) -> None:
        end = time.monotonic() + 300
        while not condition():
            assert process.poll() is None, err.read_text()
            assert time.monotonic() < end, err.read_text()
            time.sleep(0.1)

    def wait_for_build(number: int) -> Any:
        wait_for(lambda: out.read_bytes().count(b"\n") == number)
        return json.loads(out.read_text().splitlines()[-1])

    try:
        first = wait_for_build(1)
        assert first["number"] == 1
        n_articles = first["counts"]["articles"]  # earlier tests deleted some
        wiki.edit("Page 20", "Page twenty is about lynxes.")
        assert (wait_for_build(2)["number"], wait_for_build(2)["counts"]["embedded"]) == (2, 1)

        wiki.delete("Page 35")
        wait_for(lambda: "still refused at " in err.read_text())
        assert err.read_text().count("is published but latest did not move") == 1
        wiki.fault = lambda proxy, _: proxy.reply(503, b"", retry_after="1") or True
        wiki.restore("Page 35")
        wiki.edit("Page 21", "Page twenty-one is about ibexes.")
        wiki.fault = None  # The follower sees both changes at once, and publishes one snapshot.
        assert wait_for_build(3)["number"] == 3

        wiki.fault = lambda proxy, _: proxy.reply(503, b"", retry_after="7200") or True
        wait_for(lambda: "still unreachable at " in err.read_text())
        assert err.read_text().count("asks to wait 7200 s") == 1
        wiki.fault = None
        wiki.edit("Page 22", "Page twenty-two is about otters.")
        assert wait_for_build(4)["number"] == 4
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 130
    finally:
        wiki.fault = None
        process.kill()
    with Snapshot.open(str(store)) as snapshot:
        texts = {passage.title: passage.text for passage in snapshot.passages(range(snapshot.n))}
    assert [texts[f"Page {i}"].rpartition(" ")[2] for i in (20, 21, 22)] == ["lynxes.", "ibexes.", "otters."]
    assert len(texts) == n_articles, sorted(texts)
