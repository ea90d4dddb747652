"""A job on real Beam workers returns results in order, explains failures, and leaves no process running."""

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from beam_jobs import pipeline
from beam_jobs.job import run_job
from beam_jobs.job_settings import JobSettings
from beam_jobs.local_worker import WORKER_DIED, ForkServer
from beam_jobs.options import build_pipeline_options, count_worker_threads, is_local
from beam_jobs.pipeline import Worker, explain_failure
from rag_model.errors import BookwheelError, InputError, ResourceError, StoreError, UsageError
from rag_model.process import count_cpu_seconds
from rag_model.store.store import Store
from tests.beam_jobs import works

pytestmark = pytest.mark.xdist_group("beam")  # two jobs at once would need four cores


@pytest.fixture
def job_settings(tmp_path: Path) -> JobSettings:
    store = Store.open(str(tmp_path / "store"), create=True)
    return JobSettings(store.url, "run-1", poll_seconds=0.05)


def test_results_come_in_the_order_of_the_tasks_from_other_processes(job_settings: JobSettings) -> None:
    progress: list[tuple[int, int]] = []
    results = run_job(
        "square", works.square, [3, 1, 2, 5], job_settings, lambda done, total: progress.append((done, total))
    )
    assert [result["square"] for result in results] == [9, 1, 4, 25]
    assert os.getpid() not in {result["pid"] for result in results}
    assert progress[-1] == (4, 4)
    assert all(done <= total == 4 for done, total in progress)


def test_progress_of_a_second_job_of_a_stage_does_not_count_the_first(job_settings: JobSettings) -> None:
    run_job("square", works.square, [3, 1, 2], job_settings)
    done_counts: list[int] = []
    results = run_job("square", works.square, [4], job_settings, lambda done, total: done_counts.append(done))
    assert [result["square"] for result in results] == [16]
    assert set(done_counts) <= {0, 1}


