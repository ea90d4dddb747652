"""The flows `watch`, which downloads and builds a new dump, and `upkeep`, which deletes old snapshots."""

import bz2
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.maintain import get_dump_date, upkeep, watch
from rag_model.errors import GateRefusedError, InputError
from rag_model.evaluation.gate import GateRecipe
from rag_model.snapshots.recipe import read_recipe
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.dump_server import DumpSite, serve_dumps
from tests.fixtures.tiny_snapshot import publish_tiny

pytestmark = pytest.mark.usefixtures("prefect_server")  # These flows run as deployments.

NAME = "testwiki-{}-pages-articles-multistream.xml.bz2"


@pytest.fixture
def dumps(page_xml: Callable[..., str], export_xml: Callable[..., bytes]) -> list[bytes]:
    """Two dumps; the second has half of the pages of the first."""
    pages = [page_xml(page, f"Page {page} says some words.") for page in range(1, 9)]
    return [bz2.compress(export_xml(*pages[:n_pages])) for n_pages in (8, 4)]


@pytest.fixture
def site() -> Iterator[DumpSite]:
    with serve_dumps() as site:
        yield site


def publish_dump(site: DumpSite, date: str, dump: bytes, status: str = "done") -> None:
    site.publish_run(date, {NAME.format(date): dump}, status)


@pytest.fixture
def run_watch(site: DumpSite, tmp_path: Path, tiny: Path, recipe: Path) -> Any:
    """Run `watch` once."""

    def run(**gate: float) -> Any:
        watch_recipe = replace(read_recipe(recipe), gate=GateRecipe(**gate))
        return watch(site.url, str(tmp_path / "store"), str(tmp_path / "dumps"), recipe=watch_recipe, encoder=str(tiny))

    return run


def test_new_dump_is_built_once(site: DumpSite, run_watch: Any, dumps: list[bytes], tmp_path: Path) -> None:
    publish_dump(site, "20261001", dumps[0])
    publish_dump(site, "20261101", b"", status="in-progress")
    site.cuts = [0.6]
    first = run_watch()
    assert (first.known, first.dump, first.built.number) == ("", "20261001", 1)
    assert (tmp_path / "dumps" / "20261001" / NAME.format("20261001")).read_bytes() == dumps[0]
    assert get_dump_date(Store.open(str(tmp_path / "store")), "latest") == "20261001"

    site.requested_paths.clear()
    idle = run_watch()
    assert (idle.known, idle.dump, idle.built) == ("20261001", None, None)
    assert site.requested_paths == ["/testwiki/", "/testwiki/20261101/dumpstatus.json"]

    publish_dump(site, "20261101", dumps[1])
    second = run_watch(max_passage_loss=1.0)
    assert (second.dump, second.built.number) == ("20261101", 2)
    site.requested_paths.clear()
    assert run_watch().dump is None
    assert site.requested_paths == ["/testwiki/"]


def test_refused_gate_posts_alarm_and_keeps_old_snapshot(
    site: DumpSite, run_watch: Any, dumps: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_dump(site, "20261001", dumps[0])
    run_watch()
    publish_dump(site, "20261101", dumps[1])
    monkeypatch.setenv("BOOKWHEEL_WEBHOOK", site.url + "alarm")
    with pytest.raises(GateRefusedError):
        run_watch()
    (alarm,) = site.posted_bodies
    assert (alarm["flow"], alarm["state"], alarm["ref"]) == ("watch", "Failed", "latest")
    assert "latest did not move" in alarm["error"]
    with Snapshot.open(str(tmp_path / "store"), "latest") as snapshot:
        assert NAME.format("20261001") in snapshot.manifest.provenance["dump"]


def test_damaged_dump_posts_alarm_and_builds_nothing(
    site: DumpSite, run_watch: Any, dumps: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_dump(site, "20261001", dumps[0])
    monkeypatch.setenv("BOOKWHEEL_WEBHOOK", site.url + "alarm")
    site.pages[f"/testwiki/20261001/{NAME.format('20261001')}"] = dumps[0][:-1] + b"!"
    with pytest.raises(InputError, match="was deleted"):
        run_watch()
    assert "was deleted" in site.posted_bodies[0]["error"]
    assert Store.open(str(tmp_path / "store")).refs.list_names() == []


def test_upkeep_deletes_by_policy_unless_dry_run(tiny: Path, tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    for text in ("the river of the city", "the king of the river"):
        publish_tiny(store, tiny, {"Rivers": text}, tmp_path)
    rehearsal = upkeep(store.url, keep=1, older_than="0", grace="0")
    assert rehearsal.dry_run
    assert rehearsal.expired.moves == ("latest@1",)
    assert len(store.refs.read_history("latest")) == 2
    report = upkeep(store.url, keep=1, older_than="0", grace="0", dry_run=False)
    assert report.expired == rehearsal.expired
    assert [move.number for move in store.refs.read_history("latest")] == [2]
    assert report.deleted["blobs"]["files"] > 0
    assert rehearsal.deleted == report.deleted
