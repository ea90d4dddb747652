"""Real processes that race for one name, or die in the middle of a write."""

import multiprocessing
import os
import secrets
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rag_model.digest import digest_file
from rag_model.errors import RefConflictError
from rag_model.store import StageResult, Store

processes = multiprocessing.get_context("fork")


def race(count: int, run: Callable[[int], Any]) -> list[Any]:
    """Run `run(i)` in `count` processes that start together; return what they returned, in order of i."""
    start, results = processes.Barrier(count), processes.SimpleQueue()

    def body(i: int) -> None:
        start.wait()
        results.put((i, run(i)))
        os._exit(0)  # without the exit handlers of whatever other tests left in the process that forked

    children = [processes.Process(target=body, args=(i,)) for i in range(count)]
    for child in children:
        child.start()
    found = [results.get() for _ in children]
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * count
    return [value for _, value in sorted(found)]


def create(store: Store, name: str, i: int) -> bool:
    return store.files.create(name, b"%d" % i * 100_000)


def test_one_of_many_processes_creates(local_store: Store) -> None:
    for round_ in range(10):
        name = f"race/{round_}"
        won = race(4, partial(create, local_store, name))
        assert won.count(True) == 1
        assert local_store.files.read(name) == b"%d" % won.index(True) * 100_000
    assert len(list(local_store.files.local_path("race").iterdir())) == 10


def test_racing_workers_share_the_winners_output(local_store: Store) -> None:
    def work(i: int) -> dict[str, Any]:
        def produce(workdir: Path) -> StageResult:
            (workdir / "out").write_text(f"made by {i}")
            return StageResult({"out": workdir / "out"}, {"by": i})

        record, _ = local_store.memo.get_or_create("chunk", {"part": 1}, produce)
        return {"by": record.stats["by"], "out": local_store.blobs.read(record.outputs["out"])}

    outcomes = race(8, work)
    assert outcomes == [outcomes[0]] * 8
    assert outcomes[0]["out"] == f"made by {outcomes[0]['by']}".encode()


def test_32_publishers_lose_no_move(local_store: Store) -> None:
    def publish(i: int) -> int:
        while True:
            current = local_store.refs.find_current("latest")
            try:
                return local_store.refs.move("latest", f"{i:064x}", current.number if current else 0).number
            except RefConflictError:
                continue

    numbers = race(32, publish)
    history = local_store.refs.read_history("latest")
    assert sorted(numbers) == [move.number for move in history] == list(range(1, 33))
    assert [int(history[number - 1].snapshot, 16) for number in numbers] == list(range(32))
    assert [move.previous for move in history] == [None, *(move.snapshot for move in history[:-1])]


def test_of_those_who_move_a_ref_and_delete_it_one_wins(local_store: Store) -> None:
    def write(i: int) -> int | None:
        refs = local_store.refs
        try:
            return (refs.delete("v1", 1) if i % 2 else refs.move("v1", f"{i:064x}", 1)).number
        except RefConflictError:
            return None

    local_store.refs.move("v1", "f" * 64, 0)
    numbers = race(8, write)
    assert sorted(number for number in numbers if number) == [2]
    winner = numbers.index(2)
    assert [move.snapshot for move in local_store.refs.read_history("v1")] == [
        "f" * 64,
        "" if winner % 2 else f"{winner:064x}",
    ]


@pytest.mark.parametrize("finished", [0, 1, 5])
def test_a_killed_writer_leaves_only_whole_blobs(local_store: Store, tmp_path: Path, finished: int) -> None:
    def write_for_ever() -> None:
        while True:
            (tmp_path / "source").write_bytes(secrets.token_bytes(4 << 20))
            local_store.blobs.put_file(tmp_path / "source")

    def blobs() -> list[Path]:
        return [path for path in (tmp_path / "store" / "blobs").glob("??/*") if path.name[0] != "."]

    writer = processes.Process(target=write_for_ever)
    writer.start()
    while len(blobs()) < finished:
        assert writer.is_alive()
    os.kill(writer.pid or 0, signal.SIGKILL)
    writer.join()
    assert [digest_file(path) for path in blobs()] == [f"sha256:{path.name}" for path in blobs()]
