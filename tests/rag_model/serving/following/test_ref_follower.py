"""Following a ref: the next snapshot is opened while the old one serves, and a bad snapshot is refused."""

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
from tests.fixtures.serving import TIMEOUT, HttpService, Library, make_settings, run_service, wait_until
from tests.fixtures.tiny import save_bert
from tests.fixtures.tiny_rag import save_tiny_rag


class EventLog(Observer):
    """Records the events that the service reports."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.refusals: list[Refusal] = []
        self.problems: list[str] = []
        self.priorities: list[int] = []  # the priority of the follower's thread at each swap

    def on_swap(self, loaded_snapshot: object, seconds: float) -> None:
        self.priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        self.events.append(f"serves {loaded_snapshot.id}")  # type: ignore[attr-defined]

    def on_same_snapshot_named(self, loaded_snapshot: object, served_ref: object) -> None:
        self.events.append(f"renamed {served_ref.number}")  # type: ignore[attr-defined]

    def on_freed(self, snapshot: str) -> None:
        self.events.append(f"freed {snapshot}")

    def on_refused(self, refusal: Refusal) -> None:
        self.refusals.append(refusal)

    def on_poll(self, problem: str) -> None:
        self.problems.append(problem)


def collect_colours(service: HttpService) -> set[str]:
    return {hit["title"].split()[0] for hit in service.search("king", "river")["results"][0]["hits"]}


def test_service_swaps_to_the_snapshot_of_the_ref(library: Library, dest: Path) -> None:
    log = EventLog()
    with run_service(library.url, dest, observer=log) as service:
        assert collect_colours(service) == {"red"}
        number = service.snapshot()["number"]
        library.move(library.blue)
        service.wait_until_served(library.blue)
        assert (service.snapshot()["number"], collect_colours(service)) == (number + 1, {"blue"})
        wait_until(lambda: f"freed {library.red}" in log.events)
        assert service.service.slot.loaded_count == 1
    red, blue = library.red, library.blue
    assert log.events == [f"serves {red}", f"serves {blue}", f"freed {red}", f"freed {blue}"]
    assert set(log.problems) == {""}
    usual_priority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    # The first version is opened with normal priority.
    assert log.priorities == [usual_priority, max(usual_priority, 10)]


def test_move_to_the_same_snapshot_changes_only_the_number(library: Library, dest: Path) -> None:
    log = EventLog()
    with run_service(library.url, dest, make_settings(poll_seconds=0.2), log) as service:
        refs = library.store.refs
        current = refs.find_current("latest")
        assert current is not None
        refs.move("latest", library.red, current.number)
        wait_until(lambda: service.snapshot()["number"] == current.number + 1)
        # The event is reported after the new number is visible.
        wait_until(lambda: log.events == [f"serves {library.red}", f"renamed {current.number + 1}"])


@pytest.mark.parametrize("pinned", ["latest@1", "{red}", "{red:.12}"])
def test_fixed_snapshot_can_be_served(library: Library, dest: Path, pinned: str) -> None:
    with run_service(library.url, dest, ref=pinned.format(red=library.red)) as service:
        library.move(library.blue)
        assert (service.snapshot()["snapshot"], service.snapshot()["number"]) == (library.red, None)


def write_invalid_move(library: Library) -> None:
    numbers = library.store.refs.list_numbers("latest")
    Path(library.url, "refs", "latest", f"{numbers[-1] + 1:08d}.json").write_bytes(b'{"format": 1, "number": ')


def write_move_with_wrong_number(library: Library) -> None:
    folder = Path(library.url, "refs", "latest")
    numbers = library.store.refs.list_numbers("latest")
    shutil.copy(folder / f"{numbers[-1]:08d}.json", folder / f"{numbers[-1] + 1:08d}.json")


def move_to_missing_snapshot(library: Library) -> None:
    current = library.store.refs.find_current("latest")
    assert current is not None
    library.store.refs.move("latest", "0" * 64, current.number)


def move_to_hostile_manifest(library: Library) -> None:
    value = library.store.snapshots.get(library.blue).to_json()
    value["content"]["files"]["../../../escaped"] = next(iter(value["content"]["files"].values()))
    identity = secrets.token_hex(32)
    Path(library.url, "snapshots", f"{identity}.json").write_bytes(encode_json({**value, "id": identity}))
    current = library.store.refs.find_current("latest")
    assert current is not None
    library.store.refs.move("latest", identity, current.number)


def move_to_damaged_snapshot(library: Library) -> None:
    content = library.store.snapshots.get(library.blue).content
    blob = Path(library.url, content.files["index/hnsw.faiss"].path)
    blob.chmod(0o644)
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    library.move(library.blue)


def move_to_snapshot_without_index(library: Library) -> None:
    content = library.store.snapshots.get(library.blue).content
    files = {name: ref for name, ref in content.files.items() if not name.startswith("index/")}
    identity = library.store.snapshots.publish(Manifest(replace(content, files=files, indexes={})))
    tag(library.store, identity, "latest")


def move_to_snapshot_with_wrong_index(library: Library) -> None:
    content = library.store.snapshots.get(library.blue).content
    files = {**content.files, "index/hnsw.faiss": content.files["passages/part-00000.parquet"]}
    tag(library.store, library.store.snapshots.publish(Manifest(replace(content, files=files))), "latest")


BAD_MOVES: list[tuple[Callable[[Library], None], str, bool]] = [
    (write_invalid_move, "not JSON", False),
    (write_move_with_wrong_number, "is numbered as move", False),
    (move_to_missing_snapshot, "is missing", False),
    (move_to_hostile_manifest, "cannot be used", False),
    (move_to_damaged_snapshot, "is damaged", False),
    (move_to_snapshot_without_index, "no index 'hnsw'", True),
    (move_to_snapshot_with_wrong_index, "not a complete faiss index", True),
]


@pytest.mark.parametrize(
    ("make_bad_move", "words", "is_final"), BAD_MOVES, ids=lambda value: getattr(value, "__name__", None)
)
def test_bad_move_is_refused_and_the_old_snapshot_stays_current(
    make_bad_move: Callable[[Library], None], words: str, is_final: bool, library: Library, dest: Path
) -> None:
    log = EventLog()
    with run_service(library.url, dest, make_settings(retrievers=("hnsw",)), log) as service:
        make_bad_move(library)
        refusal = service.wait_until_refused(words)
        assert (refusal["final"], "\n" in refusal["reason"]) == (is_final, False)
        assert service.client.get("/readyz").status_code == 200
        assert collect_colours(service) == {"red"}
        poll_count = len(log.problems)
        wait_until(lambda: len(log.problems) > poll_count + 3)
        assert (len(log.refusals) == 1) == is_final
        assert not list(dest.parent.rglob("escaped"))
        if make_bad_move is write_invalid_move:
            next(iter(sorted(Path(library.url, "refs", "latest").iterdir(), reverse=True))).unlink()
            wait_until(lambda: service.snapshot()["refused"] is None)
    assert log.events == [f"serves {library.red}", f"freed {library.red}"]


def test_next_move_ends_a_refusal(library: Library, dest: Path) -> None:
    with run_service(library.url, dest, make_settings(retrievers=("hnsw",))) as service:
        move_to_snapshot_without_index(library)
        service.wait_until_refused("no index")
        library.move(library.blue)
        service.wait_until_served(library.blue)
        assert service.snapshot()["refused"] is None


def test_restored_blob_is_served_without_another_move(library: Library, dest: Path) -> None:
    content = library.store.snapshots.get(library.blue).content
    blob = Path(library.url, content.files["index/hnsw.faiss"].path)
    undamaged = blob.read_bytes()
    with run_service(library.url, dest) as service:
        move_to_damaged_snapshot(library)
        service.wait_until_refused("is damaged")
        blob.write_bytes(undamaged)
        service.wait_until_served(library.blue)


def test_a_model_of_another_space_refuses_the_snapshot(library: Library, dest: Path, tmp_path: Path) -> None:
    model = save_tiny_rag(tmp_path / "rag", save_bert(tmp_path / "other", seed=2))
    failures: list[BookwheelError] = []
    with run_service(library.url, dest, ready=False, on_fatal=failures.append, model=str(model)) as service:
        wait_until(lambda: failures)
        assert service.client.get("/readyz").status_code == 503
    assert "cannot search a snapshot" in str(failures[0])


def test_too_large_snapshot_is_refused(library: Library, dest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_service(library.url, dest, make_settings(in_memory=True)) as service:
        monkeypatch.setattr("rag_model.serving.answering.available_retrievers.get_free_bytes", lambda: 100)
        library.move(library.blue)
        assert "--in-memory" in service.wait_until_refused("of memory")["reason"]
        monkeypatch.undo()
        service.wait_until_served(library.blue)


def find_texts(dest: Path, colour: str) -> list[Path]:
    """Return the files below a folder that contain passages of the red or the blue snapshot."""
    files = [Path(folder, name) for folder, _, names in os.walk(dest) for name in names]  # may be deleted meanwhile
    return [path for path in files if f"{colour} river".encode() in read_text(path)]


def read_text(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return b""
    try:
        return str(pyarrow.parquet.read_table(pyarrow.BufferReader(data)).to_pylist()).encode()
    except pyarrow.ArrowInvalid:
        return data


def test_snapshot_that_was_taken_down_is_replaced_and_deleted(library: Library, dest: Path) -> None:
    with run_service(library.url, dest, make_settings(keep=5)) as service:
        assert find_texts(dest, "red")
        library.store.takedowns.record_replacement(library.red, library.blue)
        service.wait_until_served(library.blue)
        wait_until(lambda: not find_texts(dest, "red"))
        assert find_texts(dest, "blue")
        assert not (dest / library.red).exists()


def test_earlier_version_that_was_taken_down_is_deleted(
    library: Library, dest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "ranges").write_text("a file, so the cached ranges cannot be deleted")
    monkeypatch.setenv("BOOKWHEEL_CACHE", str(tmp_path / "cache"))
    with run_service(library.url, dest, make_settings(keep=5)) as service:
        library.move(library.blue)
        service.wait_until_served(library.blue)
        wait_until(lambda: service.service.slot.loaded_count == 1)
        assert find_texts(dest, "red")
        library.store.takedowns.record_replacement(library.red, "")
        wait_until(lambda: not find_texts(dest, "red"))
        assert collect_colours(service) == {"blue"}


def test_a_service_needs_no_home_directory(library: Library, dest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("BOOKWHEEL_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", find_no_home)
    with run_service(library.url, dest) as service:
        library.store.takedowns.record_replacement(library.red, library.blue)
        service.wait_until_served(library.blue)


def test_snapshot_without_a_replacement_is_not_served_after_its_takedown(library: Library, dest: Path) -> None:
    log = EventLog()
    with run_service(library.url, dest, observer=log) as service:
        library.store.takedowns.record_replacement(library.red, "")
        wait_until(lambda: service.client.get("/readyz").status_code == 503)
        assert service.client.post("/search", json={"questions": ["who?"]}).status_code == 503
        wait_until(lambda: not find_texts(dest, "red"))
        assert not (dest / "current").is_symlink()
        assert f"freed {library.red}" in log.events
        library.move(library.blue)
        service.wait_until_served(library.blue)


def test_snapshot_is_not_served_after_its_takedown_if_the_replacement_is_refused(library: Library, dest: Path) -> None:
    settings, failures = make_settings(retrievers=("hnsw",)), list[BookwheelError]()
    with run_service(library.url, dest, settings, on_fatal=failures.append) as service:
        content = library.store.snapshots.get(library.blue).content
        files = {name: ref for name, ref in content.files.items() if not name.startswith("index/")}
        without_index = library.store.snapshots.publish(Manifest(replace(content, files=files, indexes={})))
        library.store.takedowns.record_replacement(library.red, without_index)
        wait_until(lambda: "no index 'hnsw'" in service.client.get("/readyz").text)
        wait_until(lambda: not find_texts(dest, "red"))
        number = library.store.refs.list_numbers("latest")[-1]
        library.store.refs.move("latest", without_index, number)
        wait_until(lambda: (refusal := service.service.follower.refusal) and refusal.number == number + 1)
        library.move(library.blue)
        service.wait_until_served(library.blue)
    assert failures == []


def test_takedown_takes_effect_while_a_requested_snapshot_cannot_be_opened(
    library: Library, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> int:
        raise MemoryError

    with run_service(library.url, dest, make_settings(pin_seconds=2 * TIMEOUT)) as service:
        monkeypatch.setattr("rag_model.serving.answering.available_retrievers.get_free_bytes", fail)
        request = {"queries": ["king"], "topk": 1}
        assert service.client.post(f"/retrieve?snapshot={library.blue}", json=request).status_code == 503
        library.store.takedowns.record_replacement(library.red, library.blue)
        wait_until(lambda: service.client.get("/readyz").status_code == 503)
        wait_until(lambda: not find_texts(dest, "red"))
        reply = service.client.post(f"/retrieve?snapshot={library.blue}", json=request)
        assert "cannot be opened now" in reply.text


def test_pulled_snapshot_is_not_served_after_its_takedown(library: Library, dest: Path) -> None:
    pull(library.store, library.red, dest)
    library.store.takedowns.record_replacement(library.red, "")
    log = EventLog()
    with run_service(library.url, dest, ready=False, observer=log) as service:
        wait_until(lambda: not find_texts(dest, "red"))
        assert service.client.get("/readyz").status_code == 503
    assert log.events == []


def test_missing_store_is_reported_and_followed_once_it_is_back(library: Library, dest: Path) -> None:
    log = EventLog()
    with run_service(library.url, dest, observer=log) as service:
        shutil.rmtree(library.url + ".gone", ignore_errors=True)
        hidden_store = Path(library.url).rename(library.url + ".gone")
        wait_until(lambda: service.snapshot()["store_problem"] or service.snapshot()["refused"])
        assert collect_colours(service) == {"red"}
        assert service.client.get("/readyz").status_code == 200
        hidden_store.rename(library.url)
        library.move(library.blue)
        service.wait_until_served(library.blue)
        assert service.snapshot()["store_problem"] is None


def test_unreachable_s3_store_is_reported_and_followed_once_it_is_back(
    library: Library,
    dest: Path,
    faulty_server: FaultyServer,
    s3_bucket: Callable[[str], AbstractContextManager[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rag_model.store.objects.buckets._PAUSE_SECONDS", 0.001)
    log = EventLog()
    with s3_bucket(faulty_server.url) as url:
        store = Store.open(url, create=True)
        for path in sorted(Path(library.url).rglob("*")):
            relative = path.relative_to(library.url).as_posix()
            if path.is_file() and relative.split("/")[0] in {"blobs", "snapshots", "refs"}:
                store.files.create(relative, path.read_bytes())
        with run_service(url, dest, observer=log) as service:
            faulty_server.fault = lambda request: "refuse"
            wait_until(lambda: service.snapshot()["store_problem"])
            poll_count = len(log.problems)
            wait_until(lambda: len(log.problems) > poll_count + 2)
            assert all(log.problems[poll_count:])
            assert "bookwheel-secret" not in "".join(log.problems)
            assert collect_colours(service) == {"red"}
            faulty_server.fault = lambda request: None
            wait_until(lambda: service.snapshot()["store_problem"] is None)
            tag(store, library.blue, "latest")
            service.wait_until_served(library.blue)
            faulty_server.fault = lambda request: None


def test_pulled_snapshot_is_served_while_the_store_is_missing(library: Library, dest: Path) -> None:
    pull(library.store, "latest", dest)
    hidden_store = Path(library.url).rename(library.url + ".gone")
    with run_service(library.url, dest) as service:
        assert collect_colours(service) == {"red"}
        assert (service.snapshot()["number"], service.snapshot()["store_problem"] is None) == (None, False)
        hidden_store.rename(library.url)
        wait_until(lambda: service.snapshot()["number"] is not None)
        library.move(library.blue)
        service.wait_until_served(library.blue)


def test_pulled_snapshot_of_another_ref_or_store_is_not_served(library: Library, dest: Path) -> None:
    with run_service(library.url, dest):
        pass
    other_store = shutil.copytree(library.url, library.url + ".other")
    hidden_store = Path(library.url).rename(library.url + ".gone")
    shutil.rmtree(other_store)
    assert FollowedRef(library.url, "latest", dest).find_last_pulled() == dest / library.red
    for url, ref in ((library.url, "typo"), (str(other_store), "latest")):
        log = EventLog()
        with run_service(url, dest, observer=log, ready=False, ref=ref):
            wait_until(lambda log=log: len(log.problems) > 2)  # type: ignore[misc]
        assert log.events == []
    hidden_store.rename(library.url)


def test_missing_ref_is_fatal_only_at_the_start(library: Library, dest: Path) -> None:
    pull(library.store, "latest", dest)
    untag(library.store, "latest")
    failures: list[BookwheelError] = []
    with run_service(library.url, dest, ready=False, on_fatal=failures.append) as service:
        wait_until(lambda: failures)
        assert service.service.slot.current is None
        assert "no snapshot or ref 'latest'" in str(failures[0])
        library.move(library.red)
        service.wait_until_served(library.red)
        failures.clear()
        untag(library.store, "latest")
        service.wait_until_refused("no snapshot or ref 'latest'")
        assert (collect_colours(service), failures) == ({"red"}, [])


def test_old_snapshots_are_deleted(library: Library, dest: Path) -> None:
    with run_service(library.url, dest, make_settings(keep=1)) as service:
        for snapshot in (library.blue, library.red, library.blue):
            library.move(snapshot)
            service.wait_until_served(snapshot)
            wait_until(lambda: service.service.slot.loaded_count == 1)
        pulled_snapshots = [path.name for path in dest.iterdir() if len(path.name) == 64]
        assert library.blue in pulled_snapshots
        assert len(pulled_snapshots) <= 2


@pytest.mark.parametrize(("in_memory", "ref_moves"), [(True, 2), (False, 6)])
def test_many_swaps_leave_no_mapped_files(in_memory: bool, ref_moves: int, library: Library, dest: Path) -> None:
    log = EventLog()
    with run_service(library.url, dest, make_settings(in_memory=in_memory), log) as service:
        for number in range(ref_moves):
            snapshot = (library.blue, library.red)[number % 2]
            library.move(snapshot)
            service.wait_until_served(snapshot)
            service.search("who?")
        wait_until(lambda: service.service.slot.loaded_count == 1)
        maps = Path("/proc/self/maps").read_text()
        index_maps = [line for line in maps.splitlines() if str(dest) in line and line.endswith("index/hnsw.faiss")]
        assert len(index_maps) == (0 if in_memory else 1)
        assert f"{library.blue}/" not in maps
    assert sum(line.startswith("freed") for line in log.events) == ref_moves + 1
    assert str(dest) not in Path("/proc/self/maps").read_text()
