"""A run of a deployment uses the operator's cluster: deployed from `infra`, started by Prefect's API, seen on Flink."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import LogFilter
from prefect.client.schemas.objects import StateType

from beam_jobs.workers import DEFAULT_VARIABLE, START_VARIABLE
from rag_model.store.store import Store
from tests.benchmarks.flink_cluster import ROOT, AbsentError, Flink, flink
from tests.fixtures.machine_requirements import missing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.xdist_group("flink")]

POOLS = ("bookwheel-cpu", "bookwheel-gpu")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flink]:
    alone = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        folder, hidden = tmp_path_factory.mktemp("flink"), tmp_path_factory.mktemp("hidden")
        with flink(folder, alone, hidden, slots=1) as cluster:
            yield cluster
    except AbsentError as absent:
        missing("flink", str(absent))


def test_a_deployed_run_uses_the_cluster_of_the_worker_s_environment(
    prefect_server: None, cluster: Flink, mini_dump: Path, tiny: Path, tmp_path: Path
) -> None:
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
            **{DEFAULT_VARIABLE: shlex.join(cluster.flags), START_VARIABLE: "0.005", "PREFECT_LOGGING_LEVEL": "INFO"},
        )
        ended = client.read_flow_run(run.id)
        said = [line.message for line in client.read_logs(LogFilter(flow_run_id={"any_": [run.id]}))]
    assert ended.state_type == StateType.COMPLETED, ended.state
    jobs = cluster.jobs()
    assert {"FINISHED"} == set(jobs.values())
    assert {"chunk", "embed"} <= {word for name in jobs for word in name.replace("-", " ").split()}, jobs
    move = Store.open(str(tmp_path / "store")).refs.find_current("latest")
    assert move is not None
    assert f"snapshot {move.snapshot}: latest@1 names it" in said, said
