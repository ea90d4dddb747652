"""Flink's and Spark's job server, played by a script in the place of Java: one for all jobs, gone with its launcher.

And a build on a real Spark, where the machine has one.
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
from tests.fixtures.machine_requirements import PRISM, SPARK_JARS, missing

LISTENS = (
    "import signal, socket, sys; port = sys.argv[sys.argv.index('--job-port') + 1]; "
    "server = socket.create_server(('127.0.0.1', int(port))); signal.pause()"
)


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """What starts a job server that only listens."""
    java, jar = tmp_path / "java", tmp_path / "server.jar"
    java.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{LISTENS}" "$@"\n')
    java.chmod(0o755)
    jar.touch()
    return ["--runner=FlinkRunner", f"--flink_job_server_jar={jar}", f"--job_server_java_launcher={java}"]


def servers(flags: list[str], pid: int | None = None) -> list[psutil.Process]:
    """The servers of these flags that a process started, and that still run."""
    jar = flags[1].partition("=")[2]
    below = psutil.Process(pid or os.getpid()).children(recursive=True)
    return [one for one in below if jar in words(one) and LISTENS in words(one)]


def words(process: psutil.Process) -> list[str]:
    """What a process was started with; nothing of one that has ended, as other tests' may have."""
    with suppress(psutil.NoSuchProcess):  # a zombie is one as well
        return process.cmdline()
    return []


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not true():
        assert time.monotonic() < deadline, "not seen in five minutes"
        time.sleep(0.05)


def reached(flags: list[str]) -> str | None:
    options = PipelineOptions(flags)
    set_job_server(options, flags)
    endpoint: str | None = options.view_as(PortableOptions).job_endpoint
    return endpoint


def test_all_jobs_of_the_same_flags_have_one_server_and_a_new_one_where_it_has_ended(flags: list[str]) -> None:
    first = reached(flags)
    assert reached(flags) == first
    (server,) = servers(flags)
    server.kill()
    until(lambda: reached(flags) != first)
    (other,) = servers(flags)
    options = PipelineOptions(flags)
    set_job_server(options, flags)
    cancel_job(options, "any")
    until(lambda: not other.is_running() or other.status() == psutil.STATUS_ZOMBIE)


def test_a_job_stages_no_file_of_the_launcher(flags: list[str]) -> None:
    options = PipelineOptions(flags)
    assert python_sdk_dependencies(options), "Beam no longer stages a list of packages: stop forbidding it"
    set_job_server(options, flags)
    assert python_sdk_dependencies(options) == []
    cancel_job(options, "any")


