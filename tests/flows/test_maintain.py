"""A library that keeps itself current: a dump comes out, is fetched, built and served by the ref; old ones go."""

import bz2
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.maintain import get_dump_date, upkeep, watch
from rag_model.errors import GateRefusedError, InputError
from rag_model.evaluation.gate import GateRecipe
from rag_model.snapshots.recipe import Recipe, read_recipe
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.dump_server import Site, serving

pytestmark = pytest.mark.usefixtures("prefect_server")  # they are run as Prefect runs them

NAME = "testwiki-{}-pages-articles-multistream.xml.bz2"
LENIENT = Recipe(gate=GateRecipe(max_passage_loss=1.0))


@pytest.fixture
def site() -> Iterator[Site]:
    with serving() as of:
        yield of


def publish(site: Site, date: str, dump: bytes, status: str = "done") -> None:
    site.run(date, {NAME.format(date): dump}, status)


@pytest.fixture
def look(site: Site, tmp_path: Path, tiny: Path, recipe: Path) -> Any:
    """Run the watcher once."""

    def look(recipe_: Recipe | None = None, **options: Any) -> Any:
        given = {"encoder": str(tiny), **options}
        return watch(
            site.url, str(tmp_path / "store"), str(tmp_path / "dumps"), recipe=recipe_ or read_recipe(recipe), **given
        )

    return look


def without(dump: bytes, title: bytes) -> bytes:
    pages = bz2.decompress(dump).split(b"</page>\n")
    return bz2.compress(b"</page>\n".join(page for page in pages if b"<title>" + title + b"<" not in page))


def test_a_new_dump_is_built_once(site: Site, look: Any, mini_dump: Path, tmp_path: Path) -> None:
    publish(site, "20261001", mini_dump.read_bytes())
    publish(site, "20261101", b"", status="in-progress")
    site.cuts = [0.6]
    first = look()
    assert (first.known, first.dump, first.built.number) == ("", "20261001", 1)
    assert (tmp_path / "dumps" / "20261001" / NAME.format("20261001")).read_bytes() == mini_dump.read_bytes()
    assert get_dump_date(Store.open(str(tmp_path / "store")), "latest") == "20261001"

    site.asked.clear()
    again = look()
    assert (again.known, again.dump, again.built) == ("20261001", None, None)
    assert site.asked == ["/testwiki/", "/testwiki/20261101/dumpstatus.json"]

    publish(site, "20261101", without(mini_dump.read_bytes(), b"Anarchism"))
    second = look(LENIENT)
    assert (second.dump, second.built.number) == ("20261101", 2)
    site.asked.clear()
    assert look().dump is None
    assert site.asked == ["/testwiki/"]


def test_a_refused_gate_is_posted_and_the_old_one_serves_on(
    site: Site, look: Any, mini_dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(site, "20261001", mini_dump.read_bytes())
    look()
    publish(site, "20261101", without(mini_dump.read_bytes(), b"Anarchism"))
    monkeypatch.setenv("BOOKWHEEL_WEBHOOK", site.url + "alarm")
    with pytest.raises(GateRefusedError):
        look()
    (told,) = site.told
    assert (told["flow"], told["state"], told["ref"]) == ("watch", "Failed", "latest")
    assert "latest did not move" in told["error"]
    with Snapshot.open(str(tmp_path / "store"), "latest") as snapshot:
        assert NAME.format("20261001") in snapshot.manifest.provenance["dump"]


def test_a_dump_that_cannot_be_had_is_posted_and_nothing_is_built(
    site: Site, look: Any, mini_dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(site, "20261001", mini_dump.read_bytes())
    monkeypatch.setenv("BOOKWHEEL_WEBHOOK", site.url + "alarm")
    site.pages[f"/testwiki/20261001/{NAME.format('20261001')}"] = mini_dump.read_bytes()[:-1] + b"!"
    with pytest.raises(InputError, match="was deleted"):
        look()
    assert "was deleted" in site.told[0]["error"]
    assert Store.open(str(tmp_path / "store")).refs.list_names() == []


def test_upkeep_forgets_by_policy_and_only_says_so_unless_told(
    site: Site, look: Any, mini_dump: Path, tmp_path: Path
) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    publish(site, "20261001", mini_dump.read_bytes())
    look()
    publish(site, "20261101", without(mini_dump.read_bytes(), b"Anarchism"))
    look(LENIENT)
    rehearsed = upkeep(store.url, keep=1, older_than="0", grace="0")
    assert rehearsed.dry_run
    assert rehearsed.expired.moves == ("latest@1",)
    assert len(store.refs.read_history("latest")) == 2
    done = upkeep(store.url, keep=1, older_than="0", grace="0", dry_run=False)
    assert done.expired == rehearsed.expired
    assert [move.number for move in store.refs.read_history("latest")] == [2]
    assert sum(tally["files"] for tally in done.deleted.values()) > 0
