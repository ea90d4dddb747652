"""A takedown removes pages from all snapshots of a store: replacements, moves of refs, and refused operations."""

import os
import secrets
import shutil
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest

from beam_jobs.corpus import RedactTask, redact
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
from tests.fixtures.crashing_store import CrashingFiles
from tests.fixtures.store_files import age_files, write_articles

REMOVED_PAGE = "7"
PART_BOUNDS = (0, 5, 10, 15)  # the first page of each part, and the end
MAX_WRITES = 60  # the limit for the writes of one takedown


def create_manifest(store: Store, pages: dict[int, str], dbname: str = "enwiki", **files: bytes) -> Manifest:
    """Return the manifest of these pages, with one passage for each page and five pages in each part."""
    blobs, parts = {}, []
    folder = Path(os.environ["BOOKWHEEL_CACHE"])
    folder.mkdir(exist_ok=True)
    for first, end in pairwise(PART_BOUNDS):
        name, path = f"part-{len(parts):05d}", folder / secrets.token_hex(8)
        part_pages = {page: text for page, text in pages.items() if first <= page < end}
        if part_pages:
            write_articles(path, {page: [text] for page, text in part_pages.items()})
            np.save(vectors := folder / f"{path.name}.npy", np.array([[page] for page in part_pages], dtype=np.float16))
            blobs[f"passages/{name}.parquet"] = store.blobs.put_file(path)
            blobs[f"embeddings/{name}.npy"] = store.blobs.put_file(vectors)
            parts.append(PartEntry(name, first, end - 1, len(part_pages)))
    blobs |= {path.replace("__", "/"): store.blobs.put_bytes(data) for path, data in files.items()}
    return Manifest(Content({"kind": "wiki", "dbname": dbname}, tuple(parts), blobs, {}))


def build(store: Store, pages: dict[int, str], ref: str = "latest", **options: Any) -> str:
    return publish(store, create_manifest(store, pages, **options), ref, lambda parent: GateVerdict(True, ())).snapshot


def redact_snapshot(store: Store, affected: AffectedSnapshot) -> Manifest | None:
    """Redact the parts of a snapshot as the flow does, without indexes."""
    old_content = affected.manifest.content
    results = {}
    for part in list_parts_to_redact(affected):
        task = RedactTask(affected.pages, tuple(list_part_blobs(old_content, part).items()))
        results[part.name] = from_table(RedactResult, redact(task, store), "a report")
    content = replace_redacted_parts(old_content, results)
    return Manifest(content) if content.parts else None


def take_down(store: Store, *pages: str) -> dict[str, str]:
    if new_pages := {*pages} - store.takedowns.list_pages("enwiki"):
        store.takedowns.add("enwiki", new_pages, "a request", "me")
    return take_down_everywhere(store, lambda affected: redact_snapshot(store, affected)).replacements


