"""Failed flow runs are retried if the error may be temporary; the final failure is reported to a webhook."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.states import Failed

from flows.maintain import watch
from flows.reindex import reindex
from flows.stage import deployment_flow, notify_webhook
from rag_model.errors import BookwheelError, InputError, RefusedError, StoreError, UnreachableError, UsageError
from tests.fixtures.dump_server import DumpSite, serve_dumps

ERRORS = {"gate": RefusedError, "flag": UsageError, "input": InputError, "reach": UnreachableError, "net": StoreError}
attempts: list[str] = []


@deployment_flow("fail-always")
def fail_always(store: str, error: str) -> None:
    """Fail every time."""
    attempts.append(store)
    raise ERRORS[error](f"{error} said no")


@pytest.fixture
def site() -> Iterator[DumpSite]:
    attempts.clear()
    with serve_dumps() as server:
        yield server


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize(("error", "n_runs"), [("gate", 1), ("flag", 1), ("input", 1), ("reach", 3), ("net", 3)])
def test_temporary_errors_are_retried_and_the_webhook_is_called_once(
    site: DumpSite, monkeypatch: pytest.MonkeyPatch, error: str, n_runs: int
) -> None:
    monkeypatch.setenv("BOOKWHEEL_WEBHOOK", site.url + "alarm")
    with pytest.raises(BookwheelError, match="said no"):
        fail_always.with_options(retries=2, retry_delay_seconds=0)("here", error)
    assert len(attempts) == n_runs
    (alarm,) = site.posted_bodies
    assert (alarm["flow"], alarm["state"], alarm["store"]) == ("fail-always", "Failed", "here")
    assert f"{error} said no" in alarm["error"]
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(alarm["id"])
    assert (run.name, run.run_count) == (alarm["run"], n_runs)


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("parameter", ["dump", "encoder"])
def test_missing_dump_or_encoder_is_not_retried(mini_dump: Path, tiny: Path, tmp_path: Path, parameter: str) -> None:
    parameters = {"dump": str(mini_dump), "encoder": str(tiny), "store": str(tmp_path / "store")}
    parameters[parameter] = str(tmp_path / "nothing.here")
    state = reindex.with_options(retries=2, retry_delay_seconds=0)(**parameters, return_state=True)  # type: ignore[call-overload]
    assert "nothing.here" in str(state.message)
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(state.state_details.flow_run_id).run_count == 1


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize(("status", "n_runs"), [(503, 3), (404, 1)])
def test_outage_of_the_dump_server_is_retried(site: DumpSite, tmp_path: Path, status: int, n_runs: int) -> None:
    site.error_statuses = [status] * 9
    watch_with_retries = watch.with_options(retries=2, retry_delay_seconds=0)
    state = watch_with_retries(site.url, str(tmp_path / "store"), str(tmp_path / "dumps"), return_state=True)  # type: ignore[call-overload]
    assert "/testwiki/ cannot be read" in str(state.message)
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(state.state_details.flow_run_id).run_count == n_runs


def test_flow_runs_as_a_function_without_a_server() -> None:
    attempts.clear()
    with pytest.raises(RefusedError):
        fail_always.fn("here", "gate")
    assert attempts == ["here"]


def test_error_for_an_invalid_webhook_hides_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOKWHEEL_WEBHOOK", "/etc/s3cret")
    run = FlowRun(flow_id="8b1a9953-c461-4a6c-9ad5-9e0a8e9bbd39", parameters={})
    with pytest.raises(UsageError, match="BOOKWHEEL_WEBHOOK is not a web address") as error:
        notify_webhook(fail_always, run, Failed())
    assert "s3cret" not in str(error.value)
