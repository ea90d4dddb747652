"""The form of a training's settings in the Prefect UI, which the server checks before a run starts.

Each objective's settings are one choice of the form. A default is shown in the description of its setting and is not
sent: some depend on the model, such as the temperature on the length of the encoder's vectors.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from pydantic import PydanticUserError, TypeAdapter

from rag_model.training.objectives.objective import Objective
from rag_model.training.settings_text import comments_of

_DEFINED = "#/$defs/"


def form_of(objectives: Iterable[Objective[Any]]) -> dict[str, Any]:
    """Return the JSON schema of the tables of any of these objectives, or null; choices are titled by name."""
    shared: dict[type[Any], list[str]] = {}
    for one in objectives:
        shared.setdefault(one.settings, []).append(one.name)
    return {"anyOf": [*(_form(settings, names) for settings, names in shared.items()), {"type": "null"}]}


def _form(settings: type[Any], names: list[str]) -> dict[str, Any]:
    try:
        schema = TypeAdapter(settings).json_schema()
    except PydanticUserError:  # a package's type without a form: its tables are entered as JSON
        return {"title": ", ".join(names), "type": "object"}
    whole = _inlined({**schema, "title": ", ".join(names)}, schema.get("$defs", {}))
    return _described(whole, settings())


def _inlined(node: Any, defined: Mapping[str, Any]) -> Any:
    """Return a schema with its references replaced: the server's forms cannot refer to our definitions."""
    if isinstance(node, list):
        return [_inlined(one, defined) for one in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(defined[node["$ref"].removeprefix(_DEFINED)], defined)
    return {name: _inlined(value, defined) for name, value in node.items() if name != "$defs"}


def _described(schema: Mapping[str, Any], settings: Any) -> dict[str, Any]:
    """Return the schema of a table: unknown settings are refused, and defaults are described but not filled in."""
    properties: dict[str, Any] = {}
    said = comments_of(type(settings))
    for name, one in schema["properties"].items():
        value = getattr(settings, name)
        if is_dataclass(value) and "properties" in one:
            properties[name] = _described(one, value)
        else:
            default = f"by default {json.dumps(value, default=_as_json)}"
            properties[name] = {**one, "description": "; ".join(filter(None, (said.get(name), default)))}
            properties[name].pop("default", None)
    kept = {name: schema[name] for name in ("title", "type")}
    return {**kept, "properties": properties, "additionalProperties": False}


def _as_json(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)
