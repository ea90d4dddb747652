"""Earlier snapshots leave a folder that is pulled to, but none that somebody reads, nor anything still needed."""

import gc as cycles
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rag_model.errors import NotFoundError, StoreError, UsageError
from rag_model.store import Snapshot, Store
from rag_model.store.pulling.folder import lock_folder, remove_snapshots
from rag_model.store.pulling.pull import pull

VECTORS = "embeddings/part-00000.npy"


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "dest"


@pytest.fixture
def versions(local_store: Store, publish: Callable[..., str]) -> list[str]:
    """Four snapshots that share some files, oldest first."""
    return [publish(local_store, words=words) for words in (10, 20, 30, 40)]


def there(dest: Path) -> set[str]:
    return {path.name for path in dest.iterdir() if len(path.name) == 64}


def copies(dest: Path) -> set[str]:
    return {path.name for path in (dest / ".blobs").glob("??/*")}


def named(store: Store, *snapshots: str) -> set[str]:
    files = (store.snapshots.get(snapshot).content.files.values() for snapshot in snapshots)
    return {ref.id.partition(":")[2] for refs in files for ref in refs}


def test_those_pulled_last_stay_and_the_files_of_the_others_go(
    local_store: Store, versions: list[str], dest: Path
) -> None:
    a, b, c, d = versions
    for snapshot in (b, a, c):
        assert pull(local_store, snapshot, dest).pruned == ()
    pull(local_store, b, dest)  # it was pulled first, and again
    assert set(pull(local_store, d, dest, keep=2).pruned) == {a, c}
    assert there(dest) == {b, d}
    assert copies(dest) == named(local_store, b, d)
    mapped = {path.stem for path in (dest / ".mapped").iterdir()}
    assert mapped <= copies(dest)
    assert all(
        path.name.removeprefix("mapped-").partition("-")[0] in copies(dest) for path in (dest / ".verified").iterdir()
    )
    for snapshot in (b, d):
        with Snapshot.from_folder(dest / snapshot) as pulled:
            assert pulled.passages([1500])[0].text == "text 1500"
    assert pull(local_store, d, dest, keep=1).pruned == (b,)
    assert pull(local_store, a, dest, keep=5).pruned == ()


def test_what_was_taken_down_is_told_and_goes_where_something_is_kept(
    local_store: Store, versions: list[str], dest: Path
) -> None:
    a, b, c, d = versions
    for snapshot in (a, b, c):
        pull(local_store, snapshot, dest)
    local_store.takedowns.record_replacement(b, d)
    local_store.takedowns.record_replacement(c, "")
    assert pull(local_store, d, dest).taken_down == tuple(sorted((b, c)))
    assert there(dest) == {a, b, c, d}
    with Snapshot.from_folder(dest / c):
        kept = pull(local_store, d, dest, keep=9)
        assert (kept.pruned, kept.taken_down) == ((b,), (c,))  # one that is read
    assert (pull(local_store, d, dest, keep=9).pruned, there(dest)) == ((c,), {a, d})
    assert copies(dest) == named(local_store, a, d)


def test_a_snapshot_that_is_taken_down_during_its_pull_leaves_no_file(
    local_store: Store, versions: list[str], dest: Path
) -> None:
    a, b, *_ = versions
    pull(local_store, a, dest)
    with pytest.raises(NotFoundError, match=f"snapshot {b[:12]} was taken down while it was pulled"):
        pull(local_store, b, dest, on_progress=lambda done, total: local_store.takedowns.record_replacement(b, a))
    assert (there(dest), copies(dest)) == ({a}, named(local_store, a))
    assert (dest / "current").resolve().name == a


def test_a_folder_is_rid_of_what_was_taken_down_though_it_is_the_current_one(
    local_store: Store, versions: list[str], dest: Path
) -> None:
    a, b, *_ = versions
    parse = local_store.snapshots.parse
    assert remove_snapshots(dest, {a}, parse) == ()
    pull(local_store, b, dest)
    pull(local_store, a, dest)
    assert remove_snapshots(dest, {a}, parse) == (a,)
    assert (there(dest), copies(dest)) == ({b}, named(local_store, b))
    assert not (dest / "current").is_symlink()


def test_what_is_read_stays_however_late_its_files_are_opened(
    local_store: Store, versions: list[str], dest: Path
) -> None:
    pull(local_store, versions[0], dest)
    reader = Snapshot.from_folder(dest)
    assert pull(local_store, versions[1], dest, keep=1).pruned == ()
    assert there(dest) == {*versions[:2]}
    assert reader.passages([7])[0].text == "text 7"
    reader.close()
    forgotten = Snapshot.from_folder(dest)  # of the second: whoever forgets to close it holds it no longer, either
    assert set(pull(local_store, versions[2], dest, keep=1).pruned) == {versions[0]}
    del forgotten
    cycles.collect()
    assert set(pull(local_store, versions[3], dest, keep=1).pruned) == {*versions[1:3]}


def test_a_reader_in_another_process_is_respected(local_store: Store, versions: list[str], dest: Path) -> None:
    pull(local_store, versions[0], dest)
    script = (
        "import sys; from pathlib import Path; from rag_model.store.versions.snapshot import Snapshot\n"
        "opened = Snapshot.from_folder(Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()\n"
        "print(opened.passages([7])[0].text)"
    )
    command = [sys.executable, "-c", script, str(dest)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        assert pull(local_store, versions[1], dest, keep=1).pruned == ()
        assert process.communicate("")[0] == "text 7\n"
    assert pull(local_store, versions[1], dest, keep=1).pruned == (versions[0],)


def test_nothing_goes_while_another_pull_is_at_work(local_store: Store, versions: list[str], dest: Path) -> None:
    pull(local_store, versions[0], dest)
    with lock_folder(dest):
        assert pull(local_store, versions[1], dest, keep=1).pruned == ()
    left = dest / ".landing-dead"
    left.mkdir()
    assert pull(local_store, versions[1], dest, keep=1).pruned == (versions[0],)
    assert not left.exists()


def test_a_reader_that_comes_while_what_it_found_goes_takes_what_came_then(
    local_store: Store, versions: list[str], dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull(local_store, versions[0], dest)
    resolve = Path.resolve
    looked: list[Path] = []

    def late(path: Path, strict: bool = False) -> Path:
        found = resolve(path, strict)
        if path.name == "current" and not looked:
            looked.append(found)
            pull(local_store, versions[1], dest, keep=1)
        return found

    monkeypatch.setattr(Path, "resolve", late)
    with Snapshot.from_folder(dest) as reader:
        assert reader.id == versions[1]
    assert there(dest) == {versions[1]}


def test_a_manifest_that_cannot_be_read_keeps_all_files(local_store: Store, versions: list[str], dest: Path) -> None:
    pull(local_store, versions[0], dest)
    before = copies(dest)
    pull(local_store, versions[1], dest)
    (dest / versions[1] / "manifest.json").write_text("{}")
    pull(local_store, versions[2], dest, keep=2)
    assert there(dest) == {*versions[1:3]}
    assert before <= copies(dest)
    with pytest.raises(StoreError):
        Snapshot.from_folder(dest / versions[1])


def test_to_keep_none_is_refused_before_anything_is_fetched(
    local_store: Store, versions: list[str], dest: Path
) -> None:
    with pytest.raises(UsageError, match="keep must be at least 1, not 0"):
        pull(local_store, versions[0], dest, keep=0)
    assert not dest.exists()
