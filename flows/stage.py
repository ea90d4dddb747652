"""Decorators for flows and stages, which run in Prefect's engine or as plain functions.

Prefect's engine reports to a server. If none is configured it would start one for this run, which
takes longer than the rebuild of a small library, so the command line calls the function directly.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from prefect import Flow, task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL

from flows.failure import notify_webhook, stop_retries_if_useless
from flows.parameter_checks import CheckedFlow, check_parameters
from rag_model.secrets import refuse_secrets

Parameters = ParamSpec("Parameters")
FlowResult = TypeVar("FlowResult")


def deployment_flow(name: str) -> Callable[[Callable[Parameters, FlowResult]], Flow[Parameters, FlowResult]]:
    """Declare a flow for deployments, which posts failures to a webhook and persists no results.

    Results are in the store. A failure that a retry would only repeat, such as a refusal by the
    gate, is not retried.
    """

    def declare(function: Callable[Parameters, FlowResult]) -> Flow[Parameters, FlowResult]:
        return CheckedFlow(
            stop_retries_if_useless(check_parameters(function)),
            name=name,
            persist_result=False,
            result_serializer="json",
            on_failure=[notify_webhook],
            on_crashed=[notify_webhook],
        )

    return declare


def stage(function: Callable[Parameters, FlowResult]) -> Callable[Parameters, FlowResult]:
    """Declare a task that Prefect shows and times in a flow run, without caching or persisting it.

    The store's memo caches instead: Prefect's default key contains the run's id, so that another
    run would never find it. Outside a flow run the function is called directly.
    """
    prefect_task = task(cache_policy=NO_CACHE, persist_result=False)(function)

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> FlowResult:
        return prefect_task(*args, **kwargs) if in_run() else function(*args, **kwargs)

    return run


def run_flow(
    target_flow: Flow[Parameters, FlowResult], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> FlowResult:
    """Run a flow if a Prefect server is configured; else call its function.

    `PREFECT_API_URL`, in the environment or in Prefect's profile, configures the server.

    Raises:
        UsageError: a URL among the parameters, which a server records, may contain a secret.
    """
    refuse_secrets((args, kwargs))
    return target_flow(*args, **kwargs) if PREFECT_API_URL.value() else target_flow.fn(*args, **kwargs)


def in_run() -> bool:
    """Return whether the caller is part of a flow run on a server."""
    return FlowRunContext.get() is not None
