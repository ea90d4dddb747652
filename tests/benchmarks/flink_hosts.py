"""A Flink cluster whose JobManager, TaskManagers and launcher run on separate hosts, which share nothing.

Each worker host has a TaskManager and its own pool of Python workers.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.flink_cluster import FORKING_POOL, SLOTS, Flink, flink_jars, job_server_jar, runner_jars, until
from tests.benchmarks.hosts import Host, hosts

MANAGER, LAUNCHER, STORE = "manager", "launcher", "store"
WORKERS = "one", "two"
SETTINGS = {
    "jobmanager.rpc.address": MANAGER,
    "jobmanager.rpc.port": 6123,
    "jobmanager.bind-host": "0.0.0.0",
    "rest.address": MANAGER,
    "rest.bind-address": "0.0.0.0",
    "taskmanager.bind-host": "0.0.0.0",
    "cluster.evenly-spread-out-slots": "true",  # otherwise one host with two slots runs all tasks
    "heartbeat.timeout": 30_000,  # milliseconds; a lost host refuses no connection, it is silent
}


@dataclass(slots=True)
class FlinkHosts:
    """The hosts, and the part of the cluster that runs on each."""

    hosts: dict[str, Host]
    manager: Flink
    workers: dict[str, Flink]
    flags: list[str]  # the options that send a job there

    def complete(self) -> bool:
        """Return whether all parts of the cluster are ready."""
        workers = self.workers.values()
        assert all(part.running() for part in (self.manager, *workers)), "a part of the cluster has ended"
        return self.manager.free_slots() == SLOTS * len(self.workers) and all(worker.listens() for worker in workers)

    def busy(self) -> set[str]:
        """Return the hosts that run a part of a job."""
        query_manager = self.manager.get_json
        running = [job["jid"] for job in query_manager("/jobs/overview")["jobs"] if job["state"] == "RUNNING"]
        steps = [(job, step["id"]) for job in running for step in query_manager(f"/jobs/{job}")["vertices"]]
        parts = [part for job, step in steps for part in query_manager(f"/jobs/{job}/vertices/{step}")["subtasks"]]
        return {part["host"] for part in parts if part["status"] == "RUNNING"}


@contextmanager
def flink_hosts(folder: Path, hidden: Path, environment: Mapping[str, str]) -> Iterator[FlinkHosts]:
    """Run a cluster whose hosts' folders are in `folder`, with one more host for the store, on which nothing runs.

    Args:
        folder: an empty folder within `hidden`.
        hidden: a folder that no host sees, as in `hosts`.
        environment: of the workers.

    Raises:
        AbsentError: Flink, Java or Beam's jars are missing.
        NoHostsError: this machine cannot make such hosts.
    """
    cluster_jars, utils = flink_jars()
    runner = runner_jars()
    classpath = ":".join(map(str, [*cluster_jars, utils, *runner]))
    programs = {jar.parent for jar in (*cluster_jars, utils, *runner)}
    with hosts([MANAGER, *WORKERS, LAUNCHER, STORE], folder, hidden, [*programs]) as host_by_name:
        jar = job_server_jar(host_by_name[LAUNCHER].folder / "server", [*runner, *cluster_jars])

        def node(name: str) -> Flink:
            host = host_by_name[name]
            settings: dict[str, Any] = {**SETTINGS, "taskmanager.host": name}
            return Flink(host.folder, classpath, jar, 8081, 50000, host.enter, settings, FORKING_POOL)

        cluster = FlinkHosts(host_by_name, node(MANAGER), {name: node(name) for name in WORKERS}, node(MANAGER).flags)
        parts = {MANAGER: cluster.manager, **cluster.workers}
        try:
            cluster.manager.prepare()
            cluster.manager.start_job_manager()
            for name, worker in cluster.workers.items():
                worker.prepare()
                worker.start_task_manager()
                worker.run("pool", worker.pool_command, host_by_name[name].environment(environment))
            until(cluster.complete, "both TaskManagers with their slots, and their pools")
            yield cluster
        except BaseException:
            for name, part in parts.items():
                print(f"==== {name}\n{part.logs()}")
            raise
        finally:
            for part in parts.values():
                part.end()