def read_texts(store: Store, name: str) -> list[str]:
    with Snapshot.from_store(store, name) as snapshot:
        return [passage.text for passage in snapshot.passages(range(snapshot.n))]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOKWHEEL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store of three monthly snapshots; the second one lacks the page, and the first one has a tag."""
    store = Store.open(str(tmp_path / "store"), create=True)
    tag(store, build(store, {3: "three", 7: "secret", 8: "eight"}), "first")
    build(store, {3: "three", 8: "eight", 9: "nine"})
    build(store, {3: "three", 7: "secret still", 12: "twelve"})
    return store


def test_every_snapshot_with_the_page_is_replaced(store: Store) -> None:
    first, second, third = (move.snapshot for move in store.refs.read_history("latest"))
    affected = find_affected_snapshots(store, "enwiki", [REMOVED_PAGE])
    assert [(version.manifest.id, version.refs) for version in affected] == sorted(
        [(first, ("first",)), (third, ("latest",))]
    )
    replacements = take_down(store, REMOVED_PAGE)
    assert set(replacements) == {first, third}
    assert {*store.snapshots.list_ids()} == {second, replacements[first], replacements[third]}
    history = [move.snapshot for move in store.refs.read_history("latest")]
    assert history == [replacements[first], second, replacements[third], replacements[third]]
    assert [move.number for move in store.refs.read_history("first")] == [1, 2]
    assert read_texts(store, "latest") == ["three", "twelve"]
    assert read_texts(store, "first") == read_texts(store, "latest@1") == ["three", "eight"]
    assert [Snapshot.from_store(store, "first").embeddings("part-00001")[0, 0]] == [8]
    for snapshot in store.snapshots.list_ids():
        assert verify_version(store, snapshot) == []
    assert take_down(store, REMOVED_PAGE) == {}
    assert len(store.takedowns.list_records()) == 1


def test_replaced_snapshots_cannot_be_used(store: Store, tmp_path: Path) -> None:
    first, second, third = (move.snapshot for move in store.refs.read_history("latest"))
    replacements = take_down(store, REMOVED_PAGE)
    assert rollback(store, "latest").snapshot == second
    assert rollback(store, "latest", 1).snapshot == replacements[first]
    assert read_texts(store, "latest") == ["three", "eight"]
    message = f"snapshot {third[:12]} in .* was taken down: use snapshot {replacements[third][:12]}, which replaces it"
    for use_snapshot in (
        lambda: tag(store, third, "v1"),
        lambda: tag(store, third[:10], "v1"),
        lambda: pull(store, third, tmp_path / "dest"),
        lambda: Snapshot.from_store(store, third),
        lambda: store.snapshots.get(third),
    ):
        with pytest.raises(StoreError, match=message):
            use_snapshot()
    assert pull(store, "latest@3", tmp_path / "dest").snapshot == replacements[third]


def test_text_of_the_page_is_deleted_and_the_record_stays(store: Store) -> None:
    take_down(store, REMOVED_PAGE)
    collect_garbage(store, 0.0)
    remaining_files = [path for path in store.files.local_path("blobs").rglob("*") if path.is_file()]
    for path in remaining_files:
        data = path.read_bytes()
        rows = pq.read_table(path).column("text").to_pylist() if data.startswith(b"PAR1") else []
        assert "secret" not in " ".join(rows)
        assert np.float16(7).tobytes() not in data[-8:] or not data.startswith(b"\x93NUMPY")
    assert [record.pages for record in store.takedowns.list_records()] == [(REMOVED_PAGE,)]
    expire_store(store, ExpirePolicy(keep=1, older_than=0))
    assert [record.reason for record in store.takedowns.list_records()] == ["a request"]
    assert read_texts(store, "latest") == ["three", "twelve"]


def test_cached_copies_of_a_remote_store_are_deleted(tmp_path: Path) -> None:
    url = f"memory://{secrets.token_hex(4)}"
    store = Store.open(url, create=True)
    build(store, {3: "three", 7: "secret", 12: "twelve"})
    take_down(store, REMOVED_PAGE)
    assert read_texts(store, "latest") == ["three", "twelve"]
    cached_copies = [path for path in (tmp_path / "cache").glob("??/*") if path.read_bytes()[:4] == b"PAR1"]
    assert [pq.read_table(path).column("text").to_pylist() for path in cached_copies] == []
    fsspec.filesystem("memory").rm(url, recursive=True)


def test_replacement_of_a_kept_move_does_not_expire(store: Store) -> None:
    first = store.refs.get_move("latest", 1).snapshot
    replacements = take_down(store, REMOVED_PAGE)
    assert replacements[first] not in expire_store(store, ExpirePolicy(keep=10, older_than=0)).snapshots
    assert read_texts(store, "latest@1") == ["three", "eight"]


def test_replacement_can_be_replaced(store: Store) -> None:
    third = store.refs.get_move("latest", 3).snapshot
    first_replacement = take_down(store, REMOVED_PAGE)[third]
    second_replacement = take_down(store, "3")[first_replacement]
    assert store.takedowns.find_replacement(third) == second_replacement
    assert store.snapshots.resolve("latest@3") == second_replacement
    assert read_texts(store, "latest") == ["twelve"]
    assert [part.name for part in store.snapshots.get(second_replacement).content.parts] == ["part-00000"]


def test_ref_of_an_empty_snapshot_is_deleted(store: Store) -> None:
    single = build(store, {7: "secret alone"}, "alone")
    assert take_down(store, REMOVED_PAGE)[single] == ""
    assert store.refs.find_current("alone") is None
    assert store.refs.list_names() == ["first", "latest"]
    for name, message in (
        (single, "was taken down: all its pages were taken down"),
        ("alone@1", "alone@1 in .* names no snapshot"),
    ):
        with pytest.raises(StoreError, match=message):
            store.snapshots.resolve(name)
    assert single not in store.snapshots.list_ids()
    collect_garbage(store, 0.0)
    assert tag(store, "latest", "alone").number == 2


def test_page_of_another_wiki_with_the_same_id_stays(store: Store) -> None:
    german = build(store, {7: "sieben"}, "de", dbname="dewiki")
    with pytest.raises(UsageError, match="holds snapshots of 'dewiki', 'enwiki': name the wiki of the pages"):
        choose_wiki(store, [REMOVED_PAGE], None)
    with pytest.raises(UsageError, match=r"no snapshot in .* is of wiki 'frwiki': there are 'dewiki', 'enwiki'"):
        choose_wiki(store, [REMOVED_PAGE], "frwiki")
    assert choose_wiki(store, ["12"], None) == choose_wiki(store, [REMOVED_PAGE], "enwiki") == "enwiki"
    assert german not in take_down(store, REMOVED_PAGE)
    assert read_texts(store, "de") == ["sieben"]


def test_unknown_kind_of_file_stops_the_takedown(store: Store) -> None:
    build(store, {7: "secret"}, "odd", terms__bm25=b"secret")
    with pytest.raises(RefusedError, match="has files in terms/, which may contain the page"):
        take_down(store, REMOVED_PAGE)


def test_running_build_does_not_publish_the_page(store: Store) -> None:
    late_manifest = create_manifest(store, {3: "three", 7: "secret", 14: "new"})
    take_down(store, REMOVED_PAGE)
    history = store.refs.read_history("latest")
    with pytest.raises(StoreError, match=r"page 7 in it \('Title 7'\) was taken down meanwhile: run the same command"):
        publish(store, late_manifest, "latest", lambda parent: GateVerdict(True, ()))
    assert store.refs.read_history("latest") == history
    assert late_manifest.id not in store.snapshots.list_ids()


class TakedownDuringPublish(Files):
    """Files in which a takedown is recorded just before a manifest is written, or just after."""

    when = "before"

    def create(self, path: str, data: bytes) -> bool:
        is_manifest = path.startswith("snapshots/")
        if is_manifest and self.when == "before":
            Store(Files(self.url)).takedowns.add("enwiki", [REMOVED_PAGE], "", "")
        created = super().create(path, data)
        if is_manifest and self.when == "after":
            Store(Files(self.url)).takedowns.add("enwiki", [REMOVED_PAGE], "", "")
        return created


@pytest.mark.parametrize("when", ["before", "after"])
def test_takedown_during_the_write_of_a_manifest_is_noticed(store: Store, when: str) -> None:
    late_manifest = create_manifest(store, {3: "three", 7: "secret", 14: "new"})
    files = TakedownDuringPublish(store.url)
    files.when = when
    with pytest.raises(StoreError, match="was taken down meanwhile"):
        publish(Store(files), late_manifest, "latest", lambda parent: GateVerdict(True, ()))
    assert late_manifest.id not in store.snapshots.list_ids()


def test_no_ref_moves_to_a_snapshot_that_awaits_its_takedown(store: Store) -> None:
    store.takedowns.add("enwiki", [REMOVED_PAGE], "", "me")
    for move_ref in (lambda: tag(store, "latest", "v1"), lambda: rollback(store, "latest", 1)):
        with pytest.raises(RefusedError, match=r"was not moved: page 7 .* was taken down: run `takedown --yes`"):
            move_ref()
    assert rollback(store, "latest").number == 4, "the second month has no such page"


@pytest.mark.parametrize(
    ("removed_pages", "ranges"),
    [
        (["3"], [(0, 9), (10, 14)]),  # The first part becomes empty, so the next one starts at page 0.
        (["7", "8"], [(0, 9), (10, 14)]),
        (["12"], [(0, 4), (5, 14)]),
        (["7"], [(0, 4), (5, 9), (10, 14)]),
        (["3", "12"], [(0, 14)]),
    ],
)
def test_remaining_parts_cover_all_pages(store: Store, removed_pages: list[str], ranges: list[tuple[int, int]]) -> None:
    """The parts must be those of a build, so that the next build finds them."""
    snapshot = build(store, {3: "three", 7: "seven", 8: "eight", 12: "twelve"}, "all")
    parts = store.snapshots.get(take_down(store, *removed_pages)[snapshot]).content.parts
    assert [(part.first_page, part.last_page) for part in parts] == ranges
    assert [part.name for part in parts] == [f"part-{number:05d}" for number in range(len(ranges))]


def test_snapshot_in_use_by_a_writer_stays_until_the_writer_ends(store: Store) -> None:
    third = store.refs.get_move("latest", 3).snapshot
    with store.intents.hold("move-1", [f"snapshots/{third}.json"]):
        replacements = take_down(store, REMOVED_PAGE)
        assert third in store.snapshots.list_ids()
        assert store.snapshots.resolve("latest@3") == replacements[third]
    assert take_down(store) == {third: replacements[third]}, "the takedown continues without naming pages"
    assert third not in store.snapshots.list_ids()


def read_state(store: Store) -> tuple[Any, ...]:
    """Return all snapshots, the histories of the refs, and the problems that a verification finds."""
    histories = {ref: [move.snapshot for move in store.refs.read_history(ref)] for ref in store.refs.list_names()}
    snapshots = sorted(store.snapshots.list_ids())
    return snapshots, histories, [verify_version(store, snapshot) for snapshot in snapshots]


@pytest.mark.parametrize("is_written", [False, True], ids=["not written", "written"])
def test_takedown_survives_a_fault_at_every_write(store: Store, is_written: bool, tmp_path: Path) -> None:
    original = store.files.local_path("")
    undisturbed = Store.open(str(shutil.copytree(original, tmp_path / "undisturbed")))
    take_down(undisturbed, REMOVED_PAGE)
    expected = read_state(undisturbed)
    for fatal_write in range(1, MAX_WRITES):
        url = str(shutil.copytree(original, tmp_path / f"{fatal_write}"))
        broken_files, clean_store = CrashingFiles(url, fatal_write, is_written=is_written), Store.open(url)
        with suppress(StoreError):
            take_down(Store(broken_files), REMOVED_PAGE)
        if broken_files.writes < fatal_write:
            break
        for name in ("latest", "first", "latest@1", "latest@3"):
            assert read_texts(clean_store, name), "the refs stay readable"
        # The sweeps and intents of dead processes expire after an hour.
        age_files(clean_store, 4000, "sweeps", "intents")
        take_down(clean_store, REMOVED_PAGE)
        assert read_state(clean_store) == expected
        assert len(clean_store.takedowns.list_records()) == 1
    assert 10 < fatal_write < MAX_WRITES - 1
