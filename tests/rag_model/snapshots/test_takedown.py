"""Pages leave every snapshot of a store: what takes their place, what refs mean then, and who is refused what."""

import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest

from beam_jobs.corpus import RedactTask, redact
from rag_model.corpus.passages import PassageWriter
from rag_model.corpus.records import Passage
from rag_model.errors import RefusedError, StoreError, UsageError
from rag_model.evaluation.gate import GateVerdict
from rag_model.snapshots.publish import publish
from rag_model.snapshots.takedown import (
    AffectedSnapshot,
    RedactResult,
    choose_wiki,
    find_affected_snapshots,
    list_part_blobs,
    list_parts_to_redact,
    replace_redacted_parts,
    take_down_everywhere,
)
from rag_model.store import Content, Manifest, PartEntry, Snapshot, Store
from rag_model.store.objects.files import Files
from rag_model.store.pulling.pull import pull
from rag_model.store.upkeep.expire import ExpirePolicy, expire_store
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.moves import rollback, tag
from rag_model.toml import from_table
from tests.fixtures.crashing_store import Broken

GONE = "7"
STARTS = (0, 5, 10, 15)  # first pages of the parts, and the end
MOST = 60  # writes of one act


def manifest(store: Store, pages: dict[int, str], dbname: str = "enwiki", **files: bytes) -> Manifest:
    """A snapshot of pages, each of one passage, in parts of five pages."""
    blobs, parts = {}, []
    folder = Path(os.environ["BOOKWHEEL_CACHE"])
    folder.mkdir(exist_ok=True)
    for first, end in pairwise(STARTS):
        name, path = f"part-{len(parts):05d}", folder / secrets.token_hex(8)
        own = {page: text for page, text in pages.items() if first <= page < end}
        with PassageWriter(path) as writer:
            for page, text in own.items():
                digest = Passage.hash_of(f"Page {page}", text)
                writer.write(Passage(f"{page}:0", str(page), 1, f"Page {page}", "", text, 0, 1, digest))
        if own:
            np.save(vectors := folder / f"{path.name}.npy", np.array([[page] for page in own], dtype=np.float16))
            blobs[f"passages/{name}.parquet"] = store.blobs.put_file(path)
            blobs[f"embeddings/{name}.npy"] = store.blobs.put_file(vectors)
            parts.append(PartEntry(name, first, end - 1, len(own)))
    blobs |= {path.replace("__", "/"): store.blobs.put_bytes(data) for path, data in files.items()}
    return Manifest(Content({"kind": "wiki", "dbname": dbname}, tuple(parts), blobs, {}))


def build(store: Store, pages: dict[int, str], ref: str = "latest", **more: Any) -> str:
    return publish(store, manifest(store, pages, **more), ref, lambda parent: GateVerdict(True, ())).snapshot


def rebuild(store: Store, holder: AffectedSnapshot) -> Manifest | None:
    """Do as the flow does, but for the indexes."""
    old = holder.manifest.content
    made = {
        part.name: from_table(
            RedactResult, redact(RedactTask(holder.pages, tuple(list_part_blobs(old, part).items())), store), "a report"
        )
        for part in list_parts_to_redact(holder)
    }
    content = replace_redacted_parts(old, made)
    return Manifest(content) if content.parts else None


def take_down(store: Store, *pages: str) -> dict[str, str]:
    if new := {*pages} - store.takedowns.list_pages("enwiki"):
        store.takedowns.add("enwiki", new, "a request", "me")
    return take_down_everywhere(store, lambda holder: rebuild(store, holder)).replacements


