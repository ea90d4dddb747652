"""With a server a flow is Prefect's run; without one it is the function, and starts none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prefect import flow
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.machine.local import find_free_ports
from flows.stage import is_in_flow_run, run_flow, stage
from rag_model.errors import ServiceError


@stage
def seen(number: int) -> tuple[int, bool]:
    return number, is_in_flow_run()


@flow(persist_result=False)
def looking(number: int) -> tuple[int, bool]:
    return seen(number)


@pytest.mark.usefixtures("prefect_server")
def test_a_flow_runs_where_a_server_is_named() -> None:
    assert run_flow(looking, 1) == (1, True)


def test_without_a_server_it_is_called_as_it_is() -> None:
    assert not PREFECT_API_URL.value()
    assert run_flow(looking, 2) == (2, False)


def test_a_server_that_does_not_answer_is_one_sentence() -> None:
    (port,) = find_free_ports(1)
    with (
        temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{port}/api"}),
        pytest.raises(ServiceError, match=rf"server at http://127\.0\.0\.1:{port}/api cannot be reached: start it"),
    ):
        run_flow(looking, 3)


PROGRAM = """
import os, sys
from pathlib import Path
from flows.cli import run
from flows.stage import find_prefect_server
os.environ["PREFECT_LOGGING_LEVEL"] = "CRITICAL"  # as the command line does
Path("pyproject.toml").write_text('[project]\\ndependencies = ["prefect"]')
code = run(["reindex", "--dump", sys.argv[1], "--store", "store", "--dry-run"])
print(code, find_prefect_server(), *sorted({"prefect", "httpx"} & set(sys.modules)))
Path("pyproject.toml").write_text('[tool.prefect.api]\\nurl = "http://127.0.0.1:9/api"')
print(find_prefect_server())
"""


def test_a_build_without_a_server_imports_neither_prefect_nor_httpx(tmp_path: Path, mini_dump: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(mini_dump)],
        cwd=tmp_path,
        env={**environment, "HOME": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert result.stdout.splitlines()[-2:] == ["0 None", "http://127.0.0.1:9/api"]
