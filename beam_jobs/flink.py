"""Flink's job server, one for all jobs of this process.

Beam would start one for each job, keep all of them until the process ends, and can do so only from the main thread. An
interrupt from the terminal would also end the server before it can be asked to cancel the job. This server is in a
session of its own, and ends with this process in any case: it waits on a pipe that the kernel closes.
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
from pathlib import Path

from apache_beam.options.pipeline_options import (
    DebugOptions,
    FlinkRunnerOptions,
    JobServerOptions,
    PipelineOptions,
    PortableOptions,
    StandardOptions,
)
from apache_beam.runners.portability.flink_runner import MAGIC_HOST_NAMES, FlinkJarJobServer, FlinkRunner

from rag_model import errors

_UNTIL_TOLD = (  # runs a command until it ends or standard input is closed
    'exec 3<&0; "$@" 3<&- </dev/null & server=$!; { read -r _ <&3; kill "$server"; } & wait "$server"'
)
# Otherwise Beam runs `pip freeze` for each job and stages the list, in a folder of this machine: workers elsewhere that
# fetch what is staged, as those that Beam's own image starts, would not find it.
_NOTHING_STAGED = "disable_logging_submission_environment"
_PATIENCE = 120.0  # seconds until a silent server counts as failed; a busy machine's JVM takes 20 to start


class JobServer:
    """A job server on this machine."""

    def __init__(self, options: PipelineOptions) -> None:
        """Start the server; return when it listens.

        Raises:
            ResourceError: the server does not start.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="bookwheel-flink-", ignore_cleanup_errors=True)
        self._log = Path(self._folder.name) / "log"
        options.view_as(JobServerOptions).artifacts_dir = self._folder.name
        try:
            command, self.endpoint = FlinkJarJobServer(options).subprocess_cmd_and_endpoint()  # type: ignore[no-untyped-call]
        except (OSError, ValueError, RuntimeError) as absent:
            self._folder.cleanup()
            raise errors.ResourceError(
                f"Beam cannot fetch the job server of its version for Flink ({absent}): name its jar with "
                "--flink_job_server_jar, or one that runs elsewhere with --job_endpoint"
            ) from absent
        with self._log.open("wb") as log:
            words = ["sh", "-c", _UNTIL_TOLD, "flink-job-server", *map(str, command)]
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        atexit.register(self.stop)
        self._await()

    @property
    def runs(self) -> bool:
        """Whether the server is running."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End the server and delete its files; does nothing the second time."""
        atexit.unregister(self.stop)
        if self._process.stdin is not None:
            self._process.stdin.close()
        with suppress(ProcessLookupError):
            try:
                self._process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._folder.cleanup()

    def _await(self) -> None:
        host, _, port = self.endpoint.rpartition(":")
        deadline = time.monotonic() + _PATIENCE
        while self.runs and time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex((host, int(port))) == 0:
                    return
            time.sleep(0.1)
        said = self._log.read_text(errors="replace").strip().splitlines()
        self.stop()
        raise errors.ResourceError(
            f"Flink's job server did not start ({said[-1] if said else 'it said nothing'}): it needs Java 11 or later "
            "on this machine's PATH (or --job_server_java_launcher), or one that runs elsewhere with --job_endpoint"
        )


def cancel(options: PipelineOptions, name: str) -> None:
    """Cancel a job on its cluster, which Beam's own cancelling does not reach; does nothing if there is no such job.

    The job server that was about to submit it is ended first, if this process started it.

    Args:
        options: those of the job, as `reach` changed them.
        name: the name of the job.
    """
    if options.view_as(StandardOptions).runner != FlinkRunner.__name__:
        return
    for server in _started.values():
        if server.endpoint == options.view_as(PortableOptions).job_endpoint:
            server.stop()
    master = options.view_as(FlinkRunnerOptions).flink_master
    if master in MAGIC_HOST_NAMES:
        return  # the cluster was part of the server
    with suppress(OSError, ValueError, KeyError):  # the cluster is gone, and the job with it
        for job in json.loads(_asked(f"{master}/jobs/overview"))["jobs"]:
            if job["name"] == name and job["end-time"] < 0:
                _asked(f"{master}/jobs/{job['jid']}?mode=cancel", "PATCH")


def _asked(url: str, method: str = "GET") -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=_PATIENCE) as answer:
        said: bytes = answer.read()
        return said


_started: dict[tuple[str, ...], JobServer] = {}
_starting = threading.Lock()


def reach(options: PipelineOptions, flags: Sequence[str]) -> None:
    """Set the job server in the options of a job for Flink: that of earlier jobs with the same flags, or a new one.

    The job then stages no file: workers have what they need installed, and read the rest from the store.

    Raises:
        ResourceError: there is no job server, and none can be started.
    """
    flink, portable = options.view_as(FlinkRunnerOptions), options.view_as(PortableOptions)
    if options.view_as(StandardOptions).runner != FlinkRunner.__name__:
        return
    options.view_as(DebugOptions).add_experiment(_NOTHING_STAGED)  # type: ignore[no-untyped-call]
    flink.flink_master = FlinkRunner.add_http_scheme(flink.flink_master)  # type: ignore[no-untyped-call]
    if portable.job_endpoint or flink.flink_submit_uber_jar:
        return
    with _starting:
        server = _started.pop(tuple(flags), None)
        if server is not None and not server.runs:
            server.stop()
            server = None
        server = _started[tuple(flags)] = server or JobServer(options)
    portable.job_endpoint = server.endpoint
