"""A fault at every single write: an interrupted operation loses nothing, and the next run completes it."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from rag_model.errors import StoreError
from rag_model.evaluation.gate import GateVerdict
from rag_model.snapshots.publish import publish
from rag_model.store import Content, Manifest, Snapshot, StageResult, Store
from rag_model.store.pulling.pull import pull
from rag_model.store.upkeep.expire import ExpirePolicy, expire_store
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.versions.moves import rollback, tag
from tests.fixtures.crashing_store import CrashingFiles, fill_disk_at
from tests.fixtures.store_files import age_files, are_snapshots_intact

Operation = Callable[[Store], object]
MAX_WRITES = 100  # the limit for the writes of one operation
DAY = 86400.0


def create_manifest(store: Store, *files: str) -> Manifest:
    """Store a few files with the memo, as a build does, and return a manifest of them."""

    def create_producer(name: str) -> Callable[[Path], StageResult]:
        def produce(workdir: Path) -> StageResult:
            (workdir / "out").write_text(name)
            return StageResult({"out": workdir / "out"})

        return produce

    records = {name: store.memo.get_or_create("make", name, create_producer(name))[0] for name in files}
    blobs = {f"index/{name}": record.outputs["out"] for name, record in records.items()}
    return Manifest(Content({"kind": "wiki"}, (), blobs))


def build(store: Store, *files: str) -> str:
    with store.intents.hold("build"):
        store.runs.write_report("build", "make", 0, {})
        result = publish(store, create_manifest(store, *files), "latest", lambda parent: GateVerdict(True, ()))
        store.runs.delete_reports("build")
    return result.snapshot


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of three versions and some garbage, all a hundred days old."""
    path = tmp_path_factory.mktemp("library") / "store"
    store = Store.open(str(path), create=True)
    for files in ("ab", "ac", "ad"):
        build(store, *files)
    store.blobs.put_bytes(b"orphan")
    store.files.write("probe/left", b"")
    age_files(store, 100 * DAY)
    return path


def read_state(store: Store) -> tuple[set[str], dict[str, list[str]]]:
    """Return the paths of all blobs, snapshots and records, and the histories of the refs."""
    files = {file.path for folder in ("blobs", "memo", "runs", "snapshots") for file in store.files.iter_tree(folder)}
    return files, {ref: [move.snapshot for move in store.refs.read_history(ref)] for ref in store.refs.list_names()}


def expire(store: Store) -> None:
    expire_store(store, ExpirePolicy(keep=2, older_than=1.0))


def collect(store: Store) -> None:
    expire(store)
    collect_garbage(store, 60.0)


OPERATIONS: dict[str, Operation] = {
    "build": lambda store: build(store, *"abxyz"),
    "tag": lambda store: tag(store, "latest@1", "good"),
    "rollback": lambda store: rollback(store, "latest", 1),
    "expire": expire,
    "gc": collect,
}


@pytest.mark.parametrize("is_written", [False, True], ids=["not written", "written"])
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())
def test_fault_at_every_write(operation: Operation, is_written: bool, library: Path, tmp_path: Path) -> None:
    undisturbed = Store.open(str(shutil.copytree(library, tmp_path / "undisturbed")))
    initial_state = read_state(undisturbed)
    operation(undisturbed)
    expected = read_state(undisturbed)
    assert expected != initial_state

    for fatal_write in range(1, MAX_WRITES):
        url = str(shutil.copytree(library, tmp_path / f"{fatal_write}"))
        broken_files, clean_store = CrashingFiles(url, fatal_write, is_written=is_written), Store.open(url)
        with suppress(StoreError):
            operation(Store(broken_files))
        if broken_files.writes < fatal_write:
            break
        assert are_snapshots_intact(clean_store)
        if read_state(clean_store) != expected:  # otherwise only the deletion of an intent failed
            age_files(clean_store, 200, "sweeps")  # Those of dead processes expire after two minutes.
            operation(clean_store)
        assert read_state(clean_store) == expected
        assert are_snapshots_intact(clean_store)
    assert fatal_write >= 4


def test_pull_survives_a_fault_at_every_write(library: Path, tmp_path: Path) -> None:
    store = Store.open(str(library))
    for fatal_write in range(1, MAX_WRITES):
        dest = tmp_path / f"{fatal_write}"
        old = pull(store, "latest@1", dest).snapshot
        with fill_disk_at(fatal_write) as writes, suppress(StoreError):
            pull(store, "latest", dest)
        with Snapshot.from_folder(dest) as current:
            assert current.id in {old, store.snapshots.resolve("latest")}
            assert all(current.path(name).read_bytes() for name in current.manifest.content.files)
        if len(writes) < fatal_write:
            break
        assert pull(store, "latest", dest).snapshot == Snapshot.from_folder(dest).id
        assert not [*dest.rglob(".landing-*")]
    assert fatal_write > 2
