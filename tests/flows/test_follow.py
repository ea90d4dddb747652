"""A wiki is followed by the command and the scheduled flow: an edit becomes a snapshot, and nothing more is built."""

import gzip
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.maintain import watch
from rag_model.snapshots.recipe import read_recipe
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.wiki_server import Wiki, export, running_wiki

pytestmark = pytest.mark.xdist_group("wiki")


@pytest.fixture(scope="module")
def wiki(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wiki]:
    with running_wiki(tmp_path_factory.mktemp("wiki") / "two") as running:
        running.import_xml(export({f"Page {i}": f"Page number {i} is about the subject {i}." for i in range(40)}))
        yield running


def find_blobs_with(store: Path, text: bytes) -> list[Path]:
    """Return the blobs of a store that contain a text, also compressed by gzip."""

    def read(path: Path) -> bytes:
        data = path.read_bytes()
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data

    return [path for path in (store / "blobs").rglob("*") if path.is_file() and text in read(path)]


def test_an_edit_becomes_a_snapshot_and_a_takedown_reaches_the_kept_pages(
    wiki: Wiki, tmp_path: Path, tiny: Path, recipe: Path, bookwheel: Any
) -> None:
    store, settings = tmp_path / "store", read_recipe(recipe)

    def look() -> Any:
        return watch.fn(wiki.dump, str(store), encoder=str(tiny), recipe=settings)

    first = look()
    assert first.built.number == 1
    assert first.built.counts["articles"] == 41
    first_provenance = _read_provenance(store)
    assert (first_provenance["embedded"], first_provenance["history"]) == (41, [])
    wiki.queries.clear()
    assert look().built is None, "nothing happened"
    assert len(wiki.queries) == 1

    wiki.edit("Page 7", "Page seven is about zebras.")
    wiki.delete("Page 8")
    options = ["--dump", wiki.dump, "--encoder", tiny, "--recipe", recipe]
    kept_files = sorted((store / "memo").rglob("*")) + sorted((store / "blobs").rglob("*"))
    explained = bookwheel("reindex", *options, "--store", store, "--explain", "--json").json
    assert [(row["reused"], row["total"]) for row in explained["stages"] if row["stage"] == "chunk"] == [(39, 40)]
    forecast = explained["forecast"]
    assert (forecast["builds"], forecast["changed"]) == (1, 1)
    first_cpu = first_provenance["cpu"]["embed"]
    assert forecast["stages"]["embed"]["cpu"] == pytest.approx(first_cpu / 41, abs=1e-3)
    assert sorted((store / "memo").rglob("*")) + sorted((store / "blobs").rglob("*")) == kept_files
    second = look()
    assert (second.built.counts["articles"], second.built.counts["embedded"]) == (40, 1)
    (earlier,) = _read_provenance(store)["history"]
    assert (earlier["snapshot"], earlier["changed"]) == (first.built.snapshot, 41)
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
    assert not any("gapnamespace" in query or "pageids" in query for query in wiki.queries), "the rest is still there"


def _read_provenance(store: Path) -> Any:
    with Snapshot.open(str(store)) as snapshot:
        return snapshot.manifest.provenance


def _read_passages(store: Path) -> list[Any]:
    with Snapshot.open(str(store)) as snapshot:
        return list(snapshot.passages(range(snapshot.n)))


def test_the_command_follows_a_wiki_until_it_is_interrupted(
    wiki: Wiki, tmp_path: Path, tiny: Path, recipe: Path, executable: Path
) -> None:
    store, out, err = tmp_path / "store", tmp_path / "out", tmp_path / "err"
    options = ["--dump", wiki.dump, "--encoder", tiny, "--recipe", recipe, "--store", store]
    with out.open("wb") as stdout, err.open("wb") as stderr:
        command = [executable, "reindex", *options, "--every", "1s", "--json"]
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr)

    def wait_for(condition: Callable[[], object]) -> None:
        end = time.monotonic() + 120
        while not condition():
            assert process.poll() is None, err.read_text()
            assert time.monotonic() < end, err.read_text()
            time.sleep(0.1)

    def wait_for_build(number: int) -> Any:
        wait_for(lambda: out.read_bytes().count(b"\n") == number)
        return json.loads(out.read_text().splitlines()[-1])

    try:
        assert wait_for_build(1)["number"] == 1
        wiki.edit("Page 20", "Page twenty is about lynxes.")
        assert (wait_for_build(2)["number"], wait_for_build(2)["counts"]["embedded"]) == (2, 1)

        wiki.fault = lambda proxy, _: proxy.reply(503, b"", retry_after="1") or True
        for i in range(30, 40):
            wiki.delete(f"Page {i}")
        wiki.fault = None  # the follower sees all deletions at once
        wait_for(lambda: "still refused at " in err.read_text())
        assert err.read_text().count("is published but latest did not move") == 1
        for i in range(30, 40):
            wiki.restore(f"Page {i}")
        wiki.edit("Page 21", "Page twenty-one is about ibexes.")
        assert wait_for_build(3)["number"] == 3

        wiki.fault = lambda proxy, _: proxy.reply(503, b"", retry_after="7200") or True
        wait_for(lambda: "still unreachable at " in err.read_text())
        assert err.read_text().count("asks to wait 7200 s") == 1
        wiki.fault = None
        wiki.edit("Page 22", "Page twenty-two is about otters.")
        assert wait_for_build(4)["number"] == 4
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        wiki.fault = None
        process.kill()
    with Snapshot.open(str(store)) as snapshot:
        texts = {passage.title: passage.text for passage in snapshot.passages(range(snapshot.n))}
    assert [texts[f"Page {i}"].rpartition(" ")[2] for i in (20, 21, 22)] == ["lynxes.", "ibexes.", "otters."]
    assert len(texts) == 40
