"""A stage of a flow: a Prefect task whose caching is the store's memo."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE

Given = ParamSpec("Given")
Made = TypeVar("Made")


def stage(function: Callable[Given, Made]) -> Task[Given, Made]:
    """Make a function a task that Prefect shows and times, and neither caches nor persists.

    Prefect's default cache key holds the run's id, so a rerun would never meet it; and results lie in the store.
    """
    return task(cache_policy=NO_CACHE, persist_result=False)(function)
