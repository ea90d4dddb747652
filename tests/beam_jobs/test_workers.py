"""A form may set Beam's sizes, and nothing that runs code or names a file, a host or a credential; workers fit into
the free memory.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from beam_jobs.options import check_flags
from beam_jobs.workers import (
    ALLOWED_VARIABLE,
    DEFAULT_VARIABLE,
    get_worker_memory,
    refuse_unlisted,
    resolve_options,
)
from rag_model.errors import UsageError
from rag_model.process import get_free_bytes
from tests.benchmarks.flink_cluster import ROOT

HARMFUL = [
    "--environment_type=PROCESS",
    '--environment_config={"command": "/tmp/x"}',
    "--environment_conf=x",  # Beam's parser takes the beginning of a name
    "--environment_option=process_command=/tmp/x",
    "--sdk_location=https://host/sdk.tar.gz",
    "--sdk_container_image=host/image",
    "--extra_package=/tmp/x.tar.gz",
    "--setup_file=/tmp/setup.py",
    "--requirements_file=/tmp/r.txt",
    "--beam_plugin=os",
    "--file_to_stage=/etc/passwd",
    "--service_account_email=a@b",
    "--impersonate_service_account=a@b",
    "--temp_location=gs://elsewhere",
    "--flink_master=elsewhere:8081",
    "--flink_job_server_jar=http://elsewhere/x.jar",
    "--job_server_java_launcher=/tmp/x",
    "--job_endpoint=elsewhere:1",
    "--artifact_endpoint=elsewhere:1",
    "--s3_secret_access_key=x",
    "--experiments=x",
    "--pickle_library=dill",
    "--runner=os.path.Join",
    "--runner=apache_beam.runners.direct.DirectRunner",
    "--runner",
    "PortableRunner",
    "-x",
    "--",
    "word",
    "",
]


@pytest.fixture(autouse=True)
def no_operator_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOWED_VARIABLE, raising=False)
    monkeypatch.delenv(DEFAULT_VARIABLE, raising=False)


@pytest.mark.parametrize("flag", [flag for flag in HARMFUL if flag != "PortableRunner"])
def test_harmful_options_are_refused(flag: str) -> None:
    with pytest.raises(UsageError, match=f"to allow it, set {ALLOWED_VARIABLE}="):
        refuse_unlisted(["--runner=FlinkRunner", flag])


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--runner=FnApiRunner"],
        ["--runner", "FlinkRunner", "--parallelism", "4"],
        ["--direct_num_workers=2", "--direct_running_mode=multi_processing"],
    ],
)
def test_sizes_and_beams_own_runners_are_taken(flags: list[str]) -> None:
    refuse_unlisted(flags)
    PipelineOptions(flags)


def test_an_option_after_another_value_is_refused() -> None:
    for flags in (["--parallelism", "--setup_file=x"], ["--parallelism=1", "x"], ["--parallelism", "1", "2"]):
        with pytest.raises(UsageError, match="may not set"):
            refuse_unlisted(flags)


def test_the_operator_allows_more_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        ALLOWED_VARIABLE, """flink_master=flink:8081 --temp_location 'environment_config={"a": 1, "b": 2}'"""
    )
    refuse_unlisted(["--flink_master=flink:8081", "--temp_location", "gs://any"])
    refuse_unlisted(["--flink_master", "flink:8081", '--environment_config={"a": 1, "b": 2}'])
    for flag in ("--flink_master=elsewhere:8081", "--environment_config={}", "--setup_file=x"):
        with pytest.raises(UsageError, match="may not set"):
            refuse_unlisted([flag])
    monkeypatch.setenv(ALLOWED_VARIABLE, "'open")
    with pytest.raises(UsageError, match="separate options by spaces"):
        refuse_unlisted(["--flink_master=flink:8081"])


def test_a_run_has_the_options_of_the_operator_and_then_those_of_its_form(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_options(["--parallelism=4"]) == ("--parallelism=4",)
    operator = (ROOT / "infra/beam/flink.args").read_text().split()
    monkeypatch.setenv(DEFAULT_VARIABLE, " ".join(operator))
    resolved = resolve_options(["--parallelism=4"])
    assert resolved == (*operator, "--parallelism=4")
    assert PipelineOptions([*resolved]).get_all_options()["parallelism"] == 4
    assert resolve_options(resolved) == resolved  # a flow that another flow calls resolves them again
    refuse_unlisted(operator)  # they may be repeated in the form
    for flag in ("--flink_master=elsewhere:8081", "--setup_file=x"):
        with pytest.raises(UsageError, match="may not set"):
            resolve_options([flag])


def test_a_list_of_allowed_options_in_the_variable_of_the_defaults_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEFAULT_VARIABLE, "flink_master=flink:8081 environment_type=EXTERNAL")
    with pytest.raises(UsageError, match=f"options begin with --.*in forms with {ALLOWED_VARIABLE}"):
        resolve_options([])


def test_the_command_line_is_free_but_takes_no_secret() -> None:
    check_flags(["--environment_type=PROCESS", '--environment_config={"command": "/bin/true"}'])
    for flag in ("--flink_master=http://me:s3cret@host:8081", "--s3_secret_access_key=s3cret"):
        with pytest.raises(UsageError, match="environment") as error:
            check_flags([flag])
        assert "s3cret" not in str(error.value)


_HOLD_A_LEASE = """
import sys
from beam_jobs.workers import hold_launcher_lock
with hold_launcher_lock() as lease:
    print(lease, flush=True)
    sys.stdin.read()
"""


def test_the_next_run_removes_the_lease_of_a_killed_launcher(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    def start() -> tuple[subprocess.Popen[str], Path]:
        command = [sys.executable, "-c", _HOLD_A_LEASE]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    (killed_launcher, _), (launcher, lease) = start(), start()
    killed_launcher.kill()
    killed_launcher.communicate()
    for folder in tmp_path.iterdir():
        os.utime(folder, (0, 0))
    later_launcher, later_lease = start()
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {lease, later_lease}
    for process in (launcher, later_launcher):
        process.communicate()  # its input ends
    assert not [*tmp_path.iterdir()]


def test_workers_fit_into_the_memory_limit_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rag_model.process._CGROUP", tmp_path)
    machine_bytes = get_free_bytes()
    assert machine_bytes is not None
    assert machine_bytes > 1 << 20
    files = {"memory.max": "1000000\n", "memory.current": "600000\n", "memory.stat": "anon 1\ninactive_file 50000\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert get_free_bytes() == get_worker_memory(()) == 450_000
    (tmp_path / "memory.max").write_text("max\n")
    assert get_free_bytes() > 450_000  # type: ignore[operator]
