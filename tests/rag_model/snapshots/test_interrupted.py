"""A fault at every single write: what was interrupted has lost nothing, and run again it ends as if undisturbed."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rag_model.errors import StoreError
from rag_model.evaluation.gate import GateVerdict
from rag_model.snapshots.publish import publish
from rag_model.store import Content, Manifest, Snapshot, StageResult, Store
from rag_model.store.pulling.pull import pull
from rag_model.store.upkeep.expire import ExpirePolicy, expire_store
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.moves import rollback, tag
from tests.fixtures.crashing_store import Broken

Act = Callable[[Store], object]
MOST = 100  # writes of one act
DAYS = 100 * 86400.0


def snapshot(store: Store, *files: str) -> Manifest:
    """Put a few files into the store by the memo, as a build does, and return the manifest that names them."""

    def made(name: str) -> Callable[[Path], StageResult]:
        def produce(workdir: Path) -> StageResult:
            (workdir / "out").write_text(name)
            return StageResult({"out": workdir / "out"})

        return produce

    blobs = {f"index/{name}": store.memo.get_or_create("make", name, made(name))[0].outputs["out"] for name in files}
    return Manifest(Content({"kind": "wiki"}, (), blobs))


def build(store: Store, *files: str) -> str:
    with store.intents.hold("build"):
        store.runs.write_report("build", "make", 0, {})
        published = publish(store, snapshot(store, *files), "latest", lambda parent: GateVerdict(True, ()))
        store.runs.delete_reports("build")
    return published.snapshot


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of three versions and some garbage, a hundred days old."""
    path = tmp_path_factory.mktemp("library") / "store"
    store = Store.open(str(path), create=True)
    for files in ("ab", "ac", "ad"):
        build(store, *files)
    store.blobs.put_bytes(b"orphan")
    store.files.write("probe/left", b"")
    for file in [*store.files.iter_tree()]:
        os.utime(store.files.local_path(file.path), (file.modified - DAYS,) * 2)
    return path


def state(store: Store) -> tuple[set[str], dict[str, list[str]]]:
    """What there is of blobs, snapshots and records, and where the refs have been."""
    files = {file.path for top in ("blobs", "memo", "runs", "snapshots") for file in store.files.iter_tree(top)}
    return files, {ref: [move.snapshot for move in store.refs.read_history(ref)] for ref in store.refs.list_names()}


def whole(store: Store) -> bool:
    return not any(verify_version(store, snapshot) for snapshot in store.snapshots.list_ids())


def forget(store: Store) -> None:
    expire_store(store, ExpirePolicy(keep=2, older_than=1.0))


def collect(store: Store) -> None:
    forget(store)
    collect_garbage(store, 60.0)


ACTS: dict[str, Act] = {
    "build": lambda store: build(store, *"abxyz"),
    "tag": lambda store: tag(store, "latest@1", "good"),
    "rollback": lambda store: rollback(store, "latest", 1),
    "expire": forget,
    "gc": collect,
}


@pytest.mark.parametrize("carried_out", [False, True], ids=["not carried out", "carried out"])
@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS.keys())
def test_a_fault_at_every_write(act: Act, carried_out: bool, library: Path, tmp_path: Path) -> None:
    undisturbed = Store.open(str(shutil.copytree(library, tmp_path / "undisturbed")))
    before = state(undisturbed)
    act(undisturbed)
    expected = state(undisturbed)
    assert expected != before

    for fatal in range(1, MOST):
        url = str(shutil.copytree(library, tmp_path / f"{fatal}"))
        broken, clean = Broken(url, fatal, carried_out=carried_out), Store.open(url)
        with suppress(StoreError):
            act(Store(broken))
        if broken.writes < fatal:
            break
        assert whole(clean)
        if state(clean) != expected:  # else only the end of an intent failed
            for file in [*clean.files.iter_tree("sweeps")]:  # two minutes pass: the dead hold up nobody
                os.utime(clean.files.local_path(file.path), (file.modified - 200,) * 2)
            act(clean)
        assert state(clean) == expected
        assert whole(clean)
    assert fatal >= 4


@contextmanager
def disk_full_at(write: int) -> Iterator[list[int]]:
    """From the given fsync on, the disk is full; yields a list that grows by one at each."""
    seen: list[int] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        seen.append(descriptor)
        if len(seen) >= write:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield seen


def test_a_pull_with_a_fault_at_every_write(library: Path, tmp_path: Path) -> None:
    store = Store.open(str(library))
    for fatal in range(1, MOST):
        dest = tmp_path / f"{fatal}"
        old = pull(store, "latest@1", dest).snapshot
        with disk_full_at(fatal) as writes, suppress(StoreError):
            pull(store, "latest", dest)
        with Snapshot.from_folder(dest) as current:
            assert current.id in {old, store.snapshots.resolve("latest")}
            assert all(current.path(name).read_bytes() for name in current.manifest.content.files)
        if len(writes) < fatal:
            break
        assert pull(store, "latest", dest).snapshot == Snapshot.from_folder(dest).id
        assert not [*dest.rglob(".landing-*")]
    assert fatal > 2
