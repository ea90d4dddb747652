"""Parameters of flows: derive command-line options from them, and check them before a run.

A flow's parameters are declared once and described in its docstring. The options and help texts of
the command line (`derive_command`) and the fields of Prefect's form are derived from this
declaration.

Anyone who can open Prefect's UI may start a run with parameters of their choice and with the rights
of its worker. So parameters with secrets are refused, and a form may set only harmless Beam
options.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from functools import cache, wraps
from inspect import Parameter as FunctionParameter
from inspect import getdoc, signature, unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar, cast

from cyclopts import Parameter

from beam_jobs.workers import refuse_unlisted, resolve_options
from flows.command.reply import StoreUrl
from rag_model.corpus.dump_formats.dump_format import DUMP_HELP
from rag_model.errors import UsageError
from rag_model.secrets import build_secret_pattern, refuse_secrets, refuse_url_as_path
from rag_model.snapshots.recipe import Recipe, read_recipe

if TYPE_CHECKING:
    from cyclopts import Token
    from prefect import Flow
    from prefect.client.schemas.objects import FlowRun
    from prefect.context import FlowRunContext
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema

_BEAM_OPTIONS = "beam_options"  # the parameter for Beam's options
_ARGS = "Args:\n"  # heading of the section of a docstring that describes the arguments
Parameters = ParamSpec("Parameters")
FlowResult = TypeVar("FlowResult")
# When the server refuses a form, it shows one of these phrases, followed by "was expected".
_NO_SECRET = (
    "an address without user, password, token or unknown query parameter (secrets are set in the "
    "environment of the worker)"
)
_SHORT_TEXT = "a text of at most 4,096 characters"
_MAX_CHARACTERS = 4_096  # limits the time that the search for secrets takes
_DEFINITION = "flows.ValueWithoutSecret:1"  # pydantic shows the part between the dot and the colon


class _NonEmptyText:
    """Refuse an empty string; serves as an annotation for forms and as a command-line validator.

    pydantic's own annotation would import pydantic, which takes a tenth of a second.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        return cast("CoreSchema", {**handler(source), "min_length": 1})

    def __call__(self, kind: object, text: str | None) -> None:
        """Refuse an empty string."""
        if text == "":
            raise ValueError("Give a value, or omit the option.")


_NON_EMPTY = _NonEmptyText()
# A URL, a path, a glob or a name.
Url = Annotated[str, Parameter(validator=_NON_EMPTY), _NON_EMPTY]


def create_file_option(
    read: Callable[[Path], Any], description: str | None = None, name: str | None = None
) -> Parameter:
    """Create a command-line option that takes a file, from which `read` loads the parameter.

    Without `description`, the docstring of the flow describes the option.
    """

    def convert(kind: object, tokens: "Sequence[Token]") -> Any:
        path = Path(tokens[0].value)
        refuse_url_as_path(path)
        return read(path)

    help_text: dict[str, Any] = {} if description is None else {"help": description}
    return Parameter(name, converter=convert, accepts_keys=False, n_tokens=1, **help_text)


# In a form, the user enters these settings as a table; on the command line, as a file.
RecipeParameter = Annotated[
    Recipe | None, create_file_option(read_recipe, "A TOML file; omitted settings keep their defaults.")
]
StoreParameter = Annotated[StoreUrl, Parameter(validator=_NON_EMPTY), _NON_EMPTY]
DumpParameter = Annotated[Url, Parameter(help=DUMP_HELP)]