def test_jobs_share_a_fork_server_whose_workers_have_the_environment_of_their_job(
    job_settings: JobSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = []
    for name in ("one", "two"):
        (folder := tmp_path / name).mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.setenv("BOOKWHEEL_OF_A_TEST", name)
        reports += run_job("look", works.describe_process, [1], job_settings)
    assert [report["variable"] for report in reports] == ["one", "two"]
    assert [report["folder"] for report in reports] == [str(tmp_path / "one"), str(tmp_path / "two")]
    (fork_server,) = {report["parent"] for report in reports}
    os.kill(fork_server, signal.SIGKILL)
    _wait_for(lambda: [fork_server] if not _is_running(fork_server) else [], 1)
    (report,) = run_job("look", works.describe_process, [1], job_settings)
    assert report["parent"] not in {fork_server, os.getpid()}, "another server has started"


def test_job_runs_in_a_deleted_folder(
    job_settings: JobSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "deleted").mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert [report["square"] for report in run_job("square", works.square, [3], job_settings)] == [9]


def test_fork_server_reports_the_exits_of_all_workers_that_end_together(tmp_path: Path) -> None:
    server, log = ForkServer(str(tmp_path / "server.log")), str(tmp_path / "worker.log")
    exit_codes = [server.start_worker({}, log) for _ in range(30)]  # without variables, a worker fails at once
    own_seconds, counted_seconds = sum(os.times()[:4]), count_cpu_seconds()
    assert [queue.get(timeout=120) for queue in exit_codes] == [1] * 30
    assert count_cpu_seconds() - counted_seconds > sum(os.times()[:4]) - own_seconds, "workers' time is counted"
    assert server._is_running()
    server._process.kill()


def test_no_tasks_start_no_job(job_settings: JobSettings) -> None:
    assert run_job("square", works.square, [], job_settings) == []


def test_an_error_of_a_worker_keeps_its_class(job_settings: JobSettings) -> None:
    with pytest.raises(InputError, match=r"^part \d is truncated: fetch it again$"):
        run_job("fail", works.raise_input_error, [1, 2], job_settings)


def test_a_bug_in_a_worker_is_reported_with_its_cause(job_settings: JobSettings) -> None:
    with pytest.raises(BookwheelError, match=r"the bug job failed .*ZeroDivisionError"):
        run_job("bug", works.divide_by_zero, [1], job_settings)


def test_a_worker_out_of_memory_is_one_sentence(job_settings: JobSettings) -> None:
    with pytest.raises(ResourceError, match=r"^a worker ran out of memory \(.*\): give each worker more"):
        run_job("hunger", works.allocate_too_much, [1], job_settings)


def test_a_task_that_an_engine_repeats_still_counts_as_new(job_settings: JobSettings) -> None:
    store = Store.open(job_settings.store_url)
    for number, task in ((0, 7), (0, 7), (1, 7)):  # a repeated task, then another task with the same inputs
        worker = Worker("note", works.record_number, job_settings, None, 0)
        worker.setup()
        worker.process((number, task))
    assert [report["is_new"] for report in store.runs.read_reports(job_settings.run, "note")] == [True, False]


def test_workers_of_another_version_are_refused(job_settings: JobSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker("square", works.square, job_settings, None, 0)
    worker.setup()
    monkeypatch.setattr("beam_jobs.pipeline.version", lambda _: "0.0.1")
    with pytest.raises(UsageError, match=r"a worker runs bookwheel 0\.0\.1 and the launcher "):
        worker.process((0, 3))


def test_a_store_that_workers_cannot_reach_is_named(job_settings: JobSettings, tmp_path: Path) -> None:
    worker = Worker("square", works.square, replace(job_settings, store_url=str(tmp_path / "elsewhere")), None, 0)
    worker.setup()
    with pytest.raises(StoreError, match=r"a worker cannot reach the store \(.*elsewhere.*\): use a store that all"):
        worker.process((0, 3))


LOST_WORKER = "failed in state FAILED: org.apache.beam.vendor.grpc.StatusRuntimeException: CANCELLED: client cancelled"
NO_SLOTS = "failed in state FAILED: java.util.concurrent.TimeoutException: Timeout has occurred: 300000 ms"
CANCELLED = "FAILED: org.apache.flink.runtime.client.JobCancellationException: Job was cancelled."
SPARK_STOPPED = """Pipeline x failed in state FAILED: java.lang.IllegalStateException: the context is stopped.
This stopped SparkContext was created at:

org.apache.spark.api.java.JavaSparkContext.<init>(JavaSparkContext.scala:58)
org.apache.beam.vendor.guava.TrustedListenableFutureTask$Interruptible.run(TrustedListenableFutureTask.java:82)
java.base/java.lang.Thread.run(Thread.java:840)
"""
SPARK_FAILED = """java.lang.RuntimeException: Error received from SDK harness: Traceback (most recent call last):
  File "chunk.py", line 1, in chunk
ZeroDivisionError: division by zero

\tat org.apache.spark.rdd.RDD.$anonfun$mapPartitions$2$adapted(RDD.scala:858)
\tat java.base/java.lang.reflect.Method.invoke(Unknown Source)
\t... 11 more

Driver stacktrace:
"""
WORKER_ERRORS = "rag_model.errors.StoreError: no\n\nrag_model.errors.InputError: so [while running 'Cut']"


@pytest.mark.parametrize(
    ("failure", "kind", "sentence"),
    [
        (LOST_WORKER, ResourceError, "lost workers more often"),
        (NO_SLOTS, ResourceError, "timed out waiting for as many slots as --parallelism requests"),
        (CANCELLED, BookwheelError, "was cancelled on its engine"),
        (SPARK_STOPPED, BookwheelError, r"IllegalStateException: the context is stopped\.\)"),
        (SPARK_FAILED, BookwheelError, r"\(RuntimeError: ZeroDivisionError: division by zero\)"),
        (WORKER_ERRORS, InputError, "^so$"),
        (f"{WORKER_DIED} -9", ResourceError, "was killed, perhaps because memory ran out"),
        (f"{WORKER_DIED} 3", BookwheelError, r"ended \(exit code 3\); its log .* says why"),
    ],
)
def test_failures_of_an_engine_are_explained(
    job_settings: JobSettings, failure: str, kind: type[BookwheelError], sentence: str, tmp_path: Path
) -> None:
    error = explain_failure(
        Store.open(job_settings.store_url), job_settings.run, "cut", RuntimeError(failure), tmp_path
    )
    assert type(error) is kind
    assert re.search(sentence, str(error))


def test_a_killed_worker_ends_the_job_instead_of_hanging_it(job_settings: JobSettings) -> None:
    with pytest.raises(ResourceError, match="was killed"):
        run_job("die", works.kill_worker, [1, 2], job_settings)


def test_workers_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    code = (
        "from beam_jobs.job import run_job\n"
        "from beam_jobs.job_settings import JobSettings\n"
        "from tests.beam_jobs import works\n"
        f"run_job('linger', works.wait_forever, [1, 2], JobSettings({store.url!r}, 'run-1'))\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    workers = _wait_for(lambda: [report["pid"] for report in store.runs.read_reports("run-1", "started")], 2)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    _wait_for(lambda: [pid for pid in workers if not _is_running(pid)], len(workers))


def _wait_for(list_items, count: int) -> list[int]:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 300
    while len(items := list_items()) < count:
        assert time.monotonic() < deadline, f"{items} after five minutes, wanted {count}"
        time.sleep(0.05)
    return list(items)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_flags_choose_the_runner_and_the_number_of_workers() -> None:
    assert is_local(build_pipeline_options([], 4))
    assert not is_local(build_pipeline_options(["--runner=FlinkRunner", "--flink_master=[local]"], 4))
    assert count_worker_threads(build_pipeline_options(["--direct_num_workers=1"], 4)) >= 1
    assert count_worker_threads(build_pipeline_options(["--runner=FlinkRunner"], 4)) == 0


def test_a_job_counts_its_tasks_for_the_runner_and_restores_what_it_changed(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    job_settings = JobSettings.new(store.url, ["--runner=FnApiRunner"])
    options = pipeline.build_pipeline_options(job_settings.flags, 3)
    worker = pipeline.Worker("square", works.square, job_settings, None, 0)
    beam_logger, hook = logging.getLogger("apache_beam"), threading.excepthook
    logger_state = beam_logger.level, beam_logger.propagate, [*beam_logger.handlers]
    job = pipeline._create_pipeline("square", worker, [(0, 2), (1, 3), (2, 4)], options, tmp_path / "log")
    with pipeline._PipelineThread(job, options) as pipeline_thread:
        logging.getLogger("apache_beam.runners").info("see https://console.cloud.google.com/dataflow/jobs/1")
        assert pipeline_thread.finished.wait(300)
    assert pipeline_thread.failure is None
    counters = pipeline_thread._result.metrics().query()["counters"]
    counts = {(counter.key.metric.namespace, counter.key.metric.name): counter.committed for counter in counters}
    assert counts["square", "tasks_done"] == 3
    assert threading.excepthook is hook
    assert (beam_logger.level, beam_logger.propagate, [*beam_logger.handlers]) == logger_state


def test_a_job_runs_through_beams_portable_job_service(job_settings: JobSettings) -> None:
    flags = ("--runner=PortableRunner", "--job_endpoint=embed", "--environment_type=LOOPBACK")
    portable_settings = replace(job_settings, flags=flags)
    reports = run_job("square", works.square, [1, 2, 3], portable_settings)
    assert [report["square"] for report in reports] == [1, 4, 9]
    with pytest.raises(InputError, match=r"^part 4 is truncated: fetch it again$"):
        run_job("fail", works.raise_input_error, [4], portable_settings)
