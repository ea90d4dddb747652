"""The guarantees of a store in memory, on disk, on two S3 servers, and on servers like Google's and Azure's."""

import pickle
import secrets
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path

import pytest

from rag_model.errors import RefConflictError, RefusedError, StoreError
from rag_model.store import BlobRef, Content, Manifest, RefMove, Snapshot, StageResult, Store
from rag_model.store.diff import diff_snapshots
from rag_model.store.pulling.pull import pull
from rag_model.store.upkeep.expire import ExpirePolicy, expire_store
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.moves import rollback, tag
from tests.fixtures.serving import wait_until
from tests.fixtures.store_files import publish_articles, publish_parts

SNAPSHOT = "ab" * 32


class StoreContract:
    """A backend's test class inherits these tests and provides the fixture `store`, an empty store."""

    def test_store_can_be_reopened(self, store: Store) -> None:
        blob = store.blobs.put_bytes(b"data")
        assert Store.open(store.url).blobs.read(blob) == b"data"
        assert Store.open(store.url, create=True).blobs.read(blob) == b"data"

    def test_folder_without_a_store_is_not_opened(self, store: Store) -> None:
        with pytest.raises(StoreError, match="no bookwheel store"):
            Store.open(f"{store.url}/elsewhere")

    def test_store_can_be_pickled(self, store: Store) -> None:
        blob = store.blobs.put_bytes(b"data")
        assert pickle.loads(pickle.dumps(store)).blobs.read(blob) == b"data"

    def test_blobs_are_read_as_written(self, store: Store, tmp_path: Path) -> None:
        data = secrets.token_bytes(3 << 20)
        (tmp_path / "source").write_bytes(data)
        blob = store.blobs.put_file(tmp_path / "source")
        assert blob == store.blobs.put_bytes(data)
        store.blobs.fetch(blob, tmp_path / "deep" / "copy")
        assert (tmp_path / "deep" / "copy").read_bytes() == data
        assert store.blobs.get_local_path(blob).read_bytes() == data
        assert store.blobs.read(blob) == data
        assert b"".join(store.files.iter_chunks(blob.path, blob.size)) == data

    def test_blobs_are_read_at_any_offset(self, store: Store) -> None:
        with store.blobs.open(store.blobs.put_bytes(b"0123456789")) as first:
            first.seek(7)
            with store.blobs.open(store.blobs.put_bytes(b"0123456789")) as second:
                assert second.read(2) == b"01"
            assert first.read() == b"789"

    def test_empty_blob_is_stored(self, store: Store, tmp_path: Path) -> None:
        blob = store.blobs.put_bytes(b"")
        assert store.blobs.exists(blob)
        store.blobs.fetch(blob, tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == store.blobs.read(blob) == b""

    def test_missing_blob_is_reported(self, store: Store, tmp_path: Path) -> None:
        blob = BlobRef("sha256:" + "0" * 64, 3)
        assert not store.blobs.exists(blob)
        for read in (
            store.blobs.read,
            store.blobs.open,
            store.blobs.get_local_path,
            lambda ref: store.blobs.fetch(ref, tmp_path / "copy"),
            lambda ref: store.blobs.read_range(ref, 1, 3),
        ):
            with pytest.raises(StoreError, match=f"{blob.id} is missing"):
                read(blob)

    def test_damaged_blob_is_reported_and_not_returned(self, store: Store, tmp_path: Path) -> None:
        blob = store.blobs.put_bytes(b"sound")
        store.files.write(blob.path, b"sOund")
        for read in (store.blobs.read, lambda ref: store.blobs.fetch(ref, tmp_path / "out" / "copy")):
            with pytest.raises(StoreError, match=f"{blob.id} .*damaged"):
                read(blob)
        assert list((tmp_path / "out").iterdir()) == []

    def test_truncated_blob_is_reported_and_can_be_replaced(self, store: Store) -> None:
        blob = store.blobs.put_bytes(b"sound")
        store.files.write(blob.path, b"so")
        with pytest.raises(StoreError, match="2 bytes instead of 5"):
            store.blobs.open(blob)
        store.blobs.put_bytes(b"sound")
        assert store.blobs.read(blob) == b"sound"

    def test_range_of_a_blob_is_read(self, store: Store) -> None:
        blob = store.blobs.put_bytes(b"0123456789")
        assert [store.blobs.read_range(blob, *bounds) for bounds in ((2, 5), (0, 10))] == [b"234", b"0123456789"]
        assert [store.blobs.read_range(blob, offset, offset) for offset in (0, 5, 10)] == [b""] * 3
        for bounds in ((-1, 3), (3, 2), (5, 11), (1 << 62, 1 << 63)):
            with pytest.raises(StoreError, match=f"blob {blob.id} has 10 bytes, so none from"):
                store.blobs.read_range(blob, *bounds)
        store.files.write(blob.path, b"012")
        for bounds in ((1, 4), (5, 9)):
            with pytest.raises(StoreError, match=f"{blob.id} .*damaged"):
                store.blobs.read_range(blob, *bounds)

    def test_one_of_many_threads_creates_a_file(self, store: Store) -> None:
        with ThreadPoolExecutor(16) as pool:
            created = list(pool.map(lambda i: store.files.create("race", b"%d" % i), range(16)))
        assert created.count(True) == 1
        assert store.files.read("race") == b"%d" % created.index(True)

    def test_retried_creation_recognises_its_own_file(self, store: Store) -> None:
        assert store.files.create("mine", b"nonce 1")
        assert not store.files.create("mine", b"nonce 2")
        if not store.files.is_local:  # only requests over a network are retried
            assert store.files.create("mine", b"nonce 1")

    def test_listings_are_current(self, store: Store) -> None:
        assert store.files.list_names("folder") == []
        for name in ("b", "a"):
            store.files.write(f"folder/{name}", b"1")
            assert name in store.files.list_names("folder")
        store.files.write("folder/.landing-0", b"left by a crash")
        store.files.write("folder/deeper/c", b"1")
        assert store.files.list_names("folder") == ["a", "b"]
        assert store.files.list_names("folder", kind="directory") == ["deeper"]

    def test_memo_runs_a_stage_once(self, store: Store) -> None:
        workdirs: list[Path] = []

        def produce(workdir: Path) -> StageResult:
            workdirs.append(workdir)
            (workdir / "out").write_bytes(b"output")
            return StageResult({"out": workdir / "out"}, {"rows": 6})

        first, first_is_new = store.memo.get_or_create("chunk", {"part": 1}, produce)
        second, second_is_new = store.memo.get_or_create("chunk", {"part": 1}, produce)
        assert (first_is_new, second_is_new, len(workdirs)) == (True, False, 1)
        assert first == second
        assert second.stats == {"rows": 6}
        assert store.blobs.read(second.outputs["out"]) == b"output"
        assert not workdirs[0].exists()

    def test_first_record_is_kept(self, store: Store) -> None:
        blob = store.blobs.put_bytes(b"any")
        with ThreadPoolExecutor(8) as pool:
            records = list(pool.map(lambda i: store.memo.write_record("embed", "k", {"o": blob}, {"by": i}), range(8)))
        assert len({record.stats["by"] for record in records}) == 1
        assert store.memo.find("embed", "k") == records[0]

    @pytest.mark.parametrize("damage", [b"short", None])
    def test_record_without_its_outputs_is_superseded(self, store: Store, damage: bytes | None) -> None:
        lost_blob, new_blob = store.blobs.put_bytes(b"lost blob"), store.blobs.put_bytes(b"kept blob")
        store.memo.write_record("chunk", "k", {"o": lost_blob}, {"version": 1})
        if damage is None:
            store.files.delete_folder(lost_blob.path)
        else:
            store.files.write(lost_blob.path, damage)
        assert store.memo.find("chunk", "k") is None
        record = store.memo.write_record("chunk", "k", {"o": new_blob}, {"version": 2})
        assert record.stats == {"version": 2}
        store.blobs.put_bytes(b"lost blob")  # the older record has its output again, but stays superseded
        assert store.memo.find("chunk", "k") == record

    def test_damaged_record_is_superseded(self, store: Store) -> None:
        store.files.write("memo/chunk/k.json", b'{"outputs": {"o": {"id": "../..", "size": 1}}')
        assert store.memo.find("chunk", "k") is None
        assert store.memo.write_record("chunk", "k", {}, {"n": 1}) == store.memo.find("chunk", "k")

    def test_snapshot_id_depends_on_content_only(self, store: Store) -> None:
        manifest = Manifest(Content({"kind": "wiki"}, (), {}), metrics={"recall": 0.9})
        snapshot = store.snapshots.publish(manifest)
        assert store.snapshots.publish(Manifest(manifest.content, metrics={"recall": 0.1})) == snapshot
        assert store.snapshots.get(snapshot) == manifest
        assert store.snapshots.list_ids() == [snapshot]

    def test_snapshot_is_resolved_by_several_names(self, store: Store) -> None:
        first = store.snapshots.publish(Manifest(Content({"n": 1}, (), {})))
        second = store.snapshots.publish(Manifest(Content({"n": 2}, (), {})))
        store.refs.move("latest", first, 0)
        store.refs.move("latest", second, 1)
        names = {first: [first, first[:12], "latest@1"], second: [second[:4], "latest", "latest@2"]}
        for snapshot, names_of_snapshot in names.items():
            assert [store.snapshots.resolve(name) for name in names_of_snapshot] == [snapshot] * len(names_of_snapshot)
        for unknown in ("nothing", "latest@3", "0" * 12, "0" * 64):
            with pytest.raises(StoreError):
                store.snapshots.resolve(unknown)

    def test_ref_keeps_its_history(self, store: Store) -> None:
        assert store.refs.find_current("latest") is None
        moves = [store.refs.move("latest", f"{i:064x}", i, note=f"move {i}") for i in range(12)]
        assert store.refs.read_history("latest") == moves
        assert store.refs.find_current("latest") == moves[-1]
        assert [move.number for move in moves] == list(range(1, 13))
        assert [move.previous for move in moves] == [None, *(move.snapshot for move in moves[:-1])]
        assert store.refs.list_names() == ["latest"]

    @pytest.mark.parametrize("expected", [0, 2, 7])
    def test_ref_moves_only_from_its_current_number(self, store: Store, expected: int) -> None:
        store.refs.move("latest", SNAPSHOT, 0)
        with pytest.raises(RefConflictError, match="another writer"):
            store.refs.move("latest", SNAPSHOT, expected)
        assert store.refs.list_numbers("latest") == [1]

    def test_reports_are_read_in_order(self, store: Store) -> None:
        assert store.runs.read_reports("run", "chunk") == []
        for i in (10, 2, 100_000, 2):
            store.runs.write_report("run", "chunk", i, {"element": i})
        assert store.runs.count_reports("run", "chunk") == 3
        assert [report["element"] for report in store.runs.read_reports("run", "chunk")] == [2, 10, 100_000]
        store.runs.delete_reports("run")
        store.runs.delete_reports("run")
        assert store.runs.count_reports("run", "chunk") == 0

    def test_snapshot_is_published_read_verified_and_pulled(self, store: Store, tmp_path: Path, cache: Path) -> None:
        snapshot = publish_parts(store)
        store.refs.move("latest", snapshot, 0)
        assert verify_version(store, snapshot) == []
        with Snapshot.open(store.url) as remote:
            assert [passage.text for passage in remote.passages([2200, 0, 1500, 0])] == [
                "text 2200",
                "text 0",
                "text 1500",
                "text 0",
            ]
            assert not [*cache.glob("??/*")]  # passages are read by range, without a copy of their file
            assert remote.embeddings("part-00002")[-1].tolist() == [2200] * 4
            assert (remote.folder("encoder/question") / "copy" / "config.json").read_bytes() == b"{}"
        report = pull(store, "latest", tmp_path / "dest")
        with Snapshot.from_folder(tmp_path / "dest") as pulled:
            assert pulled.id == report.snapshot == snapshot
            assert pulled.passages([1500])[0].text == "text 1500"

    def test_ref_is_tagged_and_rolled_back(self, store: Store) -> None:
        first, second = publish_parts(store), publish_parts(store, words=50)
        assert tag(store, first[:12], "latest", "the first").number == 1
        assert tag(store, second, "latest").number == 2
        move = rollback(store, "latest")
        assert (move.number, move.snapshot, move.previous, move.note) == (3, first, second, "rollback to @1")
        assert [move.snapshot for move in store.refs.read_history("latest")] == [first, second, first]
        store.files.delete_folder(store.snapshots.get(second).content.files["embeddings/part-00002.npy"].path)
        with pytest.raises(RefusedError, match=r"embeddings/part-00002.npy: missing"):
            rollback(store, "latest", 2)
        assert store.refs.list_numbers("latest") == [1, 2, 3]

    def test_expire_and_gc_delete_unused_files(self, store: Store) -> None:
        first, second = publish_parts(store), publish_parts(store, words=50)
        for snapshot in (first, second):
            tag(store, snapshot, "latest")
        orphan = store.blobs.put_bytes(b"orphan")
        assert collect_garbage(store, 3600.0)["blobs"].files == 0
        assert expire_store(store, ExpirePolicy(keep=1, older_than=0)).snapshots == (first,)
        # If the times of a store are whole seconds, it keeps files written in the second of the listing.
        wait_until(lambda: collect_garbage(store, 0.0)["blobs"].files == 1)
        assert not store.blobs.exists(orphan)
        assert store.snapshots.list_ids() == [second]
        assert verify_version(store, second) == []
        assert [*store.files.iter_tree("intents"), *store.files.iter_tree("sweeps")] == []

    def test_concurrent_tags_succeed_or_fail_with_an_error(self, store: Store) -> None:
        snapshots = [store.snapshots.publish(Manifest(Content({"n": n}, (), {}))) for n in range(8)]

        def attempt(snapshot: str) -> RefMove | None:
            try:
                return tag(store, snapshot, "latest")
            except RefConflictError:
                return None

        with ThreadPoolExecutor(8) as pool:
            moves = [move for move in pool.map(attempt, snapshots) if move]
        assert sorted(moves, key=attrgetter("number")) == store.refs.read_history("latest")
        assert store.refs.list_numbers("latest") == list(range(1, len(moves) + 1))

    def test_snapshots_are_compared(self, store: Store, cache: Path) -> None:
        old_snapshot = publish_articles(store, {1: ["a", "b"], 2: ["c"], 60: ["d"]}, (0, 50))
        new_snapshot = publish_articles(store, {1: ["a", "x"], 3: ["c"], 60: ["d"]}, (0, 40))
        diff = diff_snapshots(old_snapshot, new_snapshot)
        assert diff.articles == {"added": 1, "changed": 1, "removed": 1}
        assert diff.passages == {"added": 1, "changed": 1, "removed": 1}
        assert not [*cache.glob("??/*")]  # files are read by range, and not copied


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self, memory_store: Store) -> Store:
        return memory_store


class TestLocal(StoreContract):
    """Use the local store of all tests."""


class TestSeaweed(StoreContract):
    @pytest.fixture
    def store(self, s3_store: Store) -> Store:
        return s3_store


class TestMoto(StoreContract):
    @pytest.fixture
    def store(self, moto_store_url: str) -> Store:
        return Store.open(f"{moto_store_url}/{secrets.token_hex(4)}", create=True)


class TestGcs(StoreContract):
    @pytest.fixture
    def store(self, gcs_store_url: str) -> Store:
        return Store.open(f"{gcs_store_url}/{secrets.token_hex(4)}", create=True)


class TestAzure(StoreContract):
    @pytest.fixture
    def store(self, azure_store_url: str) -> Store:
        return Store.open(f"{azure_store_url}/{secrets.token_hex(4)}", create=True)