class _SecretFreeValue:
    """Annotation of a parameter whose JSON schema refuses secrets in all nested strings.

    Prefect's server validates a form by this schema before it records the run. A check by the
    worker would be too late, because the server has recorded the parameters by then.
    """

    def __init__(self, annotation: Any) -> None:
        """Take the parameter's own annotation, to which the check is added."""
        self._annotation = annotation

    def __get_pydantic_core_schema__(self, _: Any, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        from pydantic_core import core_schema  # noqa: PLC0415 - the command line does not need it

        # An annotation such as `WithJsonSchema` replaces the JSON schema of the parameter's own
        # schema as a whole, so the check is added to another schema around it.
        return core_schema.no_info_after_validator_function(
            _return_value,
            handler.generate_schema(self._annotation),
            metadata={"pydantic_js_functions": [_add_secret_check]},
        )


def _return_value(value: Any) -> Any:
    return value


def _add_secret_check(parameter_schema: "CoreSchema", handler: "GetJsonSchemaHandler") -> dict[str, Any]:
    """Return the JSON schema of a parameter, extended by a check that refuses secrets."""
    from pydantic_core import core_schema  # noqa: PLC0415

    schema_definition = core_schema.any_schema(
        ref=_DEFINITION, metadata={"pydantic_js_functions": [_define_value_without_secret]}
    )
    schema_reference = core_schema.definition_reference_schema(_DEFINITION)
    json_schema = handler(core_schema.definitions_schema(schema_reference, [schema_definition]))
    # Prefect's UI ignores `if` and `then`, and renders the field by the other keywords.
    return {**handler(parameter_schema), "if": {}, "then": json_schema}


def _define_value_without_secret(_: "CoreSchema", handler: "GetJsonSchemaHandler") -> dict[str, Any]:
    """Return the schema of JSON values in which no string, at any depth, contains a secret."""
    from pydantic_core import core_schema  # noqa: PLC0415

    reference_schema = handler(core_schema.definition_reference_schema(_DEFINITION))
    return {
        "if": {"type": "string", "maxLength": _MAX_CHARACTERS},
        "then": {"if": {"pattern": _get_secret_pattern()}, "then": {"const": _NO_SECRET}},
        "else": {"if": {"type": "string"}, "then": {"const": _SHORT_TEXT}},
        "items": reference_schema,
        "additionalProperties": reference_schema,
        "propertyNames": reference_schema,
    }


_get_secret_pattern = cache(build_secret_pattern)


@cache
def get_checked_flow_class() -> "type[Flow[..., Any]]":
    """Return the class of flows that refuse parameters with secrets before a server records the
    run; this imports Prefect.
    """
    from prefect import Flow  # noqa: PLC0415 - slow, and not always needed

    class CheckedFlow(Flow[Parameters, FlowResult]):
        def serialize_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
            """Return the parameters as the server records them.

            Raises:
                UsageError: a URL may contain a secret.
            """
            refuse_secrets(parameters)
            return super().serialize_parameters(parameters)

    return CheckedFlow


def check_parameters(
    function: Callable[Parameters, FlowResult], *, starts_jobs: bool = True
) -> Callable[Parameters, FlowResult]:
    """Check the parameters of a flow before it runs, and prepend the operator's Beam options.

    Args:
        function: the flow.
        starts_jobs: whether the flow itself runs Beam jobs. If it only starts another run, the
            form's options are passed on without the operator's, because the worker of that run may
            have other defaults.

    Raises:
        UsageError: a URL may contain a secret, or a deployment's run sets an option that is not
            allowed.
    """
    flow_signature = signature(function, eval_str=True)

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> FlowResult:
        bound_arguments = flow_signature.bind(*args, **kwargs)
        refuse_secrets(bound_arguments.arguments)
        if _BEAM_OPTIONS in flow_signature.parameters and is_deployment_run():
            form_options = bound_arguments.arguments.get(_BEAM_OPTIONS) or ()
            refuse_unlisted(form_options)
            if starts_jobs:
                bound_arguments.arguments[_BEAM_OPTIONS] = resolve_options(form_options)
        return function(*bound_arguments.args, **bound_arguments.kwargs)

    checked_parameters = [
        parameter.replace(annotation=Annotated[Any, _SecretFreeValue(parameter.annotation)])
        for parameter in flow_signature.parameters.values()
    ]
    run.__dict__["__signature__"] = flow_signature.replace(parameters=checked_parameters)
    return run


def derive_command(
    flow: Callable[..., Any], *positional: str, excluded: Collection[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Derive the options of a command, and their help texts, from the parameters of its flow.

    The command's function gets the flow's arguments as a dictionary. The function's other
    parameters are options that only the command has. Words after `--` are the flow's
    `beam_options`, unless the function has a variadic parameter for them.

    Args:
        flow: the flow; the `Args` of its docstring become help texts.
        positional: parameters that are positional arguments of the command.
        excluded: parameters of the flow that the command does not have.
    """
    flow_function = unwrap(flow)
    flow_parameters = signature(flow_function, eval_str=True).parameters.values()

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        # the first parameter takes the arguments of the flow
        own_parameters = [*signature(function, eval_str=True).parameters.values()][1:]
        variadic_names = [parameter.name for parameter in own_parameters if parameter.kind is parameter.VAR_POSITIONAL]
        excluded_names = {*excluded, *([_BEAM_OPTIONS] if variadic_names else [])}
        derived_parameters = [
            _derive_parameter(parameter, is_positional=parameter.name in positional)
            for parameter in flow_parameters
            if parameter.name not in excluded_names
        ]
        command_parameters = sorted([*derived_parameters, *own_parameters], key=lambda parameter: parameter.kind)
        command_signature = signature(function).replace(parameters=command_parameters)

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            bound_arguments = command_signature.bind(*args, **kwargs)
            bound_arguments.apply_defaults()
            flow_arguments = {
                parameter.name: bound_arguments.arguments.pop(parameter.name) for parameter in derived_parameters
            }
            if (words := flow_arguments.get(_BEAM_OPTIONS)) and not words[0].startswith("-"):
                raise UsageError(
                    f"{function.__name__} takes no argument {words[0]!r}: give a value with its "
                    "option; --help lists the options"
                )
            return function(
                flow_arguments, *bound_arguments.arguments.pop("".join(variadic_names), ()), **bound_arguments.arguments
            )

        run.__dict__["__signature__"] = command_signature
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in command_parameters}
        run.__doc__ = _join_docstrings(getdoc(function) or "", getdoc(flow_function) or "")
        return run

    return declare


def _derive_parameter(parameter: FunctionParameter, *, is_positional: bool) -> FunctionParameter:
    """Turn a parameter of a flow into the parameter of the command."""
    if parameter.name == _BEAM_OPTIONS:
        return FunctionParameter(_BEAM_OPTIONS, parameter.VAR_POSITIONAL, annotation=str)
    return parameter.replace(kind=parameter.POSITIONAL_ONLY if is_positional else parameter.KEYWORD_ONLY)


def _join_docstrings(command_docstring: str, flow_docstring: str) -> str:
    """Return the command's docstring, with descriptions of arguments from its flow's docstring."""
    description, _, own_arguments = command_docstring.partition(_ARGS)
    flow_arguments = flow_docstring.partition(_ARGS)[2].partition("\n\n")[0]
    return f"{description.rstrip()}\n\n{_ARGS}{flow_arguments}\n{own_arguments}"


def is_deployment_run() -> bool:
    """Return whether a deployment started this run, so that its parameters may come from a form."""
    flow_run = get_flow_run()
    return flow_run is not None and flow_run.deployment_id is not None


def get_flow_run() -> "FlowRun | None":
    """Return the server's record of the flow run in which the caller runs, if there is one."""
    context = get_run_context()
    return context.flow_run if context else None


def get_run_context() -> "FlowRunContext | None":
    """Return the context of the flow run in which the caller runs; None outside a flow run, for
    example if Prefect was never imported.
    """
    if "prefect" not in sys.modules:
        return None
    from prefect.context import FlowRunContext  # noqa: PLC0415 - takes most of a second

    return FlowRunContext.get()
