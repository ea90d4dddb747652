"""One job server of Flink, Spark or Prism serves all jobs of a launcher, and ends with it.

A script replaces Java. Builds on a real Spark and a real Prism run on machines that have them.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions
from apache_beam.transforms.environments import python_sdk_dependencies

from beam_jobs.flink import cancel_job, set_job_server
from beam_jobs.workers import START_VARIABLE
from rag_model.errors import ResourceError
from tests.fixtures.machine_requirements import PRISM, SPARK_JARS, skip_or_fail

LISTENING_SERVER = (
    "import signal, socket, sys; port = sys.argv[sys.argv.index('--job-port') + 1]; "
    "server = socket.create_server(('127.0.0.1', int(port))); signal.pause()"
)


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Flags of Flink that start a job server that only listens."""
    java, jar = tmp_path / "java", tmp_path / "server.jar"
    java.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{LISTENING_SERVER}" "$@"\n')
    java.chmod(0o755)
    jar.touch()
    return ["--runner=FlinkRunner", f"--flink_job_server_jar={jar}", f"--job_server_java_launcher={java}"]


def find_servers(flags: list[str], pid: int | None = None) -> list[psutil.Process]:
    """List the running job servers that a process has started for these flags."""
    jar = flags[1].partition("=")[2]
    descendants = psutil.Process(pid or os.getpid()).children(recursive=True)
    return [
        process
        for process in descendants
        if jar in get_command_line(process) and LISTENING_SERVER in get_command_line(process)
    ]


def get_command_line(process: psutil.Process) -> list[str]:
    """Return the arguments of a process, or an empty list if it has ended."""
    with suppress(psutil.NoSuchProcess):  # also raised for a zombie
        return process.cmdline()
    return []


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in five minutes"
        time.sleep(0.05)


def resolve_endpoint(flags: list[str]) -> str | None:
    options = PipelineOptions(flags)
    set_job_server(options, flags)
    endpoint: str | None = options.view_as(PortableOptions).job_endpoint
    return endpoint


def test_jobs_with_the_same_flags_share_a_server_that_is_restarted_when_it_has_ended(flags: list[str]) -> None:
    first = resolve_endpoint(flags)
    assert resolve_endpoint(flags) == first
    (server,) = find_servers(flags)
    server.kill()
    wait_until(lambda: resolve_endpoint(flags) != first)
    (second_server,) = find_servers(flags)
    options = PipelineOptions(flags)
    set_job_server(options, flags)
    cancel_job(options, "any")
    wait_until(lambda: not second_server.is_running() or second_server.status() == psutil.STATUS_ZOMBIE)


def test_a_job_stages_no_file_of_the_launcher(flags: list[str]) -> None:
    options = PipelineOptions(flags)
    assert python_sdk_dependencies(options), "Beam no longer stages a list of packages: stop forbidding it"
    set_job_server(options, flags)
    assert python_sdk_dependencies(options) == []
    cancel_job(options, "any")


