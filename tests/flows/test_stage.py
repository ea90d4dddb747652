"""With a server a flow is Prefect's run; without one it is the function, and starts none."""

import pytest
from prefect import flow
from prefect.settings import PREFECT_API_URL

from flows.stage import in_run, run_flow, stage


@stage
def seen(number: int) -> tuple[int, bool]:
    return number, in_run()


@flow(persist_result=False)
def looking(number: int) -> tuple[int, bool]:
    return seen(number)


@pytest.mark.usefixtures("prefect_server")
def test_a_flow_runs_where_a_server_is_named() -> None:
    assert run_flow(looking, 1) == (1, True)


def test_without_a_server_it_is_called_as_it_is() -> None:
    assert not PREFECT_API_URL.value()
    assert run_flow(looking, 2) == (2, False)
