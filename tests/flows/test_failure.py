"""What a failed run leads to: tried again where that can help, and told to a webhook once it has failed for good."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.states import Failed

from flows.reindex import reindex
from flows.stage import deployment_flow, notify_webhook
from rag_model.errors import BookwheelError, InputError, RefusedError, StoreError, UnreachableError, UsageError
from tests.fixtures.dump_server import Site, serving

ERRORS = {
    "gate": RefusedError,
    "flag": UsageError,
    "input": InputError,
    "reach": UnreachableError,
    "net": StoreError,
}
tries: list[str] = []


@deployment_flow("stubborn")
def stubborn(store: str, error: str) -> None:
    """Fail every time."""
    tries.append(store)
    raise ERRORS[error](f"{error} said no")


@pytest.fixture
def site() -> Iterator[Site]:
    tries.clear()
    with serving() as of:
        yield of


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize(("error", "times"), [("gate", 1), ("flag", 1), ("input", 1), ("reach", 3), ("net", 3)])
def test_only_what_may_pass_is_tried_again_and_the_end_is_told_once(
    site: Site, monkeypatch: pytest.MonkeyPatch, error: str, times: int
) -> None:
    monkeypatch.setenv("BOOKWHEEL_WEBHOOK", site.url + "alarm")
    with pytest.raises(BookwheelError, match="said no"):
        stubborn.with_options(retries=2, retry_delay_seconds=0)("here", error)
    assert len(tries) == times
    (told,) = site.told
    assert {name: told[name] for name in ("flow", "state", "store")} == {
        "flow": "stubborn",
        "state": "Failed",
        "store": "here",
    }
    assert f"{error} said no" in told["error"]
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(told["id"])
    assert (run.name, run.run_count) == (told["run"], times)


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("wrong", ["dump", "encoder"])
def test_a_wrong_dump_or_encoder_is_not_tried_again(mini_dump: Path, tiny: Path, tmp_path: Path, wrong: str) -> None:
    given = {"dump": str(mini_dump), "encoder": str(tiny), "store": str(tmp_path / "store")}
    given[wrong] = str(tmp_path / "nothing.here")
    state = reindex.with_options(retries=2, retry_delay_seconds=0)(**given, return_state=True)  # type: ignore[call-overload]
    assert "nothing.here" in str(state.message)
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(state.state_details.flow_run_id).run_count == 1


def test_without_a_server_a_flow_is_its_function() -> None:
    tries.clear()
    with pytest.raises(RefusedError):
        stubborn.fn("here", "gate")
    assert tries == ["here"]


def test_a_webhook_that_is_no_address_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOKWHEEL_WEBHOOK", "/etc/s3cret")
    run = FlowRun(flow_id="8b1a9953-c461-4a6c-9ad5-9e0a8e9bbd39", parameters={})
    with pytest.raises(UsageError, match="BOOKWHEEL_WEBHOOK is not a web address") as refused:
        notify_webhook(stubborn, run, Failed())
    assert "s3cret" not in str(refused.value)