def test_the_server_ends_when_its_launcher_is_killed(flags: list[str]) -> None:
    code = (
        "import signal\n"
        "from apache_beam.options.pipeline_options import PipelineOptions\n"
        "from beam_jobs.flink import set_job_server\n"
        f"set_job_server(PipelineOptions({flags}), {flags}); print('started', flush=True); signal.pause()"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "started\n"
    (server,) = find_servers(flags, launcher.pid)
    launcher.send_signal(signal.SIGKILL)
    launcher.communicate()
    wait_until(lambda: not server.is_running())


@pytest.mark.parametrize("runner", ["SparkRunner", "spark"])
def test_spark_gets_its_server_from_any_thread(flags: list[str], runner: str, tmp_path: Path) -> None:
    jar = f"--spark_job_server_jar={tmp_path / 'server.jar'}"
    spark_flags, endpoints = [f"--runner={runner}", jar, flags[2]], list[str | None]()
    thread = threading.Thread(target=lambda: endpoints.append(resolve_endpoint(spark_flags)))
    thread.start()
    thread.join()
    assert endpoints == [resolve_endpoint(spark_flags)] != [None]
    (server,) = find_servers(spark_flags)
    assert "--spark-master-url" in get_command_line(server)
    server.kill()


def test_prism_gets_its_server_from_any_thread(tmp_path: Path) -> None:
    program = tmp_path / "prism"
    server_code = LISTENING_SERVER.replace("--job-port", "--job_port")
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{server_code}" "$0" "$@"\n')
    program.chmod(0o755)
    prism_flags, endpoints = ["--runner=PrismRunner", f"--prism_location={program}"], list[str | None]()
    thread = threading.Thread(target=lambda: endpoints.append(resolve_endpoint(prism_flags)))
    thread.start()
    thread.join()
    assert endpoints == [resolve_endpoint(prism_flags)] != [None]
    descendants = psutil.Process().children(recursive=True)
    (server,) = [process for process in descendants if {str(program), server_code} <= {*get_command_line(process)}]
    server.kill()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("engine", "variable", "program", "flags"),
    [
        ("Spark", SPARK_JARS, "the jar of Beam's job server for Spark",
         ["--spark_job_server_jar={}", "--spark_master_url=local[2]"]),
        ("Prism", PRISM, "Beam's prism program", ["--prism_location={}"]),
    ],
    ids=["spark", "prism"],
)  # fmt: skip
def test_a_build_on_an_engine_gives_the_snapshot_of_a_local_build(
    engine: str, variable: str, program: str, flags: list[str], mini_dump: Path, tiny: Path, tmp_path: Path
) -> None:
    file = os.environ.get(variable) or skip_or_fail(engine.lower(), f"name {program} in {variable}")
    (tmp_path / "recipe.toml").write_text('part_bytes = 15_000\n[index.hnsw]\nfactory = "HNSW8"\n')
    arguments = ["--dump", str(mini_dump), "--encoder", str(tiny), "--recipe", str(tmp_path / "recipe.toml"), "--json"]
    cluster = [f"--runner={engine}Runner", *(flag.format(file) for flag in flags), "--environment_type=LOOPBACK"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "BOOKWHEEL_CACHE": str(tmp_path / "cache"),
        START_VARIABLE: "0",
    }
    environment.pop("PREFECT_API_URL", None)
    reports = []
    for options in (cluster, ["--runner=FnApiRunner"]):
        store = ["--store", str(tmp_path / f"store-{len(reports)}")]
        command = [Path(sys.executable).with_name("bookwheel"), "reindex", *store, *arguments, "--", *options]
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stderr
        reports.append(json.loads(process.stdout))
    assert reports[0]["snapshot"] == reports[1]["snapshot"]
    assert reports[0]["counts"] == reports[1]["counts"]


@pytest.mark.parametrize("flags", [[], ["--runner=FlinkRunner", "--job_endpoint=elsewhere:8099"]])
def test_no_server_is_started_if_none_is_needed(flags: list[str]) -> None:
    endpoint = resolve_endpoint(flags)
    assert endpoint == ("elsewhere:8099" if flags else None)
    assert not [process for process in psutil.Process().children() if "flink-job-server" in get_command_line(process)]


def test_a_server_that_does_not_start_is_explained(flags: list[str], tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"^Flink's job server did not start \(.*no-java.*\): it needs Java"):
        resolve_endpoint([*flags, "--job_server_java_launcher=no-java"])
    with pytest.raises(ResourceError, match=r"^Beam cannot download its job server .*absent.jar"):
        resolve_endpoint([*flags, f"--flink_job_server_jar={tmp_path}/absent.jar"])


class _JobManager(BaseHTTPRequestHandler):
    """Three jobs, the first of which has ended."""

    server: Any

    def do_GET(self) -> None:
        stages = {"1": "chunk", "2": "embed", "3": "train"}
        jobs = [{"jid": jid, "name": f"bookwheel-{name}-run", "end-time": -1} for jid, name in stages.items()]
        jobs[0]["end-time"] = 7
        self._answer(json.dumps({"jobs": jobs}).encode())

    def do_PATCH(self) -> None:
        self.server.patched_paths.append(self.path)
        self._answer(b"{}")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Do not print requests."""


@pytest.fixture
def job_manager() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _JobManager) as server:
        server.patched_paths = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_only_the_running_job_of_that_name_is_cancelled(job_manager: Any) -> None:
    flags = [
        "--runner=FlinkRunner",
        f"--flink_master=127.0.0.1:{job_manager.server_port}",
        "--job_endpoint=elsewhere:1",
    ]
    options = PipelineOptions(flags)
    set_job_server(options, flags)
    cancel_job(options, "bookwheel-embed-run")
    cancel_job(options, "bookwheel-chunk-run")
    assert job_manager.patched_paths == ["/jobs/2?mode=cancel"]


def test_cancelling_a_job_of_an_unreachable_cluster_raises_no_error() -> None:
    flags = ["--runner=FlinkRunner", "--flink_master=127.0.0.1:9", "--job_endpoint=elsewhere:1"]
    options = PipelineOptions(flags)
    set_job_server(options, flags)
    cancel_job(options, "bookwheel-embed-run")
