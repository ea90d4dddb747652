"""Will it fit? The indexes of a build, resolved and weighed before a single passage is encoded."""

from collections.abc import Mapping, Sequence

from rag_model.build.content import Facts
from rag_model.errors import InputError
from rag_model.index.choice import fitted
from rag_model.index.recipe import IndexPlan, IndexRecipe, resolve


def plan_indexes(
    recipes: Mapping[str, IndexRecipe], passages: Sequence[Facts], dim: int, memory_bytes: int | None
) -> dict[str, IndexPlan]:
    """Return what each recipe comes to for the passages that were cut, (n, dim) vectors.

    `memory_bytes` is what a worker has; None where that is not known here.

    Raises:
        InputError: there are no passages.
        UsageError: a factory does not fit.
        ResourceError: a build would not fit in memory; the sentence names a factory that would.
    """
    rows = [cut["rows"] for cut in passages]
    if not any(rows):
        raise InputError("the dump came to no passages at all: look at what was dropped, and why")
    if memory_bytes is None:
        return {name: resolve(recipe, sum(rows), dim) for name, recipe in recipes.items()}
    return {name: fitted(recipe, sum(rows), dim, memory_bytes, max(rows)) for name, recipe in recipes.items()}
