"""Check a Flink cluster before a run; define the findings of `doctor`."""

import json
import shutil
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from apache_beam.options.pipeline_options import FlinkRunnerOptions, JobServerOptions, PipelineOptions, PortableOptions

_PATIENCE = 5.0  # seconds until a server that does not answer counts as down
# the server is down, or it is not the expected kind
AMISS = (OSError, ValueError, KeyError, TypeError)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    what: str
    ok: bool
    found: str
    todo: str = ""  # what to do if it is not ok


def fetch_json(url: str) -> Any:
    """Return the JSON response of a server.

    Raises:
        OSError, ValueError: the server does not answer, or its response is not JSON.
    """
    with urllib.request.urlopen(url, timeout=_PATIENCE) as answer:
        return json.load(answer)


def report_no_answer(what: str, url: str, failed: Exception, todo: str) -> Finding:
    """Return the finding for a server that gave no valid response."""
    return Finding(what, False, f"{url} gave no valid response ({getattr(failed, 'reason', failed)})", todo)


_NEVER = {"none", "off", "disable"}  # Flink's names for no restart
_RESTART = "set restart-strategy.type: fixed-delay in Flink's configuration: without it the first failure fails the job"


def check_cluster(options: PipelineOptions) -> Iterator[Finding]:
    """Check a cluster's slots, version and restart strategy, and the job server on this machine.

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
    todo = f"wait, add TaskManagers, or lower --parallelism={required_slots}: a job waits until all slots are free"
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
