import subprocess
import sys
from pathlib import Path

import pytest

from beam_jobs.job_settings import JobSettings
from beam_jobs.options import check_flags
from beam_jobs.workers import count_gpus, is_local, limit_workers
from rag_model.errors import UsageError
from rag_model.process import count_cores


@pytest.mark.parametrize("flags", [[], ["--direct_num_workers=2"], ["--runner=FnApiRunner", "--of_another_engine=1"]])
def test_flags_pass_through(flags: list[str]) -> None:
    assert check_flags(flags) == tuple(flags)


@pytest.mark.parametrize(
    ("flag", "message"), [("--direct_num_workers=x", "invalid int value: 'x'"), ("--runner=Nope", "no runner Nope")]
)
def test_flags_that_beam_refuses_are_one_sentence(flag: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=message) as error:
        check_flags([flag])
    assert "\n" not in str(error.value)
    assert capfd.readouterr().err == ""


def test_local_workers_are_as_many_as_memory_has_room_for() -> None:
    assert limit_workers([], 10, 10 * count_cores()) == ()
    assert limit_workers([], 10, 15) == (("--direct_num_workers=1",) if count_cores() > 1 else ())
    assert limit_workers([], 1 << 60) == (("--direct_num_workers=1",) if count_cores() > 1 else ())
    for flags in (["--direct_num_workers=9"], ["--runner=FlinkRunner"]):
        assert limit_workers(flags, 1 << 60, 1) == tuple(flags)


@pytest.mark.parametrize(
    ("flags", "count", "expected_flags"),
    [
        ([], 0, []),
        ([], 2, ["--direct_num_workers=2"]),
        (["--direct_num_workers=0"], 2, ["--direct_num_workers=2"]),  # Beam starts a worker for each core
        (["--direct_num_workers=16", "--x=1"], 2, ["--x=1", "--direct_num_workers=2"]),
        (["--direct_num_workers=1"], 2, ["--direct_num_workers=1"]),
        (["--direct_num_workers=16"], 0, ["--direct_num_workers=16"]),
        (["--runner=FlinkRunner"], 2, ["--runner=FlinkRunner"]),
    ],
)
def test_each_gpu_has_one_worker_whatever_the_cores(flags: list[str], count: int, expected_flags: list[str]) -> None:
    assert JobSettings("store", "run", tuple(flags)).for_gpus(count).flags == tuple(expected_flags)


@pytest.mark.parametrize(
    ("visible", "torch", "count"),
    [
        (None, "2.13.0", 3),
        (None, "2.13.0+cu130", 3),
        (None, "2.13.0+cpu", 0),
        ("", "2.13.0", 0),
        ("-1", "2.13.0", 0),
        ("1", "2.13.0", 1),
        ("0,2", "2.13.0", 2),
        ("0,-1,2", "2.13.0", 1),
        ("GPU-8932f937,MIG-3f1", "2.13.0", 2),
        ("0,1,2,3,4", "2.13.0", 3),
    ],
)
def test_gpus_are_counted_as_the_driver_shows_them_and_cuda_would_use_them(
    visible: str | None, torch: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia7", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr("beam_jobs.workers.get_versions", lambda name: {name: torch})
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus(tmp_path) == count


@pytest.mark.parametrize("flags", [["--runner=FlinkRunner"], ["--runner", "FlinkRunner"], ["--x=1", "--runner=x"]])
def test_an_engine_in_the_flags_runs_the_workers(flags: list[str]) -> None:
    assert not is_local(flags)
    assert is_local([flag for flag in flags if not flag.startswith("--runner")])


def test_workers_import_pandas_and_cloud_clients_only_on_demand() -> None:
    script = (
        "import sys\n"
        "from beam_jobs.workers import import_beam\n"
        "import_beam([])\n"
        "import beam_jobs.pipeline, beam_jobs.local_worker\n"
        "from beam_jobs.workers import prevent_pandas_import\n"
        "import pyarrow\n"
        "prevent_pandas_import()\n"
        "table = pyarrow.table({'row': [1, 2]})\n"
        "assert not {'pandas', 'boto3', 'google.cloud.storage', 'azure.storage.blob'} & set(sys.modules)\n"
        "assert len(table.to_pandas()) == 2\n"
        "import pandas\n"
        "import_beam(['--runner=DataflowRunner'])\n"
        "from apache_beam.io.filesystems import FileSystems\n"
        "assert FileSystems.get_filesystem('gs://bucket/name').scheme() == 'gs'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
