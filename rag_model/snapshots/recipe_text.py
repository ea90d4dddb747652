"""A manifest's recipe as TOML for `read_recipe`, from which the snapshot can be rebuilt."""

from collections.abc import Mapping
from typing import Any

import tomli_w


def recipe_text(recipe: Mapping[str, Any]) -> str:
    """Return the recipe section of a manifest's content as TOML.

    >>> print(recipe_text({"part_bytes": None, "chunk": {"words": 100}, "index": {"a": {"factory": "HNSW8"}}}))
    [chunk]
    words = 100
    <BLANKLINE>
    [index.a]
    factory = "HNSW8"
    <BLANKLINE>
    """
    return tomli_w.dumps(given(recipe))


def given(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe without None values, also in nested tables: TOML has no None, and None is the default."""
    return {
        name: given(value) if isinstance(value, Mapping) else value
        for name, value in recipe.items()
        if value is not None
    }
