"""What a run may be given: no secret in any parameter, and of a deployment's form only harmless options of Beam.

A person who reaches Prefect's UI may start a run with parameters of their own, with the rights of its worker.
"""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Annotated, ParamSpec, TypeVar

from prefect.context import FlowRunContext
from pydantic import WithJsonSchema

from beam_jobs.allowed import refuse_unlisted
from rag_model.secrets import HARMLESS, refuse_secrets

Given = ParamSpec("Given")
Made = TypeVar("Made")

# The server checks a form by this pattern before it records the run; `refuse_secret` is the whole check.
_HARMLESS = f"(?:{'|'.join(sorted(HARMLESS))})=[^&;#]*$"
_PATTERN = (
    r"^(?!.*:/{1,2}[^/?#]*@)"  # no user before the host
    rf"(?!.*://.*\?(?!{_HARMLESS})[^/?=]*=)"  # no parameter that is not known to be harmless
    rf"(?!.*https?://[^?#]*[?#](?!{_HARMLESS}))"
)
Url = Annotated[str, WithJsonSchema({"type": "string", "pattern": _PATTERN})]


def admitted(function: Callable[Given, Made]) -> Callable[Given, Made]:
    """Check the parameters of a flow before it runs.

    Raises:
        UsageError: a URL in them may contain a secret, or a deployment's run sets an option that is not allowed.
    """
    taken = signature(function)

    @wraps(function)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        given = taken.bind(*args, **kwargs).arguments
        refuse_secrets(given)
        if _of_deployment():
            refuse_unlisted(given.get("beam_options") or ())
        return function(*args, **kwargs)

    return run


def _of_deployment() -> bool:
    """Whether this run was started by a deployment: its parameters may be those of a form."""
    context = FlowRunContext.get()
    return context is not None and context.flow_run is not None and context.flow_run.deployment_id is not None
