"""Parameters of flow runs: the server rejects secrets in a form before recording them; the run checks the rest."""

import asyncio
import re
from typing import Any

import pytest
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.exceptions import PrefectHTTPStatusError
from prefect.flow_engine import run_flow as run_engine
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError, validate

from beam_jobs.workers import ALLOWED_VARIABLE
from flows import stage
from flows.add_index import add_index
from flows.compare import compare
from flows.evaluate import evaluate
from flows.finetune import finetune
from flows.import_library import import_library
from flows.maintain import upkeep, watch
from flows.parameters import Url
from flows.reindex import reindex
from flows.release import release
from flows.reproduce import reproduce
from flows.stage import deployment_flow
from flows.start_reindex import start_reindex
from flows.takedown import takedown
from rag_model.errors import UsageError
from rag_model.secrets import build_secret_pattern
from tests.rag_model.test_secrets import HARMLESS_URLS, URLS_WITH_QUERIES, URLS_WITH_USERS, S

FLOWS = [
    reindex,
    start_reindex,
    watch,
    upkeep,
    finetune,
    evaluate,
    compare,
    release,
    add_index,
    import_library,
    takedown,
]
FLOWS += [reproduce]
SECRETS = [
    {"store": f"https://me:{S}@host"},
    {"store": f"HTTPS://me:{S}@host"},
    {"store": f"https://me%3A{S}%40host"},
    {"store": f"https://host/a;token={S}"},
    {"store": f"https://host/a#{S}"},
    {"store": f"https://host/a#dl=1&token={S}"},
    {"beam_options": [f"--flink_master=http://me:{S}@flink:8081"]},
    {"beam_options": ["--parallelism=2", f"--temp_location=s3://b/d?X-Amz-Signature={S}"]},
    {"recipe": {"represent": {"other": {"encoder": f"https://me:{S}@host/encoder"}}}},
    {"recipe": {"chunk": {"tokenizer": f"https://host/t?key={S}"}}},
    {"recipe": {f"https://{S}@host": 1}},
    {"settings": {"expression": f"rerank(bm25, https://me:{S}@host/model, 50)"}},
    {"files": {"trec": f"https://host/run;sig={S}"}},
    {"rows": f"abfs://container/d?sv=1&sig={S}"},
    {"report": [[[[f"https://host/?{S}"]]]]},
]
run_stores: list[str] = []


@deployment_flow("record-store")
def record_store(
    store: Url,
    beam_options: list[str] | None = None,
    recipe: dict[str, Any] | None = None,
    settings: Any = None,
    files: Any = None,
    rows: str | None = None,
    report: Any = None,
) -> None:
    """Record that a run with these parameters was allowed."""
    run_stores.append(store)


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
def test_the_form_of_every_flow_refuses_secrets_in_every_parameter(flow: object) -> None:
    schema = parameter_schema(flow.fn).model_dump_for_openapi()  # type: ignore[attr-defined]
    for name in schema["properties"]:
        for value in (f"https://me:{S}@host", [{"a": {"b": f"https://host/?token={S}"}}], {f"s3://{S}@b": 1}):
            errors = validate({name: value}, schema, ignore_required=True)
            assert any("an address without user" in error.message for error in errors), (name, value)


def test_secret_pattern_agrees_with_the_check() -> None:
    find = re.compile(build_secret_pattern()).search
    embedded = URLS_WITH_USERS[:-1] + URLS_WITH_QUERIES
    quoted = [text for url in embedded for text in (f'--option={{"url": "{url}"}}', f"rrf(a, {url}, 5)")]
    assert [text for text in URLS_WITH_USERS + URLS_WITH_QUERIES + quoted if not find(text)] == []
    assert [text for url in HARMLESS_URLS for text in (url, f"rrf(a, {url}, 5)") if find(text)] == []


@pytest.mark.parametrize("part", ["://", "http:/", "a:", "&page=1", "?", "%3A:", "@", "s3://::"])
def test_secret_pattern_takes_little_time(part: str) -> None:
    text = ("https://host?dl=1" + part * 4_096)[:4_096]
    re.compile(build_secret_pattern()).search(text)  # a cubic search would not end within the tests' time limit


