"""Builds that are killed, interrupted, out of disk space or in a race; a rerun finishes the same snapshot."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rag_model.store.store import Store
from tests.fixtures.forked_processes import ForkedCommand

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.slow]

Condition = Callable[[Path], object]
SendSignal = Callable[[int, int], None]
WORKER = "--direct_num_workers=1"
DEADLINE = 300.0  # seconds


def wait_until(
    condition: Callable[[], object], description: str, is_running: Callable[[], bool] = lambda: True
) -> None:
    """Return once `condition` holds; fail after the deadline or the end of the process."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"{description} did not come in {DEADLINE:.0f} s"
        assert is_running(), f"the process ended before {description}"
        time.sleep(0.002)


def has_records(stage: str, count: int) -> Condition:
    def check(store: Path) -> bool:
        folder = store / "memo" / stage
        return folder.is_dir() and len(list(folder.glob("*.json"))) >= count

    return check


def has_manifest(store: Path) -> bool:
    return any((store / "snapshots").glob("*.json"))


Beam = tuple[str, ...]
# os.kill kills only the process; os.killpg also kills its children.
MOMENTS: dict[str, tuple[Condition, SendSignal, Beam]] = {
    "at the start": (lambda store: (store / "store.json").exists(), os.kill, ()),
    "after the first part was cut": (has_records("chunk", 1), os.kill, ()),
    "while parts are encoded": (has_records("embed", 1), os.killpg, (WORKER,)),
    "while shards are built": (has_records("train", 1), os.kill, (WORKER,)),
    "while the index is measured": (has_records("merge", 1), os.killpg, ()),
    "between the manifest and the ref": (has_manifest, os.kill, ()),
}


@pytest.fixture
def arguments(mini_dump: Path, tiny: Path, recipe: Path, tmp_path: Path) -> list[str]:
    options = {"dump": mini_dump, "encoder": tiny, "recipe": recipe, "store": tmp_path / "store"}
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def start_build(folder: Path, arguments: list[str], beam: Beam = (WORKER,)) -> ForkedCommand:
    return ForkedCommand(["reindex", *arguments, "--", *beam], folder)


def stop_build(running: ForkedCommand, send: SendSignal, number: int) -> tuple[str, str]:
    """Send a signal, wait for the end of the process and its children, and return the output."""
    children = psutil.Process(running.pid).children(recursive=True)
    send(running.pid, number)
    output = running.communicate(timeout=DEADLINE)
    wait_until(lambda: not any(map(is_alive, children)), f"the end of {children}")
    return output


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def check_finishes(store: Path, reindex: Any, bookwheel: Any, library: Path) -> None:
    """Check that a rerun does only unrecorded work and publishes the snapshot of an undisturbed build."""
    records_before = {path: path.read_bytes() for path in store.glob("memo/**/*.json")}
    encoded = sum(stats["rows"] for stats in read_stats(store, "embed"))

    reply = reindex(store).json
    assert reply["snapshot"] == Store.open(str(library)).snapshots.resolve("latest")
    assert reply["counts"]["reused"] == encoded
    assert reply["counts"]["embedded"] == 247 - encoded
    assert all(path.read_bytes() == data for path, data in records_before.items())
    assert list_records(store) == list_records(library)
    assert len(bookwheel("log", "--store", store, "--json").json) == 1
    assert bookwheel("verify", "--store", store).code == 0


def list_records(store: Path) -> set[Path]:
    """Return the paths of the records of a build, except its plans, which contain the URL of the dump."""
    ignored_stages = {"plan", "answer"}  # Evaluations of other tests may record answers in the library.
    paths = store.glob("memo/**/*.json")
    return {path.relative_to(store) for path in paths if path.parent.name not in ignored_stages}


def read_stats(store: Path, stage: str) -> list[dict[str, Any]]:
    memo = Store.open(str(store)).memo if (store / "store.json").exists() else None
    names = [path.stem for path in (store / "memo" / stage).glob("*.json")]
    records = [memo.find(stage, name) for name in names] if memo else []
    return [dict(record.stats) for record in records if record]


