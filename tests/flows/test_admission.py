"""What a run may be given: the server refuses a form's secret before it is recorded, the run refuses the rest."""

import asyncio

import pytest
from jsonschema import Draft202012Validator
from prefect.client.orchestration import PrefectClient, get_client
from prefect.exceptions import PrefectHTTPStatusError
from prefect.flow_engine import run_flow as run_engine
from prefect.utilities.callables import parameter_schema

from beam_jobs.allowed import ALLOWED_VARIABLE
from flows import stage
from flows.add_index import add_index
from flows.adopt import adopt_library
from flows.compare import compare
from flows.evaluate import evaluate
from flows.finetune import finetune
from flows.launch import launch
from flows.maintain import upkeep, watch
from flows.parameter_checks import Url
from flows.reindex import reindex
from flows.stage import deployment_flow
from flows.takedown import takedown
from rag_model.errors import UsageError
from tests.rag_model.test_secrets import NO_QUERY, NO_USER, TAKEN, S

URLS = {"dump", "store", "encoder", "passages", "questions", "train", "dev", "wiki", "generator", "teacher"}
FLOWS = [reindex, launch, watch, upkeep, finetune, evaluate, compare, add_index, adopt_library, takedown]
ran: list[str] = []


@deployment_flow("admitted")
def admitted(store: Url, beam_options: list[str] | None = None) -> None:
    """Run if the parameters are admitted."""
    ran.append(store)


def pattern_of(schema: dict[str, object]) -> object:
    return schema.get("pattern") or schema["anyOf"][0].get("pattern")  # type: ignore[index]


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
def test_every_url_of_a_form_has_the_pattern(flow: object) -> None:
    properties = parameter_schema(flow.fn).model_dump()["properties"]  # type: ignore[attr-defined]
    named = URLS & set(properties) - ({"wiki"} if flow is takedown else set())  # the name of one, as `enwiki`
    assert named
    assert [name for name in named if not pattern_of(properties[name])] == []


def test_the_pattern_agrees_with_the_check() -> None:
    (store,) = [parameter_schema(admitted.fn).model_dump()["properties"]["store"]]
    valid = Draft202012Validator(store).is_valid
    assert [url for url in TAKEN if not valid(url)] == []
    passed = [url for url in NO_USER + NO_QUERY if valid(url)]
    assert len(passed) <= 12, passed  # odd spellings: the run refuses these


def deployment(client: object) -> object:
    flow = client.create_flow(admitted)  # type: ignore[attr-defined]
    return client.create_deployment(  # type: ignore[attr-defined]
        flow,
        "form",
        enforce_parameter_schema=True,
        parameter_openapi_schema=parameter_schema(admitted.fn).model_dump_for_openapi(),
    )


def test_a_run_of_a_deployment_is_admitted(prefect_server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ran.clear()
    monkeypatch.delenv(ALLOWED_VARIABLE, raising=False)
    given = {"store": "memory://x", "beam_options": ["--setup_file=/tmp/x"]}
    with get_client(sync_client=True) as client:
        form = deployment(client)
        with pytest.raises(PrefectHTTPStatusError) as refused:
            client.create_flow_run_from_deployment(form, parameters={"store": f"https://me:{S}@host"})
        assert refused.value.response.status_code == 409
        for _ in range(2):
            run = client.create_flow_run_from_deployment(form, parameters=given)
            with pytest.raises(UsageError, match="setup_file"):
                run_engine(admitted, flow_run=run, parameters=given)
        assert ran == []
        monkeypatch.setenv(ALLOWED_VARIABLE, "setup_file")
        run = client.create_flow_run_from_deployment(form, parameters=given)
        run_engine(admitted, flow_run=run, parameters=given)
    assert ran == ["memory://x"]


def test_a_run_of_the_command_line_is_free_and_records_no_secret(prefect_server: None) -> None:
    ran.clear()
    stage.run_flow(admitted, "memory://y", ["--setup_file=/tmp/x"])
    assert ran == ["memory://y"]
    before = asyncio.run(_count())
    with pytest.raises(UsageError, match="may be a secret"):
        stage.run_flow(admitted, f"https://{S}@host")
    assert asyncio.run(_count()) == before


async def _count() -> int:
    client: PrefectClient
    async with get_client() as client:
        return len(await client.read_flow_runs(limit=200))