def test_form_rejects_an_empty_dump() -> None:
    schema = parameter_schema(reindex.fn).model_dump_for_openapi()
    with pytest.raises(ValidationError) as error:
        validate({"dump": "", "store": "s"}, schema, raise_on_error=True)
    assert str(error.value) == "Validation failed for field 'dump'. Failure reason: '' should be non-empty"


def test_form_limits_the_length_of_texts() -> None:
    schema = parameter_schema(takedown.fn).model_dump_for_openapi()
    validate({"store": "s", "reason": "by order of a court; see https://host/order/7 and the letter"}, schema, True)
    with pytest.raises(ValidationError, match="a text of at most 4,096 characters"):
        validate({"store": "s", "reason": "x" * 5_000}, schema, True)


def create_deployment(client: object) -> object:
    flow = client.create_flow(record_store)  # type: ignore[attr-defined]
    return client.create_deployment(  # type: ignore[attr-defined]
        flow,
        "form",
        enforce_parameter_schema=True,
        parameter_openapi_schema=parameter_schema(record_store.fn).model_dump_for_openapi(),
    )


def test_deployment_run_needs_permission_for_pipeline_options(
    prefect_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_stores.clear()
    monkeypatch.delenv(ALLOWED_VARIABLE, raising=False)
    parameters = {"store": "memory://x", "beam_options": ["--setup_file=/tmp/x"]}
    with get_client(sync_client=True) as client:
        deployment_id = create_deployment(client)
        for _ in range(2):
            run = client.create_flow_run_from_deployment(deployment_id, parameters=parameters)
            with pytest.raises(UsageError, match="setup_file"):
                run_engine(record_store, flow_run=run, parameters=parameters)
        assert run_stores == []
        monkeypatch.setenv(ALLOWED_VARIABLE, "setup_file")
        run = client.create_flow_run_from_deployment(deployment_id, parameters=parameters)
        run_engine(record_store, flow_run=run, parameters=parameters)
    assert run_stores == ["memory://x"]


def test_the_server_stores_no_secret_of_a_form(prefect_server: None) -> None:
    with get_client(sync_client=True) as client:
        deployment_id = create_deployment(client)
        for parameters in SECRETS:
            with pytest.raises(PrefectHTTPStatusError) as error:
                client.create_flow_run_from_deployment(deployment_id, parameters={"store": "memory://x", **parameters})
            assert error.value.response.status_code == 409
            assert "an address without user" in error.value.response.text
            assert S not in error.value.response.text
        runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(deployment_id={"any_": [deployment_id]}), limit=200)
    assert [run.parameters for run in runs if S in str(run.parameters)] == []


@pytest.mark.parametrize("parameters", [SECRETS[1], SECRETS[6]])
def test_flow_call_with_a_secret_is_not_recorded(prefect_server: None, parameters: dict[str, object]) -> None:
    run_stores.clear()
    n_runs = asyncio.run(_count_flow_runs())
    with pytest.raises(UsageError, match="may be a secret"):
        record_store(**{"store": "memory://x", **parameters})  # type: ignore[arg-type]
    assert (run_stores, asyncio.run(_count_flow_runs())) == ([], n_runs)


def test_command_line_run_needs_no_permission_and_records_no_secret(prefect_server: None) -> None:
    run_stores.clear()
    stage.run_flow(record_store, "memory://y", ["--setup_file=/tmp/x"])
    assert run_stores == ["memory://y"]
    n_runs = asyncio.run(_count_flow_runs())
    with pytest.raises(UsageError, match="may be a secret"):
        stage.run_flow(record_store, f"https://{S}@host")
    assert asyncio.run(_count_flow_runs()) == n_runs


async def _count_flow_runs() -> int:
    client: PrefectClient
    async with get_client() as client:
        return len(await client.read_flow_runs(limit=200))
