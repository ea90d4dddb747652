"""Workers do not start for recorded tasks, or for work that takes less time than their start."""

import os
from collections.abc import Iterator
from pathlib import Path

import faiss
import pytest

from beam_jobs.job import run_job
from beam_jobs.job_settings import JobSettings
from beam_jobs.tasks import limit_threads, restore_threads
from beam_jobs.workers import LOCAL_START_SECONDS, MEMORY_VARIABLE, START_VARIABLE
from rag_model.errors import InputError, ResourceError, UsageError
from rag_model.process import CORES_VARIABLE
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from tests.beam_jobs import works
from tests.beam_jobs.works import record_number

IN_PROCESS = "--runner=FnApiRunner"  # its workers are threads of this process, and report to the store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"), create=True)


@pytest.fixture
def job_settings(store: Store) -> JobSettings:
    return JobSettings(store.url, "run-1", (IN_PROCESS,), poll_seconds=0.05)


def test_recorded_tasks_are_not_sent_to_workers(store: Store, job_settings: JobSettings) -> None:
    record_number(2, store)
    progress: list[tuple[int, int]] = []
    results = run_job(
        "note", record_number, [1, 2, 3], job_settings, lambda *done: progress.append(done), memoised=True
    )
    assert [result["number"] for result in results] == [1, 2, 3]
    assert [result["is_new"] for result in results] == [True, False, True]
    assert store.runs.count_reports("run-1", "note") == 2
    assert progress[-1] == (3, 3)
    assert min(done for done, _ in progress) >= 1

    recorded_results = run_job(
        "note", record_number, [3, 2, 1], JobSettings(store.url, "run-2", (IN_PROCESS,)), memoised=True
    )
    assert [result["number"] for result in recorded_results] == [3, 2, 1]
    assert not any(result["is_new"] for result in recorded_results)
    assert store.runs.count_reports("run-2", "note") == 0


def test_a_recorded_output_that_was_deleted_is_made_again(store: Store, job_settings: JobSettings) -> None:
    out = BlobRef.from_json(record_number(2, store)["out"])
    store.files.remove(out.path)
    (result,) = run_job("note", record_number, [2], job_settings, memoised=True)
    assert result["is_new"]
    assert store.blobs.read(out) == b"2"


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Let faiss use two threads in this process, because the tests may run on one."""
    n_threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(2)
    yield
    faiss.omp_set_num_threads(n_threads)


@pytest.mark.usefixtures("two_threads")
def test_a_small_job_is_done_by_the_launcher_itself(store: Store) -> None:
    thread_settings = 2, os.environ.get("OMP_NUM_THREADS")
    progress: list[tuple[int, int]] = []
    job_settings = JobSettings(store.url, "run-1")
    results = run_job(
        "note",
        record_number,
        [1, 2],
        job_settings,
        lambda *done: progress.append(done),
        lambda task: LOCAL_START_SECONDS / 4,
    )
    assert {result["pid"] for result in results} == {os.getpid()}
    assert progress == [(1, 2), (2, 2)]
    assert (faiss.omp_get_max_threads(), os.environ.get("OMP_NUM_THREADS")) == thread_settings
    assert store.runs.count_reports("run-1", "note") == 0


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("threads", "parallel"), [(1, "false"), (2, "true")])
def test_a_worker_tokenises_with_all_its_threads(threads: int, parallel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # as the command sets it
    with restore_threads():
        limit_threads(threads)
        assert os.environ["TOKENIZERS_PARALLELISM"] == parallel
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


@pytest.mark.xdist_group("beam")
@pytest.mark.parametrize(("seconds", "flags"), [(LOCAL_START_SECONDS, ()), (0.1, ("--direct_num_workers=1",))])
def test_a_large_job_or_a_number_of_workers_starts_workers(
    store: Store, seconds: float, flags: tuple[str, ...]
) -> None:
    (result,) = run_job("note", record_number, [1], JobSettings(store.url, "run-1", flags), None, lambda task: seconds)
    assert result["pid"] != os.getpid()


FLINK = ("--x=1", "--runner=FlinkRunner")


@pytest.mark.parametrize(
    ("flags", "task_bytes", "seconds", "small"),
    [
        ((), 1 << 40, 3.9, True),
        ((), 0, 4.1, False),
        (("--direct_num_workers=2",), 0, 0.0, False),
        (FLINK, 0, 9.9, True),
        (FLINK, 0, 10.1, False),
        (FLINK, 1 << 30, 9.9, True),
        (FLINK, 1 << 31, 0.0, False),  # the launcher of an engine may be a small machine
        (("--runner", "flink"), 0, 9.9, True),
        (("--runner=apache_beam.runners.portability.flink_runner.FlinkRunner",), 0, 9.9, True),
        ((IN_PROCESS, *FLINK), 0, 9.9, True),  # Beam takes the last one
        ((*FLINK, IN_PROCESS), 0, 0.0, False),
        (("--runner=DataflowRunner",), 0, 0.0, False),  # not measured
    ],
)
def test_a_job_is_small_if_the_workers_of_its_runner_take_longer_to_start(
    flags: tuple[str, ...], task_bytes: int, seconds: float, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(START_VARIABLE, raising=False)
    assert JobSettings("store", "run", flags).with_task_bytes(task_bytes).is_too_small(seconds) is small


def test_the_launcher_of_an_engine_runs_no_task_beyond_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(START_VARIABLE, raising=False)
    monkeypatch.setenv(MEMORY_VARIABLE, "1000000")
    job_settings = JobSettings("store", "run", FLINK)
    assert job_settings.with_task_bytes(1_000_000).is_too_small(1.0)
    assert not job_settings.with_task_bytes(1_000_001).is_too_small(1.0)


def test_the_start_time_of_workers_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, seconds, small in (("0", 0.0, False), ("120", 119.0, True), ("120", 121.0, False)):
        monkeypatch.setenv(START_VARIABLE, value)
        for flags in ((), FLINK, ("--runner=DataflowRunner",)):
            assert JobSettings("store", "run", flags).is_too_small(seconds) is small
    for value in ("", "soon", "-1", "nan"):
        monkeypatch.setenv(START_VARIABLE, value)
        with pytest.raises(UsageError, match=f"^{START_VARIABLE} is '{value}': set it to a number of seconds"):
            JobSettings.new("store")


@pytest.mark.parametrize(
    ("variable", "unit"), [(CORES_VARIABLE, "number of processors"), (MEMORY_VARIABLE, "number of bytes")]
)
def test_a_wrong_variable_is_refused_before_any_work(variable: str, unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("many", "4GiB", "0", "-1", "1.5"):
        monkeypatch.setenv(variable, value)
        with pytest.raises(UsageError, match=f"^{variable} is '{value}': set it to a {unit}, at least 1, or unset it"):
            JobSettings.new("store")


def test_an_error_in_the_launcher_is_reported_like_one_of_a_worker(store: Store) -> None:
    job_settings = JobSettings(store.url, "run-1")
    with pytest.raises(InputError, match=r"^part 1 is truncated: fetch it again$"):
        run_job("fail", works.raise_input_error, [1], job_settings, None, lambda task: 0.0)
    with pytest.raises(ResourceError, match=r"could not read or write .*absent"):
        run_job("absent", works.read_missing_file, [1], job_settings, None, lambda task: 0.0)
