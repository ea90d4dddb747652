"""Killed at any moment, out of disk, or in a race: a rerun finishes the same snapshot, and nothing is lost."""

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

Seen = Callable[[Path], object]
Kill = Callable[[int, int], None]
WORKER = "--direct_num_workers=1"
DEADLINE = 300.0  # seconds until a test gives up on a condition


def until(condition: Callable[[], object], what: str, still: Callable[[], bool] = lambda: True) -> None:
    """Return once `condition` holds; fail when it cannot any more."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not seen in {DEADLINE:.0f} s"
        assert still(), f"{what}: not seen before the process ended"
        time.sleep(0.002)


def recorded(stage: str, least: int) -> Seen:
    def seen(store: Path) -> bool:
        folder = store / "memo" / stage
        return folder.is_dir() and len(list(folder.glob("*.json"))) >= least

    return seen


def manifest_written(store: Path) -> bool:
    return any((store / "snapshots").glob("*.json"))


Beam = tuple[str, ...]
MOMENTS: dict[str, tuple[Seen, Kill, Beam]] = {  # who is killed: the process alone, or with all that it started
    "at the start": (lambda store: (store / "store.json").exists(), os.kill, ()),
    "after the first part was cut": (recorded("chunk", 1), os.kill, ()),
    "while parts are encoded": (recorded("embed", 1), os.killpg, (WORKER,)),
    "while shards are built": (recorded("train", 1), os.kill, (WORKER,)),
    "while the index is measured": (recorded("merge", 1), os.killpg, ()),  # by then workers have ended
    "between the manifest and the ref": (manifest_written, os.kill, ()),
}


@pytest.fixture
def arguments(mini_dump: Path, tiny: Path, recipe: Path, tmp_path: Path) -> list[str]:
    given = {"dump": mini_dump, "encoder": tiny, "recipe": recipe, "store": tmp_path / "store"}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def start(folder: Path, arguments: list[str], beam: Beam = (WORKER,)) -> ForkedCommand:
    return ForkedCommand(["reindex", *arguments, "--", *beam], folder)


def stop(running: ForkedCommand, send: Kill, number: int) -> tuple[str, str]:
    """Send a signal, and return what was said once the process and all that it started are gone."""
    started = psutil.Process(running.pid).children(recursive=True)
    send(running.pid, number)
    said = running.communicate(timeout=DEADLINE)
    until(lambda: not any(map(_lives, started)), f"the end of {started}")
    return said


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def check_finishes(store: Path, reindex: Any, bookwheel: Any, library: Path) -> None:
    """A rerun makes what was not recorded, and nothing else, and ends as if nothing had happened."""
    undisturbed = Store.open(str(library))
    known = {path: path.read_bytes() for path in (store / "memo").rglob("*.json")} if (store / "memo").is_dir() else {}
    encoded = sum(fact["rows"] for fact in _facts(store, "embed"))

    made = reindex(store).json
    assert made["snapshot"] == undisturbed.snapshots.resolve("latest")
    assert made["counts"]["reused"] == encoded
    assert made["counts"]["embedded"] == 247 - encoded
    assert all(path.read_bytes() == data for path, data in known.items())
    assert _keys(store) == _keys(library)
    assert len(bookwheel("log", "--store", store, "--json").json) == 1
    assert bookwheel("verify", "--store", store).code == 0


def _keys(store: Path) -> set[Path]:
    """The records of a build, but for its plans: they name their slices by URL."""
    others = {"plan", "answer"}  # an evaluation may have left answers in the library
    return {path.relative_to(store) for path in (store / "memo").rglob("*.json") if path.parent.name not in others}


def _facts(store: Path, stage: str) -> list[dict[str, Any]]:
    memo = Store.open(str(store)).memo if (store / "store.json").exists() else None
    names = [path.stem for path in (store / "memo" / stage).glob("*.json")]
    records = [memo.find(stage, name) for name in names] if memo else []
    return [dict(record.stats) for record in records if record]


@pytest.mark.parametrize(("moment", "kill", "beam"), MOMENTS.values(), ids=MOMENTS.keys())
def test_a_run_killed(
    moment: Seen,
    kill: Kill,
    beam: Beam,
    tmp_path: Path,
    arguments: list[str],
    reindex: Any,
    bookwheel: Any,
    library: Path,
) -> None:
    store = tmp_path / "store"
    running = start(tmp_path, arguments, beam)
    until(lambda: moment(store), "the moment", lambda: running.poll() is None)
    stop(running, kill, signal.SIGKILL)
    check_finishes(store, reindex, bookwheel, library)


def test_a_run_interrupted_says_so(
    tmp_path: Path, arguments: list[str], reindex: Any, bookwheel: Any, library: Path
) -> None:
    store = tmp_path / "store"
    running = start(tmp_path, arguments)
    until(lambda: recorded("chunk", 1)(store), "the moment", lambda: running.poll() is None)
    out, err = stop(running, os.kill, signal.SIGINT)
    assert running.returncode == 130, err
    assert out == ""
    assert err.splitlines()[-1].startswith("bookwheel: interrupted: finished work is recorded")
    check_finishes(store, reindex, bookwheel, library)


def test_a_full_disk(
    tmp_path: Path, arguments: list[str], executable: Path, on_a_disk_of: Callable[[str, Path], list[str]]
) -> None:
    within = on_a_disk_of("200k", tmp_path / "store")
    result = subprocess.run(
        [*within, executable, "reindex", *arguments, "--", "--runner=FnApiRunner"],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE,
    )
    assert result.returncode == 1
    assert "bookwheel: the disk is full: cannot write" in result.stderr.splitlines()[-1]
    assert result.stderr.count("bookwheel: ") == 1
    assert "Traceback" not in result.stderr


def test_no_room_for_a_file_and_then_there_is(
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
def test_two_that_publish_one_ref_at_once(
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
    given = ["--encoder", str(tiny), "--store", str(store), "--recipe", str(recipe)]
    given += ["--json"]
    both = [ForkedCommand(["reindex", "--dump", str(dump), *given], tmp_path) for dump in dumps]
    ran = [(*running.communicate(timeout=DEADLINE), running.returncode) for running in both]
    made = [json.loads(out) for out, _, _ in ran]
    assert len({one["snapshot"] for one in made}) == 2
    for one in made:
        assert bookwheel("verify", one["snapshot"], "--store", store).code == 0
    moved = {one["number"]: one["snapshot"] for one in made if one["number"]}
    history = Store.open(str(store)).refs.read_history("latest")
    assert {move.number: move.snapshot for move in history} == moved
    if second == "of the same day":
        assert [code for _, _, code in ran] == [0, 0]
        assert set(moved) == {1, 2}
    else:  # whoever was first, the newer one stands at the end
        assert history[-1].snapshot == made[0]["snapshot"]
        assert ran[0][2] == 0
        assert ran[1][2] == (0 if len(moved) == 2 else 3)
        assert len(moved) == 2 or "newest revision" in ran[1][1].splitlines()[-1]
