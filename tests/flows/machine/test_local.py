"""`up` starts all services on one machine as `make up` does, runs appear and complete, and `down` stops them."""

import json
import re
import shutil
import urllib.error
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

from flows.machine.local import down, main, up
from tests.fixtures.browser import open_page
from tests.fixtures.running_stack import DEADLINE, END_STATES, ROOT, TOKEN, PrefectApi, RunningStack, run_stack

RECIPE = {"index": {"hnsw": {"factory": "HNSW8"}}, "part_bytes": 50_000}
IN_PROCESS = ["--runner=FnApiRunner"]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]


@pytest.fixture(scope="module")
def stack(prefect_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("local")
    (folder / "prefect").mkdir()
    if prefect_database.exists():
        shutil.copy(prefect_database, folder / "prefect" / "prefect.db")
    with run_stack(folder) as started_stack:
        yield started_stack


@pytest.fixture
def api(stack: RunningStack) -> PrefectApi:
    return PrefectApi(stack.services.api)


@pytest.fixture
def parameters(mini_dump: Path, tiny: Path) -> dict[str, Any]:
    """Parameters of a small rebuild."""
    return {"dump": str(mini_dump), "encoder": str(tiny), "recipe": RECIPE}


def test_every_flow_is_deployed_with_inactive_schedules(api: PrefectApi) -> None:
    schedules = {"reindex": 1, "release": 1, "launch": 0, "watch": 1, "upkeep": 1, "finetune": 0, "evaluate": 0}
    schedules |= dict.fromkeys(["compare", "add-index", "import", "takedown"], 0)
    for flow, count in schedules.items():
        deployment = api(f"/deployments/name/{flow}/{flow}-library")
        assert deployment["description"]
        assert deployment["tags"][0] == "bookwheel"
        assert flow == "launch" or deployment["global_concurrency_limit"]["limit"] == 1
        assert [schedule["active"] for schedule in deployment["schedules"]] == [False] * count
        assert deployment["parameter_openapi_schema"]["properties"]["store"]["description"]


def test_a_run_started_in_a_browser_completes_after_a_restart_of_the_server(
    api: PrefectApi, stack: RunningStack, mini_dump: Path, tiny: Path
) -> None:
    values = {"dump": mini_dump, "encoder": tiny, "ref": "latest", "store": stack.services.store}
    with open_page(viewport={"width": 1280, "height": 1200}) as page:
        submit_form(page, f"{stack.services.ui}/deployments/deployment/{api.find_deployment('reindex')}/run", values)
    check_run(api, stack)
    (run,) = api.list_runs(api.find_deployment("reindex"))
    assert run["parameters"]["dump"] == str(mini_dump)
    assert run["parameters"]["beam_options"] == IN_PROCESS
    counts = api.list_artifacts(run["id"])["reindex-counts"]
    assert "is published: latest@1 names it now" in counts["description"]
    assert "dropped: redirect" in str(counts["data"])


def check_run(api: PrefectApi, stack: RunningStack) -> None:
    """Restart the server during the only run of `reindex`, which completes and has its artifacts."""
    run = api.wait_for_run(api.find_deployment("reindex"), lambda run: run["state_type"] == "RUNNING")
    stack.restart()
    lease = run["state"]["state_details"]["deployment_concurrency_lease_id"]
    api(f"/v2/concurrency_limits/leases/{lease}/renew", {"lease_duration": 600})  # or the server would end the run
    run = api.wait_for_end("reindex", run["id"])
    assert (run["state_type"], run["run_count"]) == ("COMPLETED", 1), run["state"]
    assert run["parameters"]["store"] == stack.services.store
    assert {"reindex-counts", "reindex-report", "reindex-embed"} <= set(api.list_artifacts(run["id"]))


def test_a_run_that_the_gate_refuses_is_not_retried_and_calls_the_webhook(
    api: PrefectApi, stack: RunningStack, parameters: dict[str, Any]
) -> None:
    few_passages = {**parameters, "limit": 1}  # fewer than the gate allows
    run = api.wait_for_end("reindex", api.start_run("reindex", few_passages))
    assert (run["state_type"], run["run_count"]) == ("FAILED", 1), run["state"]
    assert "latest did not move" in run["state"]["message"]
    (call,) = stack.wait_for_notifications()
    assert (call["flow"], call["run"], call["state"]) == ("reindex", run["name"], "Failed")
    assert call["error"] == run["state"]["message"]


def submit_form(page: Page, url: str, values: Mapping[str, object]) -> None:
    """Fill in and submit the form of a deployment."""
    page.goto(url)
    for name, value in values.items():
        find_field(page, name).fill(str(value))
    assert page.get_by_text("the ref to move to the new snapshot").count() == 1
    page.get_by_role("button", name="Add item").click()
    find_field(page, "beam_options").fill(*IN_PROCESS)
    submit = page.get_by_role("button", name="Submit")
    for _ in range(3):  # a busy server refuses the run, and the form stays open
        submit.click()
        with suppress(PlaywrightTimeoutError):
            submit.wait_for(state="hidden", timeout=1000 * DEADLINE / 4)  # the form closes when the server has the run
            return
    pytest.fail("the form was submitted three times and is still open")


def find_field(page: Page, name: str) -> Locator:
    """Return the input field of a parameter in a deployment's form."""
    label = page.locator(".schema-form-property__label").filter(has_text=re.compile(rf"^{name}\b"))
    return page.locator(".schema-form-property").filter(has=label).locator("textarea")


def test_a_scheduled_run_appears_and_completes(api: PrefectApi) -> None:
    deployment = api.find_deployment("upkeep")
    schedule = {"schedule": {"interval": 10.0, "anchor_date": "2026-01-01T00:00:00Z"}, "active": True}
    (added,) = api(f"/deployments/{deployment}/schedules", [schedule])
    try:
        run = api.wait_for_run(deployment, lambda run: run["auto_scheduled"] and run["state_type"] in END_STATES)
    finally:
        api(f"/deployments/{deployment}/schedules/{added['id']}", method="DELETE")
    assert run["state_type"] == "COMPLETED", run["state"]
    assert run["parameters"]["dry_run"] is True


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"limit": "many"}, "'limit'"),
        ({"recipe": {"chunk": {"words": "lots"}}}, "'recipe.chunk.words'"),
        ({"ref": 7}, "'ref'"),
    ],
)
def test_invalid_parameters_are_named(api: PrefectApi, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        api.start_run("reindex", parameters)
    assert message in json.loads(error.value.read())["detail"]


def test_logs_databases_and_objects_contain_no_secret(stack: RunningStack) -> None:
    """Search the logs, the database with parameters, artifacts and events, and the store after the tests above."""
    secrets = {TOKEN.encode(), stack.services.environment["AWS_SECRET_ACCESS_KEY"].encode()}
    with_secrets = {str(stack.folder / name) for name in ("places.json", "s3.json")}  # configure a shell and the server
    files = {path: data for path, data in stack.iter_contents() if path not in with_secrets}
    assert any(path.endswith("prefect.db") for path in files)
    assert any(b'"provenance"' in data for data in files.values()), "no manifest of a snapshot"
    assert [path for path, data in files.items() for secret in secrets if secret in data] == []


def test_a_second_up_changes_nothing(stack: RunningStack) -> None:
    processes = (stack.folder / "processes.json").read_text()
    assert up(stack.folder, ROOT / "infra" / "prefect.yaml") == stack.services
    assert (stack.folder / "processes.json").read_text() == processes


def test_down_does_not_stop_another_process_with_the_same_number(tmp_path: Path) -> None:
    process = {"name": "prefect", "pid": 1, "began": "12345"}
    (tmp_path / "processes.json").write_text(json.dumps([process]))
    assert down(tmp_path) == []


def test_wrong_commands_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    assert main(["sideways"]) == 2
    monkeypatch.chdir(tmp_path)
    assert main(["up", str(tmp_path / "x")]) == 2
    assert "there is no infra/prefect.yaml here" in capsys.readouterr().err