def test_it_ends_with_a_launcher_that_is_killed(flags: list[str]) -> None:
    code = (
        "import signal\n"
        "from apache_beam.options.pipeline_options import PipelineOptions\n"
        "from beam_jobs.flink import set_job_server\n"
        f"set_job_server(PipelineOptions({flags}), {flags}); print('there', flush=True); signal.pause()"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "there\n"
    (server,) = servers(flags, launcher.pid)
    launcher.send_signal(signal.SIGKILL)
    launcher.communicate()
    until(lambda: not server.is_running())


@pytest.mark.parametrize("runner", ["SparkRunner", "spark"])
def test_spark_gets_its_server_from_any_thread(flags: list[str], runner: str, tmp_path: Path) -> None:
    jar = f"--spark_job_server_jar={tmp_path / 'server.jar'}"
    spark_flags, endpoints = [f"--runner={runner}", jar, flags[2]], list[str | None]()
    thread = threading.Thread(target=lambda: endpoints.append(reached(spark_flags)))
    thread.start()
    thread.join()
    assert endpoints == [reached(spark_flags)] != [None]
    (server,) = servers(spark_flags)
    assert "--spark-master-url" in words(server)
    server.kill()


def test_prism_gets_its_server_from_any_thread(tmp_path: Path) -> None:
    program = tmp_path / "prism"
    listens = LISTENS.replace("--job-port", "--job_port")
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{listens}" "$0" "$@"\n')
    program.chmod(0o755)
    prism_flags, endpoints = ["--runner=PrismRunner", f"--prism_location={program}"], list[str | None]()
    thread = threading.Thread(target=lambda: endpoints.append(reached(prism_flags)))
    thread.start()
    thread.join()
    assert endpoints == [reached(prism_flags)] != [None]
    below = psutil.Process().children(recursive=True)
    (server,) = [process for process in below if {str(program), listens} <= {*words(process)}]
    server.kill()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("engine", "variable", "part", "flags"),
    [
        ("Spark", SPARK_JARS, "the jar of Beam's job server for Spark",
         ["--spark_job_server_jar={}", "--spark_master_url=local[2]"]),
        ("Prism", PRISM, "Beam's prism program", ["--prism_location={}"]),
    ],
    ids=["spark", "prism"],
)  # fmt: skip
def test_a_build_on_an_engine_gives_the_snapshot_of_a_local_build(
    engine: str, variable: str, part: str, flags: list[str], mini_dump: Path, tiny: Path, tmp_path: Path
) -> None:
    file = os.environ.get(variable) or missing(engine.lower(), f"name {part} in {variable}")
    (tmp_path / "recipe.toml").write_text('part_bytes = 15_000\n[index.hnsw]\nfactory = "HNSW8"\n')
    given = ["--dump", str(mini_dump), "--encoder", str(tiny), "--recipe", str(tmp_path / "recipe.toml"), "--json"]
    cluster = [f"--runner={engine}Runner", *(flag.format(file) for flag in flags), "--environment_type=LOOPBACK"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "BOOKWHEEL_CACHE": str(tmp_path / "cache"), START_VARIABLE: "0"}
    alone.pop("PREFECT_API_URL", None)
    built = []
    for options in (cluster, ["--runner=FnApiRunner"]):
        store = ["--store", str(tmp_path / f"store-{len(built)}")]
        words = [Path(sys.executable).with_name("bookwheel"), "reindex", *store, *given, "--", *options]
        ended = subprocess.run(words, env=alone, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        built.append(json.loads(ended.stdout))
    assert built[0]["snapshot"] == built[1]["snapshot"]
    assert built[0]["counts"] == built[1]["counts"]


@pytest.mark.parametrize("others", [[], ["--runner=FlinkRunner", "--job_endpoint=elsewhere:8099"]])
def test_none_is_started_where_none_is_needed(others: list[str]) -> None:
    endpoint = reached(others)
    assert endpoint == ("elsewhere:8099" if others else None)
    assert not [one for one in psutil.Process().children() if "flink-job-server" in words(one)]


def test_why_none_starts_is_one_sentence(flags: list[str], tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"^Flink's job server did not start \(.*no-java.*\): it needs Java"):
        reached([*flags, "--job_server_java_launcher=no-java"])
    with pytest.raises(ResourceError, match=r"^Beam cannot download its job server .*absent.jar"):
        reached([*flags, f"--flink_job_server_jar={tmp_path}/absent.jar"])


class _JobManager(BaseHTTPRequestHandler):
    """Three jobs, the first of which has ended."""

    server: Any

    def do_GET(self) -> None:
        named = {"1": "chunk", "2": "embed", "3": "train"}
        jobs = [{"jid": jid, "name": f"bookwheel-{name}-run", "end-time": -1} for jid, name in named.items()]
        jobs[0]["end-time"] = 7
        self._answer(json.dumps({"jobs": jobs}).encode())

    def do_PATCH(self) -> None:
        self.server.patched.append(self.path)
        self._answer(b"{}")

    def _answer(self, said: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def job_manager() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _JobManager) as server:
        server.patched = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_the_job_of_that_name_is_cancelled_on_its_cluster_and_no_other(job_manager: Any) -> None:
    flags = [
        "--runner=FlinkRunner",
        f"--flink_master=127.0.0.1:{job_manager.server_port}",
        "--job_endpoint=elsewhere:1",
    ]
    options = PipelineOptions(flags)
    set_job_server(options, flags)
    cancel_job(options, "bookwheel-embed-run")
    cancel_job(options, "bookwheel-chunk-run")
    assert job_manager.patched == ["/jobs/2?mode=cancel"]


def test_a_cluster_that_has_gone_needs_no_cancelling() -> None:
    flags = ["--runner=FlinkRunner", "--flink_master=127.0.0.1:9", "--job_endpoint=elsewhere:1"]
    options = PipelineOptions(flags)
    set_job_server(options, flags)
    cancel_job(options, "bookwheel-embed-run")
