"""Flows run on the configured Prefect server; without a server they are plain functions."""

import pytest
from prefect import flow
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.machine.local import find_free_ports
from flows.stage import is_in_flow_run, run_flow, stage
from rag_model.errors import ServiceError


@stage
def report_number(number: int) -> tuple[int, bool]:
    return number, is_in_flow_run()


@flow(persist_result=False)
def number_flow(number: int) -> tuple[int, bool]:
    return report_number(number)


@pytest.mark.usefixtures("prefect_server")
def test_flow_runs_on_configured_server() -> None:
    assert run_flow(number_flow, 1) == (1, True)


def test_flow_is_plain_function_without_server() -> None:
    assert not PREFECT_API_URL.value()
    assert run_flow(number_flow, 2) == (2, False)


def test_unreachable_server_is_reported() -> None:
    (port,) = find_free_ports(1)
    with (
        temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{port}/api"}),
        pytest.raises(ServiceError, match=rf"server at http://127\.0\.0\.1:{port}/api cannot be reached: start it"),
    ):
        run_flow(number_flow, 3)
