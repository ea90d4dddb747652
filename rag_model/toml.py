"""TOML files, and their tables as frozen dataclasses: every key and type is checked, with one sentence per error."""

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rag_model.errors import InputError, UsageError

T = TypeVar("T")
_WRITTEN_AS: dict[Any, type] = {float: int, Path: str}  # the TOML type that is also accepted for a Python type


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a recipe file.

    Raises:
        InputError: the file is missing or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as missing:
        raise InputError(f"cannot read the recipe {path}: {missing.strerror}") from missing
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as broken:
        raise InputError(f"the recipe {path} is not TOML: {broken}") from broken


def from_table(kind: type[T], table: Any, where: str) -> T:
    """Make a dataclass from a TOML table; omitted keys keep their defaults.

    `where` names the table in error messages: `recipe.toml, [chunk]`.

    Raises:
        UsageError: a key is unknown, a value is of the wrong type, or the dataclass refuses it.
    """
    if not isinstance(table, Mapping):
        raise UsageError(f"{where} must be a table of settings, not {table!r}")
    hints = get_type_hints(kind)
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise UsageError(f"{where} has no setting {key!r}: {_nearest(key, known)}")
        values[key] = _checked(hints[key], value, f"{where}, {key}")
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise UsageError(f"{where} lacks {field.name!r}: every such table needs one")
    try:
        return kind(**values)
    except (TypeError, ValueError) as wrong:
        raise UsageError(f"{where} is not usable: {wrong}") from wrong


def _nearest(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, 1)
    return f"did you mean {near[0]!r}?" if near else f"it knows {', '.join(known)}"


def _checked(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return from_table(hint, value, where)  # type: ignore[arg-type]
    if origin in (UnionType, Union):
        return _checked(next(kind for kind in arguments if kind is not type(None)), value, where)
    if origin is Literal:
        if value not in arguments:
            raise UsageError(f"{where} is {value!r}: choose one of {', '.join(map(str, arguments))}")
        return value
    if isinstance(origin, type):
        return _items(origin, arguments, value, where)
    if hint is float and isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{where} is {value}: give a finite number")
    if type(value) is _WRITTEN_AS.get(hint):
        return hint(value)
    if hint is not Any and isinstance(hint, type) and type(value) is not hint:
        raise UsageError(f"{where} must be {_article(hint)}, not {value!r}")
    return value


def _items(origin: type, arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    """Check a table whose keys are free, or a list, item by item; a list becomes a tuple where the type is one."""
    if issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise UsageError(f"{where} must be a table, not {value!r}")
        return {name: _checked(arguments[1], inner, f"{where}.{name}") for name, inner in value.items()}
    if not isinstance(value, list | tuple):
        raise UsageError(f"{where} must be a list, not {value!r}")
    return tuple(_checked(arguments[0], one, f"{where}, item {place}") for place, one in enumerate(value, start=1))


def _article(kind: type) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Path: "a path"}
    return names.get(kind, kind.__name__)
