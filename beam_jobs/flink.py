"""Start one job server of Flink, Spark or Prism for all jobs of this process.

Beam itself would start a server for each job, keep every server until the process ends, and could
start them only from the main thread. An interrupt from the terminal would end Beam's server before
it can cancel the job. The server here runs in its own process session. It ends when this process
ends, even if that is killed, because it waits on a pipe that the kernel closes.
"""

import atexit
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apache_beam.options.pipeline_options import (
    DebugOptions,
    FlinkRunnerOptions,
    JobServerOptions,
    PipelineOptions,
    PortableOptions,
    SparkRunnerOptions,
)
from apache_beam.runners.portability.flink_runner import MAGIC_HOST_NAMES, FlinkJarJobServer, FlinkRunner
from apache_beam.runners.portability.prism_runner import PrismJobServer, PrismRunner
from apache_beam.runners.portability.spark_runner import SparkJarJobServer, SparkRunner

from beam_jobs.options import get_runner_name
from rag_model import errors

_RUN_UNTIL_STDIN_CLOSES = (  # runs a command until it ends or standard input is closed
    'exec 3<&0; "$@" 3<&- </dev/null & server=$!; { read -r _ <&3; kill "$server"; } & wait "$server"'
)
# An experiment of Beam. Without it, Beam runs `pip freeze` for each job and stages the list in a
# folder of this machine, where workers on other machines cannot find it.
_STAGE_NOTHING = "disable_logging_submission_environment"
# seconds until a server that does not answer counts as failed; on a busy machine a JVM starts in 20
_START_TIMEOUT = 120.0


_NEEDS_JAVA = "it needs Java 11 or later on this machine's PATH (or --job_server_java_launcher)"


@dataclass(frozen=True, slots=True)
class _Engine:
    """An engine whose job server runs on this machine."""

    name: str  # Flink, Spark or Prism
    server_class: Any  # Beam's class for its job server
    file_option: str  # for messages: the server's file, and the option that names it
    start_requirement: str = _NEEDS_JAVA  # for messages: what the server needs to start


# The engines, by the name of Beam's runner class.
_ENGINES = {
    FlinkRunner.__name__: _Engine("Flink", FlinkJarJobServer, "its jar with --flink_job_server_jar"),
    SparkRunner.__name__: _Engine("Spark", SparkJarJobServer, "its jar with --spark_job_server_jar"),
    PrismRunner.__name__: _Engine(
        "Prism",
        PrismJobServer,
        "its program with --prism_location",
        "--prism_location must name a program for this machine",
    ),
}


class JobServer:
    """A running job server on this machine."""

    def __init__(self, options: PipelineOptions) -> None:
        """Start the server; return when it listens.

        Raises:
            ResourceError: the server does not start.
        """
        self._engine = _ENGINES[get_runner_name(options)]
        name = self._engine.name.lower()
        self._folder = tempfile.TemporaryDirectory(prefix=f"bookwheel-{name}-", ignore_cleanup_errors=True)
        self._log = Path(self._folder.name) / "log"
        options.view_as(JobServerOptions).artifacts_dir = self._folder.name
        try:
            command, self.endpoint = self._engine.server_class(options).subprocess_cmd_and_endpoint()
        except (OSError, ValueError, RuntimeError) as error:
            self._folder.cleanup()
            raise errors.ResourceError(
                f"Beam cannot download its job server for {self._engine.name} ({error}): name "
                f"{self._engine.file_option}, or a running server with --job_endpoint"
            ) from error
        with self._log.open("wb") as log:
            argv = ["sh", "-c", _RUN_UNTIL_STDIN_CLOSES, f"{name}-job-server", *map(str, command)]
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        atexit.register(self.stop)
        self._wait_until_listening()

    @property
    def is_running(self) -> bool:
        """Whether the server is running."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End the server and delete its files; further calls do nothing."""
        atexit.unregister(self.stop)
        if self._process.stdin is not None:
            self._process.stdin.close()
        with suppress(ProcessLookupError):
            try:
                self._process.wait(_START_TIMEOUT)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._folder.cleanup()

    def _wait_until_listening(self) -> None:
        host, _, port = self.endpoint.rpartition(":")
        deadline = time.monotonic() + _START_TIMEOUT
        while self.is_running and time.monotonic() < deadline:
            with socket.socket() as probe_socket:
                if probe_socket.connect_ex((host, int(port))) == 0:
                    return
            time.sleep(0.1)
        log_lines = self._log.read_text(errors="replace").strip().splitlines()
        self.stop()
        raise errors.ResourceError(
            f"{self._engine.name}'s job server did not start "
            f"({log_lines[-1] if log_lines else 'its log is empty'}): "
            f"{self._engine.start_requirement}; or name a "
            "server that runs elsewhere with --job_endpoint"
        )


def cancel_job(options: PipelineOptions, name: str) -> None:
    """Cancel a job on its Flink cluster, because Beam's own cancellation does not reach it.

    If this process started the job server that submits the job, stop the server first. Do nothing
    if there is no such job.

    Args:
        options: the job's options, as `set_job_server` changed them.
        name: the job's name.
    """
    if get_runner_name(options) != FlinkRunner.__name__:
        return
    for server in _servers.values():
        if server.endpoint == options.view_as(PortableOptions).job_endpoint:
            server.stop()
    master_url = options.view_as(FlinkRunnerOptions).flink_master
    if master_url in MAGIC_HOST_NAMES:
        return  # the cluster ran inside the job server, which has ended
    with suppress(OSError, ValueError, KeyError):  # without a cluster there is no job
        for cluster_job in json.loads(_send_request(f"{master_url}/jobs/overview"))["jobs"]:
            if cluster_job["name"] == name and cluster_job["end-time"] < 0:
                _send_request(f"{master_url}/jobs/{cluster_job['jid']}?mode=cancel", "PATCH")


def _send_request(url: str, method: str = "GET") -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=_START_TIMEOUT) as response:
        response_body: bytes = response.read()
        return response_body


_servers: dict[tuple[str, ...], JobServer] = {}
_servers_lock = threading.Lock()


def set_job_server(options: PipelineOptions, flags: Sequence[str]) -> None:
    """Set the job server in the options of a job on Flink, Spark or Prism: a server that earlier
    jobs with the same flags have started, or a new server.

    The job stages no files, because bookwheel is installed on the workers, and they read everything
    else from the store.

    Raises:
        ResourceError: there is no job server, and none can be started.
    """
    flink, portable_options = options.view_as(FlinkRunnerOptions), options.view_as(PortableOptions)
    runner = get_runner_name(options)
    if runner not in _ENGINES:
        return
    options.view_as(DebugOptions).add_experiment(_STAGE_NOTHING)  # type: ignore[no-untyped-call]
    if runner == FlinkRunner.__name__:
        flink.flink_master = FlinkRunner.add_http_scheme(flink.flink_master)  # type: ignore[no-untyped-call]
    submits_jar = flink.flink_submit_uber_jar or options.view_as(SparkRunnerOptions).spark_submit_uber_jar
    if portable_options.job_endpoint or submits_jar:
        return
    with _servers_lock:
        server = _servers.pop(tuple(flags), None)
        if server is not None and not server.is_running:
            server.stop()
            server = None
        server = _servers[tuple(flags)] = server or JobServer(options)
    portable_options.job_endpoint = server.endpoint
