"""Builds on a real Flink cluster, whose workers share nothing with the launcher but the store.

A command is interrupted half-way, which is made certain: the workers reach the store through a proxy that holds back
their writes. A training rebuilds its index there. A deployment from `infra` uses the operator's cluster. Workers that
are killed, and a host that is lost, are in `tests/beam_jobs/test_flink_hosts.py`.
"""

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import s3fs
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import LogFilter
from prefect.client.schemas.objects import StateType

from beam_jobs.workers import DEFAULT_VARIABLE, START_VARIABLE
from flows import cli
from flows.machine.local import find_free_ports
from flows.rebuild import open_rebuild_launcher
from rag_model.store.store import Store
from rag_model.store.versions.moves import tag
from rag_model.training.loop.checkpoint import read_metrics
from tests.benchmarks.flink_cluster import BEAM_POOL, DEADLINE, FORKING_POOL, ROOT, AbsentError, Flink, flink, until
from tests.benchmarks.s3_server import environment_of
from tests.fixtures.machine_requirements import missing
from tests.fixtures.s3_proxy import FaultyServer, Request, faulty
from tests.fixtures.tiny_end2end import EVERY, prepare, trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.xdist_group("flink")]

RECIPE = 'part_bytes = 15_000\n[index.hnsw]\nfactory = "HNSW8"\n'
WORDS = {"index": {"bm25": {"factory": "BM25", "over": "text"}}}
ALONE = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
POOLS = ("bookwheel-cpu", "bookwheel-gpu")
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
    alone = {**environment_of(proxy.url), **ALONE}
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
        found.append((task.searched_snapshot, losses, store.snapshots.get(task.searched_snapshot).content.files))
    assert found[0] == found[1], "the same vectors and losses"
    jobs = {job.split("-")[1]: state for job, state in cluster.jobs().items() if job not in before}
    assert jobs == dict.fromkeys(("embed", "sample", "passage", "gate"), "FINISHED")


@pytest.fixture
def visible_pool(cluster: Flink, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flink]:
    """Beam's own pool, which starts a process for each worker and sees the folders of the tests."""
    pool = replace(cluster, pool=find_free_ports(1)[0], pool_module=BEAM_POOL, processes={})
    try:
        pool.start_pool(ALONE, tmp_path_factory.mktemp("hidden"))
        until(pool.listens, "Beam's pool of workers")
        yield pool
    finally:
        pool.end()


def test_a_deployed_run_uses_the_cluster_of_the_worker_s_environment(
    prefect_server: None, cluster: Flink, visible_pool: Flink, mini_dump: Path, tiny: Path, tmp_path: Path
) -> None:
    before = set(cluster.jobs())
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BOOKWHEEL_STORE": str(tmp_path / "store")}

    def run_prefect(*words: str, **variables: str) -> None:
        command = [str(Path(sys.executable).with_name("prefect")), *words]
        done = subprocess.run(
            command, env={**environment, **variables}, capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout + done.stderr

    with get_client(sync_client=True) as client:
        for pool in POOLS:
            client.create_work_pool(WorkPoolCreate(name=pool, type="process", base_job_template={}), overwrite=True)
    infra = str(ROOT / "infra" / "prefect.yaml")
    run_prefect(
        "--no-prompt", "deploy", "--name", "reindex-library", "--prefect-file", infra, BOOKWHEEL_DUMP=str(mini_dump)
    )
    parameters = {
        "encoder": str(tiny),
        "recipe": {"index": {"hnsw": {"factory": "HNSW8"}}},
        "beam_options": ["--max_parallelism=4", next(flag for flag in cluster.flags if "flink_master" in flag)],
    }
    with get_client(sync_client=True) as client:
        (deployment,) = [deployment for deployment in client.read_deployments() if deployment.name == "reindex-library"]
        run = client.create_flow_run_from_deployment(deployment.id, parameters=parameters)
        # The longest stages go to the cluster, which needs as long for any job; the launcher runs the others.
        run_prefect(
            *("worker", "start", "--pool", str(deployment.work_pool_name), "--run-once"),
            **{
                DEFAULT_VARIABLE: shlex.join(visible_pool.flags),
                START_VARIABLE: "0.005",
                "PREFECT_LOGGING_LEVEL": "INFO",
            },
        )
        ended = client.read_flow_run(run.id)
        said = [line.message for line in client.read_logs(LogFilter(flow_run_id={"any_": [run.id]}))]
    assert ended.state_type == StateType.COMPLETED, ended.state
    jobs = {name: state for name, state in cluster.jobs().items() if name not in before}
    assert {"FINISHED"} == set(jobs.values())
    assert {"chunk", "embed"} <= {word for name in jobs for word in name.replace("-", " ").split()}, jobs
    move = Store.open(str(tmp_path / "store")).refs.find_current("latest")
    assert move is not None
    assert f"snapshot {move.snapshot}: latest@1 names it" in said, said


def given_up(running: "subprocess.Popen[str]", *holds: Hold) -> None:
    """End a launcher that a failed test left, and what it waits for."""
    for hold in holds:
        hold.released.set()
    running.kill()
    running.wait()
