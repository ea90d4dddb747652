"""The whole thing on one machine: servers and workers come up, runs appear and complete, and all of it goes down.

Beside the tests' own Prefect server: `up` starts one of its own, as a user's `make up` does.
"""

import json
import re
import urllib.error
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

from flows.machine.local import down, main, up
from tests.fixtures.browser import browser_page
from tests.fixtures.running_stack import DEADLINE, ENDED, ROOT, TOKEN, Api, Everything, everything

RECIPE = {"index": {"hnsw": {"factory": "HNSW8"}}, "part_bytes": 50_000}
IN_PROCESS = ["--runner=FnApiRunner"]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Everything]:
    with everything(tmp_path_factory.mktemp("local")) as all_of_it:
        yield all_of_it


@pytest.fixture
def api(running: Everything) -> Api:
    return Api(running.places.api)


@pytest.fixture
def parameters(mini_dump: Path, tiny: Path) -> dict[str, Any]:
    """Of a small rebuild."""
    return {"dump": str(mini_dump), "encoder": str(tiny), "recipe": RECIPE}


def test_every_flow_is_deployed_and_what_has_a_schedule_waits(api: Api) -> None:
    schedules = {"reindex": 1, "release": 1, "launch": 0, "watch": 1, "upkeep": 1, "finetune": 0, "evaluate": 0}
    schedules |= dict.fromkeys(["compare", "add-index", "import", "takedown"], 0)
    for flow, count in schedules.items():
        found = api(f"/deployments/name/{flow}/{flow}-library")
        assert found["description"]
        assert found["tags"][0] == "bookwheel"
        assert flow == "launch" or found["global_concurrency_limit"]["limit"] == 1
        assert [schedule["active"] for schedule in found["schedules"]] == [False] * count
        assert found["parameter_openapi_schema"]["properties"]["store"]["description"]


def test_a_run_started_in_a_browser_completes_after_a_restart_of_the_server(
    api: Api, running: Everything, mini_dump: Path, tiny: Path
) -> None:
    typed = {"dump": mini_dump, "encoder": tiny, "ref": "latest", "store": running.places.store}
    with browser_page(viewport={"width": 1280, "height": 1200}) as page:
        start_by_hand(page, f"{running.places.ui}/deployments/deployment/{api.deployment('reindex')}/run", typed)
    check_run(api, running)
    (run,) = api.runs(api.deployment("reindex"))
    assert run["parameters"]["dump"] == str(mini_dump)
    assert run["parameters"]["beam_options"] == IN_PROCESS
    counts = api.artifacts(run["id"])["reindex-counts"]
    assert "is published: latest@1 names it now" in counts["description"]
    assert "dropped: redirect" in str(counts["data"])


def check_run(api: Api, running: Everything) -> None:
    """Restart the server under the only run of `reindex`, which completes and shows what it made."""
    begun = api.until(api.deployment("reindex"), lambda run: run["state_type"] == "RUNNING")
    running.restart()
    lease = begun["state"]["state_details"]["deployment_concurrency_lease_id"]
    api(f"/v2/concurrency_limits/leases/{lease}/renew", {"lease_duration": 600})  # else the run would be ended
    run = api.ended("reindex", begun["id"])
    assert (run["state_type"], run["run_count"]) == ("COMPLETED", 1), run["state"]
    assert run["parameters"]["store"] == running.places.store
    assert {"reindex-counts", "reindex-report", "reindex-embed"} <= set(api.artifacts(run["id"]))


def test_a_refused_gate_is_not_tried_again_and_an_automation_tells_of_it(
    api: Api, running: Everything, parameters: dict[str, Any]
) -> None:
    run = api.ended("reindex", api.run("reindex", {**parameters, "limit": 1}))  # loses most of the passages there were
    assert (run["state_type"], run["run_count"]) == ("FAILED", 1), run["state"]
    assert "latest did not move" in run["state"]["message"]
    (told,) = running.told()
    assert (told["flow"], told["run"], told["state"]) == ("reindex", run["name"], "Failed")
    assert told["error"] == run["state"]["message"]


def start_by_hand(page: Page, form: str, typed: Mapping[str, object]) -> None:
    """Fill the form of a deployment, at a URL, and submit it."""
    page.goto(form)
    for name, value in typed.items():
        field_of(page, name).fill(str(value))
    assert page.get_by_text("the ref to move to the new snapshot").count() == 1
    page.get_by_role("button", name="Add item").click()
    field_of(page, "beam_options").fill(*IN_PROCESS)
    submit = page.get_by_role("button", name="Submit")
    for _ in range(3):  # a server that is busy refuses the run, and the form stays
        submit.click()
        with suppress(PlaywrightTimeoutError):
            submit.wait_for(state="hidden", timeout=1000 * DEADLINE / 4)  # gone with the form: the server has the run
            return
    pytest.fail("the form was submitted three times, and stays")


def field_of(page: Page, name: str) -> Locator:
    """Return where a parameter of a deployment's form is typed."""
    label = page.locator(".schema-form-property__label").filter(has_text=re.compile(rf"^{name}\b"))
    return page.locator(".schema-form-property").filter(has=label).locator("textarea")


def test_a_scheduled_run_appears_and_completes(api: Api) -> None:
    deployment = api.deployment("upkeep")
    schedule = {"schedule": {"interval": 10.0, "anchor_date": "2026-01-01T00:00:00Z"}, "active": True}
    (added,) = api(f"/deployments/{deployment}/schedules", [schedule])
    try:
        run = api.until(deployment, lambda run: run["auto_scheduled"] and run["state_type"] in ENDED)
    finally:
        api(f"/deployments/{deployment}/schedules/{added['id']}", method="DELETE")
    assert run["state_type"] == "COMPLETED", run["state"]
    assert run["parameters"]["dry_run"] is True


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"limit": "many"}, "'limit'"),
        ({"recipe": {"chunk": {"words": "lots"}}}, "'recipe.chunk.words'"),
        ({"ref": 7}, "'ref'"),
    ],
)
def test_bad_parameters_are_refused_by_name(api: Api, parameters: dict[str, Any], says: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        api.run("reindex", parameters)
    assert says in json.loads(refused.value.read())["detail"]


def test_nothing_that_was_written_holds_a_secret(running: Everything) -> None:
    """After all of the above: logs, the database with parameters, artifacts and events, the store."""
    secrets = {TOKEN.encode(), running.places.environment["AWS_SECRET_ACCESS_KEY"].encode()}
    own = {str(running.folder / name) for name in ("places.json", "s3.json")}  # for a person's shell; the server's own
    written = {path: data for path, data in running.written() if path not in own}
    assert any(path.endswith("prefect.db") for path in written)
    assert any(b'"provenance"' in data for data in written.values())  # of a manifest, as the store keeps it
    assert [path for path, data in written.items() for secret in secrets if secret in data] == []


def test_up_twice_is_up_once(running: Everything) -> None:
    before = (running.folder / "processes.json").read_text()
    assert up(running.folder, ROOT / "infra" / "prefect.yaml") == running.places
    assert (running.folder / "processes.json").read_text() == before


def test_down_leaves_a_process_alone_that_only_has_the_number(tmp_path: Path) -> None:
    stranger = {"name": "prefect", "pid": 1, "began": "12345"}
    (tmp_path / "processes.json").write_text(json.dumps([stranger]))
    assert down(tmp_path) == []


def test_what_is_typed_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    assert main(["sideways"]) == 2
    monkeypatch.chdir(tmp_path)
    assert main(["up", str(tmp_path / "x")]) == 2
    assert "there is no infra/prefect.yaml here" in capsys.readouterr().err
