"""Checks of a Flink cluster before a job is sent there."""

import shutil
from collections.abc import Iterator

from apache_beam.options.pipeline_options import FlinkRunnerOptions, JobServerOptions, PipelineOptions, PortableOptions

from flows.machine.finding import AMISS, Finding, fetch_json, report_no_answer

_NEVER = {"none", "off", "disable"}  # Flink's names for no restart
_RESTART = "set restart-strategy.type: fixed-delay in Flink's configuration: without it the first failure fails the job"


def check_cluster(options: PipelineOptions) -> Iterator[Finding]:
    """Check a cluster's slots, its version, its restart strategy, and the job server on this machine.

    A cluster that Beam would start itself is not checked.
    """
    master = options.view_as(FlinkRunnerOptions).flink_master
    if master.startswith("["):
        return
    address = (master if "://" in master else f"http://{master}").rstrip("/")
    try:
        overview = fetch_json(f"{address}/overview")
        slots, version = int(overview["slots-available"]), str(overview["flink-version"])
    except AMISS as error:
        yield report_no_answer(
            "flink", f"{address}/overview", error, f"start the cluster, or correct --flink_master={master}"
        )
        return
    yield _check_slots(options, master, version, slots)
    yield from _check_job_server(options, version)
    try:
        settings = {setting["key"]: setting["value"] for setting in fetch_json(f"{address}/jobmanager/config")}
    except AMISS as error:
        yield report_no_answer("flink, restarts", f"{address}/jobmanager/config", error, f"is {master} a JobManager?")
        return
    strategy = settings.get("restart-strategy.type", settings.get("restart-strategy", "none"))
    yield Finding("flink, restarts", strategy not in _NEVER, strategy, _RESTART)


def _check_slots(options: PipelineOptions, master: str, version: str, slots: int) -> Finding:
    required_slots = max(1, options.view_as(FlinkRunnerOptions).parallelism)
    todo = (
        f"wait, add TaskManagers, or ask for less than --parallelism={required_slots}: a job waits for all of its slots"
    )
    return Finding("flink", slots >= required_slots, f"Flink {version} at {master}, {slots} free slots", todo)


def _check_job_server(options: PipelineOptions, version: str) -> Iterator[Finding]:
    """Check what Beam's job server needs, if it is started on this machine."""
    flink = options.view_as(FlinkRunnerOptions)
    if options.view_as(PortableOptions).job_endpoint:
        return
    java = options.view_as(JobServerOptions).job_server_java_launcher
    java_path = shutil.which(java)
    yield Finding("flink, java", java_path is not None, java_path or f"{java} is not on the PATH", "install Java 17")
    if flink.flink_job_server_jar:
        return
    cluster_version = version.rpartition(".")[0]
    published = flink.PUBLISHED_FLINK_VERSIONS
    todo = (
        f"say --flink_version={cluster_version}"
        if cluster_version in published
        else f"run a Flink of {', '.join(published)}"
    )
    fits = cluster_version == flink.flink_version
    yield Finding("flink, version", fits, f"cluster {version}, job server for {flink.flink_version}", todo)