def texts(store: Store, name: str) -> list[str]:
    with Snapshot.from_store(store, name) as snapshot:
        return [passage.text for passage in snapshot.passages(range(snapshot.n))]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOKWHEEL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Three months, the second without the page, and a tag of the first."""
    store = Store.open(str(tmp_path / "store"), create=True)
    tag(store, build(store, {3: "three", 7: "secret", 8: "eight"}), "first")
    build(store, {3: "three", 8: "eight", 9: "nine"})
    build(store, {3: "three", 7: "secret still", 12: "twelve"})
    return store


def test_every_snapshot_that_holds_the_page_is_replaced(store: Store) -> None:
    one, two, three = (move.snapshot for move in store.refs.read_history("latest"))
    assert [(holder.manifest.id, holder.refs) for holder in find_affected_snapshots(store, "enwiki", [GONE])] == [
        (holder, refs) for holder, refs in sorted([(one, ("first",)), (three, ("latest",))])
    ]
    places = take_down(store, GONE)
    assert set(places) == {one, three}
    assert {*store.snapshots.list_ids()} == {two, places[one], places[three]}
    assert [move.snapshot for move in store.refs.read_history("latest")] == [
        places[one],
        two,
        places[three],
        places[three],
    ]
    assert [move.number for move in store.refs.read_history("first")] == [1, 2]
    assert texts(store, "latest") == ["three", "twelve"]
    assert texts(store, "first") == texts(store, "latest@1") == ["three", "eight"]
    assert [Snapshot.from_store(store, "first").embeddings("part-00001")[0, 0]] == [8]
    for snapshot in store.snapshots.list_ids():
        assert verify_version(store, snapshot) == []
    assert take_down(store, GONE) == {}
    assert len(store.takedowns.list_records()) == 1


def test_nothing_brings_the_page_back(store: Store, tmp_path: Path) -> None:
    one, two, three = (move.snapshot for move in store.refs.read_history("latest"))
    places = take_down(store, GONE)
    assert rollback(store, "latest").snapshot == two
    assert rollback(store, "latest", 1).snapshot == places[one]
    assert texts(store, "latest") == ["three", "eight"]
    why = f"snapshot {three[:12]} in .* was taken down: use snapshot {places[three][:12]}, which replaces it"
    attempts: list[Callable[[], Any]] = [
        lambda: tag(store, three, "v1"),
        lambda: tag(store, three[:10], "v1"),
        lambda: pull(store, three, tmp_path / "dest"),
        lambda: Snapshot.from_store(store, three),
        lambda: store.snapshots.get(three),
    ]
    for attempt in attempts:
        with pytest.raises(StoreError, match=why):
            attempt()
    assert pull(store, "latest@3", tmp_path / "dest").snapshot == places[three]


def test_its_bytes_go_and_the_record_stays(store: Store) -> None:
    take_down(store, GONE)
    collect_garbage(store, 0.0)
    kept = [path for path in store.files.local_path("blobs").rglob("*") if path.is_file()]
    for path in kept:
        data = path.read_bytes()
        rows = pq.read_table(path).column("text").to_pylist() if data.startswith(b"PAR1") else []
        assert "secret" not in " ".join(rows)
        assert np.float16(7).tobytes() not in data[-8:] or not data.startswith(b"\x93NUMPY")
    assert [record.pages for record in store.takedowns.list_records()] == [(GONE,)]
    expire_store(store, ExpirePolicy(keep=1, older_than=0))
    assert [record.reason for record in store.takedowns.list_records()] == ["a request"]
    assert texts(store, "latest") == ["three", "twelve"]


def test_this_machine_forgets_its_copies_of_a_remote_store(tmp_path: Path) -> None:
    url = f"memory://{secrets.token_hex(4)}"
    store = Store.open(url, create=True)
    build(store, {3: "three", 7: "secret", 12: "twelve"})
    take_down(store, GONE)
    assert texts(store, "latest") == ["three", "twelve"]
    copies = [path for path in (tmp_path / "cache").glob("??/*") if path.read_bytes()[:4] == b"PAR1"]
    assert [pq.read_table(path).column("text").to_pylist() for path in copies] == []
    fsspec.filesystem("memory").rm(url, recursive=True)


def test_moves_that_stay_keep_what_stands_in_the_place(store: Store) -> None:
    one = store.refs.get_move("latest", 1).snapshot
    places = take_down(store, GONE)
    assert places[one] not in expire_store(store, ExpirePolicy(keep=10, older_than=0)).snapshots
    assert texts(store, "latest@1") == ["three", "eight"]


def test_one_page_after_another(store: Store) -> None:
    three = store.refs.get_move("latest", 3).snapshot
    first = take_down(store, GONE)[three]
    second = take_down(store, "3")[first]
    assert store.takedowns.find_replacement(three) == second
    assert store.snapshots.resolve("latest@3") == second
    assert texts(store, "latest") == ["twelve"]
    assert [part.name for part in store.snapshots.get(second).content.parts] == ["part-00000"]


def test_where_nothing_is_left_refs_name_nothing(store: Store) -> None:
    only = build(store, {7: "secret alone"}, "alone")
    assert take_down(store, GONE)[only] == ""
    assert store.refs.find_current("alone") is None
    assert store.refs.list_names() == ["first", "latest"]
    for name, why in (
        (only, "was taken down: all its pages were taken down"),
        ("alone@1", "alone@1 in .* names no snapshot"),
    ):
        with pytest.raises(StoreError, match=why):
            store.snapshots.resolve(name)
    assert only not in store.snapshots.list_ids()
    collect_garbage(store, 0.0)
    assert tag(store, "latest", "alone").number == 2


def test_another_wikis_page_of_that_id_stays(store: Store) -> None:
    other = build(store, {7: "sieben"}, "de", dbname="dewiki")
    with pytest.raises(UsageError, match="holds snapshots of 'dewiki', 'enwiki': name the wiki of the pages"):
        choose_wiki(store, [GONE], None)
    with pytest.raises(UsageError, match=r"no snapshot in .* is of wiki 'frwiki': there are 'dewiki', 'enwiki'"):
        choose_wiki(store, [GONE], "frwiki")
    assert choose_wiki(store, ["12"], None) == choose_wiki(store, [GONE], "enwiki") == "enwiki"
    assert other not in take_down(store, GONE)
    assert texts(store, "de") == ["sieben"]


def test_a_file_of_an_unknown_kind_stops_it(store: Store) -> None:
    build(store, {7: "secret"}, "odd", terms__bm25=b"secret")
    with pytest.raises(RefusedError, match="has files in terms/, which may contain the page"):
        take_down(store, GONE)


def test_a_build_that_was_under_way_does_not_publish_the_page(store: Store) -> None:
    late = manifest(store, {3: "three", 7: "secret", 14: "new"})
    take_down(store, GONE)
    before = store.refs.read_history("latest")
    with pytest.raises(StoreError, match=r"page 7 in it \('Page 7'\) was taken down meanwhile: run the same command"):
        publish(store, late, "latest", lambda parent: GateVerdict(True, ()))
    assert store.refs.read_history("latest") == before
    assert late.id not in store.snapshots.list_ids()


class Ordered(Files):
    """Files in which a takedown is ordered just before a manifest is written, or just after."""

    when = "before"

    def create(self, path: str, data: bytes) -> bool:
        actual = path.startswith("snapshots/")
        if actual and self.when == "before":
            Store(Files(self.url)).takedowns.add("enwiki", [GONE], "", "")
        done = super().create(path, data)
        if actual and self.when == "after":
            Store(Files(self.url)).takedowns.add("enwiki", [GONE], "", "")
        return done


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_takedown_that_is_ordered_while_a_manifest_is_written_is_noticed(store: Store, when: str) -> None:
    late = manifest(store, {3: "three", 7: "secret", 14: "new"})
    files = Ordered(store.url)
    files.when = when
    with pytest.raises(StoreError, match="was taken down meanwhile"):
        publish(Store(files), late, "latest", lambda parent: GateVerdict(True, ()))
    assert late.id not in store.snapshots.list_ids()


def test_no_ref_moves_to_a_snapshot_whose_turn_is_still_to_come(store: Store) -> None:
    store.takedowns.add("enwiki", [GONE], "", "me")
    attempts: list[Callable[[], Any]] = [lambda: tag(store, "latest", "v1"), lambda: rollback(store, "latest", 1)]
    for attempt in attempts:
        with pytest.raises(RefusedError, match=r"was not moved: page 7 .* was taken down: run `takedown --yes`"):
            attempt()
    assert rollback(store, "latest").number == 4, "the month without the page"


@pytest.mark.parametrize(
    ("gone", "ranges"),
    [
        (["3"], [(0, 9), (10, 14)]),  # the first part is empty then: the next begins where it did
        (["7", "8"], [(0, 9), (10, 14)]),
        (["12"], [(0, 4), (5, 14)]),
        (["7"], [(0, 4), (5, 9), (10, 14)]),
        (["3", "12"], [(0, 14)]),
    ],
)
def test_parts_that_are_left_tile_the_pages(store: Store, gone: list[str], ranges: list[tuple[int, int]]) -> None:
    """As a build's do, so that the next one finds the same parts."""
    snapshot = build(store, {3: "three", 7: "seven", 8: "eight", 12: "twelve"}, "all")
    parts = store.snapshots.get(take_down(store, *gone)[snapshot]).content.parts
    assert [(part.first_page, part.last_page) for part in parts] == ranges
    assert [part.name for part in parts] == [f"part-{number:05d}" for number in range(len(ranges))]


