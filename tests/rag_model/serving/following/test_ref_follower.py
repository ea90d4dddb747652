"""Following a ref: the next snapshot while the one before serves, and what is wrong with a new one stays outside."""

import os
import secrets
import shutil
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rag_model.errors import BookwheelError
from rag_model.serving.following.follower import FollowedRef
from rag_model.serving.monitoring.observer import Observer, Refusal
from rag_model.store.objects.files import encode_json
from rag_model.store.pulling.pull import pull
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Manifest
from rag_model.store.versions.moves import tag, untag
from tests.fixtures.s3_proxy import FaultyServer
from tests.fixtures.serving import Library, Serving, serving, until, with_limits
from tests.fixtures.tiny import save_bert
from tests.fixtures.tiny_rag import save_tiny_rag


class Log(Observer):
    """Remembers what was told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.refusals: list[Refusal] = []
        self.problems: list[str] = []
        self.priorities: list[int] = []  # of the follower before each swap

    def on_swap(self, edition: object, seconds: float) -> None:
        self.priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        self.told.append(f"serves {edition.id}")  # type: ignore[attr-defined]

    def on_ref_moved(self, edition: object, named: object) -> None:
        self.told.append(f"renamed {named.number}")  # type: ignore[attr-defined]

    def on_freed(self, snapshot: str) -> None:
        self.told.append(f"freed {snapshot}")

    def on_refused(self, refusal: Refusal) -> None:
        self.refusals.append(refusal)

    def on_poll(self, problem: str) -> None:
        self.problems.append(problem)


def colours(found: Serving) -> set[str]:
    return {hit["title"].split()[0] for hit in found.search("king", "river")["results"][0]["hits"]}


def test_it_changes_to_what_the_ref_names(library: Library, dest: Path) -> None:
    log = Log()
    with serving(library.url, dest, observer=log) as found:
        assert colours(found) == {"red"}
        number = found.snapshot()["number"]
        library.move(library.blue)
        found.until_served(library.blue)
        assert (found.snapshot()["number"], colours(found)) == (number + 1, {"blue"})
        until(lambda: f"freed {library.red}" in log.told)
        assert found.service.slot.loaded_count == 1
    red, blue = library.red, library.blue
    assert log.told == [f"serves {red}", f"serves {blue}", f"freed {red}", f"freed {blue}"]
    assert set(log.problems) == {""}
    usual_priority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert log.priorities == [usual_priority, max(usual_priority, 10)], "the first version is opened at once"


def test_a_ref_that_names_the_same_again_changes_its_number_alone(library: Library, dest: Path) -> None:
    log = Log()
    with serving(library.url, dest, with_limits(poll_seconds=0.2), log) as found:
        refs = library.store.refs
        now = refs.find_current("latest")
        assert now is not None
        refs.move("latest", library.red, now.number)
        until(lambda: found.snapshot()["number"] == now.number + 1)
        until(lambda: log.told == [f"serves {library.red}", f"renamed {now.number + 1}"])  # told after it is shown


@pytest.mark.parametrize("pinned", ["latest@1", "{red}", "{red:.12}"])
def test_what_never_moves_can_be_served(library: Library, dest: Path, pinned: str) -> None:
    with serving(library.url, dest, ref=pinned.format(red=library.red)) as found:
        library.move(library.blue)
        assert (found.snapshot()["snapshot"], found.snapshot()["number"]) == (library.red, None)


def poison_with_garbage(library: Library) -> None:
    numbers = library.store.refs.list_numbers("latest")
    Path(library.url, "refs", "latest", f"{numbers[-1] + 1:08d}.json").write_bytes(b'{"format": 1, "number": ')


def poison_with_another_number(library: Library) -> None:
    folder = Path(library.url, "refs", "latest")
    numbers = library.store.refs.list_numbers("latest")
    shutil.copy(folder / f"{numbers[-1]:08d}.json", folder / f"{numbers[-1] + 1:08d}.json")


def name_what_is_missing(library: Library) -> None:
    now = library.store.refs.find_current("latest")
    assert now is not None
    library.store.refs.move("latest", "0" * 64, now.number)


def name_a_hostile_manifest(library: Library) -> None:
    value = library.store.snapshots.get(library.blue).to_json()
    value["content"]["files"]["../../../escaped"] = next(iter(value["content"]["files"].values()))
    identity = secrets.token_hex(32)
    Path(library.url, "snapshots", f"{identity}.json").write_bytes(encode_json({**value, "id": identity}))
    now = library.store.refs.find_current("latest")
    assert now is not None
    library.store.refs.move("latest", identity, now.number)


def damage_a_blob(library: Library) -> None:
    content = library.store.snapshots.get(library.blue).content
    blob = Path(library.url, content.files["index/hnsw.faiss"].path)
    blob.chmod(0o644)
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    library.move(library.blue)


def name_one_without_the_index(library: Library) -> None:
    content = library.store.snapshots.get(library.blue).content
    files = {name: ref for name, ref in content.files.items() if not name.startswith("index/")}
    identity = library.store.snapshots.publish(Manifest(replace(content, files=files, indexes={})))
    tag(library.store, identity, "latest")


def name_one_whose_index_is_another(library: Library) -> None:
    content = library.store.snapshots.get(library.blue).content
    files = {**content.files, "index/hnsw.faiss": content.files["passages/part-00000.parquet"]}
    tag(library.store, library.store.snapshots.publish(Manifest(replace(content, files=files))), "latest")


POISONS: list[tuple[Callable[[Library], None], str, bool]] = [
    (poison_with_garbage, "not JSON", False),
    (poison_with_another_number, "is numbered as move", False),
    (name_what_is_missing, "is missing", False),
    (name_a_hostile_manifest, "cannot be used", False),
    (damage_a_blob, "is damaged", False),
    (name_one_without_the_index, "no index 'hnsw'", True),
    (name_one_whose_index_is_another, "not a complete faiss index", True),
]


@pytest.mark.parametrize(("poison", "words", "final"), POISONS, ids=[poison.__name__ for poison, _, _ in POISONS])
def test_a_poisoned_ref_is_refused_and_the_old_one_serves_on(
    poison: Callable[[Library], None], words: str, final: bool, library: Library, dest: Path
) -> None:
    log = Log()
    with serving(library.url, dest, with_limits(retrievers=("hnsw",)), log) as found:
        poison(library)
        told = found.until_refused(words)
        assert (told["final"], "\n" in told["reason"]) == (final, False)
        assert found.client.get("/readyz").status_code == 200
        assert colours(found) == {"red"}
        looks = len(log.problems)
        until(lambda: len(log.problems) > looks + 3)
        assert (len(log.refusals) == 1) == final
        assert not list(dest.parent.rglob("escaped"))
        if poison is poison_with_garbage:
            next(iter(sorted(Path(library.url, "refs", "latest").iterdir(), reverse=True))).unlink()
            until(lambda: found.snapshot()["refused"] is None)
    assert log.told == [f"serves {library.red}", f"freed {library.red}"]


def test_the_next_move_ends_a_refusal(library: Library, dest: Path) -> None:
    with serving(library.url, dest, with_limits(retrievers=("hnsw",))) as found:
        name_one_without_the_index(library)
        found.until_refused("no index")
        library.move(library.blue)
        found.until_served(library.blue)
        assert found.snapshot()["refused"] is None


def test_a_blob_that_is_restored_is_taken_without_another_move(library: Library, dest: Path) -> None:
    content = library.store.snapshots.get(library.blue).content
    blob = Path(library.url, content.files["index/hnsw.faiss"].path)
    sound = blob.read_bytes()
    with serving(library.url, dest) as found:
        damage_a_blob(library)
        found.until_refused("is damaged")
        blob.write_bytes(sound)
        found.until_served(library.blue)


def test_a_model_of_another_space_refuses_the_snapshot(library: Library, dest: Path, tmp_path: Path) -> None:
    model = save_tiny_rag(tmp_path / "rag", save_bert(tmp_path / "other", seed=2))
    failures: list[BookwheelError] = []
    with serving(library.url, dest, ready=False, on_fatal=failures.append, model=str(model)) as found:
        until(lambda: failures)
        assert found.client.get("/readyz").status_code == 503
    assert "cannot search a snapshot" in str(failures[0])


def test_an_edition_that_does_not_fit_is_refused(library: Library, dest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(library.url, dest, with_limits(in_memory=True)) as found:
        monkeypatch.setattr("rag_model.serving.answering.loaded_snapshot.get_free_bytes", lambda: 100)
        library.move(library.blue)
        assert "--in-memory" in found.until_refused("of memory")["reason"]
        monkeypatch.undo()
        found.until_served(library.blue)


def texts_of(dest: Path, colour: str) -> list[Path]:
    """Return the files below a folder that hold the passages of a colour."""
    files = [Path(folder, name) for folder, _, names in os.walk(dest) for name in names]  # which may go meanwhile
    return [path for path in files if f"{colour} river".encode() in unpacked(path)]


def unpacked(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return b""
    try:
        return str(pyarrow.parquet.read_table(pyarrow.BufferReader(data)).to_pylist()).encode()
    except pyarrow.ArrowInvalid:
        return data


def test_a_snapshot_that_was_taken_down_makes_way_and_its_text_leaves_the_disk(library: Library, dest: Path) -> None:
    with serving(library.url, dest, with_limits(keep=5)) as found:
        assert texts_of(dest, "red")
        library.store.takedowns.record_replacement(library.red, library.blue)
        found.until_served(library.blue)
        until(lambda: not texts_of(dest, "red"))
        assert texts_of(dest, "blue")
        assert not (dest / library.red).exists()


def test_a_version_before_that_was_taken_down_leaves_the_disk(
    library: Library, dest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "ranges").write_text("no folder, so the cached ranges in it cannot be deleted")
    monkeypatch.setenv("BOOKWHEEL_CACHE", str(tmp_path / "cache"))
    with serving(library.url, dest, with_limits(keep=5)) as found:
        library.move(library.blue)
        found.until_served(library.blue)
        until(lambda: found.service.slot.loaded_count == 1)
        assert texts_of(dest, "red")
        library.store.takedowns.record_replacement(library.red, "")
        until(lambda: not texts_of(dest, "red"))
        assert colours(found) == {"blue"}


def test_a_service_needs_no_home_directory(library: Library, dest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("BOOKWHEEL_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", find_no_home)
    with serving(library.url, dest) as found:
        library.store.takedowns.record_replacement(library.red, library.blue)
        found.until_served(library.blue)


def test_what_was_taken_down_without_a_replacement_is_not_served(library: Library, dest: Path) -> None:
    log = Log()
    with serving(library.url, dest, observer=log) as found:
        library.store.takedowns.record_replacement(library.red, "")
        until(lambda: found.client.get("/readyz").status_code == 503)
        assert found.client.post("/search", json={"questions": ["who?"]}).status_code == 503
        until(lambda: not texts_of(dest, "red"))
        assert not (dest / "current").is_symlink()
        assert f"freed {library.red}" in log.told
        library.move(library.blue)
        found.until_served(library.blue)


def test_what_was_taken_down_is_not_served_where_its_replacement_is_refused(library: Library, dest: Path) -> None:
    with serving(library.url, dest, with_limits(retrievers=("hnsw",))) as found:
        content = library.store.snapshots.get(library.blue).content
        files = {name: ref for name, ref in content.files.items() if not name.startswith("index/")}
        without = library.store.snapshots.publish(Manifest(replace(content, files=files, indexes={})))
        library.store.takedowns.record_replacement(library.red, without)
        until(lambda: "no index 'hnsw'" in found.client.get("/readyz").text)
        until(lambda: not texts_of(dest, "red"))
        library.move(library.blue)
        found.until_served(library.blue)


def test_what_was_taken_down_while_the_service_was_off_is_not_served_from_the_disk(
    library: Library, dest: Path
) -> None:
    pull(library.store, library.red, dest)
    library.store.takedowns.record_replacement(library.red, "")
    log = Log()
    with serving(library.url, dest, ready=False, observer=log) as found:
        until(lambda: not texts_of(dest, "red"))
        assert found.client.get("/readyz").status_code == 503
    assert log.told == []


def test_a_store_that_is_gone_is_told_and_followed_again(library: Library, dest: Path) -> None:
    log = Log()
    with serving(library.url, dest, observer=log) as found:
        shutil.rmtree(library.url + ".gone", ignore_errors=True)
        gone = Path(library.url).rename(library.url + ".gone")
        until(lambda: found.snapshot()["store_problem"] or found.snapshot()["refused"])
        assert colours(found) == {"red"}
        assert found.client.get("/readyz").status_code == 200
        gone.rename(library.url)
        library.move(library.blue)
        found.until_served(library.blue)
        assert found.snapshot()["store_problem"] is None


def test_an_s3_store_that_is_gone_is_told_and_followed_again(
    library: Library,
    dest: Path,
    faulty_server: FaultyServer,
    s3_bucket: Callable[[str], AbstractContextManager[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rag_model.store.objects.s3._PAUSE_SECONDS", 0.001)
    log = Log()
    with s3_bucket(faulty_server.url) as url:
        store = Store.open(url, create=True)
        for path in sorted(Path(library.url).rglob("*")):
            relative = path.relative_to(library.url).as_posix()
            if path.is_file() and relative.split("/")[0] in {"blobs", "snapshots", "refs"}:
                store.files.create(relative, path.read_bytes())
        with serving(url, dest, observer=log) as found:
            faulty_server.fault = lambda request: "refuse"
            until(lambda: found.snapshot()["store_problem"])
            looks = len(log.problems)
            until(lambda: len(log.problems) > looks + 2)
            assert all(log.problems[looks:])
            assert "bookwheel-secret" not in "".join(log.problems)
            assert colours(found) == {"red"}
            faulty_server.fault = lambda request: None
            until(lambda: found.snapshot()["store_problem"] is None)
            tag(store, library.blue, "latest")
            found.until_served(library.blue)
            faulty_server.fault = lambda request: None


def test_what_is_on_the_disk_is_served_where_the_store_is_not(library: Library, dest: Path) -> None:
    pull(library.store, "latest", dest)
    gone = Path(library.url).rename(library.url + ".gone")
    with serving(library.url, dest) as found:
        assert colours(found) == {"red"}
        assert (found.snapshot()["number"], found.snapshot()["store_problem"] is None) == (None, False)
        gone.rename(library.url)
        until(lambda: found.snapshot()["number"] is not None)
        library.move(library.blue)
        found.until_served(library.blue)


def test_what_another_ref_or_store_left_on_the_disk_is_not_served(library: Library, dest: Path) -> None:
    with serving(library.url, dest):
        pass
    other = shutil.copytree(library.url, library.url + ".other")
    gone = Path(library.url).rename(library.url + ".gone")
    shutil.rmtree(other)
    assert FollowedRef(library.url, "latest", dest).find_last_pulled() == dest / library.red
    for url, ref in ((library.url, "typo"), (str(other), "latest")):
        log = Log()
        with serving(url, dest, observer=log, ready=False, ref=ref):
            until(lambda log=log: len(log.problems) > 2)  # type: ignore[misc]
        assert log.told == []
    gone.rename(library.url)


def test_a_ref_that_the_store_does_not_have_is_hopeless_at_the_start_alone(library: Library, dest: Path) -> None:
    pull(library.store, "latest", dest)
    untag(library.store, "latest")
    failures: list[BookwheelError] = []
    with serving(library.url, dest, ready=False, on_fatal=failures.append) as found:
        until(lambda: failures)
        assert found.service.slot.current is None
        assert "no snapshot or ref 'latest'" in str(failures[0])
        library.move(library.red)
        found.until_served(library.red)
        failures.clear()
        untag(library.store, "latest")
        found.until_refused("no snapshot or ref 'latest'")
        assert (colours(found), failures) == ({"red"}, [])


def test_old_snapshots_leave_the_disk(library: Library, dest: Path) -> None:
    with serving(library.url, dest, with_limits(keep=1)) as found:
        for snapshot in (library.blue, library.red, library.blue):
            library.move(snapshot)
            found.until_served(snapshot)
            until(lambda: found.service.slot.loaded_count == 1)
        kept = [path.name for path in dest.iterdir() if len(path.name) == 64]
        assert library.blue in kept
        assert len(kept) <= 2


@pytest.mark.parametrize(("loaded", "changes"), [(True, 4), (False, 20)])
def test_many_changes_leave_nothing_behind(loaded: bool, changes: int, library: Library, dest: Path) -> None:
    log = Log()
    with serving(library.url, dest, with_limits(in_memory=loaded), log) as found:
        for number in range(changes):
            snapshot = (library.blue, library.red)[number % 2]
            library.move(snapshot)
            found.until_served(snapshot)
            found.search("who?")
        until(lambda: found.service.slot.loaded_count == 1)
        mapped = Path("/proc/self/maps").read_text()
        actual = [line for line in mapped.splitlines() if str(dest) in line and line.endswith("index/hnsw.faiss")]
        assert len(actual) == (0 if loaded else 1)
        assert f"{library.blue}/" not in mapped
    assert sum(line.startswith("freed") for line in log.told) == changes + 1
    assert str(dest) not in Path("/proc/self/maps").read_text()
