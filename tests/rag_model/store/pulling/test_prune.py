"""A pull deletes earlier snapshots from its folder, except those in use and files still needed."""

import gc as garbage
import subprocess
import sys
from pathlib import Path

import pytest

from rag_model.errors import NotFoundError, StoreError, UsageError
from rag_model.store import Snapshot, Store
from rag_model.store.pulling.folder import lock_pull_folder, remove_taken_down
from rag_model.store.pulling.pull import pull
from tests.fixtures.store_files import publish_parts


@pytest.fixture
def snapshot_ids(store: Store) -> list[str]:
    """Publish four snapshots that share files; return their ids, oldest first."""
    return [publish_parts(store, words=words) for words in (10, 20, 30, 40)]


def list_snapshot_ids(dest: Path) -> set[str]:
    return {path.name for path in dest.iterdir() if len(path.name) == 64}


def list_copies(dest: Path) -> set[str]:
    return {path.name for path in (dest / ".blobs").glob("??/*")}


def list_digests(store: Store, *snapshots: str) -> set[str]:
    files = (store.snapshots.get(snapshot).content.files.values() for snapshot in snapshots)
    return {ref.id.partition(":")[2] for refs in files for ref in refs}


def test_last_pulled_snapshots_are_kept(store: Store, snapshot_ids: list[str], dest: Path) -> None:
    a, b, c, d = snapshot_ids
    for snapshot in (b, a, c):
        assert pull(store, snapshot, dest).pruned == ()
    pull(store, b, dest)  # pulling it again makes it recent
    assert set(pull(store, d, dest, keep_snapshots=2).pruned) == {a, c}
    assert list_snapshot_ids(dest) == {b, d}
    assert list_copies(dest) == list_digests(store, b, d)
    mapped = {path.stem for path in (dest / ".mapped").iterdir()}
    assert mapped <= list_copies(dest)
    assert all(
        path.name.removeprefix("mapped-").partition("-")[0] in list_copies(dest)
        for path in (dest / ".verified").iterdir()
    )
    for snapshot in (b, d):
        with Snapshot.from_folder(dest / snapshot) as pulled:
            assert pulled.passages([1500])[0].text == "text 1500"
    assert pull(store, d, dest, keep_snapshots=1).pruned == (b,)
    assert pull(store, a, dest, keep_snapshots=5).pruned == ()


def test_snapshot_that_is_pulled_again_stays_locked_by_its_readers(
    store: Store, snapshot_ids: list[str], dest: Path
) -> None:
    a, b, *_ = snapshot_ids
    pull(store, a, dest)
    with Snapshot.from_folder(dest / a) as reader:
        pull(store, a, dest)
        assert pull(store, b, dest, keep_snapshots=1).pruned == ()
        assert reader.passages([5])[0].text == "text 5"
    (dest / a / "manifest.json").write_text("{}")  # a damaged manifest is replaced
    pull(store, a, dest)
    Snapshot.from_folder(dest / a).close()


def test_pull_reports_and_prunes_snapshots_taken_down(store: Store, snapshot_ids: list[str], dest: Path) -> None:
    a, b, c, d = snapshot_ids
    for snapshot in (a, b, c):
        pull(store, snapshot, dest)
    store.takedowns.record_replacement(b, d)
    store.takedowns.record_replacement(c, "")
    assert pull(store, d, dest).taken_down == tuple(sorted((b, c)))
    assert list_snapshot_ids(dest) == {a, b, c, d}
    with Snapshot.from_folder(dest / c):
        report = pull(store, d, dest, keep_snapshots=9)
        assert (report.pruned, report.taken_down) == ((b,), (c,))  # c is still being read
    assert (pull(store, d, dest, keep_snapshots=9).pruned, list_snapshot_ids(dest)) == ((c,), {a, d})
    assert list_copies(dest) == list_digests(store, a, d)


def test_snapshot_taken_down_during_its_pull_leaves_no_file(store: Store, snapshot_ids: list[str], dest: Path) -> None:
    a, b, *_ = snapshot_ids
    pull(store, a, dest)
    with pytest.raises(NotFoundError, match=f"snapshot {b[:12]} was taken down while it was pulled"):
        pull(store, b, dest, on_progress=lambda done, total: store.takedowns.record_replacement(b, a))
    assert (list_snapshot_ids(dest), list_copies(dest)) == ({a}, list_digests(store, a))
    assert (dest / "current").resolve().name == a


