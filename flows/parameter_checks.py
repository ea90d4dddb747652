"""Check a run's parameters: no secrets, and only harmless Beam options from a form.

Anyone who can open Prefect's UI may start a run with parameters of their choice and with the rights
of its worker.
"""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Annotated, ParamSpec, TypeVar

from prefect.context import FlowRunContext
from pydantic import WithJsonSchema

from beam_jobs.allowed import refuse_unlisted
from rag_model.secrets import HARMLESS_PARAMETERS, refuse_secrets

Parameters = ParamSpec("Parameters")
FlowResult = TypeVar("FlowResult")

# The server checks a form by this pattern before it records the run. `refuse_secrets` checks more.
_HARMLESS_PARAMETER = f"(?:{'|'.join(sorted(HARMLESS_PARAMETERS))})=[^&;#]*$"
_URL_WITHOUT_SECRETS = (
    r"^(?!.*:/{1,2}[^/?#]*@)"  # no user before the host
    # no parameter that is not known to be harmless
    rf"(?!.*://.*\?(?!{_HARMLESS_PARAMETER})[^/?=]*=)"
    rf"(?!.*https?://[^?#]*[?#](?!{_HARMLESS_PARAMETER}))"
)
Url = Annotated[str, WithJsonSchema({"type": "string", "pattern": _URL_WITHOUT_SECRETS})]


def check_parameters(function: Callable[Parameters, FlowResult]) -> Callable[Parameters, FlowResult]:
    """Check the parameters of a flow before it runs.

    Raises:
        UsageError: a URL may contain a secret, or a deployment's run sets an option that is not
            allowed.
    """
    flow_signature = signature(function)

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> FlowResult:
        arguments = flow_signature.bind(*args, **kwargs).arguments
        refuse_secrets(arguments)
        if _is_deployment_run():
            refuse_unlisted(arguments.get("beam_options") or ())
        return function(*args, **kwargs)

    return run


def _is_deployment_run() -> bool:
    """Return whether a deployment started this run, so that its parameters may come from a form."""
    context = FlowRunContext.get()
    return context is not None and context.flow_run is not None and context.flow_run.deployment_id is not None
