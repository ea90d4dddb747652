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
from rag_model.store.versions.signatures import SIGNING_KEY_VARIABLE, TRUST_VARIABLE
from tests.fixtures.publisher import Publisher

processes = multiprocessing.get_context("fork")


def race(count: int, run: Callable[[int], Any]) -> list[Any]:
    """Call `run(i)` in `count` processes at the same time, and return the results in the order of i."""
    start, results = processes.Barrier(count), processes.SimpleQueue()

    def body(i: int) -> None:
        start.wait()
        results.put((i, run(i)))
        os._exit(0)  # skips exit handlers that other tests have registered

    children = [processes.Process(target=body, args=(i,)) for i in range(count)]
    for child in children:
        child.start()
    returned = [results.get() for _ in children]
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * count
    return [value for _, value in sorted(returned)]


def write_file(store: Store, name: str, i: int) -> bool:
    return store.files.create(name, b"%d" % i * 100_000)


def test_one_of_many_processes_creates_a_file(store: Store) -> None:
    for round_ in range(5):
        name = f"race/{round_}"
        created = race(4, partial(write_file, store, name))
        assert created.count(True) == 1
        assert store.files.read(name) == b"%d" % created.index(True) * 100_000
    assert len(list(store.files.local_path("race").iterdir())) == 5


def test_racing_workers_share_one_output(store: Store) -> None:
    def work(i: int) -> dict[str, Any]:
        def produce(workdir: Path) -> StageResult:
            (workdir / "out").write_text(f"made by {i}")
            return StageResult({"out": workdir / "out"}, {"by": i})

        record, _ = store.memo.get_or_create("chunk", {"part": 1}, produce)
        return {"by": record.stats["by"], "out": store.blobs.read(record.outputs["out"])}

    outcomes = race(8, work)
    assert outcomes == [outcomes[0]] * 8
    assert outcomes[0]["out"] == f"made by {outcomes[0]['by']}".encode()


def test_no_move_of_16_publishers_is_lost(store: Store) -> None:
    def publish(i: int) -> int:
        while True:
            current = store.refs.find_current("latest")
            try:
                return store.refs.move("latest", f"{i:064x}", current.number if current else 0).number
            except RefConflictError:
                continue

    numbers = race(16, publish)
    history = store.refs.read_history("latest")
    assert sorted(numbers) == [move.number for move in history] == list(range(1, 17))
    assert [int(history[number - 1].snapshot, 16) for number in numbers] == list(range(16))
    assert [move.previous for move in history] == [None, *(move.snapshot for move in history[:-1])]


def test_one_of_many_concurrent_moves_and_deletions_wins(store: Store) -> None:
    def write(i: int) -> int | None:
        refs = store.refs
        try:
            return (refs.delete("v1", 1) if i % 2 else refs.move("v1", f"{i:064x}", 1)).number
        except RefConflictError:
            return None

    store.refs.move("v1", "f" * 64, 0)
    numbers = race(8, write)
    assert sorted(number for number in numbers if number) == [2]
    winner = numbers.index(2)
    assert [move.snapshot for move in store.refs.read_history("v1")] == [
        "f" * 64,
        "" if winner % 2 else f"{winner:064x}",
    ]


def test_racing_takedowns_with_one_key_keep_their_signatures(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = Publisher("alice")
    (tmp_path / "trusted").write_text(publisher.trust_line)
    monkeypatch.setenv(SIGNING_KEY_VARIABLE, publisher.pem)
    monkeypatch.setenv(TRUST_VARIABLE, str(tmp_path / "trusted"))
    race(8, lambda i: store.takedowns.add("", [str(i)], "asked to", "alice").number)
    assert store.takedowns.list_pages("", trusted_only=True) == {str(i) for i in range(8)}


@pytest.mark.parametrize("finished", [0, 1, 5])
def test_killed_writer_leaves_only_complete_blobs(store: Store, tmp_path: Path, finished: int) -> None:
    def write_forever() -> None:
        while True:
            (tmp_path / "source").write_bytes(secrets.token_bytes(4 << 20))
            store.blobs.put_file(tmp_path / "source")

    def list_blobs() -> list[Path]:
        return [path for path in (tmp_path / "store" / "blobs").glob("??/*") if path.name[0] != "."]

    writer = processes.Process(target=write_forever)
    writer.start()
    while len(list_blobs()) < finished:
        assert writer.is_alive()
    os.kill(writer.pid or 0, signal.SIGKILL)
    writer.join()
    assert [digest_file(path) for path in list_blobs()] == [f"sha256:{path.name}" for path in list_blobs()]
