"""Builds on a real Flink cluster, whose workers share nothing with the launcher but the store.

A command is interrupted half-way, which is made certain: the workers reach the store through a proxy that holds back
their writes. A training rebuilds its index there. A deployed run is in `test_deployed_flink.py`; workers that are
killed, and a host that is lost, are in `tests/beam_jobs/test_flink_hosts.py`.
"""

import io
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import s3fs

from beam_jobs.workers import START_VARIABLE
from flows import cli
from flows.rebuild import open_rebuild_launcher
from rag_model.store.store import Store
from rag_model.store.versions.moves import tag
from rag_model.training.loop.checkpoint import read_metrics
from tests.benchmarks.flink_cluster import DEADLINE, FORKING_POOL, ROOT, AbsentError, Flink, flink, until
from tests.benchmarks.s3_server import environment_of
from tests.fixtures.machine_requirements import missing
from tests.fixtures.s3_proxy import FaultyServer, Request, faulty
from tests.fixtures.tiny_end2end import EVERY, prepare, trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.xdist_group("flink")]

RECIPE = 'part_bytes = 15_000\n[index.hnsw]\nfactory = "HNSW8"\n'
WORDS = {"index": {"bm25": {"factory": "BM25", "over": "text"}}}
HERE: list[str] = []  # options of a run whose launcher does all


@dataclass(slots=True)
class Hold:
    """A fault that holds back all records of a stage from the second on."""

    stage: str
    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    seen: int = 0

    def __call__(self, request: Request) -> None:
        if request.method == "PUT" and request.touches(f"/memo/{self.stage}/"):
            self.seen += 1
            if self.seen > 1:
                self.reached.set()
                self.released.wait(DEADLINE)


@pytest.fixture(scope="module")
def bucket(s3_endpoint: str, s3_bucket: Callable[[str], AbstractContextManager[str]]) -> Iterator[str]:
    """An unused URL; this process and its children, which the launchers are, reach it directly."""
    with s3_bucket(s3_endpoint) as url:
        yield url


@pytest.fixture(scope="module")
def proxy(s3_endpoint: str, bucket: str) -> Iterator[FaultyServer]:
    """The way on which workers reach the store."""
    with faulty(s3_endpoint) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(proxy: FaultyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flink]:
    alone = {**environment_of(proxy.url), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        folder, hidden = tmp_path_factory.mktemp("flink"), tmp_path_factory.getbasetemp()
        with flink(folder, alone, hidden, slots=1, pool_module=FORKING_POOL) as cluster:
            yield cluster
    except AbsentError as absent:
        missing("flink", str(absent))


@pytest.fixture(scope="module")
def dump(bucket: str, small_dump: Path) -> str:
    """The URL of a dump in the bucket."""
    url = f"{bucket}/{small_dump.name}"
    s3fs.S3FileSystem().put_file(str(small_dump), url)
    return url


@pytest.fixture(scope="module")
def options(dump: str, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The options of `reindex` beside the store."""
    recipe = tmp_path_factory.mktemp("launcher") / "recipe.toml"
    recipe.write_text(RECIPE)
    return ["--dump", dump, "--encoder", str(tiny), "--recipe", str(recipe), "--json"]


@pytest.fixture(scope="module")
def reindex_here(options: list[str]) -> Callable[[str], Any]:
    """Return a function that builds in this process, without the cluster, and returns the reply."""

    def run(store: str) -> Any:
        reply = io.StringIO()
        with redirect_stdout(reply):
            assert cli.run(["reindex", "--store", store, *options]) == 0
        return json.loads(reply.getvalue())

    return run


def reached(hold: Hold, running: "subprocess.Popen[str]") -> None:
    """Wait until a write is held back."""

    def seen() -> bool:
        assert running.poll() is None, running.communicate()[1]
        return hold.reached.is_set()

    until(seen, f"a second record of {hold.stage}")


def records(store: Store, stage: str) -> set[str]:
    return set(store.files.list_names(f"memo/{stage}"))


@pytest.fixture(scope="module")
def local(bucket: str, reindex_here: Callable[[str], Any]) -> tuple[Any, Store]:
    """What a run on this machine alone makes of the dump, and the store that it lies in."""
    url = f"{bucket}/library"
    return reindex_here(url), Store.open(url)


def test_an_interrupt_cancels_the_job_and_the_rest_is_done_elsewhere(
    cluster: Flink,
    proxy: FaultyServer,
    bucket: str,
    executable: Path,
    options: list[str],
    reindex_here: Callable[[str], Any],
    local: tuple[Any, Store],
    tmp_path: Path,
) -> None:
    proxy.fault = cut = Hold("chunk")
    running = subprocess.Popen(
        [executable, "reindex", "--store", f"{bucket}/interrupted", *options, "--", *cluster.flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", START_VARIABLE: "0"},
        cwd=tmp_path,
        start_new_session=True,
    )
    try:
        reached(cut, running)
        servers = psutil.Process(running.pid).children(recursive=True)
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to all that the command started as well
        out, err = running.communicate(timeout=DEADLINE)
    finally:
        given_up(running, cut)
    assert running.returncode == 130, err
    assert err.splitlines()[-1].startswith("bookwheel: interrupted: finished work is recorded")
    assert json.loads(out)["exit_code"] == 130
    until(lambda: set(cluster.jobs().values()) <= {"FINISHED", "CANCELED"}, "the end of the job")
    assert "CANCELED" in cluster.jobs().values()
    until(lambda: not any(server.is_running() for server in servers), f"the end of {servers}")

    store = Store.open(f"{bucket}/interrupted")
    kept = records(store, "chunk")
    assert 0 < len(kept) < len(records(local[1], "chunk"))
    made = reindex_here(store.url)
    assert kept < records(store, "chunk")
    assert made["snapshot"] == local[0]["snapshot"]


def test_a_training_rebuilds_its_index_there_and_moves_to_what_this_machine_makes(
    cluster: Flink, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, found = set(cluster.jobs()), []
    for name, options in (("here", HERE), ("there", cluster.flags)):
        monkeypatch.setenv(START_VARIABLE, "0" if options else "1000")
        given, url = tmp_path / name, f"{bucket}/moving-{name}"
        given.mkdir()
        prepare(given, url=url, words=True, graph=False, recipe=WORDS)  # an index of vectors takes four more jobs
        store = Store.open(url)
        tag(store, "latest", "first")
        with open_rebuild_launcher(store, "refresh", options) as made:
            task, done = trained(given, given / "run", retriever="exact", rebuild=lambda _, made=made: made, url=url)
        assert [searched_snapshot.step for searched_snapshot in done.searched_snapshots] == [0, EVERY + 1]
        losses = [row["loss"] for row in read_metrics(given / "run") if row["kind"] == "train"]
        found.append((task.asked, losses, store.snapshots.get(task.asked).content.files))
    assert found[0] == found[1], "the same vectors and losses"
    jobs = {job.split("-")[1]: state for job, state in cluster.jobs().items() if job not in before}
    assert jobs == dict.fromkeys(("embed", "sample", "passage", "gate"), "FINISHED")


def given_up(running: "subprocess.Popen[str]", *holds: Hold) -> None:
    """End a launcher that a failed test left, and what it waits for."""
    for hold in holds:
        hold.released.set()
    running.kill()
    running.wait()
