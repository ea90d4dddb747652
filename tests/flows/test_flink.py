"""Builds on a real Flink cluster, whose workers share only the store with the launcher.

A command is interrupted half-way: the workers reach the store through a proxy that holds back their writes. A training
rebuilds its index on the cluster. A deployment from `infra` uses the operator's cluster. Killed workers and a lost host
are in `tests/beam_jobs/test_flink_hosts.py`.
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
from tests.fixtures.machine_requirements import skip_or_fail
from tests.fixtures.s3_proxy import FaultyServer, Request, serve_faulty
from tests.fixtures.tiny_end2end import INTERVAL, prepare, train_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.xdist_group("flink")]

RECIPE = 'part_bytes = 15_000\n[index.hnsw]\nfactory = "HNSW8"\n'
BM25_RECIPE = {"index": {"bm25": {"factory": "BM25", "over": "text"}}}
WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
POOLS = ("bookwheel-cpu", "bookwheel-gpu")
NO_OPTIONS: list[str] = []  # the launcher runs all jobs itself


@dataclass(slots=True)
class Hold:
    """A fault that holds back all records of a stage from the second on."""

    stage: str
    is_holding: threading.Event = field(default_factory=threading.Event)
    is_released: threading.Event = field(default_factory=threading.Event)
    n_records: int = 0

    def __call__(self, request: Request) -> None:
        if request.method == "PUT" and f"/memo/{self.stage}/" in request.path:
            self.n_records += 1
            if self.n_records > 1:
                self.is_holding.set()
                self.is_released.wait(DEADLINE)


@pytest.fixture(scope="module")
def bucket(s3_endpoint: str, s3_bucket: Callable[[str], AbstractContextManager[str]]) -> Iterator[str]:
    """Return an unused URL, which this process and its launchers reach without the proxy."""
    with s3_bucket(s3_endpoint) as url:
        yield url


@pytest.fixture(scope="module")
def proxy(s3_endpoint: str, bucket: str) -> Iterator[FaultyServer]:
    """Yield the proxy through which the workers reach the store."""
    with serve_faulty(s3_endpoint) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(proxy: FaultyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flink]:
    environment = {**environment_of(proxy.url), **WORKER_ENVIRONMENT}
    try:
        folder, hidden = tmp_path_factory.mktemp("flink"), tmp_path_factory.getbasetemp()
        with flink(folder, environment, hidden, slots=1, pool_module=FORKING_POOL) as cluster:
            yield cluster
    except AbsentError as absent:
        skip_or_fail("flink", str(absent))


@pytest.fixture(scope="module")
def dump(bucket: str, small_dump: Path) -> str:
    """The URL of a dump in the bucket."""
    url = f"{bucket}/{small_dump.name}"
    s3fs.S3FileSystem().put_file(str(small_dump), url)
    return url


@pytest.fixture(scope="module")
def options(dump: str, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the options of `reindex` except the store."""
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


def wait_for_held_write(hold: Hold, running: "subprocess.Popen[str]") -> None:
    """Wait until a write is held back."""

    def holds_write() -> bool:
        assert running.poll() is None, running.communicate()[1]
        return hold.is_holding.is_set()

    until(holds_write, f"a second record of {hold.stage}")


def list_records(store: Store, stage: str) -> set[str]:
    return set(store.files.list_names(f"memo/{stage}"))


@pytest.fixture(scope="module")
def local_build(bucket: str, reindex_here: Callable[[str], Any]) -> tuple[Any, Store]:
    """Return the reply of a build on this machine alone, and its store."""
    url = f"{bucket}/library"
    return reindex_here(url), Store.open(url)


