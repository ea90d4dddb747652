"""A wiki is followed by the command and the scheduled flow: an edit becomes a snapshot, and nothing more is built."""

import gzip
from collections.abc import Iterator
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
    wiki.queries.clear()
    assert look().built is None, "nothing happened"
    assert len(wiki.queries) == 1

    wiki.edit("Page 7", "Page seven is about zebras.")
    wiki.delete("Page 8")
    options = ["--dump", wiki.dump, "--encoder", tiny, "--recipe", recipe]
    kept_files = sorted((store / "memo").rglob("*")) + sorted((store / "blobs").rglob("*"))
    explained = bookwheel("reindex", *options, "--store", store, "--explain", "--json").json["stages"]
    assert [(row["reused"], row["total"]) for row in explained if row["stage"] == "chunk"] == [(39, 40)]
    assert sorted((store / "memo").rglob("*")) + sorted((store / "blobs").rglob("*")) == kept_files
    second = look()
    assert (second.built.counts["articles"], second.built.counts["embedded"]) == (40, 1)
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


def _read_passages(store: Path) -> list[Any]:
    with Snapshot.open(str(store)) as snapshot:
        return list(snapshot.passages(range(snapshot.n)))
