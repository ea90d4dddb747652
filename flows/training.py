"""Types of fine-tuning settings, for the command line and for forms in the Prefect UI.

In the Prefect UI each objective's settings are one choice of the form, which the server checks
before a run starts. The description of a setting shows its default, which the form does not send,
because some defaults depend on the model; the temperature, for example, depends on the norm of the
encoder's vectors.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from pydantic import PydanticUserError, TypeAdapter

from flows.parameters import create_file_option
from rag_model.toml import read_toml
from rag_model.training.objectives.objective import Objective, list_objective_names, list_objectives
from rag_model.training.settings import parse_field_comments

_DEFINITION_PREFIX = "#/$defs/"
_OBJECTIVES_HELP = "; ".join(
    f"`{objective.name}`: {objective.summary}{''.join(f', `--{option}`' for option in sorted(objective.options))}"
    for objective in list_objectives()
)


def build_form_schema(objectives: Iterable[Objective[Any]]) -> dict[str, Any]:
    """Return the JSON schema of a value that is null or has the settings of one of the objectives.

    Objectives with the same settings share one choice of the form, which is titled by their names.
    """
    names_by_settings: dict[type[Any], list[str]] = {}
    for objective in objectives:
        names_by_settings.setdefault(objective.settings, []).append(objective.name)
    return {
        "anyOf": [
            *(_build_settings_schema(settings, names) for settings, names in names_by_settings.items()),
            {"type": "null"},
        ]
    }


def _build_settings_schema(settings: type[Any], names: list[str]) -> dict[str, Any]:
    try:
        schema = TypeAdapter(settings).json_schema()
    except PydanticUserError:  # types of installed packages may have no schema, so users enter JSON
        return {"title": ", ".join(names), "type": "object"}
    inlined_schema = _inline_references({**schema, "title": ", ".join(names)}, schema.get("$defs", {}))
    return _describe_defaults(inlined_schema, settings())


def _inline_references(node: Any, definitions: Mapping[str, Any]) -> Any:
    """Return a schema with its references inlined, since the server's forms do not resolve them."""
    if isinstance(node, list):
        return [_inline_references(child_node, definitions) for child_node in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline_references(definitions[node["$ref"].removeprefix(_DEFINITION_PREFIX)], definitions)
    return {name: _inline_references(value, definitions) for name, value in node.items() if name != "$defs"}


def _describe_defaults(schema: Mapping[str, Any], settings: Any) -> dict[str, Any]:
    """Return the schema of a table, which forbids unknown settings and describes the defaults."""
    described_properties: dict[str, Any] = {}
    field_comments = parse_field_comments(type(settings))
    for name, property_schema in schema["properties"].items():
        default_value = getattr(settings, name)
        if is_dataclass(default_value) and "properties" in property_schema:
            described_properties[name] = _describe_defaults(property_schema, default_value)
        else:
            default_text = f"by default {json.dumps(default_value, default=_convert_default_to_json)}"
            described_properties[name] = {
                **property_schema,
                "description": "; ".join(filter(None, (field_comments.get(name), default_text))),
            }
            described_properties[name].pop("default", None)
    schema_header = {name: schema[name] for name in ("title", "type")}
    return {**schema_header, "properties": described_properties, "additionalProperties": False}


def _convert_default_to_json(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


class _ObjectiveForm:
    """Builds the JSON schema of a form on demand, since reading all comments takes long."""

    def __get_pydantic_json_schema__(self, *_: Any) -> dict[str, Any]:
        """Return the schema of the settings of all objectives."""
        return build_form_schema(list_objectives())


RecipeTables = Annotated[dict[str, dict[str, Any]] | None, _ObjectiveForm()]
if TYPE_CHECKING:
    KindName = str
else:
    KindName = Literal[list_objective_names()]  # only registered names, for help and forms


KindParameter = Annotated[KindName, Parameter(help=_OBJECTIVES_HELP)]
RecipeTablesParameter = Annotated[
    RecipeTables,
    create_file_option(read_toml, "A TOML file of settings; omitted ones keep their defaults.", "--training"),
]
