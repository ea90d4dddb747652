"""A recipe as the TOML that `read_recipe` reads: what a manifest keeps, written so that it rebuilds its snapshot."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def recipe_text(recipe: Mapping[str, Any]) -> str:
    """Return the recipe section of a manifest's content as TOML; what is None is left out, as its default is None.

    >>> print(recipe_text({"part_bytes": None, "chunk": {"words": 100}, "index": {"a": {"factory": "HNSW8"}}}))
    [chunk]
    words = 100
    <BLANKLINE>
    [index.a]
    factory = "HNSW8"
    <BLANKLINE>
    """
    tables = {name: value for name, value in recipe.items() if isinstance(value, Mapping)}
    for table in ("represent", "index"):
        tables |= {f"{table}.{_key(name)}": settings for name, settings in tables.pop(table, {}).items()}
    top = _settings({name: value for name, value in recipe.items() if not isinstance(value, Mapping)})
    blocks = ["".join(top), *(f"[{name}]\n{''.join(_settings(settings))}" for name, settings in tables.items())]
    return "\n".join(block for block in blocks if block)


def _settings(values: Mapping[str, Any]) -> Iterator[str]:
    return (f"{_key(name)} = {_value(value)}\n" for name, value in values.items() if value is not None)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(name)} = {_value(kept)}" for name, kept in value.items() if kept is not None)
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _value(name)
