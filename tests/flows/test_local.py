"""The whole thing on one machine: servers and workers come up, runs appear and complete, and all of it goes down.

Beside the tests' own Prefect server: `up` starts one of its own, as a user's `make up` does.
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flows.local import Places, down, main, up

ROOT = Path(__file__).parents[2]
DEADLINE = 300.0  # seconds until a test gives up on a run
RECIPE = {"index": {"hnsw": {"factory": "HNSW8"}}, "part_bytes": 50_000}

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]


@dataclass(frozen=True, slots=True)
class Api:
    """Prefect's REST API, asked as its UI asks it."""

    url: str

    def __call__(self, path: str, body: Any = None, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        deadline = time.monotonic() + DEADLINE
        while True:
            try:
                with urllib.request.urlopen(asked, timeout=60) as answer:
                    return json.loads(answer.read() or b"null")
            except urllib.error.HTTPError as refused:
                if refused.code != 503 or time.monotonic() > deadline:  # 503: its database is busy, ask again
                    raise
            time.sleep(1)

    def deployment(self, flow: str) -> str:
        return str(self(f"/deployments/name/{flow}/library")["id"])

    def runs(self, deployment: str) -> list[Any]:
        wanted = {"deployments": {"id": {"any_": [deployment]}}, "sort": "EXPECTED_START_TIME_ASC"}
        found: list[Any] = self("/flow_runs/filter", wanted)
        return found

    def completed(self, deployment: str, which: Callable[[Any], bool]) -> Any:
        """Wait for a run to end; return it."""
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            ended = [run for run in self.runs(deployment) if which(run) and run["state_type"] in ENDED]
            if ended:
                return ended[0]
            time.sleep(1)
        raise AssertionError(f"no run ended: {[(run['name'], run['state_name']) for run in self.runs(deployment)]}")


ENDED = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    folder = tmp_path_factory.mktemp("local")
    try:
        places = up(folder, ROOT / "infra" / "prefect.yaml")
        make = "import sys; from rag_model.store.store import Store; Store.open(sys.argv[1], create=True)"
        environment = {**os.environ, **places.environment}
        subprocess.run([sys.executable, "-c", make, places.store], check=True, env=environment)
        yield places
    finally:
        stopped = down(folder)
        assert stopped == ["s3", "prefect", "bookwheel-cpu", "bookwheel-gpu"]
        assert down(folder) == []


@pytest.fixture
def api(places: Places) -> Api:
    return Api(places.api)


def test_every_flow_is_deployed_and_what_has_a_schedule_waits(api: Api) -> None:
    for flow, schedules in (("reindex", 1), ("watch", 1), ("upkeep", 1), ("finetune", 0), ("evaluate", 0)):
        found = api(f"/deployments/name/{flow}/library")
        assert found["description"]
        assert found["tags"][0] == "bookwheel"
        assert found["global_concurrency_limit"]["limit"] == 1
        assert [schedule["active"] for schedule in found["schedules"]] == [False] * schedules
        assert found["parameter_openapi_schema"]["properties"]["store"]["description"]


def test_a_run_that_is_triggered_completes_and_shows_what_it_made(
    api: Api, places: Places, mini_dump: Path, tiny: Path
) -> None:
    parameters = {
        "dump": str(mini_dump),
        "encoder": str(tiny),
        "recipe": RECIPE,
        "beam_options": ["--runner=FnApiRunner"],
    }
    deployment = api.deployment("reindex")
    made = api(f"/deployments/{deployment}/create_flow_run", {"parameters": parameters})
    run = api.completed(deployment, lambda run: run["id"] == made["id"])
    assert run["state_type"] == "COMPLETED", run["state"]
    assert run["parameters"]["store"] == places.store
    artifacts = api("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}})
    assert {"reindex-counts", "reindex-report", "reindex-embed"} <= {artifact["key"] for artifact in artifacts}


def test_a_scheduled_run_appears_and_completes(api: Api, places: Places) -> None:
    deployment = api.deployment("upkeep")
    schedule = {"schedule": {"interval": 20.0, "anchor_date": "2026-01-01T00:00:00Z"}, "active": True}
    (added,) = api(f"/deployments/{deployment}/schedules", [schedule])
    try:
        run = api.completed(deployment, lambda run: run["auto_scheduled"])
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
    deployment = api.deployment("reindex")
    with pytest.raises(urllib.error.HTTPError) as refused:
        api(f"/deployments/{deployment}/create_flow_run", {"parameters": parameters})
    assert says in json.loads(refused.value.read())["detail"]


def test_up_twice_is_up_once(places: Places) -> None:
    folder = Path(places.environment["PREFECT_HOME"]).parent
    before = (folder / "processes.json").read_text()
    assert up(folder, ROOT / "infra" / "prefect.yaml") == places
    assert (folder / "processes.json").read_text() == before


def test_down_leaves_a_process_alone_that_only_has_the_number(tmp_path: Path) -> None:
    stranger = {"name": "prefect", "pid": 1, "began": "12345"}
    (tmp_path / "processes.json").write_text(json.dumps([stranger]))
    assert down(tmp_path) == []


def test_what_is_typed_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    assert main(["sideways"]) == 2
    monkeypatch.chdir(tmp_path)
    assert main(["up", str(tmp_path / "x")]) == 2
    assert "there is no infra/prefect.yaml here" in capsys.readouterr().err
