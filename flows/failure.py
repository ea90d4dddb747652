"""Handle a failed run: retry it if that can help, and notify the maintainers of the library.

Prefect's setting for retries (`PREFECT_FLOWS_DEFAULT_RETRIES` in `infra/prefect.yaml`) does not
distinguish errors. It would also retry after a refusal of the gate, or an invalid factory string.
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from urllib.request import Request, urlopen

import httpx

from flows.parameter_checks import get_flow_run
from rag_model.errors import (
    InputError,
    MissingExtraError,
    RefusedError,
    ResourceError,
    UnreachableError,
    UsageError,
)

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.schemas.objects import FlowRun, State

# an environment variable, because Prefect shows parameters and the address is secret
WEBHOOK = "BOOKWHEEL_WEBHOOK"
# a retry would fail in the same way, except after an `UnreachableError`
_FINAL_ERRORS = (InputError, MissingExtraError, RefusedError, ResourceError, UsageError)
_WEBHOOK_TIMEOUT = 30.0  # seconds for the webhook

Parameters = ParamSpec("Parameters")
FlowResult = TypeVar("FlowResult")


def stop_retries_if_useless(function: Callable[Parameters, FlowResult]) -> Callable[Parameters, FlowResult]:
    """Wrap a function so that its run fails at once if a retry cannot help."""

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> FlowResult:
        try:
            return function(*args, **kwargs)
        except UnreachableError:
            raise
        except _FINAL_ERRORS:
            _cancel_retries()
            raise

    return run


def notify_webhook(flow: "Flow[..., Any]", flow_run: "FlowRun", state: "State[Any]") -> None:
    """Post a run that failed after its last retry to the webhook of the environment, if any.

    The JSON has `flow`, `run`, `id`, `state`, `error`, and `store` and `ref` if the run has such
    parameters.

    Raises:
        UsageError: the setting is not a web address.
        OSError: the webhook does not answer, or its response is not a success.
    """
    webhook = os.environ.get(WEBHOOK)
    if not webhook:
        return
    if not webhook.startswith(("http://", "https://")):
        raise UsageError(f"{WEBHOOK} is not a web address: give one such as https://…")
    message = {
        "flow": flow.name,
        "run": flow_run.name,
        "id": str(flow_run.id),
        "state": state.name,
        "error": state.message,
    }
    message |= {name: flow_run.parameters[name] for name in ("store", "ref") if name in flow_run.parameters}
    request = Request(webhook, json.dumps(message).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=_WEBHOOK_TIMEOUT):
        pass


def _cancel_retries() -> None:
    flow_run = get_flow_run()
    if flow_run is None:
        return
    from prefect.client.orchestration import get_client  # noqa: PLC0415 - takes most of a second

    policy = flow_run.empirical_policy.model_copy(update={"retries": 0})
    # the failure itself is the one to report
    with suppress(httpx.HTTPError), get_client(sync_client=True) as client:
        client.update_flow_run(flow_run.id, empirical_policy=policy)
