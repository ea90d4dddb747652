"""A build on four hosts that share only an S3 server: a launcher, a JobManager and two hosts of workers.

Workers are killed, which the cluster notices at once, and a host is cut off, which it notices by missing heartbeats.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from beam_jobs.workers import START_VARIABLE
from tests.benchmarks.flink_cluster import DEADLINE, AbsentError, until
from tests.benchmarks.flink_hosts import LAUNCHER, STORE, FlinkHosts, flink_hosts
from tests.benchmarks.hosts import Host, NoHostsError
from tests.benchmarks.s3_server import environment_of
from tests.fixtures import paused_store
from tests.fixtures.machine_requirements import skip_or_fail
from tests.fixtures.tiny import save_bert

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.xdist_group("flink")]

RECIPE = 'part_bytes = 15_000\n[index.hnsw]\nfactory = "HNSW8"\n'
MIN_PARTS = 5  # more than two workers process at once, so that some are finished and some are not
STAGES = "chunk", "embed", "train", "scatter", "shard", "merge"
STORE_ENVIRONMENT = {
    **environment_of(f"http://{STORE}:{paused_store.PORT}"),
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
LIST_RECORDS = """
import json, sys
from rag_model.store.store import Store
from rag_model.store.upkeep.verify import verify_version
store, snapshot, stages = Store.open(sys.argv[1]), sys.argv[2], sys.argv[3:]
records = {stage: sorted(store.files.list_names(f"memo/{stage}")) for stage in stages}
reports = [file.path for file in store.files.iter_tree("runs") if file.path.endswith(".json")]
faults = [str(fault) for fault in verify_version(store, snapshot)]
print(json.dumps({"records": records, "reports": reports, "faults": faults}))
"""


@pytest.fixture(scope="module")
def cluster(small_dump: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlinkHosts]:
    """Yield the hosts: the dump is on the S3 server, the encoder and the recipe are on the launcher."""
    folder, hidden = tmp_path_factory.mktemp("hosts"), tmp_path_factory.getbasetemp()
    try:
        with flink_hosts(folder, hidden, STORE_ENVIRONMENT) as cluster:
            launcher, store = cluster.hosts[LAUNCHER], cluster.hosts[STORE]
            save_bert(launcher.folder / "tiny")
            (launcher.folder / "recipe.toml").write_text(RECIPE)
            dump = store.folder / small_dump.name
            dump.write_bytes(small_dump.read_bytes())
            serve = [sys.executable, "-m", "tests.fixtures.paused_store", store.folder, dump, "chunk", "embed"]
            with (store.folder / "log").open("wb") as log:
                serving = store.start(serve, {}, log, log)
            until(lambda: (store.folder / "up").exists() or serving.poll() is not None, "the S3 server")
            assert serving.poll() is None, (store.folder / "log").read_text()
            yield cluster
    except AbsentError as absent:
        skip_or_fail("flink", str(absent))
    except NoHostsError as refused:
        skip_or_fail("hosts", str(refused))


def reindex(launcher: Host, dump: str, store: str, *flags: str) -> "subprocess.Popen[str]":
    """Start the command on the launcher."""
    named_options = {
        "dump": f"s3://{paused_store.BUCKET}/{dump}",
        "store": store,
        "encoder": "tiny",
        "recipe": "recipe.toml",
    }
    options = [word for name, value in named_options.items() for word in (f"--{name}", value)]
    command = [Path(sys.executable).with_name("bookwheel"), "reindex", *options, "--json", "--", *flags]
    start_seconds = {START_VARIABLE: "0" if flags else "1000"}  # the launcher runs shorter jobs itself
    return launcher.start(command, {**STORE_ENVIRONMENT, **start_seconds}, subprocess.PIPE, subprocess.PIPE)


def wait_for_reply(running: "subprocess.Popen[str]") -> Any:
    """Return the JSON reply of a command that succeeds."""
    out, errors = running.communicate(timeout=DEADLINE)
    assert running.returncode == 0, errors
    assert all(line.endswith(("…", " s", " left")) for line in errors.splitlines()), errors
    return json.loads(out)


def wait_for_held_record(store: Host, stage: str, running: "subprocess.Popen[str]") -> None:
    """Wait until the store holds back a record of a stage."""

    def is_held() -> bool:
        assert running.poll() is None, running.communicate()[1]
        return (store.folder / f"held-{stage}").exists()

    until(is_held, f"a third record of {stage}")


def list_failures(cluster: FlinkHosts) -> dict[str, str]:
    """Return the error of the first attempt of each job that was started again, by stage."""
    get_json = cluster.manager.get_json
    jobs = [(job["name"].split("-")[1], job["jid"]) for job in get_json("/jobs/overview")["jobs"]]
    reasons = {stage: get_json(f"/jobs/{job}/exceptions")["root-exception"] for stage, job in jobs}
    return {stage: why for stage, why in reasons.items() if why}


def test_hosts_that_share_only_the_store_make_the_same_snapshot_though_one_is_lost(
    cluster: FlinkHosts, small_dump: Path
) -> None:
    launcher, store, dump = cluster.hosts[LAUNCHER], cluster.hosts[STORE], small_dump.name
    url = f"s3://{paused_store.BUCKET}/library"
    running = reindex(launcher, dump, url, *cluster.flags)

    wait_for_held_record(store, "chunk", running)
    for worker in [worker for node in cluster.workers.values() for worker in node.workers()]:
        worker.kill()
    (store.folder / "let-chunk").touch()

    wait_for_held_record(store, "embed", running)
    lost_host = until(cluster.busy, "a host with work").pop()
    cluster.hosts[lost_host].lose()
    (store.folder / "let-embed").touch()
    reply = wait_for_reply(running)

    reasons = list_failures(cluster)
    assert {"chunk", "embed"} <= set(reasons)
    assert "TaskManager" in reasons["embed"]
    assert set(cluster.manager.jobs().values()) == {"FINISHED"}

    expected = wait_for_reply(reindex(launcher, dump, "alone"))
    assert reply["snapshot"] == expected["snapshot"]
    assert reply["counts"] == expected["counts"]
    cluster_records = list_records(launcher, url, reply["snapshot"])
    assert cluster_records == list_records(launcher, "alone", reply["snapshot"])
    assert cluster_records["faults"] == cluster_records["reports"] == []
    assert len(cluster_records["records"]["chunk"]) >= MIN_PARTS


def list_records(launcher: Host, store: str, snapshot: str) -> Any:
    """Return the records of all stages and the reports in a store, and the faults of a snapshot."""
    command = [sys.executable, "-c", LIST_RECORDS, store, snapshot, *STAGES]
    return wait_for_reply(launcher.start(command, STORE_ENVIRONMENT, subprocess.PIPE, subprocess.PIPE))
