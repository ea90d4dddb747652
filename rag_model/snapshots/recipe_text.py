"""A recipe as the TOML that `read_recipe` reads: what a manifest keeps, written so that it rebuilds its snapshot."""

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
    """Return a recipe without what is None, in tables of tables too: TOML has no None, and it is such a default."""
    return {
        name: given(value) if isinstance(value, Mapping) else value
        for name, value in recipe.items()
        if value is not None
    }
