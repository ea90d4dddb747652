"""Checks of a Flink cluster before a job is sent there."""

import shutil
from collections.abc import Iterator

from apache_beam.options.pipeline_options import FlinkRunnerOptions, JobServerOptions, PipelineOptions, PortableOptions

from flows.machine.finding import AMISS, Finding, ask, unanswered

_NEVER = {"none", "off", "disable"}  # Flink's names for no restart
_RESTART = "set restart-strategy.type: fixed-delay in Flink's configuration: without it the first failure fails the job"


def look(options: PipelineOptions) -> Iterator[Finding]:
    """Check a cluster's slots, its version, its restart strategy, and the job server on this machine.

    A cluster that Beam would start itself is not checked.
    """
    master = options.view_as(FlinkRunnerOptions).flink_master
    if master.startswith("["):
        return
    address = (master if "://" in master else f"http://{master}").rstrip("/")
    try:
        overview = ask(f"{address}/overview")
        slots, version = int(overview["slots-available"]), str(overview["flink-version"])
    except AMISS as failed:
        yield unanswered(
            "flink", f"{address}/overview", failed, f"start the cluster, or correct --flink_master={master}"
        )
        return
    yield _slots(options, master, version, slots)
    yield from _server(options, version)
    try:
        settings = {setting["key"]: setting["value"] for setting in ask(f"{address}/jobmanager/config")}
    except AMISS as failed:
        yield unanswered("flink, restarts", f"{address}/jobmanager/config", failed, f"is {master} a JobManager?")
        return
    strategy = settings.get("restart-strategy.type", settings.get("restart-strategy", "none"))
    yield Finding("flink, restarts", strategy not in _NEVER, strategy, _RESTART)


def _slots(options: PipelineOptions, master: str, version: str, slots: int) -> Finding:
    wanted = max(1, options.view_as(FlinkRunnerOptions).parallelism)
    todo = f"wait, add TaskManagers, or ask for less than --parallelism={wanted}: a job waits for all of its slots"
    return Finding("flink", slots >= wanted, f"Flink {version} at {master}, {slots} free slots", todo)


def _server(options: PipelineOptions, version: str) -> Iterator[Finding]:
    """Check what Beam's job server needs, if it is started on this machine."""
    flink = options.view_as(FlinkRunnerOptions)
    if options.view_as(PortableOptions).job_endpoint:
        return
    java = options.view_as(JobServerOptions).job_server_java_launcher
    found = shutil.which(java)
    yield Finding("flink, java", found is not None, found or f"{java} is not on the PATH", "install Java 17")
    if flink.flink_job_server_jar:
        return
    own = version.rpartition(".")[0]
    published = flink.PUBLISHED_FLINK_VERSIONS
    todo = f"say --flink_version={own}" if own in published else f"run a Flink of {', '.join(published)}"
    fits = own == flink.flink_version
    yield Finding("flink, version", fits, f"cluster {version}, job server for {flink.flink_version}", todo)
