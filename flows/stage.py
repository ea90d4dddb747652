"""A flow and its stages, by Prefect's engine or as the plain functions they are.

Prefect's engine reports to a server. Where none is named it would start one for the run alone, which takes longer than
a monthly rebuild of a small library, and nobody would look at it: the command line then calls the function itself.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from prefect import Flow, flow, task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL

from flows.failure import final, tell

Given = ParamSpec("Given")
Made = TypeVar("Made")


def deployed(name: str) -> Callable[[Callable[Given, Made]], Flow[Given, Made]]:
    """Make a function a flow that deployments run: its results lie in the store, and of its failures somebody is told.

    A failure that the same run would only repeat, such as a gate that said no, is not tried again.
    """

    def declare(function: Callable[Given, Made]) -> Flow[Given, Made]:
        return flow(name=name, persist_result=False, result_serializer="json", on_failure=[tell], on_crashed=[tell])(
            final(function)
        )

    return declare


def stage(function: Callable[Given, Made]) -> Callable[Given, Made]:
    """Make a function a task that Prefect shows and times in a flow run, and neither caches nor persists.

    Caching is the store's memo: Prefect's default key holds the run's id, so a rerun would never meet it; and results
    lie in the store. Outside a flow run the function is called as it is.
    """
    shown = task(cache_policy=NO_CACHE, persist_result=False)(function)

    @wraps(function)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        return shown(*args, **kwargs) if in_run() else function(*args, **kwargs)

    return run


def run_flow(declared: Flow[Given, Made], *args: Given.args, **kwargs: Given.kwargs) -> Made:
    """Run a flow where a Prefect server is named (`PREFECT_API_URL`, or the profile's); else call its function."""
    return declared(*args, **kwargs) if PREFECT_API_URL.value() else declared.fn(*args, **kwargs)


def in_run() -> bool:
    """Whether this is part of a flow run that a server shows."""
    return FlowRunContext.get() is not None
