"""A build on hosts that share nothing but an S3 server: launcher, JobManager and two of workers, one of which is lost.

A host that is lost answers nobody, where a process that was killed is missed at once.
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
from tests.fixtures.machine_requirements import missing
from tests.fixtures.tiny import save_bert

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.xdist_group("flink")]

RECIPE = 'part_bytes = 15_000\n[index.hnsw]\nfactory = "HNSW8"\n'
LEAST_PARTS = 5  # more than two workers do at once, so that some are done and some are not
STAGES = "chunk", "embed", "train", "scatter", "shard", "merge"
REACHES_STORE = {
    **environment_of(f"http://{STORE}:{paused_store.PORT}"),
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
FOUND = """
import json, sys
from rag_model.store.store import Store
from rag_model.store.upkeep.verify import verify_version
store, snapshot, stages = Store.open(sys.argv[1]), sys.argv[2], sys.argv[3:]
records = {stage: sorted(store.files.list_names(f"memo/{stage}")) for stage in stages}
reports = [found.path for found in store.files.iter_tree("runs") if found.path.endswith(".json")]
wrong = [str(one) for one in verify_version(store, snapshot)]
print(json.dumps({"records": records, "reports": reports, "wrong": wrong}))
"""


@pytest.fixture(scope="module")
def cluster(small_dump: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlinkHosts]:
    """The hosts; the store has the dump, and the launcher an encoder and a recipe."""
    folder, hidden = tmp_path_factory.mktemp("hosts"), tmp_path_factory.getbasetemp()
    try:
        with flink_hosts(folder, hidden, REACHES_STORE) as cluster:
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
        missing("flink", str(absent))
    except NoHostsError as refused:
        missing("hosts", str(refused))


def reindex(launcher: Host, dump: str, store: str, *flags: str) -> "subprocess.Popen[str]":
    """Start the command on the launcher."""
    given = {"dump": f"s3://{paused_store.BUCKET}/{dump}", "store": store, "encoder": "tiny", "recipe": "recipe.toml"}
    options = [word for name, value in given.items() for word in (f"--{name}", value)]
    command = [Path(sys.executable).with_name("bookwheel"), "reindex", *options, "--json", "--", *flags]
    elsewhere = {START_VARIABLE: "0" if flags else "1000"}  # seconds of a job that the launcher does itself
    return launcher.start(command, {**REACHES_STORE, **elsewhere}, subprocess.PIPE, subprocess.PIPE)


def finished(running: "subprocess.Popen[str]") -> Any:
    """Return what a command told, as JSON."""
    out, errors = running.communicate(timeout=DEADLINE)
    assert running.returncode == 0, errors
    assert all(line.endswith(("…", " s", " left")) for line in errors.splitlines()), errors
    return json.loads(out)


def held(store: Host, stage: str, running: "subprocess.Popen[str]") -> None:
    """Wait until a record of a stage is held back."""

    def seen() -> bool:
        assert running.poll() is None, running.communicate()[1]
        return (store.folder / f"held-{stage}").exists()

    until(seen, f"a third record of {stage}")


def restarted(cluster: FlinkHosts) -> dict[str, str]:
    """Return why jobs did not go through at the first attempt, by stage."""
    asked = cluster.manager.get_json
    jobs = [(job["name"].split("-")[1], job["jid"]) for job in asked("/jobs/overview")["jobs"]]
    reasons = {stage: asked(f"/jobs/{job}/exceptions")["root-exception"] for stage, job in jobs}
    return {stage: why for stage, why in reasons.items() if why}


def test_hosts_that_share_only_the_store_make_the_same_snapshot_though_one_is_lost(
    cluster: FlinkHosts, small_dump: Path
) -> None:
    launcher, store, dump = cluster.hosts[LAUNCHER], cluster.hosts[STORE], small_dump.name
    url = f"s3://{paused_store.BUCKET}/library"
    running = reindex(launcher, dump, url, *cluster.flags)

    held(store, "chunk", running)
    for worker in [one for node in cluster.workers.values() for one in node.workers()]:
        worker.kill()  # whichever has the work
    (store.folder / "let-chunk").touch()

    held(store, "embed", running)
    lost = until(cluster.busy, "a host with work").pop()
    cluster.hosts[lost].lose()
    (store.folder / "let-embed").touch()
    made = finished(running)

    reasons = restarted(cluster)
    assert {"chunk", "embed"} <= set(reasons)
    assert "TaskManager" in reasons["embed"]
    assert set(cluster.manager.jobs().values()) == {"FINISHED"}

    expected = finished(reindex(launcher, dump, "alone"))
    assert made["snapshot"] == expected["snapshot"]
    assert made["counts"] == expected["counts"]
    there, here = found(launcher, url, made["snapshot"]), found(launcher, "alone", made["snapshot"])
    assert there == here
    assert there["wrong"] == there["reports"] == []
    assert len(there["records"]["chunk"]) >= LEAST_PARTS


def found(launcher: Host, store: str, snapshot: str) -> Any:
    """Return the records of every stage in a store, and what is wrong with a snapshot."""
    looking = [sys.executable, "-c", FOUND, store, snapshot, *STAGES]
    return finished(launcher.start(looking, REACHES_STORE, subprocess.PIPE, subprocess.PIPE))