def test_what_a_writer_relies_on_stays_until_it_has_ended(store: Store) -> None:
    three = store.refs.get_move("latest", 3).snapshot
    with store.intents.hold("move-1", [f"snapshots/{three}.json"]):
        places = take_down(store, GONE)
        assert three in store.snapshots.list_ids()
        assert store.snapshots.resolve("latest@3") == places[three]
    assert take_down(store) == {three: places[three]}, "it goes on without being told of which pages"
    assert three not in store.snapshots.list_ids()


def state(store: Store) -> tuple[Any, ...]:
    """What snapshots there are, and what refs have named, as texts, and that all of it is whole."""
    histories = {ref: [move.snapshot for move in store.refs.read_history(ref)] for ref in store.refs.list_names()}
    return (
        sorted(store.snapshots.list_ids()),
        histories,
        [verify_version(store, one) for one in store.snapshots.list_ids()],
    )


@pytest.mark.parametrize("carried_out", [False, True], ids=["not carried out", "carried out"])
def test_a_fault_at_every_write(store: Store, carried_out: bool, tmp_path: Path) -> None:
    pristine = store.files.local_path("")
    undisturbed = Store.open(str(shutil.copytree(pristine, tmp_path / "undisturbed")))
    take_down(undisturbed, GONE)
    expected = state(undisturbed)
    for fatal in range(1, MOST):
        url = str(shutil.copytree(pristine, tmp_path / f"{fatal}"))
        broken, clean = Broken(url, fatal, carried_out=carried_out), Store.open(url)
        with suppress(StoreError):
            take_down(Store(broken), GONE)
        if broken.writes < fatal:
            break
        for name in ("latest", "first", "latest@1", "latest@3"):
            assert texts(clean, name), "a reader is served whatever happens"
        for file in [
            *clean.files.iter_tree("sweeps"),
            *clean.files.iter_tree("intents"),
        ]:  # the dead hold up nobody for ever
            os.utime(clean.files.local_path(file.path), (file.modified - 4000,) * 2)
        take_down(clean, GONE)
        assert state(clean) == expected
        assert len(clean.takedowns.list_records()) == 1
    assert 10 < fatal < MOST - 1
