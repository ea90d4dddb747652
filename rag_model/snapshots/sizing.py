"""Will it fit? The indexes of a build, resolved and weighed before a single passage is encoded."""

from collections.abc import Mapping, Sequence

from rag_model.errors import InputError
from rag_model.index.recipe import IndexPlan, IndexRecipe, resolve
from rag_model.index.sizing.choice import fitted
from rag_model.index.sizing.estimate import estimate
from rag_model.snapshots.cut_part import CutPart
from rag_model.snapshots.heritage import steady
from rag_model.snapshots.parent import Parent


def plan_indexes(
    recipes: Mapping[str, IndexRecipe],
    passages: Sequence[CutPart],
    dim: int,
    memory_bytes: int | None,
    parent: Parent | None = None,
) -> dict[str, IndexPlan]:
    """Return what each recipe comes to for the passages that were cut, (n, dim) vectors.

    `memory_bytes` is what a worker has; None where that is not known here. As many cells as the parent has are kept
    while they will do.

    Raises:
        InputError: there are no passages.
        UsageError: a factory does not fit.
        ResourceError: a build would not fit in memory; the sentence names a factory that would.
    """
    rows = [cut.rows for cut in passages]
    if not any(rows):
        raise InputError("the dump came to no passages at all: look at what was dropped, and why")
    plans = {}
    for name, recipe in recipes.items():
        if memory_bytes is None:
            plan = resolve(recipe, sum(rows), dim)
        else:
            plan = fitted(recipe, sum(rows), dim, memory_bytes, max(rows))
        kept = steady(recipe, plan, parent or Parent(), name)
        fits = memory_bytes is None or estimate(kept, max(rows)).build_bytes <= memory_bytes
        plans[name] = kept if fits else plan
    return plans
