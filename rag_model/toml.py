"""Read TOML files, and convert tables of TOML or JSON to dataclasses; check every key and type."""

import difflib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rag_model.errors import UsageError

T = TypeVar("T")
# The TOML type that a field accepts besides its own type, by the field's Python type.
_ACCEPTED_TYPES: dict[Any, type] = {float: int, Path: str}


def read_toml(path: Path) -> dict[str, Any]:
    """Read the tables of a TOML file, such as a recipe or the settings of a training.

    Raises:
        UsageError: The file is missing or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}): check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML ({error}): correct it, and save it as UTF-8") from error
    except RecursionError as error:
        raise UsageError(f"{path} has tables or lists that are nested too deeply: correct it") from error


def from_table(dataclass_type: type[T], table: Any, where: str) -> T:
    """Build a dataclass from a table of TOML or JSON; omitted keys keep their defaults.

    It also accepts the JSON of `dataclasses.asdict`. `where` names the table in error messages:
    `recipe.toml, [chunk]`.

    Raises:
        UsageError: A key is unknown, a value has the wrong type, or the dataclass rejects it.
    """
    if not isinstance(table, Mapping):
        raise UsageError(f"{where} must be a table of settings, not {quote_value(table)}")
    hints = _get_type_hints(dataclass_type)  # type: ignore[arg-type]
    field_names = [field.name for field in fields(dataclass_type)]  # type: ignore[arg-type]
    settings: dict[str, Any] = {}
    for key, value in table.items():
        if key not in field_names:
            raise UsageError(f"{where} has no setting {key!r}: {_suggest_key(key, field_names)}")
        settings[key] = _check_value(hints[key], value, f"{where}, {key}")
    for field in fields(dataclass_type):  # type: ignore[arg-type]
        if field.name not in settings and field.default is MISSING and field.default_factory is MISSING:
            raise UsageError(f"{where} lacks {field.name!r}: every such table needs one")
    try:
        return dataclass_type(**settings)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where} is not usable: {error}") from error


@cache
def _get_type_hints(dataclass_type: type) -> dict[str, Any]:
    return get_type_hints(dataclass_type)


def _suggest_key(key: str, field_names: list[str]) -> str:
    matches = difflib.get_close_matches(key, field_names, 1)
    return f"did you mean {matches[0]!r}?" if matches else f"choose from {', '.join(field_names)}"


def _check_value(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return from_table(hint, value, where)  # type: ignore[arg-type]
    if origin in (UnionType, Union):
        member = type(value) if type(value) in arguments else next(hint for hint in arguments if hint is not type(None))
        return None if value is None and type(None) in arguments else _check_value(member, value, where)
    if origin is Literal:
        if value not in arguments:
            raise UsageError(f"{where} is {quote_value(value)}: choose one of {', '.join(map(str, arguments))}")
        return value
    if isinstance(origin, type):
        return _check_items(origin, arguments, value, where)
    if hint is float and isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{where} is {value}: give a finite number")
    if type(value) is _ACCEPTED_TYPES.get(hint):
        return hint(value)
    if hint is not Any and isinstance(hint, type) and type(value) is not hint:
        raise UsageError(f"{where} must be {_describe_type(hint)}, not {quote_value(value)}")
    return value


def _check_items(origin: type, arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    """Check a table with arbitrary keys or a list, item by item; lists become tuples."""
    if issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise UsageError(f"{where} must be a table, not {quote_value(value)}")
        return {name: _check_value(arguments[1], item, f"{where}.{name}") for name, item in value.items()}
    if not isinstance(value, list | tuple):
        raise UsageError(f"{where} must be a list, not {quote_value(value)}")
    hints = arguments if origin is tuple and arguments[-1] is not Ellipsis else arguments[:1] * len(value)
    if len(value) != len(hints):
        raise UsageError(f"{where} must be a list of {len(hints)} items, not {quote_value(value)}")
    return tuple(
        _check_value(hint, item, f"{where}, item {position}")
        for position, (hint, item) in enumerate(zip(hints, value, strict=True), start=1)
    )


def _describe_type(python_type: type) -> str:
    type_descriptions = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Path: "a path"}
    return type_descriptions.get(python_type, python_type.__name__)


def quote_value(value: Any) -> str:
    """Format a value for an error message: lists and truth values as in TOML, a text in quotes.

    >>> quote_value(["a", True]), quote_value("a")
    ('["a", true]', "'a'")
    """
    return repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