def test_an_interrupt_cancels_the_job_and_the_rest_is_done_elsewhere(
    cluster: Flink,
    proxy: FaultyServer,
    bucket: str,
    executable: Path,
    options: list[str],
    reindex_here: Callable[[str], Any],
    local_build: tuple[Any, Store],
    tmp_path: Path,
) -> None:
    proxy.fault = hold = Hold("chunk")
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
        wait_for_held_write(hold, running)
        servers = psutil.Process(running.pid).children(recursive=True)
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to all that the command started as well
        out, err = running.communicate(timeout=DEADLINE)
    finally:
        end_launcher(running, hold)
    assert running.returncode == 130, err
    assert err.splitlines()[-1].startswith("bookwheel: interrupted: finished work is recorded")
    assert json.loads(out)["exit_code"] == 130
    until(lambda: set(cluster.jobs().values()) <= {"FINISHED", "CANCELED"}, "the end of the job")
    assert "CANCELED" in cluster.jobs().values()
    until(lambda: not any(server.is_running() for server in servers), f"the end of {servers}")

    store = Store.open(f"{bucket}/interrupted")
    finished_records = list_records(store, "chunk")
    assert 0 < len(finished_records) < len(list_records(local_build[1], "chunk"))
    reply = reindex_here(store.url)
    assert finished_records < list_records(store, "chunk")
    assert reply["snapshot"] == local_build[0]["snapshot"]


def test_a_training_rebuilds_its_index_there_and_moves_to_what_this_machine_makes(
    cluster: Flink, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier_jobs, results = set(cluster.jobs()), []
    for name, options in (("here", NO_OPTIONS), ("there", cluster.flags)):
        monkeypatch.setenv(START_VARIABLE, "0" if options else "1000")
        folder, url = tmp_path / name, f"{bucket}/moving-{name}"
        folder.mkdir()
        prepare(folder, url=url, bm25=True, graph=False, recipe=BM25_RECIPE)  # an index of vectors takes four more jobs
        store = Store.open(url)
        tag(store, "latest", "first")
        with open_rebuild_launcher(store, "refresh", options) as launcher:
            task, result = train_in(
                folder, folder / "run", retriever="exact", rebuild=lambda _, launcher=launcher: launcher, url=url
            )
        assert [searched_snapshot.step for searched_snapshot in result.searched_snapshots] == [0, INTERVAL + 1]
        losses = [row["loss"] for row in read_metrics(folder / "run") if row["kind"] == "train"]
        results.append((task.searched_snapshot, losses, store.snapshots.get(task.searched_snapshot).content.files))
    assert results[0] == results[1], "the same vectors and losses"
    jobs = {job.split("-")[1]: state for job, state in cluster.jobs().items() if job not in earlier_jobs}
    assert jobs == dict.fromkeys(("embed", "sample", "passage", "gate"), "FINISHED")


@pytest.fixture
def visible_pool(cluster: Flink, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flink]:
    """Beam's own pool, which starts a process for each worker and sees the folders of the tests."""
    pool = replace(cluster, pool=find_free_ports(1)[0], pool_module=BEAM_POOL, processes={})
    try:
        pool.start_pool(WORKER_ENVIRONMENT, tmp_path_factory.mktemp("hidden"))
        until(pool.listens, "Beam's pool of workers")
        yield pool
    finally:
        pool.end()


def test_a_deployed_run_uses_the_cluster_of_the_worker_s_environment(
    prefect_server: None, cluster: Flink, visible_pool: Flink, mini_dump: Path, tiny: Path, tmp_path: Path
) -> None:
    earlier_jobs = set(cluster.jobs())
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BOOKWHEEL_STORE": str(tmp_path / "store")}

    def run_prefect(*words: str, **variables: str) -> None:
        command = [str(Path(sys.executable).with_name("prefect")), *words]
        result = subprocess.run(
            command, env={**environment, **variables}, capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert result.returncode == 0, result.stdout + result.stderr

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
        finished_run = client.read_flow_run(run.id)
        messages = [line.message for line in client.read_logs(LogFilter(flow_run_id={"any_": [run.id]}))]
    assert finished_run.state_type == StateType.COMPLETED, finished_run.state
    jobs = {name: state for name, state in cluster.jobs().items() if name not in earlier_jobs}
    assert {"FINISHED"} == set(jobs.values())
    assert {"chunk", "embed"} <= {word for name in jobs for word in name.replace("-", " ").split()}, jobs
    move = Store.open(str(tmp_path / "store")).refs.find_current("latest")
    assert move is not None
    assert f"snapshot {move.snapshot}: latest@1 names it" in messages, messages


def end_launcher(running: "subprocess.Popen[str]", *holds: Hold) -> None:
    """Release held writes, and kill a launcher that still runs because its test failed."""
    for hold in holds:
        hold.is_released.set()
    running.kill()
    running.wait()