def test_current_snapshot_can_be_removed(store: Store, snapshot_ids: list[str], dest: Path) -> None:
    a, b, *_ = snapshot_ids
    parse = store.snapshots.parse
    assert remove_taken_down(dest, {a}, parse) == ()
    pull(store, b, dest)
    pull(store, a, dest)
    assert remove_taken_down(dest, {a}, parse) == (a,)
    assert (list_snapshot_ids(dest), list_copies(dest)) == ({b}, list_digests(store, b))
    assert not (dest / "current").is_symlink()


def test_snapshot_in_use_is_kept(store: Store, snapshot_ids: list[str], dest: Path) -> None:
    pull(store, snapshot_ids[0], dest)
    reader = Snapshot.from_folder(dest)
    assert pull(store, snapshot_ids[1], dest, keep_snapshots=1).pruned == ()
    assert list_snapshot_ids(dest) == {*snapshot_ids[:2]}
    assert reader.passages([7])[0].text == "text 7"
    reader.close()
    forgotten = Snapshot.from_folder(dest)  # the second snapshot, which is never closed
    assert set(pull(store, snapshot_ids[2], dest, keep_snapshots=1).pruned) == {snapshot_ids[0]}
    del forgotten
    garbage.collect()
    assert set(pull(store, snapshot_ids[3], dest, keep_snapshots=1).pruned) == {*snapshot_ids[1:3]}


def test_snapshot_in_use_by_another_process_is_kept(store: Store, snapshot_ids: list[str], dest: Path) -> None:
    pull(store, snapshot_ids[0], dest)
    script = (
        "import sys; from pathlib import Path; from rag_model.store.versions.snapshot import Snapshot\n"
        "snapshot = Snapshot.from_folder(Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()\n"
        "print(snapshot.passages([7])[0].text)"
    )
    command = [sys.executable, "-c", script, str(dest)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        assert pull(store, snapshot_ids[1], dest, keep_snapshots=1).pruned == ()
        assert process.communicate("")[0] == "text 7\n"
    assert pull(store, snapshot_ids[1], dest, keep_snapshots=1).pruned == (snapshot_ids[0],)


def test_nothing_is_pruned_during_another_pull(store: Store, snapshot_ids: list[str], dest: Path) -> None:
    pull(store, snapshot_ids[0], dest)
    with lock_pull_folder(dest):
        assert pull(store, snapshot_ids[1], dest, keep_snapshots=1).pruned == ()
    leftover = dest / ".landing-dead"
    leftover.mkdir()
    assert pull(store, snapshot_ids[1], dest, keep_snapshots=1).pruned == (snapshot_ids[0],)
    assert not leftover.exists()


def test_reader_uses_the_new_snapshot_if_the_old_one_is_pruned_meanwhile(
    store: Store, snapshot_ids: list[str], dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull(store, snapshot_ids[0], dest)
    resolve = Path.resolve
    targets: list[Path] = []

    def resolve_and_pull(path: Path, strict: bool = False) -> Path:
        target = resolve(path, strict)
        if path.name == "current" and not targets:
            targets.append(target)
            pull(store, snapshot_ids[1], dest, keep_snapshots=1)
        return target

    monkeypatch.setattr(Path, "resolve", resolve_and_pull)
    with Snapshot.from_folder(dest) as reader:
        assert reader.id == snapshot_ids[1]
    assert list_snapshot_ids(dest) == {snapshot_ids[1]}


def test_unreadable_manifest_keeps_all_files(store: Store, snapshot_ids: list[str], dest: Path) -> None:
    pull(store, snapshot_ids[0], dest)
    old_copies = list_copies(dest)
    pull(store, snapshot_ids[1], dest)
    (dest / snapshot_ids[1] / "manifest.json").write_text("{}")
    pull(store, snapshot_ids[2], dest, keep_snapshots=2)
    assert list_snapshot_ids(dest) == {*snapshot_ids[1:3]}
    assert old_copies <= list_copies(dest)
    with pytest.raises(StoreError):
        Snapshot.from_folder(dest / snapshot_ids[1])


def test_keep_of_zero_is_refused_before_fetching(store: Store, snapshot_ids: list[str], dest: Path) -> None:
    with pytest.raises(UsageError, match="keep must be at least 1, not 0"):
        pull(store, snapshot_ids[0], dest, keep_snapshots=0)
    assert not dest.exists()