@pytest.mark.parametrize(("moment", "kill", "beam"), MOMENTS.values(), ids=MOMENTS.keys())
def test_killed_build_is_finished_by_rerun(
    moment: Condition,
    kill: SendSignal,
    beam: Beam,
    tmp_path: Path,
    arguments: list[str],
    reindex: Any,
    bookwheel: Any,
    library: Path,
) -> None:
    store = tmp_path / "store"
    running = start_build(tmp_path, arguments, beam)
    wait_until(lambda: moment(store), "the moment", lambda: running.poll() is None)
    stop_build(running, kill, signal.SIGKILL)
    check_finishes(store, reindex, bookwheel, library)


def test_interrupted_build_is_finished_by_rerun(
    tmp_path: Path, arguments: list[str], reindex: Any, bookwheel: Any, library: Path
) -> None:
    store = tmp_path / "store"
    running = start_build(tmp_path, arguments)
    wait_until(lambda: has_records("chunk", 1)(store), "the moment", lambda: running.poll() is None)
    out, err = stop_build(running, os.kill, signal.SIGINT)
    assert running.returncode == 130, err
    assert out == ""
    assert err.splitlines()[-1].startswith("bookwheel: interrupted: finished work is recorded")
    check_finishes(store, reindex, bookwheel, library)


def test_full_disk_is_reported(
    tmp_path: Path, arguments: list[str], executable: Path, build_disk_prefix: Callable[[str, Path], list[str]]
) -> None:
    command = build_disk_prefix("200k", tmp_path / "store")
    result = subprocess.run(
        [*command, executable, "reindex", *arguments, "--", "--runner=FnApiRunner"],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE,
    )
    assert result.returncode == 1
    assert "bookwheel: the disk is full: cannot write" in result.stderr.splitlines()[-1]
    assert result.stderr.count("bookwheel: ") == 1
    assert "Traceback" not in result.stderr


def test_build_without_room_for_file_is_finished_by_rerun(
    tmp_path: Path, arguments: list[str], reindex: Any, bookwheel: Any, library: Path
) -> None:
    store = tmp_path / "store"
    running = ForkedCommand(["reindex", *arguments], tmp_path, file_bytes=40_000)
    _, err = running.communicate(timeout=DEADLINE)
    assert running.returncode == 1
    assert err.splitlines()[-1].startswith("bookwheel: cannot write")
    assert err.count("bookwheel: ") == 1
    assert not Store.open(str(store)).refs.list_names()
    check_finishes(store, reindex, bookwheel, library)


@pytest.mark.parametrize("second", ["of the same day", "of an older day"])
def test_two_builds_move_same_ref(
    second: str,
    tmp_path: Path,
    tiny: Path,
    bookwheel: Any,
    page_xml: Callable[..., str],
    export_xml: Callable[..., bytes],
) -> None:
    dumps, store = (tmp_path / "one.xml", tmp_path / "two.xml"), tmp_path / "store"
    for number, dump in enumerate(dumps):
        dump.write_bytes(export_xml(*(page_xml(page, f"Page {page} of dump {number}.") for page in range(1, 9))))
    if second == "of an older day":
        dumps[1].write_bytes(dumps[1].read_bytes().replace(b"2026-11-01T", b"2026-10-01T"))
    Store.open(str(store), create=True)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[index.hnsw]\nfactory = "HNSW8"\n')
    options = ["--encoder", str(tiny), "--store", str(store), "--recipe", str(recipe), "--json"]
    both = [ForkedCommand(["reindex", "--dump", str(dump), *options], tmp_path) for dump in dumps]
    results = [(*running.communicate(timeout=DEADLINE), running.returncode) for running in both]
    replies = [json.loads(out) for out, _, _ in results]
    assert len({reply["snapshot"] for reply in replies}) == 2
    for reply in replies:
        assert bookwheel("verify", reply["snapshot"], "--store", store).code == 0
    moves = {reply["number"]: reply["snapshot"] for reply in replies if reply["number"]}
    history = Store.open(str(store)).refs.read_history("latest")
    assert {move.number: move.snapshot for move in history} == moves
    if second == "of the same day":
        assert [code for _, _, code in results] == [0, 0]
        assert set(moves) == {1, 2}
    else:  # The newer dump wins, whichever build moves the ref first.
        assert history[-1].snapshot == replies[0]["snapshot"]
        assert results[0][2] == 0
        assert results[1][2] == (0 if len(moves) == 2 else 3)
        assert len(moves) == 2 or "newest revision" in results[1][1].splitlines()[-1]
